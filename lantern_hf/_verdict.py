"""What a verified tree gives, and the check of shapes that both rules share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lantern_hf.tree import DraftTree


class TreeVerdict(NamedTuple):
    """What one verified tree gives.

    Attributes:
        path: `(B, D + 1)` int64, ids of the kept nodes from the root on, padded with -1.
        accepted_length: `(B,)` int64, drafted tokens kept, root and bonus token excluded.
        next_probs: `(B, V)`, distribution of the next token: the target's at the last kept node, or the residual there.
        relaxed_tv: `(B,)`, chance that relaxed and strict decoding part ways, summed over the siblings tested.
    """

    path: Tensor
    accepted_length: Tensor
    next_probs: Tensor
    relaxed_tv: Tensor


def check_shapes(tree: DraftTree, **tensors: Tensor) -> None:
    """Check that every tensor has the batch, the nodes and the vocabulary that the others and the tree have."""
    batch, vocab_size = tensors["tokens"].shape[0], tensors["target_probs"].shape[-1]
    for name, tensor in tensors.items():
        expected = (batch, tree.num_nodes, vocab_size) if name.endswith("_probs") else (batch, tree.num_nodes)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"`{name}` must have shape {expected} for this tree of {tree.num_nodes} nodes (root included), "
                f"got {tuple(tensor.shape)}. Pass one entry per node, in node order."
            )
