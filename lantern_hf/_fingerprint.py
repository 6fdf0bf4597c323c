"""Short hashes that tell models apart: configuration, and samples of the weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

__all__ = ["SAMPLES", "add_values", "target_fingerprint", "weights_fingerprint"]

SAMPLES = 64
"""Values of a weight, or items of a dataset, that are looked at."""
# What loading, saving and the release of transformers put into a configuration.
_VOLATILE = ("transformers_version", "torch_dtype", "dtype", "architectures")


def target_fingerprint(target: PreTrainedModel) -> str:
    """Hash a target: class, configuration, dtype, and samples of its weights."""
    config = target.config.to_dict()
    config = {name: value for name, value in config.items() if name not in _VOLATILE and not name.startswith("_")}
    text = json.dumps([type(target).__name__, str(target.dtype), config], sort_keys=True, default=str)
    return hashlib.blake2b(f"{text} {weights_fingerprint(target)}".encode(), digest_size=16).hexdigest()


def weights_fingerprint(module: nn.Module) -> str:
    """Hash names, shapes and dtypes of a module's weights, and 64 evenly spaced values of each.

    Two fine-tunings of one model differ in nearly every weight, so samples tell them apart; weights that accelerate
    keeps off every device count by name and shape alone.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(module.named_parameters()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.device.type != "meta" and value.numel():
            for part in _plain_parts(value.detach()):
                flat = part.reshape(-1)
                add_values(digest, flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES])
    return digest.hexdigest()


def _plain_parts(value: Tensor) -> list[Tensor]:
    """The plain tensors that a quantised weight is made of (torchao's are subclasses that hold several), or itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(value, name))]


def add_values(digest: Any, value: Tensor) -> None:
    """Add a tensor's bytes to a digest."""
    digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
