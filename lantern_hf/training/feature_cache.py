"""`FeatureCache`: what the target said about a dataset, on disk, so that later epochs need not run it again.

The cache is filled before training in the order of the dataset, in shards that are whole or not there, so that an
interrupted filling goes on where it stopped and a training that reads it can be resumed exactly. What it has no room
for is computed as it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from lantern_hf.training.binding import bound_adapter
from lantern_hf.training.data import collate, fetch
from lantern_hf.training.features import drop_prompts, target_features
from lantern_hf.training.fingerprint import data_fingerprint, target_fingerprint
from lantern_hf.training.rows import RowFeatures, split_rows
from lantern_hf.training.runtime import autocast, input_device
from lantern_hf.training.storage import ShardStore, writing

__all__ = ["FeatureCache"]

logger = logging.get_logger(__name__)

FORMAT_VERSION = 1
_PARTS = RowFeatures._fields


class _Reading(NamedTuple):
    """What is read to fill a cache; fields as the arguments of `FeatureCache.fill`."""

    target: PreTrainedModel
    dataset: Any
    both_prompts: bool
    batch_size: int
    mixed_precision: str
    target_options: Mapping[str, Any] | None

    def manifest(self) -> dict[str, Any]:
        """What tells its cache from any other."""
        settings: dict[str, Any] = {"version": FORMAT_VERSION, "both_prompts": self.both_prompts}
        settings |= {"target": target_fingerprint(self.target), "data": data_fingerprint(self.dataset)}
        settings |= {"target_options": dict(self.target_options)} if self.target_options else {}
        return settings | {"mixed_precision": self.mixed_precision}

    def bytes_of_first(self) -> int:
        """Bytes that the rows of the first item may take."""
        batch, dtype = collate(fetch(self.dataset, [0])), self.target.dtype
        length = batch.prompt["input_ids"].shape[1] + batch.tokens.shape[1]
        width = self.target.config.get_text_config().hidden_size
        size = torch.empty((), dtype=dtype if dtype.is_floating_point else torch.bfloat16).element_size()
        return (1 + self.both_prompts) * length * (width * size + 8)

    def tensors(self, items: range) -> dict[str, Tensor]:
        """Tensors of one shard."""
        tensors: dict[str, Tensor] = {}
        for first in range(items.start, items.stop, self.batch_size):
            indices = range(first, min(first + self.batch_size, items.stop))
            batch = collate(fetch(self.dataset, indices)).to(input_device(self.target))
            kinds = {0: batch}
            if self.both_prompts:
                adapter = bound_adapter(self.target, batch.prompt, self.target_options)
                kinds[1] = drop_prompts(adapter, batch, torch.ones(len(indices), dtype=torch.bool))
            for kind, read in kinds.items():
                with autocast(batch.tokens.device, self.mixed_precision):
                    adapter = bound_adapter(self.target, read.prompt, self.target_options)
                    rows = split_rows(target_features(adapter, read), read)
                for index, row in zip(indices, rows, strict=True):
                    named = zip(_PARTS, row, strict=True)
                    tensors |= {f"{index}.{kind}.{part}": value.cpu().clone() for part, value in named}
        return tensors


class FeatureCache:
    """Features of a dataset's items on disk.

    A cache of another target, dataset or precision is replaced, with a warning that says what differs; a damaged shard
    is computed again. Only files the cache wrote are ever removed.

    Args:
        folder: Where it lies.
        max_bytes: Most that its shards may take in all.
        shard_bytes: Rough size of a shard.

    Raises:
        ValueError: A size is not positive.

    Example:
        >>> cache = FeatureCache("runs/features", max_bytes=50 * 2**30)
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = 20 * 2**30, shard_bytes: int = 2**28):
        for name, value in (("max_bytes", max_bytes), ("shard_bytes", shard_bytes)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}. To cache nothing, pass no cache.")
        self.folder, self._max_bytes, self._shard_bytes = Path(folder), max_bytes, shard_bytes
        self._per_shard, self._store = 1, ShardStore(folder, ".safetensors", {})
        self._open: dict[int, Any] = {}
        self._hint = ""

    def fill(
        self,
        target: PreTrainedModel,
        dataset: Any,
        *,
        both_prompts: bool,
        batch_size: int,
        mixed_precision: str,
        accelerator: Accelerator,
        target_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Compute what is missing; called by `train_head`.

        Args:
            target: The target, frozen.
            dataset: The dataset.
            both_prompts: Whether every item is also wanted behind the unconditional prompt.
            batch_size: Items of one forward.
            mixed_precision: As in `TrainingConfig`.
            accelerator: Tells the processes, each of which fills shards of its own.
            target_options: As in `train_head`.

        Raises:
            OSError: A shard cannot be written.
        """
        reading = _Reading(target, dataset, both_prompts, batch_size, mixed_precision, target_options)
        self._per_shard = max(self._shard_bytes // reading.bytes_of_first(), 1)
        manifest = reading.manifest() | {"items_per_shard": self._per_shard}
        self._store, self._open = ShardStore(self.folder, ".safetensors", manifest), {}
        self._hint = f"Free space, lower `max_bytes` (now {self._max_bytes}), or train without a cache; then run again."
        if accelerator.is_main_process:
            with writing(f"The feature cache in {self.folder}", self._hint):
                self._begin()
        accelerator.wait_for_everyone()
        mine = range(accelerator.process_index, -(-len(dataset) // self._per_shard), accelerator.num_processes)
        budget = self._max_bytes // accelerator.num_processes
        self._write_missing(reading, self._make_room(mine, budget), mine, budget, accelerator.is_main_process)
        accelerator.wait_for_everyone()

    def _begin(self) -> None:
        """Make the folder, and clear it of another cache's shards."""
        if changed := self._store.differences():
            logger.warning(
                f"The feature cache in {self.folder} belongs to another training and is computed anew: "
                f"{'; '.join(changed)}."
            )
            self._store.clear()
        self._store.begin()

    def _make_room(self, mine: range, budget: int) -> list[int]:
        """Remove damaged shards, and the last ones past the budget; give the missing ones."""
        used, missing = 0, []
        for index in mine:
            path = self._store.path(index)
            if self._store.is_damaged(index):
                logger.warning(f"{path} is damaged (its checksum differs) and is computed again.")
                path.unlink()
            elif self._store.is_whole(index):
                used += path.stat().st_size
                if used > budget:
                    path.unlink()
                    self._store.forget(index)
            if not self._store.is_whole(index):
                missing.append(index)
        return missing

    def _write_missing(self, reading: _Reading, missing: list[int], mine: range, budget: int, main: bool) -> None:
        """Compute and write shards until all are there, or the budget is used up."""
        used = sum(self._store.path(index).stat().st_size for index in mine if self._store.is_whole(index))
        for index in logging.tqdm(missing, desc="Caching features", disable=not main or None):
            first = index * self._per_shard
            tensors = reading.tensors(range(first, min(first + self._per_shard, len(reading.dataset))))
            used += _file_bound(tensors)
            if used > budget:
                logger.info(f"The feature cache is full; items from {first} on are computed as they are needed.")
                return
            with writing(f"{self._store.path(index)}", self._hint):
                self._store.write(index, partial(save_file, tensors))

    def get(self, index: int, unconditional: bool) -> RowFeatures | None:
        """Give what is kept of an item, or None.

        Args:
            index: Index in the dataset.
            unconditional: Behind the unconditional prompt in place of its own.
        """
        shard = index // self._per_shard
        if (unconditional and not self._store.manifest.get("both_prompts")) or not self._store.is_whole(shard):
            return None
        if shard not in self._open:
            self._open[shard] = safe_open(self._store.path(shard), framework="pt").__enter__()
        file = self._open[shard]
        return RowFeatures(*(file.get_tensor(f"{index}.{int(unconditional)}.{part}") for part in _PARTS))


def _file_bound(tensors: dict[str, Tensor]) -> int:
    """Bytes that a file of these tensors takes at most, its header included."""
    return sum(value.numel() * value.element_size() + 256 + len(name) for name, value in tensors.items()) + 256
