"""What the decoding loop asks of a target model: one adapter per family answers, and nothing else knows the family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache

from lantern_hf._placement import input_device
from lantern_hf.cache import CACHE_KEYWORD
from lantern_hf.targets.image_side import ImageSide


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


class TargetAdapter(ImageSide):
    """Adapter of a Llama-like target. A family overrides what differs.

    An adapter is made for one `generate` call and may cache what the prompt decides; it keeps nothing on the model.
    What a user may set for a family are keyword-only arguments of its `__init__`; they arrive by
    `generate(..., target_options={...})`, and adapters work without them.

    **Structure.** A family whose images hold more than codes (ends of rows, sizes, an end) sets `structured` and
    overrides `start`, `advance`, `forced` and `allowed`. They are asked about *offsets*: how many tokens an image has
    before the one in question, its begin-image token left out. The loop asks with the same rules when it drafts and
    when it verifies, so that a forced token is drafted at rank 0, accepted always and relaxed never; it costs a node,
    and no rejection. Their answers are made of tensors on the device of the question, by operators that do not wait for
    it (no `.item()`, no `nonzero`, no indexing with a bool), one row never looking at another.

    Args:
        model: The target.
        input_ids: Prompts of the call, `(B, S)` int64, from which a family may read what is to be generated.

    Attributes:
        family: Name of the family.
        model_types: What `config.model_type` may be when a user names the family; empty is anything.
        has_codebook: Whether the family generates images, and so can be relaxed.
        codebook_metric: Distance between codes, as `NeighborTable.from_codebook` takes it: `"cosine"` for a codebook
            that is normalised at lookup.
        columns: Token ids that may be emitted, `(C,)` int64, codebook entries first and in order; None is the identity.
        num_codes: How many of the first columns are codebook entries; 0 means that acceptance is strict.
        structured: Whether some offsets force a token or allow only some columns.
        returns_prompt: Whether `generate` of an attached model gives the prompt back in front of an image.
    """

    family: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]] = ()
    has_codebook: ClassVar[bool] = False
    codebook_metric: ClassVar[str] = "l2"
    columns: Tensor | None = None
    num_codes: int = 0
    structured: bool = False
    returns_prompt: ClassVar[bool] = True

    @property
    def num_columns(self) -> int:
        """C, the tokens that may be emitted."""
        return (self.num_codes or self.vocab_size) if self.columns is None else len(self.columns)

    @property
    def codebook_size(self) -> int:
        """Entries of the codebook, whatever this call is to generate; 0 for a text model."""
        return self.num_codes

    def __init__(self, model: PreTrainedModel, input_ids: Tensor | None = None):
        self.model: Any = model  # families add attributes that PreTrainedModel does not declare
        self._inverse: dict[torch.device, Tensor] = {}  # head and target may be on different ones

    @classmethod
    def matches(cls, model: PreTrainedModel) -> bool:
        """Whether this adapter serves the model."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the embedding runs, also when accelerate or diffusers keeps its weight elsewhere between calls."""
        return input_device(self.model)

    @property
    def text_config(self) -> Any:
        """Configuration of the decoder."""
        return self.model.config.get_text_config()

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary that users' logits processors see."""
        return self.text_config.vocab_size

    def codebook(self) -> Tensor | None:
        """Latents of the image codes, `(K, d)`, as the model stores them; None when it holds none.

        Read the weight with `_placement.read_weight`: under accelerate's offload it is on no device between calls.
        """
        return None

    def unconditional(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Unconditional prompt and its mask when the user gave none; by default the last token, as in transformers."""
        return input_ids[:, -1:], None

    def blank(self, input_ids: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Unconditional prompts as `encode` makes them; by default `unconditional`, which most families agree on."""
        return self.unconditional(input_ids, attention_mask)

    @classmethod
    def generate_arguments(cls, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """Turn a call of an attached model into one of transformers' common `generate`.

        For families whose own `generate` takes no decoding loop, or that the common one prepares wrongly.

        Args:
            model: The target.
            args: Positional arguments of the call.
            kwargs: Its keyword arguments, those of `lantern_generate` among them.

        Returns:
            Keyword arguments of `GenerationMixin.generate`; None leaves the call to the model's own method.
        """
        return None

    def read_call(self, input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
        """Learn from a call what its prompts do not tell, before anything else is asked; by default nothing.

        Args:
            input_ids: Prompts, `(B, S)` int64.
            model_kwargs: What `generate` passes to the model.
        """

    def stopping(self, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """Take out the criteria that mean nothing for what is generated; by default none."""
        return criteria

    def take_over(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Take out the user's processors that the family's structure replaces; by default none.

        Args:
            processors: As `generate` prepares them, guidance included.

        Returns:
            Those that stay.
        """
        return processors

    def start(self, input_ids: Tensor) -> Tensor:
        """Offset behind each prompt `(B, S)`: tokens that its open image has already; `(B,)` int64."""
        return torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)

    def advance(self, offset: Tensor, token_ids: Tensor) -> Tensor:
        """Offset behind a token.

        Args:
            offset: Offset that the token was decided at, `(B, ...)` int64.
            token_ids: The tokens, same shape.

        Returns:
            Same shape. A family in which images and text follow one another turns back to a value of its own, such as
            -1 for text, and to 0 behind a begin-image token.
        """
        return offset + 1

    def forced(self, offset: Tensor) -> Tensor:
        """Token id that must come at an offset `(B, ...)`, or -1; same shape. Every forced id has a column."""
        return torch.full_like(offset, -1)

    def allowed(self, offset: Tensor) -> Tensor | None:
        """Columns that may come at an offset `(B, ...)`, as a bool that broadcasts to `(B, ..., C)`; None is all."""
        return None

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
        device = token_ids.device
        if device not in self._inverse:
            inverse = token_ids.new_full((self.vocab_size,), -1)
            inverse[self.columns.to(device)] = torch.arange(len(self.columns), device=device)
            self._inverse[device] = inverse
        return self._inverse[device][token_ids]


def left_padded(rows: Sequence[Sequence[int]], pad_token_id: int) -> dict[str, Tensor]:
    """Stack token ids of unequal length: `input_ids` `(B, S)` int64 padded on the left, and their `attention_mask`."""
    width = max(len(row) for row in rows)
    ids = [[pad_token_id] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def to_module(module: nn.Module, tensor: Any) -> Any:
    """Move an input to where a module's weight is, as when the draft head or the prompt is on another device.

    Under accelerate's offload the weight is on no device between calls, and a hook moves the input.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.device.type == "meta":
        return tensor
    return tensor.to(weight.device)
