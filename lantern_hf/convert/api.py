"""`convert`: open, plan, write, verify, and only then give the result its name."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.folders import check_free, new_folder
from lantern_hf.convert.kinds import make_plan
from lantern_hf.convert.plan import FLOATS, Options, Plan
from lantern_hf.convert.report import ConversionReport
from lantern_hf.convert.sources import open_source
from lantern_hf.convert.stream import largest_difference, write_weights

__all__ = ["convert", "convert_into", "make_options"]

# Of the largest value; rounding alone stays a hundred times below it.
_TOLERANCE = 1e-3
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def convert(
    source: str | Path,
    out: str | Path,
    *,
    kind: str = "auto",
    dtype: torch.dtype | None = None,
    verify: bool = False,
    grid: int | tuple[int, int] | None = None,
    prefix_length: int | None = None,
    num_attention_heads: int | None = None,
    target: str | Path | None = None,
    vq: str | Path | None = None,
    max_shard_size: int | str = "5GB",
    revision: str | None = None,
    progress: bool = False,
) -> ConversionReport:
    """Convert a published checkpoint into a folder that `from_pretrained` loads.

    Peak memory is the largest source file, mapped, and a few megabytes; `verify` needs the whole result in float32.

    Args:
        source: A weight file or folder, a Hub id, or a file of a Hub repository (`someone/llamagen/t2i_XL.pt`).
        out: Folder to make; it must not exist, or be empty.
        kind: One of `KINDS`, or `"auto"`, which tells it by the names of the tensors.
        dtype: Floating dtype of the result; the source's by default.
        verify: Run the published rule and the result on the same random input and compare.
        grid: Side, or height and width, of the image in tokens, where neither `config.json` nor the name tells it.
        prefix_length: Positions before the image (LlamaGen), where it is not that of the weights.
        num_attention_heads: Query heads, where neither `config.json` nor a published size tells it.
        target: Folder or Hub id of the target of a draft head; needed where the head has no `config.json`.
        vq: VQ checkpoint that completes a Chameleon checkpoint without one.
        max_shard_size: Size of one weight file, in bytes or as in `"5GB"`.
        revision: Branch, tag or commit of the source on the Hub.
        progress: Show a bar on a terminal.

    Returns:
        What was found, used, left out and measured.

    Raises:
        FileNotFoundError: The source does not exist.
        FileExistsError: Something is at `out`.
        OSError: The source is out of reach, or `out` cannot be written.
        ValueError: The source is damaged, unsafe, not whole or of another kind, an option contradicts it, or the
            result differs from the published rule. Nothing is at `out` then.
    """
    out = Path(out).expanduser()
    check_free(out)
    if vq is not None:
        with open_source(vq) as second:
            options = make_options(grid, prefix_length, num_attention_heads, target, second)
            return _convert(source, out, kind, dtype, verify, options, max_shard_size, revision, progress)
    options = make_options(grid, prefix_length, num_attention_heads, target)
    return _convert(source, out, kind, dtype, verify, options, max_shard_size, revision, progress)


def _convert(
    source: str | Path,
    out: Path,
    kind: str,
    dtype: torch.dtype | None,
    verify: bool,
    options: Options,
    max_shard_size: int | str,
    revision: str | None,
    progress: bool,
) -> ConversionReport:
    with open_source(source, revision) as checkpoint, new_folder(out) as folder:
        report = convert_into(
            folder, checkpoint, kind, options, dtype, verify=verify, max_shard_size=max_shard_size, progress=progress
        )
    report.out = out
    return report


def make_options(
    grid: int | tuple[int, int] | None = None,
    prefix_length: int | None = None,
    num_attention_heads: int | None = None,
    target: str | Path | None = None,
    vq: Checkpoint | None = None,
) -> Options:
    """Check what the user said, and put it together.

    Raises:
        ValueError: A number is below 1.
    """
    sides = (grid, grid) if isinstance(grid, int) else grid
    for name, value in {"prefix_length": prefix_length, "num_attention_heads": num_attention_heads}.items():
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1, got {value}.")
    return Options(sides, prefix_length, num_attention_heads, None if target is None else str(target), vq)


def convert_into(
    folder: Path,
    checkpoint: Checkpoint,
    kind: str,
    options: Options,
    dtype: torch.dtype | None = None,
    *,
    verify: bool = False,
    max_shard_size: int | str = "5GB",
    progress: bool = False,
) -> ConversionReport:
    """Convert an open checkpoint into a folder as it is; arguments as in `convert`.

    Raises:
        ValueError: As in `convert`; the folder is not to be used then.
    """
    limit = _bytes(max_shard_size)
    if dtype not in (None, *FLOATS):
        raise ValueError(f"`dtype` must be a floating dtype of torch, got {dtype}.")
    plan = make_plan(checkpoint, kind, options)
    dtype = plan.dtype() if dtype is None else dtype
    folder.mkdir(exist_ok=True)
    plan.save_config(folder, dtype)
    files = write_weights(plan, folder, dtype, limit, progress)
    report = ConversionReport(
        kind=plan.kind,
        source=checkpoint.label,
        out=folder,
        files=files,
        tensors=len(plan.outputs),
        parameters=sum(math.prod(output.shape) for output in plan.outputs),
        dtype=str(dtype).removeprefix("torch."),
        facts=plan.facts,
        ignored=plan.ignored,
        leftovers=checkpoint.leftovers,
    )
    if verify:
        report.max_error, report.scale = _verify(plan, checkpoint, folder, dtype)
    return report


def _verify(plan: Plan, checkpoint: Checkpoint, folder: Path, dtype: torch.dtype) -> tuple[float, float]:
    """Compare the result with the published rule, or with its source where the weights are only copied."""
    if plan.verify is None:
        error, scale = largest_difference(plan, folder, dtype)
    else:
        error, scale = plan.verify(checkpoint, folder, dtype)
    if not error <= _TOLERANCE * max(scale, 1e-3):  # NaN too
        raise ValueError(
            f"The converted {plan.kind} differs from its published rule by {error:.3g} of values up to {scale:.3g}. "
            "The source may be of a variant that is not known here; nothing was written."
        )
    return error, scale


def _bytes(size: Any) -> int:
    """Read a size such as `"5GB"`."""
    match = re.fullmatch(r"(\d+)\s*([KMG]B)?", str(size).upper())
    if match is None or not (value := int(match[1]) * _UNITS[match[2] or ""]):
        raise ValueError(f"`max_shard_size` must be a number of bytes or such as '5GB', got {size!r}.")
    return value
