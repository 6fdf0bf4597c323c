"""GLM-Image: positions in two grids, the structure of an image, guidance, editing, refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import NUM_CODES, tiny_head
from helpers import Oracle
from PIL import Image
from test_sync import Waits, counted
from tiny_families import (
    GLM_BOI,
    GLM_EOI,
    GLM_OUTPUTS,
    GLM_PAD,
    glm_image_processor,
    tiny_glm_image,
)
from torch import Tensor

from lantern_hf import TREES, LanternConfig, NeighborTable, attach, lantern_generate
from lantern_hf.cache import CACHE_KEYWORD, RaggedCache, new_dynamic_cache
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument
from lantern_hf.targets.glm_image import decode_positions

LARGE, SMALL = (4, 3), (2, 2)
TOKENS = 4 * 3 + 2 * 2


def prompts(*grids: tuple[tuple[int, int], ...], rows: int = 1) -> dict[str, Tensor]:
    """Prompts of unequal length, padded on the left; `grids` of each, large before small."""
    each = grids or ((LARGE, SMALL),) * rows
    length = 4 + len(each)
    ids = torch.full((len(each), length), GLM_PAD)
    for row in range(len(each)):
        words = torch.arange(3 + row) + 44
        ids[row, -len(words) - 1 :] = torch.cat([words, torch.tensor([GLM_BOI])])
    shapes = torch.tensor([[1, *grid] for row in each for grid in row])
    counts = torch.tensor([len(row) for row in each])
    mask = (ids != GLM_PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "image_grid_thw": shapes, "images_per_sample": counts}


def glm_oracle(truth: Tensor, tree: str) -> Oracle:
    """A generator that mostly proposes what should come."""
    return Oracle(TREES[tree], truth, list(range(NUM_CODES)), GLM_OUTPUTS, 0.2)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_tree_pass_equals_plain_passes(attention: str) -> None:
    """Two rounds across the border of the grids, a path kept in between; the plain passes are the stock forward's."""
    model = tiny_glm_image(attention)
    inputs = prompts((LARGE, SMALL), ((2, 5), (1, 3)))
    adapter = adapter_for(model, inputs["input_ids"])
    tree, random = TREES["eagle_25"], torch.Generator().manual_seed(0)
    codes = torch.empty(2, 0, dtype=torch.long)
    with torch.no_grad():
        cache = new_dynamic_cache(model.config.get_text_config())
        kwargs = dict(inputs)
        prompt = adapter.prefill(kwargs.pop("input_ids"), cache, **kwargs)
        ragged = RaggedCache(cache, 2, torch.device("cpu"), prompt.mask.shape[1], ~prompt.mask)
        first = prompt.position_ids[:, -1:] + 1
        for path in (tree.paths[0], tree.paths[5]):
            nodes = torch.randint(NUM_CODES, (2, tree.num_nodes), generator=random)
            mask = attention_argument(ragged.tree_mask(tree.mask), attention, torch.float32)
            hidden, _ = adapter.tree_pass(nodes, first + tree.depths, mask, cache)
            for other in tree.paths:
                other = other[other >= 0]
                expected = plain_logits(model, inputs, torch.cat([codes, nodes[:, other]], dim=1))[:, -len(other) :]
                assert torch.allclose(adapter.logits(hidden)[:, other], expected, atol=1e-4)
            path = path[path >= 0][:3]
            ragged.keep(path[None], [len(path)] * 2)
            codes, first = torch.cat([codes, nodes[:, path]], dim=1), first + len(path)


def plain_logits(model: Any, inputs: dict[str, Tensor], codes: Tensor) -> Tensor:
    """Logits behind each code by stock passes over one token each, which infer positions from the cache."""
    cache = new_dynamic_cache(model.config.get_text_config())
    model(**inputs, **{CACHE_KEYWORD: cache})
    mask, logits = inputs["attention_mask"], []
    for column in codes.split(1, dim=1):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        logits.append(model(input_ids=column, attention_mask=mask, **{CACHE_KEYWORD: cache}).logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 2])
