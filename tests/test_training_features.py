"""Features: what the head sees in training is what it sees in decoding, however rows are batched, cut and stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import NUM_CODES, TINY, tiny_chameleon, tiny_head, tiny_llamagen
from tiny import STEPS, features_of, random_data, same_weights
from transformers import PreTrainedModel
from transformers.utils import ModelOutput, logging

from lantern_hf import LanternDraftModel
from lantern_hf.cache import new_dynamic_cache
from lantern_hf.candidates import LanternCandidateGenerator
from lantern_hf.targets import adapter_for
from lantern_hf.training import (
    DraftObjective,
    FeatureCache,
    TokenSequences,
    TrainingConfig,
    collate,
    draft_passes,
    drop_prompts,
    target_features,
    train_head,
)
from lantern_hf.training.features import both_streams, with_noise
from lantern_hf.training.fingerprint import data_fingerprint, target_fingerprint
from lantern_hf.training.rows import join_rows, split_rows


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


def test_noise_depends_on_a_rows_seed_and_not_on_its_padding() -> None:
    target = tiny_chameleon()
    data = random_data(target, 3, 8)
    items = [{n: v[row:] if n != "tokens" else v[: 8 - row] for n, v in data[row].items()} for row in range(3)]
    adapter = adapter_for(target, items[0]["input_ids"][None])
    together = target_features(adapter, collate(items))
    noisy = with_noise(together, 0.3, [5, 6, 7])
    added = noisy.hidden - together.hidden
    assert float(added.abs().max()) <= 0.3 < 1.05 * float(added.abs().max())
    assert not torch.equal(added[0], added[1])
    for row, item in enumerate(items):
        alone = target_features(adapter, collate([item]))
        own = (with_noise(alone, 0.3, [5 + row]).hidden - alone.hidden)[0]
        first = row  # entries of padding in front
        torch.testing.assert_close(added[row, first : first + len(own)], own)
    torch.testing.assert_close(noisy.next_hidden, together.next_hidden)
    twice = both_streams(adapter, collate(items))
    pair = target_features(adapter, twice)
    both = with_noise(pair, 0.3, [5, 6, 7]).hidden - pair.hidden
    torch.testing.assert_close(both[:3], both[3:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", sorted(TINY))
def test_rows_cut_out_of_one_batch_fit_into_another(family: str) -> None:
    target = TINY[family]()
    data = random_data(target, 4, 8)
    items = [data[row] for row in range(4)]
    if family != "llamagen":
        items = [
            {n: v[row:] if n != "tokens" else v[: 8 - row] for n, v in item.items()} for row, item in enumerate(items)
        ]
    adapter = adapter_for(target, items[0]["input_ids"][None])
    batch = collate(items)
    rows = split_rows(target_features(adapter, batch), batch)
    objective = DraftObjective(tiny_head(target), unroll_steps=2).eval()
    for chosen in ([0, 1, 2, 3], [3], [2, 1]):
        part = collate([items[row] for row in chosen])
        joined = join_rows([rows[row] for row in chosen], part, adapter, torch.device("cpu"))
        expected = objective(target_features(adapter, part), adapter)
        for name, values in objective(joined, adapter).items():
            torch.testing.assert_close(values, expected[name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("settings", [{"guidance_dropout": 0.3}, {"guidance_scale": 2.0}])
def test_training_on_cached_features_is_training_on_the_target(tmp_path: Path, settings: dict) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=6, **STEPS, **settings)
    online = train_head(target, data, config, output_dir=tmp_path / "online").state_dict()
    forward, calls = target.model.forward, []
    target.model.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    for run in range(2):
        cached = train_head(target, data, config, feature_cache=FeatureCache(tmp_path / "cache", shard_bytes=3000))
        for name, value in cached.state_dict().items():
            torch.testing.assert_close(value, online[name], atol=1e-4, rtol=1e-3)
        if run == 0:
            filled = len(calls)
    assert len(list((tmp_path / "cache").glob("shard-*.safetensors"))) > 1
    if "guidance_scale" in settings:
        assert len(calls) == filled  # the second run never asked the target


def test_a_cache_is_bounded_damaged_parts_and_foreign_ones_are_made_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=3, guidance_dropout=0.0, **STEPS)

    def run(data: TokenSequences, **sizes: int) -> dict[str, torch.Tensor]:
        cache = FeatureCache(tmp_path, shard_bytes=1, **sizes)  # one item a shard
        return train_head(target, data, config, feature_cache=cache).state_dict()

    full = run(data)
    shards = sorted(tmp_path.glob("shard-*.safetensors"))
    assert len(shards) == 8
    size = shards[0].stat().st_size
    half = run(data, max_bytes=4 * size + 100)
    kept = sorted(tmp_path.glob("shard-*.safetensors"))
    assert kept == shards[:4]
    assert sum(path.stat().st_size for path in kept) <= 4 * size + 100
    for name, value in half.items():
        torch.testing.assert_close(value, full[name], atol=1e-4, rtol=1e-3)
    logger = logging.get_logger("lantern_hf.training.feature_cache")
    logger.addHandler(caplog.handler)
    whole = shards[2].read_bytes()
    shards[2].write_bytes(whole[:-3] + b"abc")
    assert same_weights(run(data), full)
    assert "shard-00002.safetensors is damaged (its checksum differs) and is computed again" in caplog.text
    assert shards[2].read_bytes() == whole
    run(random_data(target, 8, 9))
    assert "belongs to another training and is computed anew: `data`" in caplog.text
    logger.removeHandler(caplog.handler)
    with pytest.raises(ValueError, match="`max_bytes` must be at least 1, got 0"):
        FeatureCache(tmp_path, max_bytes=0)


def test_fingerprints_tell_targets_and_data_apart() -> None:
    target = tiny_llamagen()
    same, other = tiny_llamagen(), tiny_llamagen()
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.mul_(1.001)
    assert target_fingerprint(target) == target_fingerprint(same) != target_fingerprint(other)
    assert target_fingerprint(target) != target_fingerprint(tiny_llamagen().to(torch.bfloat16))
    data, shorter = random_data(target), random_data(target, 8, 9)
    items = [data[row] for row in range(8)]
    assert data_fingerprint(data) == data_fingerprint(random_data(target)) != data_fingerprint(shorter)
    assert data_fingerprint(items) == data_fingerprint([dict(item) for item in items]) != data_fingerprint(items[1:])
