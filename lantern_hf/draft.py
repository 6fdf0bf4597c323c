"""The draft head: `LanternDraftModel`, a decoder layer (or a few) over token embeddings and the target's hidden states.

EAGLE-1 (arXiv 2401.15077), as LANTERN++ uses it: the head guesses the target's next hidden state, and the target's own
lm head turns the guess into q. It has neither embedding nor lm head; the caller applies the target's. It knows how to
run, to save, and to which target it belongs; it does not know trees, sampling or images.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, Cache, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutput

from lantern_hf._placement import last_layer_device
from lantern_hf.draft_config import GEOMETRY_FIELDS, LanternDraftConfig, head_config_from, target_geometry
from lantern_hf.draft_files import DraftFilesMixin
from lantern_hf.draft_layers import DraftLayer, rotary_table
from lantern_hf.head_files import NEIGHBORS_FILE
from lantern_hf.neighbors import NeighborTable

__all__ = [
    "NEIGHBORS_FILE",
    "POSITION_OFFSET",
    "LanternDraftConfig",
    "LanternDraftModel",
    "head_config_from",
    "target_geometry",
]

# The head's entry for target position t carries token t + 1, and takes its position.
POSITION_OFFSET = 1
_FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class LanternDraftModel(DraftFilesMixin, PreTrainedModel):
    """Draft head of a target model.

    **Entries and positions.** Let the target have read tokens x_0 .. x_n and given hidden states h_0 .. h_n (after its
    final norm: the input of its lm head). Entry t of the head reads `embedding(x_{t+1})` and `h_t`; its output guesses
    h_{t+1}, so `lm_head(output)` gives q for x_{t+2}. Its position is that of the token: `position(x_{t+1}) =
    position(x_t) + POSITION_OFFSET`, in the target's own numbering. A tree node below it reads the embedding of the
    drafted token and the *output* of its parent's entry, one position further.

    The 1-D rotary embedding is relative, so a constant offset changes nothing; the 2-D one is absolute. The published
    LlamaGen drafters number entries from 0 over a prefix of 119, which is the same table row: row t of a table with
    prefix 119 is row t + 1 of the target's table with prefix 120 (checked against `tests/golden/llamagen_drafter*`).

    Args:
        config: Configuration of the head.

    Attributes:
        neighbors: Neighbour table of the target's codebook, saved and loaded with the head; None when it has none.

    Example:
        >>> config = LanternDraftConfig(hidden_size=8, intermediate_size=16, num_attention_heads=2)
        >>> head = LanternDraftModel(config)
        >>> tokens, hidden = torch.zeros(1, 3, 8), torch.zeros(1, 3, 8)
        >>> head(tokens, hidden, torch.arange(3)[None] + POSITION_OFFSET).last_hidden_state.shape
        torch.Size([1, 3, 8])
    """

    config_class = LanternDraftConfig
    config: LanternDraftConfig
    base_model_prefix = ""
    main_input_name = "inputs_embeds"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DraftLayer"]
    _supports_sdpa = True
    _supports_attention_backend = False
    # Published drafters carry a copy of the target's embedding.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.weight$", r"^lm_head\.weight$"]

    def __init__(self, config: LanternDraftConfig):
        super().__init__(config)
        self._target_ref = _TargetRef()
        self.neighbors: NeighborTable | None = None
        self.rotary = rotary_table(config)
        self.fc = nn.Linear(config.hidden_size + config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(DraftLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()

    @classmethod
    def for_target(
        cls,
        target: PreTrainedModel,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        **overrides: Any,
    ) -> "LanternDraftModel":
        """Give an untrained head of the right shape, bound to the target.

        Args:
            target: The model the head will draft for.
            dtype: Dtype of the head; the target's by default (bfloat16 if that is no plain float, as when quantised).
            device: Device of the head; that of the target's last decoder layer by default.
            **overrides: Fields of `LanternDraftConfig`, or `attn_implementation`.

        Returns:
            The head, in eval mode; weights drawn from torch's global generator.

        Raises:
            TypeError: An override is no field of `LanternDraftConfig`.
            ValueError: The values give no head, or one that does not fit the target.
        """
        head = cls(head_config_from(target.config, **overrides))
        return head.place(target, dtype=dtype, device=device).eval().bind(target)

    def place(self, target: PreTrainedModel, *, dtype: Any = None, device: Any = None) -> "LanternDraftModel":
        """Move the head next to a target's last decoder layer, and to its dtype.

        Args:
            target: The model the head drafts for; it may be spread over devices or quantised.
            dtype: Dtype of the head in place of the target's (bfloat16 where that is no plain float, as when
                quantised).
            device: Device in place of that of the target's last decoder layer.

        Returns:
            The head itself.
        """
        if dtype is None or dtype == "auto":
            dtype = target.dtype if target.dtype in _FLOAT_DTYPES else torch.bfloat16
        # nn.Module's own: transformers wraps `to` for quantised models, which a head never is, and loses its type
        nn.Module.to(self, device=last_layer_device(target) if device is None else device, dtype=dtype)
        return self

    @property
    def target(self) -> PreTrainedModel | None:
        """The bound target; None if there is none or it is gone."""
        return self._target_ref()

    def bind(self, target: PreTrainedModel) -> "LanternDraftModel":
        """Tie the head to its target by a weak reference, which is not saved, moved or copied with the head.

        Args:
            target: The model to draft for; the caller keeps it alive.

        Returns:
            The head itself.

        Raises:
            ValueError: The head was made for another geometry; every difference is named.
        """
        found = target_geometry(target.config)
        pairs = [(name, getattr(self.config, name), found[name]) for name in GEOMETRY_FIELDS]
        pairs.append(("hidden_size", self.config.hidden_size, found["target_hidden_size"]))
        if wrong := [f"`{name}` {ours}, the target has {its}" for name, ours, its in pairs if ours not in (None, its)]:
            name = getattr(target.config, "_name_or_path", "") or type(target).__name__
            raise ValueError(
                f"This draft head does not fit {name}: {'; '.join(wrong)}. "
                "Use a head trained for it, or train one with lantern_hf.training."
            )
        self._target_ref = _TargetRef(target)
        return self

    def forward(
        self,
        inputs_embeds: Tensor,
        hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> BaseModelOutput:
        """Guess the target's next hidden states.

        Args:
            inputs_embeds: Target embedding of each entry's token, `(B, S, H)`; cast to the head's dtype.
            hidden_states: Target hidden state before that token (in a tree, the parent's output), `(B, S, H_target)`.
            position_ids: Position of each entry's token in the target's numbering, `(B, S)` int64.
            attention_mask: `(B, 1, S, kv)` bool (True = may attend) or additive float over the cached and the new
                entries; `(B, kv)` with True or 1 for real entries, combined with the causal mask; None is causal.
            cache: A `DynamicCache` of earlier entries, which grows by S; None keeps nothing.

        Returns:
            `last_hidden_state` `(B, S, H)` in the head's dtype: the input of the target's lm head.

        Raises:
            ValueError: A last dimension does not fit the config.
            TypeError: A 4-D mask is neither bool nor float.
        """
        self._check_inputs(inputs_embeds, hidden_states)
        dtype = self.fc.weight.dtype
        states = self.fc(torch.cat([inputs_embeds.to(dtype), hidden_states.to(dtype)], dim=-1))  # (B, S, H)
        mask = self._attention_mask(states, attention_mask, cache)
        rotary = self.rotary(position_ids)
        for layer in self.layers:
            states = layer(states, rotary, mask, cache=cache)
        return BaseModelOutput(last_hidden_state=states)

    def _check_inputs(self, inputs_embeds: Tensor, hidden_states: Tensor) -> None:
        """Refuse inputs of another width."""
        expected = (self.config.hidden_size, self.config.target_hidden_size)
        if (inputs_embeds.shape[-1], hidden_states.shape[-1]) != expected:
            raise ValueError(
                f"`inputs_embeds` and `hidden_states` must end in {expected[0]} and {expected[1]}, got "
                f"{tuple(inputs_embeds.shape)} and {tuple(hidden_states.shape)}. Use the target this head was made for."
            )

    def _attention_mask(self, states: Tensor, mask: Tensor | None, cache: Cache | None) -> Tensor | None:
        """Give the mask in the form the attention implementation reads."""
        if mask is None or mask.dim() == 2:
            return create_causal_mask(self.config, states, mask, cache)
        lowest = torch.finfo(states.dtype).min
        if mask.dtype == torch.bool:
            if self.config._attn_implementation != "eager":
                return mask
            # eager attention adds the mask, so a bool would be read as 0 or 1
            return torch.zeros_like(mask, dtype=states.dtype).masked_fill(~mask, lowest)
        if not mask.is_floating_point():
            raise TypeError(f"A 4-D `attention_mask` must be bool or float, got {mask.dtype}. Use `mask.bool()`.")
        # float32's minimum is -inf in half precision, which makes NaN of a row that may attend to nothing
        return mask.to(states.dtype).clamp(min=lowest)


class _TargetRef:
    """A weak reference to the target that survives copying and is left out of pickles."""

    def __init__(self, target: PreTrainedModel | None = None):
        self._reference = None if target is None else weakref.ref(target)

    def __call__(self) -> PreTrainedModel | None:
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> "_TargetRef":
        return self

    def __reduce__(self) -> tuple[type["_TargetRef"], tuple[()]]:
        return _TargetRef, ()


AutoModel.register(LanternDraftConfig, LanternDraftModel, exist_ok=True)
