"""Runs a published LlamaGen by its rule and the converted one, on the same random input.

The rule (arXiv 2406.06525): caption features through two bias-free layers with tanh GELU, or a row of the class table;
then code embeddings; pre-norm layers with RMSNorm, 2-D rotary attention and SwiGLU; a last norm; the output layer.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.rules import Read, attend, gated_mlp, rms_norm, rotate_2d
from lantern_hf.models.configuration_llamagen import LlamaGenConfig
from lantern_hf.models.llamagen import LlamaGenForConditionalGeneration

if TYPE_CHECKING:
    from lantern_hf.convert.llamagen import Layout

_CODES = 24  # enough to reach a second row of an 16x16 image


@torch.no_grad()
def verify_llamagen(
    checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, config: LlamaGenConfig, layout: Layout
) -> tuple[float, float]:
    """Compare a published LlamaGen with its conversion.

    Args:
        checkpoint: The source.
        folder: The result.
        dtype: Its dtype; the rule rounds the weights to it, and computes in float32.
        config: Its configuration.
        layout: Names of the source.

    Returns:
        The largest difference of two logits, and the largest logit of the rule.
    """
    model = LlamaGenForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    count = min(_CODES, config.num_image_tokens)
    codes = torch.randint(config.codebook_size, (1, count), generator=generator)

    def read(key: str) -> Tensor:
        return checkpoint.rows(key).to(dtype).float()

    if config.conditioning == "text":
        features = torch.randn(1, config.prefix_length, config.caption_dim, generator=generator)
        hidden = F.gelu(features[0] @ read(f"{layout.prefix}cap_proj.fc1.weight").T, approximate="tanh")
        prefix = hidden @ read(f"{layout.prefix}cap_proj.fc2.weight").T
        ids, more = model.caption_ids(1), {"caption_embeds": features}
    else:
        prefix = read(f"{layout.prefix}embedding_table.weight")[:1]
        ids, more = torch.tensor([[config.codebook_size]]), {}
    ours = model(torch.cat([ids, codes], 1), **more).logits[0, :, : config.codebook_size]
    states = torch.cat([prefix, read(layout.embed)[codes[0]]])
    theirs = published_logits(read, states, config, layout)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def published_logits(read: Read, states: Tensor, config: LlamaGenConfig, layout: Layout) -> Tensor:
    """Logits `(S, K)` of a published LlamaGen for embedded inputs `(S, H)`."""
    eps, positions = config.rms_norm_eps, torch.arange(len(states))
    for index in range(config.num_hidden_layers):
        layer = f"{layout.layer}{index}."
        first, second = (
            ("attention_norm", "ffn_norm") if layout.fused else ("input_layernorm", "post_attention_layernorm")
        )
        normed = rms_norm(states, read(f"{layer}{first}.weight"), eps)
        output = "attention.wo" if layout.fused else "self_attn.o_proj"
        query, key, value = _projections(read, layer, normed, config, layout)
        grid = (config.grid_size[0], config.grid_size[1])
        theta = float((config.rope_parameters or {}).get("rope_theta") or 10000.0)
        query, key = (rotate_2d(part, positions, grid, config.prefix_length, theta) for part in (query, key))
        states = states + attend(query, key, value) @ read(f"{layer}{output}.weight").T
        names = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
        if not layout.fused:
            names = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        normed = rms_norm(states, read(f"{layer}{second}.weight"), eps)
        states = states + gated_mlp(normed, *(read(f"{layer}{name}.weight") for name in names))
    return rms_norm(states, read(layout.norm), eps) @ read(layout.head).T


def _projections(
    read: Read, layer: str, x: Tensor, config: LlamaGenConfig, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Query `(S, heads, D)`, key and value `(S, kv_heads, D)`."""
    heads = config.num_attention_heads
    head_dim, others = config.hidden_size // heads, config.num_key_value_heads or heads
    if layout.fused:
        fused = x @ read(f"{layer}attention.wqkv.weight").T
        parts = list(fused.split([size * head_dim for size in (heads, others, others)], -1))
    else:
        parts = [x @ read(f"{layer}self_attn.{name}_proj.weight").T for name in "qkv"]
    query, key, value = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    return query, key, value
