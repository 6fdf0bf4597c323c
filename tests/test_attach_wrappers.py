"""What people do to a model before or after it is attached: every one leaves `generate` as it should be.

PEFT has a file of its own, placement and quantisation are in `test_devices.py`, the rest of `attach` in
`test_attach.py`.
"""

from __future__ import annotations

import copy
import gc
import json
import pickle
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from conftest import TINY, prompt, tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from helpers import BEGIN_IMAGE
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import lantern_hf
from lantern_hf import LanternConfig, LanternDraftModel, NeighborTable, detach
from lantern_hf._checkpointing import checkpointed_layers, set_checkpointing
from lantern_hf.attach import LanternMixin

STRICT = LanternConfig.strict()
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


def decodes(model: Any, inputs: dict[str, Tensor], expected: Tensor, **kwargs: Any) -> None:
    """Check that a model decodes with LANTERN++, and to the tokens expected."""
    output = model.generate(**inputs, return_dict_in_generate=True, **kwargs, **GREEDY)
    assert torch.equal(output.sequences, expected)
    assert output.stats.passes > 0


@pytest.mark.parametrize("first", ["attach", "compile"])
def test_torch_compile(llama: LlamaForCausalLM, first: str) -> None:
    inputs, head = prompt(llama), tiny_head(llama)
    expected = llama.generate(**inputs, **GREEDY)
    if first == "attach":
        lantern_hf.attach(llama, head, STRICT)
        compiled = torch.compile(llama, backend="eager")
    else:
        compiled = torch.compile(llama, backend="eager")
        assert lantern_hf.attach(compiled, head, STRICT) is compiled
    decodes(compiled, inputs, expected, assistant=head)
    assert torch.equal(compiled.generate(**inputs, **GREEDY), expected)
    assert detach(compiled) is compiled
    assert type(llama) is LlamaForCausalLM


