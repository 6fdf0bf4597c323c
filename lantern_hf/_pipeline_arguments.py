"""Prompts to arguments of `generate`, for the transformers pipeline: by the family's adapter, with negative prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lantern_hf._pipeline_prompts import check_lengths, encode_prompts
from lantern_hf.images import image_prompts
from lantern_hf.targets import adapter_class, adapter_for

_DEFAULTS: dict[str, dict[str, Any]] = {
    "chameleon": {"guidance_scale": 3.0, "top_k": 2000},
    "emu3": {"guidance_scale": 3.0, "top_k": 2048},
    "janus": {"guidance_scale": 5.0},
    "llamagen": {"guidance_scale": 7.5},
    "lumina_mgpt": {"guidance_scale": 3.0, "top_k": 2000},
}


def family_defaults(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the published settings of a family, for what neither the user nor the generation config of a model says."""
    return dict(_DEFAULTS.get(adapter_class(model, options.get("family")).family, {}))


@dataclass
class Parts:
    """What a pipeline has beside its model; families need different ones."""

    processor: Any = None
    tokenizer: Any = None
    text_encoder: Any = None
    vq_model: Any = None


@dataclass
class Wish:
    """What a user wants.

    Attributes:
        prompts: Texts.
        negative: Texts to stay away from, one a prompt, or None for the family's unconditional prompt.
        guidance_scale: 1 is off.
        height: Pixels, or None for the family's own.
        width: Pixels.
    """

    prompts: list[str]
    negative: list[str] | None
    guidance_scale: float
    height: int | None = None
    width: int | None = None


def image_arguments(model: Any, parts: Parts, wish: Wish, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the arguments of `generate` that make one image of each prompt.

    Raises:
        ValueError: The family makes no images from prompts alone, lacks a part, or cannot honour the wish.
    """
    if adapter_class(model, options.get("family")).family == "llamagen":
        return _llamagen(model, parts, wish)
    processor = parts.processor or parts.tokenizer
    if processor is None:
        raise ValueError(f"Prompts of {type(model).__name__} need its processor. Pass `processor` or `tokenizer`.")
    size: dict[str, Any] = {"height": wish.height, "width": wish.width}
    scale = wish.guidance_scale
    arguments = image_prompts(model, processor, wish.prompts, guidance_scale=scale, target_options=options, **size)
    if wish.negative is not None and any(wish.negative) and scale != 1:
        adapter = adapter_for(model, **options)
        other = adapter.encode(processor, wish.negative, **size)
        arguments["negative_prompt_ids"] = other["input_ids"].to(adapter.device)
        arguments["negative_prompt_attention_mask"] = other["attention_mask"].to(adapter.device)
    return arguments


def _llamagen(model: Any, parts: Parts, wish: Wish) -> dict[str, Any]:
    """LlamaGen: text features as a prefix, a learned unconditional one, a fixed size."""
    config, device = model.config, model.device
    if config.conditioning != "text":
        raise ValueError("This LlamaGen draws classes, not prompts. Use LanternPipeline(...)(class_labels=...).")
    for name in ("negative", "height", "width"):
        if getattr(wish, name) is not None:
            raise ValueError(
                f"LlamaGen takes no `{name}{'_prompt' if name == 'negative' else ''}`: size and unconditional prompt "
                "are learned. Leave it out."
            )
    if missing := [name for name in ("tokenizer", "text_encoder", "vq_model") if getattr(parts, name) is None]:
        raise ValueError(
            f"LlamaGen needs {', '.join(f'`{name}`' for name in missing)}. Pass "
            f"pipeline('lantern-text-to-image', model=model, {', '.join(f'{name}=...' for name in missing)}), or use "
            "LanternPipeline, which loads all of them from one folder."
        )
    check_lengths(parts.tokenizer, wish.prompts, config.prefix_length)
    encoder = parts.text_encoder.to(device)
    features, mask = encode_prompts(parts.tokenizer, encoder, wish.prompts, config.prefix_length, device)
    arguments: dict[str, Any] = {
        "input_ids": model.caption_ids(len(mask)).to(device),
        "attention_mask": mask,
        "caption_embeds": features.to(model.dtype),
        "max_new_tokens": config.num_image_tokens,
    }
    if wish.guidance_scale != 1:
        negative: Tensor = model.unconditional_ids(len(mask)).to(device)
        arguments |= {"negative_prompt_ids": negative, "negative_prompt_attention_mask": mask}
    return arguments | {"guidance_scale": wish.guidance_scale}
