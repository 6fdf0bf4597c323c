"""Structure of images: forced tokens and allowed columns, in drafting and in verification, with a family of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import NUM_CODES, prompt, tiny_head, tiny_llama
from test_sync import waits_per_round
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, SuppressTokensLogitsProcessor

from lantern_hf import TREES, LanternConfig, NeighborTable, TargetAdapter, lantern_generate, register_target
from lantern_hf.structure import allow, force, node_offsets
from lantern_hf.targets import adapter_class, adapter_for, unregister_target

END_OF_ROW, END = 38, 39


class RowsAdapter(TargetAdapter):
    """A text model as an image model: 24 codes, rows of `width` closed by a token, two rows and an end."""

    family = "rows"
    has_codebook = True
    structured = True

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None, *, width: int = 3):
        super().__init__(model, input_ids)
        self.columns = torch.tensor([*range(NUM_CODES), END_OF_ROW, END])
        self.num_codes, self.width = NUM_CODES, width

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        return model.config.model_type == "llama"

    def forced(self, offset: Tensor) -> Tensor:
        place = offset % (self.width + 1)
        row_end = torch.where(place == self.width, END_OF_ROW, -1)
        return torch.where(offset >= 2 * (self.width + 1), END, row_end)

    def allowed(self, offset: Tensor) -> Tensor:
        return torch.arange(self.num_columns, device=offset.device) < self.num_codes

    def logits(self, hidden_states: Tensor) -> Tensor:
        return self.model.lm_head(hidden_states)[..., self.columns]


@pytest.fixture
def rows_family() -> Iterator[None]:
    register_target(RowsAdapter)
    yield
    unregister_target(RowsAdapter)


def check_rows(tokens: list[int], width: int) -> None:
    for offset, token in enumerate(tokens):
        if offset >= 2 * (width + 1):
            assert token == END
        elif offset % (width + 1) == width:
            assert token == END_OF_ROW
        else:
            assert token < NUM_CODES


def test_offsets_follow_the_tree() -> None:
    tree = TREES["eagle_25"]
    adapter = RowsAdapter(tiny_llama())
    offsets = node_offsets(adapter, torch.tensor([2, 7]), torch.zeros(2, tree.num_nodes).long(), tree)
    assert torch.equal(offsets, torch.tensor([[2], [7]]) + tree.depths)

    class Restarting(RowsAdapter):
        """Token 5 begins an image."""

        def advance(self, offset: Tensor, token_ids: Tensor) -> Tensor:
            return torch.where(token_ids == 5, 0, offset + 1)

    tokens = torch.randint(4, 7, (2, tree.num_nodes), generator=torch.Generator().manual_seed(0))
    offsets = node_offsets(Restarting(tiny_llama()), torch.tensor([2, 7]), tokens, tree)
    for path in tree.paths:
        for row, start in enumerate((2, 7)):
            for node in path[path >= 0].tolist()[1:]:
                start = 0 if tokens[row, node] == 5 else start + 1
                assert offsets[row, node] == start


def test_scores_keep_to_the_rules() -> None:
    adapter = RowsAdapter(tiny_llama())
    scores = torch.randn(2, 3, 26, generator=torch.Generator().manual_seed(0))
    offset = torch.tensor([[0, 3, 8], [7, 2, 1]])
    bounded = force(adapter, offset, allow(adapter, offset, scores)).softmax(-1)
    assert bounded[0, 1].tolist() == [*[0.0] * 24, 1.0, 0.0]
    assert bounded[0, 2].tolist() == [*[0.0] * 24, 0.0, 1.0]
    assert torch.equal(bounded[1, 0], bounded[0, 1])
    assert torch.allclose(bounded[0, 0, :24], scores[0, 0, :24].softmax(-1))
    assert bounded[0, 0, 24:].tolist() == [0.0, 0.0]
    assert force(None, offset, allow(None, offset, scores)) is scores


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("knobs", [{"lam": 1.0}, {"lam": 4.0}, {"delta": 0.5}])
def test_images_are_well_formed(
    knobs: dict[str, float], do_sample: bool, neighbors: NeighborTable, rows_family: None
) -> None:
    model = tiny_llama()
    result = model.generate(
        **prompt(model, 3),
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig("eagle_25", 5, **knobs),
        neighbors=neighbors,
        target_options={"width": 4},
        generator=[torch.Generator().manual_seed(seed) for seed in range(3)],
        do_sample=do_sample,
        max_new_tokens=15,
    )
    for row in result[:, 6:].tolist():
        check_rows(row, 4)


def test_forced_tokens_cost_no_rejection(rows_family: None) -> None:
    model = tiny_llama()
    result = model.generate(
        **prompt(model, 2),
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict("eagle_25"),
        target_options={"width": 0},  # every token is forced
        do_sample=True,
        return_dict_in_generate=True,
        max_new_tokens=19,
    )
    assert result.sequences[:, 6:].tolist() == [[END_OF_ROW] * 2 + [END] * 17] * 2
    assert result.stats.passes == 3  # six tokens a pass, the deepest path and the bonus, after the prompt's own


def test_no_processor_breaks_a_row(rows_family: None) -> None:
    model = tiny_llama()
    seen = []

    class Watch(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            seen.append(scores[:, END_OF_ROW].max().item())
            return scores

    processors = [Watch(), SuppressTokensLogitsProcessor([END_OF_ROW, END])]
    result = model.generate(
        **prompt(model, 2),
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict("chain_5"),
        logits_processor=LogitsProcessorList(processors),
        do_sample=True,
        max_new_tokens=11,
    )
    for row in result[:, 6:].tolist():
        check_rows(row, 3)
    assert max(seen) == -torch.inf


def test_a_round_waits_no_more(monkeypatch: pytest.MonkeyPatch, rows_family: None, neighbors: NeighborTable) -> None:
    from helpers import make_case

    for rows in (1, 3):
        case = make_case("llama", rows, 2.0)
        config = LanternConfig("wide_57", 5, lam=3.0)
        kwargs = {"lantern_config": config, "neighbors": neighbors, "target_options": {"width": 2}}
        rounds = waits_per_round(monkeypatch, case, case.head(), do_sample=True, **kwargs)
        assert max(len(names) for names in rounds) <= 2, rounds


def test_a_registered_family_is_asked_first_and_can_be_named(rows_family: None) -> None:
    model = tiny_llama()
    assert adapter_class(model) is RowsAdapter
    assert adapter_for(model, width=5).width == 5
    assert adapter_for(model, family="causal_lm").family == "causal_lm"
    with pytest.raises(ValueError, match=r"has 'height', which the family 'rows' does not know.*'family', 'width'"):
        adapter_for(model, height=5)
    with pytest.raises(ValueError, match="`family` must be one of rows, llamagen"):
        adapter_for(model, family="emu")
    assert register_target(RowsAdapter) is RowsAdapter
    unregister_target(RowsAdapter)
    assert adapter_class(model).family == "causal_lm"
    unregister_target(RowsAdapter)


def test_what_cannot_be_registered(rows_family: None) -> None:
    with pytest.raises(TypeError, match="subclass of lantern_hf.TargetAdapter"):
        register_target(RowsAdapter(tiny_llama()))  # type: ignore[arg-type]

    class Nameless(TargetAdapter):
        """Forgot its name."""

    with pytest.raises(ValueError, match="Nameless.family must be a name"):
        register_target(Nameless)

    class Twin(RowsAdapter):
        """Another class of the same name."""

    with pytest.raises(ValueError, match=r"family 'rows' is registered already, by test_structure.RowsAdapter"):
        register_target(Twin)
