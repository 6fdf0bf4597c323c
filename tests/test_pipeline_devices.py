"""`LanternPipeline` whose parts are elsewhere between calls: offload of accelerate and diffusers, device maps, disk.

Hooks are accelerate's own and run for real; the device that they bring weights to is the CPU, and what they leave
behind is on "meta", so that whoever reads past a hook finds nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import CpuOffload, add_hook_to_module
from conftest import OFFLOAD_WARNING
from family_pipelines import BY_NAME, DRAWERS, TREE, Drawer, every_drawer
from pipelines import seed, tiny_pipeline
from torch import nn

from lantern_hf import LanternPipeline

pytestmark = OFFLOAD_WARNING

CPU = torch.device("cpu")


def same(one: Any, other: Any) -> bool:
    """Whether two outputs hold the same images."""
    return [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]


@every_drawer
def test_a_target_on_disk(drawer: Drawer, tmp_path: Path) -> None:
    """accelerate's offload of the target alone, under a pipeline that knows nothing of it."""
    expected = drawer.draw(drawer.pipe(), negative_prompt=drawer.prompts[0])
    model = drawer.make()
    pipe = drawer.pipe(model)
    disk_offload(model, tmp_path, execution_device=CPU)
    away = {name for name, weight in model.named_parameters() if weight.is_meta}
    assert away
    assert same(drawer.draw(pipe, negative_prompt=drawer.prompts[0]), expected)
    assert {name for name, weight in model.named_parameters() if weight.is_meta} == away


@pytest.mark.parametrize("name", ["llamagen", *(drawer.name for drawer in DRAWERS)])
def test_diffusers_sequential_offload(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of every component is on "meta" between its calls, the head excepted."""

    def without_index(model: nn.Module, device: torch.device, **kwargs: Any) -> nn.Module:
        # diffusers says "cpu:0", and a parameter that moves there from "cpu" comes out as a tensor, which accelerate
        # cannot make another of; an accelerator's weights always bear their index
        return cpu_offload(model, torch.device(device.type), **kwargs)

    monkeypatch.setattr("accelerate.cpu_offload", without_index)
    if name == "llamagen":
        pipe, kwargs = tiny_pipeline(), {"prompt": "red fox", "lantern_config": TREE}
    else:
        pipe, kwargs = BY_NAME[name].pipe(), {"prompt": BY_NAME[name].prompts[0], "lantern_config": TREE}
        kwargs |= BY_NAME[name].wish
    expected = pipe(**kwargs, generator=seed())
    pipe.draft_head.neighbors = None
    pipe.enable_sequential_cpu_offload(device="cpu")
    components = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    assert [part for part in components if all(not weight.is_meta for weight in part.parameters())] == [pipe.draft_head]
    again = pipe(**kwargs, generator=seed())
    assert same(again, expected)


@every_drawer
def test_diffusers_model_offload(drawer: Drawer) -> None:
    expected = drawer.draw(drawer.pipe())
    pipe = drawer.pipe()
    pipe.enable_model_cpu_offload(device="cpu")
    assert same(drawer.draw(pipe), expected)
    wish: dict[str, Any] = {"callback_on_step_end": print, "callback_on_step_end_tensor_inputs": ["image"]}
    if pipe.vq_model is not None:
        with pytest.raises(ValueError, match="under model offload"):
            drawer.draw(pipe, **wish)


class Asleep(CpuOffload):
    """accelerate's hook on a model whose weights are worthless until it is asked to bring them."""

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.count, self.weights = 0, {name: weight.detach().clone() for name, weight in module.state_dict().items()}
        for weight in module.parameters():
            weight.data.fill_(float("nan"))
        return super().init_hook(module)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        module.load_state_dict(self.weights)
        return super().pre_forward(module, *args, **kwargs)


@pytest.mark.parametrize("name", ["llamagen", *(drawer.name for drawer in DRAWERS)])
def test_a_target_is_woken_before_its_weights_are_read(name: str) -> None:
    """Its codebook is read for the table, and Janus' embedding for the prompt, before the decoding loop begins."""
    pipe = tiny_pipeline() if name == "llamagen" else BY_NAME[name].pipe()
    prompt = "red fox" if name == "llamagen" else BY_NAME[name].prompts[0]
    wish = {"lantern_config": TREE, "output_type": "latent"} | ({} if name == "llamagen" else BY_NAME[name].wish)
    expected = pipe(prompt, generator=seed(), **wish)
    pipe.draft_head.neighbors = None
    hook = Asleep(CPU)
    add_hook_to_module(pipe.transformer, hook)
    with torch.no_grad():
        output = pipe(prompt, generator=seed(), **wish)
    assert hook.count >= 1
    assert torch.equal(output.codes, expected.codes)


def test_a_target_spread_by_a_device_map(tmp_path: Path) -> None:
    """transformers' own map, partly on disk, for the target; `device_map` of diffusers for a whole folder."""
    drawer = BY_NAME["emu3"]
    pipe = drawer.pipe()
    expected = drawer.draw(pipe)
    pipe.save_pretrained(tmp_path / "bundle")
    places: Any = {"model.text_model.embed_tokens": "cpu", "model.text_model.rotary_emb": "cpu", "lm_head": "disk"}
    places |= {"model.text_model.layers.0": "cpu", "model.text_model.layers.1": "disk", "model.text_model.norm": "disk"}
    places |= {"model.vqmodel": "disk"}
    folder = tmp_path / "bundle" / "transformer"
    model = type(pipe.transformer).from_pretrained(folder, device_map=places, offload_folder=tmp_path / "offload")
    assert "disk" in model.hf_device_map.values()
    spread = drawer.pipe(model.eval(), str(tmp_path / "bundle" / "draft_head"))
    assert same(drawer.draw(spread), expected)
    passed = LanternPipeline.from_pretrained(tmp_path / "bundle", transformer=model)
    passed.enable_progress(False)
    assert same(drawer.draw(passed), expected)
    placed = LanternPipeline.from_pretrained(tmp_path / "bundle", device_map="cpu")
    placed.enable_progress(False)
    assert placed.hf_device_map == "cpu"
    assert same(drawer.draw(placed), expected)
