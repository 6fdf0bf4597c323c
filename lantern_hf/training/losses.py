"""What the head is trained on: `DraftObjective` runs it over the entries of a batch and compares with the target.

A loss is the mean over rows of each row's mean over its entries, so that a row weighs the same whatever it is batched
with, and accumulated gradients equal those of one large batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lantern_hf.cache import new_dynamic_cache
from lantern_hf.draft import LanternDraftModel
from lantern_hf.processors import guide
from lantern_hf.structure import allow
from lantern_hf.targets import TargetAdapter
from lantern_hf.training.features import TargetFeatures

__all__ = ["DraftObjective", "EntryLosses", "check_output_layer", "distribution", "draft_passes", "entry_losses"]


TOP_K = 5  # how many of the head's most probable tokens `agreement_top5` looks at


class EntryLosses(NamedTuple):
    """How each entry compares with the target, each `(B, n)` float32.

    Attributes:
        feature: SmoothL1 between the predicted and the target's hidden state, mean over its dimensions.
        distribution: Cross-entropy of the head's distribution q under the target's p, both over the columns.
        overlap: `sum_x min(p, q)`: the chance that strict decoding accepts one token drawn from q. Without gradients
            unless they are asked for.
        agreement: 1 where p and q have the same most probable token.
        agreement_top5: 1 where p's most probable token is among the 5 most probable of q.
    """

    feature: Tensor
    distribution: Tensor
    overlap: Tensor
    agreement: Tensor
    agreement_top5: Tensor


def distribution(
    adapter: TargetAdapter, hidden: Tensor, guidance_scale: float | None = None, offsets: Tensor | None = None
) -> Tensor:
    """Log-probabilities of the target's output layer on hidden states, the target's own or a head's.

    Args:
        adapter: Adapter of the target.
        hidden: Input of the output layer, `(B, n, H)`, or `(2B, n, H)` under guidance, conditional rows first.
        guidance_scale: Scale s of `u + s * (c - u)`; None without guidance.
        offsets: Where what is drawn stands in its image, `(B, n)`; None where images have no structure.

    Returns:
        `(B, n, C)` float32 on the device of `hidden`; minus infinity for what may not come.
    """
    logits = guide(adapter.logits(hidden).to(hidden.device), guidance_scale)
    return allow(adapter, offsets, logits).log_softmax(-1)


def check_output_layer(adapter: TargetAdapter, width: int) -> None:
    """Refuse a target whose output layer passes no gradients: the distribution loss would teach the head nothing.

    The integer kernels of some quantisers (torch's `quantize_dynamic`, torchao with quantised activations) pass none,
    and say so in a warning at the most; weight-only ones do.

    Args:
        adapter: Adapter of the target.
        width: Width H of what the output layer reads.

    Raises:
        ValueError: It passes none.
    """
    hidden = torch.ones(1, 1, width, dtype=adapter.model.dtype, requires_grad=True)
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, about the very thing that is asked here
        logits = adapter.logits(hidden)
        gradient = torch.autograd.grad(logits.sum(), hidden, allow_unused=True)[0] if logits.requires_grad else None
    if gradient is None:
        raise ValueError(
            f"The quantised output layer of {type(adapter.model).__name__} passes no gradients, so "
            "`distribution_loss_weight` and `overlap_loss_weight` cannot be above 0. Leave that layer as it is when "
            "you quantise the others, quantise weights only, or set the weights to 0."
        )


def entry_losses(
    adapter: TargetAdapter,
    predicted: Tensor,
    hidden: Tensor,
    target_probs: Tensor,
    guidance_scale: float | None = None,
    offsets: Tensor | None = None,
    learn_overlap: bool = False,
) -> EntryLosses:
    """Compare the head's outputs with the target.

    Args:
        adapter: Adapter of the target.
        predicted: Output of the head, `(B, n, H)`; `(2B, n, H)` under guidance, conditional rows first.
        hidden: The target's hidden states there, of the same shape.
        target_probs: The target's distributions there, guided alike, `(B, n, C)`.
        guidance_scale: Compare guided distributions; the feature loss is then the mean over both streams.
        offsets: As in `distribution`.
        learn_overlap: Keep what the gradients of `overlap` need.
    """
    feature = F.smooth_l1_loss(predicted.float(), hidden.float(), reduction="none").mean(-1)
    feature = feature if guidance_scale is None else torch.stack(feature.chunk(2)).mean(0)
    logprobs = distribution(adapter, predicted.to(hidden.dtype), guidance_scale, offsets)
    products = target_probs * logprobs  # 0 times minus infinity where nothing may come
    cross_entropy = -(products if offsets is None else products.masked_fill(target_probs == 0, 0)).sum(-1)
    with torch.set_grad_enabled(learn_overlap and torch.is_grad_enabled()):
        overlap = torch.minimum(target_probs, logprobs.exp()).sum(-1)
    with torch.no_grad():
        best = target_probs.argmax(-1, keepdim=True)
        ranked = logprobs.topk(min(TOP_K, logprobs.shape[-1]), dim=-1).indices
    same = (ranked == best).float()
    return EntryLosses(feature, cross_entropy, overlap, same[..., 0], same.sum(-1))


def draft_passes(head: LanternDraftModel, features: TargetFeatures, steps: int = 1) -> Iterator[Tensor]:
    """Run the head over all entries, then over its own outputs, as it runs down a chain.

    Pass 1 reads the target's hidden states. Entry t of pass k reads the output of entry t - 1 of pass k - 1, and
    attends to what it meets at depth k - 1 of a chain: itself, entry t - 1 of pass k - 1, ..., entry t - k + 2 of pass
    2, and in pass 1 all entries up to t - k + 1 (as HASS and EAGLE-3 do).

    Args:
        head: The head.
        features: Entries of a batch.
        steps: Number of passes; no more are made than there are entries to learn.

    Yields:
        Output of pass k for entries `start + k - 1` and later, `(B, E - start - k + 1, H)`.
    """
    entries = torch.arange(features.hidden.shape[1], device=features.hidden.device)
    hidden, keys = features.hidden, [entries]
    steps = min(steps, features.hidden.shape[1] - features.start)
    cache = new_dynamic_cache(head.config) if steps > 1 else None
    plain = features.mask is None and steps == 1
    mask = None if plain else _pass_mask(entries, keys, features.mask)
    output = head(features.embeds, hidden, features.position_ids, attention_mask=mask, cache=cache).last_hidden_state
    output = output[:, features.start :]
    yield output
    for later in range(1, steps):
        first = features.start + later
        keys.append(entries[first:])
        mask = _pass_mask(entries[first:], keys, features.mask)
        places = features.position_ids[:, first:]
        output = head(
            features.embeds[:, first:], output[:, :-1], places, attention_mask=mask, cache=cache
        ).last_hidden_state
        yield output


def _pass_mask(queries: Tensor, keys: list[Tensor], real: Tensor | None) -> Tensor:
    """Which entries of this and the earlier passes each query attends to, `(B or 1, 1, queries, all keys)` bool."""
    depth = len(keys) - 1
    first = (keys[0] <= queries[:, None] - depth)[None]
    if real is not None:
        # Padding sees itself: a row that attends to nothing is NaN, and would spoil whatever reads it next.
        first = (first & real[:, None]) | (keys[0] == queries[:, None] - depth)
    later = [keys[index] == queries[:, None] - (depth - index) for index in range(1, depth + 1)]
    return torch.cat([first, *(mask.expand(len(first), -1, -1) for mask in later)], dim=-1)[:, None]


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of each row over the entries of `mask` `(B, n)`, 0 for a row without any, `(B,)`."""
    return (values * mask).sum(1) / mask.sum(1).clamp_min(1)


class DraftObjective(nn.Module):
    """The head with its loss; one call is one forward, which is what DistributedDataParallel can follow.

    Args:
        head: The head to train.
        feature_loss_weight: As in `TrainingConfig`, like all others.
        distribution_loss_weight: Weight of the cross-entropy.
        overlap_loss_weight: Weight of `1 - overlap`.
        unroll_steps: Passes of the head that the loss counts.
        unroll_decay: Weight of a pass relative to the one before.
        guidance_scale: Compare guided distributions of rows that come twice, see `both_streams`.
    """

    def __init__(
        self,
        head: LanternDraftModel,
        *,
        feature_loss_weight: float = 1.0,
        distribution_loss_weight: float = 0.1,
        overlap_loss_weight: float = 0.0,
        unroll_steps: int = 1,
        unroll_decay: float = 0.8,
        guidance_scale: float | None = None,
    ):
        super().__init__()
        self.head, self.guidance_scale = head, guidance_scale
        self._weights = feature_loss_weight, distribution_loss_weight, overlap_loss_weight
        self._steps, self._decay = unroll_steps, unroll_decay

    def forward(self, features: TargetFeatures, adapter: TargetAdapter, depths: int = 1) -> dict[str, Tensor]:
        """Compare the head with the target over a batch.

        Args:
            features: What the target says about the batch, `(2B, ...)` under guidance.
            adapter: Adapter of the target, made for the batch's B rows.
            depths: Passes to measure at least; those past `unroll_steps` are no part of the loss.

        Returns:
            For each row `(B,)`: `loss` with gradients, and without them `feature_loss`, `distribution_loss`, `overlap`,
            `agreement` and `agreement_top5` of the first pass, and `overlap_2`, `overlap_3`... of the later ones.
        """
        hidden, scale = features.next_hidden[:, features.start :], self.guidance_scale
        rows = len(hidden) if scale is None else len(hidden) // 2
        learnt, drawn = features.learnt[:rows], features.drawn[:rows]
        offsets = None if features.places is None else features.places.offsets[:rows]
        with torch.no_grad():
            probs = distribution(adapter, hidden, scale, offsets).exp()
        loss: Tensor | float = 0.0
        metrics: dict[str, Tensor] = {}
        for index, output in enumerate(draft_passes(self.head, features, max(self._steps, depths))):
            here = None if offsets is None else offsets[:, index:]
            overlaps = index < self._steps and bool(self._weights[-1])
            entries = entry_losses(adapter, output, hidden[:, index:], probs[:, index:], scale, here, overlaps)
            means = EntryLosses(*(row_mean(values, drawn[:, index:]) for values in entries))
            # What must come is drawn by nobody, but the state before it is what the head reads one node further down.
            means = means._replace(feature=row_mean(entries.feature, learnt[:, index:]))
            if index < self._steps:
                # A part without weight is left out of the graph: it may come from what passes no gradients.
                parts = means.feature, means.distribution, 1 - means.overlap
                for weight, part in zip(self._weights, parts, strict=True):
                    loss = loss + self._decay**index * weight * part if weight else loss
            metrics |= _first_pass(means) if index == 0 else {f"overlap_{index + 1}": means.overlap.detach()}
        assert isinstance(loss, Tensor)
        return {"loss": loss} | metrics


def _first_pass(means: EntryLosses) -> dict[str, Tensor]:
    """Name what is reported of the first pass."""
    feature, cross_entropy = means.feature.detach(), means.distribution.detach()
    named = {"feature_loss": feature, "distribution_loss": cross_entropy, "overlap": means.overlap.detach()}
    return named | {"agreement": means.agreement, "agreement_top5": means.agreement_top5}
