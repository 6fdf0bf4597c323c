"""`evaluate_head`: how well a head predicts its target on given sequences, and what that gives in decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from lantern_hf.draft import LanternDraftModel
from lantern_hf.training.data import collate, fetch
from lantern_hf.training.features import frozen
from lantern_hf.training.forecast import forecast_passes
from lantern_hf.training.losses import DraftObjective
from lantern_hf.training.runtime import Sums, autocast, seed_of
from lantern_hf.training.source import FeatureSource
from lantern_hf.tree import DraftTree, get_tree

__all__ = ["EVAL_DEPTHS", "evaluate_head", "mean_metrics"]

EVAL_DEPTHS = 5


@torch.no_grad()
def evaluate_head(
    target: PreTrainedModel,
    head: LanternDraftModel,
    dataset: Any,
    *,
    batch_size: int = 8,
    depths: int = EVAL_DEPTHS,
    tree: str | DraftTree | None = "eagle_25",
    guidance_scale: float | None = None,
    mixed_precision: str = "no",
    seed: int = 0,
    target_options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Measure a head on sequences, without noise or dropped prompts.

    Args:
        target: The target.
        head: Its head.
        dataset: Sequences, as for `train_head`. Sequences that the target drew itself, with the guidance given here,
            make the estimates of decoding unbiased.
        batch_size: Sequences of one forward.
        depths: Depths of a chain to measure.
        tree: Tree whose tokens per pass are estimated; None for none.
        guidance_scale: Guidance of the decoding; None is none.
        mixed_precision: As in `TrainingConfig`.
        seed: Decides the draws of the estimate.
        target_options: Options of the target's adapter, as in `lantern_generate`.

    Returns:
        `loss` (with the default weights), `feature_loss`, `distribution_loss`, `overlap` (the chance that strict
        decoding accepts a token drafted at depth 1), `agreement` and `agreement_top5`, `overlap_2`, `overlap_3`... for
        the depths below. With a tree also `tokens_per_pass` of strict decoding, see `lantern_hf.training.forecast`, and
        `accepted_1`, `accepted_2`..., the share of passes that accept a token at that depth.
    """
    objective = DraftObjective(head, guidance_scale=guidance_scale).eval()
    shape = None if tree is None else get_tree(tree)
    with frozen(target), autocast(head.device, mixed_precision):
        return mean_metrics(target, objective, dataset, batch_size, depths, shape, seed, target_options)


def mean_metrics(
    target: PreTrainedModel,
    objective: DraftObjective,
    dataset: Any,
    batch_size: int,
    depths: int,
    tree: DraftTree | None,
    seed: int,
    target_options: Mapping[str, Any] | None = None,
) -> dict[str, float]:
    """Mean of every metric over all sequences, and the ratios that the forecast gives; arguments as `evaluate_head`."""
    device, scale = objective.head.device, objective.guidance_scale
    source = FeatureSource(target, device, guidance_scale=scale, target_options=target_options)
    sums, count = Sums(), len(dataset)
    for first in range(0, count, batch_size):
        indices = range(first, min(first + batch_size, count))
        features, adapter, batch = source.read(collate(fetch(dataset, indices)))
        rows = objective(features, adapter, depths)
        if tree is not None:
            generator = torch.Generator(device).manual_seed(seed_of(seed, first, "forecast"))
            parts = features, adapter, batch, tree
            rows |= forecast_passes(objective.head, *parts, guidance_scale=scale, generator=generator)
        sums.add({name: values.sum() for name, values in rows.items()})
    totals = sums.take()
    passes, tokens = totals.pop("passes", None), totals.pop("tokens", 0.0)
    metrics = {name: value / count for name, value in totals.items() if not name.startswith("accepted_")}
    if passes is None:
        return metrics
    accepted = {name: value / passes for name, value in totals.items() if name.startswith("accepted_")}
    return metrics | {"tokens_per_pass": tokens / passes} | accepted
