"""Checkpoints that are whole or not there: written beside, then renamed. Knows a head and a dict of state, not how
either is made.

A checkpoint is a folder `step-00001000` with the head as `save_pretrained` leaves it, so that it can be tried at once,
and `training_state.pt`, read without running code.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from lantern_hf.draft import LanternDraftModel

__all__ = ["Checkpoint", "newest_checkpoint", "save_checkpoint"]

logger = logging.get_logger(__name__)

_STATE, _WEIGHTS = "training_state.pt", "model.safetensors"
# What reading a damaged or half-deleted checkpoint raises.
_UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, SafetensorError)


class Checkpoint(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        folder: Where it was read.
        weights: State dict of the head.
        state: What was given to `save_checkpoint`.
    """

    folder: Path
    weights: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, head: LanternDraftModel, state: dict[str, Any], keep: int) -> Path:
    """Write a checkpoint and remove those that are too old.

    Args:
        folder: Holds all checkpoints of a training.
        step: Optimizer steps made.
        head: The head.
        state: Tensors and plain values that resuming needs.
        keep: Newest checkpoints that stay.

    Returns:
        The checkpoint's folder. Until it has this name, the earlier checkpoints are untouched.
    """
    final, temporary = folder / f"step-{step:08d}", folder / f".step-{step:08d}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    # As `save_pretrained`, but in one file whatever the size, and without a progress bar of its own.
    head.config.save_pretrained(temporary)
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}
    save_file(weights, temporary / _WEIGHTS, metadata={"format": "pt"})
    torch.save(state, temporary / _STATE)
    for file in temporary.iterdir():
        _sync(file)
    shutil.rmtree(final, ignore_errors=True)  # one of this step that could not be read
    os.replace(temporary, final)
    _sync(folder)
    for old in _by_age(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Read the newest checkpoint that can be read; None when there is none."""
    for candidate in _by_age(folder):
        try:
            state = torch.load(candidate / _STATE, map_location="cpu", weights_only=True)
            return Checkpoint(candidate, load_file(candidate / _WEIGHTS), state)
        except _UNREADABLE as error:
            logger.warning(f"Checkpoint {candidate} cannot be read and is passed over: {error}")
    return None


def _by_age(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted(folder.glob("step-[0-9]*"), reverse=True)


def _sync(path: Path) -> None:
    """Have the system write a file or a folder's names to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
