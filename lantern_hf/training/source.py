"""Where the features of a training batch come from: the target, or a cache of what it said before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from lantern_hf.targets import TargetAdapter
from lantern_hf.training.binding import bound_adapter
from lantern_hf.training.data import TokenBatch
from lantern_hf.training.features import TargetFeatures, both_streams, drop_prompts, target_features, with_noise
from lantern_hf.training.rows import RowFeatures, join_rows, split_rows
from lantern_hf.training.runtime import input_device, seed_of

__all__ = ["FeatureSource", "ReadBatch", "RowStore"]


class RowStore(Protocol):
    """Keeps features of items."""

    def get(self, index: int, unconditional: bool) -> RowFeatures | None:
        """Give what is kept of an item behind its own or the unconditional prompt, or None."""


class ReadBatch(NamedTuple):
    """A batch the target has read.

    Attributes:
        features: Its features, `(2B, ...)` under guidance.
        adapter: Adapter of the target.
        batch: The batch as it was read, on the device of the target's embeddings, without second streams.
    """

    features: TargetFeatures
    adapter: TargetAdapter
    batch: TokenBatch


class FeatureSource:
    """Reads batches for training or evaluation.

    Args:
        target: The target.
        device: Device of the head.
        guidance_scale: When given, every row comes behind its own and behind the unconditional prompt.
        dropout: Chance that a row's prompt is replaced by the unconditional one; not with `guidance_scale`.
        noise: Half width of the noise on what the head reads.
        seed: Decides dropped prompts and noise, together with a row's place in the run.
        store: Features of earlier readings.
        target_options: Options of the target's adapter, as in `lantern_generate`.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        device: torch.device,
        *,
        guidance_scale: float | None = None,
        dropout: float = 0.0,
        noise: float = 0.0,
        seed: int = 0,
        store: RowStore | None = None,
        target_options: Mapping[str, Any] | None = None,
    ):
        self._target, self._device, self._guided = target, device, guidance_scale is not None
        self._dropout, self._noise, self._seed, self._store = dropout, noise, seed, store
        self._options = target_options

    def read(self, batch: TokenBatch, indices: Sequence[int] = (), places: Sequence[int] = ()) -> ReadBatch:
        """Read a batch.

        Args:
            batch: The batch.
            indices: Index of each row's item in the dataset, for the store.
            places: Place of each row in the order of the run, which decides its draws; none for no draws.
        """
        batch = batch.to(input_device(self._target))
        adapter = bound_adapter(self._target, batch.prompt, self._options)
        keys = [(index, False) for index in indices]
        if self._guided:
            read, keys = both_streams(adapter, batch), keys + [(index, True) for index in indices]
        elif self._dropout and len(places):
            dropped = torch.tensor([self._drops(place) for place in places])
            read = batch = drop_prompts(adapter, batch, dropped) if bool(dropped.any()) else batch
            keys = [(index, drop) for (index, _), drop in zip(keys, dropped.tolist(), strict=True)]
        else:
            read = batch
        features = self._features(read, keys)
        if len(places):
            features = with_noise(features, self._noise, [seed_of(self._seed, place, "noise") for place in places])
        return ReadBatch(features, adapter, batch)

    def _drops(self, place: int) -> bool:
        """Whether the row at a place loses its prompt."""
        generator = torch.Generator().manual_seed(seed_of(self._seed, place, "prompt"))
        return float(torch.rand((), generator=generator)) < self._dropout

    def _features(self, batch: TokenBatch, keys: list[tuple[int, bool]]) -> TargetFeatures:
        """Features from the store, and from the target where it keeps none."""
        if self._store is None or not keys:
            return self._ask(batch)
        rows = [self._store.get(*key) for key in keys]
        if missing := [place for place, row in enumerate(rows) if row is None]:
            part = batch.select(missing)
            computed = split_rows(self._ask(part), part)
            for place, row in zip(missing, computed, strict=True):
                rows[place] = row
        adapter = bound_adapter(self._target, batch.prompt, self._options)
        return join_rows([row for row in rows if row is not None], batch, adapter, self._device)

    def _ask(self, batch: TokenBatch) -> TargetFeatures:
        """Features from the target, by an adapter of their own: a family may know its rows by their number."""
        adapter = bound_adapter(self._target, batch.prompt, self._options)
        return target_features(adapter, batch, self._device)
