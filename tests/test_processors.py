"""Scores of nodes: guidance, every node's own prefix, the relaxed processor against the rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import NUM_CODES
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from lantern_hf import ImageTokensLogitsProcessor, NeighborTable, RelaxedAcceptanceLogitsProcessor
from lantern_hf.acceptance import neighborhood_mass
from lantern_hf.processors import NodeProcessors, guide, take_guidance
from lantern_hf.sequences import Sequences


def test_guidance_is_what_transformers_computes() -> None:
    conditional, unconditional = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))

    class Model:
        """Returns the unconditional logits."""

        def __call__(self, input_ids: Tensor, **kwargs: Any) -> Any:
            class Output(dict):
                logits = unconditional[:, None]

            return Output()

    theirs = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, Model())(torch.zeros(3, 1).long(), conditional)
    assert torch.equal(guide(torch.cat([conditional, unconditional]), 2.5), theirs)
    assert guide(conditional.half(), None).dtype == torch.float32


def test_the_guidance_processor_is_taken_out() -> None:
    ids, mask = torch.tensor([[1, 2]]), torch.tensor([[1, 1]])
    unbatched = UnbatchedClassifierFreeGuidanceLogitsProcessor(3.0, None, ids, mask)
    other = TemperatureLogitsWarper(0.5)
    guidance, rest = take_guidance(LogitsProcessorList([unbatched, other]))
    assert guidance is not None
    assert (guidance.scale, guidance.input_ids, guidance.attention_mask) == (3.0, ids, mask)
    assert list(rest) == [other]
    off = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.0, None, ids)
    assert take_guidance(LogitsProcessorList([off])) == (None, LogitsProcessorList())


class Recorder(LogitsProcessor):
    """Notes every prefix it is asked about, and favours the sum of the prefix."""

    def __init__(self) -> None:
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.prefixes.append(input_ids.tolist())
        scores += 100  # in place, as some processors do
        return scores.scatter_add(1, input_ids.sum(1, keepdim=True) % scores.shape[1], torch.ones(len(scores), 1))


def ragged() -> Sequences:
    """Two rows of 3 and 4 tokens."""
    sequences = Sequences(torch.tensor([[1, 2], [3, 4]]), 4)
    sequences.append(torch.tensor([[5, 0], [6, 7]]), [1, 2])
    return sequences


def test_every_node_is_scored_with_its_own_prefix() -> None:
    recorder, sequences = Recorder(), ragged()
    processors = NodeProcessors(LogitsProcessorList([recorder]), 10, None)
    assert processors.needs_prefix
    logits = torch.randn(2, 2, 10, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    suffixes = [torch.zeros(2, 0).long(), torch.tensor([[8], [9]])]
    scores = processors.nodes(sequences, suffixes, logits)
    assert torch.equal(logits, before)
    for row in range(2):
        for node, suffix in enumerate(suffixes):
            prefix = [*sequences.row(row).tolist(), *suffix[row].tolist()]
            assert any(prefix in batch and batch[row] == prefix for batch in recorder.prefixes)
            expected = before[row, node] + 100
            expected[sum(prefix) % 10] += 1
            assert torch.equal(scores[row, node], expected)


def test_prefix_free_processors_run_once_on_all_nodes() -> None:
    calls: list[tuple[int, ...]] = []

    class Counting(TopKLogitsWarper):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            calls.append(tuple(scores.shape))
            return super().__call__(input_ids, scores)

    logits = torch.randn(2, 5, 10)
    known = NodeProcessors(LogitsProcessorList([TopKLogitsWarper(3)]), 10, None)
    assert not known.needs_prefix
    scores = known.nodes(ragged(), (), logits)
    assert (scores.isfinite().sum(-1) == 3).all()
    unknown = NodeProcessors(LogitsProcessorList([Counting(3)]), 10, None)  # a subclass may look at the prefix
    assert unknown.needs_prefix
    assert torch.equal(unknown.nodes(ragged(), [torch.zeros(2, 0).long()] * 5, logits), scores)
    assert calls == [(2, 10)] * 10  # two lengths, five nodes


def test_nothing_to_do_is_nothing_done() -> None:
    logits = torch.randn(2, 5, 10)
    processors = NodeProcessors(LogitsProcessorList(), 10, None)
    assert processors.nodes(ragged(), (), logits).data_ptr() == logits.data_ptr()
    assert processors(ragged(), None, logits[:, 0]).data_ptr() == logits.data_ptr()


def test_prefix_functions_are_asked_about_running_rows_of_the_length_only() -> None:
    asked: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        return [row, 4]

    sequences = ragged()
    processors = NodeProcessors(LogitsProcessorList([PrefixConstrainedLogitsProcessor(allowed, 1)]), 10, None)
    scores = processors(sequences, torch.zeros(2, 0).long(), torch.zeros(2, 10))
    assert asked == [(0, [1, 2, 5]), (1, [3, 4, 6, 7])]
    assert scores.isfinite().nonzero().tolist() == [[0, 0], [0, 4], [1, 1], [1, 4]]
    asked.clear()
    sequences.ended[0] = True
    scores = processors(sequences, torch.zeros(2, 0).long(), torch.zeros(2, 10))
    assert asked == [(1, [3, 4, 6, 7])]
    assert not scores.isnan().any()


def test_scores_on_columns_meet_processors_on_the_vocabulary() -> None:
    columns = torch.tensor([7, 3, 5])
    processors = NodeProcessors(LogitsProcessorList([RepetitionPenaltyLogitsProcessor(2.0)]), 10, columns)
    sequences = Sequences(torch.tensor([[3, 9]]), 0)
    scores = processors(sequences, torch.zeros(1, 0).long(), torch.tensor([[1.0, 4.0, -2.0]]))
    assert scores.tolist() == [[1.0, 2.0, -2.0]]  # column 1 is token 3
    full = processors.expand(torch.tensor([[1.0, 4.0, -2.0]]))
    assert full.shape == (1, 10)
    assert full[0, columns].tolist() == [1.0, 4.0, -2.0]
    assert (full == torch.finfo(torch.float32).min).sum() == 7
    short = NodeProcessors(LogitsProcessorList(), 5, None).expand(torch.zeros(1, 3))  # LlamaGen: codes come first
    assert short.shape == (1, 5)


def test_length_dependent_processors_count_drafted_tokens() -> None:
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [4], device="cpu")  # prompt of 2, end token 4
    processors = NodeProcessors(LogitsProcessorList([processor]), 6, None)
    sequences = Sequences(torch.tensor([[1, 2]]), 0)
    for drafted in range(5):
        scores = processors(sequences, torch.zeros(1, drafted).long(), torch.zeros(1, 6))
        assert bool(scores[0, 4].isneginf()) == (drafted < 3)


def test_image_tokens_only() -> None:
    scores = torch.arange(6.0)[None]
    allowed = ImageTokensLogitsProcessor(torch.tensor([4, 1]))(torch.zeros(1, 1).long(), scores)
    assert allowed.tolist() == [[-torch.inf, 1.0, -torch.inf, -torch.inf, 4.0, -torch.inf]]


@pytest.mark.parametrize("ids", [None, "shuffled"])
@pytest.mark.parametrize("knobs", [{"lam": 4.0}, {"delta": 0.2}, {"lam": 1.0}, {"delta": 0.0}])
def test_the_relaxed_processor_moves_the_mass_of_the_rule(
    knobs: dict[str, float], ids: str | None, neighbors: NeighborTable
) -> None:
    generator = torch.Generator().manual_seed(0)
    vocabulary = NUM_CODES if ids is None else 40
    image_ids = None if ids is None else torch.randperm(vocabulary, generator=generator)[:NUM_CODES]
    scores = torch.randn(30, vocabulary, generator=generator) * 2
    codes = torch.randint(NUM_CODES, (30,), generator=generator)
    tokens = codes if image_ids is None else image_ids[codes]
    processor = RelaxedAcceptanceLogitsProcessor(neighbors, 6, image_token_ids=image_ids, **knobs)
    moved = processor(torch.stack([torch.zeros_like(tokens), tokens], 1), scores).softmax(-1)
    probs = scores.softmax(-1)
    own = probs if image_ids is None else probs[:, image_ids]
    mass = neighborhood_mass(own, codes, neighbors, 6, **knobs)
    rows = torch.arange(30)
    assert torch.allclose(moved[rows, tokens], probs[rows, tokens] + mass, atol=1e-6)
    assert torch.allclose(moved.sum(-1), torch.ones(30), atol=1e-5)
    assert (mass > 0).any() == any(value > 1 or 0 < value < 1 for value in knobs.values())


def test_the_relaxed_processor_leaves_text_tokens_alone(neighbors: NeighborTable) -> None:
    image_ids = torch.arange(8, 8 + NUM_CODES)
    scores = torch.randn(2, 40, generator=torch.Generator().manual_seed(0))
    processor = RelaxedAcceptanceLogitsProcessor(neighbors, 6, lam=9.0, image_token_ids=image_ids)
    moved = processor(torch.tensor([[2], [35]]), scores).softmax(-1)
    assert torch.allclose(moved, scores.softmax(-1), atol=1e-6)


def test_the_relaxed_processor_checks_its_table(neighbors: NeighborTable) -> None:
    with pytest.raises(ValueError, match="holds 8 per entry"):
        RelaxedAcceptanceLogitsProcessor(neighbors, 9, lam=2.0)
    with pytest.raises(ValueError, match="two rules"):
        RelaxedAcceptanceLogitsProcessor(neighbors, 3, lam=2.0, delta=0.1)
