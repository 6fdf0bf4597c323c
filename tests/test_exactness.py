"""Strict decoding keeps the target's distribution exactly, and relaxed decoding costs what it says: by enumeration.

Every draft outcome and every accept or reject decision of a small tree becomes one batch row of `verify_tree`, whose
draw is put just below or just above the threshold that an oracle computes. Weighted by their exact chances, the
sequences that the real code emits must follow the target's joint law. No sampling, no tolerance but rounding.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

from lantern_hf.acceptance import neighborhood_mass, verify_tree
from lantern_hf.neighbors import NeighborTable
from lantern_hf.tree import DraftTree

EDGE = 1e-11  # how near to a threshold the draws are put, relative


@dataclass
class Model:
    """Target p and drafts q as tables over the prefix: every prefix has its own distributions."""

    vocab_size: int
    draft_support: int | None = None
    cache: dict = field(default_factory=dict)

    def probs(self, kind: str, prefix: tuple[int, ...]) -> torch.Tensor:
        if (kind, prefix) not in self.cache:
            seed = hash((("p", "q", "window").index(kind), prefix)) % 2**31
            generator = torch.Generator().manual_seed(seed)
            weights = torch.rand(self.vocab_size, generator=generator, dtype=torch.float64) ** 2 + 0.01
            if kind == "p":
                weights[prefix[-1] if prefix else 0] = 0  # a token the target excludes
            elif self.draft_support:
                weights[torch.randperm(self.vocab_size, generator=generator)[self.draft_support :]] = 0
            self.cache[kind, prefix] = weights / weights.sum()
        return self.cache[kind, prefix]


@dataclass
class Branch:
    """One outcome: its chance, tokens and draws per node, the path it must take, the relaxed_tv it must report."""

    weight: float
    tokens: dict[int, int]
    uniforms: dict[int, float]
    path: tuple[int, ...]
    relaxed_tv: float


def draft_outcomes(tree: DraftTree, model: Model, node: int, prefix: tuple[int, ...]) -> Iterator[tuple]:
    """Every way to draw the children of a node: `(tokens, q of each child at its draw, chance)`."""
    children = [c for c in tree.children[node].tolist() if c >= 0]
    for tokens in itertools.product(range(model.vocab_size), repeat=len(children)):
        taken, chance, draws = defaultdict(list), 1.0, []
        for child, token in zip(children, tokens, strict=True):
            row = int(tree.rows[child])
            q = model.probs("q" if row == node else "window", prefix).clone()
            q[taken[row]] = 0
            q = q / q.sum() if q.sum() > 0 else q
            if q.sum() == 0:  # nothing left to draw: a dead child, filled with token 0
                chance *= token == 0
            else:
                chance *= q[token].item()
            taken[row].append(token)
            draws.append(q)
        if chance > 0:
            yield children, tokens, draws, chance


def branches(tree: DraftTree, model: Model, knobs: dict, node: int = 0, prefix: tuple[int, ...] = ()) -> list[Branch]:
    """Every branch from a node on."""
    found = []
    for children, tokens, draws, chance in draft_outcomes(tree, model, node, prefix):
        here = dict(zip(children, tokens, strict=True))
        p, weight, uniforms, paid = model.probs("p", prefix), chance, {}, 0.0
        for child, token, q in zip(children, tokens, draws, strict=True):
            if q[token] == 0:
                continue
            mass = neighborhood_mass(p, torch.tensor(token), **knobs)
            accept = min(1.0, ((p[token] + mass) / q[token]).item())
            paid += accept - min(1.0, (p[token] / q[token]).item())
            accept = 1.0 if accept > 1 - 1e-13 else accept  # 1 up to rounding: no branch rejects
            if accept > 0:
                for tail in branches(tree, model, knobs, child, (*prefix, token)):
                    draws_here = {**uniforms, child: accept * (1 - EDGE)}
                    found.append(
                        Branch(
                            weight * accept * tail.weight,
                            {**here, **tail.tokens},
                            {**draws_here, **tail.uniforms},
                            (node, *tail.path),
                            paid + tail.relaxed_tv,
                        )
                    )
            if accept == 1:
                break
            uniforms = {**uniforms, child: accept + (1 - accept) * EDGE}
            weight *= 1 - accept
            rest = (p - q).clamp_min(0)
            p = rest / rest.sum()
        else:
            found.append(Branch(weight, here, uniforms, (node,), paid))
    return found


def prefix_of(tree: DraftTree, node: int, tokens: dict[int, int]) -> tuple[int, ...]:
    """Tokens on the way from the root to a node; nodes that nobody walked have token 0."""
    line = tree.mask[node].nonzero().flatten().tolist()[1:]
    return tuple(tokens.get(n, 0) for n in line)


def run(tree: DraftTree, model: Model, found: list[Branch], knobs: dict):
    """Push all branches through the real code as one batch."""
    size, nodes = len(found), range(tree.num_nodes)
    tokens = torch.tensor([[branch.tokens.get(n, 0) for n in nodes] for branch in found])
    uniforms = torch.tensor([[branch.uniforms.get(n, 0.5) for n in nodes] for branch in found], dtype=torch.float64)
    target = torch.stack([model.probs("p", prefix_of(tree, n, b.tokens)) for b in found for n in nodes])
    draft = torch.stack([model.probs("q", prefix_of(tree, n, b.tokens)) for b in found for n in nodes])
    target, draft = target.view(size, tree.num_nodes, -1), draft.view(size, tree.num_nodes, -1)
    for node in nodes[1:]:
        if tree.rows[node] != tree.parents[node]:  # a window token: its own row, given what comes before it
            rows = [model.probs("window", prefix_of(tree, int(tree.parents[node]), b.tokens)) for b in found]
            draft[:, int(tree.rows[node])] = torch.stack(rows)
    return verify_tree(tree, tokens, target, draft, uniforms, **knobs)


def emitted_law(tree: DraftTree, model: Model, found: list[Branch], verdict) -> dict[tuple[int, ...], float]:
    """Joint law of the first D + 1 tokens: those the code keeps, its next token, and the target from there on."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    length = tree.max_depth + 1
    for branch, next_probs in zip(found, verdict.next_probs.tolist(), strict=True):
        kept = prefix_of(tree, branch.path[-1], branch.tokens)
        open_ends = [((*kept, token), branch.weight * chance) for token, chance in enumerate(next_probs) if chance > 0]
        while open_ends:
            sequence, weight = open_ends.pop()
            if len(sequence) == length:
                law[sequence] += weight
                continue
            probs = model.probs("p", sequence).tolist()
            open_ends += [((*sequence, token), weight * chance) for token, chance in enumerate(probs) if chance > 0]
    return law


