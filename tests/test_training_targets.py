"""Training against targets as people hold them: spread over memory and disk, and quantised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, tiny_chameleon, tiny_llama, tiny_llamagen
from spread import Int8Linear, dynamic_int8, spread, weight_only_int8
from tiny import STEPS, random_data, sampled
from torch import Tensor, nn
from transformers import PreTrainedModel

from lantern_hf import LanternDraftModel
from lantern_hf.training import FeatureCache, TrainingConfig, evaluate_head, train_head
from lantern_hf.training.fingerprint import weights_fingerprint


def assert_same_head(head: LanternDraftModel, expected: LanternDraftModel) -> None:
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(head.state_dict()[name], value)


@pytest.mark.parametrize(
    ("make", "how", "settings"),
    [
        (tiny_llama, "map", {"unroll_steps": 2}),
        (tiny_llama, "auto", {}),
        (tiny_chameleon, "disk", {"ema_decay": 0.9}),
        (tiny_llamagen, "cpu", {"guidance_scale": 2.0}),
        (tiny_llamagen, "disk", {"guidance_dropout": 0.5}),
    ],
)
def test_a_spread_target_trains_the_head_of_a_whole_one(
    make: Any, how: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Gradients come through an output layer that lies elsewhere; and it lies there again afterwards."""
    config = TrainingConfig(steps=2, **STEPS, **settings)
    plain = make()
    data = random_data(plain)
    expected = train_head(plain, data, config)
    target = spread(make(), how, tmp_path)
    away = {name for name, weight in target.named_parameters() if weight.is_meta}
    assert "lm_head.weight" in away
    if how in ("map", "auto"):
        assert "disk" in target.hf_device_map.values()
    cache = FeatureCache(tmp_path / "features", 10**6)
    head = train_head(target, data, config, output_dir=tmp_path / "head", eval_dataset=data, feature_cache=cache)
    assert_same_head(head, expected)
    assert {name for name, weight in target.named_parameters() if weight.is_meta} == away
    assert evaluate_head(target, head, data, depths=2) == pytest.approx(evaluate_head(plain, expected, data, depths=2))


@torch.no_grad()
def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """A model in floating point with the weights that int8 leaves of it."""
    for module in model.modules():
        if type(module) is nn.Linear:
            int8 = Int8Linear(module)
            module.weight.copy_(int8.weight * int8.scale.T)
    return model


@pytest.mark.parametrize("name", sorted(TINY))
def test_weight_only_int8_trains_as_its_rounded_weights_do(name: str) -> None:
    target, plain = weight_only_int8(TINY[name]()), rounded(TINY[name]())
    config = TrainingConfig(steps=3, distribution_loss_weight=1.0, **STEPS)
    data = random_data(plain)
    head, expected = (train_head(model, data, config) for model in (target, plain))
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(head.state_dict()[key], value, atol=2e-4, rtol=1e-3)
    assert {type(part) for part in head.modules() if hasattr(part, "in_features")} == {nn.Linear}
    assert head.dtype == torch.float32


def int8_but_output(model: PreTrainedModel) -> PreTrainedModel:
    """torch's int8 in every layer but the output layer, as quantisers of transformers leave it."""
    output = model.get_output_embeddings()
    model = dynamic_int8(model)
    model.set_output_embeddings(output)
    return model


def test_a_head_learns_from_a_target_in_torchs_int8(tmp_path: Path) -> None:
    target = int8_but_output(tiny_llama())
    assert type(target.lm_head) is nn.Linear
    assert type(target.model.layers[0].mlp.up_proj) is not nn.Linear
    data = sampled(target, 8, 12)
    settings = {"distribution_loss_weight": 1.0, "guidance_dropout": 0.0, **STEPS, "lr": 1e-2}
    start = train_head(target, data, TrainingConfig(steps=1, **settings | {"lr": 1e-30}))
    before = evaluate_head(target, start, data, depths=1)
    after = evaluate_head(target, train_head(target, data, TrainingConfig(steps=30, **settings)), data, depths=1)
    assert after["overlap"] > before["overlap"] + 0.05
    assert after["distribution_loss"] < before["distribution_loss"]


@pytest.mark.parametrize("name", sorted(TINY))
def test_an_output_layer_that_passes_no_gradients_is_refused(name: str, tmp_path: Path) -> None:
    """Where torch would warn and train on half of the loss."""
    target = dynamic_int8(TINY[name]())
    data = random_data(target)
    with pytest.raises(ValueError, match=f"output layer of {type(target).__name__} passes no gradients"):
        train_head(target, data, TrainingConfig(steps=1, **STEPS), output_dir=tmp_path / "head")
    assert not (tmp_path / "head").exists()
    head = train_head(target, data, TrainingConfig(steps=2, distribution_loss_weight=0.0, **STEPS))
    assert all(bool(value.isfinite().all()) for value in head.state_dict().values())


class TwoParts(Tensor):
    """A weight that is no plain tensor, made as those of torchao are: numbers and scales, and few operations."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> TwoParts:
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers: Tensor, scale: Tensor):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, size: Any, stride: Any) -> TwoParts:
        return TwoParts(parts["numbers"], parts["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return TwoParts(args[0].numbers, args[0].scale)
        raise NotImplementedError(func)


def test_quantised_weights_are_told_apart_by_their_parts() -> None:
    def fingerprint(number: int, scale: float) -> str:
        module = nn.Module()
        weight = TwoParts(torch.full((4, 4), number, dtype=torch.int8), torch.full((4, 1), scale))
        module.weight = nn.Parameter(weight, requires_grad=False)
        return weights_fingerprint(module)

    assert fingerprint(3, 0.5) == fingerprint(3, 0.5)
    assert len({fingerprint(3, 0.5), fingerprint(4, 0.5), fingerprint(3, 0.25)}) == 3