def test_equals_its_own_generate(rows: int, attention: str) -> None:
    model = tiny_glm_image(attention)
    inputs = prompts(rows=rows)
    expected = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    codes = expected[:, inputs["input_ids"].shape[1] :]
    assert int(codes.max()) < NUM_CODES
    assert len(codes[0].unique()) > 3
    for name, tree in (("head", "eagle_25"), ("oracle", "wide_57"), ("oracle", "chain_5"), ("plain", "chain_5")):
        assistant = {"head": tiny_head(model), "oracle": glm_oracle(expected, tree), "plain": None}[name]
        output = model.generate(
            **inputs,
            max_new_tokens=TOKENS + 1,
            do_sample=False,
            custom_generate=lantern_generate,
            assistant=assistant,
            lantern_config=LanternConfig.strict(tree),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences[:, :-1], expected), name
        assert output.sequences[:, -1].tolist() == [GLM_EOI] * rows
        if name == "oracle":
            assert output.stats.tokens_per_pass > 2


def test_equals_its_own_generate_under_guidance() -> None:
    """The stock method guides rightly where both prompts have one length: it keeps one prompt's length for both."""
    model = tiny_glm_image()
    inputs = prompts()
    for name in ("input_ids", "attention_mask"):
        inputs[name] = inputs[name][:, 1:]  # padding stands in front, and shifts the stock method's positions
    negative = torch.tensor([[50, 51, 52, GLM_BOI]])
    kwargs = {"negative_prompt_ids": negative, "guidance_scale": 2.5, "do_sample": False, "max_new_tokens": TOKENS}
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=TOKENS)
    expected = model.generate(**inputs, **kwargs)
    assert not torch.equal(plain, expected)
    for assistant in (tiny_head(model), glm_oracle(expected, "eagle_25")):
        draft = {"custom_generate": lantern_generate, "assistant": assistant}
        assert torch.equal(model.generate(**inputs, **kwargs, **draft, lantern_config=LanternConfig.strict()), expected)


def test_a_call_leaves_nothing_on_the_model_and_reads_nothing_from_it() -> None:
    model = tiny_glm_image()
    draft = {"custom_generate": lantern_generate, "assistant": tiny_head(model), "do_sample": False}
    draft |= {"lantern_config": LanternConfig.strict(), "max_new_tokens": TOKENS + 1}
    inner = model.model
    first = model.generate(**prompts(), **draft)
    assert (inner.rope_deltas, inner._prefill_len, inner._cached_decode_position_ids) == (None, None, None)
    model.generate(**prompts(((1, 2), (3, 3))), max_new_tokens=4)  # the stock method leaves its positions there
    assert inner._prefill_len is not None
    assert torch.equal(model.generate(**prompts(), **draft), first)


