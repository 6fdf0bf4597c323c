"""What a pipeline shows while it decodes: the progress bar, and the user's callback with what is there so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lantern_hf._pipeline_canvas import Canvas
from lantern_hf.session import Session


class DecodingProgress:
    """Called by the decoding loop after every round, as `on_round`.

    Args:
        canvas: The images of the call.
        bar: A tqdm bar over the tokens of all images.
        callback: The user's `callback_on_step_end`, bound to its pipeline, or None.
        names: Tensors the callback wants.
        to_image: Turns images of codes, each `(h, w)`, into what the callback gets as `"image"`.
    """

    def __init__(
        self,
        canvas: Canvas,
        bar: Any,
        callback: Callable[..., Any] | None,
        names: Sequence[str],
        to_image: Callable[[list[Tensor]], Any],
    ):
        self._canvas, self._bar, self._callback, self._names = canvas, bar, callback, names
        self._to_image = to_image
        bar.unit = "token"

    def __call__(self, session: Session) -> None:
        """Move the bar and call the callback."""
        sequences = session.sequences
        done = sum(length - sequences.prompt_length for length in sequences.lengths)
        # Counted on the host, since the statistics would wait for the device; rows that have ended count as decoding.
        rate = (done - session.rows) / (session.rows * session.stats.passes)
        self._bar.set_postfix_str(f"{rate:.2f} tokens a pass", refresh=False)
        self._bar.update(done - self._bar.n)
        if self._callback is None:
            return
        codes = self._canvas.unfinished(sequences)
        makers = {"image_tokens": lambda: codes, "image": lambda: self._to_image(self._canvas.filled(codes))}
        tensors = {name: makers[name]() for name in self._names}
        self._callback(session.stats.passes - 1, done, tensors)

    def finish(self) -> None:
        """Close the gap that images shorter than the longest one leave."""
        self._bar.total = self._bar.n
        self._bar.refresh()
