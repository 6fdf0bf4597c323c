"""Strict sampling follows the target's distribution, seeds and batches behave, relaxed sampling stays within its
rules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from conftest import NUM_CODES, tiny_head
from helpers import Case, make_case
from scipy.stats import chi2
from torch import Tensor
from transformers import LogitsProcessorList, TopKLogitsWarper

from lantern_hf import (
    LanternConfig,
    LlamaGenConfig,
    LlamaGenForConditionalGeneration,
    NeighborTable,
    lantern_generate,
)

V, DEPTH, ROWS = 5, 3, 6700  # 20,100 tokens


def small_target() -> LlamaGenForConditionalGeneration:
    """A target with five codes, so that every sequence of three can be enumerated."""
    torch.manual_seed(11)
    config = LlamaGenConfig(
        codebook_size=V,
        grid_size=[4, 4],
        prefix_length=3,
        prefix_rotation="identity",
        caption_dim=6,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.4,
    )
    return LlamaGenForConditionalGeneration(config).eval()


def joint(
    model: LlamaGenForConditionalGeneration, caption: Tensor, scale: float | None, top_k: int, temperature: float
) -> Tensor:
    """Exact probability of every sequence of `DEPTH` codes, `(V,) * DEPTH`, by plain forwards."""
    codes = torch.tensor(list(itertools.product(range(V), repeat=DEPTH)))
    rows = len(codes)

    def log_probs(prefix: Tensor, features: Tensor | None) -> Tensor:
        with torch.no_grad():
            logits = model(torch.cat([prefix, codes], 1), caption_embeds=features).logits
        return logits[:, prefix.shape[1] - 1 : -1, :V].double().log_softmax(-1)

    scores = log_probs(model.caption_ids(rows), caption.expand(rows, -1, -1))
    if scale is not None:
        unconditional = log_probs(model.unconditional_ids(rows), None)
        scores = unconditional + scale * (scores - unconditional)
    scores = scores / temperature
    scores = scores.masked_fill(scores < scores.topk(top_k, -1).values[..., -1:], -torch.inf)
    steps = scores.softmax(-1).gather(-1, codes[..., None]).squeeze(-1)
    return steps.prod(-1).view((V,) * DEPTH)


def p_value(sequences: Tensor, expected: Tensor) -> float:
    """Chi-square test of sequences `(rows, DEPTH)` against exact probabilities; rare ones share a bin."""
    index = sequences @ torch.tensor([V**2, V, 1])
    counts = torch.bincount(index, minlength=V**DEPTH).double()
    means = expected.flatten() * len(sequences)
    assert counts[means == 0].sum() == 0, "a sequence of probability 0 was drawn"
    common = means >= 5
    observed, theory = counts[common], means[common]
    if bool((~common).any()) and means[~common].sum() > 0:
        observed = torch.cat([observed, counts[~common].sum()[None]])
        theory = torch.cat([theory, means[~common].sum()[None]])
    statistic = ((observed - theory) ** 2 / theory).sum()
    return float(chi2.sf(float(statistic), len(theory) - 1))


SETTINGS = [
    pytest.param({"tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0]]}, id="plain"),
    pytest.param({"tree": "chain_5"}, id="chain"),
    pytest.param({"tree": [[0], [1], [2], [3], [4], [0, 0], [0, 1]], "scale": 2.0}, id="guided"),
    pytest.param({"tree": [[0], [1], [2], [3], [0, 0]], "top_k": 3}, id="top-k below the siblings"),
    pytest.param({"tree": [[0], [1], [0, 0]], "top_k": 4, "scale": 1.5, "temperature": 0.8}, id="all"),
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_strict_sampling_follows_the_target(settings: dict[str, Any]) -> None:
    model = small_target()
    scale, top_k, temperature = settings.get("scale"), settings.get("top_k", V), settings.get("temperature", 1.0)
    caption = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(2))
    guidance = {} if scale is None else {"guidance_scale": scale, "negative_prompt_ids": model.unconditional_ids(ROWS)}
    output = model.generate(
        input_ids=model.caption_ids(ROWS),
        caption_embeds=caption.expand(ROWS, -1, -1),
        do_sample=True,
        top_k=top_k,
        temperature=temperature,
        max_new_tokens=DEPTH,
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict(settings["tree"]),
        generator=torch.Generator().manual_seed(0),
        return_dict_in_generate=True,
        **guidance,
    )
    assert sum(output.stats.accepted_lengths[1:]) > ROWS / 5  # drafted tokens are among those tested
    assert sum(output.stats.relaxed_tv) == 0
    expected = joint(model, caption, scale, top_k, temperature)
    assert abs(float(expected.sum()) - 1) < 1e-6  # the forward is float32
    assert p_value(output.sequences[:, 3:], expected) > 0.01


def test_the_chi_square_would_notice() -> None:
    """Relaxed sampling is another distribution, and the test above sees it."""
    model = small_target()
    caption = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(2))
    output = model.generate(
        input_ids=model.caption_ids(ROWS),
        caption_embeds=caption.expand(ROWS, -1, -1),
        do_sample=True,
        max_new_tokens=DEPTH,
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig(tree=[[0], [0, 0]], neighborhood_size=3, delta=0.3),
        neighbors=NeighborTable.from_codebook(torch.randn(V, 4, generator=torch.Generator().manual_seed(3)), 3),
        generator=torch.Generator().manual_seed(0),
        return_dict_in_generate=True,
    )
    assert sum(output.stats.relaxed_tv) > 0
    assert p_value(output.sequences[:, 3:], joint(model, caption, None, V, 1.0)) < 1e-6


def rows_of(case: Case, row: int) -> dict[str, Any]:
    """The prompt of one row, still padded as in the batch."""
    return {name: value[row : row + 1] if isinstance(value, Tensor) else value for name, value in case.inputs.items()}


def generators(rows: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + row) for row in range(rows)]


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize(
    ("name", "relaxed"),  # a text model is never relaxed
    [("llamagen", False), ("llamagen", True), ("llama", False), ("chameleon-image", False), ("chameleon-image", True)],
)
def test_a_row_does_not_depend_on_its_batch(
    name: str, guidance: float | None, relaxed: bool, neighbors: NeighborTable
) -> None:
    case = make_case(name, 3, guidance)
    head = case.head()
    config = LanternConfig(neighborhood_size=5, lam=4.0) if relaxed else LanternConfig.strict()
    kwargs: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12, "lantern_config": config, "temperature": 1.3}
    kwargs |= {"neighbors": neighbors} if relaxed else {}
    together = case.lantern(head, generator=generators(3), **kwargs)
    for row in range(3):
        alone = Case(name, case.model, case.model, rows_of(case, row))
        tokens = alone.lantern(head, generator=generators(3)[row], **kwargs)
        assert torch.equal(tokens[0], together[row])
    assert len({tuple(row.tolist()) for row in together[:, 6:]}) == 3


def test_a_prompt_without_its_padding_gives_the_same_row() -> None:
    case = make_case("llama", 3)
    head, kwargs = case.head(), {"do_sample": True, "max_new_tokens": 20}
    together = case.lantern(head, generator=generators(3), **kwargs)
    for row in range(3):
        inputs = {name: value[row : row + 1, row:] for name, value in case.inputs.items()}
        alone = Case("llama", case.model, case.model, inputs)
        tokens = alone.lantern(head, generator=[generators(3)[row]], **kwargs)
        assert torch.equal(tokens[0], together[row, row:])


@pytest.mark.parametrize("plain", [False, True])
def test_seeds(plain: bool) -> None:
    case = make_case("llamagen", 2, 2.0)
    head = None if plain else case.head()

    def run(seed: int) -> Tensor:
        return case.lantern(head, do_sample=True, max_new_tokens=16, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_the_global_random_state_is_the_default() -> None:
    case = make_case("llamagen")
    head, kwargs = case.head(), {"do_sample": True, "max_new_tokens": 16}
    torch.manual_seed(7)
    first = case.lantern(head, **kwargs)
    second = case.lantern(head, **kwargs)
    torch.manual_seed(7)
    assert torch.equal(case.lantern(head, **kwargs), first)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    case.lantern(head, generator=torch.Generator().manual_seed(0), **kwargs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llamagen", "chameleon-image"])
def test_relaxed_tokens_are_possible_under_the_target(name: str, neighbors: NeighborTable) -> None:
    """With `lam`, what a processor excludes is never emitted, however many neighbours it has."""
    case = make_case(name, 4)
    config = LanternConfig(tree="wide_57", neighborhood_size=8, lam=50.0)
    output = case.lantern(
        case.head(),
        do_sample=True,
        top_k=4,
        temperature=2.0,
        max_new_tokens=30,
        lantern_config=config,
        neighbors=neighbors,
        generator=torch.Generator().manual_seed(0),
        return_dict_in_generate=True,
    )
    assert all(tv > 0 for tv in output.stats.relaxed_tv)
    new = output.sequences[:, 6:]
    kept = plain_scores(case, output.sequences)
    probs = LogitsProcessorList([TopKLogitsWarper(4)])(None, kept.flatten(0, 1)).softmax(-1).view_as(kept)
    emitted = probs.gather(-1, columns(case, new)[..., None])
    assert new.shape[1] == 30
    assert (emitted > 0).all()


def columns(case: Case, tokens: Tensor) -> Tensor:
    """Code of each token."""
    if case.image_ids is None:
        return tokens
    return (tokens[..., None] == case.image_ids).long().argmax(-1)


def plain_scores(case: Case, sequences: Tensor) -> Tensor:
    """The target's scores of the codes at every new position, by one plain forward, `(B, T, K)`."""
    mask = torch.nn.functional.pad(case.inputs["attention_mask"], (0, sequences.shape[1] - 6), value=1)
    kwargs: dict[str, Any] = {"caption_embeds": case.inputs["caption_embeds"]} if case.name == "llamagen" else {}
    if case.name != "llamagen":
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        logits = case.plain_model(sequences, attention_mask=mask, **kwargs).logits[:, 5:-1]
    return logits[..., :NUM_CODES] if case.image_ids is None else logits[..., case.image_ids]


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize(
    "knobs", [{"lam": 1.0}, {"delta": 0.0}, {"neighborhood_size": 0}, {"neighborhood_size": 0, "delta": 0.5}]
)
def test_settings_that_relax_nothing_are_strict(
    knobs: dict[str, Any], do_sample: bool, neighbors: NeighborTable
) -> None:
    case = make_case("llamagen", 2, 1.5)
    head = case.head()
    runs = []
    for config in (LanternConfig.strict(), LanternConfig(**{"neighborhood_size": 6, **knobs})):
        output = case.lantern(
            head,
            do_sample=do_sample,
            max_new_tokens=24,
            lantern_config=config,
            neighbors=neighbors,
            generator=torch.Generator().manual_seed(3),
            return_dict_in_generate=True,
        )
        assert sum(output.stats.relaxed_tv) == 0
        runs.append(output.sequences)
    assert torch.equal(*runs)


def test_relaxed_greedy_accepts_more_and_says_what_it_costs(neighbors: NeighborTable) -> None:
    case = make_case("llamagen", 2)
    head = case.head()
    outputs = [
        case.lantern(
            head,
            do_sample=False,
            max_new_tokens=40,
            lantern_config=config,
            neighbors=neighbors,
            return_dict_in_generate=True,
        )
        for config in (LanternConfig.strict(), LanternConfig(neighborhood_size=8, lam=30.0))
    ]
    strict, relaxed = (output.stats for output in outputs)
    assert relaxed.tokens_per_pass > strict.tokens_per_pass
    assert sum(relaxed.relaxed_tv) > 0 == sum(strict.relaxed_tv)


def test_generators_are_checked() -> None:
    case = make_case("llama", 3)
    with pytest.raises(ValueError, match="2 generators for 3 rows"):
        case.lantern(case.head(), do_sample=True, max_new_tokens=2, generator=generators(2))
    with pytest.raises(TypeError, match=r"torch\.Generator"):
        case.lantern(case.head(), do_sample=True, max_new_tokens=2, generator=7)
