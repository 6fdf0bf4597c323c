"""`FeatureCache`: what the target said about a dataset, on disk, so that later epochs need not run it again.

The cache is filled before training in the order of the dataset, in shards that are whole or not there, so that an
interrupted filling goes on where it stopped and a training that reads it can be resumed exactly. What it has no room
for is computed as it is needed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from lantern_hf.targets import adapter_for
from lantern_hf.training.data import TokenBatch, collate, fetch
from lantern_hf.training.features import drop_prompts, target_features
from lantern_hf.training.fingerprint import data_fingerprint, target_fingerprint
from lantern_hf.training.rows import RowFeatures, split_rows
from lantern_hf.training.runtime import autocast, input_device
from lantern_hf.training.storage import ShardStore, writing

__all__ = ["FeatureCache"]

logger = logging.get_logger(__name__)

FORMAT_VERSION = 1
_PARTS = RowFeatures._fields


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

    def fill(
        self,
        target: PreTrainedModel,
        dataset: Any,
        *,
        both_prompts: bool,
        batch_size: int,
        mixed_precision: str,
        accelerator: Accelerator,
    ) -> None:
        """Compute what is missing; called by `train_head`.

        Args:
            target: The target, frozen.
            dataset: The dataset.
            both_prompts: Whether every item is also wanted behind the unconditional prompt.
            batch_size: Items of one forward.
            mixed_precision: As in `TrainingConfig`.
            accelerator: Tells the processes, each of which fills shards of its own.

        Raises:
            OSError: A shard cannot be written.
        """
        settings = {"version": FORMAT_VERSION, "mixed_precision": mixed_precision, "both_prompts": both_prompts}
        settings |= {"target": target_fingerprint(target), "data": data_fingerprint(dataset)}
        self._per_shard = max(self._shard_bytes // _row_bound(target, collate(fetch(dataset, [0])), both_prompts), 1)
        self._store = ShardStore(self.folder, ".safetensors", settings | {"items_per_shard": self._per_shard})
        hint = f"Free space, lower `max_bytes` (now {self._max_bytes}), or train without a cache; then run again."
        with writing(f"The feature cache in {self.folder}", hint):
            if accelerator.is_main_process:
                self._begin()
            accelerator.wait_for_everyone()
        mine = range(accelerator.process_index, -(-len(dataset) // self._per_shard), accelerator.num_processes)
        missing = self._make_room(mine, self._max_bytes // accelerator.num_processes)
        bar = logging.tqdm(missing, desc="Caching features", disable=not accelerator.is_main_process or None)
        used = sum(self._store.path(index).stat().st_size for index in mine if self._store.is_whole(index))
        for index in bar:
            items = range(index * self._per_shard, min((index + 1) * self._per_shard, len(dataset)))
            tensors = self._compute(target, dataset, items, both_prompts, batch_size, mixed_precision)
            used += _file_bound(tensors)
            if used > self._max_bytes // accelerator.num_processes:
                logger.info(f"The feature cache is full; items from {items.start} on are computed as they are needed.")
                break
            with writing(f"{self._store.path(index)}", hint):
                self._store.write(index, lambda path, tensors=tensors: save_file(tensors, path))
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

    def _compute(
        self,
        target: PreTrainedModel,
        dataset: Any,
        items: range,
        both_prompts: bool,
        batch_size: int,
        mixed_precision: str,
    ) -> dict[str, Tensor]:
        """Tensors of one shard."""
        tensors: dict[str, Tensor] = {}
        for first in range(items.start, items.stop, batch_size):
            indices = range(first, min(first + batch_size, items.stop))
            batch = collate(fetch(dataset, indices)).to(input_device(target))
            adapter = adapter_for(target, batch.prompt["input_ids"])
            readings = {0: batch}
            if both_prompts:
                readings[1] = drop_prompts(adapter, batch, torch.ones(len(indices), dtype=torch.bool))
            for kind, reading in readings.items():
                with autocast(batch.tokens.device, mixed_precision):
                    rows = split_rows(target_features(adapter, reading), reading)
                for index, row in zip(indices, rows, strict=True):
                    named = zip(_PARTS, row, strict=True)
                    tensors |= {f"{index}.{kind}.{part}": value.cpu().clone() for part, value in named}
        return tensors

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


def _row_bound(target: PreTrainedModel, batch: TokenBatch, both_prompts: bool) -> int:
    """Bytes that the rows of one item may take."""
    length = batch.prompt["input_ids"].shape[1] + batch.tokens.shape[1]
    width = target.config.get_text_config().hidden_size
    size = torch.empty((), dtype=target.dtype if target.dtype.is_floating_point else torch.bfloat16).element_size()
    return (1 + both_prompts) * length * (width * size + 8)


def _file_bound(tensors: dict[str, Tensor]) -> int:
    """Bytes that a file of these tensors takes at most, its header included."""
    return sum(value.numel() * value.element_size() + 256 + len(name) for name, value in tensors.items()) + 256
