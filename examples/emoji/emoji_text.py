"""The text side of the emoji model: a word tokenizer made from the training captions, and a small T5 encoder."""

from __future__ import annotations

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

PREFIX_LENGTH = 16


def build_tokenizer(captions: list[str], styles: list[str]) -> PreTrainedTokenizerFast:
    """One id per word of the training captions, `<unk>` for others; pads on the left, as LlamaGen's prefix does."""
    words = sorted({word for text in [*captions, *styles] for word in text.lower().split()})
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(["<pad>", "<unk>", *words])}, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(",", "removed")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        model_max_length=PREFIX_LENGTH,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_text_encoder(vocab_size: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocab_size,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=16,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=0,
        eos_token_id=None,
        is_encoder_decoder=False,
        use_cache=False,
        tie_word_embeddings=True,
    )
    return T5EncoderModel(config)


def encode_prompts(
    tokenizer: PreTrainedTokenizerFast, encoder: T5EncoderModel, prompts: list[str]
) -> tuple[Tensor, Tensor]:
    """Return features `(B, 16, d_model)`, zero where padded, and the mask `(B, 16)` int64."""
    batch = tokenizer(prompts, padding="max_length", max_length=PREFIX_LENGTH, truncation=True, return_tensors="pt")
    features = encoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
    return features * batch.attention_mask[..., None], batch.attention_mask


def training_prompt(caption: str, style: str, generator: torch.Generator) -> str:
    """Half of the prompts name the style, so that it can be asked for and left out."""
    return f"{caption}, {style}" if torch.rand((), generator=generator) < 0.5 else caption


def seen_and_unseen(captions: np.ndarray, held_out: np.ndarray, count: int, seed: int) -> tuple[list[str], list[str]]:
    """Draw `count` distinct training captions and `count` held-out ones."""
    rng = np.random.default_rng(seed)
    return tuple(  # type: ignore[return-value]
        [str(caption) for caption in rng.choice(sorted(set(captions[mask])), count, replace=False)]
        for mask in (~held_out, held_out)
    )
