"""The draft head's configuration: read from targets, refused when it gives no head."""

import pytest
from transformers import ChameleonConfig

from lantern_hf.draft_config import LanternDraftConfig, head_config_from
from lantern_hf.models.configuration_llamagen import LlamaGenConfig


def test_geometry_of_families():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    image = {"codebook_size": 64, "grid_size": [4, 6], "prefix_length": 5, "prefix_rotation": "identity"}
    head = head_config_from(LlamaGenConfig(**sizes, **image))
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
