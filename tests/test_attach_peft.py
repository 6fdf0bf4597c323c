"""PEFT adapters on the target, put there before or after it is attached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, prompt, tiny_chameleon, tiny_head, tiny_llama
from helpers import BEGIN_IMAGE
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from torch import Tensor

import lantern_hf
from lantern_hf import LanternConfig, LanternDraftModel, detach
from lantern_hf.attach import LanternMixin
from lantern_hf.targets import adapter_for

# PEFT asks transformers by a name that 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

STRICT = LanternConfig.strict()
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
# Also on the output layer, whose weight must not be read past the adapter.
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "lm_head"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}


def tune(model: Any, **kwargs: Any) -> Any:
    """Put random adapters on a model."""
    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(**{**LORA, **kwargs}))


def decodes(model: Any, inputs: dict[str, Tensor], expected: Tensor, **kwargs: Any) -> None:
    """Check that a model decodes with LANTERN++, and to the tokens expected."""
    output = model.generate(**inputs, return_dict_in_generate=True, **kwargs, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert output.stats.passes > 0


@pytest.mark.parametrize("first", ["attach", "peft"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_lora(name: str, first: str) -> None:
    base = TINY[name]()
    inputs, plain = prompt(base, 2), base.generate(**prompt(base, 2), **GREEDY)
    expected = tune(TINY[name]()).generate(**inputs, **GREEDY)
    assert not torch.equal(expected, plain)
    head = tiny_head(base)
    if first == "attach":
        lantern_hf.attach(base, head, STRICT)
        tuned = tune(base)
    else:
        tuned = tune(base)
        assert lantern_hf.attach(tuned, head, STRICT) is tuned
    assert isinstance(base, LanternMixin)
    decodes(tuned, inputs, expected, assistant=head)
    assert torch.equal(tuned.generate(**inputs, **GREEDY), expected)
    with tuned.disable_adapter():
        decodes(tuned, inputs, plain, assistant=head)
    assert detach(tuned) is tuned
    assert not isinstance(base, LanternMixin)
    assert torch.equal(tuned.generate(**inputs, **GREEDY), expected)


def test_an_adapted_output_layer_of_an_image_model() -> None:
    model = tiny_chameleon()
    tuned = tune(model)
    ids = torch.tensor([[0, 33, BEGIN_IMAGE]])
    adapter = adapter_for(model, ids)
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    expected = model.lm_head(hidden)[..., adapter.image_token_ids]
    assert torch.equal(adapter.logits(hidden), expected)
    with tuned.disable_adapter():
        assert not torch.allclose(adapter.logits(hidden), expected)


def test_merging_keeps_the_attachment() -> None:
    model = tiny_llama()
    inputs = prompt(model)
    lantern_hf.attach(model, tiny_head(model), STRICT, default_on=True)
    tuned = tune(model)
    expected = tuned.generate(**inputs, **GREEDY)
    merged = tuned.merge_and_unload()
    assert merged is model
    decodes(merged, inputs, expected)


def test_several_adapters_take_turns() -> None:
    tuned = tune(tiny_llama())
    torch.manual_seed(4)
    tuned.add_adapter("other", LoraConfig(**LORA))
    inputs, expected = prompt(tuned.get_base_model()), {}
    for name in ("default", "other"):
        tuned.set_adapter(name)
        expected[name] = tuned.generate(**inputs, **GREEDY)
    assert not torch.equal(expected["default"], expected["other"])
    lantern_hf.attach(tuned, LanternDraftModel.for_target(tuned), STRICT, default_on=True)
    for name in ("default", "other"):
        tuned.set_adapter(name)
        decodes(tuned, inputs, expected[name])


def test_a_saved_adapter_has_no_trace_of_us(tmp_path: Path) -> None:
    model = tiny_llama()
    inputs = prompt(model)
    lantern_hf.attach(model, tiny_head(model), STRICT, default_on=True)
    tuned = tune(model, target_modules=["q_proj", "v_proj"])  # PEFT would save an adapted output layer whole
    expected = tuned.generate(**inputs, **GREEDY)
    tuned.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for path in tmp_path.iterdir():
        assert b"lantern" not in path.read_bytes().lower()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["peft_type"] == "LORA"
    loaded = PeftModel.from_pretrained(tiny_llama(), tmp_path)
    lantern_hf.attach(loaded, tiny_head(model), STRICT, default_on=True)
    decodes(loaded, inputs, expected)


def test_learned_prompts_are_refused() -> None:
    """Their tokens go in front inside PEFT's `generate`, unseen by the head."""
    model = tiny_llama()
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match="PromptTuningConfig puts learned tokens before the prompt"):
        lantern_hf.attach(get_peft_model(model, config), tiny_head(model))
    lantern_hf.attach(model, tiny_head(model), STRICT, default_on=True)
    tuned = get_peft_model(model, config)
    with pytest.raises(ValueError, match="`prepare_inputs_for_generation` of this LlamaForCausalLM was replaced"):
        tuned.generate(**prompt(model), **GREEDY)
    decodes(model, prompt(model), tiny_llama().generate(**prompt(model), **GREEDY))  # without the learned prompt
