"""What the frozen target says about a batch, computed on the fly: the head's inputs and what it is to predict.

The target runs exactly as in `lantern_generate`: the prompt through `adapter.prefill`, the tokens through
`adapter.tree_pass` behind it, so that a family's embeddings and positions are the same in training and in generation.
In the notation of `LanternDraftModel`, entry t of a sequence x_0 .. x_n reads `embedding(x_{t+1})` and h_t, stands at
the position of x_{t+1} and is to give h_{t+1}, from which the target draws x_{t+2}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.cache import new_dynamic_cache
from lantern_hf.draft import POSITION_OFFSET
from lantern_hf.targets import TargetAdapter
from lantern_hf.targets.attention import attention_argument, tree_attention
from lantern_hf.targets.base import Prefill
from lantern_hf.training.binding import Places, places_of
from lantern_hf.training.data import TokenBatch, pad_left

__all__ = ["TargetFeatures", "both_streams", "drop_prompts", "frozen", "target_features", "with_noise"]


_PROMPT = 1 << 40  # tells the seed of a prompt's noise from that of its tokens


@dataclass(frozen=True)
class TargetFeatures:
    """Inputs and goals of the head over E entries; an entry past `start` is one that decoding drafts from.

    Attributes:
        embeds: Embedding of the token of each entry, x_{t+1}, `(B, E, H)`.
        hidden: Target hidden state before that token, h_t, `(B, E, H)`.
        next_hidden: Target hidden state after it, h_{t+1}, which the head is to predict, `(B, E, H)`.
        position_ids: Position of the token, `(B, E)` int64.
        mask: `(B, E)` bool, False where h_t is padding; None when nothing is padding.
        start: First entry that is learnt: it reads the first token after the prompt. Decoding never drafts that token
            itself.
        learnt: `(B, E - start)` bool, whether the token that follows is there and may be emitted.
        places: Where the tokens that follow stand in their images, `(B, E - start)`; None where images have no
            structure.
    """

    embeds: Tensor
    hidden: Tensor
    next_hidden: Tensor
    position_ids: Tensor
    mask: Tensor | None
    start: int
    learnt: Tensor
    places: Places | None = None

    @property
    def drawn(self) -> Tensor:
        """Which of `learnt` the target draws: decoding gives a token that must come for free, whatever is drafted."""
        return self.learnt if self.places is None else self.learnt & ~self.places.forced


@torch.no_grad()
def target_features(adapter: TargetAdapter, batch: TokenBatch, device: torch.device | None = None) -> TargetFeatures:
    """Run the target once over a batch.

    Args:
        adapter: Adapter of the target, made for the batch's prompts by `bound_adapter`, and read no other with.
        batch: The batch, on the device of the target's embeddings.
        device: Where the features are to be; by default where the target leaves them.

    Returns:
        Features of all entries but the last token's, which nothing follows.

    Raises:
        ValueError: The sequences have fewer than two tokens.
    """
    if batch.tokens.shape[1] < 2:
        raise ValueError(f"Sequences need at least 2 tokens after the prompt to train on, got {batch.tokens.shape[1]}.")
    cache = new_dynamic_cache(adapter.text_config)
    prompt = adapter.prefill(batch.prompt["input_ids"], cache, **_prompt_arguments(adapter, batch))
    tokens = batch.tokens[:, :-1]
    steps = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    positions = prompt.position_ids[:, -1:] + steps.to(prompt.position_ids.device)
    with tree_attention(adapter.model) as attention:
        mask = attention_argument(_causal_mask(prompt, tokens), attention, adapter.model.dtype)
        after, _ = adapter.tree_pass(tokens, positions, mask, cache)
    where = after.device if device is None else device
    hidden = torch.cat([prompt.hidden_states.to(where), after.to(where)], dim=1)  # h_0 .. h_{S+T-2}
    embeds = torch.cat([prompt.embeds[:, 1:].to(where), adapter.embed(tokens, positions).to(where)], dim=1)
    learnt = batch.tokens_mask[:, 1:] & (adapter.columns_of(batch.tokens[:, 1:]) >= 0)
    return TargetFeatures(
        embeds=embeds,
        hidden=hidden[:, :-1],
        next_hidden=hidden[:, 1:],
        position_ids=torch.cat([prompt.position_ids[:, :-1] + POSITION_OFFSET, positions], dim=1).to(where),
        mask=_entry_padding(prompt, tokens.shape[1], where),
        start=prompt.hidden_states.shape[1] - 1,
        learnt=learnt.to(where),
        places=places_of(adapter, batch, where),
    )


def _prompt_arguments(adapter: TargetAdapter, batch: TokenBatch) -> dict[str, Any]:
    """Arguments of the prompt's forward as `generate` prepares them: positions, and a mask only when it masks."""
    model, call = adapter.model, adapter.call_of_rows(batch.prompt)
    prompt = {name: value for name, value in call.items() if isinstance(value, Tensor) and name != "input_ids"}
    # Features are often stored in another precision than the target's.
    arguments: dict[str, Any] = {n: v.to(model.dtype) if v.is_floating_point() else v for n, v in prompt.items()}
    mask = arguments["attention_mask"]
    if "position_ids" not in arguments:
        arguments["position_ids"] = model._prepare_position_ids_for_generation(
            batch.prompt["input_ids"], {"attention_mask": mask}
        )
    if bool(mask.all()):
        del arguments["attention_mask"]
    return arguments


