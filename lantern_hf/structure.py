"""Where rows and tree nodes stand inside an image, and what may come there: forced tokens and allowed columns.

Plain tensors; what a family prescribes comes from its adapter, and everything stays on the device. The *offset* of a
place is the number of tokens its image has already: the token decided there is the image's token number `offset`,
counted from 0 right behind the begin-image token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lantern_hf.tree import DraftTree


class ImageRules(Protocol):
    """What an adapter prescribes; see `TargetAdapter` for the meaning of each."""

    structured: bool

    def start(self, input_ids: Tensor) -> Tensor:
        """Offset behind each prompt."""

    def advance(self, offset: Tensor, token_ids: Tensor) -> Tensor:
        """Offset behind a token that was decided at `offset`."""

    def forced(self, offset: Tensor) -> Tensor:
        """Token id that must come, or -1."""

    def allowed(self, offset: Tensor) -> Tensor | None:
        """Columns that may come."""

    def columns_of(self, token_ids: Tensor) -> Tensor:
        """Columns of token ids."""


def node_offsets(rules: ImageRules, root: Tensor, token_ids: Tensor, tree: DraftTree) -> Tensor:
    """Give the offset at every node of a drafted tree.

    Args:
        rules: The family's rules.
        root: Offset behind the root's token, `(B,)` int64.
        token_ids: Tokens of the nodes, `(B, N)` int64.
        tree: The tree, on the same device.

    Returns:
        `(B, N)` int64: the offset of what is decided *behind* each node.
    """
    if not rules.structured:  # nobody looks at them
        return root[:, None] + tree.depths
    offsets = [root[:, None]]
    first = 0  # levels are consecutive runs of node ids, so that a parent's place in the level above is known
    for level, above in zip(tree.levels[1:], tree.levels, strict=False):
        parents = tree.parents[level] - first
        offsets.append(rules.advance(offsets[-1][:, parents], token_ids[:, level]))
        first += len(above)
    return torch.cat(offsets, dim=1)


def allow(rules: ImageRules | None, offset: Tensor | None, scores: Tensor) -> Tensor:
    """Put columns that may not come at minus infinity, before the user's processors see the scores.

    Args:
        rules: The family's rules, or None.
        offset: Offset of each node, `(B, ...)` int64; not looked at without rules.
        scores: `(B, ..., C)` floating point.

    Returns:
        Scores of the same shape.
    """
    if rules is None or offset is None or not rules.structured:
        return scores
    allowed = rules.allowed(offset)
    return scores if allowed is None else scores.masked_fill(~allowed.to(scores.device), -torch.inf)


def force(rules: ImageRules | None, offset: Tensor | None, scores: Tensor) -> Tensor:
    """Put all mass on the forced token, whatever processors made of it; arguments as `allow`."""
    if rules is None or offset is None or not rules.structured:
        return scores
    ids = rules.forced(offset)
    columns = rules.columns_of(ids.clamp_min(0)).clamp_min(0).to(scores.device)
    point = torch.full_like(scores, -torch.inf).scatter_(-1, columns[..., None], 0)
    return torch.where((ids >= 0).to(scores.device)[..., None], point, scores)
