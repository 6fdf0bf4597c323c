"""The work of `lantern-hf generate --prompts`: many prompts to a folder, on one process or several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from lantern_hf._files import write_whole
from lantern_hf._processes import MainProcessError, process_state
from lantern_hf.cli.figures import environment, model_name
from lantern_hf.cli.files import SUFFIXES, check_folder, check_writable
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.cli.setup import load_pipeline, named_settings, quiet, resolve_config, resolve_device, resolve_dtype
from lantern_hf.many import ManyReport, generate_many

_BATCH_SIZE = 8


def run(options: GenerateOptions) -> None:
    """Run the command.

    Raises:
        ValueError: An option is out of range or does not fit the model, a prompt cannot be drawn, or the folder holds
            other images under these names.
        OSError: Something is missing or cannot be written, or another run works in the folder.
        MemoryError: A batch is too large for the device.
        Exit: The main process refused, and has said why.
    """
    out = _folder(options)
    settings = named_settings(options)
    state = process_state(cpu=options.device == "cpu")
    device = resolve_device(options.device, state.device)
    with quiet(local=options.model is None or Path(options.model).is_dir()):
        pipe = load_pipeline(options.model, resolve_dtype(options.dtype, device)).to(device)
        config = resolve_config(options, settings, pipe)
    try:
        report = generate_many(
            pipe,
            options.prompts_file or "",
            out,
            num_images=options.num_images,
            batch_size=options.batch_size or _BATCH_SIZE,
            seed=options.seed,
            scale=options.scale,
            overwrite=options.overwrite,
            guidance_scale=options.guidance_scale,
            top_k=options.top_k,
            temperature=options.temperature,
            lantern_config=config,
        )
    except MainProcessError as error:
        raise typer.Exit(2) from error
    except torch.OutOfMemoryError as error:
        raise MemoryError(
            f"{device} has not enough memory. Try a lower --batch-size, or --dtype bfloat16; what is drawn stays."
        ) from error
    if state.is_main_process:
        if options.report is not None:
            _write(options.report, {"model": model_name(options)} | report.to_dict() | environment(pipe))
        _show(report)
    state.destroy_process_group()


def _folder(options: GenerateOptions) -> Path:
    """The folder to draw into; checked, and that of the report too."""
    out = options.out or Path("lantern-images")
    if out.suffix.lower() in SUFFIXES:
        raise ValueError(f"--out must be a folder with --prompts, got {str(out)!r}.")
    check_folder(out, "--out")
    if options.report is not None:
        check_writable(options.report, "--report")
    return out


def _write(path: Path, values: dict[str, Any]) -> None:
    """Write the report, whole or not at all."""
    text = json.dumps(values, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _show(report: ManyReport) -> None:
    """Show the figures and where the images are."""
    kept = len(report.pictures) - report.drawn
    processes = f" by {report.processes} processes" if report.processes > 1 else ""
    there = f", {kept} there before" if kept else ""
    lines = (
        f"{len(report.pictures)} images in {report.folder}: {report.drawn} drawn now{processes}{there}.",
        f"{report.tokens} tokens in {report.passes} target passes, {report.tokens_per_pass:.2f} tokens a pass.",
        f"{report.seconds:.1f} s of drawing, {report.wall_seconds:.1f} s for this run.",
    )
    console = Console(highlight=False)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
