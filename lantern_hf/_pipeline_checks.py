"""At the door of a `LanternPipeline` call: refuse what cannot work. Knows values, runs nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

OUTPUT_TYPES = ("pil", "np", "pt", "latent")
TENSOR_INPUTS = ("image_tokens", "image")


def check_parts(adapter: Any, vq_model: Any, text_encoder: Any) -> None:
    """Refuse parts that belong to different models, and models that draw nothing.

    Raises:
        ValueError: Codebook or feature widths differ, or the target is a text model.
    """
    if not adapter.has_codebook:
        raise ValueError(
            f"`transformer` is a {type(adapter.model).__name__}, which draws no images. Call its own `generate`; for "
            "drafting there, lantern_hf.attach(model, head)."
        )
    if vq_model is not None:
        adapter.check_decoder(vq_model)
    config = adapter.model.config
    width = None if text_encoder is None else getattr(text_encoder.config, "hidden_size", None)
    wanted = getattr(config, "caption_dim", None)
    if width is not None and wanted is not None and adapter.asks == "prompt" and width != wanted:
        raise ValueError(
            f"`text_encoder` gives features of width {width}, `transformer` reads {wanted}. Use the encoder it was "
            "trained with."
        )


def check_sampling(guidance_scale: float, top_k: int, top_p: float, temperature: float) -> None:
    """Refuse numbers that shape no distribution.

    Raises:
        ValueError: One is out of range.
    """
    if not (math.isfinite(guidance_scale) and guidance_scale >= 1):
        raise ValueError(
            f"`guidance_scale` must be at least 1, got {guidance_scale!r}. 1 is no guidance; 7.5 is usual."
        )
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 0:
        raise ValueError(f"`top_k` must be a whole number of at least 0, got {top_k!r}. 0 draws from all codes.")
    if not 0 < top_p <= 1:
        raise ValueError(f"`top_p` must be in (0, 1], got {top_p!r}. 1 draws from all codes.")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(
            f"`temperature` must be above 0, got {temperature!r}. For the most probable codes pass do_sample=False."
        )


def check_output(output_type: str, num_images: int) -> None:
    """Refuse unknown outputs.

    Raises:
        ValueError: An unknown kind, or no image at all.
    """
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"`output_type` must be one of {', '.join(map(repr, OUTPUT_TYPES))}, got {output_type!r}.")
    if not isinstance(num_images, int) or isinstance(num_images, bool) or num_images < 1:
        raise ValueError(f"`num_images_per_prompt` must be a whole number of at least 1, got {num_images!r}.")


def check_generator(generator: Any, images: int) -> None:
    """Refuse what draws nothing, or not for every image.

    Raises:
        TypeError: Something else than generators.
        ValueError: Their number is not that of the images.
    """
    several = isinstance(generator, Sequence)
    for one in generator if several else [generator]:
        if one is not None and not isinstance(one, torch.Generator):
            raise TypeError(f"`generator` must be a torch.Generator or a list of them, got {type(one).__name__}.")
    if several and len(generator) != images:
        raise ValueError(
            f"`generator` has {len(generator)} generators for {images} images (prompts times `num_images_per_prompt`). "
            "Pass one, or one per image."
        )


def check_sizes(sizes: Sequence[tuple[int, int]], output_type: str) -> None:
    """Refuse one array or tensor for images of several sizes.

    Raises:
        ValueError: The sizes differ and the output is such.
    """
    if output_type in ("np", "pt") and len(set(sizes)) > 1:
        raise ValueError(
            f"`output_type={output_type!r}` is one array for all images, which have {len(set(sizes))} sizes here. Pass "
            "'pil', or images of one size."
        )


def check_callback(callback: Any, names: Sequence[str], offloaded: bool) -> None:
    """Refuse callbacks that cannot be served.

    Raises:
        ValueError: Not callable, an unknown tensor, or a picture while models are being offloaded.
    """
    if not callable(callback):
        raise ValueError(f"`callback_on_step_end` must be callable, got {type(callback).__name__}.")
    if unknown := [name for name in names if name not in TENSOR_INPUTS]:
        raise ValueError(f"`callback_on_step_end_tensor_inputs` must be among {list(TENSOR_INPUTS)}, got {unknown}.")
    if "image" in names and offloaded:
        raise ValueError(
            "`callback_on_step_end_tensor_inputs` cannot hold 'image' under model offload, which would move the "
            "transformer out at every pass. Ask for 'image_tokens' alone."
        )
