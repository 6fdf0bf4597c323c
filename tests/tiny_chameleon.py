"""Tiny Anole and Lumina-mGPT of the real classes, a VQ model that fits them, a tokenizer, and what plain decoding does.

The structure of images is written down here a second time, as a logits processor that reads every prefix on the host,
so that the adapters are compared with something that shares nothing with them.
"""

from __future__ import annotations

from typing import Any

import torch
from conftest import NUM_CODES, chameleon_vocabulary
from diffusers import VQModel
from helpers import UnblankedChameleon
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
)

from lantern_hf.models.vq import chameleon_vq

BOS, PAD, EOS, BOI, EOI, NEWLINE, SEP, SIZE = 0, 1, 2, 3, 4, 6, 7, 48
VOCAB = 64
SIDE = 4  # codes along a side of an Anole image
SQUARE = 4  # pixels along a side of Lumina's squares of two by two codes
CODES = [8 + (code * 7) % NUM_CODES for code in range(NUM_CODES)]  # token of each code
CODE_OF = {token: code for code, token in enumerate(CODES)}


def vocabulary() -> dict[str, int]:
    """The vocabulary of the other tests, with the reserved tokens of Lumina-mGPT."""
    reserved = {"<reserved08799>": NEWLINE, "<reserved08706>": SEP}
    sizes = {f"<reserved{8800 + n:05d}>": SIZE + n for n in range(VOCAB - SIZE)}
    return chameleon_vocabulary() | reserved | sizes


def tiny_anole(attn_implementation: str = "sdpa") -> ChameleonForConditionalGeneration:
    """Chameleon with images of 4 x 4 codes, 8 x 8 pixels."""
    torch.manual_seed(2)
    config = ChameleonConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.4,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=None,
        vocabulary_map=vocabulary(),
        vq_config={
            "embed_dim": 4,
            "num_embeddings": NUM_CODES,
            "latent_channels": 4,
            "resolution": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        attn_implementation=attn_implementation,
    )
    return ChameleonForConditionalGeneration(config).eval()


def tiny_lumina(attn_implementation: str = "sdpa") -> ChameleonForConditionalGeneration:
    """The same, as a checkpoint of Lumina-mGPT says what it is."""
    model = tiny_anole(attn_implementation)
    model.config.architectures = ["ChameleonXLLMXForConditionalGeneration"]
    return model


def unblanked(model: ChameleonForConditionalGeneration) -> UnblankedChameleon:
    """The model with a forward that keeps the logits of image tokens, for plain decoding."""
    plain = UnblankedChameleon(model.config).eval()
    plain.load_state_dict(model.state_dict())
    return plain


def next_in_anole(tail: list[int]) -> list[int]:
    """What may follow `tail`, the tokens behind a begin-image token: 16 codes, end of image, end of sequence."""
    return CODES if len(tail) < SIDE**2 else [EOI] if len(tail) == SIDE**2 else [EOS]


def next_in_lumina(tail: list[int]) -> list[int]:
    """Two sizes, rows of codes closed by newlines, end of image, end of turn."""
    if len(tail) < 2:
        return list(range(SIZE + 1, VOCAB))
    height, width = (2 * (token - SIZE) for token in tail[:2])
    body = len(tail) - 2
    if body < height * (width + 1):
        return [NEWLINE] if body % (width + 1) == width else CODES
    return [EOI] if body == height * (width + 1) else [SEP]


class PublishedStructure(LogitsProcessor):
    """Lets only those tokens pass that may follow, read off the prefix of every row."""

    def __init__(self, follow: Any, interleaved: bool = False):
        self.follow, self.interleaved = follow, interleaved

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        masked = torch.full_like(scores, -torch.inf)
        for row, ids in enumerate(input_ids.tolist()):
            begin = max((place for place, token in enumerate(ids) if token == BOI), default=-1)
            inside = begin >= 0 and not (self.interleaved and EOI in ids[begin:])
            allowed = self.follow(ids[begin + 1 :]) if inside else sorted(set(range(VOCAB)) - set(CODES))
            masked[row, allowed] = scores[row, allowed]
        return masked


def plain_generate(model: Any, follow: Any, *, interleaved: bool = False, **kwargs: Any) -> Tensor:
    """Plain decoding of the structure, one token a pass, by transformers."""
    own = LogitsProcessorList([PublishedStructure(follow, interleaved), *kwargs.pop("logits_processor", [])])
    return unblanked(model).generate(logits_processor=own, **kwargs)


def vq_weights(model: ChameleonForConditionalGeneration) -> dict[str, Tensor]:
    """The model's own VQ encoder and codebook with a random decoder, under the names of Meta's checkpoint."""
    torch.manual_seed(3)
    own = dict(model.model.vqmodel.state_dict())
    own["decoder.conv_in.weight"], own["decoder.conv_in.bias"] = torch.randn(32, 4, 3, 3) * 0.2, torch.zeros(32)
    own["decoder.conv_out.weight"], own["decoder.conv_out.bias"] = torch.randn(3, 32, 3, 3) * 0.05, torch.zeros(3)
    for name in ("mid.block_1", "mid.block_2", *(f"up.{level}.block.{i}" for level in (0, 1) for i in (0, 1))):
        for layer in ("conv1", "conv2"):
            own |= {f"decoder.{name}.{layer}.weight": torch.randn(32, 32, 3, 3) * 0.05}
            own |= {f"decoder.{name}.{layer}.bias": torch.zeros(32)}
        for layer in ("norm1", "norm2"):
            own |= {f"decoder.{name}.{layer}.weight": torch.ones(32), f"decoder.{name}.{layer}.bias": torch.zeros(32)}
    for layer in ("q", "k", "v", "proj_out"):
        own |= {f"decoder.mid.attn_1.{layer}.weight": torch.randn(32, 32, 1, 1) * 0.2}
        own |= {f"decoder.mid.attn_1.{layer}.bias": torch.zeros(32)}
    for layer in ("mid.attn_1.norm", "norm_out"):
        own |= {f"decoder.{layer}.weight": torch.ones(32), f"decoder.{layer}.bias": torch.zeros(32)}
    own |= {"decoder.up.1.upsample.conv.weight": torch.randn(32, 32, 3, 3) * 0.05}
    own |= {"decoder.up.1.upsample.conv.bias": torch.zeros(32)}
    return own


def tiny_vq(model: ChameleonForConditionalGeneration) -> VQModel:
    """The whole of the model's VQ, encoder and decoder."""
    return chameleon_vq(vq_weights(model))


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One id a word, of the 16 words that the vocabulary has; others are `word0`."""
    tokenizer = Tokenizer(WordLevel(vocabulary(), unk_token="word0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>", sep_token="<reserved08706>"
    )
