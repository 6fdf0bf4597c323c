"""What the decoding loop asks of a target model: one adapter per family answers, and nothing else knows the family."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from lantern_hf._placement import execution_device
from lantern_hf.cache import CACHE_KEYWORD


@dataclass
class Prefill:
    """What reading a prompt gives.

    Attributes:
        hidden_states: Input of the output layer at every prompt position, `(B, S, H)`.
        embeds: Embeddings of the prompt, `(B, S, H)`; the draft head reads them.
        position_ids: Positions of the prompt, `(B, S)` int64.
        mask: `(B, S)` bool, False on padding; None when there is none.
        all_layers: States of every layer at every prompt position, each `(B, S, H)`, or None.
    """

    hidden_states: Tensor
    embeds: Tensor
    position_ids: Tensor
    mask: Tensor | None
    all_layers: tuple[Tensor, ...] | None = None


class TargetAdapter:
    """Adapter of a Llama-like target. A family overrides what differs.

    An adapter is made for one `generate` call and may cache what the prompt decides; it keeps nothing on the model.

    Args:
        model: The target.
        input_ids: Prompts of the call, `(B, S)` int64, from which a family may read what is to be generated.

    Attributes:
        family: Name of the family.
        has_codebook: Whether the family generates images, and so can be relaxed.
        codebook_metric: Distance between codes, as `NeighborTable.from_codebook` takes it: `"cosine"` for a codebook
            that is normalised at lookup.
        columns: Token ids that may be emitted, `(C,)` int64, codebook entries first and in order; None is the identity.
        num_codes: How many of the first columns are codebook entries; 0 means that acceptance is strict.
    """

    family: ClassVar[str]
    has_codebook: ClassVar[bool] = False
    codebook_metric: ClassVar[str] = "l2"
    columns: Tensor | None = None
    num_codes: int = 0

    @property
    def codebook_size(self) -> int:
        """Entries of the codebook, whatever this call is to generate; 0 for a text model."""
        return self.num_codes

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        self.model: Any = model  # families add attributes that PreTrainedModel does not declare
        self._inverse: Tensor | None = None

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether this adapter serves the model."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the embedding runs, also when accelerate keeps its weight elsewhere between calls."""
        return execution_device(self.model.get_input_embeddings())

    @property
    def text_config(self) -> Any:
        """Configuration of the decoder."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary that users' logits processors see."""
        return self.text_config.vocab_size

    def codebook(self) -> Tensor | None:
        """Latents of the image codes, `(K, d)`, as the model stores them; None when it holds none."""
        return None

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Unconditional prompt and its mask when the user gave none; by default the last token, as in transformers."""
        return input_ids[:, -1:], None

    def prefill(self, input_ids: Tensor, cache: Cache, *, all_layers: bool = False, **model_kwargs: Any) -> Prefill:
        """Read the prompt into an empty cache.

        Args:
            input_ids: Prompts, `(B, S)` int64.
            cache: Empty dynamic cache.
            all_layers: Whether the states of every layer are wanted too.
            **model_kwargs: What `generate` would pass to the model: masks, positions, features.

        Returns:
            Hidden states, embeddings and positions of the prompt.
        """
        mask = model_kwargs.get("attention_mask")
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, is_first_iteration=True, **{CACHE_KEYWORD: cache, "use_cache": True, **model_kwargs}
        )
        for name in ("logits_to_keep", "labels"):
            inputs.pop(name, None)
        positions = inputs.get("position_ids")
        output = self.model.base_model(**inputs, output_hidden_states=all_layers)
        hidden = output.last_hidden_state
        rows, length = hidden.shape[:2]
        if positions is None:
            positions = torch.arange(length, device=hidden.device)[None]
        positions = positions.expand(rows, -1)
        embeds = self._prompt_embeds(inputs, positions)
        layers = output.hidden_states if all_layers else None
        return Prefill(hidden, embeds, positions, None if mask is None else mask.bool(), layers)

    def _prompt_embeds(self, inputs: dict[str, Any], positions: Tensor) -> Tensor:
        """Embed a prompt, `(B, S, H)`, from the arguments of its forward."""
        embeds = inputs.get("inputs_embeds")
        return self.embed(inputs["input_ids"], positions) if embeds is None else embeds

    def embed(self, token_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Embed tokens `(R, N)` at their positions: `(R, N, H)`."""
        table = self.model.get_input_embeddings()
        return table(to_module(table, token_ids))

    def tree_pass(
        self, token_ids: Tensor, position_ids: Tensor, attention_mask: Any, cache: Cache, *, all_layers: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """Run the decoder over new nodes.

        Args:
            token_ids: Tokens of the nodes, `(R, N)` int64.
            position_ids: Their positions, `(R, N)` int64.
            attention_mask: As `attention_argument` gives it.
            cache: Cache of the committed tokens; the nodes are written behind them.
            all_layers: Whether the states of every layer are wanted too.

        Returns:
            Input of the output layer, `(R, N, H)`, and the states of all layers, each `(R, N, H)`, or None.
        """
        table = self.model.get_input_embeddings()
        output = self.model.base_model(
            input_ids=to_module(table, token_ids),
            attention_mask=None if attention_mask is None else to_module(table, attention_mask),
            position_ids=to_module(table, position_ids),
            use_cache=True,
            output_hidden_states=all_layers,
            **{CACHE_KEYWORD: cache},
        )
        return output.last_hidden_state, output.hidden_states if all_layers else None

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of the columns, `(..., C)`, from the input of the output layer `(..., H)`."""
        head = self.model.get_output_embeddings()
        return head(to_module(head, hidden_states))

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of columns, same shape."""
        return columns if self.columns is None else self.columns.to(columns.device)[columns]

    def columns_of(self, token_ids: Tensor) -> Tensor:
        """Columns of token ids, same shape; -1 for an id that may not be emitted."""
        if self.columns is None:
            return token_ids
        if self._inverse is None:
            inverse = token_ids.new_full((self.vocab_size,), -1)
            inverse[self.columns.to(token_ids.device)] = torch.arange(len(self.columns), device=token_ids.device)
            self._inverse = inverse
        return self._inverse[token_ids]


def to_module(module: nn.Module, tensor: Any) -> Any:
    """Move an input to where a module's weight is, as when the draft head or the prompt is on another device.

    Under accelerate's offload the weight is on no device between calls, and a hook moves the input.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.device.type == "meta":
        return tensor
    return tensor.to(weight.device)
