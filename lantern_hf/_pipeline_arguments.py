"""Prompts and classes to arguments of `generate`, for both kinds of pipeline: by the family's adapter."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lantern_hf._captions import CaptionEncoder
from lantern_hf.images import image_prompts
from lantern_hf.targets import FAMILY_KEY, adapter_class, adapter_for


def family_defaults(model: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the published settings of a family, for what neither the user nor the generation config of a model says."""
    return dict(adapter_class(model, options.get("family")).defaults)


def own_settings(model: Any) -> dict[str, Any]:
    """Give the settings of `generate` that a model's generation config names."""
    named = model.generation_config.to_diff_dict()
    names = ("guidance_scale", "top_k", "top_p", "temperature")
    return {name: named[name] for name in names if named.get(name) is not None}


@dataclass
class Parts:
    """What a pipeline has beside its model; families need different ones."""

    processor: Any = None
    tokenizer: Any = None
    text_encoder: Any = None
    vq_model: Any = None

    @property
    def reader(self) -> Any:
        """What turns prompts into ids, or into features; None where there is nothing."""
        if self.text_encoder is not None and self.tokenizer is not None:
            return CaptionEncoder(self.tokenizer, self.text_encoder)
        return self.processor or self.tokenizer


@dataclass
class Wish:
    """What a user wants, one image a prompt or label.

    Attributes:
        prompts: Texts; or None.
        negative: Texts to stay away from, one a prompt, or None for the family's unconditional prompt.
        guidance_scale: 1 is off.
        height: Pixels, or some for each prompt, or None for the family's own.
        width: Pixels.
        labels: Labels in place of prompts, `(B,)` int64.
    """

    prompts: list[str] | None
    negative: list[str] | None
    guidance_scale: float
    height: int | Sequence[int] | None = None
    width: int | Sequence[int] | None = None
    labels: Tensor | None = None


def image_arguments(model: Any, parts: Parts, wish: Wish, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the arguments of `generate` that make one image of each prompt or label, on the model's device.

    Raises:
        ValueError: The family makes no images from such, lacks a part, or cannot honour the wish.
    """
    adapter = adapter_for(model, **options)
    _check_wish(adapter, wish)
    scale = wish.guidance_scale
    if wish.prompts is None:
        arguments = adapter.encode_classes(wish.labels, guided=scale != 1)
        arguments = {key: _on(adapter, value) for key, value in arguments.items()}
        return arguments | ({} if scale == 1 else {"guidance_scale": float(scale)})
    reader = parts.reader
    size: dict[str, Any] = {"height": wish.height, "width": wish.width}
    adapter.check_prompts(reader, wish.prompts)
    if reader is None:
        raise ValueError(f"Prompts of {type(model).__name__} need its processor. Pass `processor` or `tokenizer`.")
    arguments = image_prompts(model, reader, wish.prompts, guidance_scale=scale, target_options=options, **size)
    if wish.negative is not None and any(wish.negative) and scale != 1:
        other = adapter.encode(reader, wish.negative, **size)
        arguments["negative_prompt_ids"] = _on(adapter, other["input_ids"])
        arguments["negative_prompt_attention_mask"] = _on(adapter, other["attention_mask"])
    return arguments


def _check_wish(adapter: Any, wish: Wish) -> None:
    """Refuse what the family does not draw from."""
    given = "class_labels" if wish.prompts is None else "prompt"
    if given != adapter.asks:
        raise ValueError(f"This model draws from `{adapter.asks}`, not from `{given}`. Call LanternPipeline with that.")
    if wish.negative is not None and any(wish.negative) and not adapter.takes_negative:
        raise ValueError(
            f"{type(adapter.model).__name__} takes no `negative_prompt`: what it is guided away from is its own. Leave "
            "it out."
        )


def _on(adapter: Any, value: Any) -> Any:
    """Move a tensor to where the model's prompts belong."""
    return value.to(adapter.device) if isinstance(value, Tensor) else value


def write_family(folder: str | os.PathLike[str], family: str) -> None:
    """Write the family into the configuration of a saved target, whose class alone may not tell it."""
    file = Path(folder, "config.json")
    if not file.is_file():  # an adapter of weights, whose base is elsewhere
        return
    values = json.loads(file.read_text(encoding="utf-8"))
    if FAMILY_KEY not in values:
        text = json.dumps(values | {FAMILY_KEY: family}, indent=2, sort_keys=True)
        file.write_text(text + "\n", encoding="utf-8")
