"""The greedy rule: keep the longest path whose every token is the target's best, once it has its neighbours' mass.

Plain tensors in and out, nothing waits for the device. Knows no model, cache or processor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lantern_hf._neighborhood import at_least_float32, neighborhood, table_on, table_size
from lantern_hf._verdict import TreeVerdict, check_shapes
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import STRICT, Relaxation
from lantern_hf.tree import DraftTree

__all__ = ["greedy_node_accepts", "verify_tree_greedy"]


def greedy_node_accepts(
    probs: Tensor, tokens: Tensor, *, neighbors: NeighborTable | None = None, relaxation: Relaxation = STRICT
) -> Tensor:
    """Test tokens greedily: is x the argmax of p once the mass of A(x) is moved onto x?

    Args:
        probs: Target distribution at the parent of each token, `(..., V)` floating point, not a residual.
        tokens: `(...)` int64. A token outside [0, V) is not accepted.
        neighbors: Neighbour table, on the device of the tensors; needed when relaxed.
        relaxation: The knobs. Their `check_table` is the caller's to run, once.

    Returns:
        `(...)` bool. Several siblings may pass when relaxed.
    """
    if relaxation.strict:
        return probs.argmax(-1) == tokens
    inside = (tokens >= 0) & (tokens < probs.shape[-1])
    probs, tokens = at_least_float32(probs), tokens.clamp(0, probs.shape[-1] - 1)
    x = tokens.unsqueeze(-1)
    token_probs = probs.gather(-1, x)
    near = neighborhood(probs, tokens, token_probs.squeeze(-1), neighbors, relaxation)
    moved = probs.scatter(-1, torch.where(near.kept, near.ids, x), 0)
    moved = moved.scatter(-1, x, token_probs + near.mass.unsqueeze(-1))
    return inside & (moved.argmax(-1) == tokens)


def verify_tree_greedy(
    tree: DraftTree,
    tokens: Tensor,
    target_probs: Tensor,
    *,
    neighbors: NeighborTable | None = None,
    neighborhood_size: int = 0,
    lam: float | None = None,
    delta: float | None = None,
) -> TreeVerdict:
    """Keep the longest path of a drafted tree whose every node passes `greedy_node_accepts`, the first in path order.

    Args:
        tree: The tree.
        tokens: Token of each node, `(B, N)` int64.
        target_probs: Target distribution at each node, `(B, N, V)` floating point.
        neighbors: Neighbour table; needed when relaxed.
        neighborhood_size: Entries walked for the borrowed mass. 0 is strict.
        lam: Relative cap, at least 1 (LANTERN++).
        delta: Absolute cap in [0, 1] (LANTERN).

    Returns:
        The verdict. `next_probs` is the target's at the last kept node, its argmax is the next token. `relaxed_tv`
        counts the kept nodes that strict greedy decoding would not have chosen.

    Raises:
        ValueError: Shapes do not fit the tree, or a knob is wrong.
    """
    relaxation = Relaxation(neighborhood_size, lam, delta)
    relaxation.check_table(table_size(neighbors))
    check_shapes(tree, tokens=tokens, target_probs=target_probs)
    tree, neighbors = tree.to(tokens.device), table_on(neighbors, tokens.device)
    strict = target_probs.argmax(-1)[:, tree.parents] == tokens  # the root's own entry is overwritten below
    passes = strict
    if not relaxation.strict:
        levels = [tokens[:, :1] == tokens[:, :1]]
        for ids in tree.levels[1:]:
            at_parent = target_probs[:, tree.parents[ids]]
            levels.append(greedy_node_accepts(at_parent, tokens[:, ids], neighbors=neighbors, relaxation=relaxation))
        passes = torch.cat(levels, 1)  # levels are consecutive runs of node ids
    kept = (passes[:, tree.paths] | (tree.paths == 0)) & (tree.paths >= 0)  # (B, L, D + 1)
    lengths = kept.long().cumprod(-1).sum(-1)
    best = lengths.argmax(1, keepdim=True)  # the first of equal ones
    length = lengths.gather(1, best)
    path = tree.paths[best.squeeze(1)]
    path = path.masked_fill(torch.arange(path.shape[1], device=path.device) >= length, -1)
    last = path.gather(1, length - 1).squeeze(1)
    next_probs = at_least_float32(target_probs[torch.arange(len(last), device=last.device), last])
    parted = (~strict.gather(1, path.clamp_min(0)) & (path > 0)).sum(1)
    return TreeVerdict(path, length.squeeze(1) - 1, next_probs, parted.to(next_probs.dtype))
