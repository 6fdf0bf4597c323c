"""Features of single sequences, cut out of one batch and put into another: what a cache keeps.

A row holds real entries only, whatever it was padded with; padding is masked, so it is put back as zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_hf.targets import TargetAdapter
from lantern_hf.training.binding import places_of
from lantern_hf.training.data import TokenBatch
from lantern_hf.training.features import TargetFeatures

__all__ = ["RowFeatures", "join_rows", "split_rows"]


class RowFeatures(NamedTuple):
    """Features of one sequence of S real prompt tokens and T tokens behind them, in the notation of `TargetFeatures`.

    Attributes:
        hidden: h_0 .. h_{S+T-2}, `(S + T - 1, H)`.
        prompt_embeds: Embeddings of x_1 .. x_{S-1}, `(S - 1, H)`; those of the tokens are looked up again.
        position_ids: Positions of x_1 .. x_{S+T-2}, `(S + T - 2,)` int64.
    """

    hidden: Tensor
    prompt_embeds: Tensor
    position_ids: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes it takes."""
        return sum(value.numel() * value.element_size() for value in self)


def split_rows(features: TargetFeatures, batch: TokenBatch) -> list[RowFeatures]:
    """Cut a batch into its rows, padding left out.

    Args:
        features: Features of the batch.
        batch: The batch; its masks say what is padding.

    Returns:
        One `RowFeatures` per row, views of the batch.
    """
    rows = []
    for row, length in enumerate(batch.tokens_mask.sum(1).tolist()):
        first = 0 if features.mask is None else int(features.mask[row].long().argmax())
        stop = features.start + length  # h of the last token but one is entry start + T - 1 of `hidden`
        states = torch.cat([features.hidden[row], features.next_hidden[row, -1:]])
        rows.append(
            RowFeatures(
                states[first:stop],
                features.embeds[row, first : features.start],
                features.position_ids[row, first : stop - 1],
            )
        )
    return rows


def join_rows(
    rows: list[RowFeatures], batch: TokenBatch, adapter: TargetAdapter, device: torch.device
) -> TargetFeatures:
    """Pad rows into a batch.

    Args:
        rows: Features of each row of the batch.
        batch: The batch; tokens decide what is learnt.
        adapter: Adapter of the target, made for the batch's prompts.
        device: Where the features are to be.

    Returns:
        Features as `target_features` gives them, up to what stands in padding.
    """
    prompts = [len(row.prompt_embeds) for row in rows]
    start, tokens = max(prompts), batch.tokens[:, :-1]
    stop = start + tokens.shape[1]  # entries

    def padded(values: list[Tensor], length: int) -> Tensor:
        """Stack `(n, ...)` behind as much padding as their row's prompt lacks."""
        stacked = []
        for value, prompt in zip(values, prompts, strict=True):
            missing = start - prompt
            around = (0, 0) * (value.ndim - 1) + (missing, length - missing - len(value))
            stacked.append(F.pad(value.to(device), around))
        return torch.stack(stacked)

    positions = padded([row.position_ids for row in rows], stop)
    hidden = padded([row.hidden for row in rows], stop + 1)
    prompt_embeds = padded([row.prompt_embeds for row in rows], start)
    embeds = adapter.embed(tokens, positions[:, start:].to(tokens.device)).to(device)
    missing = start - torch.tensor(prompts, device=device)
    mask = None if not bool(missing.any()) else torch.arange(stop, device=device) >= missing[:, None]
    learnt = batch.tokens_mask[:, 1:] & (adapter.columns_of(batch.tokens[:, 1:]) >= 0)
    return TargetFeatures(
        embeds=torch.cat([prompt_embeds.to(embeds.dtype), embeds], dim=1),
        hidden=hidden[:, :-1],
        next_hidden=hidden[:, 1:],
        position_ids=positions,
        mask=mask,
        start=start,
        learnt=learnt.to(device),
        places=places_of(adapter, batch, device),
    )
