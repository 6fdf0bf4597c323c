"""What a generation returns, and the recorder of the per-token scores and states that a user asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lantern_hf.stats import DecodingStats


@dataclass
class LanternGenerateOutput(GenerateDecoderOnlyOutput):
    """`GenerateDecoderOnlyOutput` with the statistics of the decoding.

    `scores`, `logits` and `hidden_states` hold one entry a generated token, as plain decoding gives them; where a row
    of the batch has ended before the others, its entries are zeros.

    Args:
        stats: Passes, accepted lengths, `relaxed_tv`, seconds.
    """

    stats: DecodingStats | None = None


class TokenRecorder:
    """Collects what was asked for at the node each token was decided on.

    Args:
        rows: Rows B of the generation.
        scores: Whether to keep processed scores.
        logits: Whether to keep raw logits of the conditional stream.
        hidden_states: Whether to keep the hidden states of every layer.
        expand: Spreads columns over the vocabulary.
    """

    def __init__(
        self, rows: int, *, scores: bool, logits: bool, hidden_states: bool, expand: Callable[[Tensor], Tensor]
    ):
        self.wanted = {"scores": scores, "logits": logits, "hidden_states": hidden_states}
        self._rows: dict[str, list[list[Any]]] = {name: [[] for _ in range(rows)] for name in self.wanted}
        self._steps: list[dict[str, Any]] = []
        self._expand = expand

    @classmethod
    def for_call(cls, config: GenerationConfig, rows: int, expand: Callable[[Tensor], Tensor]) -> TokenRecorder:
        """Make the recorder that a generation's settings ask for."""
        wanted = bool(config.return_dict_in_generate)
        return cls(
            rows,
            scores=wanted and bool(config.output_scores),
            logits=wanted and bool(config.output_logits),
            hidden_states=wanted and bool(config.output_hidden_states),
            expand=expand,
        )

    def step(self, *, scores: Tensor, logits: Tensor, hidden_states: Sequence[Tensor] | None) -> None:
        """Note one depth of a round: `(B, C)` scores and logits, and per layer `(B, T, H)` states."""
        values = {"scores": scores, "logits": logits, "hidden_states": hidden_states}
        self._steps.append({name: values[name] for name, wanted in self.wanted.items() if wanted})

    def emit(self, counts: Sequence[int]) -> None:
        """Keep the first `counts[b]` noted depths of each row, and forget the round."""
        for depth, values in enumerate(self._steps):
            for row, count in enumerate(counts):
                if depth < count:
                    for name, value in values.items():
                        self._rows[name][row].append(_take(value, row))
        self._steps = []

    def replace(self, name: str, value: Any) -> None:
        """Put another value in place of what the last step noted, where that is kept."""
        if self.wanted[name]:
            self._steps[-1][name] = value

    def so_far(self, pending: Sequence[int]) -> tuple[Tensor, ...] | None:
        """Scores up to the `pending[b]`-th token of the round, as plain decoding hands them to stopping criteria."""
        if not self.wanted["scores"]:
            return None
        rows = [
            kept + [_take(values["scores"], row) for values in self._steps[:count]]
            for row, (kept, count) in enumerate(zip(self._rows["scores"], pending, strict=True))
        ]
        return tuple(self._column("scores", rows, index) for index in range(max(map(len, rows))))

    def result(self, name: str) -> Any:
        """One kind of record, a tuple with one entry a token; None unless it was asked for."""
        if not self.wanted[name]:
            return None
        rows = self._rows[name]
        return tuple(self._column(name, rows, index) for index in range(max(map(len, rows))))

    def _column(self, name: str, rows: list[list[Any]], index: int) -> Any:
        """Put the rows' entries for one token together."""
        like = next(row[index] for row in rows if len(row) > index)
        entries = [row[index] if len(row) > index else _zeros(like) for row in rows]
        if name == "hidden_states":
            return tuple(torch.stack(layer) for layer in zip(*entries, strict=True))
        return self._expand(torch.stack(entries))


def _take(value: Any, row: int) -> Any:
    """One row of a tensor, or of a sequence of them."""
    return value[row] if isinstance(value, Tensor) else tuple(layer[row] for layer in value)


def _zeros(value: Any) -> Any:
    """Zeros in the shape of a tensor, or of a sequence of them."""
    return torch.zeros_like(value) if isinstance(value, Tensor) else tuple(torch.zeros_like(layer) for layer in value)
