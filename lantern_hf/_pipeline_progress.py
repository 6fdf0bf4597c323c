"""What a pipeline shows while it decodes: the progress bar, and the user's callback with what is there so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lantern_hf.session import Session

MISSING = -1
"""In `image_tokens`: a code that is not decoded yet."""


class DecodingProgress:
    """Called by the decoding loop after every round, as `on_round`.

    Args:
        num_tokens: Tokens of one image.
        bar: A tqdm bar over the tokens of all images.
        callback: The user's `callback_on_step_end`, bound to its pipeline, or None.
        names: Tensors the callback wants.
        to_image: Turns complete codes `(B, h * w)` into what the callback gets as `"image"`.
    """

    def __init__(
        self,
        num_tokens: int,
        bar: Any,
        callback: Callable[..., Any] | None,
        names: Sequence[str],
        to_image: Callable[[Tensor], Any],
    ):
        self._num_tokens, self._bar, self._callback, self._names = num_tokens, bar, callback, names
        self._to_image = to_image

    def __call__(self, session: Session) -> None:
        """Move the bar and call the callback."""
        sequences = session.sequences
        counts = [length - sequences.prompt_length for length in sequences.lengths]
        self._bar.update(sum(counts) - self._bar.n)
        if self._callback is None:
            return
        codes = torch.full((len(counts), self._num_tokens), MISSING, device=sequences.device)
        for row, count in enumerate(counts):
            codes[row, :count] = sequences.row(row)[sequences.prompt_length :]
        makers = {"image_tokens": lambda: codes, "image": lambda: self._picture(codes)}
        tensors = {name: makers[name]() for name in self._names}
        self._callback(session.stats.passes - 1, sum(counts), tensors)

    def _picture(self, codes: Tensor) -> Any:
        """Picture of codes `(B, h * w)`, the missing ones as the commonest of their image."""
        commonest = torch.stack([row[row != MISSING].mode().values for row in codes])
        return self._to_image(torch.where(codes == MISSING, commonest[:, None], codes))
