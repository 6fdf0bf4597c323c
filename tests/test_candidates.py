"""Candidate generators on their own and in the loop: what a head proposes, what a generator is told, composed trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_head, tiny_llamagen
from helpers import CASES, Case, make_case, oracle
from test_generate_sampling import joint, p_value, small_target
from torch import Tensor
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)
from transformers.utils import ModelOutput

from lantern_hf import (
    TREES,
    CandidateTree,
    DraftTree,
    LanternCandidateGenerator,
    NeighborTable,
    RelaxedAcceptanceLogitsProcessor,
    lantern_generate,
)
from lantern_hf.draft import POSITION_OFFSET
from lantern_hf.sampling import Draws
from lantern_hf.targets import Prefill, adapter_for


def read_prompt(case: Case) -> tuple[Tensor, Prefill]:
    """Sequences with a root, and what the target makes of the prompt."""
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    kwargs = {key: value for key, value in case.inputs.items() if not key.startswith(("input", "negative", "guid"))}
    with torch.no_grad():
        prompt = adapter.prefill(case.inputs["input_ids"], DynamicCache(), **kwargs)
        root = adapter.token_ids(adapter.logits(prompt.hidden_states[:, -1]).argmax(-1, keepdim=True))
    return torch.cat([case.inputs["input_ids"], root], 1), prompt


def propose(case: Case, generator: LanternCandidateGenerator) -> tuple[Tensor, Tensor, Tensor]:
    """The sequences, the candidates and the scores of a first proposal."""
    ids, prompt = read_prompt(case)
    kwargs = {"position_ids": prompt.position_ids, "attention_mask": prompt.mask, "prompt_embeds": prompt.embeds}
    with torch.no_grad():
        candidates, scores = generator.get_candidates(
            ids, model_kwargs=kwargs, model_outputs=ModelOutput(hidden_states=(prompt.hidden_states,))
        )
    return ids, candidates, scores


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_the_contract(name: str, do_sample: bool) -> None:
    case = make_case(name, 3)
    draws = Draws(torch.Generator().manual_seed(0), 3, torch.device("cpu"))
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    generator = LanternCandidateGenerator(
        case.head(),
        case.model,
        "wide_57",
        do_sample=do_sample,
        draws=draws,
        adapter=adapter,
    )
    ids, candidates, scores = propose(case, generator)
    tree = generator.tree
    assert candidates.shape == (3, ids.shape[1] - 1 + tree.num_nodes)
    assert torch.equal(candidates[:, : ids.shape[1]], ids)
    assert scores.shape[:2] == (3, len(tree.inner))
    assert scores.dtype == torch.float32
    assert set(candidates[:, ids.shape[1] :].flatten().tolist()) <= set(case.emitted)
    columns = adapter.columns_of(candidates[:, ids.shape[1] - 1 :])
    for children in tree.children.tolist():
        kept = [child for child in children if child >= 0]
        assert all(int(tree.rows[child]) == int(tree.rows[kept[0]]) for child in kept)
        for row in range(3):
            tokens = columns[row, kept].tolist()
            assert len(set(tokens)) == len(tokens)  # without replacement
            if kept and not do_sample:
                best = scores[row, int(tree.rows[kept[0]])].topk(len(kept)).indices.tolist()
                assert tokens == best


@pytest.mark.parametrize("name", CASES)
def test_q_of_every_node_is_that_of_its_path_alone(name: str) -> None:
    """The tree pass of the head equals a run over each path from scratch."""
    case = make_case(name, 2)
    head, adapter = case.head(), adapter_for(case.model, case.inputs["input_ids"])
    generator = LanternCandidateGenerator(head, case.model, "eagle_25", adapter=adapter)
    ids, candidates, scores = propose(case, generator)
    _, prompt = read_prompt(case)
    nodes, tree = candidates[:, ids.shape[1] - 1 :], generator.tree
    for place, node in enumerate(tree.inner.tolist()):
        way = tree.mask[node].nonzero().flatten()[1:]
        with torch.no_grad():
            # Entry t reads x_{t + 1}; below the root an entry reads its parent's output in place of the target's state.
            states, places, mask = prompt.hidden_states, prompt.position_ids + POSITION_OFFSET, prompt.mask
            embeds = torch.cat([prompt.embeds[:, 1:], adapter.embed(ids[:, -1:], places[:, -1:])], 1)
            for step in [None, *way.tolist()]:
                if step is not None:
                    states = torch.cat([states, output[:, -1:]], 1)  # noqa: F821
                    embeds = torch.cat([embeds, adapter.embed(nodes[:, step : step + 1], places[:, -1:])], 1)
                    places = torch.cat([places, places[:, -1:] + 1], 1)
                padding = None
                if mask is not None:
                    padding = torch.nn.functional.pad(mask, (0, states.shape[1] - mask.shape[1]), value=True)
                output = head(embeds, states, places, attention_mask=padding).last_hidden_state
            q = adapter.logits(output[:, -1])
        possible = scores[:, place].isfinite()  # others may not come here
        assert possible.sum(1).ge(adapter.num_codes or adapter.num_columns).all()
        assert torch.allclose(q[possible], scores[:, place][possible], atol=1e-3, rtol=1e-4)


class Recorder(LogitsProcessor):
    """Notes every prefix by row."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen += input_ids.tolist()
        return scores


