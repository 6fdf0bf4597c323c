"""The acceptance rule: relaxed mass, the multi-round test of siblings, the residual.

Plain tensors in, uniform draws as an argument, plain tensors out. Rows of a batch never mix, loops run only over depth
and sibling rank, and nothing here waits for the device. `walk_level` is one step of the rule, which the decoding loop
calls depth by depth; `verify_tree` is the dense form over the same step. Knows no model, cache or processor.

Tokens are ids in the axis V of the distributions. A token at or past the size of the neighbour table is not a codebook
entry and is tested strictly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lantern_hf._neighborhood import (
    Neighborhood,
    at_least_float32,
    nearest,
    neighborhood,
    neighborhood_mass,
    table_on,
    table_size,
)
from lantern_hf._verdict import TreeVerdict, check_shapes
from lantern_hf.greedy import greedy_node_accepts, verify_tree_greedy
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import STRICT, Relaxation, check_residual
from lantern_hf.tree import DraftTree

__all__ = [
    "LevelVerdict",
    "TreeVerdict",
    "greedy_node_accepts",
    "neighborhood_mass",
    "sibling_probs",
    "verify_tree",
    "verify_tree_greedy",
    "walk_level",
    "walk_tree",
]


class LevelVerdict(NamedTuple):
    """What the test of one node's children gives.

    Attributes:
        rank: `(B,)` int64, rank of the accepted child, -1 when none was.
        next_probs: `(B, V)`, what to draw the next token from when the rank is -1: the last residual, or the target
            itself where no child was tested. Where a child was accepted, the residual that it was tested against.
        relaxed_tv: `(B,)`, relaxed minus strict acceptance probability, summed over the children tested.
    """

    rank: Tensor
    next_probs: Tensor
    relaxed_tv: Tensor


def sibling_probs(draft_probs: Tensor, tokens: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Give the distribution that the sibling of one rank was drawn from.

    It is the sibling's row of `draft_probs` without the earlier siblings of the same row, renormalised; earlier
    siblings of other rows were drawn independently and change nothing.

    Args:
        draft_probs: `(B, M, V)` floating point.
        tokens: Tokens of the siblings, `(B, R)` int64 in [0, V).
        rows: Row of each sibling, `(B, R)` int64 in [0, M).
        rank: Which sibling, in [0, R).

    Returns:
        `(B, V)`, at least float32. All zero where the row had no token left.
    """
    batch, _, vocab_size = draft_probs.shape
    probs = at_least_float32(draft_probs[torch.arange(batch, device=draft_probs.device), rows[:, rank]])
    if rank == 0:
        return probs
    # The spare column takes the siblings of other rows, so that no two writes to one place disagree.
    same_row = rows[:, :rank] == rows[:, rank : rank + 1]
    taken = torch.zeros(batch, vocab_size + 1, dtype=torch.bool, device=probs.device)
    taken.scatter_(1, torch.where(same_row, tokens[:, :rank], vocab_size), True)
    return _normalised(probs.masked_fill(taken[:, :vocab_size], 0))


