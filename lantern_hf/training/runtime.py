"""What a training step stands on: seeded draws, autocast, sums that stay on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

__all__ = ["Sums", "autocast", "input_device", "seed_of", "seeded"]


class Sums:
    """Sums of metrics, on the device until someone asks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add one value of each metric, 0-d."""
        self.count += 1
        self._sums |= {name: self._sums.get(name, 0.0) + value.detach() for name, value in metrics.items()}

    def tensors(self) -> dict[str, Tensor]:
        """The sums so far."""
        return self._sums

    def take(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Bring the sums to the host in one transfer, mean over processes, and start anew."""
        values = torch.stack([value.float() for value in self._sums.values()])
        if accelerator is not None and accelerator.num_processes > 1:
            values = accelerator.reduce(values, reduction="mean")
        result = dict(zip(self._sums, values.tolist(), strict=True))
        self._sums, self.count = {}, 0
        return result


def seed_of(*parts: object) -> int:
    """A seed in [0, 2**63) that follows from `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(device: torch.device, *parts: object) -> Iterator[None]:
    """Make every draw of torch's global generators follow from `parts`; their state is given back afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed_of(*parts))
        yield


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bfloat16 where it is asked for. Not accelerate's, which is one setting for the whole process."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def input_device(target: PreTrainedModel) -> torch.device:
    """Device of the target's embeddings; offloaded ones are moved by their hooks."""
    device = cast(Tensor, target.get_input_embeddings().weight).device
    return torch.device("cpu") if device.type == "meta" else device
