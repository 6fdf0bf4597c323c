"""`train_head`: the loop that trains a draft head for any target on token sequences.

Everything random in a step (data order, dropped prompts, noise) follows from the seed and the step, and nothing else is
carried from step to step but weights and optimizer, so a resumed training gives the weights of an uninterrupted one.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.utils import logging

from lantern_hf.draft import LanternDraftModel
from lantern_hf.targets import adapter_for
from lantern_hf.training.checkpoints import newest_checkpoint, save_checkpoint
from lantern_hf.training.config import TrainingConfig
from lantern_hf.training.data import SeededBatches, TokenBatch, collate
from lantern_hf.training.evaluate import batch_losses, mean_losses
from lantern_hf.training.features import frozen
from lantern_hf.training.losses import DraftObjective
from lantern_hf.training.runtime import Sums, autocast, cut_log, input_device, seeded

__all__ = ["train_head"]

logger = logging.get_logger(__name__)

CHECKPOINTS, LOG = "checkpoints", "log.jsonl"


def train_head(
    target: PreTrainedModel,
    dataset: Any,
    config: TrainingConfig,
    *,
    head: LanternDraftModel | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    eval_dataset: Any = None,
    accelerator: Accelerator | None = None,
) -> LanternDraftModel:
    """Train a draft head for a target.

    Args:
        target: The model to draft for, already on its devices. It is frozen and in eval mode while the head trains.
        dataset: Map-style dataset of sequences, see `lantern_hf.training.data`; `TokenSequences` is one. Best are
            tokens that the target generated itself.
        config: Settings.
        head: Head to train on, in place; a new one by default.
        output_dir: Gets `log.jsonl`, `checkpoints/` and at the end the head. Training goes on from the newest
            checkpoint found there, if there is one. None writes nothing.
        eval_dataset: Sequences to evaluate on at each checkpoint and at the end.
        accelerator: For training on several processes; settings come from `config`.

    Returns:
        The head in eval mode, bound to the target, in the dtype it came with or the target's. `output_dir` gets it in
        float32.

    Raises:
        ValueError: Head, data or an earlier checkpoint do not fit.
        FloatingPointError: The loss is no longer finite.
    """
    trainer = _Trainer(target, dataset, config, head, output_dir, eval_dataset, accelerator)
    with frozen(target):
        trainer.check_data()
        trainer.resume()
        trainer.run()
    trained = trainer.finish()
    return trained.place(target, dtype=trainer.given_dtype, device=trained.device)


class _Trainer:
    """State of one training; arguments as `train_head`."""

    def __init__(
        self,
        target: PreTrainedModel,
        dataset: Any,
        config: TrainingConfig,
        head: LanternDraftModel | None,
        output_dir: str | os.PathLike[str] | None,
        eval_dataset: Any,
        accelerator: Accelerator | None,
    ):
        self.target, self.dataset, self.eval_dataset, self.config = target, dataset, eval_dataset, config
        self.accelerator = Accelerator() if accelerator is None else accelerator
        if self.accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"The accelerator accumulates {self.accelerator.gradient_accumulation_steps} steps of its own. Make it "
                "without, and set `gradient_accumulation` in TrainingConfig."
            )
        self.given_dtype = None if head is None else head.dtype
        self.head = self._master_head(head)
        self.folder = None if output_dir is None else Path(output_dir)
        self.step = 0
        self.total = config.total_steps(len(dataset), self.accelerator.num_processes)
        objective = DraftObjective(
            self.head,
            feature_loss_weight=config.feature_loss_weight,
            distribution_loss_weight=config.distribution_loss_weight,
            feature_noise=config.feature_noise,
            unroll_steps=config.unroll_steps,
            unroll_decay=config.unroll_decay,
        )
        # The head stays where the target's last layer is, which need not be accelerate's device.
        self.model, self.optimizer = self.accelerator.prepare(
            objective, self._make_optimizer(), device_placement=[False, False]
        )
        self._sums, self._started = Sums(), time.perf_counter()

    def _master_head(self, head: LanternDraftModel | None) -> LanternDraftModel:
        """The head to train, float32, in training mode."""
        if head is None:
            with seeded(torch.device("cpu"), self.config.seed, "head"):
                head = LanternDraftModel.for_target(self.target, dtype=torch.float32)
        head.place(self.target, dtype=torch.float32).bind(self.target)
        if self.config.activation_checkpointing:
            head.activation_checkpointing_enable()
        return head.requires_grad_(True).train()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW that decays matrices only."""
        decayed = [p for p in self.head.parameters() if p.ndim > 1]
        others = [p for p in self.head.parameters() if p.ndim <= 1]
        groups = [
            {"params": decayed, "weight_decay": self.config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.config.lr, betas=self.config.betas)

    def check_data(self) -> None:
        """Refuse data on which nothing could be learnt, before any work."""
        if not len(self.dataset):
            raise ValueError("`dataset` is empty. Give at least one sequence.")
        batch = collate([self.dataset[0]]).to(input_device(self.target))
        adapter = adapter_for(self.target, batch.prompt["input_ids"])
        if batch.tokens.shape[1] <= self.config.unroll_steps:
            raise ValueError(
                f"Sequences need more tokens than `unroll_steps` ({self.config.unroll_steps}), the first has "
                f"{batch.tokens.shape[1]}."
            )
        low, high = int(batch.tokens.min()), int(batch.tokens.max())
        if low < 0 or high >= adapter.vocab_size or not bool((adapter.columns_of(batch.tokens) >= 0).any()):
            raise ValueError(
                f"`tokens` of the first item, {low} to {high}, are not tokens that {type(self.target).__name__} emits "
                "after this prompt. Give token ids, not codes, and the prompt that `generate` was given."
            )

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        found = None if self.folder is None else newest_checkpoint(self.folder / CHECKPOINTS)
        if self.folder is None or found is None:
            return
        changed = self.config.differences(found.state["config"])
        for name, now in self._circumstances().items():
            changed += [f"`{name}` {found.state[name]} -> {now}"] if found.state[name] != now else []
        if changed:
            raise ValueError(
                f"{found.folder} is of a training with other settings: {'; '.join(changed)}. Use another "
                "`output_dir`, or remove that one to start anew."
            )
        self.head.load_state_dict(found.weights)
        self.optimizer.load_state_dict(found.state["optimizer"])
        self.step = found.state["step"]
        logger.info(f"Resuming from {found.folder}.")
        if self.accelerator.is_main_process:
            cut_log(self.folder / LOG, self.step)

    def _circumstances(self) -> dict[str, int]:
        """What else decides the order of the data."""
        return {"num_items": len(self.dataset), "num_processes": self.accelerator.num_processes}

    def run(self) -> None:
        """Make all steps that are left."""
        batches = iter(self._loader())
        main = self.accelerator.is_main_process
        with logging.tqdm(total=self.total, initial=self.step, desc="Training head", disable=not main or None) as bar:
            while self.step < self.total:
                self._sums.add(self._make_step(islice(batches, self.config.gradient_accumulation)))
                self.step += 1
                bar.update()
                save = self.step == self.total or self.step % (self.config.save_every or self.total) == 0
                if save or self.step % self.config.log_every == 0:
                    self._report(bar)
                if save:
                    self._evaluate()
                    self._save()

    def _loader(self) -> Iterable[TokenBatch]:
        """Batches of this process from the current step on."""
        each, accelerator = self.config.gradient_accumulation, self.accelerator
        order = SeededBatches(
            len(self.dataset),
            self.config.batch_size,
            self.config.seed,
            self.step * each,
            self.total * each,
            accelerator.process_index,
            accelerator.num_processes,
        )
        # A generator of its own keeps the loader from drawing on the global one.
        return DataLoader(
            self.dataset,
            batch_sampler=order,
            collate_fn=collate,
            num_workers=self.config.num_workers,
            generator=torch.Generator(),
        )

    def _make_step(self, batches: Iterable[TokenBatch]) -> dict[str, Tensor]:
        """Make one optimizer step; gives its metrics, still on the device."""
        config, each = self.config, self.config.gradient_accumulation
        sums = Sums()
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * config.lr_factor(self.step, self.total)
        with seeded(self.head.device, config.seed, self.step, self.accelerator.process_index):
            for index, batch in enumerate(batches, start=1):
                with nullcontext() if index == each else self.accelerator.no_sync(self.model):
                    with autocast(self.head.device, config.mixed_precision):
                        rows = batch_losses(self.target, self.model, batch, config.guidance_dropout)
                        means = {name: values.mean() / each for name, values in rows.items()}
                    self.accelerator.backward(means["loss"])
                sums.add(means)
        metrics = sums.tensors()
        limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
        metrics["grad_norm"] = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return metrics

    def _report(self, bar: Any) -> None:
        """Log the mean metrics since the last report, and stop when they are no numbers."""
        steps = self._sums.count
        means = {name: value / steps for name, value in self._sums.take(self.accelerator).items()}
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(
                f"The loss is not finite at step {self.step}: {means}. Lower `lr` (now {self.config.lr}), lengthen "
                "`warmup_steps`, or train without `mixed_precision`; then start again from the last checkpoint."
            )
        rate, seconds = self.optimizer.param_groups[0]["lr"], round(time.perf_counter() - self._started, 3)
        self._log({"step": self.step} | means | {"lr": rate, "seconds": seconds})
        bar.set_postfix(loss=f"{means['loss']:.4f}", overlap=f"{means['overlap']:.3f}")

    def _evaluate(self) -> None:
        """Log the metrics on the evaluation set; processes share the batches."""
        if self.eval_dataset is None or not len(self.eval_dataset):
            return
        indices, size, main = (
            list(range(len(self.eval_dataset))),
            self.config.batch_size,
            self.accelerator.is_main_process,
        )
        if main:
            self.model.eval()
            with torch.no_grad(), autocast(self.head.device, self.config.mixed_precision):
                batches = [indices[start : start + size] for start in range(0, len(indices), size)]
                objective = self.accelerator.unwrap_model(self.model)
                means = mean_losses(self.target, objective, self.eval_dataset, batches)
            self.model.train()
            self._log({"step": self.step} | {f"eval_{name}": value for name, value in means.items()})
        self.accelerator.wait_for_everyone()

    def _log(self, values: dict[str, Any]) -> None:
        """Append a line to the log."""
        if self.folder is None or not self.accelerator.is_main_process:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / LOG, "a") as file:
            file.write(json.dumps(values) + "\n")

    def _save(self) -> None:
        """Write a checkpoint."""
        if self.folder is not None and self.accelerator.is_main_process:
            state = {"step": self.step, "config": self.config.to_dict(), "optimizer": self.optimizer.state_dict()}
            state |= self._circumstances()
            save_checkpoint(self.folder / CHECKPOINTS, self.step, self.head, state, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def finish(self) -> LanternDraftModel:
        """Save the head and give it back as a model to use."""
        if self.config.activation_checkpointing:
            self.head.activation_checkpointing_disable()
        self.head.eval()
        if self.folder is not None and self.accelerator.is_main_process:
            self.head.save_pretrained(self.folder)
        self.accelerator.wait_for_everyone()
        return self.head
