"""LlamaGen: codes are token ids, positions are columns, the prefix is text features or a class."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from lantern_hf.targets.base import TargetAdapter, to_module


class LlamaGenAdapter(TargetAdapter):
    """Serves `LlamaGenForConditionalGeneration`. The codebook lives in the VQ model, not here."""

    family = "llamagen"
    has_codebook = True

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

    def image_codes(self, token_ids: Tensor) -> list[list[Tensor]]:
        """The one image of each row that has all its codes, `(h, w)` int64."""
        height, width = self.model.config.grid_size
        whole = token_ids.shape[1] >= height * width
        return [[row[: height * width].view(height, width)] if whole else [] for row in token_ids]

    def pixels(self, codes: Tensor, vq_model: Any = None) -> Tensor:
        """Decode `(B, h, w)` codes with the VQ model they belong to.

        Raises:
            ValueError: There is no `vq_model`.
        """
        if vq_model is None:
            raise ValueError(
                "LlamaGen holds no decoder of its codes. Pass `vq_model`, the VQ model it was trained with."
            )
        from lantern_hf.models.vq import decode_codes  # diffusers, which decoding tokens does not need

        return decode_codes(vq_model, codes)
