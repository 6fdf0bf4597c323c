"""The work of `lantern-hf distil`: have a target generate the sequences its head is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from lantern_hf._pipeline_arguments import family_defaults, own_settings
from lantern_hf._processes import process_state
from lantern_hf._wrappers import unwrap
from lantern_hf.cli.files import check_folder
from lantern_hf.cli.setup import quiet, resolve_device, resolve_dtype
from lantern_hf.cli.train_target import LoadedTarget, load_target
from lantern_hf.draft import LanternDraftModel
from lantern_hf.training import DistilConfig, read_prompts, self_distil


def run(options: Mapping[str, Any]) -> None:
    """Run the command.

    Args:
        options: Every option of the command by its name; None is the default.

    Raises:
        ValueError: An option is out of range, does not fit the model, or the folder is of another run.
        OSError: Something is missing, or cannot be written.
    """
    check_folder(options["output_dir"], "--output-dir")
    state = process_state(cpu=options["device"] == "cpu")
    device = resolve_device(options["device"], state.device)
    with quiet(local=True):
        size, dtype = (options["height"], options["width"]), resolve_dtype(options["dtype"], device)
        loaded = load_target(options["model"], dtype, device, options["device_map"], size)
        assistant = _assistant(options, loaded)
    if loaded.conditioner is None:
        raise ValueError("This model has no processor or tokenizer, so it cannot be asked by text. Use one that has.")
    prompts = read_prompts(options["prompts"], loaded.conditioner.asks)
    config = distil_config(options, loaded)
    shards = self_distil(loaded.conditioner, prompts, options["output_dir"], config, assistant=assistant)
    if state.is_main_process:
        count = len(prompts) * config.sequences_per_prompt
        text = f"{count} sequences in {len(shards)} shards in {options['output_dir']}"
        Console(highlight=False).print(text, markup=False, soft_wrap=True)
    state.destroy_process_group()


def distil_config(options: Mapping[str, Any], loaded: LoadedTarget) -> DistilConfig:
    """Settings of the run; where none are named, those that a `LanternPipeline` of the target would draw with.

    Raises:
        ValueError: A setting is out of range.
    """
    names = {field.name for field in dataclasses.fields(DistilConfig)}
    values = {name: value for name, value in options.items() if name in names and value is not None}
    return DistilConfig(**_usual(loaded) | values)


def _usual(loaded: LoadedTarget) -> dict[str, Any]:
    """Settings that a target's images are drawn with; a text model is drawn from as it is."""
    target = unwrap(loaded.target)
    if loaded.pipe is not None:
        pipe = loaded.pipe.config
        return own_settings(target) | {"guidance_scale": pipe.guidance_scale, "top_k": pipe.top_k}
    draws = loaded.conditioner is not None and loaded.conditioner.num_tokens is not None
    return family_defaults(target, {}) | own_settings(target) if draws else {}


def _assistant(options: Mapping[str, Any], loaded: LoadedTarget) -> LanternDraftModel | None:
    """The head to decode with, if there is one."""
    if options["plain"]:
        return None
    if options["head"] is None:
        return None if loaded.pipe is None else loaded.pipe.draft_head
    return LanternDraftModel.from_pretrained(options["head"]).place(loaded.target).eval().bind(loaded.target)
