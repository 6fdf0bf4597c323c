"""`TrainingConfig`: what a user sets to train a draft head, checked at construction. Knows no model and no tensor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lantern_hf.tree import get_tree

__all__ = ["TrainingConfig"]

SCHEDULES = ("cosine", "linear", "constant")
PRECISIONS = ("no", "bf16")
MAX_UNROLL = 3
WARMUP_SHARE = 0.03
# Settings that change no weight of the steps already made, and so may differ when training is resumed.
FREE_FIELDS = (
    "steps",
    "epochs",
    "save_every",
    "log_every",
    "keep_checkpoints",
    "num_workers",
    "activation_checkpointing",
    "tree",
    # How the batch of one step is spread over processes and forwards; their product must stay.
    "batch_size",
    "gradient_accumulation",
)


@dataclass(frozen=True)
class TrainingConfig:
    """Settings of the training of a draft head. The defaults are those of the published LANTERN drafters where they
    have one.

    Attributes:
        steps: Optimizer steps. Exactly one of `steps` and `epochs`.
        epochs: Passes over the dataset, may be a fraction; the last step is rounded up.
        batch_size: Sequences of one forward on one process.
        gradient_accumulation: Forwards of one optimizer step.
        lr: Peak learning rate of AdamW.
        betas: Betas of AdamW.
        weight_decay: Decoupled weight decay of the matrices; biases and norms have none.
        warmup_steps: Steps of linear warm-up; None is 3 % of all steps.
        schedule: What follows the warm-up: `"cosine"` or `"linear"` down to 0, or `"constant"`.
        max_grad_norm: Norm to which gradients are clipped; None clips nothing.
        feature_loss_weight: Weight of SmoothL1 between the head's output and the target's next hidden state.
        distribution_loss_weight: Weight of the cross-entropy between the target's distribution and the head's.
        overlap_loss_weight: Weight of the total variation distance between the two, `1 - sum_x min(p, q)`: the chance
            that strict decoding rejects one token drawn from the head (DistillSpec, arXiv 2310.08461, section 3). A
            small head spends the cross-entropy on tails that decoding never asks for; this one it cannot learn from
            scratch alone, where nothing overlaps.
        feature_noise: Half width of the uniform noise added to the hidden states that the head reads, 0.1 as in the
            EAGLE paper. (EAGLE's code scales it by 512 / length; here it does not depend on the length.) It is
            absolute: hidden states come out of the target's final norm, with entries of order 1.
        guidance_dropout: Chance that a row's prompt is replaced by the unconditional one, so that the head can also
            draft the second stream of classifier-free guidance. Use 0 for a target that is never guided. Not looked at
            with `guidance_scale`.
        guidance_scale: Train on guided distributions at this scale, above 1: every sequence is read behind its own and
            behind the unconditional prompt, and `u + s * (c - u)` of the head is compared with that of the target.
            It makes a forward twice as large. None trains on each prompt's own distribution.
        unroll_steps: Passes of the head over each sequence, 1 to 3. From the second pass on it reads its own output in
            place of the target's hidden states, as it does at that depth of a tree.
        unroll_decay: Weight of each pass relative to the one before.
        ema_decay: Decay of an average of the weights, such as 0.999, which is then what is evaluated and saved as the
            head: `min(ema_decay, (1 + step) / (10 + step))` of it stays at each step. None keeps no average.
        tree: Tree whose tokens per pass evaluations estimate, a preset's name.
        seed: Decides the order of the data, every random draw and the weights of a new head.
        save_every: Steps between checkpoints (and evaluations); None saves only at the end.
        log_every: Steps between lines of the log.
        keep_checkpoints: Newest checkpoints that are kept.
        mixed_precision: `"no"`, or `"bf16"` for autocast of target and head. The head's weights are float32 either way.
        activation_checkpointing: Recompute the head's layers in the backward pass. Not with `unroll_steps` above 1.
        num_workers: Processes that load data; 0 loads in this one.

    Raises:
        ValueError: A setting is out of range. The message names it, its value and what is allowed.

    Example:
        >>> config = TrainingConfig(steps=1000, warmup_steps=100, schedule="linear")
        >>> [round(config.lr_factor(step, 1000), 2) for step in (0, 99, 550)]
        [0.01, 1.0, 0.5]
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 8
    gradient_accumulation: int = 1
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    warmup_steps: int | None = None
    schedule: str = "cosine"
    max_grad_norm: float | None = 0.5
    feature_loss_weight: float = 1.0
    distribution_loss_weight: float = 0.1
    overlap_loss_weight: float = 0.0
    feature_noise: float = 0.1
    guidance_dropout: float = 0.1
    guidance_scale: float | None = None
    unroll_steps: int = 1
    unroll_decay: float = 0.8
    ema_decay: float | None = None
    tree: str = "eagle_25"
    seed: int = 0
    save_every: int | None = 1000
    log_every: int = 10
    keep_checkpoints: int = 2
    mixed_precision: str = "no"
    activation_checkpointing: bool = False
    num_workers: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        if (self.steps is None) == (self.epochs is None):
            raise ValueError(
                f"Exactly one of `steps` and `epochs` must be given, got steps={self.steps} and epochs={self.epochs}. "
                "Example: TrainingConfig(epochs=20)."
            )
        self._check_counts()
        self._check_numbers()
        self._check_choices()

    def _check_counts(self) -> None:
        """Refuse integers out of range; None passes where it is a value."""
        at_least_one = ("steps", "batch_size", "gradient_accumulation", "save_every", "log_every", "keep_checkpoints")
        for names, least in ((at_least_one, 1), (("warmup_steps", "num_workers", "seed"), 0)):
            for name in names:
                value = getattr(self, name)
                if value is not None and (not isinstance(value, int) or value < least):
                    raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
        if self.steps is not None and (self.warmup_steps or 0) > self.steps:
            raise ValueError(f"`warmup_steps` must be at most `steps`, got {self.warmup_steps} and {self.steps}.")

    def _check_numbers(self) -> None:
        """Refuse numbers out of range."""
        for name in ("lr", "epochs", "max_grad_norm", "unroll_decay"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                hint = " Use None to clip nothing." if name == "max_grad_norm" else ""
                raise ValueError(f"`{name}` must be positive, got {value}.{hint}")
        weights = ("feature_loss_weight", "distribution_loss_weight", "overlap_loss_weight")
        for name in ("weight_decay", *weights, "feature_noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"`{name}` must be at least 0, got {getattr(self, name)}.")
        if not 0 <= self.guidance_dropout <= 1:
            raise ValueError(f"`guidance_dropout` is a probability in [0, 1], got {self.guidance_dropout}.")
        if self.guidance_scale is not None and not 1 < self.guidance_scale < math.inf:
            raise ValueError(
                f"`guidance_scale` must be above 1, got {self.guidance_scale}. Use None to train without guidance."
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"`ema_decay` must be in (0, 1), got {self.ema_decay}. Use None to keep no average.")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"`betas` must be two numbers in [0, 1), got {self.betas}.")
        if not any(getattr(self, name) for name in weights):
            raise ValueError(f"{', '.join(f'`{name}`' for name in weights)} are all 0. Give one of them a weight.")

    def _check_choices(self) -> None:
        """Refuse unknown names and combinations that cannot work."""
        for name, allowed in (("schedule", SCHEDULES), ("mixed_precision", PRECISIONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"`{name}` must be one of {list(allowed)}, got {getattr(self, name)!r}.")
        get_tree(self.tree)  # refuses unknown names
        if self.unroll_steps not in range(1, MAX_UNROLL + 1):
            raise ValueError(
                f"`unroll_steps` must be 1 to {MAX_UNROLL}, got {self.unroll_steps!r}. 1 is plain training."
            )
        if self.activation_checkpointing and self.unroll_steps > 1:
            raise ValueError(
                f"`activation_checkpointing` works with `unroll_steps=1` only, got {self.unroll_steps}: later passes "
                "read the keys of earlier ones from a cache. Switch one off; a smaller `batch_size` saves memory too."
            )

    def total_steps(self, num_items: int, num_processes: int = 1) -> int:
        """Give the number of optimizer steps over a dataset of `num_items` sequences."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None  # checked at construction
        per_step = self.batch_size * self.gradient_accumulation * num_processes
        return math.ceil(self.epochs * num_items / per_step)

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Give the share of `lr` that step 0 .. total_steps - 1 is made with."""
        warmup = math.ceil(WARMUP_SHARE * total_steps) if self.warmup_steps is None else self.warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(total_steps - warmup, 1)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return 1 - progress if self.schedule == "linear" else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `TrainingConfig(**values)` reads them back."""
        return dataclasses.asdict(self) | {"betas": list(self.betas)}

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """Name the settings that differ in `other`, an earlier `to_dict`, though resuming may not change them."""
        own = self.to_dict()
        return [
            f"`{name}` {other[name]} -> {own[name]}"
            for name in own
            if name not in FREE_FIELDS and name in other and other[name] != own[name]
        ]
