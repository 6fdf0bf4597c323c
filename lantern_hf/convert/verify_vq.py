"""Decodes by the rule of a published VQ model and by the converted one, the same random codes.

The rule (taming-transformers, arXiv 2012.09841; LlamaGen's is the same with other names): codebook entry, 1x1
convolution, 3x3 convolution, residual block, attention, residual block; then levels from the lowest resolution up, of
residual blocks with or without attention, each but the last doubled in size by repetition and a 3x3 convolution; group
norm, swish, 3x3 convolution. LlamaGen's entries are scaled to length 1 at lookup.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.rules import Read
from lantern_hf.models.vq import decode_codes

_GROUPS, _EPS = 32, 1e-6
_SIDE = 4


@torch.no_grad()
def verify_vq(checkpoint: Checkpoint, folder: Path, dtype: torch.dtype, family: str) -> tuple[float, float]:
    """Compare a published VQ decoder with its conversion.

    Args:
        checkpoint: The source.
        folder: The result.
        dtype: Its dtype; the rule rounds the weights to it, and computes in float32.
        family: `"llamagen"` or `"chameleon"`.

    Returns:
        The largest difference of two pixels, and the largest pixel of the rule, in [-1, 1] or so.
    """
    vq = VQModel.from_pretrained(folder, dtype=torch.float32).eval()
    codes = torch.randint(vq.config["num_vq_embeddings"], (1, _SIDE, _SIDE), generator=torch.Generator().manual_seed(0))
    ours = decode_codes(vq, codes)

    def read(key: str) -> Tensor:
        return checkpoint.rows(key).to(dtype).float()

    codebook = checkpoint.rows("quantize.embedding.weight").float()
    if family == "llamagen":
        codebook = codebook / codebook.norm(dim=-1, keepdim=True)
    latents = codebook.to(dtype).float()[codes].permute(0, 3, 1, 2)
    theirs = published_pixels(read, checkpoint.tensors.keys(), latents, family)
    return float((ours - theirs).abs().max()), float(theirs.abs().max())


def published_pixels(read: Read, names: Set[str], states: Tensor, family: str) -> Tensor:
    """Pixels `(B, 3, H, W)` of a published VQ decoder for codebook entries `(B, d, h, w)`."""
    for name in ("post_quant_conv", "decoder.conv_in"):
        states = _conv(states, read, name)
    middle = ("mid.0", "mid.1", "mid.2") if family == "llamagen" else ("mid.block_1", "mid.attn_1", "mid.block_2")
    for name in middle:
        states = _block(states, read, f"decoder.{name}", names)
    for level in _levels(names, family):
        count = 0
        while f"{level[0]}{count}.conv1.weight" in names:
            states = _block(states, read, f"{level[0]}{count}", names)
            states = _block(states, read, f"{level[1]}{count}", names)
            count += 1
        if f"{level[2]}.weight" in names:
            states = states.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
            states = _conv(states, read, level[2])
    states = F.silu(_norm(states, read, "decoder.norm_out"))
    return _conv(states, read, "decoder.conv_out")


def _levels(names: Set[str], family: str) -> list[tuple[str, str, str]]:
    """Prefixes of residual blocks and attentions, and name of the upsampling, level by level from the lowest."""
    if family == "llamagen":
        prefixes = [f"decoder.conv_blocks.{index}." for index in range(len(names))]
        parts = ("res.", "attn.", "upsample.conv")
    else:
        prefixes = [f"decoder.up.{index}." for index in reversed(range(len(names)))]
        parts = ("block.", "attn.", "upsample.conv")
    there = [prefix for prefix in prefixes if f"{prefix}{parts[0]}0.conv1.weight" in names]
    return [(prefix + parts[0], prefix + parts[1], prefix + parts[2]) for prefix in there]


def _conv(x: Tensor, read: Read, name: str) -> Tensor:
    """A convolution that keeps the size."""
    weight = read(f"{name}.weight")
    return F.conv2d(x, weight, read(f"{name}.bias"), padding=weight.shape[-1] // 2)


def _norm(x: Tensor, read: Read, name: str) -> Tensor:
    """A group norm."""
    return F.group_norm(x, _GROUPS, read(f"{name}.weight"), read(f"{name}.bias"), _EPS)


def _block(x: Tensor, read: Read, name: str, names: Set[str]) -> Tensor:
    """A residual block or an attention, whichever is there; nothing if neither is."""
    if f"{name}.conv1.weight" in names:
        inner = _conv(F.silu(_norm(x, read, f"{name}.norm1")), read, f"{name}.conv1")
        inner = _conv(F.silu(_norm(inner, read, f"{name}.norm2")), read, f"{name}.conv2")
        shortcut = f"{name}.nin_shortcut"
        return inner + (_conv(x, read, shortcut) if f"{shortcut}.weight" in names else x)
    if f"{name}.q.weight" in names:
        normed = _norm(x, read, f"{name}.norm")
        query, key, value = (_conv(normed, read, f"{name}.{part}").flatten(2) for part in "qkv")  # (B, C, h * w)
        weights = (query.transpose(1, 2) @ key / query.shape[1] ** 0.5).softmax(-1)
        return x + _conv((value @ weights.transpose(1, 2)).view_as(x), read, f"{name}.proj_out")
    return x