def test_processors_get_the_prefix_of_each_node() -> None:
    case = make_case("llama", 2)
    recorder = Recorder()
    generator = LanternCandidateGenerator(
        case.head(), case.model, "eagle_25", logits_processor=LogitsProcessorList([recorder])
    )
    ids, candidates, _ = propose(case, generator)
    nodes, tree = candidates[:, ids.shape[1] - 1 :], generator.tree
    expected = [
        [*ids[row].tolist(), *nodes[row, tree.mask[node].nonzero().flatten()[1:]].tolist()]
        for node in tree.inner.tolist()
        for row in range(2)
    ]
    assert recorder.seen == expected


def test_fewer_allowed_tokens_than_siblings() -> None:
    """What cannot be drawn repeats the first sibling: processors never see what they excluded."""
    case = make_case("llama", 2)
    shown: list[int] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        shown.extend(ids[7:].tolist())
        return [4 + row, 9]

    rule = LogitsProcessorList([PrefixConstrainedLogitsProcessor(allowed, 1)])
    for do_sample in (True, False):
        generator = LanternCandidateGenerator(
            case.head(), case.model, "wide_57", logits_processor=rule, do_sample=do_sample
        )
        ids, candidates, _ = propose(case, generator)
        for row in range(2):
            assert set(candidates[row, ids.shape[1] :].tolist()) == {4 + row, 9}
        assert set(shown) == {4, 5, 9}
        first = generator.tree.children[0]
        tokens = candidates[0, ids.shape[1] - 1 :][first[first >= 0]].tolist()
        assert set(tokens[2:]) == {tokens[0]}


def test_missing_states_say_so() -> None:
    case = make_case("llama")
    generator = LanternCandidateGenerator(case.head(), case.model)
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        generator.get_candidates(torch.tensor([[1, 2]]))


def test_a_head_for_another_target_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        LanternCandidateGenerator(tiny_head(tiny_llamagen(), hidden_size=32), make_case("chameleon-text").model)


def test_a_round_by_hand(neighbors: NeighborTable) -> None:
    """The pair on its own: propose, and let the relaxed processor judge each child of the root."""
    case = make_case("llamagen", 2)
    model = case.model
    generator = LanternCandidateGenerator(
        case.head(), model, [[0], [1], [2]], draws=Draws(torch.Generator().manual_seed(1), 2, torch.device("cpu"))
    )
    ids, candidates, q_scores = propose(case, generator)
    with torch.no_grad():
        mask = torch.nn.functional.pad(case.inputs["attention_mask"], (0, 1), value=1)
        p_scores = model(ids, attention_mask=mask, caption_embeds=case.inputs["caption_embeds"]).logits[:, -1, :24]
    relax = RelaxedAcceptanceLogitsProcessor(neighbors, 6, lam=3.0)
    tokens = candidates[:, ids.shape[1] :]
    for rank in range(3):
        rows = torch.cat([ids, tokens[:, rank : rank + 1]], 1)
        relaxed = relax(rows, p_scores).softmax(-1).gather(1, tokens[:, rank : rank + 1])
        strict = p_scores.softmax(-1).gather(1, tokens[:, rank : rank + 1])
        q = q_scores[:, 0].softmax(-1).gather(1, tokens[:, rank : rank + 1])
        assert (relaxed >= strict - 1e-6).all()
        assert (relaxed <= 3 * strict + 1e-6).all()
        accept = (relaxed / q).clamp_max(1)
        assert ((accept > 0) & (accept <= 1)).all()


