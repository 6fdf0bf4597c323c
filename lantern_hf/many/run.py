"""`generate_many`: split prompts over processes, draw what is missing, write it down."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import PIL.Image
import torch
from transformers.utils import logging

from lantern_hf._processes import from_main, process_state
from lantern_hf.many.folder import PictureFolder
from lantern_hf.many.report import ManyReport
from lantern_hf.many.requests import ImageRequest, Picture, pictures_of, read_requests
from lantern_hf.many.settings import call_options, conditioning, differences, settings_of

if TYPE_CHECKING:  # importing diffusers takes seconds
    from lantern_hf.pipeline import LanternPipeline

__all__ = ["generate_many"]

logger = logging.get_logger(__name__)


def generate_many(
    pipe: LanternPipeline,
    prompts: str | os.PathLike[str] | Sequence[str | ImageRequest],
    out: str | os.PathLike[str],
    *,
    num_images: int = 1,
    batch_size: int = 8,
    seed: int = 0,
    scale: int = 1,
    overwrite: bool = False,
    **options: Any,
) -> ManyReport:
    """Draw many prompts into a folder, or go on where an earlier run of the same settings stopped.

    Under `accelerate launch` or `torchrun` the processes share what is missing; each draws with its own `pipe`, which
    stands on the device of that process (`pipe.to(PartialState().device)`). A picture's draws follow from its own seed,
    so it does not depend on processes, batches or interruptions (up to rounding in batches of another size).

    Args:
        pipe: The pipeline.
        prompts: A file as `read_requests` takes it, or the prompts themselves.
        out: Gets `00001.png`, `00002.png`..., or `fox.png` for the id `fox`, further pictures of a prompt as
            `00001-2.png`; and `manifest.jsonl`, a line a picture with prompt, seed, tokens, passes, tokens a pass,
            seconds, settings and hash. A picture is done when it has a line and its file the hash in it.
        num_images: Pictures of each prompt.
        batch_size: Pictures drawn together on one process; may differ when a run goes on.
        seed: Seed of the run, for prompts without one.
        scale: Enlargement of the saved pictures (Lanczos).
        overwrite: Replace pictures of other prompts or settings, and files that no manifest knows.
        **options: Arguments of the pipeline's call that hold for all pictures, such as `guidance_scale`, `top_k`,
            `temperature` and `lantern_config`.

    Returns:
        What was drawn, on every process.

    Raises:
        FileNotFoundError: There is no such file of prompts.
        ValueError: A prompt is empty or too long, with the line it stands in; a setting is out of range; or a picture
            of this name is there by another prompt or other settings. Nothing was drawn then.
        TypeError: An option does not hold for all pictures.
        OSError: Another run works in the folder, or it cannot be written. Pictures written before stay good.
        MainProcessError: The main process refused, on the other ones.

    Example:
        >>> report = generate_many(pipe, "prompts.txt", "pictures", num_images=4)  # doctest: +SKIP
        >>> report.tokens_per_pass, report.files[0]  # doctest: +SKIP
    """
    start = time.perf_counter()
    for name, value in {"num_images": num_images, "batch_size": batch_size, "scale": scale}.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
    call = call_options(pipe, options)
    run = _Run(pipe, out, call, settings_of(pipe, call, scale), batch_size, scale)
    try:
        with _without_bar(pipe):
            missing = from_main(run.state, lambda: run.plan(prompts, num_images, seed, overwrite))
            run.draw(missing)
        run.state.wait_for_everyone()
        return from_main(run.state, lambda: run.finish(len(missing), start))
    finally:
        run.folder.close()


class _Run:
    """One run as one process sees it."""

    def __init__(
        self,
        pipe: LanternPipeline,
        out: str | os.PathLike[str],
        call: dict[str, Any],
        settings: dict[str, Any],
        batch_size: int,
        scale: int,
    ):
        self.state = process_state(cpu=pipe.device.type == "cpu")
        self.pipe, self.call, self.settings, self.batch_size, self.scale = pipe, call, settings, batch_size, scale
        self.folder = PictureFolder(out, self.state.process_index)
        self.pictures: list[Picture] = []

    def plan(
        self,
        prompts: str | os.PathLike[str] | Sequence[str | ImageRequest],
        num_images: int,
        seed: int,
        overwrite: bool,
    ) -> list[Picture]:
        """Say what is to be drawn. For the main process alone."""
        requests = _requests(prompts)
        _check_prompts(self.pipe, requests)
        self.pictures = pictures_of(requests, num_images, seed)
        self.folder.open()
        self.folder.recover()
        missing = []
        for picture in self.pictures:
            reason = self._in_the_way(picture)
            if reason and not overwrite:
                raise ValueError(
                    f"{picture.source or picture.id}: {self.folder.path / picture.file} {reason}. Use another folder, "
                    "or --overwrite (`overwrite=True`) to replace it."
                )
            if reason or not self.folder.is_whole(picture.file):
                missing.append(picture)
        return missing

    def _in_the_way(self, picture: Picture) -> str | None:
        """What else is there under a picture's name."""
        entry = self.folder.entries.get(picture.file)
        if entry is None:
            return "is there, but in no manifest" if (self.folder.path / picture.file).exists() else None
        wanted = {"prompt": picture.prompt, "seed": picture.seed} | self.settings
        found = differences({"prompt": entry["prompt"], "seed": entry["seed"]} | entry["settings"], wanted)
        return f"was drawn with another {found[0]}" if found else None

    def draw(self, missing: Sequence[Picture]) -> None:
        """Draw this process's part, batch by batch."""
        batches = [missing[first : first + self.batch_size] for first in range(0, len(missing), self.batch_size)]
        mine = batches[self.state.process_index :: self.state.num_processes]
        if not self.state.is_main_process:
            self.folder.open()
        total, main = sum(map(len, mine)), self.state.is_main_process
        share = f" (1 of {self.state.num_processes} processes)" if self.state.num_processes > 1 else ""
        with logging.tqdm(total=total, desc=f"Drawing{share}", unit="image", disable=not main or None) as bar:
            for batch in mine:
                self.folder.commit(*self._draw(batch))
                bar.update(len(batch))
        if not main:
            self.folder.close()

    def _draw(self, batch: Sequence[Picture]) -> tuple[list[bytes], list[dict[str, Any]]]:
        """Draw one batch; gives the bytes of the files and their lines."""
        start = time.perf_counter()
        output: Any = self.pipe(
            **conditioning(self.pipe, [picture.prompt for picture in batch]),
            # on the CPU, so that a seed means the same on every device
            generator=[torch.Generator().manual_seed(picture.seed) for picture in batch],
            **self.call,
        )
        seconds = time.perf_counter() - start
        stats = output.stats
        columns = zip(batch, stats.new_tokens, stats.row_passes, stats.row_tokens_per_pass, strict=True)
        entries = [
            {
                "id": picture.id,
                "image": picture.image,
                "file": picture.file,
                "prompt": picture.prompt,
                "seed": picture.seed,
                "tokens": tokens,
                "passes": passes,
                "tokens_per_pass": tokens_per_pass,
                "seconds": seconds / len(batch),
                "settings": self.settings,
            }
            for picture, tokens, passes, tokens_per_pass in columns
        ]
        return [_png(image, self.scale) for image in output.images], entries

    def finish(self, drawn: int, start: float) -> ManyReport:
        """Merge what all have written. For the main process alone."""
        files = [picture.file for picture in self.pictures]
        self.folder.merge(files)
        lines = [self.folder.entries[file] for file in files]
        return ManyReport(
            self.folder.path, lines, drawn, self.state.num_processes, wall_seconds=time.perf_counter() - start
        )


