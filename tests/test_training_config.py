"""`TrainingConfig` and `DistilConfig`: what they refuse, and what survives JSON."""

from __future__ import annotations

import json

import pytest

from lantern_hf.training import DistilConfig, TrainingConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "Exactly one of `steps` and `epochs`"),
        ({"steps": 1, "epochs": 1}, "Exactly one of `steps` and `epochs`"),
        ({"steps": 0}, "`steps` must be an integer of at least 1, got 0"),
        ({"steps": 5, "batch_size": 0}, "`batch_size`"),
        ({"steps": 5, "warmup_steps": 6}, "`warmup_steps` must be at most `steps`, got 6 and 5"),
        ({"steps": 5, "lr": 0.0}, "`lr` must be positive"),
        ({"steps": 5, "max_grad_norm": 0.0}, "Use None to clip nothing"),
        ({"steps": 5, "guidance_dropout": 1.5}, "`guidance_dropout` is a probability"),
        ({"steps": 5, "betas": (0.9, 1.0)}, "`betas`"),
        ({"steps": 5, "schedule": "cosin"}, "`schedule` must be one of"),
        ({"steps": 5, "mixed_precision": "fp16"}, "`mixed_precision` must be one of"),
        ({"steps": 5, "guidance_scale": 1.0}, "`guidance_scale` must be above 1, got 1.0. Use None"),
        ({"steps": 5, "ema_decay": 1.0}, "`ema_decay` must be in"),
        ({"steps": 5, "tree": "oak"}, "'oak' is not a preset"),
        ({"steps": 5, "unroll_steps": 4}, "`unroll_steps` must be 1 to 3, got 4"),
        ({"steps": 5, "unroll_steps": 2, "activation_checkpointing": True}, "`activation_checkpointing` works with"),
        ({"steps": 5, "overlap_loss_weight": -1.0}, "`overlap_loss_weight` must be at least 0"),
        ({"steps": 5, "feature_loss_weight": 0.0, "distribution_loss_weight": 0.0}, "Give one of them a weight"),
    ],
)
def test_config_errors(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**settings)


def test_config_survives_json_and_counts_steps() -> None:
    config = TrainingConfig(epochs=2.5, batch_size=4, gradient_accumulation=2)
    assert TrainingConfig(**json.loads(json.dumps(config.to_dict()))) == config
    assert config.total_steps(16) == 5
    assert config.total_steps(16, num_processes=2) == 3
    assert TrainingConfig(steps=10, schedule="constant").lr_factor(9, 10) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"guidance_scale": 0.5}, "`guidance_scale` must be at least 1"),
        ({"top_p": 0.0}, "`top_p` must be in"),
        ({"shard_size": 0}, "`shard_size` must be an integer of at least 1, got 0"),
        ({"batch_size": 1.5}, "`batch_size` must be an integer"),
        ({"tree": "oak"}, "'oak' is not a preset"),
    ],
)
def test_distil_config_errors(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistilConfig(**settings)
