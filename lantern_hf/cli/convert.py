"""The work of `lantern-hf convert`: read the options, convert, say what was found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import typer

from lantern_hf.cli.setup import quiet
from lantern_hf.convert import convert, convert_pipeline


def run(
    source: str, out: Path, pipeline: bool, shared: dict[str, Any], parts: dict[str, Any], alone: dict[str, Any]
) -> None:
    """Run the command.

    Args:
        source: What to convert.
        out: Folder to make.
        pipeline: Whether a whole pipeline is made.
        shared: Options of both ways.
        parts: The other parts of a pipeline; `vq` is also that of a Chameleon checkpoint.
        alone: Options of a single conversion.

    Raises:
        ValueError: Options exclude each other, or the conversion refuses the source.
        OSError: A file is missing or cannot be written.
    """
    _check(pipeline, parts, alone)
    options = shared | {"grid": parse_grid(shared["grid"]), "progress": True}
    options["dtype"] = None if shared["dtype"] == "auto" else getattr(torch, shared["dtype"])
    with quiet(local=Path(source).exists()):
        if pipeline:
            reports = convert_pipeline(source, out, **parts, **options)
        else:
            reports = [convert(source, out, vq=parts["vq"], **alone, **options)]
    for report in reports:
        for line in report.lines():
            typer.echo(line)


def _check(pipeline: bool, parts: dict[str, Any], alone: dict[str, Any]) -> None:
    """Refuse options that would not be read."""
    if pipeline and parts["vq"] is None:
        raise ValueError("--pipeline needs --vq, the VQ model of the images.")
    if pipeline and (named := [name for name, value in alone.items() if value not in (None, "auto")]):
        raise ValueError(f"--pipeline and --{named[0]} exclude each other. Leave one of them out.")
    if not pipeline and (named := [name for name in ("head", "text_encoder") if parts[name] is not None]):
        raise ValueError(f"--{named[0].replace('_', '-')} is a part of a pipeline. Add --pipeline, or leave it out.")


def parse_grid(text: str | None) -> tuple[int, int] | None:
    """Read `16` or `16x24`, height first.

    Raises:
        ValueError: It is neither.
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,4})(?:x(\d{1,4}))?", text)
    if match is None:
        raise ValueError(f"--grid must be a side or HEIGHTxWIDTH in tokens, such as 16 or 16x24, got {text!r}.")
    return int(match[1]), int(match[2] or match[1])
