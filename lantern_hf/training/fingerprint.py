"""What a cache of features belongs to, as short hashes: a target by its configuration and samples of its weights, a
dataset by its items.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from lantern_hf._fingerprint import SAMPLES, add_values, target_fingerprint, weights_fingerprint

__all__ = ["data_fingerprint", "target_fingerprint", "weights_fingerprint"]


def data_fingerprint(dataset: Any) -> str:
    """Hash a dataset: its own `fingerprint` (`_fingerprint` of a `datasets.Dataset`), or up to 64 of its items."""
    digest = hashlib.blake2b(f"{len(dataset)}".encode(), digest_size=16)
    own = getattr(dataset, "fingerprint", None) or getattr(dataset, "_fingerprint", None)
    if own is not None:
        digest.update(str(own).encode())
        return digest.hexdigest()
    for index in range(0, len(dataset), max(len(dataset) // SAMPLES, 1)):
        for name, value in sorted(dataset[index].items()):
            digest.update(name.encode())
            add_values(digest, torch.as_tensor(value))
    return digest.hexdigest()