def _requests(prompts: str | os.PathLike[str] | Sequence[str | ImageRequest]) -> list[ImageRequest]:
    """Prompts as requests, numbered from 1 where they have no name."""
    if isinstance(prompts, str | os.PathLike):
        return read_requests(prompts)
    requests = [
        prompt if isinstance(prompt, ImageRequest) else ImageRequest(prompt, f"{number:05d}", None, f"prompt {number}")
        for number, prompt in enumerate(prompts, start=1)
    ]
    if not requests:
        raise ValueError("`prompts` is empty. Pass at least one.")
    return requests


def _check_prompts(pipe: LanternPipeline, requests: Sequence[ImageRequest]) -> None:
    """Refuse prompts that cannot be drawn, before the first is."""
    try:
        pipe.check_inputs(**conditioning(pipe, [request.prompt for request in requests]))
    except ValueError:
        for request in requests:
            try:
                pipe.check_inputs(**conditioning(pipe, [request.prompt]))
            except ValueError as error:
                raise ValueError(f"{request.source or request.id}: {error}") from error
        raise


@contextmanager
def _without_bar(pipe: LanternPipeline) -> Iterator[None]:
    """Keep the pipeline from showing a bar for each batch."""
    kept: Mapping[str, Any] = getattr(pipe, "_progress_bar_config", {})
    pipe.set_progress_bar_config(**{**kept, "disable": True})
    try:
        yield
    finally:
        pipe.set_progress_bar_config(**kept)


def _png(image: PIL.Image.Image, scale: int) -> bytes:
    """A picture as the bytes of its file."""
    if scale > 1:
        image = image.resize((image.width * scale, image.height * scale), PIL.Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
