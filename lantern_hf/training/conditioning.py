"""From what people write and draw to what a target reads: prompts to arguments of `generate`, images to tokens.

A conditioner speaks for one target. Rows are dicts: `"prompt"` (text) or `"class_label"` (a number) say what the target
is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf._pipeline_prompts import class_ids, encode_prompts
from lantern_hf.models.vq import encode_pixels
from lantern_hf.pipeline import LanternPipeline
from lantern_hf.targets import adapter_for
from lantern_hf.training.fingerprint import weights_fingerprint

__all__ = ["Conditioner", "PipelineConditioner", "ProcessorConditioner"]

Row = Mapping[str, Any]


class Conditioner(Protocol):
    """What training asks of a model's other parts.

    Attributes:
        target: The target.
        num_tokens: Tokens of one image; None where the target generates none.
        asks: What rows ask by, `"prompt"` or `"class_label"`.
    """

    target: PreTrainedModel
    num_tokens: int | None
    asks: str

    @property
    def fingerprint(self) -> str:
        """A hash of what turns prompts and images into what the target reads."""

    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """Give the arguments of the target's `generate` for each row, without a batch dimension, on the CPU.

        Raises:
            ValueError: A row asks for something that the target cannot be asked for.
        """

    def encode_images(self, images: Sequence[PIL.Image.Image]) -> Tensor:
        """Give the token ids of images, `(n, num_tokens)` int64 on the CPU.

        Raises:
            ValueError: The model cannot read images.
        """


class PipelineConditioner:
    """Conditioner of a `LanternPipeline`: its tokenizer and text encoder, or its classes, and its VQ model.

    Prompts longer than the prefix are cut, as LlamaGen's training cut them.

    Args:
        pipe: The pipeline, on its device.
    """

    def __init__(self, pipe: LanternPipeline):
        self._pipe = pipe
        self.target: PreTrainedModel = pipe.transformer
        self.num_tokens: int | None = pipe.transformer.config.num_image_tokens
        self.asks = "class_label" if pipe._adapter.asks == "class_labels" else "prompt"

    @property
    def fingerprint(self) -> str:
        """See `Conditioner`."""
        parts = [self._pipe.vq_model, *([] if self._pipe.text_encoder is None else [self._pipe.text_encoder])]
        return " ".join(weights_fingerprint(part) for part in parts)

    @torch.no_grad()
    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """See `Conditioner`."""
        pipe, config = self._pipe, self._pipe.transformer.config
        if self.asks == "class_label":
            ids = class_ids([_field(row, "class_label") for row in rows], config.num_classes, config.codebook_size)
            return [{"input_ids": row} for row in ids]
        if pipe.tokenizer is None or pipe.text_encoder is None:
            raise ValueError("This pipeline has no `tokenizer` or no `text_encoder`, so it cannot read a prompt.")
        prompts = [_prompt(row) for row in rows]
        device = pipe.text_encoder.device
        features, masks = encode_prompts(pipe.tokenizer, pipe.text_encoder, prompts, config.prefix_length, device)
        for prompt, filled in zip(prompts, masks.any(1).tolist(), strict=True):
            if not filled:
                raise ValueError(f"`prompt` {prompt!r} is empty: it has 0 tokens. Describe the image, or drop the row.")
        ids = pipe.transformer.caption_ids(1)[0].cpu()
        columns = zip(features.cpu(), masks.cpu(), strict=True)
        return [{"input_ids": ids, "attention_mask": mask, "caption_embeds": feature} for feature, mask in columns]

    def encode_images(self, images: Sequence[PIL.Image.Image]) -> Tensor:
        """See `Conditioner`; images are scaled and cut to the model's size."""
        vq: Any = self._pipe.vq_model
        height, width = self.target.config.grid_size
        factor = 2 ** (len(vq.config.block_out_channels) - 1)
        fitted = [fit_image(image, width * factor, height * factor) for image in images]
        pixels = torch.stack([torch.from_numpy(np.asarray(image).copy()) for image in fitted])
        codes = encode_pixels(vq, pixels.permute(0, 3, 1, 2).float() / 127.5 - 1)
        return adapter_for(self.target).token_ids(codes.flatten(1)).cpu()


