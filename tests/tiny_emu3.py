"""A tiny Emu3 of the real classes and its real processor, built offline; for the tests of Emu3 and of pipelines."""

from __future__ import annotations

import dataclasses
import string
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    PreTrainedTokenizerFast,
)

from lantern_hf import Emu3ImageLayout

NUM_CODES = 24
SPECIAL = {
    "pad": "<|endoftext|>",
    "bos": "<|extra_203|>",
    "eos": "<|extra_204|>",
    "image_token": "<image>",
    "boi_token": "<|image start|>",
    "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>",
    "eof_token": "<|extra_201|>",
    "eol": "<|extra_200|>",
}


def emu3_vocabulary(stride: int = 7) -> dict[str, int]:
    """Specials, characters and 24 visual tokens, whose ids are in the order of their codes with a stride of 1 only."""
    names = [*SPECIAL.values(), *string.digits, *string.ascii_lowercase, "*", ".", ",", "\u0120"]
    vocabulary = {name: index for index, name in enumerate(names)}
    first = len(vocabulary)
    return vocabulary | {
        f"<|visual token {code:06d}|>": first + (code * stride) % NUM_CODES for code in range(NUM_CODES)
    }


def emu3_processor() -> Emu3Processor:
    """The real processor over a tokenizer of characters."""
    vocabulary = emu3_vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ("image_token", "boi_token", "eoi_token", "image_wrapper_token", "eof_token")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL["pad"],
        bos_token=SPECIAL["bos"],
        eos_token=SPECIAL["eos"],
        padding_side="left",
        extra_special_tokens={name: SPECIAL[name] for name in names},
        additional_special_tokens=[SPECIAL["eol"]],
    )
    return Emu3Processor(Emu3ImageProcessor(), fast)


def tiny_emu3(attn_implementation: str = "sdpa", stride: int = 7) -> Emu3ForConditionalGeneration:
    """Emu3 with two layers, grouped-query attention and the real VQ model in small."""
    torch.manual_seed(4)
    vocabulary = emu3_vocabulary(stride)
    config = Emu3Config(
        vq_config={
            "codebook_size": NUM_CODES,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1],
            "num_res_blocks": 1,
            "hidden_size": 32,
        },
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "initializer_range": 0.4,
            "attention_dropout": 0.0,
            "pad_token_id": vocabulary[SPECIAL["pad"]],
            "bos_token_id": vocabulary[SPECIAL["bos"]],
            "eos_token_id": vocabulary[SPECIAL["eos"]],
        },
        vocabulary_map=vocabulary,
        attn_implementation=attn_implementation,
    )
    return Emu3ForConditionalGeneration(config).eval()


def image_inputs(processor: Emu3Processor, texts: list[str], pixels: tuple[int, int] = (32, 32)) -> dict:
    """Arguments of `generate` for images of `(height, width)` pixels, prompts padded on the left; `image_sizes` too."""
    height, width = pixels
    return processor(
        text=texts,
        return_for_image_generation=True,
        ratio=f"{width}:{height}",
        image_area=height * width,
        padding=True,
        return_tensors="pt",
    )


def negative_inputs(processor: Emu3Processor, text: str, rows: int, pixels: tuple[int, int] = (32, 32)) -> dict:
    """Arguments of `generate` for a negative prompt."""
    inputs = image_inputs(processor, [text] * rows, pixels)
    return {
        "negative_prompt_ids": inputs["input_ids"],
        "negative_prompt_attention_mask": inputs["attention_mask"],
    }


def arguments(
    processor: Emu3Processor, texts: list[str], pixels: tuple[int, int] = (32, 32), scale: float = 3.0
) -> dict:
    """Arguments of `generate` with guidance and a negative prompt; `image_sizes` is among them."""
    inputs = dict(image_inputs(processor, texts, pixels))
    return inputs | negative_inputs(processor, "low", len(texts), pixels) | {"guidance_scale": 3.0}


class ByPlace:
    """A user's own `prefix_allowed_tokens_fn`, as the documentation of Emu3 shows one; counts how often it is asked."""

    def __init__(self, model: Emu3ForConditionalGeneration, height: int, width: int):
        self.visual = model.model.vocabulary_mapping.image_tokens
        self.height, self.width, self.asked = height, width, []
        self.ids = {name: emu3_vocabulary()[token] for name, token in SPECIAL.items()}

    def __call__(self, batch_id: int, input_ids: Tensor) -> Any:
        self.asked.append(batch_id)
        place = len(input_ids) - int((input_ids == self.ids["image_wrapper_token"]).nonzero()[0])
        if place <= self.height * (self.width + 1):
            return self.visual if place % (self.width + 1) else (self.ids["eol"],)
        ends = {1: "eof_token", 2: "eoi_token", 3: "eos"}
        return (self.ids[ends.get(place - self.height * (self.width + 1), "pad")],)


class Unasked(Emu3ImageLayout):
    """A layout that must not be called."""

    def __call__(self, batch_id: int, input_ids: Tensor) -> list[int]:
        raise AssertionError("the adapter decides by place")


def check_structure(tokens: list[int], height: int, width: int) -> None:
    """Every row end, the ends of frame and image, the length, and nothing but visual tokens elsewhere."""
    ids = {name: emu3_vocabulary()[token] for name, token in SPECIAL.items()}
    visual = {token for name, token in emu3_vocabulary().items() if name.startswith("<|visual")}
    for row in range(height):
        line = tokens[row * (width + 1) : (row + 1) * (width + 1)]
        assert set(line[:-1]) <= visual
        assert line[-1] == ids["eol"]
    ends = tokens[height * (width + 1) :]
    assert ends[:3] == [ids["eof_token"], ids["eoi_token"], ids["eos"]]
    assert set(ends[3:]) <= {ids["pad"]}


def published_helper(layout: Emu3ImageLayout, narrow: bool = False) -> Any:
    """What `build_prefix_constrained_fn` of the published processor gives: attributes, and a memory of beginnings.

    With `narrow` it looks the same, but allows three visual tokens at the beginning of a row.
    """

    class Helper(SimpleNamespace):
        def __call__(self, batch_id: int, input_ids: Tensor) -> Any:
            begun = self.seen.setdefault(batch_id, (input_ids == self.img_token).nonzero()[0][0])
            pick = batch_id if len(self.height) > 1 else 0
            own = dataclasses.replace(layout, sizes=((int(self.height[pick]), int(self.width[pick])),))
            place = (len(input_ids) - int(begun) - 1) % (int(self.width[pick]) + 1)
            return self.visual_tokens[:3] if narrow and not place else own(0, input_ids[begun:])

    names = ("img_token", "eol_token", "eof_token", "eoi_token", "eos_token", "pad_token")
    ids = (layout.image_token_id, *layout.end_ids, layout.pad_id)
    height, width = torch.tensor(layout.sizes).unbind(1)
    known = {"height": height, "width": width, "visual_tokens": list(layout.visual_ids), "seen": {}}
    return Helper(**known, **dict(zip(names, ids, strict=True)))