def test_a_compiled_decoder_is_what_runs(llama: LlamaForCausalLM) -> None:
    """The loop calls the decoder and the output layer, so those are the parts to compile."""
    inputs, head, passes = prompt(llama), tiny_head(llama), []

    def backend(graph: Any, example_inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            passes.append(len(args))
            return graph.forward(*args)

        return run

    expected = llama.generate(**inputs, **GREEDY)
    lantern_hf.attach(llama, head, STRICT, default_on=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the compiler
        llama.model.compile(backend=backend, dynamic=True)
        decodes(llama, inputs, expected)
    assert passes


@pytest.mark.parametrize("name", sorted(TINY))
def test_deepcopy_and_pickle(name: str) -> None:
    model = TINY[name]()
    inputs = prompt(model, 2)
    expected = model.generate(**inputs, **GREEDY)
    lantern_hf.attach(model, tiny_head(model), STRICT, default_on=True)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(copy.deepcopy(model))]
    for parameter in model.parameters():  # none of them may run the original
        torch.nn.init.zeros_(parameter)
    for copied in copies:
        assert type(copied) is type(model)
        decodes(copied, inputs, expected)
        detach(copied)
        assert type(copied) is type(TINY[name]())
    assert isinstance(model, LanternMixin)


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_saved_folder_has_no_trace_of_us(name: str, tmp_path: Path) -> None:
    plain, attached = TINY[name](), TINY[name]()
    lantern_hf.attach(attached, tiny_head(attached), STRICT, default_on=True)
    for model, folder in ((plain, tmp_path / "plain"), (attached, tmp_path / "attached")):
        model.save_pretrained(folder)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert sorted(path.name for path in (tmp_path / "attached").iterdir()) == files
    for file in files:
        content = (tmp_path / "attached" / file).read_bytes()
        assert content == (tmp_path / "plain" / file).read_bytes()
        assert b"lantern" not in content.lower()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("first", ["attach", "flag"])
def test_gradient_checkpointing(llama: LlamaForCausalLM, first: str, training: bool) -> None:
    inputs, head = prompt(llama, 2), tiny_head(llama)
    expected = llama.generate(**inputs, **GREEDY)
    set_checkpointing(head.train(training), True)  # the head's layers keep their cache under every version
    if first == "attach":
        lantern_hf.attach(llama, head, STRICT, default_on=True)
        decodes(llama, inputs, expected)
    set_checkpointing(llama.train(training), True)
    if torch.equal(LlamaForCausalLM.generate(llama, **inputs, **GREEDY), expected):
        lantern_hf.attach(llama, head, STRICT, default_on=True)
        decodes(llama, inputs, expected)
        assert llama.training == training
    else:  # a transformers that drops the cache there, and whose own tokens are wrong
        assert training
        dropped = f"in training mode with gradient checkpointing, where transformers {transformers.__version__} drops"
        with pytest.raises(ValueError, match=re.escape(dropped)):
            llama.generate(**inputs, **GREEDY) if first == "attach" else lantern_hf.attach(llama, head)
        lantern_hf.attach(llama.eval(), head, STRICT, default_on=True)
        decodes(llama, inputs, expected)
    assert checkpointed_layers(llama)


class Counting(ModelHook):
    """A hook of accelerate that counts calls."""

    count = 0

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        return args, kwargs


@pytest.mark.parametrize("first", ["attach", "hook"])
def test_accelerate_hooks(llama: LlamaForCausalLM, first: str) -> None:
    inputs, head, hook = prompt(llama), tiny_head(llama), Counting()
    expected = llama.generate(**inputs, **GREEDY)
    parts = [llama.model.embed_tokens, llama.model.layers[0], llama.lm_head]
    if first == "attach":
        lantern_hf.attach(llama, head, STRICT, default_on=True)
    for part in parts:
        add_hook_to_module(part, hook)
    if first == "hook":
        lantern_hf.attach(llama, head, STRICT, default_on=True)
    decodes(llama, inputs, expected)
    assert hook.count > 3
    for part in parts:
        remove_hook_from_module(part)
    decodes(llama, inputs, expected)


def test_a_distributed_wrapper_is_looked_through(llama: LlamaForCausalLM) -> None:
    wrapped = torch.nn.DataParallel(llama, device_ids=[])
    assert lantern_hf.attach(wrapped, tiny_head(llama), STRICT) is wrapped
    assert isinstance(wrapped.module, LanternMixin)
    for thing in (torch.nn.Linear(2, 2), "someone/model"):
        with pytest.raises(TypeError, match=f"must be a transformers model, got {type(thing).__name__}"):
            lantern_hf.attach(thing)


def test_generate_replaced_by_others(llama: LlamaForCausalLM) -> None:
    """Before: refused, with two ways out. Afterwards: theirs calls ours."""
    inputs, head = prompt(llama), tiny_head(llama)
    expected = llama.generate(**inputs, **GREEDY)
    stock = llama.generate
    llama.generate = lambda *args, **kwargs: stock(*args, **kwargs)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="Attach before that library patches the model, or call\\s"):
        lantern_hf.attach(llama, head)
    assert type(llama) is LlamaForCausalLM
    decodes(llama, inputs, expected, custom_generate=lantern_hf.lantern_generate, assistant=head, lantern_config=STRICT)
    del llama.generate  # type: ignore[method-assign]
    lantern_hf.attach(llama, head)
    ours = llama.generate
    llama.generate = lambda *args, **kwargs: ours(*args, **kwargs)  # type: ignore[method-assign]
    decodes(llama, inputs, expected, lantern_config=STRICT)


def test_a_replaced_prompt_is_refused(llama: LlamaForCausalLM) -> None:
    """As PEFT does for prompt tuning."""
    lantern_hf.attach(llama, tiny_head(llama), STRICT, default_on=True)
    original = llama.prepare_inputs_for_generation
    llama.prepare_inputs_for_generation = original  # back in place, as PEFT leaves it
    llama.generate(**prompt(llama), **GREEDY)
    llama.prepare_inputs_for_generation = lambda *args, **kwargs: original(*args, **kwargs)
    with pytest.raises(ValueError, match="`prepare_inputs_for_generation` of this LlamaForCausalLM was replaced"):
        llama.generate(**prompt(llama), **GREEDY)


