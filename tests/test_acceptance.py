"""The acceptance rule: published vectors, what relaxing may and may not do, and the edges of the walk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from lantern_hf.acceptance import (
    greedy_node_accepts,
    neighborhood_mass,
    sibling_probs,
    verify_tree,
    verify_tree_greedy,
    walk_level,
)
from lantern_hf.neighbors import NeighborTable
from lantern_hf.relaxation import Relaxation
from lantern_hf.tree import TREES, DraftTree

GOLDEN = Path(__file__).parent / "golden"
PUBLISHED_NAMES = {
    "chain": "chain_5",
    "mc_sim_7b_63": "eagle_25",
    "mc_sim_7b_63_balanced": "balanced_25",
    "reverse_balanced_25": "deep_25",
    "naive_extend_57": "wide_57",
    "medusa_2_7b_63": "medusa_63",
}
CASES = json.loads((GOLDEN / "acceptance.json").read_text())
VECTORS = load_file(GOLDEN / "acceptance.safetensors")
TABLE = NeighborTable(VECTORS["nearest"])


def case_inputs(case: dict) -> tuple[DraftTree, torch.Tensor, torch.Tensor, dict]:
    """Tree, tokens, target distributions and rule arguments of one recorded round, with a batch axis."""
    tokens = VECTORS[f"{case['id']}.tokens"].long()[None]
    target = VECTORS[f"{case['id']}.target_logits"].softmax(-1)[None]
    knobs = {"neighborhood_size": case["k"], "neighbors": TABLE}
    if case["k"]:
        knobs["lam" if case["bound"] > 1 else "delta"] = case["bound"]
    return TREES[PUBLISHED_NAMES[case["tree"]]], tokens, target, knobs


def node_uniforms(tree: DraftTree, tokens: torch.Tensor, accepted: list[int], in_order: list[float]) -> torch.Tensor:
    """Put draws recorded in the order used on the nodes they tested, by following the accepted tokens."""
    uniforms, draws, node = torch.full(tokens.shape, 0.5), iter(in_order), 0
    for wanted in [*accepted, None]:
        for child in (c for c in tree.children[node].tolist() if c >= 0):
            uniforms[0, child] = next(draws)
            if tokens[0, child] == wanted:
                node = child
                break
    assert next(draws, None) is None
    return uniforms


def draft_case(vocab_size: int = 8, batch: int = 3, seed: int = 0, tree: DraftTree | None = None):
    """A random round whose siblings are drawn without replacement, in float64."""
    tree = tree or DraftTree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, tree.num_nodes, vocab_size)
    target, draft = (torch.randn(shape, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    tokens = torch.zeros(shape[:2], dtype=torch.long)
    for parent in tree.inner.tolist():
        children = [c for c in tree.children[parent].tolist() if c >= 0]
        tokens[:, children] = draft[:, parent].multinomial(len(children), generator=generator)
    uniforms = torch.rand(shape[:2], generator=generator, dtype=torch.float64)
    return tree, tokens, target, draft, uniforms


def random_table(vocab_size: int, k: int, seed: int = 0) -> NeighborTable:
    points = torch.randn(vocab_size, 3, generator=torch.Generator().manual_seed(seed))
    return NeighborTable.from_codebook(points, k)


def case_id(case: dict) -> str:
    return f"{case['id']}-{case['tree']}-k{case['k']}"


@pytest.mark.parametrize("case", [c for c in CASES if not c["greedy"]], ids=case_id)
def test_published_sampled_rounds(case: dict) -> None:
    # The published residual differs from ours only when relaxed.
    for residual in ("reference",) if case["k"] else ("reference", "strict"):
        check_sampled_round(case, residual)


def check_sampled_round(case: dict, residual: str) -> None:
    tree, tokens, target, knobs = case_inputs(case)
    draft = VECTORS[f"{case['id']}.draft_probs"][None]
    uniforms = node_uniforms(tree, tokens, case["accepted_tokens"], case["uniforms"])
    verdict = verify_tree(tree, tokens, target, draft, uniforms, residual=residual, **knobs)
    length = int(verdict.accepted_length)
    assert length == case["accept_length"]
    assert tokens[0, verdict.path[0, 1 : length + 1]].tolist() == case["accepted_tokens"]
    expected = VECTORS[f"{case['id']}.next_distribution"]
    torch.testing.assert_close(verdict.next_probs[0], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [c for c in CASES if c["greedy"]], ids=case_id)
def test_published_greedy_rounds(case: dict) -> None:
    tree, tokens, target, knobs = case_inputs(case)
    verdict = verify_tree_greedy(tree, tokens, target, **knobs)
    length = int(verdict.accepted_length)
    assert length == case["accept_length"]
    assert tokens[0, verdict.path[0, 1 : length + 1]].tolist() == case["accepted_tokens"]
    assert verdict.next_probs[0].argmax() == VECTORS[f"{case['id']}.next_token"]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([{"lam": 1}, {"delta": 0.0}, {"neighborhood_size": 0, "lam": 3.0}, {}]))
def test_knobs_that_mean_strict_are_strict_bit_for_bit(seed: int, knobs: dict) -> None:
    tree, *tensors = draft_case(seed=seed)
    strict = verify_tree(tree, *tensors)
    relaxed = verify_tree(tree, *tensors, neighbors=random_table(8, 4), **{"neighborhood_size": 4, **knobs})
    assert all(torch.equal(a, b) for a, b in zip(strict, relaxed, strict=True))
    tokens, target = tensors[:2]
    greedy = verify_tree_greedy(tree, tokens, target)
    relaxed = verify_tree_greedy(tree, tokens, target, neighbors=random_table(8, 4), neighborhood_size=0, lam=2.0)
    assert all(torch.equal(a, b) for a, b in zip(greedy, relaxed, strict=True))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.floats(1, 50))
def test_relative_cap_never_emits_a_token_the_target_excludes(seed: int, lam: float) -> None:
    tree, tokens, target, draft, uniforms = draft_case(seed=seed, batch=6)
    target = target.masked_fill(torch.arange(8) % 2 == 0, 0)
    target = target / target.sum(-1, keepdim=True)
    verdict = verify_tree(
        tree,
        tokens,
        target,
        draft,
        torch.zeros_like(uniforms),
        neighbors=random_table(8, 4),
        neighborhood_size=4,
        lam=lam,
    )
    kept = verdict.path[:, 1:]
    assert (tokens.gather(1, kept.clamp_min(0))[kept >= 0] % 2 == 1).all()
    assert (verdict.next_probs[:, ::2] == 0).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_relaxing_accepts_wherever_strict_does_at_the_first_level(seed: int) -> None:
    tree, *tensors = draft_case(seed=seed, batch=8, tree=DraftTree.from_choices([(0,)]))
    strict = verify_tree(tree, *tensors)
    relaxed = verify_tree(tree, *tensors, neighbors=random_table(8, 4), neighborhood_size=4, lam=3.0)
    assert (relaxed.accepted_length >= strict.accepted_length).all()
    assert (relaxed.relaxed_tv >= 0).all()
    assert (strict.relaxed_tv == 0).all()


def test_relaxed_tv_is_the_tv_that_one_sibling_costs() -> None:
    tree, _, target, draft, _ = draft_case(batch=1, tree=DraftTree.from_choices([(0,)]))
    p, q, table = target[0, 0], draft[0, 0], random_table(8, 4)
    tokens = torch.stack([torch.zeros(8, dtype=torch.long), torch.arange(8)], 1)
    target, draft = target.expand(8, -1, -1), draft.expand(8, -1, -1)
    mass = neighborhood_mass(p.expand(8, -1), tokens[:, 1], table, 4, lam=3.0)
    accept = ((p + mass) / q).clamp_max(1)
    rejected = verify_tree(
        tree, tokens, target, draft, torch.ones(8, 2), neighbors=table, neighborhood_size=4, lam=3.0
    )  # a draw of 1 rejects wherever that can happen
    emitted = q * accept + ((q * (1 - accept))[:, None] * rejected.next_probs).sum(0)
    assert ((emitted - p).abs().sum() / 2).item() == pytest.approx((q * rejected.relaxed_tv).sum().item(), abs=1e-12)
    assert rejected.relaxed_tv.sum() > 0


def test_batch_rows_do_not_mix() -> None:
    tree, *tensors = draft_case(batch=16, seed=3)
    table = random_table(8, 4)
    knobs = {"neighbors": table, "neighborhood_size": 4, "lam": 2.0}
    together = verify_tree(tree, *tensors, **knobs)
    assert together.accepted_length.unique().numel() > 1
    for row in range(16):
        alone = verify_tree(tree, *(t[row : row + 1] for t in tensors), **knobs)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


def test_siblings_of_one_row_are_drawn_without_replacement_and_others_independently() -> None:
    draft = torch.tensor([[[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64)
    tokens, rows = torch.tensor([[0, 3, 0, 1]]), torch.tensor([[0, 1, 1, 0]])
    expected = [[0.5, 0.3, 0.2, 0], [0.1, 0.2, 0.3, 0.4], [1 / 6, 2 / 6, 3 / 6, 0], [0, 0.6, 0.4, 0]]
    for rank, row in enumerate(expected):
        torch.testing.assert_close(sibling_probs(draft, tokens, rows, rank)[0], torch.tensor(row, dtype=torch.float64))


def test_children_that_were_never_drawn_are_passed_over() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    draft = torch.tensor(
        [[[1.0, 0.0, 0.0]]], dtype=torch.float64
    )  # one token survives, the other two children are dead
    rows, valid = torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 3, dtype=torch.bool)
    for dead in ([1, 2], [-1, -1], [0, 0], [7, 9]):
        level = walk_level(p, draft, torch.tensor([[0, *dead]]), rows, torch.tensor([[0.9, 0.0, 0.0]]), valid)
        assert level.rank.item() == -1
        torch.testing.assert_close(level.next_probs, torch.tensor([[0.0, 0.375, 0.625]], dtype=torch.float64))


def test_children_outside_the_vocabulary_are_passed_over() -> None:
    p, draft = torch.tensor([[0.5, 0.5]]), torch.tensor([[[0.5, 0.5]]])
    for tokens, accepted in (([-1, 0], 1), ([2, 1], 1), ([2, -1], -1)):
        none = torch.zeros(1, 2)
        level = walk_level(p, draft, torch.tensor([tokens]), none.long(), none, torch.ones(1, 2, dtype=torch.bool))
        assert level.rank.item() == accepted  # and they take nothing away from those that follow


def test_padding_and_rows_that_stopped_take_no_part() -> None:
    p = torch.tensor([[0.2, 0.8], [0.2, 0.8]])
    draft, tokens = torch.tensor([[[0.5, 0.5]]]).expand(2, 1, 2), torch.tensor([[1], [1]])
    level = walk_level(p, draft, tokens, torch.zeros_like(tokens), torch.zeros(2, 1), torch.tensor([[True], [False]]))
    assert level.rank.tolist() == [0, -1]
    assert torch.equal(level.next_probs[1], p[1])


def test_an_empty_residual_keeps_the_target() -> None:
    p = torch.tensor([[0.25, 0.75]])
    level = walk_level(
        p, p[:, None], torch.tensor([[0]]), torch.tensor([[0]]), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    )
    assert level.rank.item() == -1  # a draw of exactly 1 is the only way to get here
    assert torch.equal(level.next_probs, p)


def test_the_bonus_comes_from_the_target_at_the_leaf() -> None:
    tree, tokens, target, draft, uniforms = draft_case()
    verdict = verify_tree(tree, tokens, target, draft, torch.zeros_like(uniforms))  # a draw of 0 accepts rank 0
    assert verdict.path[0].tolist() == [0, 1, 4, 7]
    assert torch.equal(verdict.next_probs, target[:, 7])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    tree, tokens, target, draft, uniforms = draft_case()
    verdict = verify_tree(tree, tokens, target.to(dtype), draft.to(dtype), uniforms.float())
    assert verdict.next_probs.dtype == torch.float32
    assert verify_tree(tree, tokens, target, draft, uniforms).next_probs.dtype == torch.float64
    assert verify_tree_greedy(tree, tokens, target.to(dtype)).next_probs.dtype == torch.float32


def test_greedy_keeps_the_longest_relaxed_path_and_the_first_of_equals() -> None:
    tree = DraftTree.from_choices([(0,), (1,), (2,), (1, 0), (2, 0)])
    tokens = torch.tensor([[9, 0, 1, 2, 3, 3]]).clamp_max(3)
    probs = torch.tensor([0.26, 0.25, 0.25, 0.24]).expand(1, 6, 4)
    table = NeighborTable(torch.tensor([[1], [0], [1], [2]]))
    verdict = verify_tree_greedy(tree, tokens, probs, neighbors=table, neighborhood_size=1, lam=3.0)
    assert verdict.path.tolist() == [[0, 2, 4]]  # rank 0 passes too, but ends; rank 1 and 2 go as deep
    assert verdict.relaxed_tv.item() == 2
    strict = verify_tree_greedy(tree, tokens, probs)
    assert strict.path.tolist() == [[0, 1, -1]]
    assert strict.relaxed_tv.item() == 0


def test_greedy_node_accepts_only_the_argmax_when_strict() -> None:
    probs = torch.tensor([[[0.1, 0.6, 0.3]] * 4])
    assert greedy_node_accepts(probs, torch.tensor([[0, 1, 2, -1]])).tolist() == [[False, True, False, False]]
    table = NeighborTable(torch.tensor([[2], [0], [0]]))
    relaxed = greedy_node_accepts(
        probs, torch.tensor([[0, 1, 2, 5]]), neighbors=table, relaxation=Relaxation(1, lam=5.0)
    )
    outside = greedy_node_accepts(
        torch.tensor([0.1, 0.2, 0.7]), torch.tensor(4), neighbors=table, relaxation=Relaxation(1, 5.0)
    )
    assert not outside
    assert relaxed.tolist() == [[False, True, False, False]]  # token 0 borrows 0.3: 0.4 is still below 0.6


def test_nothing_waits_for_the_device() -> None:
    """Tensors without storage fail on any read of a value, so this catches `.item()` and data-dependent shapes."""
    tree, *tensors = draft_case()
    tokens, target, draft, uniforms = (t.to("meta") for t in tensors)
    knobs = {"neighbors": random_table(8, 4), "neighborhood_size": 3, "lam": 2.0}
    for residual in ("strict", "reference"):
        verdict = verify_tree(tree, tokens, target, draft, uniforms, residual=residual, **knobs)
        assert verdict.next_probs.shape == (3, 8)
    assert verify_tree_greedy(tree, tokens, target, **knobs).path.shape == (3, 4)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"lam": 2.0, "delta": 0.1}, "two rules"),
        ({"neighborhood_size": 2, "lam": 0.5}, r"`lam` must be .* got 0.5"),
        ({"neighborhood_size": 2, "delta": 1.5}, r"`delta` must be .* got 1.5"),
        ({"neighborhood_size": 2, "lam": 2.0}, "needs a neighbor table"),
        ({"neighborhood_size": 5, "lam": 2.0, "neighbors": random_table(8, 4)}, "holds 4 per entry"),
        ({"residual": "loose"}, "'strict', 'reference'"),
    ],
)
def test_wrong_knobs_are_named(knobs: dict, message: str) -> None:
    tree, *tensors = draft_case()
    with pytest.raises(ValueError, match=message):
        verify_tree(tree, *tensors, **knobs)


def test_wrong_shapes_are_named_with_both_shapes() -> None:
    tree, tokens, target, draft, uniforms = draft_case()
    with pytest.raises(ValueError, match=r"`uniforms` must have shape \(3, 8\).*got \(3, 7\)"):
        verify_tree(tree, tokens, target, draft, uniforms[:, 1:])
    with pytest.raises(ValueError, match=r"`target_probs` must have shape"):
        verify_tree_greedy(tree, tokens, target[:, 1:])
