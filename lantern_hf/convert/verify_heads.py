"""Runs a published draft head by its rule and the converted one, on the same random input.

The rule (EAGLE-1, arXiv 2401.15077): `fc` over `[embedding; hidden state]`, then pre-norm decoder layers, the first of
which reads its input as it is unless it has an input norm. LlamaGen's drafters number their entries from 0 and rotate
by a grid behind a prefix one shorter than the target's; ours count in the target's numbering.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.rules import Read, attend, gated_mlp, rms_norm, rotate_1d, rotate_2d
from lantern_hf.draft import POSITION_OFFSET, LanternDraftConfig, LanternDraftModel

_ENTRIES = 24  # behind the prefix
_LAYER_NORM_EPS = 1e-5  # torch's default, which Chameleon's q/k norms keep


@torch.no_grad()
def verify_head(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, config: LanternDraftConfig
) -> tuple[float, float]:
    """Compare a published head with its conversion.

    Args:
        checkpoint: The source.
        folder: The result.
        dtype: Its dtype; the rule rounds the weights to it, and computes in float32.
        config: Its configuration.

    Returns:
        The largest difference of two outputs, and the largest output of the rule.
    """
    head = LanternDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    # The last code has no entry: nothing is drafted behind it.
    length = _ENTRIES if config.grid is None else min(_ENTRIES, config.grid[0] * config.grid[1] - POSITION_OFFSET)
    length += config.prefix_length or 0
    embeds, hidden = torch.randn(2, 1, length, config.hidden_size, generator=generator)
    ours = head(embeds, hidden, torch.arange(length)[None] + POSITION_OFFSET).last_hidden_state[0]

    def read(key: str) -> Tensor:
        return checkpoint.rows(key).to(dtype).float()

    theirs = published_head(read, checkpoint, embeds[0], hidden[0], config)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def published_head(
    read: Read, checkpoint: Checkpoint, embeds: Tensor, hidden: Tensor, config: LanternDraftConfig
) -> Tensor:
    """Outputs `(S, H)` of a published head for embeddings and hidden states `(S, H)` of entries 0, 1, 2..."""
    there = checkpoint.tensors

    def linear(x: Tensor, name: str) -> Tensor:
        x = x @ read(f"{name}.weight").T
        return x + read(f"{name}.bias") if f"{name}.bias" in there else x

    states = linear(torch.cat([embeds, hidden], -1), "fc")
    for index in range(config.num_hidden_layers):
        layer = f"layers.{index}."
        norm = f"{layer}input_layernorm.weight"
        normed = rms_norm(states, read(norm), config.rms_norm_eps) if norm in there else states
        attention = f"{layer}self_attn."
        query, key, value = (
            linear(normed, f"{attention}{name}_proj").unflatten(-1, (-1, config.head_dim)) for name in "qkv"
        )
        if config.qk_norm:
            query, key = (
                _layer_norm(part, read(f"{attention}{name}_norm.weight"), read(f"{attention}{name}_norm.bias"))
                for part, name in ((query, "q"), (key, "k"))
            )
        query, key = (_rotate(part, config) for part in (query, key))
        states = states + linear(attend(query, key, value), f"{attention}o_proj")
        normed = rms_norm(states, read(f"{layer}post_attention_layernorm.weight"), config.rms_norm_eps)
        states = states + _mlp(normed, f"{layer}mlp.", read, linear, config)
    return states


def _mlp(
    x: Tensor, name: str, read: Read, linear: Callable[[Tensor, str], Tensor], config: LanternDraftConfig
) -> Tensor:
    """SwiGLU, with biases where the head has them."""
    if config.mlp_bias:
        return linear(
            torch.nn.functional.silu(linear(x, f"{name}gate_proj")) * linear(x, f"{name}up_proj"), f"{name}down_proj"
        )
    return gated_mlp(x, *(read(f"{name}{part}_proj.weight") for part in ("gate", "up", "down")))


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Normalise each head of `(S, heads, D)`, then scale and shift it by its own `(heads, D)`."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + _LAYER_NORM_EPS).sqrt() * weight + bias


def _rotate(x: Tensor, config: LanternDraftConfig) -> Tensor:
    """Rotate entries in the published numbering, from 0."""
    positions = torch.arange(len(x))
    if config.rope_type == "1d":
        return rotate_1d(x, positions, config.rope_theta)
    assert config.grid is not None
    assert config.prefix_length is not None
    grid = (config.grid[0], config.grid[1])
    return rotate_2d(x, positions, grid, config.prefix_length - POSITION_OFFSET, config.rope_theta)
