"""Captions and classes to what LlamaGen's prefix reads. Knows tokenizers and text encoders, no target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lantern_hf._placement import execution_device


@dataclass
class CaptionEncoder:
    """The two parts that read a caption, in the place of other families' processor."""

    tokenizer: PreTrainedTokenizerBase
    text_encoder: Any

    def encode(self, prompts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
        """Encode prompts, equal ones once, as `encode_prompts` does, where the encoder runs."""
        texts = list(dict.fromkeys(prompts))
        device = execution_device(self.text_encoder)
        features, mask = encode_prompts(self.tokenizer, self.text_encoder, texts, length, device)
        rows = torch.tensor([texts.index(prompt) for prompt in prompts], device=features.device)
        return features[rows], mask[rows]


def check_lengths(tokenizer: PreTrainedTokenizerBase, prompts: list[str], limit: int) -> None:
    """Refuse prompts that are empty or that the prefix cannot hold.

    Raises:
        ValueError: A prompt has no token, or more than `limit`.
    """
    words = tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = tokenizer(prompts, verbose=False)["input_ids"]
    for text, own, ids in zip(prompts, words, tokens, strict=True):
        if not own:
            raise ValueError(f"`prompt` {text!r} is empty: it has 0 tokens. Describe the image in at least one word.")
        if len(ids) > limit:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise ValueError(
                f"`prompt` {shown!r} has {len(ids)} tokens, this model reads at most {limit}. "
                f"Shorten it by {len(ids) - limit}."
            )


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, encoder: PreTrainedModel, prompts: list[str], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Encode prompts so that each ends at the last prefix position, as LlamaGen wants it.

    Args:
        tokenizer: Pads on either side.
        encoder: Text encoder.
        prompts: Texts of at most `length` tokens.
        length: Prefix positions P.
        device: Where the encoder runs.

    Returns:
        Features `(B, P, caption_dim)`, zero where padded, and the mask `(B, P)` int64.
    """
    batch = tokenizer(prompts, padding="max_length", max_length=length, truncation=True, return_tensors="pt").to(device)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    features = encoder(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
    if tokenizer.padding_side == "right":  # flan-t5 does: published LlamaGen rolls the features to the right
        shift = length - mask.sum(1, keepdim=True)
        index = (torch.arange(length, device=mask.device) - shift) % length  # (B, P)
        features, mask = features.gather(1, index[..., None].expand_as(features)), mask.gather(1, index)
    return features, mask


def class_ids(labels: int | Sequence[int] | Tensor, num_classes: int, codebook_size: int) -> Tensor:
    """Turn class labels into prefix ids, `(B, 1)` int64.

    Raises:
        ValueError: A label is no whole number in `[0, num_classes)`, or there is none.
    """
    values = labels.tolist() if isinstance(labels, Tensor) else labels
    values = [values] if isinstance(values, int) else list(values)
    wrong = [v for v in values if not isinstance(v, int) or isinstance(v, bool) or not 0 <= v < num_classes]
    if wrong or not values:
        raise ValueError(
            f"`class_labels` must be whole numbers in [0, {num_classes}), got {wrong[0]!r}."
            if wrong
            else "`class_labels` is empty. Pass at least one label."
        )
    return codebook_size + torch.tensor(values)[:, None]
