"""Between host and device: when a question waits for the device, and how numbers get there without waiting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def asking_is_free(device: torch.device) -> bool:
    """Whether reading a tensor on the host costs nothing, so that a walk may stop when no row goes on."""
    return device.type == "cpu"


def on_device(values: Any, device: torch.device | str) -> Tensor:
    """Make a tensor of host numbers without waiting for the device.

    A plain `torch.tensor(values, device="cuda")` copies from pageable memory, which waits for everything queued before
    it.

    Args:
        values: Number, or nested lists of numbers.
        device: Where the tensor is needed.

    Returns:
        The tensor on `device`.
    """
    tensor = torch.tensor(values)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
