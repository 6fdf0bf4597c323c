"""Lumina-mGPT: prompts with sizes, two hundred images of many shapes, pixels of the right size, the user's script."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_head, tiny_llama
from helpers import Case, Oracle
from PIL import Image
from test_sync import waits_per_round
from tiny_chameleon import (
    BOI,
    BOS,
    CODE_OF,
    CODES,
    EOI,
    NEWLINE,
    PAD,
    SEP,
    SIZE,
    SQUARE,
    VOCAB,
    next_in_lumina,
    plain_generate,
    tiny_anole,
    tiny_lumina,
    tiny_tokenizer,
    tiny_vq,
    vq_weights,
)
from torch import Tensor
from transformers import ChameleonForConditionalGeneration, LogitsProcessor, LogitsProcessorList

from lantern_hf import TREES, LanternConfig, NeighborTable, attach, decode_images, image_prompts, lantern_generate
from lantern_hf.targets import adapter_class, adapter_for
from lantern_hf.targets.lumina_mgpt import MAX_GRID, pack, unpack

EXAMPLE = Path(__file__).parent.parent / "examples" / "lumina_mgpt.py"


def lantern(model: Any, assistant: Any, input_ids: Tensor, **kwargs: Any) -> Any:
    """Decode with LANTERN, strictly unless told otherwise."""
    kwargs.setdefault("lantern_config", LanternConfig.strict("eagle_25"))
    return model.generate(input_ids, custom_generate=lantern_generate, assistant=assistant, **kwargs)


def check_image(tokens: list[int], height: int, width: int) -> None:
    """Tokens behind the size tokens: rows of codes closed by newlines, the end, and ends of the turn to the last."""
    rows, length = 2 * height, 2 * width + 1
    for row in range(rows):
        line = tokens[row * length : (row + 1) * length]
        assert all(token in CODE_OF for token in line[:-1]), line
        assert line[-1] == NEWLINE
    assert tokens[rows * length] == EOI
    assert set(tokens[rows * length + 1 :]) <= {SEP, PAD}


def test_prompts_are_the_published_ones() -> None:
    model = tiny_lumina()
    tokenizer = tiny_tokenizer()
    seen: list[str] = []

    class Listening:
        """Notes the texts."""

        sep_token_id = tokenizer.sep_token_id

        def __call__(self, texts: list[str], **kwargs: Any) -> Any:
            seen.extend(texts)
            return tokenizer(texts, **kwargs)

    inputs = image_prompts(
        model, Listening(), ["word1", "word2 word3"], guidance_scale=4.0, height=[8, 12], width=[12, 4]
    )
    assert seen == [
        "Generate an image of 12x8 according to the following prompt:\nword1",
        "Generate an image of 4x12 according to the following prompt:\nword2 word3",
    ]
    tails = [[BOI, SIZE + 2, SIZE + 3], [BOI, SIZE + 3, SIZE + 1]]
    for row, tail in zip(inputs["input_ids"].tolist(), tails, strict=True):
        assert row[-4:] == [SEP, *tail]
        assert [token for token in row if token != PAD][0] == BOS
    assert inputs["negative_prompt_ids"].tolist() == tails
    assert (inputs["max_new_tokens"], inputs["eos_token_id"]) == (4 * 7 + 1, SEP)
    ids, mask = adapter_for(model, inputs["input_ids"]).unconditional(inputs["input_ids"], None)
    assert (ids.tolist(), mask.tolist()) == (tails, [[1] * 3] * 2)
    default = image_prompts(model, tokenizer, "word1")
    assert default["input_ids"][0, -2:].tolist() == [SIZE + 24] * 2  # 768 pixels of a published model


def test_unconditional_rows_are_the_images_alone() -> None:
    rows = [[PAD, BOS, 40, SEP, BOI], [BOS, SEP, BOI, SIZE + 1, SIZE + 2]]
    ids, mask = adapter_for(tiny_lumina(), torch.tensor(rows)).unconditional(torch.tensor(rows), None)
    assert ids.tolist() == [[PAD, PAD, BOI], rows[1][-3:]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]


def test_published_sizes_give_published_lengths() -> None:
    offset = pack(torch.tensor([2]), 24, 24)
    adapter = adapter_for(tiny_lumina(), torch.tensor([[BOS, BOI]]))
    forced = []
    while not forced or forced[-1] != EOI:
        forced.append(adapter.forced(offset).item())
        offset = adapter.advance(offset, torch.tensor([CODES[0]]))
    assert len(forced) + 3 == 2356  # with the begin-image and both size tokens, as published for 768 x 768
    assert [i for i, token in enumerate(forced) if token == NEWLINE] == list(range(48, 2352, 49))
    assert [field.item() for field in unpack(offset)] == [2355, 24, 24]


def test_two_hundred_images_are_well_formed(neighbors: NeighborTable) -> None:
    model = tiny_lumina()
    head, generator = tiny_head(model), torch.Generator().manual_seed(0)
    shapes = torch.randint(1, 4, (200, 2), generator=generator).tolist()
    relaxed = (LanternConfig("wide_57", 8, lam=6.0), LanternConfig("eagle_25", 8, delta=0.4))
    for block in range(4):
        sizes = shapes[block * 50 : (block + 1) * 50]
        inputs = image_prompts(
            model,
            tiny_tokenizer(),
            [f"word{i % 16}" for i in range(50)],
            guidance_scale=3.0,
            height=[h * SQUARE for h, _ in sizes],
            width=[w * SQUARE for _, w in sizes],
        )
        ids = inputs.pop("input_ids")
        options: dict[str, Any] = {}
        if block % 2:  # the size tokens are left to the call
            ids, inputs["attention_mask"] = ids[:, :-2], inputs["attention_mask"][:, :-2]
            inputs["negative_prompt_ids"] = torch.tensor([[BOI]] * 50)
            inputs["max_new_tokens"] += 2
            options = {"height": [h * SQUARE for h, _ in sizes], "width": [w * SQUARE for _, w in sizes]}
        result = lantern(
            model,
            head,
            ids,
            **inputs,
            lantern_config=relaxed[block // 2],
            neighbors=neighbors,
            target_options=options,
            generator=torch.Generator().manual_seed(block),
            do_sample=True,
            top_k=12,
        )
        for row, (height, width) in zip(result[:, ids.shape[1] :].tolist(), sizes, strict=True):
            if block % 2:
                assert row[:2] == [SIZE + height, SIZE + width]
                row = row[2:]
            check_image(row, height, width)
        codes = adapter_for(model, ids).image_codes(result[:, ids.shape[1] :])
        assert [[tuple(image.shape) for image in row] for row in codes] == [[(2 * h, 2 * w)] for h, w in sizes]


class SmallSizes(LogitsProcessor):
    """Keeps images small: no size above 2."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, SIZE + 3 :] = -torch.inf
        return scores


