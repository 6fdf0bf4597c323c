"""Training: the head learns, sees in training what it sees in decoding, and resumes as if nothing had happened."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
import torch
from conftest import NUM_CODES, TINY, prompt, tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

import lantern_hf
from lantern_hf import LanternConfig, LanternDraftModel
from lantern_hf.cache import new_dynamic_cache
from lantern_hf.candidates import LanternCandidateGenerator
from lantern_hf.targets import adapter_for
from lantern_hf.training import (
    DraftObjective,
    TokenSequences,
    TrainingConfig,
    collate,
    draft_passes,
    drop_prompts,
    entry_losses,
    evaluate_head,
    target_features,
    train_head,
)
from lantern_hf.training.data import SeededBatches

STEPS = {"batch_size": 4, "log_every": 1, "lr": 3e-3, "max_grad_norm": 1.0}


def inputs_for(target: PreTrainedModel, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of unequal length; Chameleon's end with the begin-image token and ask for an image."""
    inputs = prompt(target, rows, seed)
    if target.config.model_type == "chameleon":
        inputs["input_ids"][:, -1] = 3
    return inputs


def sampled(target: PreTrainedModel, rows: int = 16, tokens: int = 24, seed: int = 0) -> TokenSequences:
    """Sequences drawn from the target itself."""
    inputs = inputs_for(target, rows, seed)
    out = target.generate(
        **inputs,
        custom_generate=lantern_hf.lantern_generate,
        generator=torch.Generator().manual_seed(seed),
        do_sample=True,
        max_new_tokens=tokens,
    )
    return TokenSequences(inputs, out[:, inputs["input_ids"].shape[1] :])


def random_data(target: PreTrainedModel, rows: int = 8, tokens: int = 10) -> TokenSequences:
    """Random tokens that the target may emit."""
    inputs = inputs_for(target, rows)
    adapter = adapter_for(target, inputs["input_ids"])
    columns = torch.randint(0, NUM_CODES, (rows, tokens), generator=torch.Generator().manual_seed(5))
    return TokenSequences(inputs, adapter.token_ids(columns))


def features_of(target: PreTrainedModel, data: TokenSequences, rows: list[int]):
    """Features of some rows, and their adapter."""
    batch = collate([data[row] for row in rows])
    adapter = adapter_for(target, batch.prompt["input_ids"])
    return target_features(adapter, batch), adapter


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LanternDraftModel, list[dict], Path]:
    """A tiny LlamaGen with a head trained for 100 steps on its own samples, and the log."""
    target, folder = tiny_llamagen(), tmp_path_factory.mktemp("trained")
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
    head = train_head(target, sampled(target, 64, 32), config, output_dir=folder)
    return target, head, [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()], folder


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


@pytest.mark.parametrize("family", sorted(TINY))
def test_training_and_decoding_show_the_head_the_same(family: str) -> None:
    """The off-by-one test: features at entry t equal those the generator computes at the root, for every prefix."""
    target = TINY[family]()
    data = random_data(target, 3, 8)
    head = train_head(target, data, TrainingConfig(steps=3, **STEPS), head=tiny_head(target))
    features, _ = features_of(target, data, [0, 1, 2])
    with torch.no_grad():
        (trained_on,) = draft_passes(head, features)
    batch = collate([data[row] for row in range(3)])
    for count in (1, 2, 5):
        decoded = root_features(target, head, batch, count)
        torch.testing.assert_close(trained_on[:, count - 1], decoded, atol=1e-5, rtol=1e-5)


def root_features(target: PreTrainedModel, head: LanternDraftModel, batch, count: int) -> torch.Tensor:
    """What the generator computes at the root, `(B, H)`, `count` tokens behind the prompts, from a stock forward."""
    ids = torch.cat([batch.prompt["input_ids"], batch.tokens[:, :count]], dim=1)
    mask = torch.cat([batch.prompt["attention_mask"], torch.ones_like(batch.tokens[:, :count])], dim=1)[:, :-1]
    inputs = {name: batch.prompt[name] for name in batch.prompt if name not in ("input_ids", "attention_mask")}
    positions = target._prepare_position_ids_for_generation(ids[:, :-1], {"attention_mask": mask})
    if target.config.model_type == "llamagen":
        positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    base = target.base_model
    with torch.no_grad():
        hidden = base(ids[:, :-1], attention_mask=mask, position_ids=positions, **inputs).last_hidden_state
        if target.config.model_type == "llamagen":
            embeds = base.embed(ids[:, :-1], positions, **inputs)
        else:
            embeds = target.get_input_embeddings()(ids[:, :-1])
        adapter = adapter_for(target, batch.prompt["input_ids"])
        seen: list[torch.Tensor] = []
        logits = adapter.logits
        adapter.logits = lambda states: seen.append(states) or logits(states)  # type: ignore[method-assign]
        generator = LanternCandidateGenerator(head, target, "chain_5", adapter=adapter, do_sample=False)
        generator.get_candidates(
            ids,
            model_kwargs={"position_ids": positions, "attention_mask": mask, "prompt_embeds": embeds},
            model_outputs=ModelOutput(hidden_states=(hidden,)),
        )
    return seen[0][:, 0]


