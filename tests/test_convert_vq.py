"""VQ models and Chameleon checkpoints without one: they convert, equal the recorded pixels, and decode."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import tiny_chameleon, tiny_head
from diffusers import VQModel
from published import folder, golden, training_file
from test_vq import full_weights
from transformers import ChameleonForConditionalGeneration

from lantern_hf import LanternConfig, lantern_generate
from lantern_hf.convert import convert
from lantern_hf.models.vq import chameleon_vq, decode_codes, encode_pixels, has_encoder, llamagen_vq

FAMILIES = {"llamagen": llamagen_vq, "chameleon": chameleon_vq}
FILES = {"llamagen": ("vq_ds16_t2i.pt", "model"), "chameleon": ("vqgan.ckpt", "state_dict")}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder(family: str, tmp_path: Path) -> None:
    name, wrapper = FILES[family]
    weights = golden(f"{family}_vq")
    leftovers = {"loss.discriminator.main.0.weight": torch.zeros(2), "quantize.codebook_used": torch.zeros(4).long()}
    report = convert(training_file(tmp_path / name, weights | leftovers, wrapper), tmp_path / "out", verify=True)
    assert report.ignored == dict.fromkeys(leftovers, "training leftover")
    assert report.facts["encoder"].startswith("not in the file")
    assert report.max_error is not None
    assert report.max_error < 1e-4
    vq, io = VQModel.from_pretrained(tmp_path / "out"), golden(f"{family}_vq_io")
    image = decode_codes(vq, io["codes"].view(1, 4, 4))
    assert (image - io["image"]).abs().max() < 1e-4
    assert not has_encoder(vq)
    expected = FAMILIES[family](weights).state_dict()
    found = vq.state_dict()
    assert all(torch.equal(found[key].nan_to_num(7.0), value.nan_to_num(7.0)) for key, value in expected.items())
    decoder = [value for key, value in found.items() if not key.startswith(("encoder.", "quant_conv."))]
    assert not any(bool(value.isnan().any()) for value in decoder)


@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_and_decoder(family: str, tmp_path: Path) -> None:
    weights, _ = full_weights(f"{family}_vq")
    name, wrapper = FILES[family]
    report = convert(training_file(tmp_path / name, weights, wrapper), tmp_path / "out", verify=True)
    assert "encoder" not in report.facts
    assert report.facts["codes"] == f"64 of dimension {weights['quantize.embedding.weight'].shape[1]}"
    vq, expected = VQModel.from_pretrained(tmp_path / "out"), FAMILIES[family](weights)
    assert all(torch.equal(vq.state_dict()[key], value) for key, value in expected.state_dict().items())
    pixels = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    codes = encode_pixels(vq, pixels)
    assert torch.equal(codes, encode_pixels(expected, pixels))
    assert decode_codes(vq, codes).shape == pixels.shape


def test_a_smaller_dtype_verifies_against_rounded_weights(tmp_path: Path) -> None:
    source = training_file(tmp_path / "vq_ds16_c2i.pt", golden("llamagen_vq"))
    report = convert(source, tmp_path / "out", dtype=torch.bfloat16, verify=True)
    assert report.max_error is not None
    assert report.max_error < 1e-4
    assert VQModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16).dtype == torch.bfloat16


def without_vq(path: Path, form: str) -> tuple[Path, ChameleonForConditionalGeneration]:
    """A checkpoint as Lumina-mGPT's, and the model it should become."""
    model = tiny_chameleon()
    weights = {key: value for key, value in model.state_dict().items() if not key.startswith("model.vqmodel.")}
    config = model.config.to_dict() | {"architectures": ["ChameleonXLLMXForConditionalGeneration"]}
    return folder(path, weights, config, form), model


def vqgan(path: Path, model: ChameleonForConditionalGeneration) -> Path:
    """Meta's file for that model: encoder, codebook, and a decoder that transformers has no place for."""
    weights = {key: value for key, value in model.model.vqmodel.state_dict().items()}
    decoder = {key: value for key, value in golden("chameleon_vq").items() if key.startswith("decoder.")}
    return training_file(path, weights | decoder | {"loss.perceptual.weight": torch.zeros(2)}, "state_dict")


@pytest.mark.parametrize("form", ["sharded safetensors", "bin"])
def test_a_chameleon_without_vq_is_completed(form: str, tmp_path: Path) -> None:
    source, model = without_vq(tmp_path / "lumina", form)
    vq = vqgan(tmp_path / "vqgan.ckpt", model)
    report = convert(source, tmp_path / "out", vq=vq, verify=True)
    assert report.max_error == 0.0
    loaded = ChameleonForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    expected = model.state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in loaded.state_dict().items())
    inputs = {"input_ids": torch.tensor([[0, 40, 3]]), "max_new_tokens": 12, "do_sample": False}
    config = LanternConfig(tree="narrow_8", lam=2.0, neighborhood_size=4)
    drawn = [
        target.generate(**inputs, custom_generate=lantern_generate, assistant=tiny_head(target), lantern_config=config)
        for target in (loaded, model)
    ]
    assert torch.equal(*drawn)


def test_a_chameleon_in_torch_files_becomes_safetensors(tmp_path: Path) -> None:
    model = tiny_chameleon()
    source = folder(tmp_path / "anole", model.state_dict(), model.config.to_dict(), "sharded bin")
    convert(source, tmp_path / "out", verify=True, max_shard_size="50KB")
    loaded = ChameleonForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_what_transformers_loads_is_left_to_it(tmp_path: Path) -> None:
    model = tiny_chameleon()
    source = folder(tmp_path / "anole", model.state_dict(), model.config.to_dict(), "safetensors")
    with pytest.raises(ValueError, match=r"Nothing is to be converted: ChameleonForConditionalGeneration\.from_pretr"):
        convert(source, tmp_path / "out")
    lumina, _ = without_vq(tmp_path / "lumina", "safetensors")
    with pytest.raises(ValueError, match=r"codebook transformers would make up.*Pass --vq"):
        convert(lumina, tmp_path / "out")
    with pytest.raises(ValueError, match=r"without `encoder\.\*`"):
        convert(lumina, tmp_path / "out", vq=training_file(tmp_path / "half.ckpt", golden("chameleon_vq")))
    with pytest.raises(ValueError, match="a checkpoint with its VQ model"):
        convert(source, tmp_path / "out", vq=vqgan(tmp_path / "vqgan.ckpt", model))
    assert not (tmp_path / "out").exists()
