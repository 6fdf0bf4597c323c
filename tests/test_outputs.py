"""Scores, logits and states are those of plain decoding; the statistics add up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from helpers import CASES, Case, make_case, oracle
from transformers.generation.utils import GenerateDecoderOnlyOutput

from lantern_hf import TREES, DraftTree, LanternGenerateOutput
from lantern_hf.cache import CACHE_KEYWORD

LOWEST = torch.finfo(torch.float32).min
WANTED: dict[str, Any] = {
    "do_sample": False,
    "max_new_tokens": 14,
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


def assert_close(ours: Any, theirs: Any) -> None:
    """Same structure, shapes and numbers; both names for "impossible" are one."""
    if isinstance(theirs, tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_close(one, other)
        return
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    ours, theirs = ours.clamp_min(-1e9), theirs.clamp_min(-1e9)
    assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


def outputs(case: Case, kind: str, tree: str, **kwargs: Any) -> tuple[Any, Any]:
    """What LANTERN and transformers return."""
    expected = case.plain(**WANTED, **kwargs)
    assistant = oracle(case, expected.sequences, TREES[tree]) if kind == "oracle" else case.head()
    return case.lantern(assistant, tree, **WANTED, **kwargs), expected


@pytest.mark.parametrize("kind", ["head", "oracle"])
@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize("name", CASES)
def test_equal_those_of_generate(name: str, guidance: float | None, kind: str) -> None:
    case = make_case(name, 3, guidance)
    ours, theirs = outputs(case, kind, "wide_57")
    assert isinstance(ours, LanternGenerateOutput)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(ours.scores, theirs.scores)
    assert ours.attentions is None
    if name == "chameleon-image":  # plain logits also hold text, which is no choice here,
        blank = torch.ones(48, dtype=torch.bool).index_fill(0, case.image_ids, False)
        for one in (ours, theirs):  # ours those that end an image
            one.logits = tuple(logits.masked_fill(blank, LOWEST) for logits in one.logits)
    assert_close(ours.logits, theirs.logits)
    assert_close(ours.hidden_states, theirs.hidden_states)


@pytest.mark.parametrize("name", ["llama", "chameleon-text"])
def test_scores_are_processed(name: str) -> None:
    case = make_case(name, 3, 2.0)
    ours, theirs = outputs(case, "head", "eagle_25", repetition_penalty=1.5)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(ours.scores, theirs.scores)


def test_only_what_was_asked_for() -> None:
    case = make_case("llama")
    output = case.lantern(case.head(), do_sample=False, max_new_tokens=5, return_dict_in_generate=True)
    assert output.scores is output.logits is output.hidden_states is None
    assert output.stats is not None
    tokens = case.lantern(case.head(), do_sample=False, max_new_tokens=5, output_scores=True)
    assert torch.equal(tokens, output.sequences)


def test_rows_that_end_early_hold_zeros() -> None:
    case = make_case("llama", 3)
    ends = case.plain(do_sample=False, max_new_tokens=9)[0, 8:10].tolist()
    ours, theirs = outputs(case, "oracle", "wide_57", eos_token_id=ends, pad_token_id=0)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert len(ours.scores) == len(theirs.scores)
    for row, length in enumerate(ours.stats.new_tokens):
        for index, (one, other) in enumerate(zip(ours.scores, theirs.scores, strict=True)):
            if index < length:
                assert_close(one[row], other[row])
            else:
                assert (one[row] == 0).all()


def test_the_cache_holds_the_sequence() -> None:
    case = make_case("llama")
    ours, theirs = outputs(case, "oracle", "chain_5")
    for one, other in zip(ours[CACHE_KEYWORD].layers, theirs[CACHE_KEYWORD].layers, strict=True):
        assert_close(one.keys, other.keys)
        assert_close(one.values, other.values)


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("tree", ["chain_5", "wide_57"])
def test_statistics_add_up(tree: str, do_sample: bool) -> None:
    case = make_case("llamagen", 3, 1.5)
    rounds: list[list[int]] = []
    output = case.lantern(
        case.head(),
        tree,
        do_sample=do_sample,
        max_new_tokens=30,
        return_dict_in_generate=True,
        on_round=lambda session: rounds.append(list(session.sequences.lengths)),
    )
    stats = output.stats
    assert stats.new_tokens == [30, 30, 30]
    assert stats.passes == len(rounds)
    assert stats.prefill_passes == 1
    assert sum(stats.row_passes) == sum(stats.accepted_lengths)
    assert max(stats.row_passes) == stats.passes
    assert stats.drafted_nodes == sum(stats.row_passes) * (TREES[tree].num_nodes - 1)
    assert stats.tokens_per_pass == (sum(stats.new_tokens) - 3) / sum(stats.row_passes)
    accepted = sum(length * count for length, count in enumerate(stats.accepted_lengths))
    assert accepted + sum(stats.row_passes) >= sum(stats.new_tokens) - 3  # more only where the end cut a path
    assert stats.tested_per_depth[0] == sum(stats.row_passes)
    assert all(a <= t for a, t in zip(stats.accepted_per_depth, stats.tested_per_depth, strict=True))
    assert set(stats.seconds) == {"draft", "verify", "accept", "total"}
    assert stats.seconds["total"] >= sum(stats.seconds[part] for part in ("draft", "verify", "accept"))
    assert json.loads(json.dumps(stats.to_dict())) == stats.to_dict()


def test_depths_below_a_short_leaf_are_not_counted_as_tested() -> None:
    case = make_case("llama")
    expected = case.plain(do_sample=False, max_new_tokens=40)  # further than is decoded
    tree = [[0], [1], [0, 0], [0, 0, 0]]
    draft = oracle(case, expected, DraftTree.from_choices(tree), misses=0)
    stats = case.lantern(draft, do_sample=False, max_new_tokens=24, return_dict_in_generate=True).stats
    # Every proposal is right, so each depth that was tested was accepted, whichever leaf the path ended in.
    assert stats.acceptance_per_depth == [1.0, 1.0, 1.0]
    assert stats.accepted_lengths[1] > 0
