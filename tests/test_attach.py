"""Attached models: their own `generate` with two more arguments, and nothing else changed."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OFFLOAD_WARNING, TINY, prompt, tiny_chameleon, tiny_head, tiny_llama, tiny_llamagen
from helpers import BEGIN_IMAGE
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

import lantern_hf
from lantern_hf import LanternConfig, NeighborTable, check_tree_support, detach
from lantern_hf.attach import LanternMixin

STRICT = LanternConfig.strict()
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def llama() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.mark.parametrize("name", sorted(TINY))
def test_generate_takes_the_new_arguments(name: str) -> None:
    model = TINY[name]()
    inputs = prompt(model, 2)
    expected = model.generate(**inputs, **GREEDY)
    assert lantern_hf.attach(model) is model
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    output = model.generate(
        **inputs, assistant=tiny_head(model), lantern_config=STRICT, return_dict_in_generate=True, **GREEDY
    )
    assert torch.equal(output.sequences, expected)
    assert output.stats.passes > 0


def test_detach_gives_everything_back(llama: LlamaForCausalLM) -> None:
    before = dict(llama.__dict__)
    lantern_hf.attach(llama, tiny_head(llama), STRICT)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert isinstance(llama, LanternMixin)
    assert detach(llama) is llama
    assert type(llama) is LlamaForCausalLM
    assert llama.__dict__.keys() == before.keys()
    assert detach(llama) is llama
    with pytest.raises(ValueError, match="'lantern_config'"):  # transformers knows no such argument
        llama.generate(torch.tensor([[1, 2]]), lantern_config=STRICT, max_new_tokens=1)


def test_defaults_of_the_attachment(llama: LlamaForCausalLM) -> None:
    head, inputs, rounds = tiny_head(llama), prompt(llama), []
    expected = llama.generate(**inputs, **GREEDY)
    lantern_hf.attach(llama, head, {"tree": "chain_5", "neighborhood_size": 0})
    llama.generate(**inputs, **GREEDY)  # asks for nothing: stock
    output = llama.generate(
        **inputs, assistant=head, on_round=lambda s: rounds.append(s.tree), return_dict_in_generate=True, **GREEDY
    )
    assert {repr(tree) for tree in rounds} == {repr(lantern_hf.TREES["chain_5"])}
    assert torch.equal(output.sequences, expected)
    other = llama.generate(**inputs, lantern_config=LanternConfig.strict([[0]]), return_dict_in_generate=True, **GREEDY)
    assert len(other.stats.accepted_lengths) == 2  # a tree of depth 1
    lantern_hf.attach(llama, head, STRICT, default_on=True)  # a second time
    assert len(type(llama).__mro__) == len(LlamaForCausalLM.__mro__) + 2
    assert hasattr(llama.generate(**inputs, return_dict_in_generate=True, **GREEDY), "stats")


def test_neighbors_and_generators_reach_the_loop(neighbors: NeighborTable) -> None:
    model = tiny_llamagen()
    lantern_hf.attach(model, tiny_head(model), LanternConfig(neighborhood_size=5, lam=4.0), neighbors=neighbors)

    def run(seed: int) -> Any:
        return model.generate(
            **prompt(model, 2),
            do_sample=True,
            max_new_tokens=20,
            return_dict_in_generate=True,
            lantern_config=LanternConfig(neighborhood_size=5, lam=4.0),
            generator=torch.Generator().manual_seed(seed),
        )

    first = run(0)
    assert sum(first.stats.relaxed_tv) > 0
    assert torch.equal(first.sequences, run(0).sequences)
    assert not torch.equal(first.sequences, run(1).sequences)


def test_the_codebook_of_the_target_gives_a_table() -> None:
    model = tiny_chameleon()
    inputs = prompt(model, 2)
    inputs["input_ids"][:, -1] = BEGIN_IMAGE
    lantern_hf.attach(model, tiny_head(model))
    for size in (3, 9):  # a larger one later is no error
        output = model.generate(
            **inputs,
            lantern_config=LanternConfig(neighborhood_size=size, lam=8.0),
            do_sample=True,
            max_new_tokens=16,
            generator=torch.Generator().manual_seed(0),
            return_dict_in_generate=True,
        )
        assert sum(output.stats.relaxed_tv) > 0
    assert model._lantern.assistant.neighbors is None  # the head would save it


def test_streamers_are_passed_on(llama: LlamaForCausalLM) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.calls.append(value.tolist())

        def end(self) -> None:
            self.calls.append("end")

    plain, attached, stock = Streamer(), Streamer(), Streamer()
    inputs = prompt(llama)
    llama.generate(**inputs, streamer=plain, **GREEDY)
    lantern_hf.attach(llama, tiny_head(llama))
    llama.generate(**inputs, streamer=attached, lantern_config=STRICT, **GREEDY)
    llama.generate(**inputs, streamer=stock, **GREEDY)
    assert plain.calls == attached.calls == stock.calls


def test_heads_by_folder(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    tiny_head(llama).save_pretrained(tmp_path / "head")
    inputs = prompt(llama)
    expected = llama.generate(**inputs, **GREEDY)
    lantern_hf.attach(llama)
    for _ in range(2):
        tokens = llama.generate(**inputs, assistant=str(tmp_path / "head"), lantern_config=STRICT, **GREEDY)
        assert torch.equal(tokens, expected)
    assert len(llama._lantern.loaded) == 1
    lantern_hf.attach(llama, str(tmp_path / "head"), STRICT, default_on=True)
    assert torch.equal(llama.generate(**inputs, **GREEDY), expected)
    tokens = tiny_llama().generate(
        **inputs,
        custom_generate=lantern_hf.lantern_generate,
        assistant=str(tmp_path / "head"),
        lantern_config={"neighborhood_size": 0},
        **GREEDY,
    )
    assert torch.equal(tokens, expected)


def test_copies_and_pickles(llama: LlamaForCausalLM) -> None:
    inputs = prompt(llama)
    expected = llama.generate(**inputs, **GREEDY)
    lantern_hf.attach(llama, tiny_head(llama), STRICT, default_on=True)
    for copied in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        assert isinstance(copied, LanternMixin)
        assert type(copied) is type(llama)
        output = copied.generate(**inputs, return_dict_in_generate=True, **GREEDY)
        assert torch.equal(output.sequences, expected)
        assert output.stats.passes > 0
    copied = copy.deepcopy(llama)
    torch.nn.init.zeros_(llama.lm_head.weight)  # the copy must not run the original
    assert torch.equal(copied.generate(**inputs, **GREEDY), expected)


def test_saving_writes_the_plain_model(llama: LlamaForCausalLM, tmp_path: Path) -> None:
    lantern_hf.attach(llama, tiny_head(llama), STRICT)
    llama.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(reloaded) is LlamaForCausalLM
    assert reloaded.state_dict().keys() == llama.state_dict().keys()


def text_pipeline(model: LlamaForCausalLM) -> Any:
    """A text-generation pipeline with a word tokenizer made here."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = {"<pad>": 0, "<s>": 1, **{f"w{i}": i for i in range(2, 40)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>")
    return pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


