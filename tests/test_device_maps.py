"""A target spread over two accelerators and a host, checked without any: operators refuse tensors of different devices.

PyTorch's fake tensors have a shape and a device and no content; every operator on them checks devices as the real one
would. What a generation reads on the host comes back as zeros, so that rounds go on: this shows where tensors are, and
nothing about tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import TINY, prompt, tiny_head
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, PreTrainedModel, StoppingCriteriaList
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper

from lantern_hf import LanternConfig, lantern_generate
from lantern_hf.cache import CACHE_KEYWORD

FIRST, LAST = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture
def zeros_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a fake tensor give zeros of its shape."""

    def read(name: str, value: Any) -> None:
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self: value(self.shape) if isinstance(self, FakeTensor) else original(self)
        )

    def nested(shape: Any) -> Any:
        return [nested(shape[1:]) for _ in range(shape[0])] if len(shape) else 0

    read("tolist", nested)
    read("__bool__", lambda shape: True)
    read("__int__", lambda shape: 0)


def place(module: nn.Module, device: torch.device) -> None:
    """Put a part on a device with the hook that accelerate would give it; its own way of moving knows no fakes."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            setattr(part, name, nn.Parameter(weight.detach().to(device)))
        for name, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[name] = buffer.to(device)
        hook = AlignDevicesHook(skip_keys=[CACHE_KEYWORD])
        add_hook_to_module(part, hook)
        hook.execution_device = device


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Split a model as `device_map="auto"` does: embeddings and first layer here, last layer and output there."""
    base: Any = model.base_model
    for name, part in base.named_children():
        if name != "layers":
            place(part, LAST if name == "norm" else FIRST)
    place(base.layers[0], FIRST)
    place(base.layers[1], LAST)
    place(model.get_output_embeddings(), LAST)
    return model


@pytest.mark.parametrize("inputs_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_every_tensor_is_where_it_is_used(name: str, inputs_on: str, zeros_on_the_host: None) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = spread(TINY[name]())
        head = tiny_head(model)
        assert head.device == LAST
        inputs = {key: value.to(inputs_on) for key, value in prompt(model, 2).items()}
        length = inputs["input_ids"].shape[1]
        for processor in (RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(0.7)):
            for do_sample in (False, True):
                output = lantern_generate(
                    model,
                    logits_processor=LogitsProcessorList([processor]),
                    stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(length + 4)]),
                    generation_config=GenerationConfig(do_sample=do_sample),
                    assistant=head,
                    lantern_config=LanternConfig.strict(),
                    **inputs,
                )
                assert output.shape == (2, length + 4)
