"""The 2-D rotary embedding of LlamaGen: a table of cosines and sines over a prefix and a grid, and its application.

Plain tensors in and out; this file knows no model and no cache. LlamaGen's transformer and the draft heads trained for
it read the same table, so that a head rotates exactly as its target does.

The convention (arXiv 2406.06525, `precompute_freqs_cis_2d`; checked against `tests/golden/llamagen_target*`):

- A head of dimension D is D/2 *interleaved* pairs `(x[2i], x[2i + 1])`.
- The first D/4 pairs turn by the row, the last D/4 by the column, both counted from 0, with the same D/4 frequencies
  `base ** (-2i / (D/2))`.
- Position `0 .. prefix_length - 1` is the prefix (text or class), `prefix_length + i` is image position i, row by row.
- The prefix is rotated by *zeros* as published: cos = sin = 0, so prefix queries and keys vanish and attention
  to the prefix is uniform over what the mask allows. `"identity"` (cos = 1, sin = 0) leaves it unrotated instead.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PREFIX_ROTATIONS = ("zero", "identity")


def rotary_table_2d(
    grid: Sequence[int],
    prefix_length: int,
    head_dim: int,
    base: float = 10000.0,
    prefix_rotation: str = "zero",
) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of every prefix and image position, on the CPU.

    Args:
        grid: Height and width of the image in tokens, `[h, w]`.
        prefix_length: Positions before the image, at least 0.
        head_dim: Dimension D of one attention head, a multiple of 4.
        base: Base of the geometric series of frequencies.
        prefix_rotation: `"zero"` (cos = sin = 0 in the prefix, as published) or `"identity"` (cos = 1, sin = 0).

    Returns:
        `(cos, sin)`, each `(prefix_length + h * w, D/2)` float32.

    Raises:
        ValueError: A size is not positive, `head_dim` is no multiple of 4, or `prefix_rotation` is unknown.

    Example:
        >>> cos, sin = rotary_table_2d([1, 2], prefix_length=1, head_dim=4)
        >>> sin.tolist()  # prefix, then columns 0 and 1 of row 0; pair 0 turns by the row, pair 1 by the column
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.8414709568023682]]
    """
    _check_table(grid, prefix_length, head_dim, prefix_rotation)
    height, width = grid
    quarter = head_dim // 4
    # The exponent is 2i / (D/2), in this form because it reproduces the published float32 values bit for bit.
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device="cpu")[:quarter] / (head_dim // 2)
    frequencies = 1.0 / (base**exponents)  # (D/4,)
    steps = torch.arange(max(height, width), dtype=torch.float32, device="cpu")
    angles = torch.outer(steps, frequencies)  # (max(h, w), D/4)
    rows = angles[:height, None].expand(height, width, quarter)
    columns = angles[None, :width].expand(height, width, quarter)
    image = torch.cat([rows, columns], dim=-1).flatten(0, 1)  # (h * w, D/2)
    prefix = torch.full((prefix_length, head_dim // 2), float(prefix_rotation == "identity"), device="cpu")
    return torch.cat([prefix, image.cos()]), torch.cat([torch.zeros_like(prefix), image.sin()])


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the interleaved pairs of queries or keys.

    Args:
        x: Queries or keys, `(B, heads, S, D)`.
        cos: Cosines of the pairs, `(B, S, D/2)` float32; `(1, S, D/2)` broadcasts.
        sin: Sines of the pairs, same shape.

    Returns:
        `(B, heads, S, D)` of x's dtype; the arithmetic is float32 whatever x is.
    """
    cos, sin = cos[:, None], sin[:, None]  # (B, 1, S, D/2)
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


class RotaryTable2D(nn.Module):
    """Look up `rotary_table_2d` by position, on whatever device the positions are.

    The table is neither parameter nor buffer: it stays float32 under `.to(torch.bfloat16)`, is never saved, and is
    made on first use, so that a model built on the meta device by `from_pretrained` still gets the right numbers.

    Args:
        grid: Height and width of the image in tokens, `[h, w]`.
        prefix_length: Positions before the image.
        head_dim: Dimension D of one attention head, a multiple of 4.
        base: Base of the geometric series of frequencies.
        prefix_rotation: `"zero"` or `"identity"`.

    Raises:
        ValueError: As `rotary_table_2d`.
    """

    def __init__(
        self,
        grid: Sequence[int],
        prefix_length: int,
        head_dim: int,
        base: float = 10000.0,
        prefix_rotation: str = "zero",
    ):
        super().__init__()
        _check_table(grid, prefix_length, head_dim, prefix_rotation)
        self.grid = (int(grid[0]), int(grid[1]))
        self.prefix_length = prefix_length
        self.head_dim = head_dim
        self.base = base
        self.prefix_rotation = prefix_rotation
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    @property
    def num_positions(self) -> int:
        """Rows of the table: the prefix and the whole image."""
        return self.prefix_length + self.grid[0] * self.grid[1]

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Give the cosines and sines of each position.

        Args:
            position_ids: Positions, `(B, S)` int64. Positions past the last image position read the last row of the
                table (and negative ones, which only padding has, the first): a draft tree may run over the end of the
                image, where its nodes are scored but never committed.

        Returns:
            `(cos, sin)`, each `(B, S, D/2)` float32 on the device of `position_ids`.
        """
        cos, sin = self._table(position_ids.device)
        rows = position_ids.clamp(0, self.num_positions - 1)
        return cos[rows], sin[rows]

    def _table(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Give the table on `device`, made once."""
        if device not in self._tables:
            # A tensor born in inference mode may not enter a later training step, and this one outlives the call.
            with torch.inference_mode(False):
                cos, sin = rotary_table_2d(
                    self.grid, self.prefix_length, self.head_dim, self.base, self.prefix_rotation
                )
                self._tables[device] = (cos.to(device), sin.to(device))
        return self._tables[device]

    def extra_repr(self) -> str:
        """Show the geometry in `print(model)`."""
        return f"grid={self.grid}, prefix_length={self.prefix_length}, prefix_rotation={self.prefix_rotation!r}"


def _check_table(grid: Sequence[int], prefix_length: int, head_dim: int, prefix_rotation: str) -> None:
    """Refuse sizes that give no table."""
    if len(grid) != 2 or min(grid) < 1:
        raise ValueError(f"`grid` must be [height, width] in tokens, both at least 1, got {list(grid)}.")
    if prefix_length < 0:
        raise ValueError(f"`prefix_length` must be at least 0, got {prefix_length}.")
    if head_dim < 4 or head_dim % 4:
        raise ValueError(
            f"`head_dim` must be a positive multiple of 4 for a 2-D rotary embedding, got {head_dim}. "
            "Change `hidden_size` or `num_attention_heads`."
        )
    if prefix_rotation not in PREFIX_ROTATIONS:
        raise ValueError(f"`prefix_rotation` must be one of {list(PREFIX_ROTATIONS)}, got {prefix_rotation!r}.")
