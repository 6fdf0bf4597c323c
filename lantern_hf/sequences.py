"""Token sequences of rows that grow at different speeds, the rules that end them, and the stream of their tokens.

Knows no model, tree or cache. Lengths live on the host, tokens on the device; nothing here waits for the device except
stopping criteria that are not transformers' own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from lantern_hf._host import on_device


class Sequences:
    """Prompt and generated tokens of every row.

    Args:
        input_ids: Prompts, `(B, S)` int64.
        capacity: Most tokens a row may gain.
        pad_token_id: What fills a row behind its last token.

    Attributes:
        lengths: Tokens of each row, prompt and its padding included.
        ended: Whether each row has ended; whoever ends one says so here.
    """

    def __init__(self, input_ids: Tensor, capacity: int, pad_token_id: int = 0):
        rows, self.prompt_length = input_ids.shape
        self._pad = pad_token_id
        self._buffer = torch.nn.functional.pad(input_ids, (0, capacity), value=pad_token_id)
        self.lengths = [self.prompt_length] * rows
        self.ended = [False] * rows

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self._buffer.device

    def append(self, tokens: Tensor, counts: list[int]) -> None:
        """Add the first `counts[b]` tokens of each row of `tokens` `(B, A)` int64."""
        needed = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        if needed > self._buffer.shape[1]:  # no length limit was known, as with custom criteria alone
            self._buffer = torch.nn.functional.pad(self._buffer, (0, needed), value=self._pad)
        for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if count:
                self._buffer[row, length : length + count] = tokens[row, :count]
                self.lengths[row] += count

    def row(self, row: int) -> Tensor:
        """Tokens of one row, `(length,)`."""
        return self._buffer[row, : self.lengths[row]]

    def by_length(self, suffix: Tensor | None = None) -> Iterator[tuple[list[int], Tensor]]:
        """Give every row its own prefix, in batches that logits processors and stopping criteria can take.

        A processor may depend on the index of a row (`prefix_allowed_tokens_fn` is told it, others hold a value per
        row), so every batch has all B rows in place; only those of one length are meant to be read from it. Rows that
        have ended are not asked about.

        Args:
            suffix: Tokens to put behind each row, `(B, T)` int64.

        Yields:
            The rows of one length and a `(B, length + T)` int64 matrix.
        """
        running = [None if end else length for length, end in zip(self.lengths, self.ended, strict=True)]
        for length in sorted({length for length in running if length is not None}):
            ids = self._buffer[:, :length]
            yield (
                [row for row, own in enumerate(running) if own == length],
                ids if suffix is None else torch.cat([ids, suffix], dim=1),
            )

    def right_aligned(self) -> Tensor:
        """All rows with their last tokens in the last column, `(B, longest)`; shorter ones repeat their first token."""
        longest = max(self.lengths)
        if min(self.lengths) == longest:
            return self._buffer[:, :longest]
        shift = on_device([[longest - length] for length in self.lengths], self.device)
        columns = torch.arange(longest, device=self.device) - shift
        return self._buffer.gather(1, columns.clamp_min(0))

    def padded(self) -> Tensor:
        """All rows from their first token on, shorter ones padded behind, `(B, longest)`."""
        return self._buffer[:, : max(self.lengths)].clone()


class StopRules:
    """When a row ends, asked token by token as plain decoding asks.

    Args:
        criteria: The prepared criteria of `generate`.

    Raises:
        ValueError: There is none, so that nothing would ever end.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        if not criteria:
            raise ValueError(
                "`stopping_criteria` is empty, so decoding would never end. Call `model.generate(custom_generate="
                "lantern_hf.lantern_generate, max_new_tokens=...)`, or pass a MaxLengthCriteria."
            )
        self.max_length = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=None)
        self._eos = {
            token for c in criteria if isinstance(c, EosTokenCriteria) for token in c.eos_token_id.flatten().tolist()
        }
        self._deadline = min(
            (c.initial_timestamp + c.max_time for c in criteria if isinstance(c, MaxTimeCriteria)), default=None
        )
        known = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
        self._others = StoppingCriteriaList(c for c in criteria if not isinstance(c, known))

    def cut(
        self, sequences: Sequences, tokens: list[list[int]], device_tokens: Tensor, scores: Callable[[list[int]], Any]
    ) -> list[bool]:
        """Append the round's tokens up to the first that ends its row.

        Args:
            sequences: Where the tokens go.
            tokens: New tokens of each row on the host; cut in place to what was appended.
            device_tokens: The same on the device, `(B, A)`.
            scores: Gives the processed scores that plain decoding passes to criteria, told how many tokens of the round
                each row has got.

        Returns:
            Whether each row has ended.
        """
        ends = [self._first_end(length, row) for length, row in zip(sequences.lengths, tokens, strict=True)]
        for row, end in zip(tokens, ends, strict=True):
            if end is not None:
                del row[end:]
        ended = [end is not None for end in ends]
        if not self._others:
            sequences.append(device_tokens, [len(row) for row in tokens])
            return ended
        stopped = self._ask_others(sequences, tokens, device_tokens, scores)
        return [first or second for first, second in zip(ended, stopped, strict=True)]

    def _first_end(self, length: int, tokens: list[int]) -> int | None:
        """How many of the tokens are kept when one of them ends the row, None when none does."""
        if tokens and self._deadline is not None and time.time() > self._deadline:
            return 1  # plain decoding asks after every token, so the first one already ends the row
        for index, token in enumerate(tokens, start=1):
            if token in self._eos or (self.max_length is not None and length + index >= self.max_length):
                return index
        return None

    def _ask_others(
        self, sequences: Sequences, tokens: list[list[int]], device_tokens: Tensor, scores: Callable[[list[int]], Any]
    ) -> list[bool]:
        """Append token by token, and ask the user's criteria after each; gives the rows that they ended."""
        stopped = [False] * len(tokens)
        for step in range(max(len(row) for row in tokens)):
            growing = [step < len(row) and not stopped[index] for index, row in enumerate(tokens)]
            if not any(growing):
                break
            sequences.append(device_tokens[:, step : step + 1], [int(grows) for grows in growing])
            for rows, ids in sequences.by_length():
                asked = [row for row in rows if growing[row]]
                if asked:
                    verdict = self._others(ids, scores([min(step + 1, len(row)) for row in tokens])).tolist()
                    for row in asked:
                        stopped[row] = stopped[row] or bool(verdict[row])
                        if stopped[row]:
                            del tokens[row][step + 1 :]
        return stopped


class ColumnStream:
    """Feeds a transformers streamer: one `(B,)` column a token, in order, as soon as every row has it.

    Args:
        streamer: Object with `put` and `end`, or None.
        sequences: The rows.
        pad_token_id: What ended rows hold.
    """

    def __init__(self, streamer: Any, sequences: Sequences, pad_token_id: int):
        self._streamer, self._sequences, self._pad = streamer, sequences, pad_token_id
        self._rows: list[list[int]] = [[] for _ in sequences.lengths]
        self._sent = 0
        if streamer is not None:
            streamer.put(sequences.padded().cpu())

    def push(self, tokens: list[list[int]], ended: list[bool]) -> None:
        """Take the round's tokens of each row and send the columns that are complete."""
        if self._streamer is None:
            return
        for row, new in zip(self._rows, tokens, strict=True):
            row.extend(new)
        open_rows = [len(row) for row, end in zip(self._rows, ended, strict=True) if not end]
        ready = min(open_rows) if open_rows else max(len(row) for row in self._rows)
        for column in range(self._sent, ready):
            values = [row[column] if column < len(row) else self._pad for row in self._rows]
            self._streamer.put(torch.tensor(values))
        self._sent = max(self._sent, ready)

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self._streamer is not None:
            self._streamer.end()
