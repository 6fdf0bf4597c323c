"""`NeighborTable`: the k nearest codebook entries of every entry, built in bounded memory and kept as one small file.

Knows codebooks and files; nothing of models, tokens outside the codebook or probabilities.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lantern_hf._files import write_whole
from lantern_hf._nearest import nearest_rows

__all__ = ["METRICS", "NeighborTable", "codebook_hash"]

METRICS = ("l2", "cosine")
"""Distances a table can be built with."""

MAX_TABLE_BYTES = 2**28
"""Largest table that is read from a file: k = 8192 for 16384 codes."""

_FORMAT = "lantern_hf.neighbors/1"
_HASH_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class NeighborTable:
    """The k nearest codebook entries of every entry.

    Args:
        indices: `(K, k)` integers in [0, K), nearest first, an entry never in its own row.
        metric: Distance it was built with, for the record.
        hashes: Hash of the codebook per dtype name, as `from_codebook` records them. None: the table cannot tell
            codebooks of equal size apart.

    Attributes:
        indices: `(K, k)` int32.

    Raises:
        ValueError: Wrong shape, dtype or range, or an entry is its own neighbour.
    """

    def __init__(self, indices: Tensor, *, metric: str = "l2", hashes: Mapping[str, str] | None = None) -> None:
        _check_indices(indices)
        self.indices = indices.to(torch.int32)
        self.metric = metric
        self.hashes = dict(hashes or {})

    @classmethod
    def from_codebook(cls, codebook: Tensor, k: int, metric: str = "l2") -> NeighborTable:
        """Find the k nearest entries of every entry, exactly and in float64; ties go to the lower index.

        Args:
            codebook: `(K, C)` floating point, finite.
            k: Neighbours per entry, in [1, K - 1].
            metric: `"l2"`, or `"cosine"` for the angle between entries: the same order as L2 between entries of length
                1, and so the one for models that normalise their codebook at lookup (LlamaGen, Janus, GLM-Image).

        Returns:
            The table, on the codebook's device. Memory is bounded by chunks of rows, whatever K is.

        Raises:
            ValueError: The codebook is not a finite floating-point matrix, or `k` or `metric` is not allowed.
        """
        check_codebook(codebook, k, metric)
        # Half the accelerators lack float64 (MPS): there the CPU does the work.
        points = (codebook.detach().cpu() if codebook.device.type == "mps" else codebook.detach()).double()
        if metric == "cosine":
            points = points / points.norm(dim=1, keepdim=True).clamp_min(torch.finfo(points.dtype).tiny)
        return cls(nearest_rows(points, k).to(codebook.device), metric=metric, hashes=_hashes(codebook))

    @property
    def num_codes(self) -> int:
        """K, entries of the codebook."""
        return self.indices.shape[0]

    @property
    def k(self) -> int:
        """Neighbours per entry."""
        return self.indices.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the table lives."""
        return self.indices.device

    def to(self, device: torch.device | str | int) -> NeighborTable:
        """Return the table on `device`; itself when it is there already."""
        moved = self.indices.to(device)
        return self if moved is self.indices else self._with(moved)

    def first(self, k: int) -> NeighborTable:
        """Return a view of the `k` nearest neighbours.

        Raises:
            ValueError: `k` is not in [1, self.k].
        """
        if not 1 <= k <= self.k:
            raise ValueError(
                f"`k` must be in [1, {self.k}], the neighbors this table holds, got {k}. Build a larger table for more."
            )
        return self._with(self.indices[:, :k])

    def check(self, codebook: Tensor) -> None:
        """Check that the table was built from this codebook, allowing for a codebook rounded to half precision since.

        Args:
            codebook: `(K, C)` floating point.

        Raises:
            ValueError: Another size, or other values.
        """
        if codebook.dim() != 2 or codebook.shape[0] != self.num_codes:
            raise ValueError(
                f"This neighbor table covers {self.num_codes} codes, the codebook has shape {tuple(codebook.shape)}. "
                f"Build one that fits: NeighborTable.from_codebook(codebook, k={self.k})."
            )
        found = _hashes(codebook)
        if self.hashes and not any(self.hashes.get(name) == value for name, value in found.items()):
            raise ValueError(
                f"This neighbor table was built from another codebook of {self.num_codes} codes: sha256 "
                f"{self.hashes.get('float32', '?')[:12]}, the codebook given has {found['float32'][:12]}. "
                f"Build one that fits: NeighborTable.from_codebook(codebook, k={self.k})."
            )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table as safetensors, through a temporary name so that no half-written file is ever seen.

        Args:
            path: File to write; parent folders are made.

        Returns:
            The path.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        indices = self.indices.cpu().contiguous()
        metadata = {"format": _FORMAT, "metric": self.metric, "k": str(self.k), "num_codes": str(self.num_codes)}
        metadata |= {f"codebook_sha256_{name}": value for name, value in self.hashes.items()}
        # uint16 halves the file and holds every id of a codebook of up to 65,536 entries.
        indices = indices.to(torch.uint16) if self.num_codes <= 2**16 else indices
        metadata["indices_sha256"] = _digest(indices)
        write_whole(target, lambda temporary: save_file({"indices": indices}, temporary, metadata))
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, num_codes: int | None = None) -> NeighborTable:
        """Read and check a table that `save` wrote, onto the CPU.

        The header is checked first: nothing is allocated for a file that is no table.

        Args:
            path: The file.
            num_codes: Entries of the codebook it must be of. None: any.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is not a neighbour table, one of another codebook, too large, or its content is damaged.
        """
        if os.path.getsize(path) > MAX_TABLE_BYTES:
            raise ValueError(
                f"{path} has {os.path.getsize(path):,} bytes, where at most {MAX_TABLE_BYTES:,} make sense for a "
                "neighbor table. It was not loaded."
            )
        try:
            with safe_open(os.fspath(path), framework="pt") as file:
                metadata = file.metadata() or {}
                _check_header(path, file, metadata, num_codes)
                indices = file.get_tensor("indices")
        except SafetensorError as error:
            raise ValueError(f"{path} is not a safetensors file: {error}. Write it with NeighborTable.save.") from error
        prefix = "codebook_sha256_"
        hashes = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
        table = cls(indices.to(torch.int32), metric=metadata.get("metric", "l2"), hashes=hashes)
        if (metadata.get("k"), metadata.get("num_codes")) != (str(table.k), str(table.num_codes)):
            raise ValueError(
                f"{path} is damaged: it holds {table.num_codes} x {table.k} indices but says "
                f"{str(metadata.get('num_codes'))[:20]} x {str(metadata.get('k'))[:20]}. "
                "Build it again with NeighborTable.from_codebook."
            )
        _check_digest(path, metadata, indices)
        return table

    def _with(self, indices: Tensor) -> NeighborTable:
        """Copy with other indices that are known to be sound, so that nothing is checked again."""
        other = copy.copy(self)
        other.indices = indices
        return other

    def __repr__(self) -> str:
        return f"NeighborTable({self.num_codes} codes, k={self.k}, metric={self.metric!r}, device={str(self.device)!r})"


