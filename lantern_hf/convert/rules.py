"""Parts of the published rules in plain torch, written from their description and not from our models.

They are slow, run in float32 and know no cache. Weights come by their published names, one at a time, so that checking
a model needs the memory of one tensor more than the model itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Read", "attend", "gated_mlp", "rms_norm", "rotate_1d", "rotate_2d"]

# Gives a tensor by its published name, float32.
Read = Callable[[str], Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale `(..., H)` to root mean square 1, then by the weight `(H,)`."""
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU without biases: `down(silu(gate(x)) * up(x))`."""
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention by its formula.

    Args:
        query: `(S, heads, D)`.
        key: `(S, kv_heads, D)`; each serves `heads / kv_heads` consecutive query heads.
        value: As `key`.

    Returns:
        `(S, heads * D)`.
    """
    length, heads, dim = query.shape
    key, value = (states.repeat_interleave(heads // states.shape[1], dim=1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / dim**0.5
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(length, heads * dim)


def rotate_1d(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn pairs (i, i + D/2) of `(S, heads, D)` by `position * base ** (-2i / D)` (Llama, Chameleon)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * base ** (-torch.arange(half).double() / half)  # (S, D/2)
    turned = torch.polar(torch.ones_like(angles), angles)[:, None] * torch.complex(*x.double().split(half, -1))
    return torch.cat([turned.real, turned.imag], -1).float()


def rotate_2d(x: Tensor, positions: Tensor, grid: tuple[int, int], prefix: int, base: float) -> Tensor:
    """Turn interleaved pairs of `(S, heads, D)`, half of them by the row, half by the column; zero in the prefix.

    Args:
        x: Queries or keys.
        positions: `(S,)`; `prefix + i` is place i of the image, row by row.
        grid: Height and width in tokens.
        prefix: Positions before the image, which LlamaGen multiplies by zero.
        base: Base of the frequencies.

    Returns:
        `(S, heads, D)`.
    """
    quarter = x.shape[-1] // 4
    frequencies = base ** (-torch.arange(quarter).double() / quarter)
    places = (positions - prefix).clamp(min=0)
    rows, columns = places // grid[1], places % grid[1]
    angles = torch.cat([rows[:, None] * frequencies, columns[:, None] * frequencies], -1)  # (S, D/2)
    factor = torch.polar((positions >= prefix).double()[:, None].expand_as(angles).contiguous(), angles)
    return (
        torch.view_as_real(torch.view_as_complex(x.double().contiguous().unflatten(-1, (-1, 2))) * factor[:, None])
        .flatten(-2)
        .float()
    )
