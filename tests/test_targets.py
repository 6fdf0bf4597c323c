"""Adapters: which family serves a model, image tokens and codes, tree passes equal to plain ones, attention masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import NUM_CODES, TINY, tiny_chameleon, tiny_llama, tiny_llamagen
from helpers import BEGIN_IMAGE, CASES, make_case
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    ImageGPTConfig,
    ImageGPTForCausalImageModeling,
    ImageGPTModel,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lantern_hf import TREES, attach
from lantern_hf.cache import RaggedCache
from lantern_hf.targets import adapter_class, adapter_for, check_target, registry, unregister_target
from lantern_hf.targets.attention import attention_argument, tree_attention
from lantern_hf.targets.base import to_module
from lantern_hf.targets.causal_lm import CausalLMAdapter


@pytest.mark.parametrize(
    ("name", "family", "images"),
    [("llamagen", "llamagen", True), ("chameleon", "chameleon", True), ("llama", "causal_lm", False)],
)
def test_families(name: str, family: str, images: bool) -> None:
    adapter = adapter_class(TINY[name]())
    assert adapter.family == family
    assert adapter.has_codebook == images
    assert adapter_for(TINY[name]()).codebook_size == (NUM_CODES if images else 0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_a_tree_pass_equals_plain_passes_over_its_paths(name: str, attention: str) -> None:
    case = make_case(name, 2, attention=attention)
    adapter = adapter_for(case.model, case.inputs["input_ids"])
    tree = TREES["eagle_25"]
    places = torch.randint(len(case.emitted), (2, tree.num_nodes), generator=torch.Generator().manual_seed(0))
    nodes = torch.tensor(case.emitted)[places]
    kwargs = {key: value for key, value in case.inputs.items() if key in ("attention_mask", "caption_embeds")}
    with torch.no_grad():
        cache = DynamicCache()
        prompt = adapter.prefill(case.inputs["input_ids"], cache, **kwargs)
        ragged = RaggedCache(cache, 2, torch.device("cpu"), 6, ~prompt.mask)
        mask = attention_argument(ragged.tree_mask(tree.mask), attention, torch.float32)
        hidden, layers = adapter.tree_pass(
            nodes, prompt.position_ids[:, -1:] + 1 + tree.depths, mask, cache, all_layers=True
        )
        assert torch.equal(layers[-1], hidden)
        logits = adapter.logits(hidden)
        for path in tree.paths:
            path = path[path >= 0]
            ids = torch.cat([case.inputs["input_ids"], nodes[:, path]], 1)
            whole = kwargs | {
                "attention_mask": torch.nn.functional.pad(kwargs["attention_mask"], (0, len(path)), value=1)
            }
            plain = case.plain_model(ids, position_ids=torch.arange(6 + len(path))[None], **whole).logits
            expected = plain[:, 6:]
            if name == "chameleon-image":
                expected = expected[..., adapter.columns]
            elif name == "llamagen":
                expected = expected[..., :NUM_CODES]
            assert torch.allclose(logits[:, path].clamp_min(-1e9), expected.clamp_min(-1e9), atol=1e-3)


def test_chameleon_reads_what_a_prompt_asks_for() -> None:
    model = tiny_chameleon()
    text = adapter_for(model, torch.tensor([[40, 41]]))
    image = adapter_for(model, torch.tensor([[40, BEGIN_IMAGE]]))
    assert (text.num_codes, text.columns) == (0, None)
    assert image.num_codes == NUM_CODES
    by_code = [8 + (code * 7) % NUM_CODES for code in range(NUM_CODES)]  # not by id
    assert image.columns.tolist() == [*by_code, 4, 2]  # and the ends of image and sequence
    codes = torch.arange(NUM_CODES)
    assert torch.equal(image.columns_of(image.token_ids(codes)), codes)
    assert image.columns_of(torch.tensor([[40, 3]])).tolist() == [[-1, -1]]
    assert image.codebook().shape == (NUM_CODES, 4)
    states = torch.randn(1, 32)
    blanked = text.logits(states)
    assert (blanked[:, by_code] == torch.finfo(torch.float32).min).all()
    assert (blanked[:, [4, 2]] > -1e9).all()
    assert torch.allclose(image.logits(states), model.lm_head(states)[:, image.columns], atol=1e-6)
    ids, mask = image.unconditional(torch.tensor([[40, 3], [41, 3]]), None)
    assert (ids.tolist(), mask) == ([[0, 3], [0, 3]], None)


def test_a_replaced_output_layer_is_called_as_a_module() -> None:
    model = tiny_chameleon()
    adapter = adapter_for(model, torch.tensor([[40, BEGIN_IMAGE]]))
    states = torch.randn(2, 32)
    expected = adapter.logits(states)

    class Wrapped(nn.Module):
        """Stands for a quantised or adapted layer."""

        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model.lm_head = Wrapped(model.lm_head)
    fresh = adapter_for(model, torch.tensor([[40, BEGIN_IMAGE]]))
    assert torch.allclose(fresh.logits(states), expected, atol=1e-6)


def test_unserved_models() -> None:
    with pytest.raises(ValueError, match="flattens a 4-D attention mask"):
        adapter_class(ImageGPTModel(ImageGPTConfig(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8)))
    bare = LlamaModel(tiny_llama().config)
    with pytest.raises(ValueError, match="served by no target family"):
        adapter_class(bare)
    sliding = tiny_llama()
    sliding.config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="layers of type sliding_attention"):
        check_target(sliding)
    linear = tiny_llama()
    linear.config = Qwen3NextConfig(num_hidden_layers=4)
    with pytest.raises(ValueError, match="linear_attention"):
        check_target(linear)


def test_attach_refuses_with_the_reason() -> None:
    state = MambaForCausalLM(MambaConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="MambaForCausalLM keeps a recurrent state, as linear attention does"):
        attach(state)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        attach(T5ForConditionalGeneration(T5Config(vocab_size=20, **sizes)))
    image = ImageGPTForCausalImageModeling(ImageGPTConfig(n_embd=8, n_layer=1, n_head=2, vocab_size=9, n_positions=8))
    with pytest.raises(ValueError, match="flattens a 4-D attention mask"):
        attach(image)


MISFITS = {
    "imagegpt": "its forward flattens a 4-D attention mask",
    "apertus1p5": "it reads images but makes none: its vision tokenizer has no decoder",
}


@pytest.mark.parametrize("model_type", [name for name in MISFITS if name in CONFIG_MAPPING])  # some are newer
def test_known_misfits_are_refused_with_the_reason(model_type: str) -> None:
    model = tiny_llama()
    model.config = CONFIG_MAPPING[model_type]()
    with pytest.raises(ValueError, match=MISFITS[model_type]):
        attach(model)


class Entry:
    """An entry point of an installed package."""

    def __init__(self, value: str, thing: Any):
        self.name, self.value, self._thing = "mine", value, thing

    def load(self) -> Any:
        if isinstance(self._thing, Exception):
            raise self._thing
        return self._thing


def test_installed_packages_bring_families(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    class Brought(CausalLMAdapter):
        """From elsewhere."""

        family = "brought"

    entries = [Entry("broken:Adapter", ImportError("no module named broken")), Entry("mine:Brought", Brought)]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == "lantern_hf.targets" else [])
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry.logger, "propagate", True)
    with caplog.at_level("WARNING"):
        assert adapter_class(tiny_llama()) is Brought
    assert "'mine' (broken:Adapter) of an installed package was left out: ImportError" in caplog.text
    unregister_target(Brought)
    assert adapter_class(tiny_llama()) is CausalLMAdapter  # what was loaded once is not loaded again


def test_masks_take_the_form_of_each_attention() -> None:
    mask = torch.tensor([[[[True, False], [True, True]]]])
    assert attention_argument(mask, "sdpa", torch.float16) is mask
    eager = attention_argument(mask, "eager", torch.float16)
    assert eager.dtype == torch.float16
    assert eager.tolist() == [[[[0.0, torch.finfo(torch.float16).min], [0.0, 0.0]]]]
    assert attention_argument(None, "flash_attention_2", torch.float16) is None
    with pytest.raises(ValueError, match="takes no tree mask"):
        attention_argument(mask, "flash_attention_2", torch.float16)


def test_flash_attention_gives_way_to_sdpa_and_comes_back() -> None:
    model = tiny_llama()
    model.config._attn_implementation = "flash_attention_2"
    model.set_attn_implementation = lambda name: setattr(model.config, "_attn_implementation", name)
    seen = []

    def fail() -> None:
        with tree_attention(model) as attention:
            seen.extend([attention, model.config._attn_implementation])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert seen == ["sdpa", "sdpa"]
    assert model.config._attn_implementation == "flash_attention_2"
    with tree_attention(tiny_llama("eager")) as attention:
        assert attention == "eager"


def test_inputs_follow_weights() -> None:
    x = torch.zeros(1)
    assert to_module(nn.Linear(1, 1), x) is x
    assert to_module(nn.Linear(1, 1, device="meta"), x) is x
    assert to_module(nn.Identity(), x) is x


def test_llamagen_keeps_its_codebook_elsewhere() -> None:
    adapter = adapter_for(tiny_llamagen())
    assert adapter.codebook() is None
    assert adapter.columns is None
    assert adapter.vocab_size > adapter.num_codes == NUM_CODES
