"""What holds for every family: tree passes are exact, greedy decoding is the family's own, rows do not mix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import tiny_head
from family_matrix import FAMILIES, Family
from helpers import Oracle
from torch import Tensor
from transformers import DynamicCache

from lantern_hf import TREES, LanternConfig, NeighborTable, lantern_generate
from lantern_hf.cache import RaggedCache
from lantern_hf.targets.attention import attention_argument

TREE = TREES["eagle_25"]
NOT_FOR_THE_FORWARD = (
    "input_ids",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "guidance_scale",
    "prefix_allowed_tokens_fn",
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def random_nodes(adapter: Any, seed: int, rows: int) -> Tensor:
    """Tokens of a drafted tree, any that may be emitted."""
    columns = torch.randint(adapter.num_codes, (rows, TREE.num_nodes), generator=torch.Generator().manual_seed(seed))
    return adapter.token_ids(columns)


@every_family
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_tree_passes_are_sequential_passes(family: Family, attention: str) -> None:
    model = family.make(attention)
    inputs = family.inputs(model, 2, False)
    adapter = family.adapter(model, inputs)
    kwargs = {key: value for key, value in inputs.items() if key not in NOT_FOR_THE_FORWARD}
    cache = DynamicCache(config=model.config.get_text_config())
    prompt = adapter.prefill(inputs["input_ids"], cache, **kwargs)
    padding = None if prompt.mask is None else ~prompt.mask
    ragged = RaggedCache(cache, 2, torch.device("cpu"), inputs["input_ids"].shape[1], padding)
    positions = prompt.position_ids[:, -1] + 1
    kept: list[Tensor] = [torch.zeros(0, dtype=torch.long)] * 2
    counts = [[4, 2], [1, 6]]  # nodes each row keeps after each round; rows fall out of step
    for step in range(2):
        nodes = random_nodes(adapter, step, 2)
        mask = attention_argument(ragged.tree_mask(TREE.mask), attention, torch.float32)
        hidden, _ = adapter.tree_pass(nodes, positions[:, None] + TREE.depths, mask, cache)
        logits = adapter.logits(hidden)
        for path in TREE.paths:
            path = path[path >= 0]
            for row in range(2):
                tokens = torch.cat([kept[row], nodes[row, path]])[None].expand(2, -1)
                expected = family.forward(model, inputs, tokens)[row, -len(path) :]
                torch.testing.assert_close(logits[row, path], expected, atol=1e-4, rtol=0)
        longest = TREE.paths[(TREE.paths >= 0).sum(1).argmax()]
        ragged.keep(longest.expand(2, -1), counts[step])
        positions = positions + torch.tensor(counts[step])
        kept = [torch.cat([kept[row], nodes[row, longest[: counts[step][row]]]]) for row in range(2)]


def decode(family: Family, model: Any, inputs: dict[str, Any], assistant: Any, **kwargs: Any) -> Any:
    """What LANTERN decodes: one image a row."""
    kwargs.setdefault("lantern_config", LanternConfig.strict(TREE))
    return model.generate(
        **inputs,
        custom_generate=lantern_generate,
        assistant=assistant,
        target_options=family.options,
        max_new_tokens=family.new_tokens,
        **kwargs,
    )


@every_family
@pytest.mark.parametrize("guided", [False, True])
def test_greedy_decoding_is_the_familys_own(family: Family, guided: bool) -> None:
    model = family.make("sdpa")
    inputs = family.inputs(model, 2, guided)
    expected = family.plain(model, inputs, family.new_tokens)
    assert torch.equal(decode(family, model, inputs, tiny_head(model), do_sample=False), expected)
    adapter = family.adapter(model, inputs)
    emitted = adapter.token_ids(torch.arange(adapter.num_columns)).tolist()
    draft = Oracle(TREE, expected, emitted, adapter.num_columns, misses=0.3)
    result = decode(family, model, inputs, draft, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(result.sequences, expected)
    assert result.stats.tokens_per_pass > 1.5
    plainly = decode(family, model, inputs, None, do_sample=False, lantern_config=None)
    assert torch.equal(plainly, expected)


def row_of(inputs: dict[str, Any], row: int) -> dict[str, Any]:
    """Arguments of one row."""
    return {key: value[row : row + 1] if isinstance(value, Tensor) else value for key, value in inputs.items()}


@every_family
def test_rows_do_not_depend_on_their_mates(family: Family) -> None:
    model = family.make("sdpa")
    head = tiny_head(model)
    inputs = family.inputs(model, 3, True)
    codebook = torch.randn(family.num_codes, 4, generator=torch.Generator().manual_seed(3))
    relaxed = {
        "neighbors": NeighborTable.from_codebook(codebook, 8),
        "lantern_config": LanternConfig(TREE, 8, lam=4.0),
        "do_sample": True,
        "top_k": 12,
    }
    together = decode(
        family, model, inputs, head, generator=[torch.Generator().manual_seed(i) for i in range(3)], **relaxed
    )
    for row in range(3):
        alone = decode(
            family, model, row_of(inputs, row), head, generator=torch.Generator().manual_seed(row), **relaxed
        )
        assert torch.equal(alone[0], together[row])


@every_family
def test_rules_lead_through_an_image(family: Family) -> None:
    model = family.make("sdpa")
    inputs = family.inputs(model, 3, False)
    adapter = family.adapter(model, inputs)
    offset, generated = adapter.start(inputs["input_ids"]), []
    assert offset.dtype == torch.long
    assert adapter.num_codes == family.num_codes
    for _ in range(family.new_tokens):
        forced, allowed = adapter.forced(offset), adapter.allowed(offset)
        assert forced.shape == offset.shape
        assert ((forced < 0) | (adapter.columns_of(forced.clamp_min(0)) >= 0)).all()
        scores = torch.rand(3, adapter.num_columns)
        if allowed is not None:
            assert allowed.dtype == torch.bool
            scores = scores.masked_fill(~allowed, -1)
            assert (scores.amax(1) >= 0).all()
        token = torch.where(forced >= 0, forced, adapter.token_ids(scores.argmax(1)))
        generated.append(token)
        offset = adapter.advance(offset, token)
        nodes = offset[:, None].expand(-1, 4)  # the same question about several nodes of a row
        assert torch.equal(adapter.forced(nodes), adapter.forced(offset)[:, None].expand(-1, 4))
    images = adapter.image_codes(torch.stack(generated, 1))
    assert [len(row) for row in images] == [1, 1, 1]
    assert all(int(codes.min()) >= 0 and int(codes.max()) < family.num_codes for row in images for codes in row)
