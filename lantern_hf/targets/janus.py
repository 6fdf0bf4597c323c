"""Janus and Janus-Pro: a Llama that reads text and images, with embeddings and a head of their own for image tokens.

Its own `generate(generation_mode="image")` decodes images by itself and takes no decoding loop, so an attached model's
call is turned into one that does: the prompt enters as embeddings, and what comes out are the codes alone, as with the
stock method. Text is decoded strictly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria
from transformers.utils import logging

from lantern_hf._placement import read_weight
from lantern_hf.cache import CACHE_KEYWORD
from lantern_hf.targets.base import TargetAdapter, to_module
from lantern_hf.targets.image_side import Grid

logger = logging.get_logger(__name__)

MODES = ("text", "image")
DEFAULT_GUIDANCE = 5.0  # of the stock method


class JanusAdapter(TargetAdapter):
    """Serves `JanusForConditionalGeneration`, Janus and Janus-Pro alike.

    Args:
        model: The target.
        input_ids: Prompts of the call, `(B, S)` int64.
        generation_mode: `"image"` or `"text"`, as in the model's own `generate`. Default: images for prompts that end
            with the begin-image token, as the processor ends those for images.

    Raises:
        ValueError: An unknown mode, or prompts that ask for different ones.
    """

    family = "janus"
    model_types = ("janus",)
    has_codebook = True
    codebook_metric = "cosine"
    returns_prompt = False
    needs_processor = True
    defaults = MappingProxyType({"guidance_scale": DEFAULT_GUIDANCE})

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None, *, generation_mode: str | None = None):
        super().__init__(model, input_ids)
        if generation_mode not in (None, *MODES):
            raise ValueError(f"`generation_mode` must be one of {', '.join(MODES)}, got {generation_mode!r}.")
        self.makes_image = self._asks_for_image(input_ids) if generation_mode is None else generation_mode == "image"
        if self.makes_image:
            self.num_codes = self.codebook_size

    def _asks_for_image(self, input_ids: Tensor | None) -> bool:
        """Whether the prompts end with the begin-image token; rows must agree."""
        begin = _setting("boi_token_id", self.model.generation_config)
        if input_ids is None or begin is None or not input_ids.shape[1]:
            return False
        ends = (input_ids[:, -1] == begin).tolist()
        if any(ends) and not all(ends):
            raise ValueError(
                f"{sum(ends)} of {len(ends)} prompts end with the begin-image token {begin} and ask for an image, the "
                "others for text. Generate images and text in separate calls."
            )
        return all(ends)

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is Janus with its heads."""
        return model.config.model_type == "janus" and hasattr(model, "lm_head")

    @property
    def vocab_size(self) -> int:
        """Codes when an image is made, words otherwise: what the stock method shows to logits processors."""
        return self.num_codes or self.text_config.vocab_size

    @property
    def codebook_size(self) -> int:
        """Entries of the codebook, also when a call generates text."""
        return self.model.config.vq_config.num_embeddings

    def codebook(self) -> Tensor:
        """Latents of the codes, `(K, d)`; the decoder normalises what it looks up, hence the metric."""
        return read_weight(self.model.model.vqmodel.quantize.embedding)

    @classmethod
    def generate_arguments(cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Turn a call into one of transformers' common `generate`, for images and for text."""
        kwargs = dict(zip(("inputs", "attention_mask", "logits_processor"), args, strict=False)) | kwargs
        mode = kwargs.pop("generation_mode", None) or "text"
        # Told, not left to the prompt: the stock method reads nothing from how a prompt ends.
        options = {"generation_mode": mode} | dict(kwargs.pop("target_options", None) or {})
        kwargs = kwargs | {"guidance_scale": None} if mode == "text" else _image_arguments(model, **kwargs)
        return kwargs | {"target_options": options}

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The prompt with padding in place of its words for an image, the last token for text."""
        if not self.makes_image:
            return super().unconditional(input_ids, attention_mask)
        return without_words(input_ids, self.model.generation_config), attention_mask

    def stopping(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """An image ends by its length: no code ends it, though one may have the number of the text's end token."""
        if not self.makes_image:
            return criteria
        return StoppingCriteriaList(c for c in criteria if not isinstance(c, EosTokenCriteria))

    def _prompt_embeds(self, inputs: dict[str, Any], positions: Tensor) -> Tensor:
        """Embed a prompt: words, and the features of the images it shows."""
        embeds = inputs.get("inputs_embeds")
        if embeds is not None:
            return embeds
        ids = inputs["input_ids"]
        table = self.model.get_input_embeddings()
        embeds = table(to_module(table, ids))
        image = (inputs.get("mm_encoder_outputs") or {}).get("image")
        if image is None and (pixels := inputs.get("pixel_values")) is not None:
            image = self.model.model.get_image_features(pixels, return_dict=True)
        if image is None:
            return embeds
        shown = (ids == self.model.config.image_token_id)[..., None].to(embeds.device)
        return embeds.masked_scatter(shown, image.pooler_output.to(embeds.device, embeds.dtype))

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed codes or words, `(R, N, H)`; they share no table."""
        if not self.makes_image:
            return super().embed(token_ids, position_ids)
        ids = to_module(self.model.model.generation_embeddings, token_ids)
        return self.model.prepare_embeddings_for_image_generation(ids)

    def tree_pass(
        self, token_ids: Tensor, position_ids: Tensor, attention_mask: Any, cache: Any, *, all_layers: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run the language model over new nodes."""
        embeds = self.embed(token_ids, position_ids)
        output = self.model.model.language_model(
            inputs_embeds=embeds,
            attention_mask=None if attention_mask is None else attention_mask.to(embeds.device),
            position_ids=position_ids.to(embeds.device),
            use_cache=True,
            output_hidden_states=all_layers,
            **{CACHE_KEYWORD: cache},
        )
        return output.last_hidden_state, output.hidden_states if all_layers else None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the codes by the generation head, `(..., K)`, or of the words."""
        if not self.makes_image:
            return super().logits(hidden_states)
        head = self.model.model.generation_head
        return head(to_module(head.proj_out, hidden_states))

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Turn texts into arguments of an attached model's `generate`; the size is the model's."""
        size = self.model.config.vision_config.image_size
        sides = [side for sides in (height, width) if sides is not None for side in _listed(sides)]
        if wrong := [side for side in sides if side != size]:
            raise ValueError(f"Janus' images are {size} x {size} pixels, not {wrong[0]}. Leave out height and width.")
        chats = [[{"role": "user", "content": [{"type": "text", "text": prompt}]}] for prompt in prompts]
        texts = processor.apply_chat_template(chats, add_generation_prompt=True)
        inputs = processor(text=texts, generation_mode="image", padding=True, return_tensors="pt")
        inputs = dict(inputs) | {"generation_mode": "image", "max_new_tokens": self._num_tokens}
        return inputs if guided else inputs | {"guidance_scale": 1.0}  # which is 5 where nobody says

    def call_of_rows(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Add the mode that the prompts ask for, without which the model's `generate` makes text."""
        return dict(rows) | ({"generation_mode": "image"} if self.makes_image else {})

    @property
    def _num_tokens(self) -> int:
        """Codes of an image."""
        return self.model.config.vision_config.num_image_tokens

    @property
    def grid(self) -> Grid:
        """The one size of the model's images: 24 x 24 as published."""
        side = self.model.config.vq_config.num_patches
        return side, side

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode `(B, h, w)` codes with the model's own decoder: `(B, 3, H, W)`, nominally in [-1, 1]."""
        vq = self.model.model.vqmodel if vq_model is None else vq_model
        return vq.decode(to_module(vq.quantize.embedding, codes.flatten(1)))

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Side of the square of pixels that a code stands for: 16 as published."""
        return 2 ** (len(self.model.config.vq_config.channel_multiplier) - 1)

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Encode `(B, 3, H, W)` images with the model's own VQ model."""
        vq = self.model.model.vqmodel
        with torch.no_grad():
            placed = to_module(vq.quantize.embedding, pixels).to(vq.dtype)
            codes = vq.encode(placed, return_dict=True).image_tokens
        return codes.view(len(pixels), *self.grid)


def _listed(value: int | Sequence[int]) -> Sequence[int]:
    """One number, or several, as several."""
    return [value] if isinstance(value, int) else value


def without_words(input_ids: Tensor, *settings: Any) -> Tensor:
    """Give Janus' unconditional prompts: padding everywhere but at begin-of-sequence and begin-of-image.

    Args:
        input_ids: Prompts, `(B, S)` int64.
        *settings: Generation configs or dictionaries that name the three tokens, earlier ones first; the last token as
            `generation_kwargs["boi_token_id"]`.

    Raises:
        ValueError: One of the tokens is unknown.
    """
    known = {name: _setting(name, *settings) for name in ("bos_token_id", "boi_token_id", "pad_token_id")}
    if missing := [name for name, value in known.items() if value is None]:
        raise ValueError(
            f"`{missing[0]}` of the generation config is None, but Janus' guidance needs it for the unconditional "
            "prompt. Set it on model.generation_config (`boi_token_id` in its `generation_kwargs`)."
        )
    stays = (input_ids == known["bos_token_id"]) | (input_ids == known["boi_token_id"])
    return torch.where(stays, input_ids, known["pad_token_id"])


def _setting(name: str, *settings: Any) -> Any:
    """The first value that generation configs or dictionaries have under a name, None when none has."""
    for source in settings:
        values = source if isinstance(source, Mapping) else vars(source) if source is not None else {}
        value = values.get(name)
        if value is None:
            value = (values.get("generation_kwargs") or {}).get(name)
        if value is not None:
            return value
    return None


def _image_arguments(
    model: Any,
    inputs: Tensor | None = None,
    attention_mask: Tensor | None = None,
    input_ids: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Arguments of the common `generate` for the images that Janus' own would make."""
    ids = inputs if input_ids is None else input_ids
    if ids is None or ids.dim() != 2:
        raise ValueError(
            "`generation_mode='image'` reads prompts from `input_ids`, (B, S). Make them with "
            "processor(text=..., generation_mode='image', return_tensors='pt')."
        )
    settings = (kwargs, generation_config, model.generation_config)
    scale, pad = _setting("guidance_scale", *settings), _setting("pad_token_id", *settings)
    if scale is None:
        logger.warning_once(f"`guidance_scale` is not given; images are made with Janus' default, {DEFAULT_GUIDANCE}.")
        scale = DEFAULT_GUIDANCE
    if attention_mask is None and pad is not None:
        attention_mask = (ids != pad).long()
    table = model.get_input_embeddings()
    arguments = kwargs | {"inputs_embeds": table(to_module(table, ids)), "attention_mask": attention_mask}
    if scale != 1 and kwargs.get("negative_prompt_ids") is None:
        arguments["negative_prompt_ids"] = without_words(ids, *settings)
        arguments["negative_prompt_attention_mask"] = attention_mask
    fixed = {"guidance_scale": scale, "max_new_tokens": model.config.vision_config.num_image_tokens}
    if generation_config is None:
        return arguments | fixed
    config = copy.deepcopy(generation_config)  # transformers wants settings in a config or beside it, not both
    config.guidance_scale, config.max_new_tokens = fixed["guidance_scale"], fixed["max_new_tokens"]
    return {name: value for name, value in arguments.items() if name not in fixed} | {"generation_config": config}
