"""What a conversion will write, decided from names and shapes alone, before a number is read.

Every output tensor is a run of rows of one source tensor, perhaps reordered within heads, normalised or reshaped; so a
conversion can go through a checkpoint in blocks of rows. Every source tensor is used, or ignored with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from lantern_hf.convert.checkpoint import Checkpoint, Entry

__all__ = ["FLOATS", "Options", "Output", "Plan", "check_layers", "check_plan", "ignore", "refuse", "shape_of"]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Options:
    """What the weights do not tell; None is to be inferred.

    Attributes:
        grid: Height and width of the image in tokens.
        prefix_length: Positions before the image (LlamaGen).
        num_attention_heads: Query heads.
        target: Folder or Hub id of the target of a draft head.
        vq: Checkpoint of the VQ model that completes a Chameleon checkpoint.
    """

    grid: tuple[int, int] | None = None
    prefix_length: int | None = None
    num_attention_heads: int | None = None
    target: str | None = None
    vq: Checkpoint | None = None


@dataclass(frozen=True)
class Output:
    """One tensor to be written.

    Attributes:
        name: Its name in the result.
        shape: Its shape; row r comes from row `start + r` of the source.
        source: Name of the source tensor; None fills it with `fill`.
        start: First row that is used.
        head_dim: If above 0, rows are reordered within heads of this dimension, from interleaved pairs to halves.
        normalize: Whether rows are scaled to length 1.
        fill: Value of a tensor without source.
        origin: Which checkpoint: 0 the source, 1 `Options.vq`.
    """

    name: str
    shape: tuple[int, ...]
    source: str | None
    start: int = 0
    head_dim: int = 0
    normalize: bool = False
    fill: float = float("nan")
    origin: int = 0


@dataclass
class Plan:
    """A whole conversion.

    Attributes:
        kind: What the source is, one of `KINDS`.
        outputs: Tensors to be written.
        ignored: Reason by name of each source tensor that is left out.
        facts: What was found or inferred, in words, by name.
        save_config: Writes `config.json` for weights of a dtype into a folder.
        stem: Name of the weight file without suffix.
        verify: Runs the published rule and the result; given the checkpoint, the folder of the result and its dtype,
            gives the largest difference and the largest value of the rule. None where the tensors are copied as they
            are.
    """

    kind: str
    outputs: list[Output]
    ignored: dict[str, str]
    facts: dict[str, str]
    save_config: Callable[[Path, torch.dtype], None]
    stem: str = "model"
    verify: Callable[[Checkpoint, Path, torch.dtype], tuple[float, float]] | None = None
    checkpoints: list[Checkpoint] = field(default_factory=list)

    def dtype(self) -> torch.dtype:
        """The widest dtype of the source's weights that are used."""
        found = {self.entry(output).dtype for output in self.outputs if output.source is not None and not output.origin}
        return next(dtype for dtype in FLOATS if dtype in found)

    def entry(self, output: Output) -> Entry:
        """Shape and dtype of an output's source."""
        assert output.source is not None
        return self.checkpoints[output.origin].tensors[output.source]


def refuse(found: str, expected: str, step: str) -> ValueError:
    """Word a refusal: what was found, what was expected, what to do."""
    return ValueError(f"{found}; expected {expected}. {step}")


def shape_of(tensors: Mapping[str, Entry], key: str, dimensions: int = 2) -> tuple[int, ...]:
    """Give the shape of a tensor that must be there.

    Raises:
        ValueError: It is missing, has other dimensions, or one of them is 0.
    """
    if key not in tensors:
        raise refuse(f"`{key}` is missing", "the weights of the whole model", "Download all of its files.")
    shape = tensors[key].shape
    if len(shape) != dimensions or 0 in shape:
        raise refuse(f"`{key}` has shape {shape}", f"{dimensions} dimensions, none of them 0", "Check the file.")
    return shape


def check_layers(tensors: Mapping[str, Entry], prefix: str) -> int:
    """Count the layers `<prefix>N.`.

    Raises:
        ValueError: There is none, or one is missing.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = {int(match[1]) for key in tensors if (match := pattern.match(key)) and len(match[1]) < 7}
    if not found or max(found) + 1 != len(found):
        raise refuse(
            f"layers `{prefix}N` are {len(found)} of {max(found, default=-1) + 1}",
            "all of them, numbered from 0",
            "Download all files of the checkpoint.",
        )
    return len(found)


def ignore(tensors: Iterable[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Give the reason for each name that one of the patterns matches from its start to its end."""
    found = {}
    for key in tensors:
        reason = next((reason for pattern, reason in reasons.items() if re.fullmatch(pattern, key)), None)
        if reason is not None:
            found[key] = reason
    return found


def check_plan(plan: Plan, expected: Mapping[str, Any], checkpoints: Sequence[Checkpoint]) -> Plan:
    """Refuse a plan that leaves a source tensor or a weight of the result out.

    Args:
        plan: The plan.
        expected: A state dict of the result; only names and shapes are read.
        checkpoints: The source, and the second one if there is one.

    Returns:
        The plan, tied to the checkpoints, its outputs in the order the files hold them.

    Raises:
        ValueError: A tensor is unknown, missing, of another shape or no float; the first are named.
    """
    plan.checkpoints = list(checkpoints)
    used = {output.source for output in plan.outputs if output.origin == 0}
    problems = [f"unknown `{key}`" for key in checkpoints[0].tensors if key not in used and key not in plan.ignored]
    outputs = {output.name: output for output in plan.outputs}
    problems += [f"missing `{name}`" for name in expected if name not in outputs]
    for output in plan.outputs:
        problems += _problems(plan, output, expected)
    if problems:
        more = f", and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise ValueError(
            f"These weights are no complete {plan.kind}: {', '.join(problems[:4])}{more}. "
            "Check that the file is whole and of this model."
        )
    place = {key: number for checkpoint in checkpoints for number, key in enumerate(checkpoint.tensors)}
    ordered = sorted(plan.outputs, key=lambda o: (o.source is None, o.origin, place.get(o.source or "", 0)))
    return replace(plan, outputs=ordered)


def _problems(plan: Plan, output: Output, expected: Mapping[str, Any]) -> list[str]:
    """What is wrong with one output."""
    if output.name not in expected:
        return [f"unknown `{output.source}`"]
    if (wanted := tuple(expected[output.name].shape)) != output.shape:
        return [f"`{output.source}` of shape {output.shape} where {wanted} is expected"]
    if output.source is None:
        return []
    if output.source not in plan.checkpoints[output.origin].tensors:
        return [f"missing `{output.source}`"]
    entry = plan.entry(output)
    if entry.dtype not in FLOATS:
        return [f"`{output.source}` of dtype {entry.dtype}"]
    if not entry.shape or output.start + output.shape[0] > entry.shape[0]:
        return [f"`{output.source}` of shape {entry.shape} for {output.shape}"]
    return []
