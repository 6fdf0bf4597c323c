"""What moves the weights: the optimizer, and their running average."""

from __future__ import annotations

import copy

import torch

from lantern_hf.draft import LanternDraftModel
from lantern_hf.training.config import TrainingConfig

__all__ = ["WeightAverage", "make_optimizer"]


def make_optimizer(head: LanternDraftModel, config: TrainingConfig) -> torch.optim.Optimizer:
    """AdamW that decays matrices only."""
    decayed = [p for p in head.parameters() if p.ndim > 1]
    others = [p for p in head.parameters() if p.ndim <= 1]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


class WeightAverage:
    """Exponential moving average of a head's weights.

    Args:
        head: The head; the average starts from its weights.
        decay: What stays of the average at a step, late in the run; early on `(1 + step) / (10 + step)`.

    Attributes:
        head: The averaged head, in eval mode.
    """

    def __init__(self, head: LanternDraftModel, decay: float):
        self.head = copy.deepcopy(head).requires_grad_(False).eval()
        self._decay = decay

    @torch.no_grad()
    def update(self, head: LanternDraftModel, step: int) -> None:
        """Take the weights after step number `step`, from 0, into the average."""
        keep = min(self._decay, (1 + step) / (10 + step))
        for average, weight in zip(self.head.parameters(), head.parameters(), strict=True):
            average.lerp_(weight, 1 - keep)
