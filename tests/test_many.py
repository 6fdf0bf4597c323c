"""Many prompts to a folder of pictures: what is read, kept, refused and written down."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from command_line import call, check_refused
from pipelines import tiny_class_pipeline, tiny_pipeline

from lantern_hf import ImageRequest, LanternConfig, generate_many, read_requests
from lantern_hf.many.folder import KEYS, PictureFolder
from lantern_hf.many.requests import pictures_of

PIPE = tiny_class_pipeline()


def draw(out: Path, prompts: Any = ("0", "1", "2"), **kwargs: Any) -> Any:
    """Pictures of classes, unguided."""
    return generate_many(PIPE, prompts, out, **{"guidance_scale": 1.0, **kwargs})


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of every picture."""
    return {path.name: path.read_bytes() for path in folder.glob("*.png")}


def write(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_text_files(tmp_path: Path) -> None:
    file = write(tmp_path, "\ufeffa red fox  \r\n\n   \n  blue\u2028bird", "prompts.txt")
    assert read_requests(file) == [
        ImageRequest("a red fox", "00001", None, f"{file}, line 1"),
        ImageRequest("blue\u2028bird", "00004", None, f"{file}, line 4"),
    ]


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt": "fox", "seed": 7, "id": "fox", "tag": "animals"}, {"prompt": "é"}, {"class_label": 3, "id": 12}]
    found = read_requests(write(tmp_path, "\n\n".join(json.dumps(row) for row in rows)))
    assert [(one.prompt, one.id, one.seed) for one in found] == [
        ("fox", "fox", 7),
        ("é", "00003", None),
        ("3", "12", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt"', "line 2: not a JSON object"),
        ("[1]", "line 1: not a JSON object"),
        ("{}", "line 1: needs one of `prompt` and `class_label`"),
        ('{"prompt": "a", "class_label": 1}', "line 1: needs one of"),
        ('{"prompt": ["a"]}', "line 1: `prompt` must be a text"),
        ('{"prompt": "a", "seed": -1}', "line 1: `seed` must be a whole number in"),
        ('{"prompt": "a", "seed": 1.5}', "`seed` must be a whole number in"),
        ('{"prompt": "a", "seed": true}', "`seed` must be a whole number in"),
        ('{"prompt": "a", "id": "../a"}', "line 1: `id` must be up to 100 letters"),
        ('{"prompt": "a", "id": ".a"}', "`id` must be"),
        ('{"prompt": "a", "id": null}', "`id` must be"),
    ],
)
def test_lines_that_are_no_prompt(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match="prompts.jsonl") as error:
        read_requests(write(tmp_path, text))
    assert message in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_requests(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match="line 1: this is JSON in a text file"):
        read_requests(write(tmp_path, '{"prompt": "a"}', "a.txt"))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"is not UTF-8 text \(byte 3\)"):
        read_requests(tmp_path / "latin.txt")


def test_names_and_seeds() -> None:
    requests = [ImageRequest("a", "00001"), ImageRequest("b", "x", 5)]
    two = pictures_of(requests, 2, seed=0)
    assert [picture.file for picture in two] == ["00001.png", "00001-2.png", "x.png", "x-2.png"]
    assert [picture.seed for picture in two[2:]] == [5, 6]
    # A seed follows from the run's, the id and the number alone.
    three, other = pictures_of(requests[:1], 3, seed=0), pictures_of(requests[:1], 1, seed=1)
    assert three[:2] == two[:2]
    assert len({picture.seed for picture in (*three, *other)}) == 4
    assert two[0].seed == int.from_bytes(hashlib.blake2b(b"0 00001 1", digest_size=4).digest(), "big")
    clash = [ImageRequest("a", "Fox", source="line 1"), ImageRequest("b", "fox", source="line 2")]
    with pytest.raises(ValueError, match=r"line 2: fox.png is also a picture of line 1. Give one of them another `id`"):
        pictures_of(clash, 1, seed=0)
    with pytest.raises(ValueError, match=r"a-2.png is also a picture of a\."):
        pictures_of([ImageRequest("a", "a"), ImageRequest("b", "a-2")], 2, seed=0)


def test_a_picture_depends_on_its_seed_alone(tmp_path: Path) -> None:
    report = draw(tmp_path / "one", num_images=2, batch_size=1, scale=2)
    draw(tmp_path / "all", num_images=2, batch_size=4, scale=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "all")
    assert len(set(contents(tmp_path / "one").values())) == 6
    entry = report.pictures[3]
    assert (entry["id"], entry["image"], entry["file"], entry["prompt"]) == ("00002", 2, "00002-2.png", "1")
    generator = torch.Generator().manual_seed(entry["seed"])
    output = PIPE(class_labels=1, generator=generator, guidance_scale=1.0)
    image = output.images[0].resize((16, 16), PIL.Image.Resampling.LANCZOS)
    with PIL.Image.open(tmp_path / "one/00002-2.png") as saved:
        assert saved.tobytes() == image.tobytes()
    assert (entry["tokens"], entry["passes"]) == (16, output.stats.passes)
    assert entry["tokens_per_pass"] == pytest.approx(15 / output.stats.passes)


