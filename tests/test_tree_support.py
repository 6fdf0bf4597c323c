"""The probe of `attach`: sound models pass in every dtype, and one sibling that sees another is caught in each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TINY
from tiny_emu3 import tiny_emu3
from tiny_families import tiny_glm_image, tiny_janus
from torch import nn
from transformers import PreTrainedModel

from lantern_hf import check_tree_support

MAKE = {**TINY, "emu3": tiny_emu3, "janus": tiny_janus, "glm_image": tiny_glm_image}


def leak(model: PreTrainedModel) -> None:
    """Let the second sibling of the probe see the first, and nothing else: one entry of the mask."""

    def open_one(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 4:
            kwargs["attention_mask"] = mask.clone()
            kwargs["attention_mask"][..., -1, -2] = True if mask.dtype == torch.bool else 0.0
        return args, kwargs

    model.get_decoder().register_forward_pre_hook(open_one, with_kwargs=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(MAKE))
def test_one_leaking_sibling_is_caught(name: str, dtype: torch.dtype) -> None:
    model = MAKE[name]().to(dtype)
    check_tree_support(model)
    leak(model)
    with pytest.raises(ValueError, match="does not score a tree as it scores sequences") as error:
        check_tree_support(model)
    allowed = float(str(error.value).split("allowed is ")[1].split(". ")[0])
    assert allowed <= {torch.float32: 1e-3, torch.bfloat16: 0.032, torch.float16: 0.004}[dtype]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_it_is_caught_under_either_form_of_mask(attention: str) -> None:
    model = TINY["llama"](attention).to(torch.bfloat16)
    check_tree_support(model)
    leak(model)
    with pytest.raises(ValueError, match=rf"Its attention \({attention}\)"):
        check_tree_support(model)


def test_noise_is_measured_on_the_model() -> None:
    """A model whose passes differ by their largest value, as one that quantises its inputs does."""

    class Coarse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            step = x.abs().max() / 63
            return (x / step).round() * step

    model = TINY["llama"]()
    for layer in model.model.layers:
        layer.input_layernorm = nn.Sequential(layer.input_layernorm, Coarse())
    check_tree_support(model)
    with pytest.raises(ValueError, match="allowed is 0.001"):
        check_tree_support(model, tolerance=1e-3)
