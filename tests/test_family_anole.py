"""Anole: prompts, images of exactly their length, text and images in one answer, pixels, the user's script."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import tiny_head
from helpers import Oracle
from PIL import Image
from tiny_chameleon import (
    BOI,
    BOS,
    CODE_OF,
    CODES,
    EOI,
    EOS,
    PAD,
    SEP,
    SIDE,
    VOCAB,
    next_in_anole,
    plain_generate,
    tiny_anole,
    tiny_tokenizer,
    tiny_vq,
    unblanked,
    vq_weights,
)
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from lantern_hf import TREES, LanternConfig, NeighborTable, decode_images, image_prompts, lantern_generate
from lantern_hf.cache import new_dynamic_cache
from lantern_hf.models.vq import decode_codes, encode_pixels
from lantern_hf.processors import Guidance
from lantern_hf.prompts import prompt_streams, read_prompts
from lantern_hf.targets import adapter_for

EXAMPLE = Path(__file__).parent.parent / "examples" / "anole.py"
INTERLEAVED = {"interleaved": True}


class BeginOften(LogitsProcessor):
    """Makes an image begin at every fifth place of a text, so that a short answer holds several."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] % 5 == 0:
            scores[:, BOI] += 1e3
        return scores


def lantern(model: Any, assistant: Any, ids: Tensor, **kwargs: Any) -> Any:
    """Decode with LANTERN, strictly unless told otherwise."""
    kwargs.setdefault("lantern_config", LanternConfig.strict("eagle_25"))
    return model.generate(ids, custom_generate=lantern_generate, assistant=assistant, **kwargs)


