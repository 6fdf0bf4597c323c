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
