"""`DecodingStats`: what one generation did, counted on the device and read back only when somebody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["DecodingStats"]

_FOLD_EVERY = 4096  # rounds kept on the device; a generation rarely has more, so it rarely waits


class DecodingStats:
    """Counts of one generation, or of several merged ones.

    `add_round` only queues small device tensors. The first read of a number after it waits for the device once and
    folds all of them. A pass is one forward of the target over a tree; the prefill is counted apart and is in no ratio.

    Args:
        batch_size: Rows B of the generation; under guidance the conditional ones only.
        max_depth: Deepest level D of the tree.

    Attributes:
        passes: Target passes over a tree.
        prefill_passes: Target passes over the prompt.
        seconds: Wall-clock seconds per part: `"draft"`, `"verify"`, `"accept"`, `"total"` and whatever else was timed.
            Measured on the host without waiting for the device.
    """

    def __init__(self, batch_size: int, max_depth: int) -> None:
        self.passes = 0
        self.prefill_passes = 0
        self.seconds: dict[str, float] = {}
        self._prefill_tokens = [0] * batch_size
        self._new_tokens = [0] * batch_size
        self._row_passes = [0] * batch_size
        self._relaxed_tv = [0.0] * batch_size
        self._drafted_nodes = 0
        self._lengths = [0] * (max_depth + 1)
        self._tested = [0] * max_depth
        self._pending: list[Tensor] = []

    def add_prefill(self, tokens: int = 1) -> None:
        """Count one pass over the prompt that gave every row `tokens` new tokens; 0 when only the cache was filled."""
        self.prefill_passes += 1
        self._prefill_tokens = [count + tokens for count in self._prefill_tokens]

    def add_round(
        self,
        accepted_length: Tensor,
        relaxed_tv: Tensor,
        *,
        drafted_nodes: int,
        new_tokens: Tensor | None = None,
        tested_depth: Tensor | None = None,
        active: Tensor | None = None,
    ) -> None:
        """Queue one pass over a tree, without waiting for the device.

        Args:
            accepted_length: Drafted tokens accepted, bonus excluded, `(B,)` int64.
            relaxed_tv: As the verdict has it, `(B,)` floating point.
            drafted_nodes: Nodes each row drafted, the root excluded.
            new_tokens: Tokens really emitted, after any cut at EOS or length, `(B,)`. Default: accepted_length + 1.
            tested_depth: Deepest level at which a sibling was tested, `(B,)`. Default: one below the last
                accepted node. Give it when a path can end at a leaf above the deepest level.
            active: Rows that were still decoding, `(B,)` bool. Default: all. The others count nothing.
        """
        deepest = len(self._tested)
        new_tokens = accepted_length + 1 if new_tokens is None else new_tokens
        tested = (accepted_length + 1).clamp_max(deepest) if tested_depth is None else tested_depth
        active = torch.ones_like(accepted_length) if active is None else active
        drafted = torch.full_like(accepted_length, drafted_nodes)
        # float32 because MPS has no float64; the counts of one round are far below 2**24, so nothing is rounded.
        columns = [accepted_length, new_tokens, tested, drafted, active, relaxed_tv]
        self._pending.append(torch.stack([column.detach().float() for column in columns], 1))
        self.passes += 1
        if len(self._pending) >= _FOLD_EVERY:
            self._fold()

    @contextmanager
    def timer(self, part: str) -> Iterator[None]:
        """Add the wall-clock time of a `with` block to `seconds[part]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    @property
    def new_tokens(self) -> list[int]:
        """Tokens each row emitted, those of the prefill included."""
        self._fold()
        return [a + b for a, b in zip(self._new_tokens, self._prefill_tokens, strict=True)]

    @property
    def accepted_lengths(self) -> list[int]:
        """Histogram over rows and passes: entry n counts the passes that accepted n drafted tokens."""
        self._fold()
        return list(self._lengths)

    @property
    def tested_per_depth(self) -> list[int]:
        """Row passes that tested a sibling at depth 1, 2, ..., D."""
        self._fold()
        return list(self._tested)

    @property
    def accepted_per_depth(self) -> list[int]:
        """Row passes that accepted a token at depth 1, 2, ..., D."""
        self._fold()
        return [sum(self._lengths[depth:]) for depth in range(1, len(self._lengths))]

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Share accepted of what was tested at each depth; 0 where nothing was."""
        return [a / t if t else 0.0 for a, t in zip(self.accepted_per_depth, self.tested_per_depth, strict=True)]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a row got from a target pass over a tree, prefill excluded; 0 before the first pass."""
        self._fold()
        return sum(self._new_tokens) / max(sum(self._row_passes), 1)

    @property
    def row_passes(self) -> list[int]:
        """Passes in which each row was still decoding."""
        self._fold()
        return list(self._row_passes)

    @property
    def row_tokens_per_pass(self) -> list[float]:
        """Tokens each row got from a target pass over a tree, prefill excluded; 0 for a row without one."""
        self._fold()
        return [tokens / max(passes, 1) for tokens, passes in zip(self._new_tokens, self._row_passes, strict=True)]

    @property
    def relaxed_tv(self) -> list[float]:
        """Per row, the summed chance that relaxed and strict decoding parted ways; bounds the total variation."""
        self._fold()
        return list(self._relaxed_tv)

    @property
    def relaxed_tv_per_token(self) -> float:
        """`relaxed_tv` of all rows over the tokens that tree passes gave; 0 before the first pass."""
        self._fold()
        return sum(self._relaxed_tv) / max(sum(self._new_tokens), 1)

    @property
    def drafted_nodes(self) -> int:
        """Nodes drafted in all, over rows and passes."""
        self._fold()
        return self._drafted_nodes

    def merge(self, other: DecodingStats) -> DecodingStats:
        """Return the stats of both generations: counts and seconds are added, rows are set side by side."""
        merged = DecodingStats(0, max(len(self._tested), len(other._tested)))
        for part in (self, other):
            part._fold()
            merged.passes += part.passes
            merged.prefill_passes += part.prefill_passes
            merged._drafted_nodes += part._drafted_nodes
            for name in ("_prefill_tokens", "_new_tokens", "_row_passes", "_relaxed_tv"):
                getattr(merged, name).extend(getattr(part, name))
            for name in ("_lengths", "_tested"):
                for index, count in enumerate(getattr(part, name)):
                    getattr(merged, name)[index] += count
            for name, value in part.seconds.items():
                merged.seconds[name] = merged.seconds.get(name, 0.0) + value
        return merged

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        names = (
            "passes prefill_passes tokens_per_pass new_tokens row_passes accepted_lengths tested_per_depth "
            "accepted_per_depth acceptance_per_depth relaxed_tv relaxed_tv_per_token drafted_nodes seconds"
        )
        return {name: getattr(self, name) for name in names.split()} | {"seconds": dict(self.seconds)}

    def _fold(self) -> None:
        """Bring the queued rounds to the host in one transfer and add them up."""
        if not self._pending:
            return
        rounds = torch.stack(self._pending).cpu().double()  # (T, B, 6)
        self._pending = []
        active = rounds[..., 4] > 0
        counts = rounds.masked_fill(~active.unsqueeze(-1), 0)
        per_row = counts.sum(0)
        for name, column in (("_new_tokens", 1), ("_row_passes", 4)):
            old = getattr(self, name)
            setattr(self, name, [a + int(b) for a, b in zip(old, per_row[:, column].tolist(), strict=True)])
        self._relaxed_tv = [a + b for a, b in zip(self._relaxed_tv, per_row[:, 5].tolist(), strict=True)]
        self._drafted_nodes += int(per_row[:, 3].sum())
        lengths = torch.bincount(rounds[..., 0][active].long(), minlength=len(self._lengths)).tolist()
        self._lengths = [a + b for a, b in zip(self._lengths, lengths, strict=True)]
        tested = rounds[..., 2][active]
        self._tested = [count + int((tested > depth).sum()) for depth, count in enumerate(self._tested)]

    def __repr__(self) -> str:
        return (
            f"DecodingStats({sum(self.new_tokens)} tokens in {self.passes} passes, {self.tokens_per_pass:.2f} tokens "
            f"per pass, relaxed_tv {self.relaxed_tv_per_token:.4f} per token)"
        )
