"""Strict greedy decoding gives the tokens of `model.generate`, whatever drafts, and long paths are really accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_llama
from helpers import CASES, Case, make_case, oracle
from torch import Tensor
from transformers import DynamicCache, LogitsProcessorList, StaticCache, TopKLogitsWarper, TopPLogitsWarper

from lantern_hf import TREES, DraftTree, LanternConfig, lantern_generate
from lantern_hf.cache import CACHE_KEYWORD

NEW = 14


def assert_same(case: Case, drafts: dict[str, Any], **kwargs: Any) -> Tensor:
    """Every way to draft decodes what transformers decodes; gives those tokens."""
    expected = case.plain(do_sample=False, max_new_tokens=NEW, **kwargs)
    for name, (assistant, tree) in drafts.items():
        if assistant == "oracle":
            assistant = oracle(case, expected, TREES[tree])
        output = case.lantern(
            assistant, tree, do_sample=False, max_new_tokens=NEW, return_dict_in_generate=True, **kwargs
        )
        assert torch.equal(output.sequences, expected), name
        if name.startswith("oracle"):
            assert output.stats.tokens_per_pass > 2, name
        if assistant is None:
            assert output.stats.tokens_per_pass == 1
    return expected


@pytest.mark.parametrize("guidance", [None, 2.5])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_equals_generate(name: str, attention: str, rows: int, guidance: float | None) -> None:
    case = make_case(name, rows, guidance, attention)
    drafts = {
        "head": (case.head(), "eagle_25"),
        "plain": (None, "eagle_25"),
        "oracle wide": ("oracle", "wide_57"),
        "oracle chain": ("oracle", "chain_5"),
    }
    assert_same(case, drafts)


@pytest.mark.parametrize("tree", sorted(TREES))
def test_equals_generate_with_every_tree(tree: str) -> None:
    case = make_case("llama", rows=2)
    assert_same(case, {"head": (case.head(), tree), "oracle": ("oracle", tree)})


def test_a_perfect_chain_is_kept_whole() -> None:
    case = make_case("llama")
    expected = case.plain(do_sample=False, max_new_tokens=25)
    output = case.lantern(
        oracle(case, expected, TREES["chain_5"], misses=0),
        do_sample=False,
        max_new_tokens=25,
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    assert output.stats.passes == 4  # one token from the prompt, then four times five drafted and a bonus
    assert output.stats.accepted_lengths == [0, 0, 0, 0, 0, 4]


def warpers(case: Case) -> dict[str, Any]:
    """Top-k and top-p by hand: with do_sample=False transformers leaves them out."""
    return {"logits_processor": LogitsProcessorList([TopKLogitsWarper(5), TopPLogitsWarper(0.9)])}


def repetition_penalty(case: Case) -> dict[str, Any]:
    return {"repetition_penalty": 1.7}


def no_repeated_pairs(case: Case) -> dict[str, Any]:
    return {"no_repeat_ngram_size": 2}


def prefix_rule(case: Case) -> dict[str, Any]:
    """A rule over the whole prefix and the row, which allows nothing after a prefix that breaks it."""
    start = case.inputs["input_ids"].shape[1]
    emitted = case.emitted

    def allowed_after(row: int, prefix: list[int]) -> set[int]:
        return {token for token in emitted if (token + sum(prefix) + row) % 3 == 0}

    def allowed(row: int, ids: Tensor) -> list[int]:
        sequence = ids.tolist()
        for index in range(start, len(sequence)):
            if sequence[index] not in allowed_after(row, sequence[start:index]):
                return []  # transformers makes an error of this
        return sorted(allowed_after(row, sequence[start:]))

    return {"prefix_allowed_tokens_fn": allowed}


def short_list(case: Case) -> dict[str, Any]:
    """One or two tokens allowed at a time, fewer than the tree has siblings."""
    emitted = case.emitted

    def allowed(row: int, ids: Tensor) -> list[int]:
        first = (int(ids[-1]) + row) % len(emitted)
        return [emitted[first], emitted[(2 * first + 1) % len(emitted)]]

    return {"prefix_allowed_tokens_fn": allowed}


PAIRS = [("llamagen", 2.0), ("llama", None), ("llama", 2.0), ("chameleon-text", 2.0), ("chameleon-image", 2.0)]


@pytest.mark.parametrize("rule", [warpers, repetition_penalty, no_repeated_pairs, prefix_rule, short_list])
@pytest.mark.parametrize(("name", "guidance"), PAIRS)
def test_equals_generate_under_processors(name: str, guidance: float | None, rule: Any) -> None:
    case = make_case(name, rows=3, guidance=guidance)
    plain = case.plain(do_sample=False, max_new_tokens=NEW)
    expected = assert_same(case, {"head": (case.head(), "eagle_25")}, **rule(case))
    if rule is not warpers:  # which leave the best token alone
        assert not torch.equal(plain, expected)
    if rule is not prefix_rule:  # the oracle's wrong siblings break it
        assert_same(case, {"oracle": ("oracle", "wide_57"), "plain": (None, "chain_5")}, **rule(case))


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize("name", CASES)
def test_static_cache_of_generate(name: str, guidance: float | None) -> None:
    case = make_case(name, rows=3, guidance=guidance)
    drafts = {"head": (case.head(), "eagle_25"), "oracle": ("oracle", "wide_57")}
    dynamic = case.plain(do_sample=False, max_new_tokens=NEW)
    for assistant, tree in drafts.values():
        assistant = oracle(case, dynamic, TREES[tree]) if assistant == "oracle" else assistant
        output = case.lantern(
            assistant,
            tree,
            do_sample=False,
            max_new_tokens=NEW,
            cache_implementation="static",
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, dynamic)
        assert isinstance(output[CACHE_KEYWORD], StaticCache)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_cache_of_the_user(name: str, attention: str) -> None:
    case = make_case(name, rows=3, attention=attention)
    text = case.model.config.get_text_config()
    expected = case.plain(do_sample=False, max_new_tokens=NEW)
    for make in (lambda: DynamicCache(config=text), lambda: StaticCache(config=text, max_cache_len=128)):
        cache = make()
        draft = oracle(case, expected, TREES["wide_57"])
        given = {CACHE_KEYWORD: cache, "return_dict_in_generate": True}
        output = case.lantern(draft, do_sample=False, max_new_tokens=NEW, **given)
        assert torch.equal(output.sequences, expected)
        assert output[CACHE_KEYWORD] is cache
        assert output.stats.tokens_per_pass > 2


@pytest.mark.parametrize("name", CASES)
def test_without_a_cache_argument(name: str) -> None:
    case = make_case(name, rows=2)
    assert_same(case, {"head": (case.head(), "eagle_25")}, use_cache=False)


@pytest.mark.parametrize("length", [1, 6, 14])
@pytest.mark.parametrize("name", ["llama", "chameleon-text"])
def test_unconditional_prompt_of_any_length(name: str, length: int) -> None:
    case = make_case(name, rows=2, guidance=2.0)
    ids = torch.randint(32, 40, (2, length), generator=torch.Generator().manual_seed(5))
    case.inputs["negative_prompt_ids"] = ids
    for mask in (None, torch.ones_like(ids).index_fill(1, torch.arange(length // 3), 0)):
        case.inputs["negative_prompt_attention_mask"] = mask
        assert_same(case, {"head": (case.head(), "chain_5"), "oracle": ("oracle", "wide_57")})


def test_guidance_without_an_unconditional_prompt() -> None:
    case = make_case("llama", rows=2, guidance=2.0)
    del case.inputs["negative_prompt_ids"]  # transformers takes the last token
    assert_same(case, {"head": (case.head(), "eagle_25")})


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompt_as_embeddings(cache: str) -> None:
    model = tiny_llama()
    ids = torch.randint(2, 40, (2, 7), generator=torch.Generator().manual_seed(3))
    case = make_case("llama", rows=2)
    kwargs: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": "static"}
    embeds = model.get_input_embeddings()(ids).detach()
    expected = model.generate(inputs_embeds=embeds, do_sample=False, max_new_tokens=NEW)
    tokens = model.generate(
        inputs_embeds=embeds,
        do_sample=False,
        max_new_tokens=NEW,
        custom_generate=lantern_generate,
        assistant=case.head().bind(model),
        lantern_config=LanternConfig.strict("wide_57"),
        **kwargs,
    )
    assert torch.equal(tokens, expected)


def test_greedy_leaves_the_random_state_alone() -> None:
    case = make_case("llama")
    head = case.head()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    case.lantern(head, do_sample=False, max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_trees_as_choices() -> None:
    case = make_case("llama", rows=2)
    expected = case.plain(do_sample=False, max_new_tokens=NEW)
    for tree in ([[0]], [[0], [1], [2]], DraftTree.from_choices([(0,), (0, 0), (0, 1)])):
        assert torch.equal(case.lantern(case.head(), tree, do_sample=False, max_new_tokens=NEW), expected)
