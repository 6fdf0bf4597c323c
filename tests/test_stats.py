"""`DecodingStats`: counts, lazy folding, merging."""

from __future__ import annotations

import json

import pytest
import torch

from lantern_hf import stats as stats_module
from lantern_hf.stats import DecodingStats


def two_rounds() -> DecodingStats:
    stats = DecodingStats(batch_size=2, max_depth=3)
    stats.add_prefill()
    stats.add_round(torch.tensor([3, 0]), torch.tensor([0.25, 0.5]), drafted_nodes=8)
    stats.add_round(
        torch.tensor([1, 2]),
        torch.tensor([0.5, 9.0]),
        drafted_nodes=8,
        new_tokens=torch.tensor([1, 3]),  # row 0 was cut before its bonus token
        tested_depth=torch.tensor([1, 3]),  # and stood on a leaf at depth 1
        active=torch.tensor([True, False]),
    )
    return stats


def test_counts() -> None:
    stats = two_rounds()
    assert (stats.passes, stats.prefill_passes) == (2, 1)
    assert stats.new_tokens == [1 + 4 + 1, 1 + 1]
    assert stats.row_passes == [2, 1]
    assert stats.accepted_lengths == [1, 1, 0, 1]
    assert stats.tested_per_depth == [3, 1, 1]
    assert stats.accepted_per_depth == [2, 1, 1]
    assert stats.acceptance_per_depth == [pytest.approx(2 / 3), 1, 1]
    assert stats.tokens_per_pass == 6 / 3
    assert stats.relaxed_tv == [0.75, 0.5]
    assert stats.relaxed_tv_per_token == 1.25 / 6
    assert stats.drafted_nodes == 24
    assert "8 tokens in 2 passes" in repr(stats)


def test_reading_between_rounds_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = two_rounds().to_dict()
    monkeypatch.setattr(stats_module, "_FOLD_EVERY", 1)
    assert two_rounds().to_dict() == expected


def test_rounds_are_queued_without_a_read() -> None:
    stats = DecodingStats(2, 3)
    length = torch.zeros(2, dtype=torch.long, device="meta")  # any read of a value fails on this device
    stats.add_round(length, length.float(), drafted_nodes=3, active=length == 0)
    assert stats.passes == 1


def test_nothing_decoded_yet() -> None:
    stats = DecodingStats(1, 2)
    assert (stats.tokens_per_pass, stats.relaxed_tv_per_token, stats.acceptance_per_depth) == (0, 0, [0, 0])
    assert stats.new_tokens == [0]


def test_to_dict_is_json() -> None:
    stats = two_rounds()
    with stats.timer("draft"):
        pass
    values = json.loads(json.dumps(stats.to_dict()))
    assert values["tokens_per_pass"] == 2
    assert values["seconds"]["draft"] >= 0


def test_timer_counts_a_failed_block_too() -> None:
    stats = DecodingStats(1, 1)
    with pytest.raises(RuntimeError), stats.timer("verify"):
        raise RuntimeError
    assert "verify" in stats.seconds


def test_merge_adds_counts_and_sets_rows_side_by_side() -> None:
    first, second = two_rounds(), DecodingStats(1, 1)
    first.seconds = {"draft": 1.0}
    second.seconds = {"draft": 0.5, "total": 2.0}
    second.add_round(torch.tensor([1]), torch.tensor([0.0]), drafted_nodes=1)
    merged = first.merge(second)
    assert merged.new_tokens == [6, 2, 2]
    assert merged.accepted_lengths == [1, 2, 0, 1]
    assert merged.tested_per_depth == [4, 1, 1]
    assert merged.tokens_per_pass == 8 / 4
    assert merged.seconds == {"draft": 1.5, "total": 2.0}
    assert first.new_tokens == [6, 2]