def test_measured_acceptance_is_the_overlap_that_training_reports(trained) -> None:
    target, head, _, _ = trained
    inputs = prompt(target, 24, seed=9)
    start, roots = inputs["input_ids"].shape[1], []
    before = [start + 1] * 24

    def note(session) -> None:
        roots.extend((row, length - start - 1) for row, length in enumerate(before) if length < start + 60)
        before[:] = session.sequences.lengths

    out = target.generate(
        **inputs,
        custom_generate=lantern_hf.lantern_generate,
        assistant=head,
        lantern_config=LanternConfig.strict("chain_5"),
        generator=torch.Generator().manual_seed(2),
        on_round=note,
        do_sample=True,
        max_new_tokens=60,
        return_dict_in_generate=True,
    )
    data = TokenSequences(inputs, out.sequences[:, start:])
    features, adapter = features_of(target, data, list(range(24)))
    hidden = features.next_hidden[:, features.start :]
    with torch.no_grad():
        probs = adapter.logits(hidden).softmax(-1)
        overlap = entry_losses(adapter, next(draft_passes(head, features)), hidden, probs).overlap
    predicted = torch.stack([overlap[row, entry] for row, entry in roots])
    assert len(predicted) == out.stats.tested_per_depth[0] > 400
    error = (predicted * (1 - predicted)).sum().sqrt() / len(predicted)
    assert abs(out.stats.acceptance_per_depth[0] - predicted.mean()) < 2 * error < 0.05


def test_later_passes_equal_a_chain_of_the_generator() -> None:
    """Entry t of pass k is the node at depth k - 1 of a chain whose tokens are those of the sequence."""
    target = tiny_llamagen()
    data, head, count = random_data(target, 3, 8), tiny_head(target), 3
    features, _ = features_of(target, data, [0, 1, 2])
    with torch.no_grad():
        passes = list(draft_passes(head, features, steps=3))
        root = features.start + count - 1
        causal = torch.ones(root + 1, root + 1, dtype=torch.bool).tril()
        mask = (causal & features.mask[:, None, : root + 1]) | torch.eye(root + 1, dtype=torch.bool)
        cache = new_dynamic_cache(head.config)
        upto = slice(root + 1)
        parts = features.embeds[:, upto], features.hidden[:, upto], features.position_ids[:, upto]
        output = head(*parts, attention_mask=mask[:, None], cache=cache).last_hidden_state[:, -1:]
        torch.testing.assert_close(passes[0][:, count - 1 : count], output)
        for depth in (1, 2):
            here = slice(root + depth, root + depth + 1)
            seen = torch.nn.functional.pad(features.mask[:, : root + 1], (0, depth), value=True)[:, None, None]
            parts = features.embeds[:, here], output, features.position_ids[:, here]
            output = head(*parts, attention_mask=seen, cache=cache).last_hidden_state
            torch.testing.assert_close(passes[depth][:, count - 1 : count], output, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("unroll_steps", [1, 2])
def test_resuming_gives_the_weights_of_an_uninterrupted_training(tmp_path: Path, unroll_steps: int) -> None:
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
            unroll_steps=unroll_steps,
            **STEPS,
        )
        torch.manual_seed(steps)  # the global generator must not matter
        return train_head(target, data, config, output_dir=tmp_path / folder).state_dict()

    whole = run("whole", 7)
    run("parts", 3)
    parts = run("parts", 7)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "parts")]
    lines = [[{k: v for k, v in json.loads(x).items() if k != "seconds"} for x in log] for log in logs]
    assert lines[0] == lines[1]
    assert [line["step"] for line in lines[0]] == list(range(1, 8))
    kept = sorted(path.name for path in (tmp_path / "whole/checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000007"]


def test_a_crash_while_saving_leaves_the_last_checkpoint_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=4, save_every=2, keep_checkpoints=1, **STEPS)
    whole = train_head(target, data, config).state_dict()
    replace = os.replace

    def killed(source, destination, **kwargs) -> None:
        if str(destination).endswith("step-00000004"):
            raise KeyboardInterrupt
        replace(source, destination, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train_head(target, data, config, output_dir=tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".step-00000004.tmp", "step-00000002"]
    resumed = train_head(target, data, config, output_dir=tmp_path)
    assert all(torch.equal(value, whole[name]) for name, value in resumed.state_dict().items())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=2, save_every=1, **STEPS)
    first = train_head(target, data, config, output_dir=tmp_path).state_dict()
    damaged = tmp_path / "checkpoints/step-00000002/training_state.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    second = train_head(target, data, config, output_dir=tmp_path).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_resuming_with_other_settings_is_refused(tmp_path: Path) -> None:
    target = tiny_llamagen()
    train_head(target, random_data(target), TrainingConfig(steps=1, **STEPS), output_dir=tmp_path)
    with pytest.raises(ValueError, match=r"`seed` 0 -> 1; `num_items` 8 -> 4"):
        train_head(target, random_data(target, 4), TrainingConfig(steps=2, seed=1, **STEPS), output_dir=tmp_path)


