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
    with pytest.raises(ValueError, match=r"`num_hidden_layers` must be a whole number in \[1, 64\], got 0"):
        LanternDraftConfig(num_hidden_layers=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "wide"}, r"`hidden_size` must be a whole number in \[1, 65536\], got 'wide'"),
        ({"hidden_size": 10**12}, "`hidden_size` must be a whole number"),
        ({"hidden_size": 1024.0}, r"got 1024\.0"),
        ({"num_attention_heads": 0}, r"in \[1, 1024\], got 0"),
        ({"num_key_value_heads": True}, "got True"),
        ({"hidden_size": 8, "num_attention_heads": 16}, "at least twice `num_attention_heads`, got 8 and 16"),
        ({"codebook_size": 10**10}, "`codebook_size` must be a whole number"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a number"),
        ({"fc_bias": "yes"}, "`fc_bias` must be true or false"),
        ({"hidden_act": ["silu"]}, "`hidden_act` must be an activation"),
        ({"verifier": "a/b"}, "`verifier` must be a dict"),
        ({"verifier": {"name_or_path": 3}}, "`verifier` must be {"),
        ({"lantern_config": [1]}, "`lantern_config` must be a dict"),
        ({"format_version": "1"}, "`format_version` must be a whole number"),
        ({"grid": "16"}, r"`grid` must be \[height, width\]"),
        ({"grid": [16, 10**9]}, r"`grid` must be \[height, width\], whole numbers in \[1, 4096\]"),
        ({"rope_type": "2d", "grid": [4096, 4096], "prefix_length": 0}, "rotary table of 1073741824 elements"),
        ({"target_model_type": 7}, "`target_model_type` must be a string"),
        ({"hidden_act": "x" * 10_000}, r"got 'x{76}\.\.\."),
    ],
)
def test_values_of_another_type_or_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        LanternDraftConfig(**fields)
