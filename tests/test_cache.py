"""A cache keeps exactly what its rows accepted, and a node is seen by its descendants only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_llama
from helpers import CASES, make_case, oracle
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, MistralConfig, StaticCache

from lantern_hf import TREES
from lantern_hf.cache import RaggedCache, check_cache, decoding_cache, merge_streams
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument


def recomputed(case: Any, tokens: Tensor, row: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of one row's tokens, by one plain pass."""
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    cache = DynamicCache()
    kwargs: dict[str, Any] = {}
    if case.name == "llamagen":
        kwargs["caption_embeds"] = case.inputs["caption_embeds"][row : row + 1]
    prompt_mask = case.inputs["attention_mask"][row : row + 1]
    mask = torch.nn.functional.pad(prompt_mask, (0, len(tokens) - prompt_mask.shape[1]), value=1)
    if case.name != "llamagen":
        kwargs["position_ids"] = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    with torch.no_grad():
        adapter.prefill(tokens[None], cache, attention_mask=mask, **kwargs)
    return [(layer.keys[0], layer.values[0]) for layer in cache.layers]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("draft", ["head", "oracle"])
@pytest.mark.parametrize("name", CASES)
def test_every_round_keeps_what_a_plain_pass_would_hold(name: str, draft: str, kind: str) -> None:
    case = make_case(name, 3)
    expected = case.plain(do_sample=False, max_new_tokens=12)
    assistant = case.head() if draft == "head" else oracle(case, expected, TREES["wide_57"], misses=0.3)
    rounds, ragged = 0, False

    def check(session: Any) -> None:
        nonlocal rounds, ragged
        rounds += 1
        held, lengths = session._cache, session.sequences.lengths
        ragged |= len(set(lengths)) > 1
        assert held.lengths.tolist() == [length - 1 for length in lengths]  # the last token is not read yet
        assert held.width == max(lengths) - 1
        for row, length in enumerate(lengths):
            pad = int((case.inputs["attention_mask"][row] == 0).sum())
            for layer, (keys, values) in zip(
                held.cache.layers, recomputed(case, session.sequences.row(row), row), strict=True
            ):
                for ours, theirs in ((layer.keys[row], keys), (layer.values[row], values)):
                    assert torch.allclose(ours[:, pad : length - 1], theirs[:, pad : length - 1], atol=1e-5)

    kwargs: dict[str, Any] = {"cache_implementation": "static"} if kind == "static" else {}
    output = case.lantern(assistant, do_sample=False, max_new_tokens=12, on_round=check, **kwargs)
    assert torch.equal(output, expected)
    assert rounds > 2
    assert ragged or draft == "head"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_changing_a_node_changes_its_descendants_only(name: str, attention: str) -> None:
    case = make_case(name, 2, attention=attention)
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    tree = TREES["wide_57"]
    generator = torch.Generator().manual_seed(0)
    nodes = torch.tensor(case.emitted)[torch.randint(len(case.emitted), (2, tree.num_nodes), generator=generator)]

    def logits(tokens: Tensor) -> Tensor:
        cache = DynamicCache()
        kwargs = {key: value for key, value in case.inputs.items() if key in ("attention_mask", "caption_embeds")}
        with torch.no_grad():
            prompt = adapter.prefill(case.inputs["input_ids"], cache, **kwargs)
            ragged = RaggedCache(cache, 2, torch.device("cpu"), 6, ~prompt.mask)
            mask = attention_argument(ragged.tree_mask(tree.mask), attention, torch.float32)
            positions = prompt.position_ids[:, -1:] + 1 + tree.depths
            hidden, _ = adapter.tree_pass(tokens, positions, mask, cache)
            return adapter.logits(hidden)

    before = logits(nodes)
    for node in (0, 1, 7, tree.num_nodes - 1):
        changed = nodes.clone()
        changed[:, node] = case.emitted[0] if nodes[0, node] != case.emitted[0] else case.emitted[1]
        difference = (logits(changed) - before)[0].abs().amax(-1)
        assert torch.equal(difference > 1e-6, tree.mask[:, node])


def states(rows: int, slots: int, seed: int) -> Tensor:
    return torch.randn(rows, 2, slots, 4, generator=torch.Generator().manual_seed(seed))