def target_law(tree: DraftTree, model: Model) -> dict[tuple[int, ...], float]:
    """Joint law of the first D + 1 tokens under the target."""
    law = {(): 1.0}
    for _ in range(tree.max_depth + 1):
        law = {
            (*prefix, token): weight * chance
            for prefix, weight in law.items()
            for token, chance in enumerate(model.probs("p", prefix).tolist())
        }
    return law


def check_path(tree: DraftTree, found: list[Branch], verdict) -> None:
    """The code must decide as the oracle does on both sides of every threshold."""
    assert sum(branch.weight for branch in found) == pytest.approx(1, abs=1e-12)
    depth = tree.max_depth + 1
    assert verdict.path.tolist() == [list(b.path) + [-1] * (depth - len(b.path)) for b in found]
    assert verdict.accepted_length.tolist() == [len(b.path) - 1 for b in found]
    assert verdict.relaxed_tv.tolist() == pytest.approx([b.relaxed_tv for b in found], abs=1e-12)


HEAD = DraftTree.from_choices([(0,), (1,)])
CASES = {
    "one sibling": (DraftTree.from_choices([(0,)]), Model(6)),
    "three siblings": (DraftTree.from_choices([(0,), (1,), (2,)]), Model(6)),
    "depth 2": (DraftTree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0)]), Model(4)),
    "three siblings at depth 2": (DraftTree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (2, 0)]), Model(4)),
    "dead siblings": (DraftTree.from_choices([(0,), (1,), (2,), (0, 0), (0, 1)]), Model(4, draft_support=2)),
    "one token to draw": (DraftTree.from_choices([(0,), (1,), (0, 0), (0, 1)]), Model(4, draft_support=1)),
    "two rows": (HEAD.grafted_on_chain(1), Model(5)),
    "two rows, depth 2": (DraftTree.from_choices([(0,), (1,), (0, 0)]).grafted_on_chain(2), Model(3)),
    "rows interleaved": (DraftTree.from_choices([(0,), (1,), (2,)], rows=[0, 0, 2, 0]), Model(5)),
}


@pytest.mark.parametrize("name", CASES)
def test_strict_keeps_the_target(name: str) -> None:
    tree, model = CASES[name]
    found = branches(tree, model, {})
    verdict = run(tree, model, found, {})
    check_path(tree, found, verdict)
    law, target = emitted_law(tree, model, found, verdict), target_law(tree, model)
    assert set(law) <= set(target)
    assert max(abs(law.get(key, 0) - chance) for key, chance in target.items()) < 1e-12
    assert (verdict.relaxed_tv == 0).all()


@pytest.mark.parametrize("name", ["one sibling", "three siblings", "dead siblings", "two rows", "rows interleaved"])
@pytest.mark.parametrize("cap", [{"lam": 1.5}, {"lam": 4.0}, {"delta": 0.3}])
def test_relaxing_costs_at_most_the_tv_it_reports(name: str, cap: dict) -> None:
    tree, model = CASES[name]
    points = torch.randn(model.vocab_size, 2, generator=torch.Generator().manual_seed(1))
    knobs = {"neighbors": NeighborTable.from_codebook(points, 2), "neighborhood_size": 2, **cap}
    found = branches(tree, model, knobs)
    verdict = run(tree, model, found, knobs)
    check_path(tree, found, verdict)
    law, target = emitted_law(tree, model, found, verdict), target_law(tree, model)
    paid = sum(abs(law.get(key, 0) - target.get(key, 0)) for key in {*law, *target}) / 2
    reported = sum(b.weight * tv for b, tv in zip(found, verdict.relaxed_tv.tolist(), strict=True))
    assert 0 < paid <= reported + 1e-12
    if name == "one sibling":
        assert paid == pytest.approx(reported, abs=1e-12)
