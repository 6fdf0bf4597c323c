"""Models inside the wrappers of other libraries: PEFT, `torch.compile`, several processes."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


def unwrap(model: Any) -> PreTrainedModel:
    """Give the transformers model inside a wrapper: PEFT's, torch.compile's, or one for several processes.

    Raises:
        TypeError: There is none.
        ValueError: PEFT rewrites its prompts.
    """
    while not isinstance(model, PreTrainedModel):
        config = getattr(model, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"{type(config).__name__} puts learned tokens before the prompt inside PEFT's own `generate`, where "
                "the draft head cannot read them. Use an adapter of the weights, such as LoRA."
            )
        parts = model._modules if isinstance(model, torch.nn.Module) else {}
        inner = model.get_base_model() if config is not None else parts.get("_orig_mod", parts.get("module"))
        if inner is None:
            raise TypeError(
                f"`model` must be a transformers model, got {type(model).__name__}. Pass the one whose `generate` you "
                "call."
            )
        model = inner
    return model
