"""What a command needs before it can decode: checked settings, a device, a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers

from lantern_hf.assets import embedded_model_path
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.config import LanternConfig
from lantern_hf.pipeline import LanternPipeline


def named_settings(options: GenerateOptions) -> dict[str, Any]:
    """Settings of `LanternConfig` named on the command line, checked."""
    names = ("tree", "lam", "delta", "neighborhood_size")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.strict and (others := sorted(given.keys() - {"tree"})):
        listed = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"--strict and {listed} exclude each other. Leave one of them out.")
    LanternConfig(**given)
    return given


def resolve_device(name: str, own: torch.device | None = None) -> torch.device:
    """The device to run on, tried out.

    Args:
        name: As the user named it.
        own: Device of this process for "auto"; by default an accelerator if there is one.
    """
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return own or found or torch.device("cpu")
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {name!r} cannot be used: {reason}") from error


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype to load in."""
    if name == "auto":
        return torch.float32 if device.type in ("cpu", "mps") else torch.bfloat16
    return getattr(torch, name)


def load_pipeline(model: str | None, dtype: torch.dtype) -> LanternPipeline:
    """Load the pipeline."""
    if model is None:
        return LanternPipeline.from_pretrained(embedded_model_path(), dtype=dtype)
    path = Path(model).expanduser()
    if path.exists() and not (path / "model_index.json").is_file():
        raise ValueError(f"--model {model!r} is not the folder of a pipeline: it has no model_index.json.")
    if not path.exists() and (path.is_absolute() or model.startswith(".") or model.count("/") != 1):
        raise ValueError(
            f"--model {model!r} does not exist. Name a folder, or a Hub id such as someone/llamagen-lantern."
        )
    try:
        return LanternPipeline.from_pretrained(str(path) if path.exists() else model, dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model!r} cannot be loaded: {error}") from error


def resolve_config(options: GenerateOptions, given: dict[str, Any], pipe: LanternPipeline) -> LanternConfig | None:
    """Settle how to decode: the head's defaults under what the command line names."""
    if pipe.draft_head is None:
        if given or options.strict or options.compare:
            raise ValueError(
                "This model has no draft head, so it decodes plainly. Leave out --compare, --strict and the other "
                "decoding options."
            )
        return None
    values = dict(pipe.draft_head.config.lantern_config or {})
    if options.strict:
        tree = given.get("tree", values.get("tree"))
        return LanternConfig.strict() if tree is None else LanternConfig.strict(tree)
    if {"lam", "delta"} & given.keys():  # one of the two rules replaces the other
        values = {name: value for name, value in values.items() if name not in ("lam", "delta")}
    return LanternConfig.from_dict(values | given)


@contextmanager
def quiet(local: bool) -> Iterator[None]:
    """Keep the loading bars and warnings of the libraries off the terminal; downloads still show theirs."""
    logs: list[Any] = [transformers.utils.logging, diffusers.utils.logging]
    levels = [log.get_verbosity() for log in logs]
    for log in logs:
        log.set_verbosity_error()
        if local:
            log.disable_progress_bar()
    try:
        yield
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.set_verbosity(level)
            if local:
                log.enable_progress_bar()
