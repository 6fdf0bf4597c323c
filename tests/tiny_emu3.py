"""A tiny Emu3 of the real classes and its real processor, built offline; for the tests of Emu3 and of pipelines."""

from __future__ import annotations

import string

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Emu3Config,
    Emu3ForConditionalGeneration,
    Emu3ImageProcessor,
    Emu3Processor,
    PreTrainedTokenizerFast,
)

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


def emu3_vocabulary() -> dict[str, int]:
    """Specials, characters and 24 visual tokens whose ids are not in the order of their codes."""
    names = [*SPECIAL.values(), *string.digits, *string.ascii_lowercase, "*", ".", ",", "\u0120"]
    vocabulary = {name: index for index, name in enumerate(names)}
    first = len(vocabulary)
    return vocabulary | {f"<|visual token {code:06d}|>": first + (code * 7) % NUM_CODES for code in range(NUM_CODES)}


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


def tiny_emu3(attn_implementation: str = "sdpa") -> Emu3ForConditionalGeneration:
    """Emu3 with two layers, grouped-query attention and the real VQ model in small."""
    torch.manual_seed(4)
    vocabulary = emu3_vocabulary()
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
