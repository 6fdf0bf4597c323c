"""Text to arguments of `generate`, and generated tokens to PIL images, for any family that makes images.

For programs that call `model.generate` themselves. What a family prescribes is its adapter's; `LanternPipeline` does
the same in the manner of diffusers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.targets import adapter_for

__all__ = ["decode_images", "image_prompts"]


def image_prompts(
    model: PreTrainedModel,
    processor: Any,
    prompts: str | Sequence[str],
    *,
    guidance_scale: float | None = None,
    height: int | Sequence[int] | None = None,
    width: int | Sequence[int] | None = None,
    target_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Turn texts into arguments of `model.generate` that ask for one image each.

    Args:
        model: The target.
        processor: Its processor or tokenizer.
        prompts: One text, or several.
        guidance_scale: Passed on, with the unconditional prompts that it needs; None or 1 is no guidance.
        height: Height in pixels, or one for each prompt, for families of several sizes.
        width: Width in pixels.
        target_options: Options of the family, as in `lantern_generate`.

    Returns:
        `input_ids` `(B, S)`, `attention_mask`, `max_new_tokens` and whatever else the family needs; tensors are on the
        model's device.

    Raises:
        ValueError: There is no prompt, an empty one, or the family makes no such images.
        TypeError: `prompts` holds something else than text.

    Example:
        >>> inputs = image_prompts(model, processor, "a red fox", guidance_scale=3.0)  # doctest: +SKIP
        >>> sequences = model.generate(**inputs, assistant=head, do_sample=True)  # doctest: +SKIP
        >>> images = decode_images(model, inputs["input_ids"], sequences, vq_model)  # doctest: +SKIP
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(f"`prompts` must be a text or a list of texts, got {prompts!r}.")
    adapter = adapter_for(model, **(target_options or {}))
    adapter.check_prompts(processor, texts)
    guided = guidance_scale is not None and guidance_scale != 1
    inputs = adapter.encode(processor, texts, guided=guided, height=height, width=width)
    if guided:
        inputs["guidance_scale"] = float(guidance_scale)  # type: ignore[arg-type]
    return {key: value.to(adapter.device) if isinstance(value, Tensor) else value for key, value in inputs.items()}


@torch.no_grad()
def decode_images(
    model: PreTrainedModel,
    input_ids: Tensor,
    sequences: Tensor,
    vq_model: Any = None,
    *,
    target_options: Mapping[str, Any] | None = None,
) -> list[list[PIL.Image.Image]]:
    """Decode the images in generated sequences.

    Args:
        model: The target.
        input_ids: The prompts, `(B, S)` int64.
        sequences: What `generate` returned, `(B, S + T)` int64.
        vq_model: `diffusers.VQModel` of the target's codes, for families whose model has no decoder.
        target_options: Options of the family, as passed to `generate`.

    Returns:
        For each row its complete images in order; one that was cut short is left out.

    Raises:
        ValueError: The tokens are no image of the family, or a decoder is missing.
    """
    from diffusers.image_processor import VaeImageProcessor  # diffusers takes long to import

    adapter = adapter_for(model, input_ids, **(target_options or {}))
    length = input_ids.shape[1] if adapter.returns_prompt else 0
    if sequences.shape[0] != input_ids.shape[0] or sequences.shape[1] < length:
        raise ValueError(
            f"`sequences` of shape {tuple(sequences.shape)} do not continue prompts of shape {tuple(input_ids.shape)}. "
            "Pass what `generate` returned for them."
        )
    processor = VaeImageProcessor(do_resize=False)
    return [
        [
            processor.postprocess(adapter.pixels(codes[None], vq_model).float().cpu(), output_type="pil")[0]
            for codes in row
        ]
        for row in adapter.image_codes(sequences[:, length:])
    ]
