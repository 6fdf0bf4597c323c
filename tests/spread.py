"""Targets spread over memory and disk, or quantised, in the ways people do; devices and weights are real."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from torch import Tensor, nn
from transformers import PreTrainedModel

PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "lm_head": "disk",
}


def spread(model: PreTrainedModel, how: str, folder: Path) -> PreTrainedModel:
    """Take a model's weights away from it, in one of the ways people do."""
    if how == "cpu":
        return cpu_offload(model, execution_device=torch.device("cpu"))
    if how == "disk":
        disk_offload(model, folder / "offload", execution_device=torch.device("cpu"))
        return model
    if how == "dispatch":
        return dispatch_model(model, PLACES, main_device="cpu", offload_dir=folder / "offload")
    model.save_pretrained(folder / "model")
    places: Any = PLACES
    limits = None
    if how == "auto":
        sizes = [p.numel() * 4 for p in model.parameters()]
        places, limits = "auto", {"cpu": int(sum(sizes) * 0.7)}
    return (
        type(model)
        .from_pretrained(folder / "model", device_map=places, max_memory=limits, offload_folder=folder / "offload")
        .eval()
    )


def dynamic_int8(model: PreTrainedModel) -> PreTrainedModel:
    """torch's own: weights in int8, activations quantised in each pass; linears have no weight attribute then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, that it is moving to another package
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


class Int8Linear(nn.Module):
    """Weight-only int8, as torchao and bitsandbytes do it: one scale an output."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.T)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype)) * self.scale + (0 if self.bias is None else self.bias)


def weight_only_int8(model: PreTrainedModel) -> PreTrainedModel:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return model
