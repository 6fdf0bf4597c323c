"""Prompts to what `generate` needs to make their images, one function per family; and images out of what it gave.

For pipelines, which meet people who have a prompt and want a picture. A family that is registered from outside brings a
function of its own as `image_request` on its adapter class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf._pipeline_prompts import check_lengths, encode_prompts
from lantern_hf.targets import adapter_class
from lantern_hf.targets.emu3_layout import Emu3ImageLayout

__all__ = ["ImageRequest", "Parts", "Wish", "image_request"]


@dataclass
class Parts:
    """What a pipeline has beside its model; families need different ones."""

    model: Any
    processor: Any = None
    tokenizer: Any = None
    text_encoder: Any = None
    vq_model: Any = None

    def need(self, *names: str) -> list[Any]:
        """Give parts that must be there.

        Raises:
            ValueError: One is missing.
        """
        if missing := [name for name in names if getattr(self, name) is None]:
            raise ValueError(
                f"Images of {type(self.model).__name__} need {', '.join(f'`{name}`' for name in missing)}. Pass "
                f"pipeline('lantern-text-to-image', model=model, {', '.join(f'{name}=...' for name in missing)})."
            )
        return [getattr(self, name) for name in names]


@dataclass
class Wish:
    """What a user wants.

    Attributes:
        prompts: Texts.
        negative: Texts to stay away from, one a prompt, or None.
        guided: Whether classifier-free guidance is on.
        size: Height and width in pixels, or None for the family's own.
    """

    prompts: list[str]
    negative: list[str] | None = None
    guided: bool = True
    size: tuple[int, int] | None = None


@dataclass
class ImageRequest:
    """How to make images.

    Attributes:
        kwargs: Arguments of `generate`: ids, masks, the number of tokens, and what else the family needs.
        target_options: Options of the adapter that reads the images.
        returns_prompt: Whether `generate` gives the prompt back in front of the image, as it usually does.
    """

    kwargs: dict[str, Any]
    target_options: dict[str, Any] = field(default_factory=dict)
    returns_prompt: bool = True


def _emu3(parts: Parts, wish: Wish) -> ImageRequest:
    """Emu3: the processor states the size in the prompt, and the layout ends rows and image."""
    (processor,) = parts.need("processor")
    height, width = wish.size or (0, 0)
    size = {"ratio": f"{width}:{height}", "image_area": height * width} if wish.size else {}

    def read(texts: list[str]) -> Any:
        return processor(
            text=list(texts),
            return_for_image_generation=True,
            padding=True,
            padding_side="left",
            return_tensors="pt",
            **size,
        )

    inputs = read(wish.prompts)
    layout = Emu3ImageLayout.for_model(parts.model, inputs["image_sizes"])
    kwargs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if wish.guided:
        other = read(wish.negative or [""] * len(wish.prompts))
        kwargs["negative_prompt_ids"] = other["input_ids"]
        kwargs["negative_prompt_attention_mask"] = other["attention_mask"]
    return ImageRequest(kwargs | {"prefix_allowed_tokens_fn": layout, "max_new_tokens": layout.num_tokens})


def _llamagen(parts: Parts, wish: Wish) -> ImageRequest:
    """LlamaGen: text features as a prefix, a learned unconditional one, a fixed size."""
    config, device = parts.model.config, parts.model.device
    if config.conditioning != "text":
        raise ValueError("This LlamaGen draws classes, not prompts. Use LanternPipeline(...)(class_labels=...).")
    if wish.negative is not None or wish.size is not None:
        name = "height` and `width" if wish.negative is None else "negative_prompt"
        raise ValueError(
            f"LlamaGen takes no `{name}`: its size and its unconditional prompt are learned. Leave it out."
        )
    tokenizer, encoder, _ = parts.need("tokenizer", "text_encoder", "vq_model")
    check_lengths(tokenizer, wish.prompts, config.prefix_length)
    features, mask = encode_prompts(tokenizer, encoder.to(device), wish.prompts, config.prefix_length, device)
    kwargs = {
        "input_ids": parts.model.caption_ids(len(mask)).to(device),
        "attention_mask": mask,
        "caption_embeds": features.to(parts.model.dtype),
        "max_new_tokens": config.num_image_tokens,
    }
    if wish.guided:
        kwargs["negative_prompt_ids"] = parts.model.unconditional_ids(len(mask)).to(device)
        kwargs["negative_prompt_attention_mask"] = mask
    return ImageRequest(kwargs)


_REQUESTS: dict[str, Callable[[Parts, Wish], ImageRequest]] = {"emu3": _emu3, "llamagen": _llamagen}
DEFAULTS: dict[str, dict[str, Any]] = {
    "emu3": {"guidance_scale": 3.0, "top_k": 2048},
    "llamagen": {"guidance_scale": 7.5},
}
"""Published settings of a family, in force where neither the user nor the model's generation config says otherwise."""


def image_request(parts: Parts, wish: Wish) -> ImageRequest:
    """Turn prompts into arguments of `generate`.

    Raises:
        ValueError: The family makes no images from prompts alone, lacks a part, or cannot honour the wish.
    """
    adapter = adapter_class(parts.model)
    request = getattr(adapter, "image_request", None) or _REQUESTS.get(adapter.family)
    if request is None:
        raise ValueError(
            f"{type(parts.model).__name__} (family {adapter.family!r}) has no way from a prompt to an image here; "
            f"served are {', '.join(sorted(_REQUESTS))}. Call model.generate with ids made by its processor."
        )
    return request(parts, wish)


def family_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Settings of a model's family."""
    adapter = adapter_class(model)
    return dict(getattr(adapter, "image_defaults", None) or DEFAULTS.get(adapter.family, {}))


def to_images(pixels: Tensor) -> list[Any]:
    """Turn pixels `(B, 3, H, W)`, nominally in [-1, 1], into PIL images."""
    import PIL.Image

    values = (pixels.float().clamp(-1, 1) + 1) * 127.5
    return [PIL.Image.fromarray(image.numpy()) for image in values.round().to(torch.uint8).permute(0, 2, 3, 1).cpu()]
