"""`lantern-hf convert` in process, from files and from the Hub, single parts and whole pipelines."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import PIL.Image
import pytest
import torch
from diffusers import VQModel
from fake_hub import FakeHub, FakeRepo
from huggingface_hub import constants
from huggingface_hub.utils import httpx
from pipelines import WORDS, tiny_tokenizer
from published import class_conditional, folder, foundation, golden, golden_config, training_file
from transformers import T5Config, T5EncoderModel
from typer.testing import CliRunner, Result

from lantern_hf import LanternDraftModel, LanternPipeline
from lantern_hf.cli import app
from lantern_hf.convert import KINDS, convert, convert_pipeline


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    return folder(tmp_path / "drafter", golden("llamagen_drafter"), golden_config("llamagen_drafter"), "bin")


def vq_file(path: Path) -> Path:
    """A VQ model with as many codes as the recorded target."""
    weights = golden("llamagen_vq")
    codebook = weights["quantize.embedding.weight"]
    return training_file(path, weights | {"quantize.embedding.weight": torch.cat([codebook, codebook.flip(1)])})


def text_encoder(path: Path) -> Path:
    """A T5 of the recorded target's caption width, with a word tokenizer."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=len(WORDS), d_model=24, d_kv=4, d_ff=16, num_layers=1, num_heads=3, eos_token_id=None)
    T5EncoderModel(config).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def test_a_drafter(drafter: Path, tmp_path: Path) -> None:
    result = call(drafter, "--out", tmp_path / "out", "--verify", "--dtype", "bfloat16")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"draft head: {drafter} -> {tmp_path / 'out'}"
    assert "  grid: 16x16 (config.json)" in lines
    assert any(line.startswith("  ignored: embed_tokens.weight (copy of the target's embedding") for line in lines)
    assert lines[-1].startswith("  verified: largest error")
    assert LanternDraftModel.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_options_reach_the_conversion(tmp_path: Path) -> None:
    source = training_file(tmp_path / "t2i.pt", foundation(golden("llamagen_target")))
    options = ("--grid", "2x8", "--heads", 4, "--prefix-length", 6, "--max-shard-size", "100KB", "--kind", "llamagen")
    result = call(source, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.stderr
    assert "  not read: optimizer, steps, args" in result.stdout.splitlines()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["grid_size"], config["prefix_length"], config["num_attention_heads"]) == ([2, 8], 6, 4)
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere.pt",), "'nowhere.pt' does not exist"),
        (("./nowhere",), "does not exist"),
        (("drafter", "--kind", "vae"), "'--kind'"),
        (("drafter", "--kind", "llamagen"), "is of the kind head; expected llamagen"),
        (("drafter", "--grid", "0x4"), "sides from 1 to 256"),
        (("drafter", "--grid", "wide"), "--grid must be a side"),
        (("drafter", "--grid", "8"), "grid 8x8; expected 16x16"),
        (("drafter", "--heads", "0"), "'--heads'"),
        (("drafter", "--target", "./nowhere"), "--target './nowhere' has no configuration"),
        (("drafter", "--pipeline"), "--pipeline needs --vq"),
        (("drafter", "--pipeline", "--vq", "x.pt", "--target", "x"), "--pipeline and --target exclude each other"),
        (("drafter", "--head", "x"), "--head is a part of a pipeline"),
        (("drafter", "--text-encoder", "x"), "--text-encoder is a part of a pipeline"),
        (("drafter", "--max-shard-size", "many"), "`max_shard_size` must be"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[str, ...], message: str, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call(*arguments, "--out", "out")
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("lantern-hf: error: ")
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_every_kind_is_an_option() -> None:
    from lantern_hf.cli.convert_command import Kind

    assert {kind.value for kind in Kind} == {"auto", *KINDS}


def test_a_whole_pipeline(tmp_path: Path) -> None:
    config = {key: value for key, value in golden_config("llamagen_drafter").items() if key != "input_type"}
    head = folder(tmp_path / "drafter", golden("llamagen_drafter"), config, "bin")
    source = folder(tmp_path / "target", golden("llamagen_target"), golden_config("llamagen_target"), "safetensors")
    parts = ("--vq", vq_file(tmp_path / "vq.pt"), "--head", head, "--text-encoder", text_encoder(tmp_path / "t5"))
    result = call(source, "--pipeline", *parts, "--verify", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert [line.split(":")[0] for line in result.stdout.splitlines() if line[0] != " "] == [
        "LlamaGen target",
        "LlamaGen VQ model",
        "draft head",
    ]
    pipe = LanternPipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(tmp_path / "again")
    index, again = (json.loads((tmp_path / name / "model_index.json").read_text()) for name in ("out", "again"))
    again.pop("_name_or_path", None)  # where diffusers loaded it from
    assert index == again | {"_class_name": "LanternPipeline"}
    output = pipe("red fox", generator=torch.Generator().manual_seed(0), guidance_scale=2.0)
    assert output.images[0].size == (8, 8)
    assert 0 < output.stats.passes <= 15
    strict = pipe("red fox", lantern_config={"lam": 1.0}, do_sample=False, output_type="latent").codes
    plain = pipe("red fox", lantern_config=None, do_sample=False, output_type="latent").codes
    assert torch.equal(strict, plain)


def test_a_pipeline_of_converted_parts_and_classes(tmp_path: Path) -> None:
    source = training_file(tmp_path / "c2i.pt", foundation(class_conditional(golden("llamagen_target"))))
    convert(source, tmp_path / "part", grid=4, num_attention_heads=4)
    reports = convert_pipeline(tmp_path / "part", tmp_path / "out", vq=vq_file(tmp_path / "vq.pt"), top_k=20)
    assert [report.kind for report in reports] == ["LlamaGen VQ model"]
    assert reports[0].out == tmp_path / "out" / "vq_model"
    pipe = LanternPipeline.from_pretrained(tmp_path / "out")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.config.top_k == 20
    assert pipe(class_labels=3).images[0].size == (8, 8)


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "examples"))
    import convert_llamagen

    target = golden_config("llamagen_target")
    source = folder(tmp_path / "target", golden("llamagen_target"), target, "safetensors")
    arguments = {"target": source, "vq": vq_file(tmp_path / "vq.pt"), "text_encoder": text_encoder(tmp_path / "t5")}
    plain = {"head": None, "grid": None, "dtype": "auto", "device": "cpu", "seed": 0}
    convert_llamagen.main(Namespace(prompt="red fox", out=tmp_path / "made", **arguments, **plain))
    assert "16 tokens in 15 passes" in capsys.readouterr().out
    with PIL.Image.open(tmp_path / "made.png") as image:
        assert image.size == (8, 8)


