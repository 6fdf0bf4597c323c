"""What the tests of training share: tiny data for the tiny targets, and a run's log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from conftest import NUM_CODES, prompt, tiny_head, tiny_llamagen
from transformers import PreTrainedModel

import lantern_hf
from lantern_hf import LanternDraftModel
from lantern_hf.targets import TargetAdapter, adapter_for
from lantern_hf.training import TargetFeatures, TokenSequences, TrainingConfig, collate, target_features, train_head

STEPS: dict[str, Any] = {"batch_size": 4, "log_every": 1, "lr": 3e-3, "max_grad_norm": 1.0}


def inputs_for(target: PreTrainedModel, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of unequal length; Chameleon's end with the begin-image token and ask for an image."""
    inputs = prompt(target, rows, seed)
    if target.config.model_type == "chameleon":
        inputs["input_ids"][:, -1] = 3
    return inputs


def sampled(
    target: PreTrainedModel, rows: int = 16, tokens: int = 24, seed: int = 0, guidance: float | None = None
) -> TokenSequences:
    """Sequences drawn from the target itself."""
    inputs = inputs_for(target, rows, seed)
    out = target.generate(
        **inputs,
        custom_generate=lantern_hf.lantern_generate,
        generator=torch.Generator().manual_seed(seed),
        do_sample=True,
        max_new_tokens=tokens,
        guidance_scale=guidance,
    )
    return TokenSequences(inputs, out[:, inputs["input_ids"].shape[1] :])


def random_data(target: PreTrainedModel, rows: int = 8, tokens: int = 10) -> TokenSequences:
    """Random tokens that the target may emit."""
    inputs = inputs_for(target, rows)
    adapter = adapter_for(target, inputs["input_ids"])
    columns = torch.randint(0, NUM_CODES, (rows, tokens), generator=torch.Generator().manual_seed(5))
    return TokenSequences(inputs, adapter.token_ids(columns))


def features_of(target: PreTrainedModel, data: TokenSequences, rows: list[int]) -> tuple[TargetFeatures, TargetAdapter]:
    """Features of some rows, and their adapter."""
    batch = collate([data[row] for row in rows])
    adapter = adapter_for(target, batch.prompt["input_ids"])
    return target_features(adapter, batch), adapter


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Lines of a run's log."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two state dicts are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def trained_llamagen(folder: Path) -> tuple[PreTrainedModel, LanternDraftModel]:
    """A tiny LlamaGen with a head trained for 100 steps on its own samples; the log is in the folder."""
    target = tiny_llamagen()
    config = TrainingConfig(
        steps=100,
        batch_size=16,
        lr=2e-2,
        max_grad_norm=None,
        distribution_loss_weight=1.0,
        log_every=5,
        guidance_dropout=0.0,
        feature_noise=0.0,
    )
    return target, train_head(target, sampled(target, 64, 32), config, output_dir=folder)


__all__ = [
    "STEPS",
    "features_of",
    "inputs_for",
    "random_data",
    "read_log",
    "same_weights",
    "sampled",
    "tiny_head",
    "trained_llamagen",
]