def test_pipelines_pass_the_arguments_on(llama: LlamaForCausalLM) -> None:
    head = tiny_head(llama)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own defaults
        expected = text_pipeline(llama)("w5 w6 w7", **GREEDY)
        lantern_hf.attach(llama, head)
        rounds: list[Any] = []
        pipe = text_pipeline(llama)
        assert pipe("w5 w6 w7", assistant=head, lantern_config=STRICT, on_round=rounds.append, **GREEDY) == expected
        assert rounds
        lantern_hf.attach(llama, head, STRICT, default_on=True)
        assert pipe("w5 w6 w7", **GREEDY) == expected


@OFFLOAD_WARNING
def test_offloaded_targets(llama: LlamaForCausalLM) -> None:
    from accelerate import cpu_offload

    inputs = prompt(llama, 2)
    expected = llama.generate(**inputs, **GREEDY)
    cpu_offload(llama, execution_device=torch.device("cpu"))
    assert llama.lm_head.weight.device.type == "meta"
    lantern_hf.attach(llama)
    head = tiny_head(llama)
    assert head.device.type == "cpu"
    for cache in (None, "static"):
        kwargs = {} if cache is None else {"cache_implementation": cache}
        assert torch.equal(
            llama.generate(**inputs, assistant=head, lantern_config=STRICT, **kwargs, **GREEDY), expected
        )


def test_dispatched_targets(llama: LlamaForCausalLM) -> None:
    from accelerate import dispatch_model

    inputs = prompt(llama, 2)
    expected = llama.generate(**inputs, **GREEDY)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    dispatch_model(llama, places, main_device="cpu", force_hooks=True)
    lantern_hf.attach(llama, tiny_head(llama), STRICT, default_on=True)
    assert torch.equal(llama.generate(**inputs, **GREEDY), expected)


