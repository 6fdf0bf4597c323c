"""Targets spread over memory and disk, quantised or moved about by hooks, and where their draft heads go.

Devices are real: the CPU, the disk, and "meta", on which accelerate leaves a weight that is elsewhere.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload_with_hook, disk_offload
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook, add_hook_to_module
from conftest import OFFLOAD_WARNING, TINY, prompt, tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from helpers import BEGIN_IMAGE
from spread import Int8Linear, dynamic_int8, spread, weight_only_int8
from torch import Tensor, nn
from transformers import PreTrainedModel

import lantern_hf
from lantern_hf import LanternConfig, LanternDraftModel, NeighborTable, check_tree_support, lantern_generate
from lantern_hf._placement import execution_device, last_layer_device, read_weight, wake
from lantern_hf.candidates import LanternCandidateGenerator
from lantern_hf.resolve import load_head

pytestmark = OFFLOAD_WARNING

STRICT = LanternConfig.strict()
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
RELAXED: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}


@pytest.mark.parametrize("how", ["cpu", "disk", "dispatch", "map", "auto"])
def test_a_text_model_wherever_its_weights_are(how: str, tmp_path: Path) -> None:
    plain = tiny_llama()
    inputs = prompt(plain, 2)
    expected = plain.generate(**inputs, **GREEDY)
    tiny_head(plain).save_pretrained(tmp_path / "head")
    model = spread(tiny_llama(), how, tmp_path)
    away = {name for name, weight in model.named_parameters() if weight.is_meta}
    assert "lm_head.weight" in away
    if how in ("map", "auto"):
        assert "disk" in model.hf_device_map.values()
    lantern_hf.attach(model, str(tmp_path / "head"), STRICT, default_on=True)
    for cache in ({}, {"cache_implementation": "static"}):
        output = model.generate(**inputs, return_dict_in_generate=True, **cache, **GREEDY)
        assert torch.equal(output.sequences, expected)
        assert output.stats.passes > 0
    head = model._lantern.loaded[str(tmp_path / "head")]
    assert {weight.device.type for weight in head.parameters()} == {"cpu"}
    assert {name for name, weight in model.named_parameters() if weight.is_meta} == away  # and it is away again


@pytest.mark.parametrize("how", ["cpu", "disk"])
@pytest.mark.parametrize("make", [tiny_chameleon, tiny_llamagen])
def test_image_models_wherever_their_weights_are(make: Any, how: str, tmp_path: Path, neighbors: NeighborTable) -> None:
    """Relaxed, guided, sampled: the same tokens. Chameleon's table comes from a codebook that lies on disk."""

    def run(model: PreTrainedModel) -> Tensor:
        inputs = prompt(model, 2, guidance=make is tiny_llamagen)
        if make is tiny_chameleon:
            inputs["input_ids"][:, -1] = BEGIN_IMAGE
        lantern_hf.attach(model, tiny_head(model), LanternConfig(neighborhood_size=5, lam=4.0), default_on=True)
        return model.generate(
            **inputs,
            neighbors=neighbors if make is tiny_llamagen else None,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(0),
            **RELAXED,
        )

    expected = run(make())
    assert torch.equal(run(spread(make(), how, tmp_path)), expected)


def test_the_codebook_is_read_from_where_it_is(tmp_path: Path) -> None:
    model = tiny_chameleon()
    part = model.model.vqmodel.quantize.embedding
    expected = part.weight.detach().clone()
    table = NeighborTable.from_codebook(expected, 5)
    disk_offload(model, tmp_path, execution_device=torch.device("cpu"))
    assert part.weight.is_meta
    assert torch.equal(read_weight(part), expected)
    assert part.weight.is_meta
    lantern_hf.attach(model, tiny_head(model), neighbors=table)
    with pytest.raises(ValueError, match="built from another codebook"):
        lantern_hf.attach(model, tiny_head(model), neighbors=NeighborTable.from_codebook(-expected, 5))


# ---- where a head goes, and in which dtype


def test_a_head_follows_the_last_layer() -> None:
    model = tiny_llama()
    add_hook_to_module(model.model.layers[-1].mlp, AlignDevicesHook(execution_device="meta"))
    assert last_layer_device(model) == torch.device("meta")
    assert tiny_head(model).device.type == "meta"
    assert LanternDraftModel.for_target(model, device="cpu").device.type == "cpu"  # told otherwise


def test_devices_are_read_from_hooks_and_weights() -> None:
    assert execution_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert execution_device(nn.Linear(2, 2, device="meta")) == torch.device("cpu")
    assert execution_device(nn.Identity()) == torch.device("cpu")
    module = nn.Sequential(nn.Linear(2, 2))
    add_hook_to_module(module[0], SequentialHook(AlignDevicesHook(), AlignDevicesHook(execution_device="meta")))
    assert execution_device(module) == torch.device("meta")


