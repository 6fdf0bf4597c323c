"""Carries out a plan: reads blocks of rows, changes them as the plan says, writes them, one file open on each side."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.plan import Output, Plan
from lantern_hf.convert.writer import BLOCK_BYTES, ShardWriter, Slot, plan_shards, write_index
from lantern_hf.models.llamagen import interleaved_to_halves

__all__ = ["blocks", "largest_difference", "write_weights"]


def write_weights(plan: Plan, folder: Path, dtype: torch.dtype, max_shard_bytes: int, progress: bool) -> list[str]:
    """Write the weights of a plan.

    Args:
        plan: The plan.
        folder: Where to.
        dtype: Dtype of the result.
        max_shard_bytes: Size of one file.
        progress: Whether a bar is shown.

    Returns:
        Names of the files with weights.

    Raises:
        ValueError: A weight is not finite, or does not fit the dtype.
    """
    outputs = {output.name: output for output in plan.outputs}
    shards = plan_shards([Slot(name, o.shape, dtype) for name, o in outputs.items()], max_shard_bytes, plan.stem)
    total = sum(slot.nbytes for slots in shards.values() for slot in slots)
    with tqdm(total=total, unit="B", unit_scale=True, desc=plan.kind, disable=None if progress else True) as bar:
        for name, slots in shards.items():
            writer = ShardWriter(folder / name, slots)
            try:
                for slot in slots:
                    for block in blocks(plan, outputs[slot.name], dtype):
                        writer.write(slot, block)
                        bar.update(block.numel() * dtype.itemsize)
                writer.close()
            finally:
                writer.abort()
    for checkpoint in plan.checkpoints:
        checkpoint.close()
    write_index(folder, shards, plan.stem)
    return list(shards)


def blocks(plan: Plan, output: Output, dtype: torch.dtype) -> Iterator[Tensor]:
    """Give the rows of one output tensor, a few megabytes at a time.

    Args:
        plan: The plan it belongs to.
        output: The tensor.
        dtype: Dtype of the result.

    Yields:
        `(rows, ...)` in `dtype`.

    Raises:
        ValueError: A weight is not finite, or does not fit the dtype.
    """
    rows = output.shape[0]
    row_bytes = 4 * max(1, torch.Size(output.shape[1:]).numel())
    step = max(1, BLOCK_BYTES // row_bytes)
    if output.head_dim:  # whole heads
        step = max(1, step // output.head_dim) * output.head_dim
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        if output.source is None:
            yield torch.full((stop - start, *output.shape[1:]), output.fill, dtype=dtype)
            continue
        source = plan.checkpoints[output.origin].rows(output.source, output.start + start, output.start + stop)
        block = _change(source, output).to(dtype)
        if not bool(block.isfinite().all()):
            raise _not_finite(output, source, dtype)
        yield block


def largest_difference(plan: Plan, folder: Path, dtype: torch.dtype) -> tuple[float, float]:
    """Read a result back beside its source.

    Args:
        plan: The plan that was carried out.
        folder: The result.
        dtype: Its dtype.

    Returns:
        The largest difference of two weights, and the largest weight.
    """
    error = scale = 0.0
    with Checkpoint(folder) as result:
        for output in plan.outputs:
            start = 0
            for block in blocks(plan, output, dtype) if output.source is not None else ():
                written = result.rows(output.name, start, start + len(block))
                error = max(error, float((block.double() - written.double()).abs().max()))
                scale = max(scale, float(block.abs().max()))
                start += len(block)
    return error, scale


def _change(block: Tensor, output: Output) -> Tensor:
    """Bring rows of the source into the order and shape of the result."""
    block = block.reshape(len(block), *output.shape[1:])
    if output.head_dim:
        block = interleaved_to_halves(block.contiguous(), len(block) // output.head_dim)
    return F.normalize(block.float(), dim=-1) if output.normalize else block


def _not_finite(output: Output, source: Tensor, dtype: torch.dtype) -> ValueError:
    """Tell damaged weights from those that a smaller dtype cannot hold."""
    if bool(source.isfinite().all()):
        largest = float(source.abs().max())
        return ValueError(
            f"`{output.source}` holds {largest:g}, too large for {dtype}. Convert to bfloat16 or float32."
        )
    return ValueError(f"`{output.source}` holds values that are not finite. The file is damaged; download it again.")
