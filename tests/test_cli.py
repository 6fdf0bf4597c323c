"""`lantern-hf generate` on a tiny random pipeline, in process."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest
from command_line import call, check_refused
from pipelines import tiny_class_pipeline, tiny_pipeline

import lantern_hf
from lantern_hf.cli.files import image_paths, write_all

TOKENS = 64


def size(path: Path) -> tuple[int, int]:
    with PIL.Image.open(path) as image:
        return image.size


def test_default_file(model: str, work: Path) -> None:
    result = call("generate", "red fox", "--model", model)
    assert result.exit_code == 0, result.stderr
    assert size(work / "lantern.png") == (16, 16)
    assert "target passes instead of 63" in result.stdout
    assert "Saved lantern.png" in result.stdout
    assert [path.name for path in work.iterdir()] == ["lantern.png"]


def test_compare_with_report(model: str, work: Path) -> None:
    options = ("--num-images", 2, "--seed", 5, "--out", "made/here", "--report", "made/report.json", "--scale", 3)
    result = call("generate", "red fox", "blue bird", "--model", model, "--compare", *options)
    assert result.exit_code == 0, result.stderr
    report = json.loads((work / "made/report.json").read_text())
    files = [f"made/here/lantern-{number}.png" for number in (1, 2, 3, 4)]
    assert [(image["file"], image["seed"]) for image in report["images"]] == list(zip(files, (5, 6, 7, 8), strict=True))
    assert size(work / files[3]) == (3 * (16 + 4 + 16), 3 * 16)
    lantern, plain = report["results"]["lantern"], report["results"]["plain"]
    assert plain["target_passes"] == report["plain_passes"] == 2 * (TOKENS - 1)
    assert lantern["tokens"] == plain["tokens"] == 4 * TOKENS
    assert report["ratio"]["target_passes"] == pytest.approx(plain["target_passes"] / lantern["target_passes"])
    assert (report["model"], report["device"], report["dtype"]) == (model, "cpu", "float32")
    assert report["versions"]["lantern_hf"] == lantern_hf.__version__
    for figure in (
        f"{lantern['tokens_per_pass']:.2f}",
        f"{lantern['seconds']:.2f}",
        f"{report['ratio']['seconds']:.2f}x",
    ):
        assert figure in result.stdout


def test_a_seed_gives_the_same_image_wherever_it_stands(model: str, work: Path) -> None:
    assert call("generate", "red fox", "--model", model, "--seed", 1, "--out", "one.png").exit_code == 0
    both = ("--num-images", 2, "--seed", 0, "--out", "both.png", "--strict")
    assert call("generate", "red fox", "--model", model, *both).exit_code == 0
    assert call("generate", "red fox", "--model", model, "--seed", 1, "--out", "two.png", "--strict").exit_code == 0
    assert (work / "two.png").read_bytes() == (work / "both-2.png").read_bytes()


def test_decoding_options_reach_the_config(model: str, work: Path) -> None:
    options = ("--tree", "narrow_8", "--delta", 0.2, "--neighborhood-size", 3, "--guidance-scale", 1, "--top-k", 9)
    result = call("generate", "red fox", "--model", model, *options, "--temperature", 0.9, "--report", "r.json")
    assert result.exit_code == 0, result.stderr
    settings = json.loads((work / "r.json").read_text())["settings"]
    config = settings.pop("lantern_config")
    assert (config["tree"], config["delta"], config["lam"], config["neighborhood_size"]) == ("narrow_8", 0.2, None, 3)
    assert (settings["guidance_scale"], settings["top_k"], settings["temperature"]) == (1, 9, 0.9)


def test_classes_and_models_without_head(work: Path) -> None:
    tiny_class_pipeline().save_pretrained(work / "classes")
    assert call("generate", "3", "--model", "classes", "--dtype", "bfloat16").exit_code == 0
    assert "must be the number of one, got 'fox'" in call("generate", "fox", "--model", "classes").stderr
    tiny_pipeline(head=False).save_pretrained(work / "plain")
    assert "one token a pass" in call("generate", "red fox", "--model", "plain").stdout
    assert "no draft head" in call("generate", "red fox", "--model", "plain", "--compare").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing argument"),
        (("red", "--batch-size", "2"), "--batch-size goes with --prompts"),
        (("",), "has 0 tokens"),
        (("red fox", "a red fox a blue bird a"), "has 7 tokens"),
        (("red", "--tree", "nope"), "'nope' is not a preset"),
        (("red", "--lam", "2", "--delta", "0.1"), "two rules"),
        (("red", "--lam", "0.5"), "`lam` must be"),
        (("red", "--lam", "abc"), "'--lam'"),
        (("red", "--num-images", "0"), "'--num-images'"),
        (("red", "--strict", "--lam", "2"), "--strict and --lam exclude each other"),
        (("red", "--guidance-scale", "0"), "`guidance_scale` must be"),
        (("red", "--temperature", "0"), "`temperature` must be"),
        (("red", "--out", "file/x.png"), "--out cannot be written"),
        (("red", "--out", "x.txt"), "--out must end in"),
        (("red", "--report", "file/r.json"), "--report cannot be written"),
        (("red", "--report", "."), "is a folder"),
        (("red", "--device", "nope"), "--device 'nope' cannot be used"),
        (("red", "--model", "./nowhere"), "does not exist"),
        (("red", "--model", "someone/nothing"), "cannot be loaded"),
        (("red", "--model", "."), "no model_index.json"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    model: str, work: Path, arguments: tuple[str, ...], message: str
) -> None:
    (work / "file").touch()
    named = () if "--model" in arguments else ("--model", model)
    result = call("generate", *arguments, *named)
    check_refused(result, message)
    assert [path.name for path in work.iterdir()] == ["file"]


def test_the_default_model_is_the_embedded_one(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lantern_hf.assets.__file__", str(work / "__init__.py"))
    result = call("generate", "red fox")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "embedded model is not in" in result.stderr


def test_help_and_version() -> None:
    assert "generate" in call().stdout
    assert call("--version").stdout.strip() == f"lantern-hf {lantern_hf.__version__}"
    assert call("generate", "--help").exit_code == 0


def test_file_names(tmp_path: Path) -> None:
    assert image_paths(tmp_path, 1) == [tmp_path / "lantern.png"]
    assert image_paths(Path("new"), 2) == [Path("new/lantern-1.png"), Path("new/lantern-2.png")]
    assert image_paths(Path("a/fox.webp"), 2) == [Path("a/fox-1.webp"), Path("a/fox-2.webp")]


def test_all_files_or_none(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_all({tmp_path / "a.png": lambda path: path.write_text("whole") and None, tmp_path / "b.png": fail})
    assert list(tmp_path.iterdir()) == []
