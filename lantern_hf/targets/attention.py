"""Tree masks in the form each attention implementation understands, and the switch away from those that take none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def attention_argument(mask: Tensor | None, implementation: str, dtype: torch.dtype) -> Any:
    """Turn a tree mask into what `attention_mask=` must be.

    Args:
        mask: `(R, 1, N, total)` bool, True where a node attends, or None for everything.
        implementation: Name of the attention implementation in force.
        dtype: Dtype of the queries.

    Returns:
        The bool mask for sdpa, an additive one for eager (which adds the mask, so that a bool would be read as 0 or 1),
        a `BlockMask` for flex attention.

    Raises:
        ValueError: An implementation that takes no arbitrary mask.
    """
    if mask is None or implementation == "sdpa":
        return mask
    if implementation == "eager":
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
    if implementation == "flex_attention":
        return _block_mask(mask)
    raise ValueError(
        f"Attention implementation {implementation!r} takes no tree mask. Use sdpa, eager or flex_attention: "
        "model.set_attn_implementation('sdpa')."
    )


def _block_mask(mask: Tensor) -> Any:
    """Make flex attention's mask from a dense one."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, total = mask.shape
    return create_block_mask(
        lambda batch, head, query, key: mask[batch, 0, query, key], rows, None, queries, total, device=mask.device
    )


@contextmanager
def tree_attention(model: PreTrainedModel) -> Iterator[str]:
    """Give the implementation for tree passes, flash attention replaced by sdpa until the context ends.

    The two read the same cache, so switching mid-sequence is exact. It is a write to the model's configuration: two
    threads must not decode on one flash-attention model at a time.
    """
    implementation = model.config.get_text_config()._attn_implementation or "eager"
    if "flash" not in implementation:
        yield implementation
        return
    model.set_attn_implementation("sdpa")
    try:
        yield "sdpa"
    finally:
        model.set_attn_implementation(implementation)
