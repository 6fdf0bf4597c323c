"""Accelerators made of CPU memory: tensors that say they are on `pretend:0`, and refuse operators across devices.

Their values are real, so that a model spread over two of them must give what it gives on one. PyTorch's own rules hold:
copies cross devices, a tensor without dimensions and indices on the CPU go anywhere, all else must be where the rest
is. Taking such a backend in is for good, so it is for a process of its own: `device_driver.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

NAME = "pretend"
FIRST, LAST = f"{NAME}:0", f"{NAME}:1"
_MOVES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten._copy_from.default}
_INDEXES = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_MADE_ON_THE_HOST = (torch.tensor, torch.as_tensor, torch.arange)


class PretendTensor(torch.Tensor):
    """A CPU tensor that says it is elsewhere."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> PretendTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the memory behind its arguments, and say where the result is.

    Raises:
        RuntimeError: The arguments are on several devices.
    """
    tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    anywhere = {id(index) for index in args[1] if index is not None} if func in _INDEXES else set()
    places = {v.device for v in tensors if v.device.type == NAME or (v.ndim and id(v) not in anywhere)}
    if len(places) > 1 and func not in _MOVES:
        raise RuntimeError(f"{func} got tensors on {sorted(map(str, places))}.")
    wanted = kwargs.get("device")
    if wanted is not None:
        place, kwargs = torch.device(wanted), {**kwargs, "device": torch.device("cpu")}
    elif func is torch.ops.aten.copy_.default:
        place = args[0].device
    else:
        place = next((place for place in places if place.type == NAME), torch.device("cpu"))
    result = func(*pytree.tree_map_only(PretendTensor, lambda value: value.raw, args), **_raw(kwargs))
    if place.type == "cpu":
        return result
    changed = {id(value.raw): value for value in tensors if isinstance(value, PretendTensor)}

    def placed(value: Tensor) -> Tensor:
        return changed[id(value)] if id(value) in changed else PretendTensor(value, place)

    return pytree.tree_map_only(Tensor, placed, result)


def _raw(kwargs: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_only(PretendTensor, lambda value: value.raw, kwargs)


class _HostValues(TorchFunctionMode):
    """What goes between Python values and tensors, for which PyTorch asks no operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _MADE_ON_THE_HOST and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.tolist and isinstance(args[0], PretendTensor):
            return args[0].raw.tolist()
        return func(*args, **kwargs)


def set_up() -> None:
    """Let this process have the devices, until it ends."""
    _setup_privateuseone_for_python_backend(rename=NAME)
    library = torch.library.Library("_", "IMPL")  # noqa: TOR901  for as long as the process lives
    library.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), dispatch_key="PrivateUse1")
    set_up.library = library  # type: ignore[attr-defined]
    torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` exchanges tensors of another class
    _HostValues().__enter__()


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Split a model as `device_map="auto"` would: the last layer and what follows on the second device."""
    decoder: Any = model.get_decoder()
    behind = {decoder.layers[-1], decoder.norm}
    output = model.get_output_embeddings()
    if output.weight is not model.get_input_embeddings().weight:  # tied weights stay together
        behind.add(output)
    return dispatch_model(model, device_map(model, "", behind), main_device=FIRST)


def device_map(module: nn.Module, name: str, behind: set[nn.Module]) -> dict[str, str]:
    """Device of every part, as coarse as can be."""
    if module in behind or not behind & set(module.modules()):
        return {name: LAST if module in behind else FIRST}
    parts = module.named_children()
    return {
        key: device
        for child, part in parts
        for key, device in device_map(part, f"{name}.{child}".lstrip("."), behind).items()
    }
