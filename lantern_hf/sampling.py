"""Random draws of a generation, each from the user's generator or the row's own; none of them waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Draws:
    """The source of all randomness of one `generate` call.

    With one generator a row, a row's draws do not depend on its batch mates: each takes the same shapes from its own.

    Args:
        generator: A `torch.Generator`, one per row, or None for the global one.
        rows: Number of rows B.
        device: Where draws are needed. A generator may live elsewhere, as on the CPU for a seed that holds on every
            device.

    Raises:
        ValueError: The number of generators is not the number of rows.
        TypeError: Something else than generators was given.
    """

    def __init__(self, generator: torch.Generator | Sequence[torch.Generator] | None, rows: int, device: torch.device):
        if isinstance(generator, Sequence) and len(generator) == 1:
            generator = generator[0]
        if isinstance(generator, Sequence) and len(generator) != rows:
            raise ValueError(
                f"`generator` has {len(generator)} generators for {rows} rows. Pass one, or one per row (rows are "
                "prompts times `num_return_sequences`)."
            )
        for one in generator if isinstance(generator, Sequence) else [generator]:
            if one is not None and not isinstance(one, torch.Generator):
                raise TypeError(f"`generator` must be a torch.Generator or a list of them, got {type(one).__name__}.")
        self._generator, self._rows, self._device = generator, rows, device

    def uniform(self, *shape: int) -> Tensor:
        """Draw from [0, 1): `(B, *shape)` float32."""
        return self._fill(shape, lambda tensor, generator: tensor.uniform_(generator=generator))

    def race(self, probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Draw ids without replacement, in the order drawn.

        An exponential race: the id with the largest `p / E` is a draw from p, the next one a draw from the rest, and so
        on. `torch.multinomial` does the same, but checks its input on the host.

        Args:
            probs: Distributions, `(B, ..., V)` float, normalised or not.
            count: Ids to draw of each; at most V.

        Returns:
            Ids `(B, ..., count)` int64 and whether each was really drawn, bool: where fewer than `count` ids have mass,
            the rest is False.
        """
        noise = self._fill(tuple(probs.shape[1:]), lambda tensor, generator: tensor.exponential_(generator=generator))
        noise = noise.to(probs.device)  # of the head, when the target is spread over several
        ids = (probs / noise.clamp_min(torch.finfo(noise.dtype).tiny)).topk(count, dim=-1).indices
        return ids, probs.gather(-1, ids) > 0

    def _fill(self, shape: tuple[int, ...], fill) -> Tensor:
        """Fill `(B, *shape)` from the generator, or each row from its own."""
        if isinstance(self._generator, Sequence):
            rows = [fill(torch.empty(shape, device=one.device), one) for one in self._generator]
            return torch.stack([row.to(self._device) for row in rows])
        device = self._device if self._generator is None else self._generator.device
        return fill(torch.empty(self._rows, *shape, device=device), self._generator).to(self._device)
