"""Writes safetensors files block by block, which the library's own writer cannot: that wants every tensor at once.

The header is known from the shapes; then the space of all tensors is filled with NaN, so that a gap is loud; then the
rows come in. The library reads every file back before the conversion counts as done. This file knows no model.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from lantern_hf.convert.checkpoint import DTYPES

__all__ = ["BLOCK_BYTES", "ShardWriter", "Slot", "plan_shards", "write_index"]

BLOCK_BYTES = 4 * 2**20
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Slot(NamedTuple):
    """A tensor's place in the result.

    Attributes:
        name: Its name.
        shape: Its shape.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


def plan_shards(slots: Sequence[Slot], max_bytes: int, stem: str) -> dict[str, list[Slot]]:
    """Distribute tensors over files, in order.

    Args:
        slots: The tensors.
        max_bytes: Size of a file; a tensor larger than that gets one of its own.
        stem: Name of a single file without its suffix.

    Returns:
        Tensors by file name, named as transformers and diffusers expect.
    """
    shards: list[list[Slot]] = [[]]
    for slot in slots:
        if shards[-1] and sum(other.nbytes for other in shards[-1]) + slot.nbytes > max_bytes:
            shards.append([])
        shards[-1].append(slot)
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def write_index(folder: Path, shards: dict[str, list[Slot]], stem: str) -> None:
    """Write the index of several files; nothing for a single one."""
    if len(shards) == 1:
        return
    total = sum(slot.nbytes for slots in shards.values() for slot in slots)
    where = {slot.name: name for name, slots in shards.items() for slot in slots}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


class ShardWriter:
    """One safetensors file, written in the order of its tensors.

    Args:
        path: The file.
        slots: Its tensors.
    """

    def __init__(self, path: Path, slots: Sequence[Slot]):
        self._path, self._slots = path, list(slots)
        self._written = dict.fromkeys((slot.name for slot in slots), 0)
        header = _header(slots)
        self._file: BinaryIO = path.open("wb")
        self._file.write(header)
        for size in _chunks(sum(slot.nbytes for slot in slots)):
            self._file.write(b"\xff" * size)  # NaN in every float format
        self._file.seek(len(header))

    def write(self, slot: Slot, block: Tensor) -> None:
        """Append rows to the tensor that is being written.

        Args:
            slot: The tensor.
            block: Its next rows, in its dtype.
        """
        assert block.dtype == slot.dtype
        data = block.contiguous().flatten().view(torch.uint8).numpy()
        self._file.write(data.data)
        self._written[slot.name] += len(data)

    def close(self) -> None:
        """Finish the file and read its header back.

        Raises:
            RuntimeError: A tensor was not written in full.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if gaps := [slot.name for slot in self._slots if self._written[slot.name] != slot.nbytes]:
            raise RuntimeError(f"{self._path.name}: `{gaps[0]}` was not written in full.")
        with safe_open(self._path, framework="pt") as file:
            for slot in self._slots:
                if tuple(file.get_slice(slot.name).get_shape()) != slot.shape:
                    raise RuntimeError(f"{self._path.name}: `{slot.name}` does not read back.")

    def abort(self) -> None:
        """Let go of the file."""
        self._file.close()


def _header(slots: Sequence[Slot]) -> bytes:
    """The beginning of a safetensors file: the length of a JSON object, and the object, padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for slot in slots:
        end = offset + slot.nbytes
        entries[slot.name] = {"dtype": _CODES[slot.dtype], "shape": list(slot.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _chunks(size: int) -> Iterator[int]:
    """Split a number of bytes into blocks."""
    while size > 0:
        yield min(size, BLOCK_BYTES)
        size -= BLOCK_BYTES
