"""What a cache of features belongs to, as short hashes: a target by its configuration and samples of its weights, a
dataset by its items.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

__all__ = ["data_fingerprint", "target_fingerprint", "weights_fingerprint"]

_SAMPLES = 64
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
                _add(digest, flat[:: max(flat.numel() // _SAMPLES, 1)][:_SAMPLES])
    return digest.hexdigest()


def _plain_parts(value: Tensor) -> list[Tensor]:
    """The plain tensors that a quantised weight is made of (torchao's are subclasses that hold several), or itself."""
    if not is_traceable_wrapper_subclass(value):
        return [value]
    names, _ = value.__tensor_flatten__()
    return [part for name in names for part in _plain_parts(getattr(value, name))]


def data_fingerprint(dataset: Any) -> str:
    """Hash a dataset: its own `fingerprint` (`_fingerprint` of a `datasets.Dataset`), or up to 64 of its items."""
    digest = hashlib.blake2b(f"{len(dataset)}".encode(), digest_size=16)
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if own is not None:
        digest.update(str(own).encode())
        return digest.hexdigest()
    for index in range(0, len(dataset), max(len(dataset) // _SAMPLES, 1)):
        for name, value in sorted(dataset[index].items()):
            digest.update(name.encode())
            _add(digest, torch.as_tensor(value))
    return digest.hexdigest()


def _add(digest: Any, value: Tensor) -> None:
    """Add a tensor's bytes."""
    digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