def test_two_models_and_two_heads(tmp_path: Path) -> None:
    """Two targets of one family, another one, and heads of their own, by object and by name, in one process."""
    models = [tiny_llama(), tiny_llama(), tiny_llamagen()]
    torch.nn.init.normal_(models[1].lm_head.weight, std=0.4)
    inputs = [prompt(model, 2) for model in models]
    expected = [model.generate(**given, **GREEDY) for model, given in zip(models, inputs, strict=True)]
    assert not torch.equal(expected[0], expected[1])
    heads = [tiny_head(models[0]), tiny_head(models[1], num_hidden_layers=2), tiny_head(models[2])]
    heads[1].save_pretrained(tmp_path)
    for model, head in zip(models, [heads[0], str(tmp_path), heads[2]], strict=True):
        lantern_hf.attach(model, head, STRICT, default_on=True)
    for _ in range(2):
        for model, given, tokens in zip(models, inputs, expected, strict=True):
            decodes(model, given, tokens)
    decodes(models[0], inputs[0], expected[0], assistant=heads[1])  # one head for two targets of one shape
    decodes(models[1], inputs[1], expected[1], assistant=heads[0])


@pytest.mark.parametrize("name", sorted(TINY))
def test_two_threads_on_one_model(name: str, neighbors: NeighborTable) -> None:
    """Nothing of a generation is kept on the target or the head: threads do not see each other."""
    model = TINY[name]()
    relaxed = LanternConfig(neighborhood_size=5, lam=4.0) if name == "llamagen" else STRICT
    lantern_hf.attach(model, tiny_head(model), relaxed, default_on=True)

    def run(seed: int) -> Tensor:
        inputs = prompt(model, 1 + seed % 2, seed)
        return model.generate(
            **inputs,
            do_sample=True,
            max_new_tokens=8 + seed,
            neighbors=neighbors if name == "llamagen" else None,
            lantern_config=None if seed % 3 else LanternConfig.strict("chain_5"),
            generator=torch.Generator().manual_seed(seed),
        )

    expected = [run(seed) for seed in range(6)]
    start = Barrier(2)

    def together(seeds: list[int]) -> list[Tensor]:
        start.wait()
        return [run(seed) for seed in seeds]

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(together, [[0, 1, 2], [3, 4, 5]]))
    assert all(torch.equal(a, b) for a, b in zip(sum(results, []), expected, strict=True))


def test_attaching_twice_and_detaching(llama: LlamaForCausalLM) -> None:
    inputs = prompt(llama)
    expected = llama.generate(**inputs, **GREEDY)
    members = set(vars(llama))
    first, second = tiny_head(llama), tiny_head(llama, num_hidden_layers=2)
    for head in (first, second, first):
        assert lantern_hf.attach(llama, head, STRICT, default_on=True) is llama
        assert llama._lantern.assistant is head
        decodes(llama, inputs, expected)
    assert type(llama).__mro__[1:3] == (LanternMixin, LlamaForCausalLM)
    for _ in range(2):
        assert detach(llama) is llama
        assert type(llama) is LlamaForCausalLM
        assert set(vars(llama)) == members
    lantern_hf.attach(llama, second, STRICT)
    decodes(llama, inputs, expected, assistant=first)
    assert first.target is llama


def test_a_failed_attach_leaves_the_attachment(llama: LlamaForCausalLM) -> None:
    head = tiny_head(llama)
    lantern_hf.attach(llama, head, STRICT, default_on=True)
    state = llama._lantern
    with pytest.raises(ValueError, match="does not fit"):
        lantern_hf.attach(llama, tiny_head(tiny_llamagen()))
    with pytest.raises(ValueError, match="no-such-head"):
        lantern_hf.attach(llama, "./no-such-head", STRICT)
    assert llama._lantern is state


def test_a_head_outlives_its_target() -> None:
    model = tiny_chameleon()
    head = tiny_head(model)
    inputs = prompt(model)
    inputs["input_ids"][:, -1] = BEGIN_IMAGE
    lantern_hf.attach(model, head, STRICT, default_on=True)
    expected = model.generate(**inputs, **GREEDY)
    del model
    gc.collect()
    assert head.target is None
    again = tiny_chameleon()
    lantern_hf.attach(again, head, STRICT, default_on=True)
    decodes(again, inputs, expected)


def test_saving_and_loading_an_attached_model(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    lantern_hf.attach(llama, tiny_head(llama), STRICT)
    llama.save_pretrained(tmp_path / "model")
    llama._lantern.assistant.save_pretrained(tmp_path / "head")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    head = LanternDraftModel.from_pretrained(tmp_path / "head")
    inputs = prompt(llama)
    lantern_hf.attach(reloaded, head, STRICT, default_on=True)
    decodes(reloaded, inputs, llama.generate(**inputs, **GREEDY))