def test_the_manifest_and_the_report(tmp_path: Path) -> None:
    report = draw(tmp_path, lantern_config={"tree": "narrow_8", "lam": 2.0}, temperature=0.9)
    lines = [json.loads(line) for line in (tmp_path / "manifest.jsonl").read_text().splitlines()]
    assert lines == report.pictures
    assert set(lines[0]) == set(KEYS)
    for line in lines:
        assert line["sha256"] == hashlib.sha256((tmp_path / line["file"]).read_bytes()).hexdigest()
        settings = line["settings"]
        assert (settings["lantern_config"]["tree"], settings["temperature"], settings["top_k"]) == ("narrow_8", 0.9, 0)
        assert (settings["dtype"], settings["scale"], len(settings["model"])) == ("float32", 1, 16)
    assert report.files == [tmp_path / f"0000{number}.png" for number in (1, 2, 3)]
    assert (report.drawn, report.tokens, report.processes) == (3, 48, 1)
    assert report.passes == sum(line["passes"] for line in lines)
    assert report.tokens_per_pass == pytest.approx(45 / report.passes)
    assert 0 < report.seconds <= report.wall_seconds
    assert json.loads(json.dumps(report.to_dict()))["kept"] == 0


def test_going_on(tmp_path: Path) -> None:
    draw(tmp_path, ["0", "1"])
    (tmp_path / "00001.png").write_bytes(b"damaged")
    (tmp_path / "notes.txt").write_text("mine")
    kept = (tmp_path / "00002.png").stat().st_mtime_ns
    report = draw(tmp_path, ["0", "1", "2"], num_images=2, batch_size=3)  # further prompts, further pictures of each
    assert (report.drawn, len(report.pictures)) == (5, 6)
    assert (tmp_path / "00002.png").stat().st_mtime_ns == kept
    draw(tmp_path / "whole", ["0", "1", "2"], num_images=2)
    assert contents(tmp_path) == contents(tmp_path / "whole")
    fewer = draw(tmp_path, ["0"])
    assert (fewer.drawn, len(fewer.pictures)) == (0, 1)
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) == 6  # the others are still listed
    (tmp_path / "00003.png").unlink()
    assert draw(tmp_path).drawn == 1
    assert contents(tmp_path) == contents(tmp_path / "whole")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ["0", "4"]}, "prompt 2: {}/00002.png was drawn with another `prompt` ('1', now '4')"),
        ({"seed": 1}, "another `seed` ("),
        ({"temperature": 0.5}, "another `temperature` (None, now 0.5)"),
        ({"lantern_config": LanternConfig(lam=3.0)}, "another `lantern_config.lam` (2.0, now 3.0)"),
        ({"lantern_config": None}, "another `lantern_config.tree` ('eagle_25', now None)"),
        ({"scale": 2}, "another `scale` (1, now 2)"),
    ],
)
def test_other_pictures_of_the_same_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    draw(tmp_path, ["0", "1"])
    before = contents(tmp_path)
    change = {"prompts": ["0", "1"], **change}
    with pytest.raises(ValueError, match="--overwrite") as error:
        draw(tmp_path, **change)
    assert message.format(tmp_path) in str(error.value)
    assert contents(tmp_path) == before
    report = draw(tmp_path, overwrite=True, **change)
    assert report.drawn == (1 if "4" in change["prompts"] else 2)
    assert draw(tmp_path, **change).drawn == 0


