"""The draft head: golden heads, tree passes with a cache, saving, binding to a target."""

import copy
import gc
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from lantern_hf._checkpointing import set_checkpointing
from lantern_hf.draft import POSITION_OFFSET, LanternDraftConfig, LanternDraftModel

GOLDEN = Path(__file__).parent / "golden"
# node 0 is the root; two branches of depth 2 and one of depth 1
PARENTS = [-1, 0, 0, 0, 1, 2, 4]
PATHS = [[0, 1, 4, 6], [0, 2, 5], [0, 3]]
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "initializer_range": 0.3}
VARIANTS = {
    "llamagen": {"rope_type": "2d", "grid": [4, 4], "prefix_length": 3},
    "llamagen_identity": {"rope_type": "2d", "grid": [4, 4], "prefix_length": 3, "prefix_rotation": "identity"},
    "chameleon": {"qk_norm": True, "input_layernorm": True},
    "llama_gqa": {"num_key_value_heads": 2, "num_hidden_layers": 2},
}


def golden(name, **fields):
    """The published head and its embedding, from the recorded weights and config."""
    published = json.loads((GOLDEN / f"{name}_config.json").read_text())
    known = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    weights = load_file(GOLDEN / f"{name}.safetensors")
    embedding = weights.pop("embed_tokens.weight")
    head = LanternDraftModel(LanternDraftConfig(**{key: published[key] for key in known}, **fields)).eval()
    head.load_state_dict(weights)
    return head, embedding, load_file(GOLDEN / f"{name}_io.safetensors")


def small_head(variant="llamagen", implementation="sdpa", **fields):
    torch.manual_seed(0)
    config = LanternDraftConfig(**(SIZES | VARIANTS[variant] | fields), attn_implementation=implementation)
    head = LanternDraftModel(config).eval()
    for parameter in head.parameters():  # norms and biases too
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def inputs(length, batch=2, hidden_size=32):
    torch.manual_seed(1)
    return torch.randn(batch, length, hidden_size), torch.randn(batch, length, hidden_size)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        )
    ).eval()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_equals_the_published_llamagen_head(implementation):
    head, embedding, io = golden(
        "llamagen_drafter", rope_type="2d", grid=[16, 16], prefix_length=120, attn_implementation=implementation
    )
    ids = io["input_ids"].long()
    positions = torch.arange(ids.shape[1]).expand_as(ids) + POSITION_OFFSET
    with torch.no_grad():
        output = head(embedding[ids], io["hidden_states"], positions).last_hidden_state
    torch.testing.assert_close(output, io["output"], atol=1e-4, rtol=0)
    assert (output - io["output"]).abs().max() < 1e-5  # a shift by one position already moves it by 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("offset", [0, POSITION_OFFSET])
