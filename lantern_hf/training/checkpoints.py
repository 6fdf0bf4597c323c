"""Checkpoints that are whole or not there: written beside, then renamed. Knows a head and a dict of state, not how
either is made.

A checkpoint is a folder `step-00001000` with the head as `save_pretrained` leaves it, so that it can be tried at once,
and `training_state.pt`, read without running code.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from lantern_hf.draft import LanternDraftModel
from lantern_hf.training.storage import replace_folder, writing

__all__ = ["Checkpoint", "export_head", "newest_checkpoint", "save_checkpoint"]

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

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    final, old = folder / f"step-{step:08d}", _by_age(folder)
    # As `save_pretrained`, but in one file whatever the size, and without a progress bar of its own.
    weights = {name: value.detach().contiguous() for name, value in head.state_dict().items()}

    def write(temporary: Path) -> None:
        head.config.save_pretrained(temporary)
        save_file(weights, temporary / _WEIGHTS, metadata={"format": "pt"})
        torch.save(state, temporary / _STATE)

    last = f"The last good checkpoint is {old[0]}" if old else "There is no earlier checkpoint"
    with writing(f"Checkpoint {final}", f"{last}; make room or choose another place, and run again to go on from it."):
        replace_folder(final, write)
    for folder_of_old in _by_age(folder)[keep:]:
        shutil.rmtree(folder_of_old, ignore_errors=True)
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


def export_head(folder: Path, head: LanternDraftModel, record: Callable[[Path], Any]) -> None:
    """Save a head as `save_pretrained` does, and its record, every file whole under its name or not there.

    Args:
        folder: Where to; other files there stay.
        head: The head.
        record: Writes the record of its training into the folder.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    hint = "The head is in the last checkpoint; make room, and run again to save it."
    with writing(f"The head in {folder}", hint):
        head.save_pretrained(folder)
        record(folder)


def _by_age(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    return sorted(folder.glob("step-[0-9]*"), reverse=True)
