"""What a head is trained on: prompts and the tokens that followed them, padded into batches in an order that depends on
nothing but the seed and the step. Knows no model.

An item of a dataset is a dict: `"input_ids"` `(S,)`, optionally `"attention_mask"` `(S,)`, any further arguments of the
target's `generate` such as `"caption_embeds"` `(S, d)`, and `"tokens"` `(T,)`, the token ids that the target is to
generate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["SeededBatches", "TokenBatch", "TokenSequences", "collate", "fetch", "places_of_batch"]


class TokenSequences(Dataset):
    """Sequences held in memory.

    Args:
        prompts: Arguments of the target's `generate`, one row per sequence: `input_ids` `(M, S)` and what else it
            takes.
        tokens: Token ids that follow each prompt, `(M, T)` int64.

    Raises:
        ValueError: `input_ids` is missing, or the numbers of rows differ.

    Example:
        >>> prompts = {"input_ids": torch.zeros(5, 3, dtype=torch.long)}
        >>> data = TokenSequences(prompts, torch.ones(5, 7, dtype=torch.long))
        >>> len(data), sorted(data[0])
        (5, ['input_ids', 'tokens'])
    """

    def __init__(self, prompts: Mapping[str, Tensor], tokens: Tensor):
        if "input_ids" not in prompts:
            raise ValueError(
                f"`prompts` must hold `input_ids`, got {sorted(prompts)}. For LlamaGen use model.caption_ids(M)."
            )
        if wrong := {name: len(value) for name, value in prompts.items() if len(value) != len(tokens)}:
            raise ValueError(
                f"`prompts` and `tokens` must have as many rows, got {wrong} and {len(tokens)} rows of tokens."
            )
        self._columns = dict(prompts) | {"tokens": tokens}

    @property
    def fingerprint(self) -> str:
        """A hash of every value."""
        digest = hashlib.blake2b(digest_size=16)
        for name, value in sorted(self._columns.items()):
            digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            digest.update(value.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._columns["tokens"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: value[index] for name, value in self._columns.items()}


@dataclass(frozen=True)
class TokenBatch:
    """Prompts of one length, padded on the left, and tokens of one length, padded on the right.

    Attributes:
        prompt: `input_ids` `(B, S)` and `attention_mask` `(B, S)` int64, and further arguments of the target.
        tokens: Tokens after the prompt, `(B, T)` int64, 0 in padding.
        tokens_mask: `(B, T)` bool, False in padding.
    """

    prompt: dict[str, Tensor]
    tokens: Tensor
    tokens_mask: Tensor

    def to(self, device: torch.device | str) -> TokenBatch:
        """Give the batch on another device."""
        prompt = {name: value.to(device) for name, value in self.prompt.items()}
        return TokenBatch(prompt, self.tokens.to(device), self.tokens_mask.to(device))

    def select(self, rows: Sequence[int]) -> TokenBatch:
        """Give some rows, padded as they are here."""
        prompt = {name: value[list(rows)] for name, value in self.prompt.items()}
        return TokenBatch(prompt, self.tokens[list(rows)], self.tokens_mask[list(rows)])


def collate(items: Sequence[Mapping[str, Any]]) -> TokenBatch:
    """Pad items into a batch: prompts, and what runs along them, on the left, tokens on the right.

    Args:
        items: Items of a dataset, see the module. Tensors whose first dimension is the length of their prompt are
            padded with it; others must agree in shape.

    Returns:
        The batch. Padding ids are 0, and masked.

    Raises:
        ValueError: An item lacks a key, or tensors cannot be stacked.
    """
    names = set(items[0])
    if not {"input_ids", "tokens"} <= names or any(set(item) != names for item in items):
        raise ValueError(
            "Every item must hold `input_ids` and `tokens` and the same further keys, got "
            f"{[sorted(item) for item in items[:3]]}."
        )
    rows = [{name: torch.as_tensor(value) for name, value in item.items()} for item in items]
    for row in rows:
        row.setdefault("attention_mask", torch.ones_like(row["input_ids"]))
    longest = max(len(row["input_ids"]) for row in rows)
    prompt = {name: _stack(name, rows, longest) for name in rows[0] if name != "tokens"}
    lengths = torch.tensor([len(row["tokens"]) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence([row["tokens"].long() for row in rows], batch_first=True)
    return TokenBatch(prompt, tokens, torch.arange(tokens.shape[1]) < lengths[:, None])


def fetch(dataset: Any, indices: Sequence[int]) -> list[Mapping[str, Any]]:
    """Give items of a dataset, all at once where it can (`__getitems__`), as torch's loader does."""
    together = getattr(dataset, "__getitems__", None)
    return [dataset[index] for index in indices] if together is None else together(list(indices))


def places_of_batch(batch: int, batch_size: int, rank: int, num_processes: int) -> range:
    """Places of a batch of one process in the order of the whole run, which no number of processes changes."""
    first = (batch * num_processes + rank) * batch_size
    return range(first, first + batch_size)


def _stack(name: str, rows: list[dict[str, Tensor]], longest: int) -> Tensor:
    """Stack one argument of the prompts."""
    padded = []
    for row in rows:
        value, missing = row[name], longest - len(row["input_ids"])
        along = value.ndim and len(value) == len(row["input_ids"])
        padded.append(pad_left(value[None], missing)[0] if along else value)
    if len({value.shape for value in padded}) > 1:
        raise ValueError(f"`{name}` has shapes {sorted({tuple(v.shape) for v in padded})}, which cannot be stacked.")
    return torch.stack(padded)


def pad_left(value: Tensor, missing: int) -> Tensor:
    """Pad `(B, S, ...)` with `missing` zeros in front."""
    return F.pad(value, (0, 0) * (value.ndim - 2) + (missing, 0)) if missing else value


class SeededBatches:
    """Indices of the batches of one process: epoch after epoch, each in an order of its own, without a gap between
    them.

    Batch i of the run is the same whether or not the batches before it were asked for, which makes resuming exact.

    Args:
        num_items: Sequences in the dataset.
        batch_size: Indices in a batch.
        seed: Decides the order.
        start: First batch.
        stop: One past the last batch.
        rank: Which process this is.
        num_processes: How many there are; batch i of process r is batch `i * num_processes + r` of all.

    Example:
        >>> batches = list(SeededBatches(num_items=3, batch_size=2, seed=0, start=0, stop=3))
        >>> sorted(sum(batches, []))
        [0, 0, 1, 1, 2, 2]
        >>> list(SeededBatches(num_items=3, batch_size=2, seed=0, start=2, stop=3)) == batches[2:]
        True
    """

    def __init__(
        self, num_items: int, batch_size: int, seed: int, start: int, stop: int, rank: int = 0, num_processes: int = 1
    ):
        self._num_items, self._batch_size, self._seed = num_items, batch_size, seed
        self._range, self._rank, self._num_processes = range(start, stop), rank, num_processes

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[list[int]]:
        order = lru_cache(maxsize=2)(self._order)
        for batch in self._range:
            places = places_of_batch(batch, self._batch_size, self._rank, self._num_processes)
            yield [order(epoch)[index] for epoch, index in (divmod(place, self._num_items) for place in places)]

    def _order(self, epoch: int) -> list[int]:
        """Order of one epoch."""
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self._num_items, generator=generator).tolist()