def test_the_model_chooses_sizes_where_nobody_says() -> None:
    model = tiny_lumina()
    ids = torch.tensor([[BOS, 40 + row, SEP, BOI] for row in range(4)])
    processors = LogitsProcessorList([SmallSizes()])
    settings = {"negative_prompt_ids": torch.tensor([[BOI]] * 4), "guidance_scale": 3.0, "max_new_tokens": 23}
    settings |= {"eos_token_id": SEP, "logits_processor": processors}
    expected = plain_generate(model, next_in_lumina, input_ids=ids, do_sample=False, **settings)
    assert torch.equal(lantern(model, tiny_head(model), ids, do_sample=False, **settings), expected)
    sampled = lantern(model, tiny_head(model), ids.repeat(4, 1), do_sample=True, temperature=8.0, **settings)
    seen = set()
    for row in sampled[:, 4:].tolist():
        height, width = (token - SIZE for token in row[:2])
        assert {height, width} <= {1, 2}
        seen.add((height, width))
        check_image(row[2:], height, width)
    assert len(seen) > 1


def test_text_and_images_of_any_size_follow_one_another() -> None:
    class Begin(SmallSizes):
        """And lets an image begin at every fifth place."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            scores = super().__call__(input_ids, scores)
            if input_ids.shape[1] % 5 == 0:
                scores[:, BOI] += 1e3
            return scores

    model = tiny_lumina()
    ids = torch.tensor([[BOS, 40, 41, SEP], [BOI, SIZE + 1, SIZE + 2, CODES[4]], [BOS, 42, SEP, BOI]])
    settings = {"do_sample": False, "max_new_tokens": 70, "logits_processor": LogitsProcessorList([Begin()])}
    expected = plain_generate(model, next_in_lumina, interleaved=True, input_ids=ids, **settings)
    options = {"interleaved": True}
    parts = adapter_for(model, ids, **options).segments(expected[:, 4:])
    assert all({1, 2} == {part.ndim for part in row} for row in parts)
    for assistant in (Oracle(TREES["eagle_25"], expected, list(range(VOCAB)), VOCAB, 0.2), tiny_head(model)):
        assert torch.equal(lantern(model, assistant, ids, target_options=options, **settings), expected)


def test_pixels_have_the_size_asked_for(neighbors: NeighborTable) -> None:
    model = tiny_lumina()
    sizes = ([8, 12, 4], [12, 4, 4])
    inputs = image_prompts(model, tiny_tokenizer(), ["word1", "word2", "word3"], height=sizes[0], width=sizes[1])
    ids = inputs["input_ids"]
    attach(model, assistant=tiny_head(model), neighbors=neighbors)
    sequences = model.generate(**inputs, lantern_config=LanternConfig(neighborhood_size=5), do_sample=True)
    images = decode_images(model, ids, sequences, tiny_vq(model))
    assert [[image.size for image in row] for row in images] == [[(12, 8)], [(4, 12)], [(4, 4)]]


@pytest.mark.parametrize("options", [{}, {"height": [8, 4], "width": [4, 8]}, {"interleaved": True}])
def test_a_round_waits_no_more(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, neighbors: NeighborTable
) -> None:
    model = tiny_lumina()
    inputs = {"input_ids": torch.tensor([[BOS, 40, SEP, BOI], [BOS, 41, SEP, BOI]])}
    inputs |= {"negative_prompt_ids": torch.tensor([[BOI]] * 2), "guidance_scale": 3.0}
    case = Case("lumina", model, model, inputs)
    config = LanternConfig("eagle_25", 5, lam=3.0)
    kwargs = {"lantern_config": config, "neighbors": neighbors, "target_options": options}
    rounds = waits_per_round(monkeypatch, case, tiny_head(model), do_sample=True, top_k=8, **kwargs)
    assert max(len(names) for names in rounds) <= 2, rounds


def test_who_is_served_as_lumina(tmp_path: Path) -> None:
    assert adapter_class(tiny_lumina()).family == "lumina_mgpt"
    assert adapter_class(tiny_anole()).family == "chameleon"
    assert adapter_class(tiny_anole(), "lumina_mgpt").family == "lumina_mgpt"
    model = tiny_lumina()
    model.config.lantern_family = "lumina_mgpt"  # saving writes the name of the class over the checkpoint's
    model.save_pretrained(tmp_path)
    loaded = ChameleonForConditionalGeneration.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["ChameleonForConditionalGeneration"]
    assert adapter_class(loaded).family == "lumina_mgpt"


def test_the_codebook_is_never_the_models(neighbors: NeighborTable) -> None:
    model = tiny_lumina()
    assert adapter_for(model).codebook() is None
    inputs = image_prompts(model, tiny_tokenizer(), "word1", height=4, width=4)
    with pytest.raises(ValueError, match="needs a neighbor table, and neither the head nor the target"):
        lantern(model, tiny_head(model), **inputs, lantern_config=LanternConfig())


def test_what_cannot_work_is_said_at_the_door() -> None:
    model, tokenizer = tiny_lumina(), tiny_tokenizer()
    with pytest.raises(ValueError, match="`width` must be a multiple of 4 pixels from 4 to 256, got 10"):
        image_prompts(model, tokenizer, "word1", height=8, width=10)
    with pytest.raises(ValueError, match="`height` has 3 values for 2 prompts"):
        image_prompts(model, tokenizer, ["word1", "word2"], height=[4, 4, 4], width=4)
    with pytest.raises(ValueError, match="`height` and `width` come together, got height=8 and width=None"):
        adapter_for(model, torch.tensor([[BOS, BOI]]), height=8)
    ids = torch.tensor([[BOS, BOI, SIZE + 2, SIZE + 3]])
    assert adapter_for(model, ids, height=8, width=12).structured
    with pytest.raises(ValueError, match="Prompt 0 has width token 3 behind its begin-image token, 4 was asked for"):
        adapter_for(model, ids, height=8, width=16)
    with pytest.raises(ValueError, match=f"height token 0 behind its begin-image token, sizes are 1 to {MAX_GRID}"):
        adapter_for(model, torch.tensor([[BOS, BOI, 40]]))
    adapter = adapter_for(model, torch.tensor([[BOI, SIZE + 1, SIZE + 1]]))
    with pytest.raises(ValueError, match="has a row that no newline"):
        adapter.image_codes(torch.tensor([[CODES[0]] * 6]))
    with pytest.raises(ValueError, match="are no sizes"):
        adapter_for(model, torch.tensor([[BOI]])).image_codes(torch.tensor([[CODES[0]] * 6]))
    with pytest.raises(ValueError, match="serves models of type chameleon, but this LlamaForCausalLM is of type llama"):
        adapter_for(tiny_llama(), family="lumina_mgpt")


def test_the_users_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_lumina()
    model.config.lantern_family = "lumina_mgpt"
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    torch.save({"state_dict": vq_weights(model)}, tmp_path / "vqgan.ckpt")
    tiny_head(model).save_pretrained(tmp_path / "head")
    places = ["--model", tmp_path / "model", "--vq", tmp_path / "vqgan.ckpt", "--head", tmp_path / "head"]
    arguments = ["word1", "word2 word3", "--height", "8", "--width", "12", *map(str, places)]
    arguments += ["--out", str(tmp_path / "out"), "--neighbors", "5"]
    saved = runpy.run_path(str(EXAMPLE))["main"](arguments)
    assert len(saved) == 2
    for path in saved:
        with Image.open(path) as image:
            assert image.size == (12, 8)
    assert "passes" in capsys.readouterr().out
