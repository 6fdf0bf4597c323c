"""The adapter of a batch, told what a call of `generate` would tell it, and the place of every token in its image.

Decoding asks no model where structure decides: a token that must come is drafted and accepted for free, and what may
not come is taken out of both distributions (`lantern_hf.structure`). Training sees the same by the same rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from lantern_hf.targets import TargetAdapter, adapter_for
from lantern_hf.training.data import TokenBatch

__all__ = ["Places", "bound_adapter", "check_structure", "places_of", "walk"]


class Places(NamedTuple):
    """Where the tokens after the first stand, for B rows of T tokens.

    Attributes:
        offsets: Offset at which each was decided, `(B, T - 1)` int64, as `TargetAdapter` defines it.
        forced: Whether it had to come, `(B, T - 1)` bool.
    """

    offsets: Tensor
    forced: Tensor


def bound_adapter(
    target: PreTrainedModel, prompt: Mapping[str, Tensor], options: Mapping[str, Any] | None = None
) -> TargetAdapter:
    """Make the adapter of a batch.

    Args:
        target: The target.
        prompt: Prompts of the batch, stacked, as in `TokenBatch`.
        options: Options of the family, as `target_options` of `lantern_generate`.

    Raises:
        ValueError: The prompts ask for different things, or do not fit the options.
    """
    adapter = adapter_for(target, prompt["input_ids"], **(options or {}))
    call = adapter.call_of_rows(prompt)
    adapter.read_call(prompt["input_ids"], call)
    if (function := call.get("prefix_allowed_tokens_fn")) is not None:
        adapter.take_over(LogitsProcessorList([PrefixConstrainedLogitsProcessor(function, 1)]))
    return adapter


def walk(adapter: TargetAdapter, input_ids: Tensor, tokens: Tensor) -> Tensor:
    """Give the offset at which each token was decided.

    Args:
        adapter: As `bound_adapter` makes it, for these prompts.
        input_ids: Prompts, `(B, S)` int64.
        tokens: Tokens behind them, `(B, T)` int64.

    Returns:
        `(B, T)` int64.
    """
    offset = adapter.start(input_ids).to(tokens.device)
    straight = offset[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    # Most families count: if every step of the count is a step of the family, it is the family's walk.
    if bool((adapter.advance(straight[:, :-1], tokens[:, :-1]) == straight[:, 1:]).all()):
        return straight
    offsets = [offset]
    for place in range(tokens.shape[1] - 1):
        offsets.append(adapter.advance(offsets[-1], tokens[:, place]))
    return torch.stack(offsets, dim=1)


def places_of(adapter: TargetAdapter, batch: TokenBatch, device: torch.device | None = None) -> Places | None:
    """Give the places of a batch's tokens after the first; None where images have no structure.

    Args:
        adapter: As `bound_adapter` makes it, for the batch's prompts.
        batch: The batch.
        device: Where the places are to be; by default where the batch is.
    """
    if not adapter.structured:
        return None
    offsets = walk(adapter, batch.prompt["input_ids"], batch.tokens)[:, 1:]
    return Places(offsets.to(device), (adapter.forced(offsets) >= 0).to(device))


def check_structure(adapter: TargetAdapter, batch: TokenBatch) -> None:
    """Refuse tokens that are no image of the size that their prompt asks for.

    Args:
        adapter: As `bound_adapter` makes it, for the batch's prompts.
        batch: The batch.

    Raises:
        ValueError: A token stands where another one must come; the first is named.
    """
    if not adapter.structured:
        return
    forced = adapter.forced(walk(adapter, batch.prompt["input_ids"], batch.tokens))
    wrong = (forced >= 0) & (forced != batch.tokens) & batch.tokens_mask
    if bool(wrong.any()):
        row, place = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Token {place} after the prompt is {int(batch.tokens[row, place])}, where an image of the size that the "
            f"prompt asks for has {int(forced[row, place])}. Give the `height` and `width` that the sequences were "
            "made with, and all tokens that `generate` added, row ends included."
        )
