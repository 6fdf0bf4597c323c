"""The draft head's configuration: read from targets, refused when it gives no head."""

import pytest
from transformers import ChameleonConfig, LlamaConfig

from lantern_hf.draft_config import LanternDraftConfig, head_config_from


def test_geometry_of_families():
    class LlamaGenConfig(LlamaConfig):
        model_type = "llamagen"
        grid_size: list[int] | None = None
        prefix_length: int = 0
        prefix_rotation: str = "zero"

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    head = head_config_from(LlamaGenConfig(**sizes, grid_size=[4, 6], prefix_length=5, prefix_rotation="identity"))
    assert (head.rope_type, head.grid, head.prefix_length, head.prefix_rotation) == ("2d", [4, 6], 5, "identity")
    assert (head.codebook_size, head.qk_norm, head.input_layernorm) == (64, False, False)
    head = head_config_from(ChameleonConfig(**sizes, num_key_value_heads=4, vq_config={"num_embeddings": 17}))
    assert (head.rope_type, head.qk_norm, head.input_layernorm, head.codebook_size) == ("1d", True, True, 17)


def test_config_errors():
    with pytest.raises(ValueError, match="`rope_type` must be one of"):
        LanternDraftConfig(rope_type="3d")
    with pytest.raises(ValueError, match="needs `grid` and `prefix_length`"):
        LanternDraftConfig(rope_type="2d", grid=[4, 4])
    with pytest.raises(ValueError, match="multiple of `num_key_value_heads`"):
        LanternDraftConfig(num_attention_heads=4, num_key_value_heads=3)
    with pytest.raises(ValueError, match="`format_version` 99"):
        LanternDraftConfig(format_version=99)
    with pytest.raises(ValueError, match="`num_hidden_layers` must be at least 1"):
        LanternDraftConfig(num_hidden_layers=0)
