"""What a draft head is: `LanternDraftConfig`, and how it follows from the configuration of a target.

Configurations in, configurations out; this file knows no weights and no model.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig

FORMAT_VERSION = 1
ROPE_TYPES = ("1d", "2d")
# Geometry a head shares with its target, by the head's field names; `None` in a head is not checked.
GEOMETRY_FIELDS = (
    "target_model_type",
    "target_hidden_size",
    "target_vocab_size",
    "codebook_size",
    "grid",
    "prefix_length",
)


class LanternDraftConfig(PretrainedConfig):
    """Geometry of a draft head and of the target it belongs to.

    Args:
        hidden_size: Width H of the head: of the token embeddings it reads and of what the target's lm head reads.
        intermediate_size: Width of the MLP.
        num_attention_heads: Query heads.
        num_key_value_heads: Key and value heads; 0 is as many as query heads.
        num_hidden_layers: Decoder layers.
        head_dim: Dimension of one head; 0 is `hidden_size // num_attention_heads`.
        rms_norm_eps: Epsilon of the RMSNorm layers.
        hidden_act: Activation of the MLP.
        rope_theta: Base of the rotary embedding.
        rope_type: `"1d"` (Llama, Chameleon) or `"2d"` (LlamaGen, see `lantern_hf.models.rotary`).
        grid: Image size in tokens `[h, w]`, for `rope_type="2d"`.
        prefix_length: Positions before the image *in the target*, for `rope_type="2d"`. The published LlamaGen drafters
            count one less because they number by hidden state; see `LanternDraftModel` on positions.
        prefix_rotation: `"zero"` (as published) or `"identity"`, for `rope_type="2d"`.
        qk_norm: Normalise queries and keys per head (Chameleon).
        input_layernorm: Whether the first layer normalises its input; later layers always do.
        fc_bias: Whether the projection of `[embedding; hidden state]` has a bias.
        attention_bias: Whether the attention projections have one.
        mlp_bias: Whether the MLP has one.
        attention_dropout: Dropout of attention weights in training.
        initializer_range: Standard deviation of untrained weights.
        target_hidden_size: Width of the target hidden states the head reads; 0 is `hidden_size`.
        target_vocab_size: Vocabulary of the target.
        target_model_type: `model_type` of the target.
        codebook_size: Entries of the target's image codebook, None if it has none.
        verifier: `{"name_or_path": ..., "architectures": [...]}` of the target it was trained for.
        lantern_config: Default decoding settings, keyword arguments of `LanternConfig`.
        format_version: Version of this format.

    Raises:
        ValueError: A value is out of range, or the format is newer than this library.
    """

    model_type = "lantern_draft"

    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_attention_heads: int = 16
    num_key_value_heads: int = 0
    num_hidden_layers: int = 1
    head_dim: int = 0
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    rope_theta: float = 10000.0
    rope_type: str = "1d"
    grid: list[int] | None = None
    prefix_length: int | None = None
    prefix_rotation: str = "zero"
    qk_norm: bool = False
    input_layernorm: bool = False
    fc_bias: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    initializer_range: float = 0.02
    target_hidden_size: int = 0
    target_vocab_size: int | None = None
    target_model_type: str | None = None
    codebook_size: int | None = None
    verifier: dict[str, Any] | None = None
    lantern_config: dict[str, Any] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in derived values and refuse those that give no head."""
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.grid = None if self.grid is None else [int(side) for side in self.grid]
        super().__post_init__(**kwargs)
        self._check_version()
        self._check_heads()
        self._check_rope()

    def _check_version(self) -> None:
        """Refuse a format this library does not know."""
        if self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"This draft head has `format_version` {self.format_version}, this lantern_hf reads up to "
                f"{FORMAT_VERSION}. Upgrade it: pip install -U lantern_hf."
            )

    def _check_heads(self) -> None:
        """Refuse heads that do not group."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads`, got {self.num_attention_heads} "
                f"and {self.num_key_value_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for a rotary embedding, got {self.head_dim}.")
        if self.num_hidden_layers < 1:
            raise ValueError(f"`num_hidden_layers` must be at least 1, got {self.num_hidden_layers}.")

    def _check_rope(self) -> None:
        """Refuse a rotary embedding without its geometry."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"`rope_type` must be one of {list(ROPE_TYPES)}, got {self.rope_type!r}.")
        if self.rope_type == "2d" and (self.grid is None or self.prefix_length is None):
            raise ValueError(
                f"`rope_type='2d'` needs `grid` and `prefix_length`, got {self.grid} and {self.prefix_length}. "
                "Take the target's, for example grid=[16, 16], prefix_length=120 for LlamaGen at 256 px."
            )