def _causal_mask(prompt: Prefill, tokens: Tensor) -> Tensor:
    """Which slots each token after the prompt attends to, `(B or 1, 1, T, S + T)` bool."""
    length = tokens.shape[1]
    own = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
    everything = own.new_ones(1, prompt.hidden_states.shape[1])
    before = everything if prompt.mask is None else prompt.mask.to(tokens.device)
    mask = torch.cat([before[:, None].expand(-1, length, -1), own.expand(len(before), -1, -1)], dim=-1)
    return mask[:, None]


def _entry_padding(prompt: Prefill, num_tokens: int, device: torch.device) -> Tensor | None:
    """Which entries hold a hidden state that is not padding, `(B, E)` bool; None for all."""
    if prompt.mask is None or bool(prompt.mask.all()):
        return None
    return torch.nn.functional.pad(prompt.mask.to(device), (0, num_tokens - 1), value=True)


def drop_prompts(adapter: TargetAdapter, batch: TokenBatch, dropped: Tensor) -> TokenBatch:
    """Replace the prompts of some rows by the target's unconditional prompt.

    Args:
        adapter: Adapter of the target, made for the batch's prompts.
        batch: The batch.
        dropped: `(B,)` bool, the rows to replace.

    Returns:
        The batch with new `input_ids` and `attention_mask`. What else the prompts hold stays: it must mean nothing to
        the unconditional prompt, as captions mean nothing to LlamaGen's, or hold for both, as sizes do.
    """
    ids, mask = batch.prompt["input_ids"], batch.prompt["attention_mask"]
    new_ids, new_mask = adapter.blank(ids, mask)
    new_mask = torch.ones_like(new_ids) if new_mask is None else new_mask
    width, old = max(ids.shape[1], new_ids.shape[1]), ids.shape[1]
    prompt = {
        name: pad_left(value, width - old) if value.ndim > 1 and value.shape[1] == old else value
        for name, value in batch.prompt.items()
    }
    for name, value in (("input_ids", new_ids), ("attention_mask", new_mask)):
        replaced = pad_left(value, width - value.shape[1]).to(prompt[name].dtype)
        prompt[name] = torch.where(dropped[:, None].to(ids.device), replaced, prompt[name])
    prompt.pop("position_ids", None)
    return TokenBatch(prompt, batch.tokens, batch.tokens_mask)


def both_streams(adapter: TargetAdapter, batch: TokenBatch) -> TokenBatch:
    """Give a batch of `(2B, ...)`: its rows, then the same tokens behind the unconditional prompt, as under guidance.

    Args:
        adapter: Adapter of the target, made for the batch's prompts.
        batch: The batch, B rows.
    """
    prompt = {name: torch.cat([value, value]) for name, value in batch.prompt.items()}
    twice = TokenBatch(prompt, batch.tokens.repeat(2, 1), batch.tokens_mask.repeat(2, 1))
    return drop_prompts(adapter, twice, torch.arange(len(twice.tokens)) >= len(batch.tokens))


def with_noise(features: TargetFeatures, amount: float, seeds: Sequence[int]) -> TargetFeatures:
    """Add uniform noise to the hidden states that the head reads; what it is to predict stays.

    A row's noise follows from its seed and, on the CPU, from how far an entry is from the end of the prompt, so it is
    the same however the row is padded and whichever process trains on it.

    Args:
        features: Entries of a batch.
        amount: Half width.
        seeds: One for each row. Fewer seeds than rows are used again from the first, so that both streams of guidance
            read the same noise.
    """
    if not amount:
        return features
    hidden, start = features.hidden, features.start
    noise = torch.empty_like(hidden, dtype=torch.float32)
    for row in range(len(hidden)):
        seed, generator = seeds[row % len(seeds)], torch.Generator(hidden.device)
        noise[row, start:].uniform_(-amount, amount, generator=generator.manual_seed(seed))
        noise[row, :start].uniform_(-amount, amount, generator=generator.manual_seed(seed ^ _PROMPT))
        noise[row, :start] = noise[row, :start].flip(0)  # drawn from the end of the prompt backwards
    return replace(features, hidden=(hidden + noise).to(hidden.dtype))


@contextmanager
def frozen(target: PreTrainedModel) -> Iterator[None]:
    """Put a target into eval mode without gradients, and give every module and parameter its state back afterwards."""
    modes = [(module, module.training) for module in target.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in target.parameters()]
    target.eval()
    for parameter, _ in gradients:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, required in gradients:
            parameter.requires_grad_(required)
