"""The relaxed mass: which prefix is taken, its caps, and tokens that are no codebook entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lantern_hf.acceptance import neighborhood_mass
from lantern_hf.neighbors import NeighborTable


def test_mass_is_the_longest_prefix_within_the_bound() -> None:
    table = NeighborTable(torch.tensor([[1, 2, 3], [0, 2, 3], [1, 3, 0], [2, 1, 0]]))
    probs = torch.tensor([0.2, 0.1, 0.3, 0.4], dtype=torch.float64)
    x = torch.tensor(0)
    for size, lam, expected in [
        (3, 1.5, 0.1),
        (3, 3.0, 0.4),
        (3, 2.9, 0.1),
        (3, 5.0, 0.8),
        (1, 5.0, 0.1),
        (3, 1.4, 0.0),
    ]:
        mass = neighborhood_mass(probs, x, table, size, lam=lam)
        assert mass.item() == pytest.approx(expected, abs=1e-15), (size, lam)
    assert neighborhood_mass(probs, x, table, 3, delta=0.35).item() == pytest.approx(0.1)


def test_mass_stops_at_the_first_neighbor_that_does_not_fit() -> None:
    table = NeighborTable(torch.tensor([[1, 2], [0, 2], [0, 1]]))  # the second neighbour would fit on its own
    probs = torch.tensor([0.3, 0.6, 0.1])
    assert neighborhood_mass(probs, torch.tensor(0), table, 2, delta=0.2).item() == 0


def test_tokens_outside_the_codebook_are_strict() -> None:
    table = NeighborTable(torch.tensor([[1, 2], [0, 2], [0, 1]]))
    probs = torch.full((2, 6), 1 / 6)
    mass = neighborhood_mass(probs, torch.tensor([0, 4]), table, 2, delta=1.0)
    assert mass[0] > 0
    assert mass[1] == 0


def test_codebook_larger_than_the_vocabulary() -> None:
    table = NeighborTable(torch.tensor([[5, 1], [5, 0], [1, 0], [1, 0], [1, 0], [1, 0]]))
    mass = neighborhood_mass(torch.tensor([0.5, 0.5]), torch.tensor(0), table, 2, delta=1.0)
    assert mass.item() == 0.5  # entry 5 is not in the vocabulary and has no mass


@st.composite
def mass_inputs(draw):
    """Random distribution with some exact zeros, random table, every token."""
    vocab_size = draw(st.integers(3, 12))
    weights = draw(st.lists(st.integers(0, 50), min_size=vocab_size, max_size=vocab_size).filter(any))
    probs = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    size = draw(st.integers(1, vocab_size - 1))
    points = draw(st.permutations(range(vocab_size)))
    return (
        probs.expand(vocab_size, -1),
        NeighborTable.from_codebook(torch.tensor(points, dtype=torch.float64).unsqueeze(1), size),
        size,
    )


@settings(max_examples=60, deadline=None)
@given(mass_inputs(), st.floats(1, 20), st.floats(0, 1))
def test_mass_never_exceeds_its_cap(inputs, lam: float, delta: float) -> None:
    probs, table, size = inputs
    tokens = torch.arange(len(probs))
    relative = neighborhood_mass(probs, tokens, table, size, lam=lam)
    assert (probs[0] + relative <= lam * probs[0] * (1 + 1e-12)).all()
    assert (relative[probs[0] == 0] == 0).all()
    absolute = neighborhood_mass(probs, tokens, table, size, delta=delta)
    assert (absolute <= delta).all()
    assert ((probs[0] + absolute) <= 1 + 1e-12).all()