def test_equals_the_published_anole_head(implementation, offset):
    head, embedding, io = golden(
        "anole_drafter", qk_norm=True, input_layernorm=True, attn_implementation=implementation
    )
    mask = io["attention_mask"].bool()
    positions = io["position_ids"].long() + offset  # one-dimensional positions are relative
    with torch.no_grad():
        output = head(embedding[io["input_ids"].long()], io["hidden_states"], positions, mask).last_hidden_state
    assert (output - io["output"])[mask].abs().max() < 1e-4
    assert not output.isnan().any()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_pass_equals_path_passes(variant, kind, implementation):
    head, prefix = small_head(variant, implementation), 9
    tokens, hidden = inputs(prefix + len(PARENTS))
    tree = torch.eye(len(PARENTS), dtype=torch.bool)
    depths = torch.zeros(len(PARENTS), dtype=torch.long)
    for node, parent in enumerate(PARENTS[1:], start=1):
        tree[node] |= tree[parent]
        depths[node] = depths[parent] + 1
    mask = torch.cat([torch.ones(len(PARENTS), prefix, dtype=torch.bool), tree], dim=1).expand(2, 1, -1, -1)
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    before = (torch.arange(prefix) + POSITION_OFFSET).expand(2, -1)
    cache = DynamicCache()
    with torch.no_grad():
        head(tokens[:, :prefix], hidden[:, :prefix], before, cache=cache)
        nodes = head(tokens[:, prefix:], hidden[:, prefix:], (before[:, -1:] + 1 + depths), mask, cache=cache)
        assert cache.get_seq_length() == prefix + len(PARENTS)
        for path in PATHS:
            rows = list(range(prefix)) + [prefix + node for node in path]
            positions = (torch.arange(len(rows)) + POSITION_OFFSET).expand(2, -1)
            alone = head(tokens[:, rows], hidden[:, rows], positions).last_hidden_state
            torch.testing.assert_close(nodes.last_hidden_state[:, path], alone[:, prefix:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_level_by_level_equals_one_pass(variant):
    head = small_head(variant)
    tokens, hidden = inputs(8)
    positions = (torch.arange(8) + POSITION_OFFSET).expand(2, -1)
    cache = DynamicCache()
    with torch.no_grad():
        whole = head(tokens, hidden, positions).last_hidden_state
        parts = [
            head(tokens[:, part], hidden[:, part], positions[:, part], cache=cache).last_hidden_state
            for part in (slice(0, 4), slice(4, 7), slice(7, 8))
        ]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_left_padding_changes_nothing(implementation, dtype):
    head = small_head("llama_gqa", implementation).to(dtype)
    tokens, hidden = inputs(6, batch=1)
    pad = torch.full((1, 2, 32), 7.0)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.arange(6)[None]
    causal = (torch.ones(8, 8).tril().bool() & mask.bool())[None, None]
    lowest = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
    padded = torch.cat([pad, tokens], 1), torch.cat([pad, hidden], 1), torch.tensor([[0, 0, 0, 1, 2, 3, 4, 5]])
    with torch.no_grad():
        alone = head(tokens, hidden, positions).last_hidden_state
        for given in (mask, causal, lowest):
            output = head(*padded, given).last_hidden_state
            assert not output.isnan().any()
            atol = 1e-5 if dtype == torch.float32 else 0.1
            torch.testing.assert_close(output[:, 2:], alone, atol=atol, rtol=0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_runs_in_bfloat16(variant, implementation):
    head = small_head(variant, implementation)
    tokens, hidden = inputs(6)
    positions = (torch.arange(6) + POSITION_OFFSET).expand(2, -1)
    with torch.no_grad():
        exact = head(tokens, hidden, positions).last_hidden_state
        output = head.to(torch.bfloat16)(tokens, hidden, positions).last_hidden_state  # float32 inputs are cast
    assert output.dtype == torch.bfloat16
    assert (output.float() - exact).norm() < 0.05 * exact.norm()


def test_runs_past_the_end_of_the_image():
    head = small_head("llamagen")
    tokens, hidden = inputs(3)
    last = 3 + 16 - 1
    beyond = torch.tensor([[last, last + 1, last + 5]]).expand(2, -1)
    with torch.no_grad():
        output = head(tokens, hidden, beyond).last_hidden_state
        clamped = head(tokens, hidden, beyond.clamp(max=last)).last_hidden_state
    assert torch.equal(output, clamped)


def test_trains_after_inference_mode():
    head = small_head("llamagen")
    tokens, hidden = inputs(6)
    positions = (torch.arange(6) + POSITION_OFFSET).expand(2, -1)
    with torch.inference_mode():
        head(tokens, hidden, positions)
    set_checkpointing(head, True)
    head.train()(tokens, hidden, positions).last_hidden_state.square().mean().backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


@pytest.mark.parametrize("variant", VARIANTS)
def test_saves_and_loads_bit_for_bit(variant, tmp_path):
    head = small_head(variant, lantern_config={"neighborhood_size": 10, "lam": 2.0})
    head.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert isinstance(again, LanternDraftModel)
    assert again.config.to_diff_dict() | {"architectures": None} == head.config.to_diff_dict() | {"architectures": None}
    assert again.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, head.state_dict()[key]) for key, value in again.state_dict().items())
    tokens, hidden = inputs(6)
    positions = (torch.arange(6) + POSITION_OFFSET).expand(2, -1)
    with torch.no_grad():
        expected = head(tokens, hidden, positions).last_hidden_state
        assert torch.equal(again(tokens, hidden, positions).last_hidden_state, expected)
    assert AutoConfig.from_pretrained(tmp_path).lantern_config == {"neighborhood_size": 10, "lam": 2.0}


def test_loads_in_the_asked_dtype_and_implementation(tmp_path):
    small_head().save_pretrained(tmp_path)
    head = LanternDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert head.dtype == torch.bfloat16
    assert head.config._attn_implementation == "eager"


def test_refuses_incomplete_weights(tmp_path):
    small_head().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    LanternDraftModel.from_pretrained(tmp_path)  # published drafters carry the target's embedding
    save_file(weights | {"extra": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"unexpected_keys.*extra"):
        LanternDraftModel.from_pretrained(tmp_path)
    del weights["fc.bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing_keys.*fc\.bias"):
        AutoModel.from_pretrained(tmp_path)


def test_for_target_drafts_for_it(llama):
    head = LanternDraftModel.for_target(llama.to(torch.bfloat16))
    assert head.target is llama
    assert head.dtype == torch.bfloat16
    assert head.config.rope_theta == 500.0
    assert head.config.num_key_value_heads == 2
    assert head.config.target_model_type == "llama"
    ids = torch.arange(6)[None]
    with torch.no_grad():
        hidden = llama.model(ids).last_hidden_state
        output = head(llama.get_input_embeddings()(ids[:, 1:]), hidden[:, :-1], torch.arange(1, 6)[None])
        assert llama.lm_head(output.last_hidden_state).shape == (1, 5, 40)


def test_for_target_takes_overrides(llama):
    head = LanternDraftModel.for_target(llama, num_hidden_layers=2, dtype=torch.float64, attn_implementation="eager")
    assert len(head.layers) == 2
    assert head.dtype == torch.float64
    assert head.config._attn_implementation == "eager"
    with pytest.raises(TypeError, match=r"\['hiden_size'\] are no fields"):
        LanternDraftModel.for_target(llama, hiden_size=3)


def test_for_target_follows_an_offloaded_layer(llama):
    llama.model.layers[-1].to("meta")
    hook = type("Hook", (), {"execution_device": "cpu"})()
    llama.model.layers[-1].mlp._hf_hook = hook
    assert LanternDraftModel.for_target(llama).device == torch.device("cpu")


def test_for_target_chameleon():
    vq = {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1, "embed_dim": 8, "latent_channels": 8}
    config = ChameleonConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vq_config=vq | {"num_embeddings": 16},
        vocabulary_map={"<image>": 5, "IMGIMGAZ": 6},
    )
    target = ChameleonForConditionalGeneration(config)
    head = LanternDraftModel.for_target(target)
    assert head.target is target
    assert head.layers[0].self_attn.q_norm.weight.shape == (4, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64, "target_hidden_size": 64}, "`target_hidden_size` 64, the target has 32"),
        ({"target_vocab_size": 41}, "`target_vocab_size` 41, the target has 40"),
        ({"target_model_type": "chameleon"}, "`target_model_type` chameleon, the target has llama"),
        ({"codebook_size": 16}, "`codebook_size` 16, the target has None"),
        ({"grid": [4, 4]}, r"`grid` \[4, 4\], the target has None"),
        ({"prefix_length": 120}, "`prefix_length` 120, the target has None"),
    ],
)
def test_refuses_another_target(llama, fields, message):
    head = small_head("llama_gqa", **fields)
    with pytest.raises(ValueError, match=f"{message}.*train one with lantern_hf.training"):
        head.bind(llama)
    assert head.target is None


