"""One row a family: a tiny model of the real classes, prompts, and what the family's own code makes of them.

`test_families.py` runs every row through the tests that hold for all families. A new family adds a row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from conftest import NUM_CODES
from tiny_chameleon import (
    BOI,
    SIZE,
    next_in_anole,
    next_in_lumina,
    plain_generate,
    tiny_anole,
    tiny_lumina,
    tiny_tokenizer,
    unblanked,
)
from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf import image_prompts
from lantern_hf.targets import adapter_for

PROMPTS = ("word3", "word1 word2 word9", "word4 word5")
GUIDANCE = 3.0


@dataclass(frozen=True)
class Family:
    """A family of targets.

    Attributes:
        name: Name of the row.
        make: Gives the tiny model, told the attention implementation; always the same weights.
        inputs: Gives arguments of `generate` for a number of prompts of unequal length, `input_ids` included but no
            `max_new_tokens`, told whether with guidance.
        plain: The family's own greedy decoding, told the model, the arguments and `max_new_tokens`: sequences.
        forward: The real class's own forward over prompts and tokens `(B, T)` behind them, without a cache: logits of
            the adapter's columns behind each of these tokens, `(B, T, C)`.
        new_tokens: Tokens of one image of every prompt.
        options: `target_options` of every call.
        num_codes: Size of the codebook.
    """

    name: str
    make: Callable[[str], PreTrainedModel]
    inputs: Callable[[PreTrainedModel, int, bool], dict[str, Any]]
    plain: Callable[[PreTrainedModel, dict[str, Any], int], Tensor]
    forward: Callable[[PreTrainedModel, dict[str, Any], Tensor], Tensor]
    new_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    num_codes: int = NUM_CODES

    def adapter(self, model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
        """The adapter of a call."""
        return adapter_for(model, inputs["input_ids"], **self.options)


def anole_inputs(model: PreTrainedModel, rows: int, guided: bool) -> dict[str, Any]:
    """Prompts as users make them."""
    scale = GUIDANCE if guided else None
    inputs = image_prompts(model, tiny_tokenizer(), PROMPTS[:rows], guidance_scale=scale)
    return {key: value for key, value in inputs.items() if key != "max_new_tokens"}


def lumina_inputs(model: PreTrainedModel, rows: int, guided: bool) -> dict[str, Any]:
    """Prompts as users make them, images of 8 x 12 pixels: 4 x 6 codes."""
    scale = GUIDANCE if guided else None
    inputs = image_prompts(model, tiny_tokenizer(), PROMPTS[:rows], guidance_scale=scale, height=8, width=12)
    return {key: value for key, value in inputs.items() if key not in ("max_new_tokens", "eos_token_id")}


def open_lumina_inputs(model: PreTrainedModel, rows: int, guided: bool) -> dict[str, Any]:
    """The same, the size left for the call to say."""
    inputs = lumina_inputs(model, rows, guided)
    inputs["input_ids"], inputs["attention_mask"] = inputs["input_ids"][:, :-2], inputs["attention_mask"][:, :-2]
    if guided:
        inputs["negative_prompt_ids"] = torch.tensor([[BOI]] * rows)
    return inputs


def chameleon_forward(model: PreTrainedModel, inputs: dict[str, Any], tokens: Tensor) -> Tensor:
    """Chameleon's forward, which the stock class blanks, at the adapter's columns."""
    mask = inputs["attention_mask"]
    mask = torch.cat([mask, mask.new_ones(tokens.shape)], 1)
    ids = torch.cat([inputs["input_ids"], tokens], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = unblanked(model)(ids, attention_mask=mask, position_ids=positions).logits[:, -tokens.shape[1] :]
    return logits[..., adapter_for(model, inputs["input_ids"]).columns]


def anole_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """transformers' loop over Chameleon's forward, its guidance, and Anole's structure."""
    return plain_generate(model, next_in_anole, **inputs, max_new_tokens=new_tokens, do_sample=False)


def lumina_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """The same with Lumina's structure."""
    return plain_generate(model, next_in_lumina, **inputs, max_new_tokens=new_tokens, do_sample=False)


def sized_lumina_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """The same for images of 8 x 12 pixels."""

    def follow(tail: list[int]) -> list[int]:
        return [SIZE + (2, 3)[len(tail)]] if len(tail) < 2 else next_in_lumina(tail)

    return plain_generate(model, follow, **inputs, max_new_tokens=new_tokens, do_sample=False)


FAMILIES = (
    Family("anole", tiny_anole, anole_inputs, anole_plain, chameleon_forward, 16),
    Family("lumina", tiny_lumina, lumina_inputs, lumina_plain, chameleon_forward, 4 * 7 + 1),
    Family(
        "lumina-size-asked-for",
        tiny_lumina,
        open_lumina_inputs,
        sized_lumina_plain,
        chameleon_forward,
        2 + 4 * 7 + 1,
        {"height": 8, "width": 12},
    ),
)