@OFFLOAD_WARNING
def test_offloaded_image_targets() -> None:
    from accelerate import cpu_offload

    model = tiny_chameleon()
    inputs = prompt(model, 2)
    inputs["input_ids"][:, -1] = BEGIN_IMAGE
    lantern_hf.attach(model, tiny_head(model), STRICT, default_on=True)
    expected = model.generate(**inputs, **GREEDY)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)
    relaxed = model.generate(**inputs, lantern_config=LanternConfig(), **GREEDY)  # with a table over its codebook
    assert relaxed.shape == expected.shape


# ---- what is refused ----


class DeafModel(LlamaForCausalLM):
    """A model whose attention takes 4-D masks and ignores them."""

    def __init__(self, config: Any):
        super().__init__(config)
        inner = self.model.forward

        def forward(*args: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            if attention_mask is not None and attention_mask.ndim == 4:
                attention_mask = torch.ones_like(attention_mask, dtype=torch.bool)
            return inner(*args, attention_mask=attention_mask, **kwargs)

        self.model.forward = forward


def test_a_model_that_ignores_tree_masks_is_refused(llama: LlamaForCausalLM) -> None:
    torch.manual_seed(0)
    deaf = DeafModel(llama.config).eval()
    with pytest.raises(ValueError, match="does not score a tree as it scores sequences: hidden states differ by"):
        lantern_hf.attach(deaf)
    assert type(deaf) is DeafModel
    with pytest.raises(ValueError, match="allowed is 0.001"):
        check_tree_support(deaf)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", sorted(TINY))
def test_sound_models_pass_the_probe(name: str, attention: str) -> None:
    model: PreTrainedModel = TINY[name](attention)
    check_tree_support(model, tolerance=1e-4)
    check_tree_support(model.to(torch.bfloat16))


def test_a_replaced_generate_is_refused(llama: LlamaForCausalLM) -> None:
    llama.generate = lambda *args, **kwargs: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="was replaced on the instance"):
        lantern_hf.attach(llama)


def test_contradictions_are_refused(llama: LlamaForCausalLM) -> None:
    inputs = prompt(llama)
    with pytest.raises(ValueError, match="`default_on=True` needs `assistant`"):
        lantern_hf.attach(llama, default_on=True)
    lantern_hf.attach(llama)
    with pytest.raises(ValueError, match="no draft head is attached"):
        llama.generate(**inputs, lantern_config=STRICT, **GREEDY)
    with pytest.raises(ValueError, match="`generator` belongs to LANTERN decoding"):
        llama.generate(**inputs, generator=torch.Generator(), **GREEDY)
    with pytest.raises(ValueError, match="exclude each other"):
        llama.generate(**inputs, custom_generate=lantern_hf.lantern_generate, assistant=tiny_head(llama), **GREEDY)
    with pytest.raises(ValueError, match="`lantern_config` must be"):
        llama.generate(**inputs, assistant=tiny_head(llama), lantern_config="strict", **GREEDY)


def test_parts_that_do_not_fit_are_refused_at_attach(llama: LlamaForCausalLM, neighbors: NeighborTable) -> None:
    llamagen, chameleon = tiny_llamagen(), tiny_chameleon()
    with pytest.raises(ValueError, match="does not fit"):
        lantern_hf.attach(llama, tiny_head(llamagen))
    with pytest.raises(ValueError, match="is a text model without one"):
        lantern_hf.attach(llama, tiny_head(llama), LanternConfig())
    other = NeighborTable.from_codebook(torch.randn(30, 4), 10)
    for model in (llamagen, chameleon):
        with pytest.raises(ValueError, match=r"codebook of 30 entries, the target has\s24"):
            lantern_hf.attach(model, neighbors=other)
    with pytest.raises(ValueError, match="built from another codebook"):  # of the same size
        lantern_hf.attach(chameleon, neighbors=neighbors)
    codebook = chameleon.model.vqmodel.quantize.embedding.weight.detach()
    lantern_hf.attach(chameleon, neighbors=NeighborTable.from_codebook(codebook, 4))
    assert not isinstance(llama, LanternMixin)
    assert not isinstance(llamagen, LanternMixin)


def test_relaxed_text_is_refused_at_generate(llama: LlamaForCausalLM) -> None:
    lantern_hf.attach(llama, tiny_head(llama))
    with pytest.raises(ValueError, match="is a text model without one"):
        llama.generate(**prompt(llama), lantern_config=LanternConfig(), **GREEDY)


def test_relaxed_without_a_table_is_refused() -> None:
    model = tiny_llamagen()
    lantern_hf.attach(model, tiny_head(model))
    with pytest.raises(ValueError, match="needs a neighbor table, and neither the head nor the target"):
        model.generate(**prompt(model), lantern_config=LanternConfig(), **GREEDY)
