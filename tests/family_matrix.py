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
from tiny_emu3 import emu3_processor, tiny_emu3
from tiny_families import (
    GLM_BOI,
    GLM_EOI,
    common_janus,
    glm_image_inputs,
    glm_image_logits,
    janus_prompts,
    tiny_glm_image,
)
from torch import Tensor
from transformers import (
    JanusForConditionalGeneration,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
)

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
        adapter = adapter_for(model, inputs["input_ids"], **self.options)
        adapter.read_call(inputs["input_ids"], inputs)
        if function := inputs.get("prefix_allowed_tokens_fn"):
            adapter.take_over(LogitsProcessorList([PrefixConstrainedLogitsProcessor(function, 1)]))
        return adapter


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


def janus_inputs(model: PreTrainedModel, rows: int, guided: bool) -> dict[str, Any]:
    """Prompts by the real processor."""
    return janus_prompts(rows) | ({"guidance_scale": GUIDANCE} if guided else {})


def janus_forward(model: PreTrainedModel, inputs: dict[str, Any], tokens: Tensor) -> Tensor:
    """The language model over words and codes, and the generation head."""
    embeds = [model.get_input_embeddings()(inputs["input_ids"]), model.prepare_embeddings_for_image_generation(tokens)]
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(tokens.shape)], 1)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    states = model.model.language_model(
        inputs_embeds=torch.cat(embeds, 1), attention_mask=mask, position_ids=positions
    ).last_hidden_state
    return model.model.generation_head(states[:, -tokens.shape[1] :])


def janus_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """Janus' own method with guidance; it fails without, so that the forward is asked code by code then."""
    ids = inputs["input_ids"]
    if "guidance_scale" in inputs:
        codes = JanusForConditionalGeneration.generate(model, **inputs, generation_mode="image", do_sample=False)
        return torch.cat([ids, codes], 1)
    embeds = model.get_input_embeddings()(ids)
    states = model.model.language_model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).last_hidden_state
    codes = model.model.generation_head(states[:, -1:]).argmax(-1)
    while codes.shape[1] < new_tokens:
        codes = torch.cat([codes, janus_forward(model, inputs, codes)[:, -1:].argmax(-1)], 1)
    return torch.cat([ids, codes], 1)


def glm_image_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """The stock method, and the end token, on which it leaves the model to hit.

    It guides wrongly where prompts differ in length, so that the forward is asked code by code then.
    """
    ids, end = inputs["input_ids"], torch.full((len(inputs["input_ids"]), 1), GLM_EOI)
    if "guidance_scale" not in inputs:
        return torch.cat([model.generate(**inputs, max_new_tokens=new_tokens - 1, do_sample=False), end], 1)
    negative = torch.full_like(end, GLM_BOI)
    unguided = {"input_ids": negative, "attention_mask": torch.ones_like(negative)}
    codes = ids[:, :0]
    for _ in range(new_tokens - 1):
        scores = [glm_image_logits(model, inputs | own, codes)[:, -1].log_softmax(-1) for own in ({}, unguided)]
        codes = torch.cat([codes, (scores[1] + GUIDANCE * (scores[0] - scores[1])).argmax(-1)[:, None]], 1)
    return torch.cat([ids, codes, end], 1)


def glm_image_forward(model: PreTrainedModel, inputs: dict[str, Any], tokens: Tensor) -> Tensor:
    """The stock forward at the stock positions."""
    return glm_image_logits(model, inputs, tokens)[:, -tokens.shape[1] :]


def emu3_inputs(model: PreTrainedModel, rows: int, guided: bool) -> dict[str, Any]:
    """Prompts by the real processor, images of 24 x 32 pixels: 3 x 4 codes."""
    texts, scale = ("a red fox", "hi", "blue")[:rows], GUIDANCE if guided else None
    inputs = image_prompts(model, emu3_processor(), texts, guidance_scale=scale, height=24, width=32)
    return {key: value for key, value in inputs.items() if key != "max_new_tokens"}


def emu3_plain(model: PreTrainedModel, inputs: dict[str, Any], new_tokens: int) -> Tensor:
    """The stock method."""
    return model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)


def emu3_forward(model: PreTrainedModel, inputs: dict[str, Any], tokens: Tensor) -> Tensor:
    """The stock forward, at codes and ends."""
    mask = torch.cat([inputs["attention_mask"], inputs["attention_mask"].new_ones(tokens.shape)], 1)
    ids = torch.cat([inputs["input_ids"], tokens], 1)
    logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    layout = inputs["prefix_allowed_tokens_fn"]
    return logits[:, -tokens.shape[1] :, [*layout.visual_ids, *layout.end_ids, layout.pad_id]]


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
    Family("janus", common_janus, janus_inputs, janus_plain, janus_forward, 16),
    Family("emu3", tiny_emu3, emu3_inputs, emu3_plain, emu3_forward, 3 * 5 + 3),
    Family("glm_image", tiny_glm_image, glm_image_inputs, glm_image_plain, glm_image_forward, 4 * 3 + 1),
)
