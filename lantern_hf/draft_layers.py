"""The decoder layer of a draft head: transformers' Llama parts with the target family's rotary embedding and norms.

Hidden states in, hidden states out; this file knows no target and builds no mask.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.chameleon.modeling_chameleon import ChameleonLayerNorm
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from lantern_hf.draft_config import LanternDraftConfig
from lantern_hf.models.rotary import RotaryTable2D, apply_rotary_interleaved


class RotaryTable1D(nn.Module):
    """Give the cosines and sines of Llama's rotary embedding, float32 whatever the model's dtype.

    Unlike transformers' module it holds no buffer, so `.to(torch.bfloat16)`, with which a head follows its target, does
    not round the frequencies.

    Args:
        head_dim: Dimension D of one attention head.
        base: Base of the geometric series of frequencies.
    """

    def __init__(self, head_dim: int, base: float):
        super().__init__()
        self.head_dim = head_dim
        self.base = base

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Give `(cos, sin)`, each `(B, S, D)` float32, at positions `(B, S)`."""
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32, device=position_ids.device) / self.head_dim
        angles = position_ids[..., None].float() / self.base**exponents  # (B, S, D/2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotary_table(config: LanternDraftConfig) -> RotaryTable1D | RotaryTable2D:
    """Give the table of the head's rotary embedding."""
    if config.rope_type == "1d":
        return RotaryTable1D(config.head_dim, config.rope_theta)
    grid, prefix_length = cast(list[int], config.grid), cast(int, config.prefix_length)  # the config checked them
    return RotaryTable2D(grid, prefix_length, config.head_dim, config.rope_theta, config.prefix_rotation)


class DraftAttention(LlamaAttention):
    """Llama's attention with an optional per-head q/k norm (Chameleon) and a 1-D or 2-D rotary embedding.

    Args:
        config: Configuration of the head.
        layer_idx: Index of the layer in the cache.
    """

    def __init__(self, config: LanternDraftConfig, layer_idx: int):
        super().__init__(cast(Any, config), layer_idx)  # it holds every field that Llama's layers read
        if config.qk_norm:
            self.q_norm = ChameleonLayerNorm((config.num_attention_heads, config.head_dim))
            self.k_norm = ChameleonLayerNorm((config.num_key_value_heads, config.head_dim))

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: `(B, S, H)`.
            rotary: Cosines and sines of the S positions, from `rotary_table`.
            attention_mask: `(B, 1, S, kv)` as the attention implementation wants it; None is causal.
            cache: Grows by the S entries.

        Returns:
            `(B, S, H)`.
        """
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (proj(hidden_states).view(shape) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (states.transpose(1, 2) for states in (query, key, value))  # (B, heads, S, D)
        query, key = self._rotate(query, key, *rotary)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, _ = attend(self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling)
        return self.o_proj(output.flatten(2))  # (B, S, heads, D) -> (B, S, H)

    def _rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate in float32: interleaved pairs in two dimensions, Llama's halves in one."""
        if self.config.rope_type == "2d":
            return apply_rotary_interleaved(query, cos, sin), apply_rotary_interleaved(key, cos, sin)
        rotated_query, rotated_key = apply_rotary_pos_emb(query.float(), key.float(), cos, sin)
        return rotated_query.to(query.dtype), rotated_key.to(key.dtype)


class DraftLayer(GradientCheckpointingLayer):
    """One pre-norm decoder layer; the first reads its input unnormalised unless the config says otherwise (EAGLE-1).

    Args:
        config: Configuration of the head.
        layer_idx: Index of the layer.
    """

    def __init__(self, config: LanternDraftConfig, layer_idx: int):
        super().__init__()
        if config.input_layernorm or layer_idx > 0:
            self.input_layernorm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        else:
            self.input_layernorm = nn.Identity()
        self.self_attn = DraftAttention(config, layer_idx)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self,
        hidden_states: Tensor,
        rotary: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Give the layer's output, `(B, S, H)`; arguments as `DraftAttention.forward`."""
        normed = self.input_layernorm(hidden_states)
        hidden_states = hidden_states + self.self_attn(normed, rotary, attention_mask, cache=cache)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
