"""Targets: one adapter per family behind one protocol. `adapter_for` picks it; the decoding loop never asks which."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.targets.base import Prefill, TargetAdapter
from lantern_hf.targets.registry import adapters, register_target, unregister_target

FAMILY_KEY = "lantern_family"
"""Entry of a model's configuration that names its family where the class does not tell; it is saved with the model."""

__all__ = [
    "FAMILY_KEY",
    "Prefill",
    "TargetAdapter",
    "adapter_class",
    "adapter_for",
    "adapters",
    "check_target",
    "register_target",
    "unregister_target",
]

# By model type: what keeps a tree, or an image, from coming out right.
_REASONS = {
    "imagegpt": "its forward flattens a 4-D attention mask, so that a tree would be misread silently",
    "apertus1p5": "it reads images but makes none: its vision tokenizer has no decoder, and its output layer only text",
}


def adapter_class(model: PreTrainedModel, family: str | None = None) -> type[TargetAdapter]:
    """Give the adapter class that serves a model.

    Args:
        model: The target.
        family: Name of the adapter, where the model alone does not tell. Default: what its configuration says under
            `lantern_family`, or the first that matches.

    Raises:
        ValueError: No family serves it, or there is none of that name.
    """
    check_target(model)
    family = family or getattr(model.config, FAMILY_KEY, None)
    known = adapters()
    names = ", ".join(adapter.family for adapter in known)
    for adapter in known:
        if family is None and adapter.matches(model):
            return adapter
        if adapter.family == family:
            _check_model_type(adapter, model)
            return adapter
    if family is not None:
        raise ValueError(
            f"`family` must be one of {names}, got {family!r}. Leave it out to let the model tell, or register an "
            "adapter of that name with lantern_hf.register_target."
        )
    raise ValueError(
        f"{type(model).__name__} is served by no target family ({names}). Tree decoding needs a decoder-only model "
        "with an output layer; see docs/concepts.md."
    )


def _check_model_type(adapter: type[TargetAdapter], model: PreTrainedModel) -> None:
    """Refuse a family named for a model of another kind."""
    kind = model.config.model_type
    if adapter.model_types and kind not in adapter.model_types:
        raise ValueError(
            f"The family {adapter.family!r} serves models of type {', '.join(adapter.model_types)}, but this "
            f"{type(model).__name__} is of type {kind}. Leave `family` out to let the model tell."
        )


def adapter_for(
    model: PreTrainedModel, input_ids: Tensor | None = None, *, family: str | None = None, **options: Any
) -> TargetAdapter:
    """Make the adapter of a model for one call.

    Args:
        model: The target.
        input_ids: Prompts of the call, `(B, S)` int64.
        family: Name of the adapter; default: the one that matches the model.
        **options: Options of the family.

    Raises:
        ValueError: No family serves the model, it has no such option, or its prompts ask for different things.
    """
    chosen = adapter_class(model, family)
    parameters = inspect.signature(chosen.__init__).parameters.values()
    known = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    if unknown := sorted(options.keys() - set(known)):
        allowed = ", ".join(map(repr, ["family", *known]))
        raise ValueError(
            f"`target_options` has {', '.join(map(repr, unknown))}, which the family {chosen.family!r} does not know. "
            f"Its options are {allowed}."
        )
    return chosen(model, input_ids, **options)


def check_target(model: PreTrainedModel) -> None:
    """Refuse models that cannot score a tree.

    Raises:
        ValueError: An encoder-decoder, a model with sliding or linear attention, or one known to misread tree masks.
    """
    name, config = type(model).__name__, model.config
    if reason := _REASONS.get(config.model_type):
        raise ValueError(f"{name} cannot be decoded with a tree: {reason}. Use its own `generate`.")
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder; tree decoding serves decoder-only models. Use its own `generate`."
        )
    if getattr(type(model), "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, as linear attention does, which cannot go back to an arbitrary path of a "
            "tree. Use its own `generate`."
        )
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        raise ValueError(
            f"{name} has layers of type {', '.join(kinds)}; only full attention can keep an arbitrary path of a tree "
            "in its cache. Use its own `generate`."
        )