def filled(kind: str, rows: int, slots: int) -> Any:
    """A one-layer cache with some slots in use."""
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=16)
    cache.update(states(rows, slots, 0), states(rows, slots, 1), 0)
    return cache


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_ragged_rows_keep_their_own_paths(kind: str) -> None:
    cache = filled(kind, 3, 4)
    ragged = RaggedCache(cache, 3, torch.device("cpu"), width=4)
    assert ragged.is_uniform
    prefix, tree = states(3, 4, 0), states(3, 5, 2)
    cache.update(tree, tree, 0)
    ragged.keep(torch.tensor([[0, 2, 4], [0, 1, 0], [0, 0, 0]]), [3, 2, 0])
    keys = cache.layers[0].keys
    assert ragged.lengths.tolist() == [7, 6, 4]
    assert ragged.width == 7
    assert not ragged.is_uniform
    for row, path in enumerate([[0, 2, 4], [0, 1], []]):
        expected = torch.cat([prefix[row], tree[row][:, path]], 1)
        assert torch.equal(keys[row, :, : expected.shape[1]], expected)
    mask = ragged.tree_mask(torch.tensor([[True, False], [True, True]]))
    assert mask.shape == (3, 1, 2, 9 if kind == "dynamic" else 16)
    assert mask[1, 0, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert mask[2, 0, 1].nonzero().flatten().tolist() == [0, 1, 2, 3, 7, 8]
    more = states(3, 2, 3)
    cache.update(more, more, 0)
    ragged.drop_new()
    assert int(cache.get_seq_length()) == 7
    cache.update(more, more, 0)
    ragged.keep(torch.tensor([[1]]), [1, 1, 1])
    for row, length in enumerate([7, 6, 4]):
        assert torch.equal(cache.layers[0].keys[row, :, length], more[row, :, 1])
        assert torch.equal(cache.layers[0].keys[row, :, :4], prefix[row])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_path_may_move_onto_slots_it_is_read_from(kind: str) -> None:
    cache = filled(kind, 1, 2)
    ragged = RaggedCache(cache, 1, torch.device("cpu"), width=2)
    tree = states(1, 6, 2)
    cache.update(tree, tree, 0)
    ragged.keep(torch.tensor([[0, 2, 3, 5]]), [4])
    assert torch.equal(cache.layers[0].keys[0, :, 2:6], tree[0][:, [0, 2, 3, 5]])


def test_padding_is_masked_out() -> None:
    padding = torch.tensor([[True, True, False], [False, False, False]])
    ragged = RaggedCache(filled("dynamic", 2, 3), 2, torch.device("cpu"), width=3, padding=padding)
    mask = ragged.tree_mask(torch.ones(1, 1, dtype=torch.bool))
    assert mask[:, 0, 0].tolist() == [[False, False, True, True], [True, True, True, True]]
    whole = RaggedCache(filled("dynamic", 2, 3), 2, torch.device("cpu"), width=3, padding=padding & False)
    assert whole.tree_mask(torch.ones(1, 1, dtype=torch.bool)) is None


def test_streams_are_padded_on_the_left() -> None:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    streams = [DynamicCache(config=config), DynamicCache(config=config)]
    for stream, slots in zip(streams, (3, 5), strict=True):
        stream.update(states(2, slots, slots), states(2, slots, slots), 0)
    whole = StaticCache(config=config, max_cache_len=9)
    merge_streams(streams, [3, 5], whole)
    keys = whole.layers[0].keys
    assert keys.shape[0] == 4
    assert int(whole.get_seq_length()) == 5
    assert torch.equal(keys[:2, :, 2:5], states(2, 3, 3))
    assert torch.equal(keys[2:, :, :5], states(2, 5, 5))


def test_caches_that_keep_no_path_are_refused() -> None:
    sliding = MistralConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, sliding_window=4)
    with pytest.raises(ValueError, match="Layer 0 of the cache is a DynamicSlidingWindowLayer"):
        check_cache(DynamicCache(config=sliding))
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer"):
        decoding_cache(None, sliding, slots=10, guided=False)
    offloaded = DynamicCache(config=tiny_llama().config)
    offloaded.offloading = True
    with pytest.raises(ValueError, match="offloaded cache"):
        check_cache(offloaded)


def test_the_choice_of_a_cache() -> None:
    config = tiny_llama().config
    made = DynamicCache(config=config)
    chosen, direct = decoding_cache(made, config, slots=10, guided=False)
    assert (type(chosen), direct) == (DynamicCache, True)
    _, direct = decoding_cache(None, config, slots=10, guided=True)
    assert not direct
    made._is_user_defined = True
    assert decoding_cache(made, config, slots=10, guided=False) == (made, True)
    static = StaticCache(config=config, max_cache_len=5)  # as `generate` makes it, with no room for a tree
    chosen, direct = decoding_cache(static, config, slots=10, guided=True)
    assert (type(chosen), chosen.layers[0].max_cache_len, direct) == (StaticCache, 10, False)
