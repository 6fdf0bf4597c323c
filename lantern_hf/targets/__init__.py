"""Targets: one adapter per family behind one protocol. `adapter_for` picks it; the decoding loop never asks which."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.targets.base import Prefill, TargetAdapter
from lantern_hf.targets.causal_lm import CausalLMAdapter
from lantern_hf.targets.chameleon import ChameleonAdapter
from lantern_hf.targets.llamagen import LlamaGenAdapter

__all__ = ["ADAPTERS", "Prefill", "TargetAdapter", "adapter_class", "adapter_for", "check_target"]

# The first that matches serves; the general one comes last.
ADAPTERS: tuple[type[TargetAdapter], ...] = (LlamaGenAdapter, ChameleonAdapter, CausalLMAdapter)

_REASONS = {"imagegpt": "its forward flattens a 4-D attention mask, so that a tree would be misread silently"}


def adapter_class(model: PreTrainedModel) -> type[TargetAdapter]:
    """Give the adapter class that serves a model.

    Raises:
        ValueError: No family serves it.
    """
    check_target(model)
    for adapter in ADAPTERS:
        if adapter.matches(model):
            return adapter
    raise ValueError(
        f"{type(model).__name__} is served by no target family ({', '.join(a.family for a in ADAPTERS)}). Tree "
        "decoding needs a decoder-only model with an output layer; see docs/concepts.md."
    )


def adapter_for(model: PreTrainedModel, input_ids: Tensor | None = None) -> TargetAdapter:
    """Make the adapter of a model for one call.

    Args:
        model: The target.
        input_ids: Prompts of the call, `(B, S)` int64.

    Raises:
        ValueError: No family serves the model, or its prompts ask for different things.
    """
    return adapter_class(model)(model, input_ids)


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
    text = config.get_text_config()
    kinds = sorted(set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"})
    if kinds:
        raise ValueError(
            f"{name} has layers of type {', '.join(kinds)}; only full attention can keep an arbitrary path of a tree "
            "in its cache. Use its own `generate`."
        )
