"""`evaluate_head`: how well a head predicts its target on given sequences; training takes its batches from here too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lantern_hf.draft import LanternDraftModel
from lantern_hf.targets import adapter_for
from lantern_hf.training.data import TokenBatch, collate
from lantern_hf.training.features import drop_prompts, frozen, target_features
from lantern_hf.training.losses import DraftObjective
from lantern_hf.training.runtime import Sums, autocast, input_device

__all__ = ["batch_losses", "evaluate_head", "mean_losses"]


@torch.no_grad()
def evaluate_head(
    target: PreTrainedModel,
    head: LanternDraftModel,
    dataset: Any,
    *,
    batch_size: int = 8,
    unroll_steps: int = 1,
    mixed_precision: str = "no",
) -> dict[str, float]:
    """Measure a head on sequences, without noise or dropped prompts.

    Args:
        target: The target.
        head: Its head.
        dataset: Sequences, as for `train_head`.
        batch_size: Sequences of one forward.
        unroll_steps: Depths of a chain to measure, 1 to 3.
        mixed_precision: As in `TrainingConfig`.

    Returns:
        `loss` (with the default weights), `feature_loss`, `distribution_loss`, `overlap` (the chance that strict
        decoding accepts a token drafted at depth 1), `agreement`, and `overlap_2`, `overlap_3` for the depths below.
    """
    objective = DraftObjective(head, unroll_steps=unroll_steps).eval()
    batches = [list(range(len(dataset)))[start : start + batch_size] for start in range(0, len(dataset), batch_size)]
    with frozen(target), autocast(head.device, mixed_precision):
        return mean_losses(target, objective, dataset, batches)


def mean_losses(
    target: PreTrainedModel, objective: nn.Module, dataset: Any, batches: list[list[int]]
) -> dict[str, float]:
    """Mean of every metric over the sequences of some batches."""
    sums, rows = Sums(), 0
    for indices in batches:
        rows += len(indices)
        sums.add(
            {k: v.sum() for k, v in batch_losses(target, objective, collate([dataset[i] for i in indices])).items()}
        )
    return {name: value / rows for name, value in sums.take().items()}


def batch_losses(
    target: PreTrainedModel, model: nn.Module, batch: TokenBatch, dropout: float = 0.0
) -> dict[str, Tensor]:
    """Loss and metrics of each row of a batch, see `DraftObjective`."""
    batch = batch.to(input_device(target))
    adapter = adapter_for(target, batch.prompt["input_ids"])
    if dropout:
        dropped = torch.rand(len(batch.tokens)) < dropout
        batch = drop_prompts(adapter, batch, dropped) if bool(dropped.any()) else batch
    features = target_features(adapter, batch, next(model.parameters()).device)
    return model(features, adapter)
