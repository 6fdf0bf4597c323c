"""LlamaGen: codes are token ids, positions are columns, the prefix is text features or a class."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf._captions import CaptionEncoder, check_lengths, class_ids
from lantern_hf.targets.base import TargetAdapter, to_module
from lantern_hf.targets.image_side import Grid, check_vq_model


class LlamaGenAdapter(TargetAdapter):
    """Serves `LlamaGenForConditionalGeneration`. The codebook lives in the VQ model, not here."""

    family = "llamagen"
    has_codebook = True
    defaults = MappingProxyType({"guidance_scale": 7.5})
    takes_negative = False

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        super().__init__(model, input_ids)
        self.num_codes = model.config.codebook_size

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is LlamaGen."""
        return model.config.model_type == "llamagen"

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The learned unconditional prefix under the caption's own mask, as published."""
        return self.model.unconditional_ids(len(input_ids)).to(input_ids.device), attention_mask

    def _prompt_embeds(self, inputs: dict[str, Any], positions: Tensor) -> Tensor:
        embeds = inputs.get("inputs_embeds")
        if embeds is not None:
            return embeds
        return self.model.model.embed(inputs["input_ids"], positions, inputs.get("caption_embeds"))

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed codes; the prefix enters with the prompt only."""
        table = self.model.model.embed_tokens
        return table(to_module(table, token_ids))

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the codes, `(..., K)`."""
        return self.model.image_logits(to_module(self.model.lm_head, hidden_states))

    # ---- images of users
    # -----------------------------------------------------------------------------------------------------------

    @property
    def asks(self) -> str:
        """Texts or classes, as the model was trained."""
        return "class_labels" if self.model.config.conditioning == "class" else "prompt"

    @property
    def grid(self) -> Grid:
        """The one size of the model's images."""
        height, width = self.model.config.grid_size
        return height, width

    def check_prompts(self, processor: Any, prompts: Sequence[str]) -> None:
        """Refuse prompts of no token, and of more than the prefix holds.

        Args:
            processor: A `CaptionEncoder`, which pipelines make of `tokenizer` and `text_encoder`.
            prompts: Texts.

        Raises:
            ValueError: A prompt is empty or too long, or there is nothing to read it with.
        """
        check_lengths(_reader(processor).tokenizer, list(prompts), self.model.config.prefix_length)

    def encode(
        self,
        processor: Any,
        prompts: Sequence[str],
        *,
        guided: bool = False,
        height: int | Sequence[int] | None = None,
        width: int | Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Turn texts into features in front of the image; the size is the model's, the unconditional prompt learned."""
        for name, value in (("height", height), ("width", width)):
            if value is not None:
                raise ValueError(f"LlamaGen takes no `{name}`: the size is the model's. Leave it out.")
        config, model = self.model.config, self.model
        features, mask = _reader(processor).encode(prompts, config.prefix_length)
        inputs = {"input_ids": model.caption_ids(len(mask)), "attention_mask": mask}
        inputs |= {"caption_embeds": features.to(model.dtype), "max_new_tokens": config.num_image_tokens}
        if not guided:
            return inputs
        ids = model.unconditional_ids(len(mask))
        return inputs | {"negative_prompt_ids": ids, "negative_prompt_attention_mask": mask}

    def encode_classes(self, labels: Any, *, guided: bool = False) -> dict[str, Any]:
        """Turn labels into the one position in front of the image; unconditional is the class behind the last one."""
        config = self.model.config
        ids = class_ids(labels, config.num_classes, config.codebook_size)
        inputs = {"input_ids": ids, "max_new_tokens": config.num_image_tokens}
        return inputs | ({"negative_prompt_ids": self.model.unconditional_ids(len(ids))} if guided else {})

    def check_decoder(self, vq_model: Any = None) -> None:
        """Refuse a missing VQ model, or one of other codes.

        Raises:
            ValueError: As above.
        """
        check_vq_model(
            vq_model,
            self.num_codes,
            "LlamaGen holds no decoder of its codes. Pass `vq_model`, the VQ model it was trained with.",
        )

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode `(B, h, w)` codes with the VQ model they belong to.

        Raises:
            ValueError: As `check_decoder`.
        """
        from lantern_hf.models.vq import decode_codes  # diffusers, which decoding tokens does not need

        self.check_decoder(vq_model)
        return decode_codes(vq_model, codes)

    def pixels_per_code(self, vq_model: Any = None) -> int:
        """Side of the square of pixels that a code stands for, as the VQ model has it."""
        self.check_decoder(vq_model)
        return 2 ** (len(vq_model.config.block_out_channels) - 1)

    def encode_pixels(self, pixels: Tensor, vq_model: Any = None) -> Tensor:
        """Encode `(B, 3, H, W)` images with the VQ model; raises as `check_decoder`."""
        from lantern_hf.models.vq import encode_pixels  # diffusers, which decoding tokens does not need

        self.check_decoder(vq_model)
        return encode_pixels(vq_model, pixels)


def _reader(processor: Any) -> CaptionEncoder:
    """Refuse what reads no captions."""
    if not isinstance(processor, CaptionEncoder):
        raise ValueError(
            "This model reads text, but there is no `tokenizer` or no `text_encoder` to read it with. Pass both; "
            "LanternPipeline loads them from one folder."
        )
    return processor