def mixed_prompts() -> dict[str, Tensor]:
    """A text, one that asks for an image, and one that ends in the middle of an image; padded on the left."""
    rows = [[BOS, 40, 41, SEP], [BOS, 42, SEP, BOI], [BOS, BOI, CODES[3], CODES[5]], [BOS, BOI, EOI, 43]]
    width = 6
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def test_prompts_are_the_published_ones() -> None:
    model = tiny_anole()
    inputs = image_prompts(model, tiny_tokenizer(), ["word2", "word0 word5 word7"], guidance_scale=3.0)
    assert inputs["input_ids"].tolist() == [[PAD, PAD, BOS, 34, SEP, BOI], [BOS, 32, 37, 39, SEP, BOI]]
    assert inputs["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6]
    assert inputs["negative_prompt_ids"].tolist() == [[BOS, BOI]] * 2
    assert (inputs["guidance_scale"], inputs["max_new_tokens"]) == (3.0, SIDE**2)
    assert "negative_prompt_ids" not in image_prompts(model, tiny_tokenizer(), "word2", guidance_scale=1.0)
    ids = inputs["input_ids"]
    unconditional, mask = adapter_for(model, ids).unconditional(ids, inputs["attention_mask"])
    assert (unconditional.tolist(), mask) == ([[BOS, BOI]] * 2, None)


@pytest.mark.parametrize("given", [True, False])
def test_unconditional_rows_have_positions_of_their_own(given: bool) -> None:
    model = tiny_anole()
    inputs = image_prompts(model, tiny_tokenizer(), ["word2", "word0 word5 word7"], guidance_scale=3.0)
    adapter = adapter_for(model, inputs["input_ids"])
    guidance = Guidance(3.0, inputs["negative_prompt_ids"] if given else None, None)
    kwargs = {"attention_mask": inputs["attention_mask"]}
    streams = prompt_streams(adapter, inputs["input_ids"], guidance, kwargs)
    read = read_prompts(
        adapter, streams, new_dynamic_cache(model.config), room=0, all_layers=False, device=torch.device("cpu")
    )
    assert read.prompt.position_ids[2:, -2:].tolist() == [[0, 1]] * 2
    assert read.prompt.position_ids[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert read.prompt.mask is not None
    assert read.prompt.mask[2:].tolist() == [[False] * 4 + [True] * 2] * 2


def test_an_image_ends_and_so_does_the_row() -> None:
    model = tiny_anole()
    inputs = image_prompts(model, tiny_tokenizer(), ["word2", "word0 word5 word7"], guidance_scale=3.0)
    inputs |= {"max_new_tokens": 30, "eos_token_id": EOS, "do_sample": False}
    ids = inputs.pop("input_ids")
    result = lantern(model, tiny_head(model), ids, **inputs)
    assert torch.equal(result, plain_generate(model, next_in_anole, input_ids=ids, **inputs))
    assert result[:, 6:].shape[1] == SIDE**2 + 2
    assert result[:, -2:].tolist() == [[EOI, EOS]] * 2
    assert set(result[:, 6:-2].flatten().tolist()) <= set(CODES)


@pytest.mark.parametrize("misses", [0.0, 0.3])
def test_text_and_images_follow_one_another_as_in_plain_decoding(misses: float) -> None:
    model = tiny_anole()
    inputs = mixed_prompts()
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 60}
    expected = plain_generate(
        model,
        next_in_anole,
        interleaved=True,
        **inputs,
        **settings,
        logits_processor=LogitsProcessorList([BeginOften()]),
    )
    segments = adapter_for(model, inputs["input_ids"], **INTERLEAVED).segments(expected[:, 6:])
    for row in segments:  # the reference itself holds both, in turns
        assert sum(part.ndim == 2 for part in row) >= 2
        assert sum(part.ndim == 1 for part in row) >= 2
    ids = inputs["input_ids"]
    draft = Oracle(TREES["eagle_25"], expected, list(range(VOCAB)), VOCAB, misses)
    for assistant in (draft, tiny_head(model)):
        result = lantern(
            model,
            assistant,
            ids,
            attention_mask=inputs["attention_mask"],
            target_options=INTERLEAVED,
            logits_processor=LogitsProcessorList([BeginOften()]),
            **settings,
        )
        assert torch.equal(result, expected)


@torch.no_grad()
def test_text_is_strict_where_images_are_relaxed(neighbors: NeighborTable) -> None:
    model = tiny_anole()
    inputs = mixed_prompts()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    result = lantern(
        model,
        tiny_head(model),
        ids,
        attention_mask=mask,
        target_options=INTERLEAVED,
        lantern_config=LanternConfig("wide_57", 8, delta=1.0),
        neighbors=neighbors,
        logits_processor=LogitsProcessorList([BeginOften()]),
        do_sample=False,
        max_new_tokens=60,
    )
    mask = torch.cat([mask, mask.new_ones(len(ids), 60)], 1)
    logits = unblanked(model)(result, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    parted = {"text": 0, "image": 0}
    for row, tokens in enumerate(result.tolist()):
        for place in range(6, 66):
            tail = tokens[:place]
            begin = max((i for i, token in enumerate(tail) if token == BOI), default=-1)
            inside = begin >= 0 and EOI not in tail[begin:]
            scores = logits[row, place - 1].clone()
            allowed = next_in_anole(tail[begin + 1 :]) if inside else sorted(set(range(VOCAB)) - set(CODES))
            assert tokens[place] in allowed
            scores[BOI] += 1e3 * (place % 5 == 0)
            best = max(allowed, key=lambda token: scores[token].item())
            parted["image" if inside else "text"] += tokens[place] != best
    assert parted["text"] == 0
    assert parted["image"] > 10


def test_sampled_answers_are_well_formed_and_rows_keep_apart(neighbors: NeighborTable) -> None:
    model = tiny_anole()
    inputs, head = mixed_prompts(), tiny_head(model)

    def sample(rows: list[int]) -> Tensor:
        return lantern(
            model,
            head,
            inputs["input_ids"][rows],
            attention_mask=inputs["attention_mask"][rows],
            target_options=INTERLEAVED,
            lantern_config=LanternConfig("eagle_25", 8, lam=4.0),
            neighbors=neighbors,
            logits_processor=LogitsProcessorList([BeginOften()]),
            generator=[torch.Generator().manual_seed(row) for row in rows],
            do_sample=True,
            max_new_tokens=50,
        )

    together = sample([0, 1, 2, 3])
    for row in range(4):
        assert torch.equal(sample([row])[0], together[row])
    adapter = adapter_for(model, inputs["input_ids"], **INTERLEAVED)
    for row in adapter.segments(together[:, 6:]):  # which refuses images that are none
        images = [part for part in row if part.ndim == 2]
        assert images
        assert all(image.shape == (SIDE, SIDE) for image in images)
        assert all(not set(part.tolist()) & set(CODES) for part in row[:-1] if part.ndim == 1)


def test_codes_become_pixels_through_the_models_own_vq() -> None:
    model = tiny_anole()
    vq = tiny_vq(model)
    pixels = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    own = model.model.vqmodel.encode(pixels).image_tokens.view(3, SIDE, SIDE)
    assert torch.equal(encode_pixels(vq, pixels), own)  # the two are one model
    inputs = image_prompts(model, tiny_tokenizer(), ["word2", "word3"])
    ids = inputs["input_ids"]
    tokens = model.get_image_tokens(pixels[:2])
    assert torch.equal(tokens, torch.tensor(CODES)[own[:2]].view(2, -1))
    (first,), (second,) = decode_images(model, ids, torch.cat([ids, tokens], 1), vq)
    assert first.size == second.size == (8, 8)
    expected = (decode_codes(vq, own[:2]).clamp(-1, 1) + 1) * 127.5
    for image, values in zip((first, second), expected, strict=True):
        assert np.abs(np.asarray(image) - values.permute(1, 2, 0).numpy()).max() <= 0.51
    cut = decode_images(model, ids, torch.cat([ids, tokens[:, :-1]], 1), vq)
    assert cut == [[], []]


def test_segments_take_an_answer_apart() -> None:
    model = tiny_anole()
    image = [CODES[i] for i in range(16)]
    prompts = torch.tensor([[BOS, 40], [BOS, BOI], [BOI, CODES[0]]])
    rows = [[41, BOI, *image, EOI, 42, 43], [*image, EOI, 44, BOI, 45], [*image[1:], EOI, BOI, *image, EOI]]
    width = max(map(len, rows))
    rows[1] = rows[1][:-1] + image[: width - len(rows[1]) + 1]  # cut short
    rows = [row + [PAD] * (width - len(row)) for row in rows]
    first, second, third = adapter_for(model, prompts, **INTERLEAVED).segments(torch.tensor(rows))
    codes = torch.arange(16).view(4, 4)
    assert [part.tolist() for part in first[:1]] == [[41]]
    assert torch.equal(first[1], codes)
    assert first[2].tolist()[:2] == [42, 43]
    assert torch.equal(second[0], codes)
    assert second[1].tolist() == [44]
    assert len(second) == 2
    assert torch.equal(third[0], codes)
    assert torch.equal(third[1], codes)
    with pytest.raises(ValueError, match="Token 40 at code 2 of an image is no image token"):
        adapter_for(model, prompts[1:2]).image_codes(torch.tensor([[CODES[0], CODES[1], 40] + image[3:]]))


def test_what_cannot_work_is_said_at_the_door() -> None:
    model, tokenizer = tiny_anole(), tiny_tokenizer()
    ids = torch.tensor([[BOS, 40, BOI], [BOS, 40, 41]])
    with pytest.raises(ValueError, match=r"1 of 2 prompts end inside an image.*'interleaved': True"):
        adapter_for(model, ids)
    with pytest.raises(ValueError, match="`special_ids` has 'boi', which chameleon does not know"):
        adapter_for(model, special_ids={"boi": 3})
    with pytest.raises(ValueError, match=r"`special_ids\['end_image'\]` must be an id in \[0, 64\), got 64"):
        adapter_for(model, special_ids={"end_image": 64})
    with pytest.raises(ValueError, match="`height` must be 8 for this model, got 512"):
        image_prompts(model, tokenizer, "word1", height=512, width=512)
    with pytest.raises(ValueError, match="at least one non-empty text"):
        image_prompts(model, tokenizer, ["word1", " "])
    with pytest.raises(TypeError, match="a text or a list of texts"):
        image_prompts(model, tokenizer, [1])  # type: ignore[list-item]
    inputs = image_prompts(model, tokenizer, "word1")
    tokens = torch.cat([inputs["input_ids"], torch.tensor([CODES[:16]])], 1)
    with pytest.raises(ValueError, match="transformers' Chameleon holds no VQ decoder"):
        decode_images(model, inputs["input_ids"], tokens)
    with pytest.raises(ValueError, match="do not continue prompts of shape"):
        decode_images(model, tokens, inputs["input_ids"])
    other = tiny_vq(model)
    other.register_to_config(num_vq_embeddings=32)
    with pytest.raises(ValueError, match="`vq_model` has 32 codes, the target 24"):
        decode_images(model, inputs["input_ids"], tokens, other)


def test_special_tokens_may_have_other_ids() -> None:
    model = tiny_anole()
    for token in ("<racm3:break>", "<eoss>", "<reserved08706>"):
        del model.model.vocabulary_mapping.vocab_map[token]
    with pytest.raises(ValueError, match=r"has no '<racm3:break>', the begin-image token.*'begin_image': ..."):
        image_prompts(model, tiny_tokenizer(), "word1")
    options = {"special_ids": {"begin_image": 5, "end_image": 4}}
    inputs = image_prompts(model, tiny_tokenizer(), "word1", target_options=options)
    assert inputs["input_ids"].tolist() == [[BOS, 33, SEP, 5]]  # the separator is the tokenizer's
    inputs["max_new_tokens"] += 1
    result = lantern(model, tiny_head(model), inputs.pop("input_ids"), target_options=options, **inputs)
    assert result[0, -1] == 4
    assert all(token in CODE_OF for token in result[0, 4:-1].tolist())


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_users_script(interleaved: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_anole()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    torch.save({"state_dict": vq_weights(model)}, tmp_path / "vqgan.ckpt")
    tiny_head(model).save_pretrained(tmp_path / "head")
    places = ["--model", tmp_path / "model", "--vq", tmp_path / "vqgan.ckpt", "--head", tmp_path / "head"]
    asked = ["word1", "--interleaved", "--max-new-tokens", "120"] if interleaved else ["word1", "word2 word3"]
    arguments = [*asked, *map(str, places), "--out", str(tmp_path / "out"), "--neighbors", "5"]
    saved = runpy.run_path(str(EXAMPLE))["main"](arguments)
    out = capsys.readouterr().out
    if interleaved:
        assert "word" in out
        assert len(saved) == out.count("[")
    else:
        assert len(saved) == 2
        assert "passes" in out
    for path in saved:
        with Image.open(path) as image:
            assert image.size == (8, 8)