def test_a_head_takes_the_dtype_of_its_target_unless_told_otherwise(tmp_path: Path) -> None:
    model = tiny_llama()
    tiny_head(model).save_pretrained(tmp_path)
    half = tiny_llama().to(torch.bfloat16)
    assert load_head(tmp_path, half).dtype == torch.bfloat16
    assert load_head(tmp_path, half, dtype=torch.float32, device_map="cpu").dtype == torch.float32
    assert load_head(tmp_path, model).dtype == torch.float32
    assert LanternDraftModel.for_target(half).dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(TINY))
def test_head_and_target_may_differ_in_dtype(name: str) -> None:
    """The head runs in its own dtype between the target's embedding and output layer."""
    model = TINY[name]()
    inputs = prompt(model, 2)
    expected = model.generate(**inputs, **GREEDY)
    for dtype in (torch.bfloat16, torch.float64):
        head = tiny_head(model).to(dtype)
        lantern_hf.attach(model, head, STRICT, default_on=True)
        assert torch.equal(model.generate(**inputs, **GREEDY), expected)
        assert head.dtype == dtype
    half = model.to(torch.bfloat16)
    lantern_hf.attach(half, tiny_head(half).float(), STRICT, default_on=True)
    assert half.generate(**inputs, **GREEDY).shape == expected.shape


def test_a_head_far_from_its_target_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama()
    head = tiny_head(model)
    LanternCandidateGenerator(head, model)
    assert not caplog.records
    add_hook_to_module(model, CpuOffload("cuda:7"))  # where it will run, once it is called
    with caplog.at_level(logging.WARNING):
        LanternCandidateGenerator(head, model)
    assert "The draft head is on cpu and the target's last layer on cuda:7" in caplog.text


# ---- hooks that move a model as a whole


class CountingOffload(CpuOffload):
    """accelerate's hook, counting how often it is asked to bring the model."""

    count = 0

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return super().pre_forward(module, *args, **kwargs)


def test_a_model_that_sleeps_is_woken() -> None:
    """The loop calls the parts of a model, whose hook listens to the whole."""
    model = tiny_llama()
    inputs = prompt(model, 2)
    expected = model.generate(**inputs, **GREEDY)
    head, hook = tiny_head(model), CountingOffload(torch.device("cpu"))
    add_hook_to_module(model, hook)
    output = model.generate(**inputs, custom_generate=lantern_generate, assistant=head, lantern_config=STRICT, **GREEDY)
    assert hook.count == 1
    assert torch.equal(output, expected)
    check_tree_support(model)
    assert hook.count == 2


def test_a_model_woken_by_accelerate_itself() -> None:
    first, second = tiny_llama(), tiny_llama()
    _, hook = cpu_offload_with_hook(first, torch.device("cpu"))
    cpu_offload_with_hook(second, torch.device("cpu"), prev_module_hook=hook)
    inputs = prompt(second)
    expected = tiny_llama().generate(**inputs, **GREEDY)
    lantern_hf.attach(second, tiny_head(second), STRICT, default_on=True)
    assert torch.equal(second.generate(**inputs, **GREEDY), expected)
    hook.remove()
    wake(first)  # nothing to wake any more


# ---- quantised targets


@pytest.mark.parametrize("name", sorted(TINY))
def test_weight_only_quantisation_changes_no_token(name: str) -> None:
    model = weight_only_int8(TINY[name]())
    assert isinstance(model.get_output_embeddings(), Int8Linear)
    inputs = prompt(model, 2)
    expected = model.generate(**inputs, **GREEDY)
    head = tiny_head(model)
    lantern_hf.attach(model, head, STRICT, default_on=True)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    assert {type(part) for part in head.modules() if hasattr(part, "in_features")} == {nn.Linear}
    assert head.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(TINY))
def test_dynamic_quantisation(name: str) -> None:
    """A pass scales activations by its largest, so that passes of one token agree with `generate`, and trees nearly."""
    model = dynamic_int8(TINY[name]())
    inputs = prompt(model)
    expected = model.generate(**inputs, **GREEDY)
    plain = model.generate(**inputs, custom_generate=lantern_generate, **GREEDY)
    assert torch.equal(plain, expected)
    with pytest.raises(ValueError, match="does not score a tree"):
        check_tree_support(model, tolerance=1e-6)
    head = tiny_head(model)
    lantern_hf.attach(model, head, STRICT, default_on=True)
    output = model.generate(**inputs, return_dict_in_generate=True, **GREEDY)
    assert output.sequences.shape == expected.shape
    assert output.stats.passes > 0
    assert head.dtype == torch.float32
    assert {type(part) for part in head.modules() if hasattr(part, "in_features")} == {nn.Linear}