def test_parts_that_do_not_fit(tmp_path: Path) -> None:
    source = folder(tmp_path / "target", golden("llamagen_target"), golden_config("llamagen_target"), "safetensors")
    vq = training_file(tmp_path / "vq.pt", golden("llamagen_vq"))
    with pytest.raises(ValueError, match="`vq_model` has 64 codes, the target 128"):
        convert_pipeline(source, tmp_path / "out", vq=vq)
    stage = folder(tmp_path / "drafter", golden("llamagen_drafter"), golden_config("llamagen_drafter"), "bin")
    with pytest.raises(ValueError, match="a head for a grid of 16x16; expected 4x4"):
        convert_pipeline(source, tmp_path / "out", vq=vq_file(tmp_path / "128.pt"), head=stage)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    fake = FakeHub()
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(fake), follow_redirects=True))
    yield fake
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)


def test_from_the_hub(hub: FakeHub, drafter: Path, tmp_path: Path) -> None:
    hub.repos["me/llamagen2_drafter"] = FakeRepo({path.name: path.read_bytes() for path in drafter.iterdir()})
    vq = training_file(tmp_path / "vq.pt", golden("llamagen_vq"))
    hub.repos["me/files"] = FakeRepo({"vq/vq_ds16_t2i.pt": vq.read_bytes()})
    result = call("me/llamagen2_drafter", "--out", tmp_path / "head")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("draft head: me/llamagen2_drafter -> ")
    LanternDraftModel.from_pretrained(tmp_path / "head")
    assert call("me/files/vq/vq_ds16_t2i.pt", "--out", tmp_path / "vq").exit_code == 0
    VQModel.from_pretrained(tmp_path / "vq")
    missing = call("me/nothing", "--out", tmp_path / "other")
    assert (missing.exit_code, missing.stderr.count("\n")) == (2, 1)
