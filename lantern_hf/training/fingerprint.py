"""What a cache of features belongs to, as short hashes: a target by its configuration and samples of its weights, a
dataset by its items.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["data_fingerprint", "target_fingerprint"]

_SAMPLES = 64
_VOLATILE = ("_name_or_path", "transformers_version", "_commit_hash", "torch_dtype", "dtype")


def target_fingerprint(target: PreTrainedModel) -> str:
    """Hash a target: class, configuration, dtype, and evenly spaced samples of every weight.

    Two fine-tunings of one model differ in nearly every weight, so samples tell them apart; weights that accelerate
    keeps off every device count by name and shape alone.
    """
    digest = hashlib.blake2b(digest_size=16)
    config = {name: value for name, value in target.config.to_dict().items() if name not in _VOLATILE}
    text = json.dumps([type(target).__name__, str(target.dtype), config], sort_keys=True, default=str)
    digest.update(text.encode())
    for name, value in sorted(target.named_parameters()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.device.type != "meta" and value.numel():
            flat = value.detach().reshape(-1)
            _add(digest, flat[:: max(flat.numel() // _SAMPLES, 1)][:_SAMPLES])
    return digest.hexdigest()


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
