"""Where the parts of a model run, and how to reach what accelerate or diffusers keeps elsewhere between calls.

The only file that knows accelerate's hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from accelerate.hooks import CpuOffload
from accelerate.utils import align_module_device
from torch import Tensor, nn


def execution_device(module: nn.Module) -> torch.device:
    """Give the device a module computes on, also while its weights are on none.

    Args:
        module: Any part of a model.

    Returns:
        The execution device of the first hook in it, else the device of its first weight, else the CPU.
    """
    for part in module.modules():
        for hook in _hooks(part):
            device = getattr(hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    first = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None or first.is_meta else first.device


def input_device(target: Any) -> torch.device:
    """Give the device of a target's embedding, where its prompts belong."""
    return _moved_to(target) or execution_device(target.get_input_embeddings())


def last_layer_device(target: Any) -> torch.device:
    """Give the device of a target's last decoder layer, where its draft head belongs."""
    layers = getattr(target.get_decoder(), "layers", None)
    return _moved_to(target) or execution_device(target if layers is None else layers[-1])


def is_moved_as_a_whole(model: Any) -> bool:
    """Whether a hook moves a model to its device when it is called, and away again when another is."""
    return _moved_to(model) is not None


def _moved_to(model: Any) -> torch.device | None:
    """Where a hook moves a model as a whole, None where there is no such hook."""
    for hook in _hooks(model):
        if isinstance(hook, CpuOffload):
            return torch.device(hook.execution_device)
    return None


def read_weight(module: nn.Module) -> Tensor:
    """Give a module's weight; a copy where it is fetched from disk or the CPU for each call."""
    weight: Any = module.weight
    if not weight.is_meta:
        return weight.detach()
    with align_module_device(module):
        weight = module.weight
        return weight.detach().clone()


def wake(model: nn.Module) -> None:
    """Move a model to its device if a hook would do so when it is called; decoding calls its parts instead.

    That is `accelerate.cpu_offload_with_hook`, and `enable_model_cpu_offload` of diffusers.
    """
    for hook in _hooks(model):
        if isinstance(hook, CpuOffload):
            hook.pre_forward(model)


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of one module, those of a sequence one by one."""
    hook = getattr(module, "_hf_hook", None)
    yield from getattr(hook, "hooks", () if hook is None else (hook,))
