"""Rows of different length, the rules that end them, the stream of their tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from lantern_hf.sequences import ColumnStream, Sequences, StopRules


def ragged() -> Sequences:
    """Three rows of 5, 3 and 4 tokens."""
    sequences = Sequences(torch.tensor([[1, 2], [3, 4], [5, 6]]), capacity=4, pad_token_id=9)
    sequences.append(torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]]), [3, 1, 2])
    return sequences


def test_rows_grow_by_their_own_counts() -> None:
    sequences = ragged()
    assert sequences.lengths == [5, 3, 4]
    assert [sequences.row(row).tolist() for row in range(3)] == [[1, 2, 10, 11, 12], [3, 4, 20], [5, 6, 30, 31]]
    assert sequences.padded().tolist() == [[1, 2, 10, 11, 12], [3, 4, 20, 9, 9], [5, 6, 30, 31, 9]]


def test_right_aligned_ends_every_row_in_the_last_column() -> None:
    assert ragged().right_aligned().tolist() == [[1, 2, 10, 11, 12], [3, 3, 3, 4, 20], [5, 5, 6, 30, 31]]
    even = Sequences(torch.tensor([[1, 2]]), 3)
    assert even.right_aligned().tolist() == [[1, 2]]


def test_batches_by_length_keep_every_row_in_place() -> None:
    sequences = ragged()
    suffix = torch.tensor([[7], [8], [6]])
    batches = list(sequences.by_length(suffix))
    assert [rows for rows, _ in batches] == [[1], [2], [0]]
    for rows, ids in batches:
        assert ids.shape[0] == 3
        for row in rows:
            assert ids[row].tolist() == [*sequences.row(row).tolist(), int(suffix[row])]
    sequences.ended = [False, True, False]
    assert [rows for rows, _ in sequences.by_length()] == [[2], [0]]


def test_capacity_grows_when_no_limit_was_known() -> None:
    sequences = Sequences(torch.tensor([[1]]), capacity=0, pad_token_id=7)
    for token in range(5):
        sequences.append(torch.tensor([[token]]), [1])
    assert sequences.padded().tolist() == [[1, 0, 1, 2, 3, 4]]


def test_the_prompt_is_not_touched() -> None:
    prompt = torch.tensor([[1, 2]])
    sequences = Sequences(prompt, 0)
    sequences.append(torch.tensor([[5]]), [1])
    assert prompt.tolist() == [[1, 2]]


def cut(criteria: list[Any], tokens: list[list[int]], prompt: int = 2) -> tuple[list[list[int]], list[bool]]:
    """What is kept of the tokens, and which rows ended."""
    width = max(map(len, tokens))
    device = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
    sequences = Sequences(torch.zeros(len(tokens), prompt, dtype=torch.long), 8)
    kept = [list(row) for row in tokens]
    ended = StopRules(StoppingCriteriaList(criteria)).cut(sequences, kept, device, lambda counts: None)
    assert [sequences.row(row)[prompt:].tolist() for row in range(len(tokens))] == kept
    return kept, ended


def test_end_tokens_and_length() -> None:
    eos = EosTokenCriteria(torch.tensor([3, 4]))
    assert cut([eos], [[1, 3, 5], [5, 6, 7]]) == ([[1, 3], [5, 6, 7]], [True, False])
    assert cut([MaxLengthCriteria(4)], [[1, 3, 5], [5]]) == ([[1, 3], [5]], [True, False])
    assert cut([MaxLengthCriteria(9), MaxLengthCriteria(3), eos], [[1, 3, 5]]) == ([[1]], [True])
    assert cut([eos], [[1, 2, 4], []]) == ([[1, 2, 4], []], [True, False])


def test_time() -> None:
    late = MaxTimeCriteria(1.0, initial_timestamp=time.time() - 5)
    assert cut([late], [[1, 3, 5], []]) == ([[1], []], [True, False])
    assert cut([MaxTimeCriteria(100.0)], [[1, 3, 5]]) == ([[1, 3, 5]], [False])


class At(StoppingCriteria):
    """Ends a row at a token."""

    def __init__(self, token: int):
        self.token = token
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.lengths.append(input_ids.shape[1])
        return input_ids[:, -1] == self.token


def test_other_criteria_are_asked_token_by_token() -> None:
    criterion = At(7)
    assert cut([criterion], [[1, 7, 5], [5, 6, 8]]) == ([[1, 7], [5, 6, 8]], [True, False])
    assert criterion.lengths == [3, 4, 5]
    both = At(7)
    assert cut([EosTokenCriteria(torch.tensor([1])), both], [[1, 7], [7, 1]]) == ([[1], [7]], [True, True])
    assert both.lengths == [3]


def test_no_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="would never end"):
        StopRules(StoppingCriteriaList())


class Streamer:
    """Records what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


def test_columns_are_sent_when_every_running_row_has_them() -> None:
    streamer = Streamer()
    stream = ColumnStream(streamer, Sequences(torch.tensor([[1], [2]]), 0), pad_token_id=0)
    stream.push([[3, 4, 5], [6]], [False, False])
    assert streamer.got == [[[1], [2]], [3, 6]]
    stream.push([[], [7]], [True, False])
    assert streamer.got[2:] == [[4, 7]]
    stream.push([[], [8, 9]], [True, True])
    stream.end()
    assert streamer.got[3:] == [[5, 8], [0, 9], "end"]


def test_no_streamer_is_no_work() -> None:
    stream = ColumnStream(None, Sequences(torch.tensor([[1]]), 0), 0)
    stream.push([[3]], [True])
    stream.end()
