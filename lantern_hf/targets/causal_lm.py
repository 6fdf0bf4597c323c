"""Any Llama-like text model: strict acceptance on the whole vocabulary."""

from __future__ import annotations

from transformers import PreTrainedModel

from lantern_hf.targets.base import TargetAdapter


class CausalLMAdapter(TargetAdapter):
    """Serves decoder-only models whose output layer reads the last hidden state of `base_model`."""

    family = "causal_lm"

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether the model is a decoder with an output layer and a base model of its own."""
        return (
            not model.config.is_encoder_decoder
            and model.get_output_embeddings() is not None
            and model.base_model is not model
        )
