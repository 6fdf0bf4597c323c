"""What all pictures of a run have in common: arguments of the pipeline's call, and the record of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from lantern_hf._fingerprint import target_fingerprint, weights_fingerprint
from lantern_hf._pipeline_checks import check_sampling

if TYPE_CHECKING:  # importing diffusers takes seconds
    from lantern_hf.pipeline import LanternPipeline

__all__ = ["call_options", "conditioning", "differences", "settings_of"]

# What `generate_many` sets itself, or what is one picture's and not all of them's.
_RESERVED = {
    "prompt",
    "class_labels",
    "num_images_per_prompt",
    "generator",
    "output_type",
    "return_dict",
    "callback_on_step_end",
    "callback_on_step_end_tensor_inputs",
}


def call_options(pipe: LanternPipeline, options: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the arguments of a call by the pipeline's own defaults.

    Raises:
        TypeError: An option is `generate_many`'s own business.
        ValueError: A number is out of range, `lantern_config` is none, or there is no head to draft with.
    """
    if reserved := sorted(options.keys() & _RESERVED):
        raise TypeError(f"generate_many() sets `{reserved[0]}` for each picture. Leave it out.")
    values = {name: value for name, value in options.items() if value is not None}
    for name in ("guidance_scale", "top_k"):
        values.setdefault(name, getattr(pipe.config, name))
    check_sampling(values["guidance_scale"], values["top_k"], values.get("top_p", 1.0), values.get("temperature", 1.0))
    return values | {"lantern_config": pipe._resolve_config(options.get("lantern_config", "default"))}


def settings_of(pipe: LanternPipeline, call: Mapping[str, Any], scale: int) -> dict[str, Any]:
    """Record what decides a picture besides prompt and seed, as plain JSON values.

    Raises:
        TypeError: An option cannot be written down.
    """
    config = call["lantern_config"]
    values = dict(call) | {"lantern_config": None if config is None else config.to_dict(), "scale": scale}
    values |= {"dtype": str(pipe.transformer.dtype).removeprefix("torch.")}
    values |= {"model": _model_fingerprint(pipe, values.keys())}
    try:
        return json.loads(json.dumps(values))
    except TypeError as error:
        raise TypeError(
            f"Options of generate_many() must be plain values that a manifest can hold: {error}."
        ) from error


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Name what differs, as `guidance_scale (2.0, now 3.0)`, in the order in which it matters to a reader."""
    found, wanted = _flat(found), _flat(wanted)
    names = [*wanted, *(name for name in found if name not in wanted)]
    return [
        f"`{name}` ({_shown(found.get(name))}, now {_shown(wanted.get(name))})"
        for name in names
        if found.get(name) != wanted.get(name)
    ]


def conditioning(pipe: LanternPipeline, prompts: Sequence[str]) -> dict[str, Any]:
    """What a pipeline draws from: the texts, or the labels they spell.

    Raises:
        ValueError: The model draws classes, and a prompt is the number of none.
    """
    if pipe._adapter.asks == "prompt":
        return {"prompt": list(prompts)}
    if wrong := [prompt for prompt in prompts if not prompt.strip().isdecimal()]:
        raise ValueError(f"This model draws classes: a prompt must be the number of one, got {wrong[0]!r}.")
    return {"class_labels": [int(prompt) for prompt in prompts]}


def _model_fingerprint(pipe: LanternPipeline, recorded: Collection[str]) -> str:
    """A hash of the weights that decide a picture, the head's too, and of settings of the pipeline not `recorded`."""
    own = {name: value for name, value in pipe.config.items() if name not in recorded and name not in pipe.components}
    own = {name: value for name, value in own.items() if not name.startswith("_")}
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    hashes = [f"{name} {weights_fingerprint(part)}" for name, part in sorted(parts.items())]
    text = " ".join([target_fingerprint(pipe.transformer), *hashes, json.dumps(own, sort_keys=True, default=str)])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _shown(value: Any) -> str:
    """A value, short enough for one line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