class ProcessorConditioner:
    """Conditioner of a transformers model and its processor or tokenizer.

    Where the target draws images behind a begin-image token (Chameleon, Anole), prompts become
    `[bos] text [separator] [begin-image]`; any other target reads the text as the tokenizer gives it.

    Args:
        target: The target.
        processor: Processor, or tokenizer of a target without images.
    """

    asks = "prompt"

    def __init__(self, target: PreTrainedModel, processor: Any):
        self.target = target
        self._tokenizer = getattr(processor, "tokenizer", processor)
        self._image_processor = getattr(processor, "image_processor", None)
        begin = getattr(adapter_for(target), "begin_image_id", None)
        separator = None if begin is None else getattr(self._tokenizer, "sep_token_id", None)
        self._tail = [token for token in (separator, begin) if token is not None]
        self.num_tokens = None if begin is None else _vq_tokens(target.config.vq_config)

    @property
    def fingerprint(self) -> str:
        """See `Conditioner`; the target's own parts read images."""
        return f"{len(self._tokenizer)} {self._tail}"

    def encode_prompts(self, rows: Sequence[Row]) -> list[dict[str, Tensor]]:
        """See `Conditioner`."""
        bos, encoded = self._tokenizer.bos_token_id, []
        for row in rows:
            ids = list(self._tokenizer(_prompt(row))["input_ids"])
            if self._tail and bos is not None and ids[:1] != [bos]:
                ids = [bos, *ids]
            if not ids:
                raise ValueError(f"`prompt` {row['prompt']!r} is empty: it has 0 tokens. Drop the row.")
            encoded.append({"input_ids": torch.tensor(ids + self._tail)})
        return encoded

    @torch.no_grad()
    def encode_images(self, images: Sequence[PIL.Image.Image]) -> Tensor:
        """See `Conditioner`; the model's own image processor prepares the pixels."""
        if self._image_processor is None or not hasattr(self.target, "get_image_tokens"):
            raise ValueError(
                f"{type(self.target).__name__} with this processor cannot turn images into tokens. Train on token "
                "sequences, or on sequences the target generates itself: lantern-hf distil."
            )
        prepared = self._image_processor([flatten_image(image) for image in images], return_tensors="pt")
        pixels = prepared["pixel_values"].to(self.target.device, self.target.dtype)
        target: Any = self.target
        return target.get_image_tokens(pixels).long().cpu()


def _vq_tokens(config: Any) -> int:
    """Tokens of one image of a Chameleon-like VQ model."""
    return (config.resolution // 2 ** (len(config.channel_multiplier) - 1)) ** 2


def _field(row: Row, name: str) -> Any:
    """What a row asks for."""
    if row.get(name) is None:
        raise ValueError(f"This target is asked by `{name}`, which a row lacks; it has {sorted(row)}.")
    return row[name]


def _prompt(row: Row) -> str:
    """The text a row asks for."""
    prompt = _field(row, "prompt")
    if not isinstance(prompt, str):
        raise ValueError(f"`prompt` must be text, got {prompt!r}.")
    return prompt


def flatten_image(image: PIL.Image.Image) -> PIL.Image.Image:
    """Give an image in RGB, over white where it is transparent."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def fit_image(image: PIL.Image.Image, width: int, height: int) -> PIL.Image.Image:
    """Scale an image to cover `width` x `height` pixels and cut what stands over, the same on both sides."""
    flat = PIL.ImageOps.exif_transpose(flatten_image(image))
    return PIL.ImageOps.fit(flat, (width, height), PIL.Image.Resampling.LANCZOS)