def _check_header(path: Any, file: Any, metadata: Mapping[str, str], num_codes: int | None) -> None:
    """Refuse a file whose header is not that of a table."""
    part: Any = file.get_slice("indices") if list(file.keys()) == ["indices"] else None
    shape = [] if part is None else list(part.get_shape())
    if metadata.get("format") != _FORMAT or len(shape) != 2 or part.get_dtype() not in ("U16", "I32"):
        raise ValueError(
            f"{path} is not a neighbor table: format {str(metadata.get('format'))[:80]!r}, expected {_FORMAT!r} "
            "with a uint16 or int32 tensor `indices` (K, k) and nothing else. Write it with NeighborTable.save."
        )
    if metadata.get("metric", "l2") not in METRICS:
        raise ValueError(f"{path} is damaged: it names the metric {metadata['metric'][:20]!r}, not one of {METRICS}.")
    if num_codes is not None and shape[0] != num_codes:
        raise ValueError(
            f"{path} covers {shape[0]} codes, but this head drafts from a codebook of {num_codes}. "
            "Build a table from the target's codebook: NeighborTable.from_codebook(codebook, k)."
        )


def codebook_hash(codebook: Tensor) -> str:
    """Hash a codebook's shape and float32 values.

    Args:
        codebook: `(K, C)` floating point, on any device.

    Returns:
        sha256 as 64 hexadecimal digits; equal for equal values, whatever dtype and device hold them.
    """
    return _hash_as(codebook, torch.float32)