def test_another_model_and_files_of_nobody(tmp_path: Path) -> None:
    draw(tmp_path, ["0"])
    other = tiny_class_pipeline()
    with torch.no_grad():
        other.transformer.get_input_embeddings().weight.add_(0.5)
    with pytest.raises(ValueError, match="another `model`"):
        generate_many(other, ["0"], tmp_path, guidance_scale=1.0)
    with pytest.raises(ValueError, match="another `dtype`"):
        generate_many(other.to(torch.bfloat16), ["0"], tmp_path, guidance_scale=1.0)
    (tmp_path / "00002.png").write_bytes(b"a picture of my cat")
    with pytest.raises(ValueError, match="prompt 2: .*00002.png is there, but in no manifest"):
        draw(tmp_path, ["0", "1"])
    assert (tmp_path / "00002.png").read_bytes() == b"a picture of my cat"
    assert draw(tmp_path, ["0", "1"], overwrite=True).drawn == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompts": []}, ValueError, "`prompts` is empty"),
        ({"prompts": ["0", "5"]}, ValueError, "prompt 2: "),
        ({"prompts": ["0", 3]}, TypeError, "prompt 2: `prompt` must be a text, got 3"),
        ({"num_images": 0}, ValueError, "`num_images` must be"),
        ({"batch_size": True}, ValueError, "`batch_size` must be"),
        ({"temperature": 0.0}, ValueError, "`temperature` must be"),
        ({"lantern_config": "fast"}, ValueError, "`lantern_config` must be"),
        ({"generator": torch.Generator()}, TypeError, "sets `generator` for each picture"),
        ({"nonsense": object()}, TypeError, "plain values"),
    ],
)
def test_refused_at_the_door(tmp_path: Path, arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        draw(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    draw(tmp_path, ["0"])
    for process in (0, 1):  # the main process of another run, and one that outlived its launcher
        other = PictureFolder(tmp_path, process)
        other.open()
        with pytest.raises(OSError, match="Another run is at work in"):
            draw(tmp_path)
        other.close()
    assert draw(tmp_path).drawn == 2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("spoil", [lambda text: text[:-40] + "\n", lambda text: text + "[1]\n"])
def test_a_manifest_that_cannot_be_read(tmp_path: Path, spoil: Callable[[str], str]) -> None:
    draw(tmp_path, ["0"])
    manifest = tmp_path / "manifest.jsonl"
    manifest.write_text(spoil(manifest.read_text()))
    with pytest.raises(ValueError, match=r"manifest.jsonl, line \d is no line of a manifest"):
        draw(tmp_path)


def test_a_manifest_leads_nowhere_else(tmp_path: Path) -> None:
    draw(tmp_path / "out", ["0"])
    manifest = tmp_path / "out/manifest.jsonl"
    manifest.write_text(manifest.read_text().replace("00001.png", "../00001.png"))
    with pytest.raises(ValueError, match="is no line of a manifest"):
        draw(tmp_path / "out")


def test_a_pipeline_without_head(tmp_path: Path) -> None:
    pipe = tiny_pipeline(head=False)
    pipe.set_progress_bar_config(leave=False)
    report = generate_many(pipe, ["red fox"], tmp_path, guidance_scale=1.0)
    assert (report.tokens_per_pass, report.passes) == (1.0, 63)
    assert report.pictures[0]["settings"]["lantern_config"] is None
    assert pipe._progress_bar_config == {"leave": False}
    with pytest.raises(ValueError, match="this pipeline has no draft head"):
        generate_many(pipe, ["red fox"], tmp_path / "other", lantern_config={})


def test_the_command(model: str, work: Path) -> None:
    write(work, '{"prompt": "red fox", "id": "fox", "seed": 3}\n{"prompt": "a bird"}\n')
    options = ("generate", "--model", model, "--prompts", "prompts.jsonl", "--out", "made/here", "--strict")
    result = call(*options, "--report", "made/report.json")
    assert result.exit_code == 0, result.stderr
    report = json.loads((work / "made/report.json").read_text())
    assert result.stdout.splitlines() == [
        "2 images in made/here: 2 drawn now.",
        f"128 tokens in {report['passes']} target passes, {report['tokens_per_pass']:.2f} tokens a pass.",
        f"{report['seconds']:.1f} s of drawing, {report['wall_seconds']:.1f} s for this run.",
    ]
    assert sorted(path.name for path in (work / "made/here").iterdir()) == ["00002.png", "fox.png", "manifest.jsonl"]
    assert (report["model"], report["device"], report["pictures"][0]["seed"]) == (model, "cpu", 3)
    assert call("generate", "red fox", "--model", model, "--strict", "--seed", 3, "--out", "fox.png").exit_code == 0
    assert (work / "fox.png").read_bytes() == (work / "made/here/fox.png").read_bytes()
    again = call(*options)
    assert again.stdout.startswith("2 images in made/here: 0 drawn now, 2 there before.\n")


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ("fox\n\na red fox a blue bird a", (), "prompts.txt, line 3: `prompt` 'a red fox a blue bird a' has 7 tokens"),
        ("fox\n,\n", (), "prompts.txt, line 2: `prompt` ',' is empty"),
        ("", (), "prompts.txt holds no prompt"),
        ("fox", ("red",), "--prompts and PROMPT exclude each other"),
        ("fox", ("--compare",), "--prompts and --compare exclude each other"),
        ("fox", ("--out", "fox.png"), "--out must be a folder"),
        ("fox", ("--out", "prompts.txt"), "is a file"),
        ("fox", ("--report", "."), "is a folder"),
        ("fox", ("--strict", "--lam", "2"), "exclude each other"),
        ("fox", ("--temperature", "0"), "`temperature` must be"),
        ("fox", ("--prompts", "gone.txt"), "gone.txt does not exist"),
    ],
)
def test_the_command_refuses(model: str, work: Path, prompts: str, arguments: tuple[str, ...], message: str) -> None:
    write(work, prompts, "prompts.txt")
    check_refused(call("generate", "--model", model, "--prompts", "prompts.txt", *arguments), message)
    assert [path.name for path in work.iterdir()] == ["prompts.txt"]
