"""`check_tree_support`: whether a model scores a tree as it scores sequences, asked of the model itself.

A model that misreads a tree mask says nothing, so a pass over a small tree is compared with plain ones over its paths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf._checkpointing import check_checkpointing
from lantern_hf._placement import wake
from lantern_hf._wrappers import unwrap
from lantern_hf.cache import RaggedCache, check_cache, new_dynamic_cache
from lantern_hf.targets import adapter_for
from lantern_hf.targets.attention import attention_argument, tree_attention
from lantern_hf.tree import DraftTree

__all__ = ["check_tree_support"]

_LEAST, _MOST = 1e-3, 0.25
"""Bounds of the tolerance: what TF32 products may cost in float32, and the noise beyond which nothing can be told."""


@torch.no_grad()
def check_tree_support(model: PreTrainedModel, tolerance: float | None = None) -> None:
    """Compare a tree pass with plain passes on six tokens, since a model that misreads a tree mask says nothing.

    Args:
        model: The model.
        tolerance: Largest difference of the last hidden states, relative to their size. By default two roundings of the
            dtype or three times what plain passes of different lengths differ by, whichever is more, within
            [1e-3, 0.25]. So it is 1e-3 in float32, 0.016 in bfloat16 on most machines, and larger where layers quantise
            their inputs by the largest value in a pass.

    Raises:
        ValueError: No family serves the model, its layers drop the cache, or its tree pass differs.
    """
    model = unwrap(model)
    wake(model)
    adapter = adapter_for(model)
    check_checkpointing(model)
    device = adapter.device
    top = min(adapter.vocab_size, getattr(model.config, "codebook_size", adapter.vocab_size))
    tokens = (torch.arange(6, device=device) * 5 + 3)[None] % top
    prefix, nodes = tokens[:, :3], tokens[:, 3:]
    with tree_attention(model) as attention:
        tree = _fork(adapter, prefix, nodes, attention)
        one_by_one = _pass(adapter, [prefix, nodes[:, :1], nodes[:, 1:2]])
        at_once = _pass(adapter, [torch.cat([prefix, nodes[:, [0, 2]]], 1)])
    expected = torch.stack([one_by_one[:, -1], at_once[:, -1]], dim=1)
    size = expected.abs().max().clamp_min(1e-6)
    difference = ((tree[:, 1:] - expected).abs().max() / size).item()
    if tolerance is None:
        # The two paths are the same up to their last token: what differs there is rounding.
        noise = ((one_by_one[:, :-1] - at_once[:, :-1]).abs().max() / size).item()
        tolerance = min(max(_LEAST, 2 * _rounding(model.dtype), 3 * noise), _MOST)
    if not difference <= tolerance:
        raise ValueError(
            f"{type(model).__name__} does not score a tree as it scores sequences: hidden states differ by "
            f"{difference:.2g} of their size, allowed is {tolerance:.2g}. Its attention ({attention}) ignores the tree "
            "mask or the positions; try model.set_attn_implementation('sdpa')."
        )


def _rounding(dtype: torch.dtype) -> float:
    """Distance from 1 to the next number of a dtype."""
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0


def _pass(adapter: Any, parts: list[Tensor], cache: Any = None) -> Tensor:
    """Hidden states of tokens that are read part by part, `(1, T, H)` float32, under the model's own causal mask."""
    cache = new_dynamic_cache(adapter.text_config) if cache is None else cache
    first, states = 0, []
    for tokens in parts:
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
        states.append(adapter.tree_pass(tokens, positions, None, cache)[0].float())
        first += tokens.shape[1]
    return torch.cat(states, 1)


def _fork(adapter: Any, prefix: Tensor, nodes: Tensor, attention: str) -> Tensor:
    """Hidden states of a root with two children behind a prefix, `(1, 3, H)` float32."""
    cache = new_dynamic_cache(adapter.text_config)
    _pass(adapter, [prefix], cache)
    check_cache(cache)
    ragged = RaggedCache(cache, 1, prefix.device, width=prefix.shape[1])
    tree = DraftTree.from_choices([(0,), (1,)]).to(prefix.device)
    mask = attention_argument(ragged.tree_mask(tree.mask), attention, adapter.model.dtype)
    hidden, _ = adapter.tree_pass(nodes, prefix.shape[1] + tree.depths[None], mask, cache)
    return hidden.float()
