"""The relaxed mass: how much of its neighbours' probability a token may borrow. The one place of that formula."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import Relaxation


def neighborhood_mass(
    probs: Tensor,
    tokens: Tensor,
    neighbors: NeighborTable | None = None,
    neighborhood_size: int = 0,
    lam: float | None = None,
    delta: float | None = None,
) -> Tensor:
    """Sum the mass that tokens may borrow from their latent neighbours.

    Walks each token's `neighborhood_size` nearest codebook entries, nearest first, and keeps the longest prefix A with
    `sum_A p <= (lam - 1) * p(x)` (LANTERN++, arXiv 2502.06352) or `sum_A p <= delta` (LANTERN, arXiv 2410.03355).

    Args:
        probs: Target distributions, `(..., V)` floating point. Half precision is computed in float32.
        tokens: Token of each distribution, `(...)` int64 in [0, V).
        neighbors: Table over the codebook. Entries at or past V have no mass.
        neighborhood_size: Entries walked, at most the table's k. 0 is strict.
        lam: Relative cap, at least 1; 1 is strict.
        delta: Absolute cap in [0, 1]; 0 is strict.

    Returns:
        `(...)` mass besides the token's own, in [0, 1]; exactly 0 where strict.

    Raises:
        ValueError: A knob is out of range, both caps are given, or the table is missing or too small.
    """
    relaxation = Relaxation(neighborhood_size, lam, delta)
    relaxation.check_table(table_size(neighbors))
    probs = at_least_float32(probs)
    token_probs = probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return neighborhood(probs, tokens, token_probs, neighbors, relaxation).mass


class Neighborhood(NamedTuple):
    """Borrowed mass `(...)`, neighbours `(..., k)` and which of them are in the prefix; k = 0 when strict."""

    mass: Tensor
    ids: Tensor
    kept: Tensor


def neighborhood(
    probs: Tensor, tokens: Tensor, token_probs: Tensor, neighbors: NeighborTable | None, relaxation: Relaxation
) -> Neighborhood:
    """Walk the neighbours of each token; see `neighborhood_mass`."""
    if relaxation.strict or neighbors is None:
        none = tokens.new_zeros(*tokens.shape, 0)
        return Neighborhood(torch.zeros_like(token_probs), none, none.bool())
    ids, usable = nearest(neighbors, tokens, relaxation.neighborhood_size, probs.shape[-1])
    total = probs.gather(-1, ids).masked_fill(~usable, 0).cumsum(-1)
    kept = (total <= _cap(token_probs, relaxation).unsqueeze(-1)) & _in_codebook(neighbors, tokens).unsqueeze(-1)
    # Running sums do not fall, so the largest kept one is the sum of the longest prefix.
    return Neighborhood(total.masked_fill(~kept, 0).amax(-1), ids, kept & usable)


def _cap(token_probs: Tensor, relaxation: Relaxation) -> Tensor:
    """Most mass each token may borrow `(...)`."""
    if relaxation.lam is not None:
        return (relaxation.lam - 1) * token_probs
    return torch.full_like(token_probs, relaxation.delta or 0)


def nearest(neighbors: NeighborTable, tokens: Tensor, count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Look up the `count` nearest entries of each token `(..., count)`, and which of them lie in the vocabulary."""
    table = neighbors.indices[:, :count]
    ids = table[tokens.clamp(0, table.shape[0] - 1)].long()
    return ids.clamp_max(vocab_size - 1), ids < vocab_size


def _in_codebook(neighbors: NeighborTable, tokens: Tensor) -> Tensor:
    """Mark the tokens that are codebook entries."""
    return (tokens >= 0) & (tokens < neighbors.indices.shape[0])


def table_size(neighbors: NeighborTable | None) -> int | None:
    """Neighbours per entry, or None without a table."""
    return None if neighbors is None else neighbors.indices.shape[1]


def table_on(neighbors: NeighborTable | None, device: torch.device) -> NeighborTable | None:
    """Move an optional table."""
    return None if neighbors is None else neighbors.to(device)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Upcast half precision; sums over a large vocabulary are not safe in it."""
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
