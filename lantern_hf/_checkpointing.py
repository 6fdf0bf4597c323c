"""Gradient checkpointing under every supported transformers: its newer name, and the caches that older ones drop."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from lantern_hf.cache import CACHE_KEYWORD


def set_checkpointing(model: PreTrainedModel, on: bool) -> None:
    """Turn the recomputation of a model's layers in the backward pass on or off.

    Raises:
        ValueError: The model knows no checkpointing.
    """
    prefix = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{prefix}_checkpointing_{'enable' if on else 'disable'}")()


def checkpointed_layers(model: PreTrainedModel) -> list[GradientCheckpointingLayer]:
    """Layers that are computed again in the backward pass."""
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    return [layer for layer in layers if layer.gradient_checkpointing]


def check_checkpointing(model: PreTrainedModel) -> None:
    """Refuse a model whose layers would throw the cache away.

    Raises:
        ValueError: A layer is in training mode with gradient checkpointing, under a transformers that then drops the
            cache even where no gradient is asked for. The model's own `generate` gives other tokens there too.
    """
    if any(layer.training for layer in checkpointed_layers(model)) and _drops_caches():
        raise ValueError(
            f"This {type(model).__name__} is in training mode with gradient checkpointing, where transformers "
            f"{transformers.__version__} drops the cache that decoding needs. Call model.eval() first, or use "
            "transformers 5.24 or newer, which keeps it."
        )


@functools.cache
def _drops_caches() -> bool:
    """Whether a checkpointed layer in training loses its cache where no gradient is asked for, as before 5.24."""

    class Layer(GradientCheckpointingLayer):
        """Gives back the cache that reaches it."""

        def forward(self, **kwargs: Any) -> Any:
            return kwargs[CACHE_KEYWORD]

    layer: Any = Layer()
    layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, lambda call: call()
    with torch.no_grad():
        return layer(**{CACHE_KEYWORD: DynamicCache()}) is None
