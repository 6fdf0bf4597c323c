"""Draws: the right distribution, the right source, one per row when asked."""

from __future__ import annotations

import itertools

import pytest
import torch
from scipy.stats import chi2

from lantern_hf.sampling import Draws

CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_race_draws_without_replacement_in_order() -> None:
    """Every ordered pair has its exact probability p(x) p(y) / (1 - p(x))."""
    probs, rows = torch.tensor([0.5, 0.3, 0.15, 0.05]), 20_000
    ids, drawn = Draws(seeded(0), rows, CPU).race(probs.expand(rows, -1), 2)
    assert drawn.all()
    assert (ids[:, 0] != ids[:, 1]).all()
    statistic, cells = 0.0, 0
    for first, second in itertools.permutations(range(4), 2):
        mean = rows * float(probs[first] * probs[second] / (1 - probs[first]))
        count = int(((ids[:, 0] == first) & (ids[:, 1] == second)).sum())
        statistic, cells = statistic + (count - mean) ** 2 / mean, cells + 1
    assert chi2.sf(statistic, cells - 1) > 0.01


def test_ids_without_mass_are_marked() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])
    ids, drawn = Draws(seeded(0), 2, CPU).race(probs, 3)
    assert drawn.tolist() == [[True, False, False], [True, True, False]]
    assert ids[0, 0] == 1
    assert set(ids[1, :2].tolist()) == {0, 2}


def test_unnormalised_distributions_are_fine() -> None:
    ids, _ = Draws(seeded(0), 4000, CPU).race(torch.tensor([3.0, 1.0]).expand(4000, -1), 1)
    assert abs(float((ids == 0).float().mean()) - 0.75) < 0.03


def test_one_generator_a_row_makes_rows_independent() -> None:
    probs = torch.full((3, 2, 5), 0.2)
    together = Draws([seeded(1), seeded(2), seeded(3)], 3, CPU)
    first, numbers = together.race(probs, 4)[0], together.uniform(6)
    for row in range(3):
        alone = Draws(seeded(1 + row), 1, CPU)
        assert torch.equal(alone.race(probs[:1], 4)[0][0], first[row])
        assert torch.equal(alone.uniform(6)[0], numbers[row])


def test_the_global_state_is_the_default() -> None:
    torch.manual_seed(3)
    first = Draws(None, 2, CPU).uniform(4)
    torch.manual_seed(3)
    assert torch.equal(Draws(None, 2, CPU).uniform(4), first)
    assert first.shape == (2, 4)
    assert ((first >= 0) & (first < 1)).all()


def test_a_single_generator_in_a_list_serves_every_row() -> None:
    assert torch.equal(Draws([seeded(4)], 3, CPU).uniform(2), Draws(seeded(4), 3, CPU).uniform(2))


def test_wrong_generators() -> None:
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        Draws([seeded(0), seeded(1)], 3, CPU)
    with pytest.raises(TypeError, match="got int"):
        Draws([1, 2], 2, CPU)  # type: ignore[list-item]
