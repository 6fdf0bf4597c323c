"""Losses and forecasts against hand computations, enumeration, and what decoding really does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import tiny_chameleon, tiny_head, tiny_llamagen
from tiny import features_of, inputs_for, random_data, sampled, trained_llamagen
from torch import Tensor
from transformers import PreTrainedModel

import lantern_hf
from lantern_hf import TREES, LanternConfig, LanternDraftModel
from lantern_hf.targets import adapter_for
from lantern_hf.training import (
    DraftObjective,
    TokenSequences,
    TrainingConfig,
    collate,
    draft_passes,
    entry_losses,
    evaluate_head,
    forecast_passes,
    target_features,
    train_head,
)
from lantern_hf.training.features import both_streams
from lantern_hf.training.forecast import rank_shares


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, LanternDraftModel]:
    return trained_llamagen(tmp_path_factory.mktemp("trained"))


@pytest.mark.parametrize("make", [tiny_llamagen, tiny_chameleon])
def test_the_guided_loss_is_that_of_a_hand_computation(make) -> None:
    """Plain tensor arithmetic on raw logits: p and q are softmax(u + s (c - u)), features count on both streams."""
    target, scale = make(), 3.0
    data, head = random_data(target, 2, 6), tiny_head(target)
    batch = collate([data[0], data[1]])
    adapter = adapter_for(target, batch.prompt["input_ids"])
    features = target_features(adapter, both_streams(adapter, batch))
    weights = {"feature_loss_weight": 0.5, "distribution_loss_weight": 2.0, "overlap_loss_weight": 3.0}
    objective = DraftObjective(head, **weights, guidance_scale=scale)
    rows = objective.eval()(features, adapter)
    with torch.no_grad():
        guessed = head(
            features.embeds,
            features.hidden,
            features.position_ids,
            attention_mask=causal(features.mask, features.hidden),
        ).last_hidden_state[:, features.start :]
        true = features.next_hidden[:, features.start :]
        weight = target.lm_head.weight
        weight = (
            weight if adapter.columns is None else weight[adapter.columns[: adapter.num_codes]]
        )  # nothing else may come
        p, q = (
            torch.softmax(u + scale * (c - u), -1)
            for c, u in ((states[:2] @ weight.T, states[2:] @ weight.T) for states in (true, guessed))
        )
        cross_entropy = -(p * q.log()).sum(-1).mean(1)
        error = (guessed - true).abs()
        smooth = torch.where(error < 1, 0.5 * error**2, error - 0.5).mean(-1)
        feature = (smooth[:2] + smooth[2:]).mean(1) / 2
    torch.testing.assert_close(rows["distribution_loss"], cross_entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows["feature_loss"], feature, atol=1e-5, rtol=1e-5)
    distance = 0.5 * (p - q).abs().sum(-1).mean(1)
    loss = 0.5 * feature + 2 * cross_entropy + 3 * distance
    torch.testing.assert_close(rows["loss"].detach(), loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rows["overlap"], 1 - distance, atol=1e-5, rtol=1e-5)
    assert rows["agreement"].tolist() == (p.argmax(-1) == q.argmax(-1)).float().mean(1).tolist()


def causal(real: Tensor | None, hidden: Tensor) -> Tensor | None:
    """Mask of the head's entries, padding seeing itself."""
    if real is None:
        return None
    square = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).tril()
    return ((square & real[:, None]) | torch.eye(hidden.shape[1], dtype=torch.bool))[:, None]


def test_guided_training_helps_guided_decoding() -> None:
    target = tiny_llamagen()
    data = sampled(target, 32, 24, guidance=3.0)
    settings = {"steps": 60, "batch_size": 16, "lr": 1e-2, "feature_loss_weight": 0.0, "distribution_loss_weight": 1.0}
    settings |= {"max_grad_norm": None, "feature_noise": 0.0, "log_every": 60, "save_every": None}
    guided, plain = (
        evaluate_head(
            target,
            train_head(target, data, TrainingConfig(**settings, guidance_scale=scale, guidance_dropout=0.5)),
            data,
            guidance_scale=3.0,
        )
        for scale in (3.0, None)
    )
    assert guided["overlap"] > plain["overlap"] + 0.02
    assert guided["tokens_per_pass"] > plain["tokens_per_pass"]


def test_the_overlap_loss_alone_raises_the_overlap() -> None:
    target = tiny_llamagen()
    data = sampled(target, 16, 24)
    settings = {"batch_size": 16, "lr": 1e-2, "feature_loss_weight": 0.0, "distribution_loss_weight": 0.0}
    settings |= {"overlap_loss_weight": 1.0, "feature_noise": 0.0, "guidance_dropout": 0.0, "save_every": None}
    few, more = (
        evaluate_head(target, train_head(target, data, TrainingConfig(steps=steps, **settings)), data)["overlap"]
        for steps in (1, 60)
    )
    assert more > few + 0.02