def test_binding_is_weak(llama, tmp_path):
    head = LanternDraftModel.for_target(llama)
    names = {name.split(".")[0] for name in head.state_dict()}
    assert names == {"fc", "layers"}
    head.to(torch.float64)
    assert llama.dtype == torch.float32
    twin = copy.deepcopy(head)
    assert twin.target is llama
    assert twin.fc.weight is not head.fc.weight
    assert pickle.loads(pickle.dumps(head)).target is None
    other = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=40, num_hidden_layers=1))
    lonely = LanternDraftModel.for_target(other)
    del other
    gc.collect()
    assert lonely.target is None


def test_input_errors():
    with pytest.raises(ValueError, match="`prefix_rotation` must be one of"):
        LanternDraftModel(LanternDraftConfig(**SIZES, **VARIANTS["llamagen"], prefix_rotation="ones"))
    head = small_head()
    tokens, hidden = inputs(3)
    positions = torch.arange(3).expand(2, -1)
    with pytest.raises(ValueError, match=r"must end in 32 and 32, got \(2, 3, 16\) and \(2, 3, 32\)"):
        head(tokens[..., :16], hidden, positions)
    with pytest.raises(TypeError, match=r"must be bool or float, got torch\.int64"):
        head(tokens, hidden, positions, torch.ones(2, 1, 3, 3, dtype=torch.long))
