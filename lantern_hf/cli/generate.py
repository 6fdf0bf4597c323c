"""The work of `lantern-hf generate`: load, decode once or twice, write images and report, show the figures."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lantern_hf.cli.figures import Decoding, environment, model_name, ratios, summary, table
from lantern_hf.cli.files import check_writable, image_paths, write_all
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.cli.setup import load_pipeline, named_settings, quiet, resolve_config, resolve_device, resolve_dtype
from lantern_hf.config import LanternConfig
from lantern_hf.many.settings import conditioning
from lantern_hf.pipeline import LanternPipeline

_GAP = 4  # white pixels between two pictures side by side, before enlarging


def run(options: GenerateOptions) -> None:
    """Run the command.

    Raises:
        ValueError: An option is out of range, does not fit the model, or names a place that cannot be written.
        OSError: The model is missing, or a file cannot be written.
    """
    paths = image_paths(options.out or Path("lantern.png"), len(options.prompts) * options.num_images)
    for path in paths:
        check_writable(path, "--out")
    if options.report is not None:
        check_writable(options.report, "--report")
    settings = named_settings(options)
    device = resolve_device(options.device)
    with quiet(local=options.model is None or Path(options.model).is_dir()):
        pipe = load_pipeline(options.model, resolve_dtype(options.dtype, device)).to(device)
        pipe.set_progress_bar_config(disable=True)
        config = resolve_config(options, settings, pipe)
        for prompt in options.prompts:  # all of them before the first is drawn
            pipe.check_inputs(**conditioning(pipe, [prompt]))
        try:
            images, results = _decode_all(options, pipe, config)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{device} has not enough memory. Try --num-images 1 or --dtype bfloat16.") from error
    report = _report(options, pipe, config, results, paths)
    _write(options, paths, images, report)
    _show(report, paths)


def _decode_all(
    options: GenerateOptions, pipe: LanternPipeline, config: LanternConfig | None
) -> tuple[list[tuple[PIL.Image.Image, ...]], dict[str, Decoding]]:
    """Decode every prompt in every way; gives each image's pictures, one of each way, and the results by way."""
    ways: dict[str, LanternConfig | None] = {"plain": None} if config is None else {"lantern": config}
    if options.compare:
        ways["plain"] = None
    total = len(ways) * len(options.prompts) * options.num_images * pipe.transformer.config.num_image_tokens
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    pictures, results = [], {}
    with Progress(
        *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        for way, settings in ways.items():
            bar.update(task, description="LANTERN++" if way == "lantern" else way)
            images, results[way] = _decode(options, pipe, settings, partial(bar.advance, task))
            pictures.append(images)
    return list(zip(*pictures, strict=True)), results


def _decode(
    options: GenerateOptions, pipe: LanternPipeline, config: LanternConfig | None, advance: Callable[[int], None]
) -> tuple[list[PIL.Image.Image], Decoding]:
    """Decode every prompt in one way, its images in one batch."""
    images: list[PIL.Image.Image] = []
    decoding = Decoding([], [])
    for index, prompt in enumerate(options.prompts):
        first = options.seed + index * options.num_images
        start = time.perf_counter()
        output: Any = pipe(
            **conditioning(pipe, [prompt]),
            num_images_per_prompt=options.num_images,
            guidance_scale=options.guidance_scale,
            top_k=options.top_k,
            temperature=options.temperature,
            # on the CPU, so that a seed means the same on every device
            generator=[torch.Generator().manual_seed(first + image) for image in range(options.num_images)],
            lantern_config=config,
            callback_on_step_end=_Advance(advance),
        )
        decoding.seconds.append(time.perf_counter() - start)
        decoding.stats.append(output.stats)
        images += output.images
    return images, decoding


class _Advance:
    """Turns the pipeline's count of tokens so far into steps of the bar."""

    def __init__(self, advance: Callable[[int], None]):
        self._advance, self._done = advance, 0

    def __call__(self, pipe: LanternPipeline, step: int, done: int, tensors: dict[str, Any]) -> None:
        """Called by the pipeline after every pass."""
        self._advance(done - self._done)
        self._done = done


def _report(
    options: GenerateOptions,
    pipe: LanternPipeline,
    config: LanternConfig | None,
    results: dict[str, Decoding],
    paths: list[Path],
) -> dict[str, Any]:
    """Everything that is shown and what it was measured with, as plain JSON values."""
    tokens = pipe.transformer.config.num_image_tokens
    figures = {way: decoding.to_dict() for way, decoding in results.items()}
    prompts = [prompt for prompt in options.prompts for _ in range(options.num_images)]
    return {
        "model": model_name(options),
        "images": [
            {"prompt": prompt, "seed": options.seed + index, "file": str(path)}
            for index, (prompt, path) in enumerate(zip(prompts, paths, strict=True))
        ],
        "settings": {
            "lantern_config": None if config is None else config.to_dict(),
            "guidance_scale": pipe.config.guidance_scale if options.guidance_scale is None else options.guidance_scale,
            "top_k": pipe.config.top_k if options.top_k is None else options.top_k,
            "temperature": options.temperature,
            "seed": options.seed,
            "num_images": options.num_images,
            "scale": options.scale,
        },
        "tokens_per_image": tokens,
        "plain_passes": len(options.prompts) * (tokens - 1),  # the prompt's own pass gives the first token
        "results": figures,
        "ratio": ratios(figures["lantern"], figures["plain"]) if len(figures) == 2 else None,
    } | environment(pipe)


def _write(
    options: GenerateOptions,
    paths: list[Path],
    images: list[tuple[PIL.Image.Image, ...]],
    report: dict[str, Any],
) -> None:
    """Write the images, and the report if one is wanted."""
    writers: dict[Path, Callable[[Path], Any]] = {
        path: _side_by_side(pictures, options.scale).save for path, pictures in zip(paths, images, strict=True)
    }
    if options.report is not None:
        text = json.dumps(report, indent=2, allow_nan=False) + "\n"
        writers[options.report] = partial(Path.write_text, data=text, encoding="utf-8")
    write_all(writers)


def _side_by_side(pictures: tuple[PIL.Image.Image, ...], scale: int) -> PIL.Image.Image:
    """Put pictures of one size beside one another, enlarged."""
    width, height = pictures[0].size
    canvas = PIL.Image.new("RGB", (len(pictures) * (width + _GAP) - _GAP, height), "white")
    for index, picture in enumerate(pictures):
        canvas.paste(picture, (index * (width + _GAP), 0))
    size = (canvas.width * scale, canvas.height * scale)
    return canvas if scale == 1 else canvas.resize(size, PIL.Image.Resampling.LANCZOS)


def _show(report: dict[str, Any], paths: list[Path]) -> None:
    """Show the figures and where the images are."""
    console = Console(highlight=False)
    console.print(table(report["results"], report["ratio"]))
    first = next(iter(report["results"].values()))
    console.print(summary(first, report["plain_passes"]))
    shown = paths if len(paths) <= 4 else [paths[0], "...", paths[-1]]
    console.print(f"Saved {', '.join(map(str, shown))}", markup=False, soft_wrap=True)
