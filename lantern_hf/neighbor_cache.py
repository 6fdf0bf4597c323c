"""Neighbour tables that outlive a process: built once for a codebook, kept below the Hugging Face cache.

A file's name says which codebook (by hash), distance and number of neighbours it is for. Whatever is wrong with the
folder or a file costs time, never a generation: the table is built again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from huggingface_hub.constants import ENV_VARS_TRUE_VALUES, HF_HOME
from safetensors import SafetensorError
from torch import Tensor
from transformers.utils import logging

from lantern_hf.neighbors import NeighborTable, check_codebook, codebook_hash

__all__ = ["CACHE_VARIABLE", "DISABLE_VARIABLE", "cached_neighbors"]

CACHE_VARIABLE = "LANTERN_HF_CACHE"
"""Environment variable: folder of what this library keeps, `$HF_HOME/lantern_hf` by default."""
DISABLE_VARIABLE = "LANTERN_HF_DISABLE_CACHE"
"""Environment variable: 1 to keep nothing."""

_WORTHWHILE = 2048  # codes from which building takes longer than reading
_FAILURES = (OSError, ValueError, SafetensorError)

logger = logging.get_logger(__name__)


def cached_neighbors(
    codebook: Tensor,
    k: int,
    metric: str = "l2",
    *,
    cache_dir: str | os.PathLike[str] | Literal[False] | None = None,
) -> NeighborTable:
    """Give `NeighborTable.from_codebook(codebook, k, metric)`, from disk where it was built before.

    A kept table with more neighbours serves as well. Processes may share the folder: files appear whole or not at all,
    and two that build the same table at once write the same file.

    Args:
        codebook: `(K, C)` floating point, finite.
        k: Neighbours per entry, in [1, K - 1].
        metric: As `NeighborTable.from_codebook`.
        cache_dir: Folder of the tables; False keeps nothing. By default `neighbors` below `$LANTERN_HF_CACHE` or
            `$HF_HOME/lantern_hf`, for codebooks large enough to be worth it; nothing with `LANTERN_HF_DISABLE_CACHE=1`.

    Returns:
        The table, on the codebook's device.

    Raises:
        ValueError: As `NeighborTable.from_codebook`.
    """
    check_codebook(codebook, k, metric)
    folder = _default_folder(len(codebook)) if cache_dir is None else cache_dir
    if folder is None or folder is False:
        return NeighborTable.from_codebook(codebook, k, metric)
    stem = f"{codebook_hash(codebook)}-{metric}"
    for file in _files(Path(folder), stem, k):
        if (found := _read(file, codebook, k, metric)) is not None:
            return found.first(k).to(codebook.device)
    table = NeighborTable.from_codebook(codebook, k, metric)
    _write(table, Path(folder) / f"{stem}-{k}.safetensors")
    return table


def _default_folder(num_codes: int) -> Path | None:
    """Folder of the tables when the caller names none, None to keep nothing."""
    if num_codes < _WORTHWHILE or os.environ.get(DISABLE_VARIABLE, "").upper() in ENV_VARS_TRUE_VALUES:
        return None
    return Path(os.environ.get(CACHE_VARIABLE) or Path(HF_HOME, "lantern_hf")).expanduser() / "neighbors"


def _files(folder: Path, stem: str, k: int) -> Iterator[Path]:
    """Kept tables with at least `k` neighbours, smallest first."""
    pattern = re.compile(re.escape(stem) + r"-(\d{1,9})\.safetensors")
    try:
        sizes = {file: int(match[1]) for file in folder.iterdir() if (match := pattern.fullmatch(file.name))}
    except OSError:  # no such folder, or one that cannot be read
        return
    yield from sorted((file for file, size in sizes.items() if size >= k), key=sizes.__getitem__)


def _read(file: Path, codebook: Tensor, k: int, metric: str) -> NeighborTable | None:
    """Load a kept table; one that is damaged, or is not what its name says, is removed."""
    try:
        table = NeighborTable.load(file)
        table.check(codebook)
        if table.k < k or table.metric != metric:
            raise ValueError(f"{file} holds {table.k} neighbors by {table.metric}, its name says otherwise.")
        return table
    except FileNotFoundError:  # another process removed it meanwhile
        return None
    except _FAILURES as error:
        logger.warning(f"A kept neighbor table cannot be used and is built again: {error}")
        with suppress(OSError):
            file.unlink()
        return None


def _write(table: NeighborTable, file: Path) -> None:
    """Keep a table; where that fails it is only said."""
    try:
        table.save(file)
    except (OSError, SafetensorError) as error:
        logger.warning(
            f"The neighbor table could not be kept in {file.parent} and will be built again next time: {error}. Set "
            f"{CACHE_VARIABLE} to a folder that can be written, or {DISABLE_VARIABLE}=1 to keep nothing."
        )