class Watcher(CandidateTree):
    """Drafts as another generator does, and notes what it is told."""

    requires_model_outputs = False
    requires_target_scores = True

    def __init__(self, inner: CandidateTree):
        self.inner, self.tree = inner, inner.tree
        self.told: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.nodes: list[Tensor] = []

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        candidates, scores = self.inner.get_candidates(input_ids, **kwargs)
        self.nodes.append(candidates[:, input_ids.shape[1] - 1 :])
        return candidates, scores

    def update_candidate_strategy(self, input_ids: Tensor, scores: Any, num_matches: Tensor, path: Any = None) -> None:
        self.told.append((input_ids, scores, num_matches, path))


@pytest.mark.parametrize("rule", [{}, {"repetition_penalty": 1.5}])
@pytest.mark.parametrize("guidance", [None, 2.0])
def test_a_generator_may_ask_for_the_scores_of_every_node(guidance: float | None, rule: dict[str, float]) -> None:
    case = make_case("llama", 2, guidance)
    kwargs = {"do_sample": False, "max_new_tokens": 16, **rule}
    reference = case.plain(**kwargs, return_dict_in_generate=True, output_scores=True)
    watcher = Watcher(oracle(case, reference.sequences, TREES["eagle_25"]))
    output = case.lantern(watcher, **kwargs)
    assert torch.equal(output, reference.sequences)
    assert len(watcher.told) == len(watcher.nodes)
    place = [7, 7]  # tokens of each row before the round
    for nodes, (ids, scores, matches, path) in zip(watcher.nodes, watcher.told, strict=True):
        assert scores.shape == (2, 26, 40)
        assert torch.equal(matches, (path > 0).sum(1))
        assert torch.equal(ids[:, -1], nodes[:, 0])
        for row in range(2):
            for depth, node in enumerate(path[row, : int(matches[row]) + 1].tolist()):
                index = place[row] - 6 + depth
                if index < 16:
                    assert torch.allclose(scores[row, node], reference.scores[index][row], atol=1e-3)
            place[row] = min(place[row] + int(matches[row]) + 1, 22)
    assert place == [22, 22]


class WindowAndTree(CandidateTree):
    """A window of tokens from q of their own, with a tree of other drafts grafted beside it at the root.

    Everything is drawn from fixed distributions, which have little to do with the target.
    """

    requires_model_outputs = False

    def __init__(self, window: int, tree: DraftTree, vocab_size: int, seed: int):
        self.tree = tree.grafted_on_chain(window)
        self._random = torch.Generator().manual_seed(seed)
        self._scores = torch.randn(self.tree.num_nodes, vocab_size, generator=self._random)

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        rows = len(input_ids)
        probs = self._scores.softmax(-1).expand(rows, -1, -1)
        race = (probs / torch.empty_like(probs).exponential_(generator=self._random)).argsort(-1, descending=True)
        tokens = torch.zeros(rows, self.tree.num_nodes, dtype=torch.long)
        for node in range(1, self.tree.num_nodes):
            row = int(self.tree.rows[node])
            earlier = [
                n
                for n in range(1, node)
                if self.tree.rows[n] == row and self.tree.parents[n] == self.tree.parents[node]
            ]
            tokens[:, node] = race[:, row, len(earlier)]
        return torch.cat([input_ids, tokens[:, 1:]], 1), self._scores.expand(rows, -1, -1)


@pytest.mark.parametrize("window", [1, 2])
def test_a_composed_tree_keeps_the_target_distribution(window: int) -> None:
    model, rows = small_target(), 6700
    caption = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(2))
    generator = WindowAndTree(window, DraftTree.from_choices([(0,), (1,), (0, 0)]), 5, seed=4)
    assert not generator.tree.has_default_rows
    output = model.generate(
        input_ids=model.caption_ids(rows),
        caption_embeds=caption.expand(rows, -1, -1),
        do_sample=True,
        max_new_tokens=3,
        custom_generate=lantern_generate,
        assistant=generator,
        lantern_config={"neighborhood_size": 0},
        generator=torch.Generator().manual_seed(1),
        return_dict_in_generate=True,
    )
    assert output.stats.tokens_per_pass > 1.3
    assert p_value(output.sequences[:, 3:], joint(model, caption, None, 5, 1.0)) > 0.01
