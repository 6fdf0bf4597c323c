"""`train_head`: the loop that trains a draft head for any target on token sequences.

Everything random in a step (data order, dropped prompts, noise) follows from the seed and from places in the run's
order, and nothing else is carried from step to step but weights and optimizer. So a resumed training gives the weights
of an uninterrupted one, and several processes give those of one with the same global batch, up to rounding.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
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

from lantern_hf._checkpointing import set_checkpointing
from lantern_hf.draft import LanternDraftModel
from lantern_hf.training.binding import bound_adapter, check_structure
from lantern_hf.training.checkpoints import export_head, newest_checkpoint, save_checkpoint
from lantern_hf.training.config import TrainingConfig
from lantern_hf.training.data import SeededBatches, TokenBatch, collate, fetch, places_of_batch
from lantern_hf.training.evaluate import EVAL_DEPTHS, mean_metrics
from lantern_hf.training.feature_cache import FeatureCache
from lantern_hf.training.features import frozen
from lantern_hf.training.losses import DraftObjective, check_output_layer
from lantern_hf.training.optimization import WeightAverage, make_optimizer
from lantern_hf.training.record import write_record
from lantern_hf.training.reporting import LOG, Reporter
from lantern_hf.training.runtime import Sums, autocast, input_device, seeded
from lantern_hf.training.source import FeatureSource
from lantern_hf.training.storage import remove_leftovers, writing
from lantern_hf.tree import get_tree

__all__ = ["train_head"]

logger = logging.get_logger(__name__)

CHECKPOINTS = "checkpoints"


def train_head(
    target: PreTrainedModel,
    dataset: Any,
    config: TrainingConfig,
    *,
    head: LanternDraftModel | None = None,
    output_dir: str | os.PathLike[str] | None = None,
    eval_dataset: Any = None,
    feature_cache: FeatureCache | None = None,
    accelerator: Accelerator | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> LanternDraftModel:
    """Train a draft head for a target.

    Args:
        target: The model to draft for, already on its devices, spread over several of them or quantised. It is frozen
            and in eval mode while the head trains.
        dataset: Map-style dataset of sequences, see `lantern_hf.training.data`; `TokenSequences` is one, and so is a
            `datasets.Dataset` with the columns `input_ids` and `tokens`. Best are tokens that the target generated
            itself, see `self_distil`.
        config: Settings.
        head: Head to train on, in place; a new one by default.
        output_dir: Gets `log.jsonl`, `checkpoints/` and at the end the head with `training.json`, from which its card
            is written. Training goes on from the newest checkpoint found there, if there is one. None writes nothing.
        eval_dataset: Sequences to evaluate on at each checkpoint and at the end.
        feature_cache: Keeps what the target says about the dataset, so that it runs once an item and not once an epoch.
        accelerator: For training on several processes, and for trackers; settings come from `config`.
        target_options: Options of the target's adapter, as in `lantern_generate`: those that it will be decoded with.

    Returns:
        The head in eval mode, bound to the target, in the dtype it came with or the target's. `output_dir` gets it in
        float32.

    Raises:
        ValueError: Head, target, data or an earlier checkpoint do not fit.
        FloatingPointError: The loss is no longer finite.
        OSError: The disk is full. Checkpoints written before stay good.
    """
    options = dict(target_options or {})
    trainer = _Trainer(target, dataset, config, head, output_dir, eval_dataset, feature_cache, accelerator, options)
    with frozen(target):
        trainer.check_data_and_target()
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
        feature_cache: FeatureCache | None,
        accelerator: Accelerator | None,
        target_options: Mapping[str, Any],
    ):
        self.target, self.dataset, self.eval_dataset, self.config = target, dataset, eval_dataset, config
        self.target_options = target_options
        self.accelerator = Accelerator() if accelerator is None else accelerator
        if self.accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"The accelerator accumulates {self.accelerator.gradient_accumulation_steps} steps of its own. Make it "
                "without, and set `gradient_accumulation` in TrainingConfig."
            )
        self.cache = feature_cache
        self.given_dtype = None if head is None else head.dtype
        self.head = self._master_head(head)
        self.average = None if config.ema_decay is None else WeightAverage(self.head, config.ema_decay)
        self.folder = None if output_dir is None else Path(output_dir)
        self.step = 0
        self.total = config.total_steps(len(dataset), self.accelerator.num_processes)
        # The head stays where the target's last layer is, which need not be accelerate's device.
        self.model, self.optimizer = self.accelerator.prepare(
            self._objective(self.head), make_optimizer(self.head, config), device_placement=[False, False]
        )
        self._sums = Sums()

    def _master_head(self, head: LanternDraftModel | None) -> LanternDraftModel:
        """The head to train, float32, in training mode."""
        if head is None:
            with seeded(torch.device("cpu"), self.config.seed, "head"):
                head = LanternDraftModel.for_target(self.target, dtype=torch.float32)
        head.place(self.target, dtype=torch.float32).bind(self.target)
        if self.config.activation_checkpointing:
            set_checkpointing(head, True)
        return head.requires_grad_(True).train()

    def _objective(self, head: LanternDraftModel) -> DraftObjective:
        """The loss of a head."""
        return DraftObjective(
            head,
            feature_loss_weight=self.config.feature_loss_weight,
            distribution_loss_weight=self.config.distribution_loss_weight,
            overlap_loss_weight=self.config.overlap_loss_weight,
            unroll_steps=self.config.unroll_steps,
            unroll_decay=self.config.unroll_decay,
            guidance_scale=self.config.guidance_scale,
        )

    @property
    def _exported(self) -> LanternDraftModel:
        """The head that is evaluated and saved."""
        return self.head if self.average is None else self.average.head

    def check_data_and_target(self) -> None:
        """Refuse data and a target from which nothing could be learnt, before any work."""
        if not len(self.dataset):
            raise ValueError("`dataset` is empty. Give at least one sequence.")
        batch = collate(fetch(self.dataset, [0])).to(input_device(self.target))
        adapter = bound_adapter(self.target, batch.prompt, self.target_options)
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
        check_structure(adapter, batch)
        if self.config.distribution_loss_weight or self.config.overlap_loss_weight:
            check_output_layer(adapter, self.head.config.hidden_size)

    def resume(self) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.folder is None:
            return
        if self.accelerator.is_main_process:
            with writing(f"{self.folder}", "Make room, or choose another `output_dir`."):
                self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (self.folder, self.folder / CHECKPOINTS):
                remove_leftovers(folder)
        found = newest_checkpoint(self.folder / CHECKPOINTS)
        if found is None:
            return
        changed = self.config.differences(found.state["config"])
        for name, now in self._circumstances().items():
            then = found.state.get(name)
            changed += [f"`{name}` {then} -> {now}"] if then != now else []
        if changed:
            raise ValueError(
                f"{found.folder} is of a training with other settings: {'; '.join(changed)}. Use another "
                "`output_dir`, or remove that one to start anew."
            )
        self.head.load_state_dict(found.state.get("weights", found.weights))
        if self.average is not None:
            self.average.head.load_state_dict(found.weights)
        self.optimizer.load_state_dict(found.state["optimizer"])
        self.step = found.state["step"]
        logger.info(f"Resuming from {found.folder}.")

    def _circumstances(self) -> dict[str, int]:
        """What else decides the order of the data."""
        each = self.config.batch_size * self.config.gradient_accumulation
        return {"num_items": len(self.dataset), "global_batch": each * self.accelerator.num_processes}

    def run(self) -> None:
        """Make all steps that are left."""
        config = self.config
        if self.cache is not None and self.step < self.total:
            both = config.guidance_scale is not None
            how: dict[str, Any] = {"batch_size": config.batch_size, "mixed_precision": config.mixed_precision}
            how |= {"target_options": self.target_options}
            self.cache.fill(self.target, self.dataset, both_prompts=both, accelerator=self.accelerator, **how)
        source = FeatureSource(
            self.target,
            self.head.device,
            guidance_scale=config.guidance_scale,
            dropout=config.guidance_dropout,
            noise=config.feature_noise,
            seed=config.seed,
            store=self.cache,
            target_options=self.target_options,
        )
        batches = self._batches()
        reporter = Reporter(self.folder, self.accelerator, config.to_dict())
        with reporter.begin(self.step, self.total) as bar:
            while self.step < self.total:
                self._sums.add(self._make_step(source, islice(batches, config.gradient_accumulation)))
                self.step += 1
                bar.update()
                save = self.step == self.total or self.step % (config.save_every or self.total) == 0
                if save or self.step % config.log_every == 0:
                    self._report(reporter)
                if save:
                    self._evaluate(reporter)
                    self._save()
        reporter.end()

    def _batches(self) -> Iterator[tuple[TokenBatch, list[int], range]]:
        """Batches of this process from the current step on, with the indices of their items and their places."""
        each, accelerator = self.config.gradient_accumulation, self.accelerator
        span = self.step * each, self.total * each
        process = accelerator.process_index, accelerator.num_processes
        order = SeededBatches(len(self.dataset), self.config.batch_size, self.config.seed, *span, *process)
        # A generator of its own keeps the loader from drawing on the global one.
        loader = DataLoader(
            self.dataset,
            batch_sampler=order,
            collate_fn=collate,
            num_workers=self.config.num_workers,
            generator=torch.Generator(),
        )
        for number, (batch, indices) in enumerate(zip(loader, order, strict=True), start=span[0]):
            yield batch, indices, places_of_batch(number, self.config.batch_size, *process)

    def _make_step(
        self, source: FeatureSource, batches: Iterable[tuple[TokenBatch, list[int], range]]
    ) -> dict[str, Tensor]:
        """Make one optimizer step; gives its metrics, still on the device."""
        config, each = self.config, self.config.gradient_accumulation
        sums = Sums()
        for group in self.optimizer.param_groups:
            group["lr"] = config.lr * config.lr_factor(self.step, self.total)
        with seeded(self.head.device, config.seed, self.step, self.accelerator.process_index):
            for index, (batch, indices, places) in enumerate(batches, start=1):
                with nullcontext() if index == each else self.accelerator.no_sync(self.model):
                    with autocast(self.head.device, config.mixed_precision):
                        features, adapter, _ = source.read(batch, indices, places)
                        rows = self.model(features, adapter)
                        means = {name: values.mean() / each for name, values in rows.items()}
                    self.accelerator.backward(means["loss"])
                sums.add(means)
        metrics = sums.tensors()
        limit = math.inf if config.max_grad_norm is None else config.max_grad_norm
        metrics["grad_norm"] = self.accelerator.clip_grad_norm_(self.model.parameters(), limit)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update(self.head, self.step)
        return metrics

    def _report(self, reporter: Reporter) -> None:
        """Report the mean metrics since the last report, and stop when they are no numbers."""
        steps = self._sums.count
        means = {name: value / steps for name, value in self._sums.take(self.accelerator).items()}
        if not all(map(math.isfinite, means.values())):
            raise FloatingPointError(
                f"The loss is not finite at step {self.step}: {means}. Lower `lr` (now {self.config.lr}), lengthen "
                "`warmup_steps`, or train without `mixed_precision`; then start again from the last checkpoint."
            )
        reporter.steps(self.step, means, self.optimizer.param_groups[0]["lr"])

    def _evaluate(self, reporter: Reporter) -> None:
        """Report the metrics on the evaluation set; the main process alone measures."""
        if self.eval_dataset is None or not len(self.eval_dataset):
            return
        config = self.config
        if self.accelerator.is_main_process:
            objective = self._objective(self._exported).eval()
            with torch.no_grad(), autocast(self.head.device, config.mixed_precision):
                data, tree = self.eval_dataset, get_tree(config.tree)
                how = config.batch_size, EVAL_DEPTHS, tree, config.seed, self.target_options
                means = mean_metrics(self.target, objective, data, *how)
            self.head.train()
            reporter.evaluation(self.step, means, sequences=len(data), tree=config.tree)
        self.accelerator.wait_for_everyone()

    def _save(self) -> None:
        """Write a checkpoint."""
        if self.folder is not None and self.accelerator.is_main_process:
            state = {"step": self.step, "config": self.config.to_dict(), "optimizer": self.optimizer.state_dict()}
            state |= self._circumstances()
            if self.average is not None:
                state["weights"] = self.head.state_dict()
            save_checkpoint(self.folder / CHECKPOINTS, self.step, self._exported, state, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def finish(self) -> LanternDraftModel:
        """Save the head and give it back as a model to use."""
        if self.config.activation_checkpointing:
            set_checkpointing(self.head, False)
        if self.average is not None:
            self.head.load_state_dict(self.average.head.state_dict())
        self.head.eval()
        if self.folder is not None and self.accelerator.is_main_process:
            export_head(self.folder, self.head, self._write_record)
            self.head.name_or_path = str(self.folder)  # as if it had been loaded from there
        self.accelerator.wait_for_everyone()
        return self.head

    def _write_record(self, folder: Path) -> None:
        """Write what a card says of this training."""
        write_record(
            folder,
            folder / LOG,
            self.config,
            steps=self.step,
            processes=self.accelerator.num_processes,
            sequences=len(self.dataset),
            source=getattr(self.dataset, "source", ()),
        )