def shares_by_enumeration(p: Tensor, q: Tensor, token: int, width: int) -> list[float]:
    """`a_r(token) / p(token)` of each rank, summed over every way to draw siblings."""
    total = [0.0] * width

    def draw(rank: int, left: Tensor, rest: Tensor, chance: float, alive: float) -> None:
        if rank == width:
            return
        after = (left - rest).clamp_min(0)
        after = after / after.sum() if after.sum() > 0 else left
        for x in range(len(p)):
            if rest[x] == 0:
                continue
            here, ratio = chance * float(rest[x]), min(1.0, float(left[x] / rest[x]))
            if x == token:
                total[rank] += here * alive * ratio
            without = rest.clone()
            without[x] = 0
            draw(rank + 1, after, without / without.sum().clamp_min(1e-30), here, alive * (1 - ratio))

    draw(0, p, q, 1.0, 1.0)
    return [value / float(p[token]) for value in total]


def test_shares_of_ranks_equal_an_enumeration() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(5, generator=generator, dtype=torch.double) ** 2 for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    draws, width = 200_000, 3
    for token in range(5):
        rows = (p.float().expand(draws, -1), q.float().expand(draws, -1), torch.full((draws,), token))
        shares = rank_shares(*rows, width, generator)
        error = shares.std(0) / draws**0.5
        expected = torch.tensor(shares_by_enumeration(p, q, token, width))
        assert ((shares.mean(0) - expected).abs() <= 4 * error + 1e-6).all()
    wide = rank_shares(p.float()[None], q.float()[None], torch.tensor([0]), 9, generator)
    assert wide.shape == (1, 9)
    assert wide[0, 5:].tolist() == [0.0] * 4


@pytest.mark.parametrize("guidance", [None, 2.0])
def test_decoding_takes_the_passes_that_training_predicts(trained, guidance: float | None) -> None:
    """The off-by-one test: a head that reads the tokens one entry off would need far more passes."""
    target, head = trained
    rows, tokens = 32, 60
    inputs = inputs_for(target, rows, seed=9)
    out = target.generate(
        **inputs,
        custom_generate=lantern_hf.lantern_generate,
        assistant=head,
        lantern_config=LanternConfig.strict("eagle_25"),
        generator=[torch.Generator().manual_seed(row) for row in range(rows)],
        do_sample=True,
        guidance_scale=guidance,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
    )
    batch = collate(
        [TokenSequences(inputs, out.sequences[:, inputs["input_ids"].shape[1] :])[row] for row in range(rows)]
    )
    predicted, shifted = (forecast(target, head, batch, guidance, shift) for shift in (0, 1))
    measured = torch.tensor(out.stats.row_passes, dtype=torch.float)
    assert predicted["tokens"].tolist() == [tokens - 1] * rows
    gap = measured - predicted["passes"]
    error = gap.std() / rows**0.5
    assert abs(gap.mean()) < 3 * error
    assert error < 0.03 * measured.mean()  # what the test can see
    # Row by row the mistake costs passes, though rows differ by more than it does.
    cost = shifted["passes"] - predicted["passes"]
    assert cost.mean() > 3 * cost.std() / rows**0.5
    accepted = torch.tensor(out.stats.accepted_per_depth, dtype=torch.float) / measured.sum()
    forecasts = torch.stack([predicted[f"accepted_{depth}"].sum() for depth in range(1, 6)]) / predicted["passes"].sum()
    assert ((accepted - forecasts).abs() < 4 * (accepted * (1 - accepted) / measured.sum()).sqrt() + 0.01).all()


def forecast(target: PreTrainedModel, head: LanternDraftModel, batch, guidance: float | None, shift: int) -> dict:
    """The forecast; with a shift every entry reads another's token and state, the classic mistake."""
    adapter = adapter_for(target, batch.prompt["input_ids"])
    read = batch if guidance is None else both_streams(adapter, batch)
    features = target_features(adapter, read)
    if shift:
        rolled = {name: getattr(features, name).roll(shift, dims=1) for name in ("embeds", "hidden")}
        features = replace(features, **rolled)
    generator = torch.Generator().manual_seed(1)
    tree = TREES["eagle_25"]
    return forecast_passes(head, features, adapter, batch, tree, guidance_scale=guidance, generator=generator)


def test_the_forecast_of_one_chain_follows_from_its_overlaps(trained) -> None:
    """A tree of one node, without a second sibling: the share is min(1, q / p), and nothing is drawn."""
    target, head = trained
    data = sampled(target, 4, 12, seed=3)
    batch = collate([data[row] for row in range(4)])
    features, adapter = features_of(target, data, [0, 1, 2, 3])
    predicted = forecast_passes(head, features, adapter, batch, lantern_hf.DraftTree.from_choices([[0]]))
    with torch.no_grad():
        hidden = features.next_hidden[:, features.start :]
        p = adapter.logits(hidden).softmax(-1)
        q = adapter.logits(next(draft_passes(head, features))).softmax(-1)
    at = batch.tokens[:, 1:, None]
    share = (q.gather(-1, at) / p.gather(-1, at)).clamp_max(1)[..., 0]
    for row in range(4):
        root = [1.0] + [0.0] * 12
        for index in range(11):
            root[index + 1] += root[index] * (1 - float(share[row, index]))
            root[index + 2] += root[index] * float(share[row, index])
        assert float(predicted["passes"][row]) == pytest.approx(sum(root[:11]), rel=1e-4)


def test_measured_acceptance_is_the_overlap_that_training_reports(trained) -> None:
    target, head = trained
    inputs = inputs_for(target, 24, seed=9)
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
