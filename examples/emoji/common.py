"""What the emoji training scripts share: atomic checkpoints, a loss log, and the learning-rate schedule."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` under `path` so that a kill at any moment leaves the previous checkpoint intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(path.suffix + ".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """Return the checkpoint at `path`, or None when there is none yet."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def warmup_cosine(step: int, total: int, warmup: int, floor: float = 0.02) -> float:
    """Learning-rate factor: linear warm-up, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


class LossLog:
    """Appends one JSON line per record, with the seconds since the run (not the process) began."""

    def __init__(self, path: Path, elapsed: float = 0.0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.start = path, time.time() - elapsed

    @property
    def elapsed(self) -> float:
        return time.time() - self.start

    def write(self, **record: float) -> None:
        record["seconds"] = round(self.elapsed, 1)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
