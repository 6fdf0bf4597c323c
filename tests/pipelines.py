"""A tiny random pipeline with the parts of the embedded one: words, T5, LlamaGen, VQ, head."""

from __future__ import annotations

import torch
from conftest import NUM_CODES, tiny_head, tiny_llamagen
from diffusers import VQModel
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from lantern_hf import LanternPipeline, LlamaGenConfig, LlamaGenForConditionalGeneration

PREFIX = 6
WORDS = ("<pad>", "<unk>", "a", "red", "blue", "fox", "bird")


def tiny_tokenizer(padding_side: str = "left") -> PreTrainedTokenizerFast:
    """One id a word; commas vanish."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(",", "removed")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side=padding_side,
        model_max_length=PREFIX,
        model_input_names=["input_ids", "attention_mask"],
    )


def tiny_vq() -> VQModel:
    """Random VQ model with 24 codes, two pixels a code."""
    torch.manual_seed(3)
    return VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        vq_embed_dim=4,
        num_vq_embeddings=NUM_CODES,
        norm_num_groups=4,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    ).eval()


def tiny_text_encoder() -> T5EncoderModel:
    """One random T5 layer."""
    torch.manual_seed(4)
    return T5EncoderModel(
        T5Config(vocab_size=len(WORDS), d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=3, eos_token_id=None)
    ).eval()


def tiny_pipeline(head: bool = True, padding_side: str = "left") -> LanternPipeline:
    """Text to 16 x 16 pixels."""
    target = tiny_llamagen()
    pipe = LanternPipeline(
        target,
        tiny_vq(),
        tiny_tokenizer(padding_side),
        tiny_text_encoder(),
        tiny_head(target) if head else None,
        guidance_scale=2.0,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_class_pipeline() -> LanternPipeline:
    """Five classes to 8 x 8 pixels, without text parts."""
    torch.manual_seed(5)
    config = LlamaGenConfig(
        codebook_size=NUM_CODES,
        grid_size=[4, 4],
        conditioning="class",
        num_classes=5,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,
    )
    target = LlamaGenForConditionalGeneration(config).eval()
    pipe = LanternPipeline(target, tiny_vq(), draft_head=tiny_head(target))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seed(value: int = 0) -> torch.Generator:
    """A fresh generator."""
    return torch.Generator().manual_seed(value)