def walk_level(
    target_probs: Tensor,
    draft_probs: Tensor,
    tokens: Tensor,
    rows: Tensor,
    uniforms: Tensor,
    valid: Tensor,
    *,
    neighbors: NeighborTable | None = None,
    relaxation: Relaxation = STRICT,
    residual: str = "strict",
) -> LevelVerdict:
    """Test the children of the node that each batch row stands on, in rank order, until one is accepted.

    Child x_i is accepted when `u * q_i(x_i) < p(x_i) + sum_A p`, with A walked over the current p. After a rejection
    `p <- normalise(max(p - q_i, 0))`; an all-zero residual means that p = q up to rounding and keeps p. A child with
    `q_i(x_i) = 0` was never drawn (its row had run out of tokens) and is passed over. Arguments are not checked here.

    Args:
        target_probs: Target distribution p at the node, after all processors, `(B, V)` floating point.
        draft_probs: Draft distributions, `(B, M, V)` floating point.
        tokens: Tokens of the children in rank order, `(B, R)` int64; anything where not valid.
        rows: Row of `draft_probs` each child was drawn from, `(B, R)` int64; anything where not valid.
        uniforms: Draws in [0, 1) that test the children, `(B, R)`.
        valid: `(B, R)` bool, False for padding and in batch rows that do not take part.
        neighbors: Neighbour table, on the device of the tensors; needed when relaxed.
        relaxation: The knobs. Their `check_table` is the caller's to run, once.
        residual: `"strict"`, or `"reference"` for the published code: neighbours of a relaxed rejection stay in p.

    Returns:
        The accepted rank, the distribution left, and the chance to part from strict decoding.
    """
    vocab_size = target_probs.shape[-1]
    valid = valid & (tokens >= 0) & (tokens < vocab_size)
    tokens, rows = tokens.clamp(0, vocab_size - 1), torch.where(valid, rows, -1)
    p = at_least_float32(target_probs)
    rank = tokens.new_full(tokens.shape[:1], -1)
    relaxed_tv = p.new_zeros(tokens.shape[:1])
    for i in range(tokens.shape[1]):
        q = sibling_probs(draft_probs, tokens, rows, i)
        x = tokens[:, i : i + 1]
        p_x, q_x = p.gather(1, x).squeeze(1), q.gather(1, x).squeeze(1)
        near = neighborhood(p, x.squeeze(1), p_x, neighbors, relaxation)
        tested = (rank < 0) & valid[:, i] & (q_x > 0)
        accepted = tested & (uniforms[:, i] * q_x < p_x + near.mass)
        if not relaxation.strict:
            relaxed_tv = relaxed_tv + (_ratio(p_x + near.mass, q_x) - _ratio(p_x, q_x)).masked_fill(~tested, 0)
        removed = q if residual == "strict" else _reference_removed(q, x, near, neighbors, relaxation)
        p = torch.where((tested & ~accepted).unsqueeze(1), _residual(p, removed), p)
        rank = rank.masked_fill(accepted, i)
    return LevelVerdict(rank, p, relaxed_tv)


def _ratio(p_x: Tensor, q_x: Tensor) -> Tensor:
    """Acceptance probability `min(1, p / q)`; its value where q is 0 is never used."""
    return (p_x / q_x.clamp_min(torch.finfo(q_x.dtype).tiny)).clamp_max(1)


def _residual(p: Tensor, removed: Tensor) -> Tensor:
    """Normalised positive part of `p - removed`, or p where nothing is left."""
    left = (p - removed).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, _normalised(left), p)


def _reference_removed(
    q: Tensor, x: Tensor, near: Neighborhood, neighbors: NeighborTable | None, relaxation: Relaxation
) -> Tensor:
    """Draft mass the published code takes off: q without x's k + 1 neighbours when anything was borrowed."""
    if near.kept.shape[-1] == 0 or neighbors is None:
        return q
    ids, usable = nearest(neighbors, x.squeeze(1), relaxation.neighborhood_size + 1, q.shape[-1])
    cleared = near.kept.any(-1, keepdim=True) & usable
    # Entries that stay are redirected to x, whose own value is written back last.
    return q.scatter(1, torch.where(cleared, ids, x), 0).scatter(1, x, q.gather(1, x))


