"""Reading the prompts of a generation: one stream, or two under guidance, into one cache.

Runs the target once per stream. Knows no tree, no draft and no acceptance.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

from lantern_hf.cache import RaggedCache, decoding_cache, merge_streams, new_dynamic_cache
from lantern_hf.processors import Guidance
from lantern_hf.targets.base import Prefill, TargetAdapter

# Decided by the adapter, whatever `generate` passes.
_NOT_FOR_THE_PROMPT = ("use_cache", "logits_to_keep", "output_hidden_states", "output_attentions", "return_dict")


class Stream(NamedTuple):
    """Ids of one stream, `(B, S)` int64, and what its forward takes besides them."""

    input_ids: Tensor
    kwargs: dict[str, Any]

    @property
    def width(self) -> int:
        """Slots the prompt takes; features in place of ids, and in front of them, count as well."""
        embeds = self.kwargs.get("inputs_embeds")
        return self.input_ids.shape[1] if embeds is None else embeds.shape[1]


class ReadPrompts(NamedTuple):
    """The prompts of all streams after their pass.

    Attributes:
        prompt: The streams stacked, conditional rows first, shorter ones padded on the left, on the device asked for.
        cache: Their keys and values.
        layers: States of every layer of the conditional stream, each `(B, S, H)`, or None.
    """

    prompt: Prefill
    cache: RaggedCache
    layers: tuple[Tensor, ...] | None


def prompt_streams(
    adapter: TargetAdapter, input_ids: Tensor, guidance: Guidance | None, model_kwargs: dict[str, Any]
) -> list[Stream]:
    """Give the conditional stream and, under guidance, the unconditional one.

    Args:
        adapter: The target's adapter.
        input_ids: Prompts, `(B, S)` int64.
        guidance: Guidance of the call.
        model_kwargs: What `generate` passes to the model.

    Raises:
        ValueError: The unconditional prompts do not fit the rows.
    """
    kwargs = {key: value for key, value in model_kwargs.items() if key not in _NOT_FOR_THE_PROMPT}
    streams = [Stream(input_ids, kwargs)]
    if guidance is not None:
        ids, mask = _unconditional(adapter, input_ids, guidance, kwargs.get("attention_mask"))
        streams.append(Stream(ids, {} if mask is None else {"attention_mask": mask}))
    return streams


def _unconditional(
    adapter: TargetAdapter, input_ids: Tensor, guidance: Guidance, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The unconditional prompts, one for each row, and their mask."""
    ids, own_mask = guidance.input_ids, guidance.attention_mask
    if ids is None:
        ids, own_mask = adapter.unconditional(input_ids, mask)
    rows = len(input_ids)
    if rows % len(ids):
        raise ValueError(
            f"`negative_prompt_ids` has {len(ids)} rows for {rows} sequences. Pass one row per prompt, or a single one."
        )
    ids = ids.to(input_ids.device).repeat_interleave(rows // len(ids), 0)
    if own_mask is None:
        return ids, None
    return ids, own_mask.to(input_ids.device).repeat_interleave(rows // len(own_mask), 0)


def read_prompts(
    adapter: TargetAdapter,
    streams: list[Stream],
    given: Cache | None,
    *,
    room: int,
    all_layers: bool,
    device: torch.device,
) -> ReadPrompts:
    """Run the target over the prompts.

    Args:
        adapter: The target's adapter.
        streams: As `prompt_streams` gives them.
        given: The cache a user passed or `generate` made.
        room: Slots that a row may need behind its prompt, the last tree included.
        all_layers: Whether the states of every layer are wanted too.
        device: Where the decoding loop works.

    Raises:
        ValueError: The cache cannot be used; nothing has run by then.
    """
    config, widths = adapter.text_config, [stream.width for stream in streams]
    cache, direct = decoding_cache(given, config, slots=max(widths) + room, guided=len(streams) > 1)
    caches = [cache if direct else new_dynamic_cache(config) for _ in streams]
    prompts = [
        adapter.prefill(stream.input_ids, own, all_layers=all_layers and index == 0, **stream.kwargs)
        for index, (stream, own) in enumerate(zip(streams, caches, strict=True))
    ]
    if not direct:
        merge_streams(caches, widths, cache)
    prompt = _stack(prompts, max(widths), device)
    padding = None if prompt.mask is None else ~prompt.mask
    rows = len(prompt.position_ids)
    return ReadPrompts(prompt, RaggedCache(cache, rows, device, max(widths), padding), prompts[0].all_layers)


def _stack(prompts: list[Prefill], width: int, device: torch.device) -> Prefill:
    """Stack the prompts of the streams, shorter ones padded on the left."""
    padded = []
    for prompt in prompts:
        rows, length = prompt.position_ids.shape
        mask = prompt.mask
        if mask is None:
            mask = torch.ones(rows, length, dtype=torch.bool, device=device)
        missing = width - length
        padded.append(
            (
                F.pad(prompt.hidden_states, (0, 0, missing, 0)),
                F.pad(prompt.embeds, (0, 0, missing, 0)),
                F.pad(prompt.position_ids.to(device), (missing, 0)),
                F.pad(mask.to(device), (missing, 0), value=False),
            )
        )
    hidden, embeds, positions, masks = (torch.cat(column) for column in zip(*padded, strict=True))
    return Prefill(hidden, embeds, positions, masks)
