"""What a draft head is: `LanternDraftConfig`, and how it follows from the configuration of a target.

Configurations in, configurations out; this file knows no weights and no model.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.activations import ACT2FN
from transformers.utils import logging

logger = logging.get_logger(__name__)

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
# Smallest and largest value of each size. The largest are far above any head that makes sense: a config is a file from
# somebody else, and must not ask for more memory than a machine has. Zero stands for a derived value.
_SIZES = {
    "format_version": (1, 2**16),
    "hidden_size": (1, 2**16),
    "intermediate_size": (1, 2**18),
    "num_attention_heads": (1, 2**10),
    "num_key_value_heads": (0, 2**10),
    "num_hidden_layers": (1, 64),
    "head_dim": (0, 2**12),
    "target_hidden_size": (0, 2**16),
}
_OPTIONAL_SIZES = {"target_vocab_size": (1, 2**24), "codebook_size": (2, 2**24), "prefix_length": (0, 2**20)}
_NUMBERS = {
    "rms_norm_eps": (0.0, 1.0),
    "rope_theta": (1.0, 1e12),
    "attention_dropout": (0.0, 1.0),
    "initializer_range": (0.0, 100.0),
}
_FLAGS = ("qk_norm", "input_layernorm", "fc_bias", "attention_bias", "mlp_bias")
_DTYPES = ("float64", "float32", "float16", "bfloat16")
# Keys of transformers that a head's file may hold.
_BASE_KEYS = {"architectures", "dtype", "torch_dtype", "transformers_version"}
_SILENT_KEYS = {"model_type", "auto_map"} | PretrainedConfig().to_dict().keys()
_MAX_SIDE, _MAX_ROTARY = 2**12, 2**26  # codes a side of an image; elements of the 2-D rotary table


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
        lantern_version: Release of lantern_hf that saved the head, for the record.

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
    lantern_version: str | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build from the values of a file, as `PretrainedConfig.from_dict` does, but read known keys only.

        transformers acts on many keys that a head has no use for: one makes it build a table of any size, another
        download code. Keys that are not known here are dropped with a warning, so that heads of a later release load.

        Args:
            config_dict: Values of `config.json`.
            **kwargs: As in transformers.

        Raises:
            ValueError: It is the config of another model, or a value is out of range.
        """
        if not isinstance(config_dict, dict) or config_dict.get("model_type") != cls.model_type:
            found = config_dict.get("model_type") if isinstance(config_dict, dict) else type(config_dict).__name__
            raise ValueError(f"This is no draft head: `model_type` is {_short(found)}, not {cls.model_type!r}.")
        known = cls.__annotations__.keys() | _BASE_KEYS
        if unknown := sorted(str(key) for key in config_dict.keys() - known - _SILENT_KEYS):
            logger.warning(f"A draft head's config holds {_short(unknown)}, which this lantern_hf does not know.")
        values = {key: value for key, value in config_dict.items() if key in known}
        for key in ("dtype", "torch_dtype"):
            if values.get(key) is not None and str(values[key]).removeprefix("torch.") not in _DTYPES:
                raise ValueError(f"`{key}` must be one of {list(_DTYPES)}, got {_short(values[key])}.")
        return super().from_dict(values, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse values that give no head, and fill in derived ones."""
        for name in ("num_key_value_heads", "head_dim", "target_hidden_size"):
            setattr(self, name, getattr(self, name) or 0)
        self._check_version()
        self._check_values()
        self._check_descriptions()
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        self.grid = list(self.grid) if isinstance(self.grid, tuple) else self.grid
        super().__post_init__(**kwargs)
        self._check_heads()
        self._check_rope()

    def _check_version(self) -> None:
        """Refuse a format this library does not know."""
        if isinstance(self.format_version, int) and self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"This draft head has `format_version` {self.format_version}, this lantern_hf reads up to "
                f"{FORMAT_VERSION}. Upgrade it: pip install -U lantern_hf."
            )

    def _check_values(self) -> None:
        """Refuse numbers and flags of another type or out of range."""
        given = {name: bounds for name, bounds in _OPTIONAL_SIZES.items() if getattr(self, name) is not None}
        for name, (low, high) in (_SIZES | given).items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"`{name}` must be a whole number in [{low}, {high}], got {_short(value)}.")
        for name, (lowest, highest) in _NUMBERS.items():
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or not lowest <= value <= highest:
                raise ValueError(f"`{name}` must be a number in [{lowest:g}, {highest:g}], got {_short(value)}.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be true or false, got {_short(getattr(self, name))}.")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(
                f"`hidden_act` must be an activation of transformers, got {_short(self.hidden_act)}. Try 'silu'."
            )

    def _check_descriptions(self) -> None:
        """Refuse a target or default settings that are described in another form."""
        if not isinstance(self.target_model_type, str | None):
            raise ValueError(f"`target_model_type` must be a string, got {_short(self.target_model_type)}.")
        if not isinstance(self.lantern_version, str | None):
            raise ValueError(f"`lantern_version` must be a string, got {_short(self.lantern_version)}.")
        for name in ("verifier", "lantern_config"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, dict) and all(isinstance(key, str) for key in value)):
                raise ValueError(f"`{name}` must be a dict, got {_short(value)}.")
        target = self.verifier or {}
        architectures = target.get("architectures") or []
        if not isinstance(target.get("name_or_path"), str | None) or not (
            isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
        ):
            raise ValueError(
                "`verifier` must be {'name_or_path': a string, 'architectures': a list of strings}, got "
                f"{_short(self.verifier)}."
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
        if self.head_dim < 2:
            raise ValueError(
                f"`hidden_size` must be at least twice `num_attention_heads`, got {self.hidden_size} and "
                f"{self.num_attention_heads}."
            )

    def _check_rope(self) -> None:
        """Refuse a rotary embedding without its geometry."""
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"`rope_type` must be one of {list(ROPE_TYPES)}, got {_short(self.rope_type)}.")
        if self.rope_type == "2d" and (self.grid is None or self.prefix_length is None):
            raise ValueError(
                f"`rope_type='2d'` needs `grid` and `prefix_length`, got {self.grid} and {self.prefix_length}. "
                "Take the target's, for example grid=[16, 16], prefix_length=120 for LlamaGen at 256 px."
            )
        self._check_grid()

    def _check_grid(self) -> None:
        """Refuse an image that is none, or whose rotary table fills a machine."""
        if self.grid is None:
            return
        sides = [side for side in self.grid if type(side) is int] if isinstance(self.grid, list) else []
        if len(sides) != 2 or len(self.grid) != 2 or not all(1 <= side <= _MAX_SIDE for side in sides):
            raise ValueError(
                f"`grid` must be [height, width], whole numbers in [1, {_MAX_SIDE}], got {_short(self.grid)}."
            )
        size = (sides[0] * sides[1] + (self.prefix_length or 0)) * self.head_dim
        if self.rope_type == "2d" and size > _MAX_ROTARY:
            raise ValueError(
                f"`grid` {self.grid}, `prefix_length` {self.prefix_length} and `head_dim` {self.head_dim} give a "
                f"rotary table of {size} elements, at most {_MAX_ROTARY} are allowed."
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


def _short(value: Any) -> str:
    """Show a value in an error, cut to a length one can read."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first(config: Any, *names: str) -> Any:
    """Give the first of these attributes that is set, None if none is."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


AutoConfig.register(LanternDraftConfig.model_type, LanternDraftConfig, exist_ok=True)