def verify_tree(
    tree: DraftTree,
    tokens: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    uniforms: Tensor,
    *,
    neighbors: NeighborTable | None = None,
    neighborhood_size: int = 0,
    lam: float | None = None,
    delta: float | None = None,
    residual: str = "strict",
) -> TreeVerdict:
    """Walk a drafted tree by the multi-round rule and keep the path that is accepted.

    The rule is that of `walk_level` at every node stood on. Strict acceptance keeps the target's distribution exactly,
    for siblings drawn from one row without replacement and for siblings of different rows.

    Args:
        tree: The tree; `tree.rows` says which row of `draft_probs` each node's token was drawn from.
        tokens: Token of each node, `(B, N)` int64, the root's included. A token outside [0, V) is never accepted.
        target_probs: Target distribution at each node, `(B, N, V)` floating point.
        draft_probs: Draft distributions, `(B, N, V)` floating point; only rows named in `tree.rows` are read.
        uniforms: The draw in [0, 1) that tests each node as a candidate, `(B, N)`; the root's is unused.
        neighbors: Neighbour table; needed when relaxed.
        neighborhood_size: Entries walked for the borrowed mass. 0 is strict.
        lam: Relative cap, at least 1 (LANTERN++). 1 is strict.
        delta: Absolute cap in [0, 1] (LANTERN). 0 is strict. Neither cap is strict too.
        residual: `"strict"`, or `"reference"` for the published code.

    Returns:
        The verdict; float64 in gives float64 out, half precision gives float32.

    Raises:
        ValueError: Shapes do not fit the tree, or a knob is wrong.
    """
    relaxation = Relaxation(neighborhood_size, lam, delta)
    relaxation.check_table(table_size(neighbors))
    check_residual(residual)
    check_shapes(tree, tokens=tokens, uniforms=uniforms, target_probs=target_probs, draft_probs=draft_probs)
    batch = torch.arange(tokens.shape[0], device=tokens.device)
    return walk_tree(
        tree.to(tokens.device),
        tokens,
        lambda node, path: target_probs[batch, node],
        draft_probs,
        uniforms,
        neighbors=table_on(neighbors, tokens.device),
        relaxation=relaxation,
        residual=residual,
    )


def walk_tree(
    tree: DraftTree,
    tokens: Tensor,
    target_at: Callable[[Tensor, list[Tensor]], Tensor],
    draft_probs: Tensor,
    uniforms: Tensor,
    *,
    neighbors: NeighborTable | None = None,
    relaxation: Relaxation = STRICT,
    residual: str = "strict",
    stop_early: bool = False,
) -> TreeVerdict:
    """Walk a tree asking for the target's distribution only where a row stands: `verify_tree` without its checks.

    Args:
        tree: The tree, on the device of the tensors.
        tokens: Token of each node, `(B, N)` int64.
        target_at: Gives the target's distributions `(B, V)` at one node a row `(B,)`, told the nodes of the path so
            far, root first, each `(B,)`. Called once a depth; a row that has stopped stays where it is, and its answer
            is not read.
        draft_probs: Draft distributions, `(B, M, V)`.
        uniforms: The draw that tests each node, `(B, N)`.
        neighbors: Neighbour table on the same device.
        relaxation: The knobs.
        residual: As in `verify_tree`.
        stop_early: Leave the walk when no row goes on. That asks the device, so it is for where asking is free.

    Returns:
        The verdict.
    """
    batch = torch.arange(tokens.shape[0], device=tokens.device)
    node, walking = torch.zeros_like(batch), torch.ones_like(batch, dtype=torch.bool)
    standing, path = [node], [node]
    p = at_least_float32(target_at(node, standing))
    next_probs, relaxed_tv = p, p.new_zeros(len(batch))
    for width in tree.widths:
        children = tree.children[node, :width]
        ids = children.clamp_min(0)
        level = walk_level(
            p,
            draft_probs,
            tokens.gather(1, ids),
            tree.rows[ids],
            uniforms.gather(1, ids),
            (children >= 0) & walking.unsqueeze(1),
            neighbors=neighbors,
            relaxation=relaxation,
            residual=residual,
        )
        next_probs = torch.where(walking.unsqueeze(1), level.next_probs, next_probs)
        relaxed_tv, walking = relaxed_tv + level.relaxed_tv, level.rank >= 0
        chosen = ids.gather(1, level.rank.clamp_min(0).unsqueeze(1)).squeeze(1)
        node = torch.where(walking, chosen, node)
        path.append(torch.where(walking, node, -1))
        if stop_early and not bool(walking.any()):
            break
        standing.append(node)
        p = at_least_float32(target_at(node, standing))
        next_probs = torch.where(walking.unsqueeze(1), p, next_probs)
    path += [torch.full_like(node, -1)] * (tree.max_depth + 1 - len(path))
    kept = torch.stack(path, 1)
    return TreeVerdict(kept, (kept > 0).sum(1), next_probs, relaxed_tv)


def _normalised(mass: Tensor) -> Tensor:
    """Scale to sum 1; all zero stays all zero."""
    return mass / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
