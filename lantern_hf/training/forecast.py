"""How many tokens a pass strict decoding would give with a tree, computed from the target's own sequences.

Let y be a sequence the target drew, and let a pass stand at its token i as the root. At depth k of the tree the target
has p, the head q from its own unrolled features, both given y up to there, and siblings x_1, x_2, ... are drawn from q
without replacement. With p_r and q_r what is left of both after r - 1 rejections,

    a_r(y) = prod_{s < r} (1 - min(1, p_s(x_s) / q_s(x_s))) * min(p_r(y), q_r(y))

is, in the mean over the draws, the chance that the r-th sibling is accepted and is y. Strict decoding emits y with
chance p(y), so given that y was emitted, it came from sibling r with chance a_r(y) / p(y). Along the tree these
multiply, which gives the chance that the pass from i emits just l tokens, P_i(l). Passes draw independently, so the
chance R_j that token j is the root of a pass follows from R_0 = 1 and R_j = sum_l R_{j-l} P_{j-l}(l), and

    tokens per pass = tokens after the first / sum_j R_j.

The mean over draws is taken by drawing once for each root and depth; every term is linear in each of these draws, so
the sum of R is an unbiased estimate of the number of passes that decoding these very sequences took. For sequences of
another source it tells how well the head follows them. Relaxed decoding accepts more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_hf.draft import LanternDraftModel
from lantern_hf.sampling import Draws
from lantern_hf.targets import TargetAdapter
from lantern_hf.training.binding import Places
from lantern_hf.training.data import TokenBatch
from lantern_hf.training.features import TargetFeatures
from lantern_hf.training.losses import distribution, draft_passes
from lantern_hf.tree import DraftTree

__all__ = ["forecast_passes", "rank_shares"]

_CHUNK = 1 << 24  # probabilities worked on at a time


@torch.no_grad()
def forecast_passes(
    head: LanternDraftModel,
    features: TargetFeatures,
    adapter: TargetAdapter,
    batch: TokenBatch,
    tree: DraftTree,
    *,
    guidance_scale: float | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Estimate the passes that strict decoding of a batch takes, at temperature 1 and without other processors.

    Args:
        head: The head.
        features: Features of the batch, `(2B, ...)` under guidance.
        adapter: Adapter of the target, made for the batch's prompts.
        batch: The batch, B rows.
        tree: The tree.
        guidance_scale: Guidance of the decoding; None is none.
        generator: Source of the draws; the global one by default.

    Returns:
        For each row `(B,)`: `passes`, `tokens` (those after the first) and, for every depth d of the tree,
        `accepted_<d>`, the passes that accept a token at that depth.
    """
    hidden, rows = features.next_hidden[:, features.start :], len(batch.tokens)
    places = None if features.places is None else Places(*(value[:rows] for value in features.places))
    offsets = None if places is None else places.offsets
    target = distribution(adapter, hidden, guidance_scale, offsets).exp()  # (B, n, C)
    columns = adapter.columns_of(batch.tokens[:, 1:]).to(target.device)  # entry j is to give token j + 1
    learnt = batch.tokens_mask[:, 1:].to(target.device) & (columns >= 0)
    shares = []
    for depth, output in enumerate(draft_passes(head, features, tree.max_depth)):
        here = None if offsets is None else offsets[:, depth:]
        draft = distribution(adapter, output.to(hidden.dtype), guidance_scale, here).exp()
        share = _shares(target[:, depth:], draft, columns[:, depth:], tree.widths[depth], generator)
        if places is not None:  # what must come is drafted at rank 0, and accepted
            first = torch.eye(1, share.shape[-1], device=share.device)
            share = torch.where(places.forced[:, depth:, None], first, share)
        # A pass ends with the sequence: what lies behind its last token is neither tested nor emitted.
        shares.append(F.pad(share * learnt[:, depth:, None], (0, 0, 0, depth)))
    return _renewal(tree, shares, learnt)


