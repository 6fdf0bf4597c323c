"""Draft heads: the published drafters and EAGLE-1 heads convert, equal the recorded outputs, and draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import chameleon_vocabulary
from diffusers import VQModel
from published import folder, golden, golden_config, training_file
from transformers import (
    AutoModel,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lantern_hf import LanternConfig, LanternDraftModel, LlamaGenForConditionalGeneration, lantern_generate
from lantern_hf.convert import convert
from lantern_hf.draft import POSITION_OFFSET
from lantern_hf.models.vq import decode_codes

FORMS = ("safetensors", "bin", "sharded safetensors", "sharded bin")


def load(out: Path) -> LanternDraftModel:
    head = LanternDraftModel.from_pretrained(out).eval()
    assert not any(bool(value.isnan().any()) for value in head.state_dict().values())
    return head


def draft(model: PreTrainedModel, head: LanternDraftModel, config: Any = None, **inputs: Any) -> torch.Tensor:
    return model.generate(
        **inputs,
        custom_generate=lantern_generate,
        assistant=head,
        lantern_config=config or LanternConfig.strict("narrow_8"),
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_llamagen_drafter(form: str, tmp_path: Path) -> None:
    weights = golden("llamagen_drafter")
    source = folder(tmp_path / "in", weights, golden_config("llamagen_drafter"), form)
    report = convert(source, tmp_path / "out", verify=True)
    head, io = load(tmp_path / "out"), golden("llamagen_drafter_io")
    ids = io["input_ids"].long()
    positions = torch.arange(ids.shape[1]).expand_as(ids) + POSITION_OFFSET
    with torch.no_grad():
        output = head(weights["embed_tokens.weight"][ids], io["hidden_states"], positions).last_hidden_state
    assert (output - io["output"]).abs().max() < 1e-5
    assert report.max_error is not None
    assert report.max_error < 1e-4
    assert list(report.ignored) == ["embed_tokens.weight"]
    assert (head.config.grid, head.config.prefix_length) == ([16, 16], 120)
    assert (head.config.target_model_type, head.config.target_vocab_size) == ("llamagen", 130)


def test_round_trip_is_bit_equal(tmp_path: Path) -> None:
    weights = golden("llamagen_drafter")
    source = folder(tmp_path / "in", weights, golden_config("llamagen_drafter"), "bin")
    convert(source, tmp_path / "out")
    head = load(tmp_path / "out")
    head.save_pretrained(tmp_path / "again")
    again = AutoModel.from_pretrained(tmp_path / "again")
    del weights["embed_tokens.weight"]
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(again.state_dict()[key], value) for key, value in weights.items())
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "out" / "config.json").read_text()


def test_the_second_stage_drafter(tmp_path: Path) -> None:
    config = golden_config("llamagen_drafter") | {"input_type": "t2i2"}
    convert(folder(tmp_path / "in", golden("llamagen_drafter"), config, "bin"), tmp_path / "out", verify=True)
    assert load(tmp_path / "out").config.grid == [32, 32]


def test_a_drafter_draws_with_its_target(tmp_path: Path) -> None:
    target = golden_config("llamagen_target") | {"block_size": 256, "cls_token_num": 120}
    convert(folder(tmp_path / "target", golden("llamagen_target"), target, "safetensors"), tmp_path / "model")
    source = folder(tmp_path / "in", golden("llamagen_drafter"), golden_config("llamagen_drafter"), "bin")
    convert(source, tmp_path / "out", target=tmp_path / "model")
    convert(source, tmp_path / "alone")  # and knows the same geometry without it
    model = LlamaGenForConditionalGeneration.from_pretrained(tmp_path / "model").eval()
    features = torch.randn(1, 120, 24, generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": model.caption_ids(1), "caption_embeds": features, "do_sample": False, "max_new_tokens": 20}
    plain = model.generate(**inputs)
    for out in ("out", "alone"):
        assert torch.equal(draft(model, load(tmp_path / out), **inputs), plain)


def chameleon() -> ChameleonForConditionalGeneration:
    """A target of the recorded drafter's width, with 24 image tokens."""
    torch.manual_seed(0)
    vq = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "embed_dim": 4, "latent_channels": 4}
    config = ChameleonConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.3,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=None,
        vocabulary_map=chameleon_vocabulary(),
        vq_config=vq | {"num_embeddings": 24, "resolution": 16},
    )
    return ChameleonForConditionalGeneration(config).eval()