def test_positions_of_a_grid() -> None:
    """By hand: a small grid of 1 x 2 at 0, a large one of 2 x 2 at 2, the end at 4; a shorter row repeats its end."""
    table = decode_positions([[(1, 2), (2, 2)], [(1, 1)]])
    assert table.shape == (2, 3, 7)
    assert table[0].tolist() == [[0, 0, 2, 2, 2, 2, 4], [0, 0, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    assert table[1].tolist() == [[0, 1, 1, 1, 1, 1, 1]] * 3


def test_positions_are_those_of_the_stock_model() -> None:
    """Also behind an image to edit, and with grids of different sizes in one batch."""
    model = tiny_glm_image()
    processor = glm_image_processor()
    picture = Image.effect_noise((48, 32), 64).convert("RGB")
    edit = dict(
        processor(text=["<boi> <|image|> <eoi> blue"], images=[picture], target_h=96, target_w=64, return_tensors="pt")
    )
    for inputs in (prompts((LARGE, SMALL), ((2, 5), (1, 3))), edit):
        adapter = adapter_for(model, inputs["input_ids"])
        stock, _ = model.model.get_rope_index(
            **{name: inputs[name] for name in ("input_ids", "attention_mask", "image_grid_thw", "images_per_sample")}
        )
        kwargs = dict(inputs)
        with torch.no_grad():
            cache = new_dynamic_cache(model.config.get_text_config())
            prompt = adapter.prefill(kwargs.pop("input_ids"), cache, **kwargs)
        table = model.model._cached_decode_position_ids
        numbers = prompt.position_ids[:, -1:] + 1 + torch.arange(table.shape[-1])
        assert torch.equal(adapter._places(numbers), table.transpose(0, 1))
        assert torch.equal(adapter._places(numbers + 99)[..., -1], table.transpose(0, 1)[..., -1])
        assert stock.shape[-1] == prompt.position_ids.shape[-1]


def test_an_image_can_be_edited() -> None:
    """Image to image: codes of the source in the prompt, one grid to fill."""
    model = tiny_glm_image()
    processor = glm_image_processor()
    pictures = [Image.effect_noise((48, 32), 64).convert("RGB"), Image.new("RGB", (48, 32), "red")]
    inputs = processor(
        text=["<boi> <|image|> <eoi> blue", "<boi> <|image|> <eoi> red"],
        images=[[picture] for picture in pictures],
        target_h=96,
        target_w=64,
        padding=True,
        return_tensors="pt",
    )
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    output = model.generate(**inputs, max_new_tokens=7, do_sample=False)
    assert torch.equal(output[:, :-1], expected)
    assert (output[:, -1] == GLM_EOI).all()
    twice = model.generate(**inputs, max_new_tokens=7, do_sample=False, num_return_sequences=2)
    assert torch.equal(twice, output.repeat_interleave(2, 0))


def test_several_images_of_a_prompt() -> None:
    """The common `generate` would give the copies of a prompt each other's grids."""
    model = tiny_glm_image()
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    inputs = prompts((LARGE, SMALL), ((2, 5), (1, 3)))
    once = model.generate(**inputs, max_new_tokens=TOKENS + 1, do_sample=False)
    twice = model.generate(**inputs, max_new_tokens=TOKENS + 1, do_sample=False, num_return_sequences=2)
    assert torch.equal(twice, once.repeat_interleave(2, 0))
    ids = inputs.pop("input_ids")
    assert torch.equal(model.generate(ids, **inputs, max_new_tokens=17, num_return_sequences=2), twice)


def test_structure_of_many_relaxed_images() -> None:
    """200 sampled images of three shapes, in batches that mix them: every grid and every end where it belongs."""
    model = tiny_glm_image()
    with torch.no_grad():  # ids that are no codes are as likely as codes here
        model.lm_head.weight[NUM_CODES:].normal_(std=0.4)
    attach(model, tiny_head(model), LanternConfig("eagle_25", 5, lam=4.0), default_on=True)
    shapes = [(LARGE, SMALL), ((2, 5), (1, 3)), ((1, 1), (3, 1))]
    seen, adapter, passes = set(), None, []
    for seed in range(4):
        grids = [shapes[(seed + row) % 3] for row in range(10)]
        inputs = prompts(*grids)
        output = model.generate(
            **inputs,
            do_sample=True,
            max_new_tokens=TOKENS + 1,
            num_return_sequences=5,
            generator=torch.Generator().manual_seed(seed),
            return_dict_in_generate=True,
        )
        passes.append(output.stats.tokens_per_pass)
        new = output.sequences[:, inputs["input_ids"].shape[1] :]
        for row, codes in enumerate(new):
            large, small = grids[row // 5]
            total = large[0] * large[1] + small[0] * small[1]
            assert int(codes[:total].max()) < NUM_CODES
            assert codes[total] == GLM_EOI
            assert (codes[total + 1 :] == GLM_PAD).all()
            seen.add(tuple(codes.tolist()))
    assert len(seen) > 150  # a third of them have four codes only
    assert min(passes) > 1
    adapter = adapter_for(model, inputs["input_ids"])
    adapter.read_call(inputs["input_ids"], inputs)
    pictures = adapter.image_codes(new[::5])
    assert [picture[0].shape for picture in pictures] == [large for large, _ in grids]
    large, (height, width) = grids[0][0], grids[0][1]
    assert torch.equal(pictures[0][0].flatten(), new[0, height * width :][: large[0] * large[1]])
    assert adapter.image_codes(new[::5, :5])[0] == []


def test_without_grids_it_is_a_text_model() -> None:
    """Any id of the output layer may come, at positions of text, as in the stock model."""
    model = tiny_glm_image()
    with torch.no_grad():
        model.lm_head.weight[NUM_CODES:].normal_(std=0.8)
    ids = torch.tensor([[44, 45, 46, GLM_BOI]])
    expected = model.generate(input_ids=ids, max_new_tokens=14, do_sample=False, eos_token_id=None)
    assert int(expected[:, 4:].max()) >= NUM_CODES
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    assert torch.equal(model.generate(input_ids=ids, max_new_tokens=14, do_sample=False, eos_token_id=None), expected)


def test_codebook_and_head() -> None:
    model = tiny_glm_image()
    adapter = adapter_for(model)
    raw = adapter.codebook()
    assert torch.equal(raw, model.model.vqmodel.quantize.embedding.weight)
    # the tokenizer takes the code at the smallest angle, whatever its length
    longer = torch.arange(1, NUM_CODES + 1)[:, None] * raw
    assert model.model.vqmodel.quantize(longer.T[None, :, :, None])[2].tolist() == list(range(NUM_CODES))
    by_angle = NeighborTable.from_codebook(longer, 5, adapter.codebook_metric)
    assert torch.equal(by_angle.indices, NeighborTable.from_codebook(torch.nn.functional.normalize(raw), 5).indices)
    assert (adapter.codebook_size, adapter.num_codes, adapter.num_columns) == (NUM_CODES, NUM_CODES, GLM_OUTPUTS)
    assert tiny_head(model).config.codebook_size == NUM_CODES


@pytest.mark.parametrize("do_sample", [True, False])
def test_two_waits_a_round_at_most(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_glm_image()
    attach(model, tiny_head(model), LanternConfig("wide_57", 5, lam=3.0), default_on=True)
    rounds: list[list[str]] = []
    inputs = prompts((LARGE, SMALL), ((2, 5), (1, 3)), (LARGE, SMALL))
    watched = SimpleNamespace(model=model)

    with monkeypatch.context() as patch:
        patch.setattr("lantern_hf.session.asking_is_free", lambda device: False)
        with counted(patch, watched) as waits:  # type: ignore[arg-type]
            assert isinstance(waits, Waits)

            def on_round(session: Any) -> None:
                rounds.append(list(waits.names))
                waits.names.clear()

            model.generate(**inputs, do_sample=do_sample, max_new_tokens=TOKENS + 1, on_round=on_round)
    assert len(rounds) > 2
    assert max(len(names) for names in rounds[1:]) <= 2, rounds


def test_refusals() -> None:
    model = tiny_glm_image()
    attach(model, tiny_head(model), LanternConfig.strict(), default_on=True)
    inputs = prompts(rows=2)
    with pytest.raises(ValueError, match=r"`images_per_sample` \[2, 1\] does not divide 4 grids"):
        model.generate(**(inputs | {"images_per_sample": torch.tensor([2, 1])}), max_new_tokens=4)
    closed = inputs | {"input_ids": inputs["input_ids"].index_fill(1, torch.tensor([3, 4]), GLM_EOI)}
    with pytest.raises(ValueError, match="Prompt 0 closes 2 images and `image_grid_thw` has no other"):
        model.generate(**closed, max_new_tokens=4)
    with pytest.raises(ValueError, match="drawn by a diffusion model"):
        adapter_for(model).pixels(torch.zeros(1, 2, 2, dtype=torch.long))
