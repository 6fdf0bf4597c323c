"""LlamaGen: the published model's numbers, and `generate` with prefix conditioning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration, convert_published_state_dict

GOLDEN = Path(__file__).parent / "golden"


def golden_model(attn_implementation: str = "sdpa") -> LlamaGenForConditionalGeneration:
    raw = json.loads((GOLDEN / "llamagen_target_config.json").read_text())
    config = LlamaGenConfig(
        codebook_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_attention_heads=raw["num_attention_heads"],
        num_hidden_layers=raw["num_hidden_layers"],
        caption_dim=raw["caption_dim"],
        prefix_length=raw["cls_token_num"],
        grid_size=[4, 4],
        attn_implementation=attn_implementation,
    )
    model = LlamaGenForConditionalGeneration(config).eval()
    model.load_state_dict(convert_published_state_dict(load_file(GOLDEN / "llamagen_target.safetensors"), config))
    return model


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_reproduces_the_published_model(attn_implementation: str) -> None:
    model = golden_model(attn_implementation)
    io = load_file(GOLDEN / "llamagen_target_io.safetensors")
    prefix = model.config.prefix_length
    input_ids = torch.cat([model.caption_ids(2), io["input_ids"].long()], dim=1)
    with torch.no_grad():
        output = model(
            input_ids, attention_mask=io["attention_mask"], caption_embeds=io["cond_idx"], output_hidden_states=True
        )
    assert input_ids.shape[1] == prefix + 16
    kept = io["attention_mask"].bool()
    codes = output.logits[..., : model.config.codebook_size]
    assert (codes - io["logits"])[kept].abs().max() < 1e-4
    assert (output.hidden_states[-1] - io["last_hidden_state"])[kept].abs().max() < 1e-4


def tiny_class_model() -> LlamaGenForConditionalGeneration:
    torch.manual_seed(0)
    config = LlamaGenConfig(
        codebook_size=16,
        grid_size=[3, 4],
        conditioning="class",
        num_classes=5,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.4,
    )
    return LlamaGenForConditionalGeneration(config).eval()


def test_cached_steps_equal_one_pass_and_positions_are_columns() -> None:
    model = golden_model()
    features = torch.randn(2, 6, model.config.caption_dim, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    inputs = {"attention_mask": mask, "caption_embeds": features}
    out = model.generate(
        input_ids=model.caption_ids(2),
        **inputs,
        do_sample=False,
        max_new_tokens=16,
        output_logits=True,
        return_dict_in_generate=True,
    )
    full_mask = torch.nn.functional.pad(mask, (0, 16), value=1)
    with torch.no_grad():
        logits = model(out.sequences, attention_mask=full_mask, caption_embeds=features).logits
    assert out.sequences[:, 6:].max() < model.config.codebook_size
    for step, step_logits in enumerate(out.logits):
        assert (step_logits - logits[:, 5 + step]).abs().max() < 1e-4


def test_guidance_of_transformers_runs_on_the_unconditional_prefix() -> None:
    model = golden_model()
    features = torch.randn(1, 6, model.config.caption_dim, generator=torch.Generator().manual_seed(1))
    out = model.generate(
        input_ids=model.caption_ids(1),
        caption_embeds=features,
        negative_prompt_ids=model.unconditional_ids(1),
        guidance_scale=3.0,
        do_sample=False,
        max_new_tokens=1,
        output_scores=True,
        return_dict_in_generate=True,
    )
    with torch.no_grad():
        conditional = model(model.caption_ids(1), caption_embeds=features).logits[:, -1].log_softmax(-1)
        unconditional = model(model.unconditional_ids(1)).logits[:, -1].log_softmax(-1)
    expected = unconditional + 3 * (conditional - unconditional)
    codes = slice(model.config.codebook_size)
    assert torch.allclose(out.scores[0][:, codes], expected[:, codes], atol=1e-4)


def test_class_conditional_prefix() -> None:
    model = tiny_class_model()
    labels = torch.tensor([[16 + 0], [16 + 4], [model.config.uncond_token_id]])
    assert model.config.prefix_length == 1
    assert model.config.vocab_size == 16 + 6
    sequences = model.generate(input_ids=labels, do_sample=False, max_new_tokens=12)
    assert sequences.shape == (3, 13)
    assert sequences[:, 1:].max() < 16
    with torch.no_grad():
        logits = model(labels).logits
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert (logits[..., 16:] == torch.finfo(torch.float32).min).all()


def test_a_prefix_of_one_position_is_not_taken_for_a_code() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaGenConfig(codebook_size=16, grid_size=[2, 2], prefix_length=1, caption_dim=8, **sizes)
    model = LlamaGenForConditionalGeneration(config).eval()
    ids, positions = model.unconditional_ids(1), torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        embeds = model.model.embed(ids, positions)
        learned = model.model.prefix()
    assert torch.equal(embeds[0], learned)


def test_saves_and_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = golden_model()
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is LlamaGenForConditionalGeneration
    assert again.config.grid_size == [4, 4]
    for (name, old), (other, new) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(old, new)


def test_published_names_do_not_load_unconverted(tmp_path: Path) -> None:
    model = golden_model()
    with pytest.raises(RuntimeError, match="cls_embedding"):
        model.load_state_dict(load_file(GOLDEN / "llamagen_target.safetensors"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"conditioning": "image"}, "`conditioning` must be"),
        ({"prefix_rotation": "half"}, "`prefix_rotation` must be"),
        ({"grid_size": [4]}, "`grid_size` must be"),
        ({"grid_size": [4, 0]}, "`grid_size` must be"),
    ],
)
def test_config_refuses(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaGenConfig(**settings)


def test_features_that_do_not_fit_are_refused() -> None:
    model = golden_model()
    with pytest.raises(ValueError, match="features of width 24"):
        model(model.caption_ids(1), caption_embeds=torch.zeros(1, 6, 7))
    with pytest.raises(ValueError, match="6 columns"):
        model(model.caption_ids(1), caption_embeds=torch.zeros(1, 9, 24))
