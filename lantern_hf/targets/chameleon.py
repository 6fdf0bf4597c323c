"""Chameleon and Anole: images and text in one vocabulary, told apart by what the prompt ends with.

A prompt that ends with the begin-image token asks for an image: only image tokens are emitted, and acceptance may be
relaxed. Any other prompt asks for text: image tokens are blocked, as the stock forward does, and acceptance is strict.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from lantern_hf._placement import read_weight
from lantern_hf.targets.base import TargetAdapter, to_module

BEGIN_IMAGE = "<racm3:break>"


class ChameleonAdapter(TargetAdapter):
    """Serves `ChameleonForConditionalGeneration`, and Anole, which has the same class."""

    family = "chameleon"
    has_codebook = True

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        super().__init__(model, input_ids)
        mapping = model.model.vocabulary_mapping
        # The code of an image token is spelled in its name; ids are not in the order of the codes.
        by_code = sorted(mapping.bpe2img, key=mapping.bpe2img.__getitem__)
        self.image_token_ids = torch.tensor(by_code, device=self.device)
        self.begin_image_id = mapping.vocab_map.get(BEGIN_IMAGE)
        self._image_weight: Tensor | None = None
        if self._asks_for_image(input_ids):
            self.columns, self.num_codes = self.image_token_ids, len(by_code)

    def _asks_for_image(self, input_ids: Tensor | None) -> bool:
        """Whether the prompts end with the begin-image token; rows must agree."""
        if input_ids is None or self.begin_image_id is None or not input_ids.shape[1]:
            return False
        last = (input_ids[:, -1] == self.begin_image_id).tolist()
        if any(last) and not all(last):
            raise ValueError(
                f"{sum(last)} of {len(last)} prompts end with the begin-image token {self.begin_image_id} and ask for "
                "an image, the others for text. Generate images and text in separate calls."
            )
        return all(last)

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is Chameleon or Anole."""
        return model.config.model_type == "chameleon" and hasattr(model, "lm_head")

    @property
    def codebook_size(self) -> int:
        """Image tokens, also when a call generates text."""
        return len(self.image_token_ids)

    def codebook(self) -> Tensor | None:
        """Latents of the codes, `(K, d)`, straight from the model's own VQ encoder."""
        return read_weight(self.model.model.vqmodel.quantize.embedding)

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[bos, begin-image]` for an image (Anole), the last token for text."""
        if not self.num_codes:
            return super().unconditional(input_ids, attention_mask)
        ids = torch.tensor([[self.text_config.bos_token_id, self.begin_image_id]], device=input_ids.device)
        return ids.expand(len(input_ids), -1), None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the image tokens by code, or of the vocabulary with image tokens at the dtype's minimum."""
        head = self.model.lm_head
        hidden_states = to_module(head, hidden_states)
        if self.num_codes:
            # A plain layer is sliced once; a quantised, offloaded or adapted one must be called as a module.
            if type(head) is nn.Linear and not hasattr(head, "_hf_hook"):
                if self._image_weight is None:
                    self._image_weight = head.weight[self.image_token_ids.to(head.weight.device)]
                return F.linear(hidden_states, self._image_weight)
            logits = head(hidden_states)
            return logits[..., self.image_token_ids.to(logits.device)]
        logits = head(hidden_states)
        return logits.index_fill(-1, self.image_token_ids.to(logits.device), torch.finfo(logits.dtype).min)
