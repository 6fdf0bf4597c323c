"""Emu3 beyond the matrix of families: functions that end rows, relaxed images, the real pixels, bounded rounds."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_head
from helpers import Oracle
from tiny_emu3 import (
    NUM_CODES,
    ByPlace,
    Unasked,
    arguments,
    check_structure,
    emu3_processor,
    emu3_vocabulary,
    image_inputs,
    negative_inputs,
    published_helper,
    tiny_emu3,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Emu3ForConditionalGeneration,
    Emu3Processor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
)

import lantern_hf.session
from lantern_hf import TREES, Emu3ImageLayout, LanternConfig, lantern_generate
from lantern_hf.targets import adapter_class, adapter_for

TEXTS = ["a red fox", "hi"]
RELAXED = LanternConfig(tree="eagle_25", neighborhood_size=8, lam=6.0)


@pytest.fixture(scope="module")
def processor() -> Emu3Processor:
    return emu3_processor()


@pytest.fixture(scope="module")
def model() -> Emu3ForConditionalGeneration:
    return tiny_emu3()


def test_the_layout_says_what_a_users_function_says(model: Any, processor: Any) -> None:
    for pixels in ((32, 32), (24, 40)):
        inputs = image_inputs(processor, ["a fox"], pixels)
        height, width = map(int, inputs["image_sizes"][0])
        assert (height * 8, width * 8) == pixels
        layout = Emu3ImageLayout.for_model(model, inputs["image_sizes"])
        theirs, ids = ByPlace(model, height, width), inputs["input_ids"][0]
        for place in range(layout.num_tokens + 2):
            assert sorted(layout(0, ids)) == sorted(theirs(0, ids))
            forced = [*layout.forced(), layout.pad_id, layout.pad_id][place]
            assert (forced == -1) == (len(layout(0, ids)) == NUM_CODES)
            ids = torch.cat([ids, torch.tensor([layout(0, ids)[0]])])
    assert Emu3ImageLayout.for_model(model, [90, 90]).num_tokens == 8193


def test_a_layout_that_makes_no_image_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="at least 1 token, got"):
        Emu3ImageLayout.for_model(model, [[0, 4]])
    with pytest.raises(ValueError, match="holds no '<|image token|>'"):
        Emu3ImageLayout.for_model(model, [4, 4])(0, torch.tensor([1, 2]))
    config = type(model.config)(**model.config.to_dict() | {"vocabulary_map": {"<image>": 3}})
    with pytest.raises(ValueError, match="lacks <|image token|>"):
        Emu3ImageLayout.for_model(SimpleNamespace(config=config), [4, 4])  # type: ignore[arg-type]


def test_what_a_prompt_asks_for(model: Any, processor: Any) -> None:
    assert adapter_class(model).family == "emu3"
    image = adapter_for(model, image_inputs(processor, TEXTS)["input_ids"])
    assert (image.num_codes, image.num_columns) == (NUM_CODES, model.config.text_config.vocab_size)
    assert image.codebook().shape == (NUM_CODES, 4)
    by_code = [emu3_vocabulary()[f"<|visual token {code:06d}|>"] for code in range(NUM_CODES)]
    assert image.columns[:NUM_CODES].tolist() == by_code
    text = processor(text=TEXTS, padding=True, return_tensors="pt")["input_ids"]
    assert adapter_for(model, text).num_codes == 0
    assert adapter_for(model, text).codebook_size == NUM_CODES
    with pytest.raises(ValueError, match="ask for text, not for an image"):
        adapter_for(model, text).image_codes(text)
    begun = image_inputs(processor, ["a"])["input_ids"]
    mixed = torch.cat([begun, begun.flip(1).clone().fill_(5)])
    with pytest.raises(ValueError, match="1 of 2 prompts end inside an image"):
        adapter_for(model, mixed)


@pytest.mark.parametrize("stride", [1, 7])
def test_logits_are_those_of_the_columns(processor: Any, stride: int) -> None:
    """Also where the ids of visual tokens follow one another, as published ones do, and no weight is copied."""
    model = tiny_emu3(stride=stride)
    inputs = image_inputs(processor, TEXTS)
    adapter, layout = adapter_for(model, inputs["input_ids"]), Emu3ImageLayout.for_model(model, inputs["image_sizes"])
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(adapter.logits(hidden), model.lm_head(hidden)[..., adapter.columns])
        assert len(adapter.take_over(LogitsProcessorList([PrefixConstrainedLogitsProcessor(layout, 1)]))) == 0
        torch.testing.assert_close(adapter.logits(hidden), model.lm_head(hidden)[..., adapter.columns])
    shared = adapter._weights[0].untyped_storage().data_ptr() == model.lm_head.weight.untyped_storage().data_ptr()
    assert shared == (stride == 1)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("function", ["layout", "user", "published", "none"])
def test_greedy_strict_is_the_models_own_generate(model: Any, processor: Any, function: str, rows: int) -> None:
    kwargs = arguments(processor, TEXTS[:rows])
    layout = Emu3ImageLayout.for_model(model, kwargs.pop("image_sizes"))
    theirs = ByPlace(model, 4, 4)
    kwargs |= {"do_sample": False, "max_new_tokens": layout.num_tokens, "prefix_allowed_tokens_fn": theirs}
    if function == "none":
        del kwargs["prefix_allowed_tokens_fn"]
    expected = model.generate(**kwargs)
    calls = len(theirs.asked)
    if function == "layout":
        kwargs["prefix_allowed_tokens_fn"] = Unasked(**vars(layout))
    elif function == "published":
        kwargs["prefix_allowed_tokens_fn"] = published_helper(layout)
    for assistant in (tiny_head(model), Oracle(TREES["eagle_25"], expected, layout.visual_ids, 0, misses=0.2)):
        if isinstance(assistant, Oracle):
            columns = len(layout.visual_ids) + 5 if function in ("layout", "published") else len(emu3_vocabulary())
            assistant._columns = columns
        output = model.generate(
            **kwargs, custom_generate=lantern_generate, assistant=assistant, lantern_config=LanternConfig.strict()
        )
        assert torch.equal(output, expected)
    assert (len(theirs.asked) > calls) == (function == "user")
    if function != "none":
        for row in expected[:, kwargs["input_ids"].shape[1] :].tolist():
            check_structure(row, 4, 4)


def test_a_helper_that_answers_otherwise_is_asked(model: Any, processor: Any) -> None:
    kwargs = arguments(processor, TEXTS[:1])
    layout = Emu3ImageLayout.for_model(model, kwargs.pop("image_sizes"))
    kwargs |= {"do_sample": False, "max_new_tokens": 14}
    expected = model.generate(**kwargs, prefix_allowed_tokens_fn=published_helper(layout, narrow=True))
    output = model.generate(
        **kwargs,
        prefix_allowed_tokens_fn=published_helper(layout, narrow=True),
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict(),
    )
    assert torch.equal(output, expected)
    begun = expected[0, kwargs["input_ids"].shape[1] :].view(-1)[[0, 5, 10]]
    assert set(begun.tolist()) <= set(layout.visual_ids[:3])


def test_text_and_text_about_images_are_decoded_strictly(model: Any, processor: Any) -> None:
    inputs = processor(text=TEXTS, padding=True, return_tensors="pt")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=12)
    head = tiny_head(model)
    output = model.generate(
        **inputs, do_sample=False, max_new_tokens=12, custom_generate=lantern_generate, assistant=head
    )
    assert torch.equal(output, expected)


def test_two_hundred_relaxed_images_have_every_end(model: Any, processor: Any) -> None:
    """Two sizes side by side in every batch; guidance, top-k and a bound that often relaxes."""
    tall, wide = (
        image_inputs(processor, [text], pixels) for text, pixels in zip(TEXTS, ((40, 24), (24, 32)), strict=True)
    )
    length = max(inputs["input_ids"].shape[1] for inputs in (tall, wide))

    def padded(name: str, value: int) -> Tensor:
        rows = [torch.nn.functional.pad(x[name], (length - x[name].shape[1], 0), value=value) for x in (tall, wide)]
        return torch.cat(rows).repeat_interleave(25, 0)

    sizes = [(5, 3), (3, 4)]
    assert [tuple(map(int, size)) for x in (tall, wide) for size in x["image_sizes"]] == sizes
    layout = Emu3ImageLayout.for_model(model, sizes)
    negative = negative_inputs(processor, "low", 50)
    head, generator, shifts = tiny_head(model), torch.Generator().manual_seed(0), []
    for _ in range(4):
        prompts = padded("input_ids", model.config.text_config.pad_token_id)
        output = model.generate(
            prompts,
            attention_mask=padded("attention_mask", 0),
            **negative,
            guidance_scale=3.0,
            do_sample=True,
            top_k=16,
            max_new_tokens=layout.num_tokens,
            prefix_allowed_tokens_fn=layout,
            custom_generate=lantern_generate,
            assistant=head,
            lantern_config=RELAXED,
            generator=generator,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, length:]
        shifts.append(sum(output.stats.relaxed_tv))
        codes = adapter_for(model, prompts).image_codes(tokens)
        for row, line in enumerate(tokens.tolist()):
            height, width = sizes[row // 25]
            check_structure(line, height, width)
            assert [tuple(image.shape) for image in codes[row]] == [(height, width)]
    assert min(shifts) > 0


def test_forced_tokens_are_never_rejected(model: Any, processor: Any) -> None:
    kwargs = arguments(processor, TEXTS[:1], (48, 8))  # rows of one visual token
    layout = Emu3ImageLayout.for_model(model, kwargs.pop("image_sizes"))
    forced, places = layout.forced(), []

    def look(session: Any) -> None:
        if places and forced[places[-1]] not in (-1, layout.end_ids[3]):
            assert session._accepted[0] >= 1
        places.append(int(session._root_offset))

    model.generate(
        **kwargs,
        do_sample=True,
        max_new_tokens=layout.num_tokens,
        prefix_allowed_tokens_fn=layout,
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
        lantern_config=LanternConfig.strict("chain_5"),
        generator=torch.Generator().manual_seed(1),
        on_round=look,
    )
    assert any(forced[place] != -1 for place in places[:-1])


def test_pixels_are_those_of_the_real_decoder(model: Any, processor: Any) -> None:
    kwargs = arguments(processor, TEXTS, (24, 40))
    sizes = kwargs.pop("image_sizes")
    layout, prompts = Emu3ImageLayout.for_model(model, sizes), kwargs["input_ids"]
    output = model.generate(
        **kwargs,
        do_sample=False,
        max_new_tokens=layout.num_tokens,
        prefix_allowed_tokens_fn=layout,
        custom_generate=lantern_generate,
        assistant=tiny_head(model),
    )
    tokens = output[:, prompts.shape[1] :]
    theirs = model.decode_image_tokens(image_tokens=tokens, height=sizes[0][0], width=sizes[0][1])
    adapter = adapter_for(model, prompts)
    codes = torch.stack([images[0] for images in adapter.image_codes(tokens)])
    assert torch.equal(adapter.pixels(codes), theirs)
    images = processor.postprocess(list(theirs.float()), return_tensors="PIL.Image.Image")["pixel_values"]
    assert [image.size for image in images] == [(40, 24), (40, 24)]
    assert adapter.image_codes(tokens[:, :10]) == [[], []]
    assert adapter.image_codes(tokens.roll(1, 1)) == [[], []]


def test_a_begun_image_is_gone_on_with(model: Any, processor: Any) -> None:
    inputs = image_inputs(processor, TEXTS[:1])
    layout = Emu3ImageLayout.for_model(model, inputs.pop("image_sizes"))
    row = [*layout.visual_ids[3:7], layout.end_ids[0], layout.visual_ids[0]]
    prompt = torch.cat([inputs["input_ids"], torch.tensor([row])], 1)
    kwargs = {"do_sample": False, "max_new_tokens": layout.num_tokens - len(row), "prefix_allowed_tokens_fn": layout}
    expected = model.generate(prompt, **kwargs)
    output = model.generate(prompt, **kwargs, custom_generate=lantern_generate, assistant=tiny_head(model))
    assert output.shape == expected.shape
    strict = LanternConfig.strict()
    kwargs |= {"custom_generate": lantern_generate, "assistant": tiny_head(model), "lantern_config": strict}
    assert torch.equal(model.generate(prompt, **kwargs), expected)
    (codes,) = adapter_for(model, prompt).image_codes(expected[:, prompt.shape[1] :])[0]
    assert codes.shape == (4, 4)
    assert codes[0].tolist() == [3, 4, 5, 6]


def test_a_function_is_told_what_the_stock_method_tells_it(model: Any, processor: Any) -> None:
    """The number of the prompt, where older releases give that of the row."""
    kwargs = dict(image_inputs(processor, TEXTS))
    del kwargs["image_sizes"]
    stock, ours = ByPlace(model, 4, 4), ByPlace(model, 4, 4)
    kwargs |= {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6}
    model.generate(**kwargs, prefix_allowed_tokens_fn=stock)
    head = tiny_head(model)
    model.generate(**kwargs, prefix_allowed_tokens_fn=ours, custom_generate=lantern_generate, assistant=head)
    assert set(ours.asked) == set(stock.asked) >= {0, 1}


def test_a_static_cache_serves(model: Any, processor: Any) -> None:
    kwargs = arguments(processor, TEXTS)
    layout = Emu3ImageLayout.for_model(model, kwargs.pop("image_sizes"))
    kwargs |= {"do_sample": False, "max_new_tokens": layout.num_tokens, "prefix_allowed_tokens_fn": layout}
    expected = model.generate(**kwargs)
    strict = LanternConfig.strict()
    kwargs |= {"custom_generate": lantern_generate, "assistant": tiny_head(model), "lantern_config": strict}
    assert torch.equal(model.generate(**kwargs, cache_implementation="static"), expected)


class Count(TorchDispatchMode):
    """Counts the operators that run."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        return func(*args, **(kwargs or {}))