@pytest.mark.parametrize("form", ["safetensors", "sharded bin"])
def test_the_anole_drafter(form: str, tmp_path: Path) -> None:
    weights = golden("anole_drafter")
    config = golden_config("anole_drafter") | {"model_type": "chameleon"}
    report = convert(folder(tmp_path / "in", weights, config, form), tmp_path / "out", verify=True)
    head, io = load(tmp_path / "out"), golden("anole_drafter_io")
    mask = io["attention_mask"].bool()
    with torch.no_grad():
        embeds = weights["embed_tokens.weight"][io["input_ids"].long()]
        output = head(embeds, io["hidden_states"], io["position_ids"].long(), mask).last_hidden_state
    assert (output - io["output"])[mask].abs().max() < 1e-4
    assert report.max_error is not None
    assert report.max_error < 1e-4
    assert (head.config.qk_norm, head.config.input_layernorm) == (True, True)
    model = chameleon()
    codes = draft_image(model, head)
    vq_source = training_file(tmp_path / "vqgan.ckpt", golden("chameleon_vq"), "state_dict")
    convert(vq_source, tmp_path / "vq", kind="chameleon-vq")
    vq = VQModel.from_pretrained(tmp_path / "vq")
    assert decode_codes(vq, codes).shape == (1, 3, 8, 8)


def draft_image(model: ChameleonForConditionalGeneration, head: LanternDraftModel) -> torch.Tensor:
    """Codes `(1, 4, 4)` of an image drawn with neighbours."""
    generated = draft(
        model,
        head,
        LanternConfig(tree="narrow_8", lam=2.0, neighborhood_size=4),
        input_ids=torch.tensor([[0, 40, 3]]),
        do_sample=True,
        max_new_tokens=16,
        generator=torch.Generator().manual_seed(0),
    )
    mapping = model.model.vocabulary_mapping.bpe2img
    return torch.tensor([mapping[int(token)] for token in generated[0, 3:]]).view(1, 4, 4)


def llama(biases: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attention_bias=biases,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("variant", ["plain", "no fc bias", "two layers", "Qwen2 biases", "lm_head"])
def test_an_eagle_1_head_of_a_text_model(variant: str, tmp_path: Path) -> None:
    weights, config = golden("llamagen_drafter"), llama().config.to_dict() | {"num_hidden_layers": 1}
    if variant == "no fc bias":
        del weights["fc.bias"]
    if variant == "two layers":
        second = {key.replace(".0.", ".1."): value for key, value in weights.items() if key.startswith("layers.")}
        weights |= second | {"layers.1.input_layernorm.weight": torch.rand(64) + 0.5}
        config["num_hidden_layers"] = 2
    if variant == "Qwen2 biases":
        weights |= {f"layers.0.self_attn.{name}_proj.bias": torch.randn(64) * 0.1 for name in "qkv"}
    if variant == "lm_head":
        weights["lm_head.weight"] = torch.zeros(128, 64)
    source = folder(tmp_path / "in", weights, config, "bin")
    report = convert(source, tmp_path / "out", verify=True)
    assert report.max_error is not None
    assert report.max_error < 1e-4
    head, target = load(tmp_path / "out"), llama()
    assert (head.config.target_model_type, head.config.target_vocab_size) == ("llama", 128)
    ids = torch.tensor([[1, 5, 9, 70]])
    plain = target.generate(ids, do_sample=False, max_new_tokens=24)
    assert torch.equal(draft(target, head, input_ids=ids, do_sample=False, max_new_tokens=24), plain)


def test_a_bare_file_asks_its_target(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "target")
    source = training_file(tmp_path / "eagle.pt", golden("llamagen_drafter"), None)
    with pytest.raises(ValueError, match=r"no config\.json beside the weights.*pass --target"):
        convert(source, tmp_path / "out")
    report = convert(source, tmp_path / "out", target=tmp_path / "target", verify=True)
    assert report.facts["target"].startswith("llama")
    head = load(tmp_path / "out")
    assert head.config.verifier == {"architectures": ["LlamaForCausalLM"], "name_or_path": None}
    fitting = llama()
    assert head.bind(fitting).target is fitting


@pytest.mark.parametrize(
    ("changes", "weights", "message"),
    [
        ({"block_size": 256}, {}, r"a head for a grid of 16x16; expected 4x4"),
        ({}, {"embed_tokens.weight": torch.zeros(100, 64)}, "embeds 100 tokens in width 64; expected 128 in width 64"),
        (
            {},
            {f"layers.0.self_attn.{n}_norm.{kind}": torch.ones(4, 16) for n in "qk" for kind in ("weight", "bias")},
            "a head with q/k norms; expected one for llamagen",
        ),
    ],
)
def test_another_target_is_refused(
    changes: dict[str, Any], weights: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    target = folder(tmp_path / "target", golden("llamagen_target"), golden_config("llamagen_target"), "bin")
    convert(target, tmp_path / "model")
    config = {key: value for key, value in golden_config("llamagen_drafter").items() if key != "input_type"}
    source = folder(tmp_path / "in", golden("llamagen_drafter") | weights, config | changes, "bin")
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "out", target=tmp_path / "model")
