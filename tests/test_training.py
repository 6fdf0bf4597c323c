"""Training: the head learns, and resumes as if nothing had happened."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from conftest import tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from tiny import STEPS, random_data, read_log, same_weights, sampled, trained_llamagen
from transformers import PreTrainedModel

from lantern_hf import LanternDraftModel
from lantern_hf._checkpointing import checkpointed_layers
from lantern_hf.training import TokenSequences, TrainingConfig, collate, evaluate_head, train_head
from lantern_hf.training.data import SeededBatches


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LanternDraftModel, list[dict], Path]:
    folder = tmp_path_factory.mktemp("trained")
    target, head = trained_llamagen(folder)
    return target, head, read_log(folder), folder


def test_the_head_learns_what_the_target_samples(trained) -> None:
    target, head, log, folder = trained
    assert log[-1]["overlap"] > log[0]["overlap"] + 0.1
    assert log[-1]["feature_loss"] < log[0]["feature_loss"]
    assert log[-1]["agreement"] > log[0]["agreement"] + 0.2
    data = sampled(target, 64, 32)
    measured = evaluate_head(target, head, data)
    assert measured["overlap"] > evaluate_head(target, LanternDraftModel.for_target(target), data)["overlap"] + 0.1
    assert measured["overlap"] == pytest.approx(log[-1]["overlap"], abs=0.03)
    for saved in (folder, folder / "checkpoints/step-00000100"):
        loaded = LanternDraftModel.from_pretrained(saved).bind(target)
        assert evaluate_head(target, loaded, data) == measured
    assert not head.training
    assert head.target is target


@pytest.mark.parametrize("settings", [{}, {"unroll_steps": 2, "ema_decay": 0.9}, {"guidance_scale": 2.0}])
def test_resuming_gives_the_weights_of_an_uninterrupted_training(tmp_path: Path, settings: dict) -> None:
    target = tiny_llamagen()
    data = random_data(target)

    def run(folder: str, steps: int) -> dict[str, torch.Tensor]:
        config = TrainingConfig(
            steps=steps,
            schedule="constant",
            warmup_steps=2,
            save_every=3,
            gradient_accumulation=2,
            guidance_dropout=0.5,
            **STEPS,
            **settings,
        )
        torch.manual_seed(steps)  # the global generator must not matter
        return train_head(target, data, config, output_dir=tmp_path / folder).state_dict()

    whole = run("whole", 7)
    run("parts", 3)
    assert same_weights(whole, run("parts", 7))
    logs = [read_log(tmp_path / name) for name in ("whole", "parts")]
    lines = [[{k: v for k, v in line.items() if k != "seconds"} for line in log] for log in logs]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == list(range(1, 8))
    kept = sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000007"]


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    target = tiny_llamagen()
    train_head(target, random_data(target), TrainingConfig(steps=1, **STEPS), output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"`seed` 0 -> 1; `num_items` 8 -> 4"):
        train_head(target, random_data(target, 4), TrainingConfig(steps=2, seed=1, **STEPS), output_dir=tmp_path)


def test_dropout_draws_prompts_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    target, seen = tiny_llamagen(), []
    forward = target.model.forward

    def spy(*args, **kwargs):
        if kwargs.get("caption_embeds") is not None:
            seen.append(kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0])
        return forward(*args, **kwargs)

    monkeypatch.setattr(target.model, "forward", spy)
    train_head(target, random_data(target), TrainingConfig(steps=40, guidance_dropout=0.25, **STEPS))
    rate = (torch.cat(seen)[:, 0] == target.config.uncond_token_id).float().mean()
    assert abs(rate - 0.25) < 3 * math.sqrt(0.25 * 0.75 / 160)


@pytest.mark.parametrize("make", [tiny_chameleon, tiny_llama])
def test_other_families(make) -> None:
    target = make().train()
    for parameter in target.lm_head.parameters():
        parameter.requires_grad_(False)
    state = {name: value.clone() for name, value in target.state_dict().items()}
    data = sampled(target, 16, 12)
    settings = {"distribution_loss_weight": 1.0, "unroll_steps": 2, "guidance_dropout": 0.2, **STEPS, "lr": 1e-2}
    head = train_head(target, data, TrainingConfig(epochs=15, **settings), eval_dataset=data)
    before, after = (evaluate_head(target, h, data, depths=2) for h in (tiny_head(target), head))
    assert after["overlap"] > before["overlap"]
    assert after["overlap_2"] > before["overlap_2"]
    assert target.training
    assert not target.lm_head.weight.requires_grad
    assert target.get_input_embeddings().weight.requires_grad
    assert all(torch.equal(value, state[name]) for name, value in target.state_dict().items())


def test_half_precision_target_and_activation_checkpointing(tmp_path: Path) -> None:
    target = tiny_llamagen().to(torch.bfloat16)
    data, config = random_data(target), TrainingConfig(steps=2, activation_checkpointing=True, **STEPS)
    head = train_head(target, data, config, output_dir=tmp_path)
    assert head.dtype == torch.bfloat16
    assert LanternDraftModel.from_pretrained(tmp_path).dtype == torch.float32
    assert not checkpointed_layers(head)


def test_bf16_autocast_leaves_float32_weights_and_nearly_the_same_losses(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data = random_data(target)
    for precision in ("no", "bf16"):
        config = TrainingConfig(steps=3, mixed_precision=precision, **STEPS)
        assert train_head(target, data, config, output_dir=tmp_path / precision).dtype == torch.float32
    logs = [read_log(tmp_path / precision)[-1] for precision in ("no", "bf16")]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=0.05)


def test_an_evaluation_is_logged_with_each_checkpoint(tmp_path: Path) -> None:
    target = tiny_llamagen()
    config = TrainingConfig(steps=4, save_every=2, **STEPS | {"log_every": 4})
    train_head(target, random_data(target), config, output_dir=tmp_path, eval_dataset=random_data(target, 3))
    lines = read_log(tmp_path)
    assert [(line["step"], "eval_overlap" in line) for line in lines] == [(2, False), (2, True), (4, False), (4, True)]


def test_the_saved_head_is_the_average_of_the_weights(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data = random_data(target)
    settings = {"steps": 4, "schedule": "constant", "warmup_steps": 0, "save_every": 1, "keep_checkpoints": 9, **STEPS}
    train_head(target, data, TrainingConfig(**settings), output_dir=tmp_path / "plain")
    head = train_head(target, data, TrainingConfig(**settings, ema_decay=0.3), output_dir=tmp_path / "average")
    with torch.random.fork_rng():
        start = train_head(target, data, TrainingConfig(**settings | {"steps": 1, "lr": 1e-30})).state_dict()
    name = "fc.weight"
    expected = start[name]
    for step in range(4):
        weights = LanternDraftModel.from_pretrained(tmp_path / f"plain/checkpoints/step-{step + 1:08d}").state_dict()
        keep = min(0.3, (1 + step) / (10 + step))
        expected = keep * expected + (1 - keep) * weights[name]
        saved = LanternDraftModel.from_pretrained(tmp_path / f"average/checkpoints/step-{step + 1:08d}").state_dict()
        torch.testing.assert_close(saved[name], expected)
    torch.testing.assert_close(head.state_dict()[name], expected)
    assert same_weights(LanternDraftModel.from_pretrained(tmp_path / "average").state_dict(), head.state_dict())


def test_the_order_of_the_data_covers_every_epoch_and_every_process() -> None:
    def batches(start: int, stop: int, rank: int = 0, processes: int = 1) -> list[list[int]]:
        return list(SeededBatches(7, 2, 3, start, stop, rank, processes))

    flat = sum(batches(0, 7), [])
    assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
    assert flat[:7] != flat[7:]
    assert batches(4, 7) == batches(0, 7)[4:]
    shared = [batch for pair in zip(batches(0, 3, 0, 2), batches(0, 3, 1, 2), strict=True) for batch in pair]
    assert shared == batches(0, 6)


def test_data_errors() -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=1)
    with pytest.raises(ValueError, match="must hold `input_ids`"):
        TokenSequences({"caption_embeds": torch.zeros(2, 6, 12)}, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="as many rows"):
        TokenSequences({"input_ids": target.caption_ids(3)}, torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="the same further keys"):
        collate([data[0], {"input_ids": data[1]["input_ids"], "tokens": data[1]["tokens"]}])
    with pytest.raises(ValueError, match="are not tokens that LlamaGenForConditionalGeneration emits"):
        train_head(target, TokenSequences({"input_ids": target.caption_ids(1)}, torch.full((1, 5), 99)), config)
    with pytest.raises(ValueError, match="more tokens than `unroll_steps`"):
        train_head(target, TokenSequences({"input_ids": target.caption_ids(1)}, torch.zeros(1, 1).long()), config)
    with pytest.raises(ValueError, match="`dataset` is empty"):
        train_head(target, [], config)