def _shares(target: Tensor, draft: Tensor, columns: Tensor, width: int, generator: torch.Generator | None) -> Tensor:
    """`rank_shares` of all entries `(B, n, width)`, a few at a time."""
    flat = target.flatten(0, 1), draft.flatten(0, 1), columns.clamp_min(0).flatten()
    step = max(_CHUNK // target.shape[-1], 1)
    parts = [
        rank_shares(
            flat[0][first : first + step],
            flat[1][first : first + step],
            flat[2][first : first + step],
            width,
            generator,
        )
        for first in range(0, len(flat[0]), step)
    ]
    return torch.cat(parts).view(*columns.shape, width)


def rank_shares(
    target: Tensor, draft: Tensor, columns: Tensor, width: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw siblings once and give `a_r(y) / p(y)`, see the module.

    Args:
        target: p at each of M nodes, `(M, C)` float32.
        draft: q there, `(M, C)`.
        columns: What was emitted there, y, `(M,)` int64 columns.
        width: Siblings R.
        generator: Source of the draws.

    Returns:
        `(M, R)`; 0 past the last sibling that q can give.
    """
    width_drawn = min(width, draft.shape[-1])
    ids, drawn = Draws(generator, len(draft), draft.device).race(draft, width_drawn)
    at = columns[:, None]
    emitted = target.gather(1, at)
    left, p, q, shares = torch.ones_like(emitted), target, draft, []
    for rank in range(width_drawn):
        x, real = ids[:, rank : rank + 1], drawn[:, rank : rank + 1]
        share = left * torch.minimum(p.gather(1, at), q.gather(1, at)) / emitted.clamp_min(1e-30)
        shares.append(torch.where(real, share, 0.0))
        accepted = (p.gather(1, x) / q.gather(1, x).clamp_min(1e-30)).clamp_max(1)
        left = torch.where(real, left * (1 - accepted), left)
        rest = (p - q).clamp_min(0)
        total = rest.sum(1, keepdim=True)
        p = torch.where(real & (total > 0), rest / total.clamp_min(1e-30), p)
        q = torch.where(real, q.scatter(1, x, 0), q)
        q = q / q.sum(1, keepdim=True).clamp_min(1e-30)
    return F.pad(torch.cat(shares, 1), (0, width - width_drawn))


def _renewal(tree: DraftTree, shares: list[Tensor], learnt: Tensor) -> dict[str, Tensor]:
    """Walk from root to root: shares of each depth, `(B, n, R)` by root, to what `forecast_passes` gives."""
    rows, roots = learnt.shape
    reach = {0: shares[0].new_ones(rows, roots)}
    emits = shares[0].new_zeros(rows, roots, tree.max_depth + 2)  # P_i(l)
    at_depth = shares[0].new_zeros(rows, roots, tree.max_depth)
    for node in range(tree.num_nodes):
        depth, children = int(tree.depths[node]), [child for child in tree.children[node].tolist() if child >= 0]
        stay = reach[node]
        if depth < len(shares):
            for rank, child in enumerate(children):
                reach[child] = reach[node] * shares[depth][..., rank]
                at_depth[..., depth] += reach[child]
                stay = stay - reach[child]
        else:
            reach |= {child: torch.zeros_like(stay) for child in children}
        emits[..., depth + 1] += stay
    root = F.pad(shares[0].new_zeros(rows, roots), (0, emits.shape[-1]))
    root[:, 0] = 1
    for index in range(roots):
        root[:, index] *= learnt[:, index]
        root[:, index + 1 : index + emits.shape[-1]] += root[:, index, None] * emits[:, index, 1:]
    root = root[:, :roots]
    accepted = (root[..., None] * at_depth).sum(1)  # (B, D)
    result = {"passes": root.sum(1), "tokens": learnt.sum(1).to(root.dtype)}
    return result | {f"accepted_{depth + 1}": accepted[:, depth] for depth in range(accepted.shape[1])}