def target_geometry(target_config: PretrainedConfig) -> dict[str, Any]:
    """Read from a target's configuration what a head must agree with.

    Args:
        target_config: `model.config` of the target.

    Returns:
        Values by the names in `GEOMETRY_FIELDS`; None where the target has no such thing.
    """
    text = target_config.get_text_config()
    vq = getattr(target_config, "vq_config", None)
    if target_config.model_type == "llamagen":
        codebook_size = text.codebook_size
    else:
        codebook_size = _first(vq, "num_embeddings", "codebook_size")
    grid = getattr(target_config, "grid_size", None)
    return {
        "target_model_type": target_config.model_type,
        "target_hidden_size": text.hidden_size,
        "target_vocab_size": text.vocab_size,
        "codebook_size": codebook_size,
        "grid": list(grid) if isinstance(grid, Sequence) else None,
        "prefix_length": getattr(target_config, "prefix_length", None),
    }


def head_config_from(target_config: PretrainedConfig, **overrides: Any) -> LanternDraftConfig:
    """Give the configuration of a one-layer head for a target.

    LlamaGen gets its 2-D rotary embedding, Chameleon its per-head q/k norms and an input norm, every other target a
    Llama layer without input norm (EAGLE-1, arXiv 2401.15077).

    Args:
        target_config: `model.config` of the target.
        **overrides: Fields of `LanternDraftConfig`, or `attn_implementation`.

    Returns:
        The configuration, with the target's geometry and name.

    Raises:
        TypeError: An override is no field of `LanternDraftConfig`.
        ValueError: The values give no head.
    """
    known = {field.name for field in dataclasses.fields(LanternDraftConfig)} | {"attn_implementation"}
    if unknown := sorted(overrides.keys() - known):
        raise TypeError(f"{unknown} are no fields of LanternDraftConfig. Allowed: {sorted(known)}.")
    text = target_config.get_text_config()
    values: dict[str, Any] = target_geometry(target_config) | {
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_attention_heads": text.num_attention_heads,
        "num_key_value_heads": getattr(text, "num_key_value_heads", None),
        "head_dim": getattr(text, "head_dim", None),
        "rms_norm_eps": getattr(text, "rms_norm_eps", LanternDraftConfig.rms_norm_eps),
        "rope_theta": _rope_theta(text),
        "verifier": {"name_or_path": target_config._name_or_path, "architectures": target_config.architectures},
    }
    if target_config.model_type == "llamagen":
        values |= {"rope_type": "2d", "prefix_rotation": getattr(target_config, "prefix_rotation", "zero")}
    elif target_config.model_type == "chameleon":
        values |= {"qk_norm": True, "input_layernorm": True}
    return LanternDraftConfig(**(values | overrides))


def _rope_theta(text_config: PretrainedConfig) -> float:
    """Read the base of the rotary embedding under its new or old name."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_theta" in parameters:
        return float(parameters["rope_theta"])
    return float(_first(text_config, "rope_theta") or LanternDraftConfig.rope_theta)


def _first(config: Any, *names: str) -> Any:
    """Give the first of these attributes that is set, None if none is."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


AutoConfig.register(LanternDraftConfig.model_type, LanternDraftConfig, exist_ok=True)