def test_a_round_costs_the_same_at_the_end_of_a_long_image(
    model: Any, processor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many operators in late rounds as in early ones, and one buffer for all masks but for a few growths."""
    kwargs = arguments(processor, TEXTS[:1], (96, 96))
    layout = Emu3ImageLayout.for_model(model, kwargs.pop("image_sizes"))
    assert layout.num_tokens == 159
    buffers: list[int] = []
    argument = lantern_hf.session.attention_argument

    def spy(mask: Tensor, *args: Any) -> Any:
        buffers.append(mask.untyped_storage().data_ptr())
        return argument(mask, *args)

    monkeypatch.setattr(lantern_hf.session, "attention_argument", spy)
    costs: dict[int, list[int]] = defaultdict(list)
    before = 0
    with Count() as count:

        def look(session: Any) -> None:
            nonlocal before
            costs[session._accepted[0]].append(count.total - before)
            before = count.total

        model.generate(
            **kwargs,
            do_sample=True,
            max_new_tokens=layout.num_tokens,
            prefix_allowed_tokens_fn=Unasked(**vars(layout)),
            custom_generate=lantern_generate,
            assistant=tiny_head(model),
            lantern_config=RELAXED,
            generator=torch.Generator().manual_seed(0),
            on_round=look,
        )
    assert len(buffers) > 40
    assert len(set(buffers)) <= 4
    for rounds in costs.values():
        if len(rounds) > 10:
            early, late = rounds[2 : len(rounds) // 2], rounds[len(rounds) // 2 : -1]
            assert max(late) <= 1.01 * max(early)  # a slice that covers everything is no operator, hence not equal