def _hashes(codebook: Tensor) -> dict[str, str]:
    """Hash a codebook in each dtype it may be loaded in: a copy rounded to half precision is still recognised."""
    return {str(dtype).removeprefix("torch."): _hash_as(codebook, dtype) for dtype in _HASH_DTYPES}


def _digest(indices: Tensor) -> str:
    """Hash indices as they are stored."""
    return hashlib.sha256(indices.contiguous().numpy().tobytes()).hexdigest()


def _check_digest(path: str | os.PathLike[str], metadata: Mapping[str, str], indices: Tensor) -> None:
    """Refuse indices that are not those that were written; older files do not say."""
    if metadata.get("indices_sha256", digest := _digest(indices)) != digest:
        raise ValueError(
            f"{path} is damaged: its indices are not those that were written. Build it again with "
            "NeighborTable.from_codebook."
        )


def _hash_as(codebook: Tensor, dtype: torch.dtype) -> str:
    """Hash the shape and the values rounded to `dtype`."""
    # Adding 0 turns -0.0 into 0.0: equal values, equal bytes.
    values = (codebook.detach().to("cpu", dtype) + 0).float().contiguous()
    return hashlib.sha256(f"{tuple(values.shape)}".encode() + values.numpy().tobytes()).hexdigest()


def check_codebook(codebook: Tensor, k: int, metric: str) -> None:
    """Check what `NeighborTable.from_codebook` takes.

    Raises:
        ValueError: As there.
    """
    if codebook.dim() != 2 or not codebook.is_floating_point() or len(codebook) < 2:
        raise ValueError(
            f"`codebook` must be a floating-point matrix of at least 2 entries (K, C), got {codebook.dtype} of shape "
            f"{tuple(codebook.shape)}. Pass the weight of the VQ model's codebook."
        )
    if not bool(codebook.isfinite().all()):
        count = int((~codebook.isfinite()).any(1).sum())
        raise ValueError(
            f"`codebook` has {count} of {len(codebook)} entries that are not finite. Load its weights again."
        )
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k < len(codebook):
        raise ValueError(
            f"`k` must be a whole number in [1, {len(codebook) - 1}] for {len(codebook)} entries, got {k!r}. Try 10."
        )
    if metric not in METRICS:
        raise ValueError(f"`metric` must be one of {', '.join(map(repr, METRICS))}, got {metric!r}.")


def _check_indices(indices: Tensor) -> None:
    """Check what a table holds."""
    shape = tuple(indices.shape)
    if indices.dim() != 2 or not 1 <= shape[1] < shape[0]:
        raise ValueError(
            f"`indices` must have shape (K, k) with 1 <= k < K, got {shape}. Row x lists the neighbors of code x."
        )
    if indices.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"`indices` must be int32 or int64, got {indices.dtype}. Convert it with `.to(torch.int32)`.")
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= shape[0]:
        raise ValueError(
            f"`indices` must be in [0, {shape[0]}) for {shape[0]} codes, got {low} to {high}. "
            "Build the table from its codebook."
        )
    own = indices == torch.arange(shape[0], device=indices.device).unsqueeze(1)
    if bool(own.any()):
        code = int(own.any(1).nonzero()[0])
        raise ValueError(
            f"Code {code} is in its own row of `indices`; the token itself is excluded. "
            "Drop the first column if it repeats the code."
        )
