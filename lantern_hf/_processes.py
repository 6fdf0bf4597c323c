"""One process or several, as accelerate or torchrun started them: who does what, and what the main one decides.

Without a launcher nothing here touches `torch.distributed`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, parse_flag_from_env
from transformers.utils import logging

__all__ = ["MainProcessError", "from_main", "process_state"]

logger = logging.get_logger(__name__)

# The longest that a process may wait for another; ten minutes by default, which an uneven share of work exceeds.
_PATIENCE = timedelta(days=7)

T = TypeVar("T")


class MainProcessError(RuntimeError):
    """The main process refused the work, and says why; raised on the others."""


def process_state(cpu: bool = False) -> PartialState:
    """Give the state of the processes that a launcher started; one process without any.

    accelerate itself takes launched processes without an accelerator for single ones unless told that they are on CPUs.

    Args:
        cpu: Whether to work on the CPU in any case.

    Raises:
        RuntimeError: The program made accelerate's state before, for one process, though several were started.
    """
    cpu = cpu or parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    state = PartialState(cpu=cpu, timeout=_PATIENCE)
    if state.num_processes == 1 and "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        logger.warning(
            "Only one process was started: on CPUs `accelerate launch` starts several with --multi_gpu (in spite of "
            "its name) in place of --cpu; `torchrun --nproc-per-node N` always does."
        )
    launched = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if state.num_processes == 1 < launched:
        raise RuntimeError(
            f"{launched} processes were started, but this program's `PartialState` or `Accelerator` knows of one. On "
            "CPUs make it with `PartialState(cpu=True)`."
        )
    return state


def from_main(state: PartialState, make: Callable[[], T]) -> T:
    """Have the main process make something, and give it to all.

    Args:
        state: The processes.
        make: Called on the main process alone; what it returns can be pickled.

    Raises:
        MainProcessError: It failed, on the other processes; the main one raises the error itself.
    """
    if state.num_processes == 1:
        return make()
    parcel: list[object] = [None, None]
    if not state.is_main_process:
        value, error = broadcast_object_list(parcel)
        if error is not None:
            raise MainProcessError(error)
        return value
    try:
        parcel[0] = make()
    except Exception as error:
        broadcast_object_list([None, str(error) or type(error).__name__])
        raise
    return broadcast_object_list(parcel)[0]