def test_dropped_prompts_become_unconditional() -> None:
    target = tiny_llamagen()
    data = random_data(target, 4)
    batch = collate([data[row] for row in range(4)])
    adapter = adapter_for(target, batch.prompt["input_ids"])
    mixed = drop_prompts(adapter, batch, torch.tensor([True, False, True, False]))
    assert mixed.prompt["input_ids"][:, 0].tolist() == [NUM_CODES + 1, NUM_CODES, NUM_CODES + 1, NUM_CODES]
    kept, dropped = target_features(adapter, batch), target_features(adapter, mixed)
    ids, mask = target.unconditional_ids(4), batch.prompt["attention_mask"]
    alone = collate([{"input_ids": ids[r], "attention_mask": mask[r], "tokens": batch.tokens[r]} for r in range(4)])
    unconditional = target_features(adapter, alone)
    real = kept.mask
    for row, expected in enumerate((unconditional, kept, unconditional, kept)):
        for name in ("hidden", "embeds", "position_ids"):
            found, wanted = getattr(dropped, name)[row], getattr(expected, name)[row]
            torch.testing.assert_close(found[real[row]], wanted[real[row]])


def test_shorter_unconditional_prompts_are_padded() -> None:
    target = tiny_chameleon()
    data = random_data(target, 2)
    batch = collate([data[0], data[1]])
    adapter = adapter_for(target, batch.prompt["input_ids"])
    mixed = drop_prompts(adapter, batch, torch.tensor([False, True]))
    assert mixed.prompt["input_ids"][1].tolist() == [0, 0, 0, 0, 0, 3]
    assert mixed.prompt["attention_mask"][1].tolist() == [0, 0, 0, 0, 1, 1]
    unpadded = collate([{"input_ids": torch.tensor([0, 3]), "tokens": batch.tokens[1]}])
    long, short = target_features(adapter, mixed), target_features(adapter, unpadded)
    torch.testing.assert_close(long.hidden[1, 5:], short.hidden[0, 1:], atol=1e-5, rtol=1e-5)


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


@pytest.mark.parametrize("family", sorted(TINY))
@pytest.mark.parametrize("unroll_steps", [1, 3])
def test_a_row_does_not_depend_on_its_batch_mates(family: str, unroll_steps: int) -> None:
    target = TINY[family]()
    data = random_data(target, 3, 8)
    items = [data[row] for row in range(3)]
    if family != "llamagen":  # its prefix has one length
        items = [
            {n: v[row:] if n != "tokens" else v[: 8 - row] for n, v in item.items()} for row, item in enumerate(items)
        ]
    objective = DraftObjective(tiny_head(target), unroll_steps=unroll_steps)
    adapter = adapter_for(target, items[0]["input_ids"][None])
    together = objective(target_features(adapter, collate(items)), adapter)
    for row, item in enumerate(items):
        alone = objective(target_features(adapter, collate([item])), adapter)
        for name, values in together.items():
            torch.testing.assert_close(values[row], alone[name][0], atol=2e-5, rtol=2e-5)


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
    assert not head.is_activation_checkpointing


def test_bf16_autocast_leaves_float32_weights_and_nearly_the_same_losses(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data = random_data(target)
    for precision in ("no", "bf16"):
        config = TrainingConfig(steps=3, mixed_precision=precision, **STEPS)
        assert train_head(target, data, config, output_dir=tmp_path / precision).dtype == torch.float32
    logs = [json.loads((tmp_path / p / "log.jsonl").read_text().splitlines()[-1]) for p in ("no", "bf16")]
    assert logs[0]["loss"] == pytest.approx(logs[1]["loss"], rel=0.05)


def test_an_evaluation_is_logged_with_each_checkpoint(tmp_path: Path) -> None:
    target = tiny_llamagen()
    config = TrainingConfig(steps=4, save_every=2, **STEPS | {"log_every": 4})
    train_head(target, random_data(target), config, output_dir=tmp_path, eval_dataset=random_data(target, 3))
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], "eval_overlap" in line) for line in lines] == [(2, False), (2, True), (4, False), (4, True)]


def test_the_order_of_the_data_covers_every_epoch_and_every_process() -> None:
    def batches(start: int, stop: int, rank: int = 0, processes: int = 1) -> list[list[int]]:
        return list(SeededBatches(7, 2, 3, start, stop, rank, processes))

    flat = sum(batches(0, 7), [])
    assert sorted(flat[:7]) == sorted(flat[7:]) == list(range(7))
    assert flat[:7] != flat[7:]
    assert batches(4, 7) == batches(0, 7)[4:]
    shared = [batch for pair in zip(batches(0, 3, 0, 2), batches(0, 3, 1, 2), strict=True) for batch in pair]
    assert shared == batches(0, 6)


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
        ({"steps": 5, "unroll_steps": 4}, "`unroll_steps` must be 1 to 3, got 4"),
        ({"steps": 5, "unroll_steps": 2, "activation_checkpointing": True}, "`activation_checkpointing` works with"),
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
