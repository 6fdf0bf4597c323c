"""Tiny targets of the real classes with fixed random weights, and heads for them. No network, no download."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores, and so do the processes they start
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lantern_hf import LanternDraftModel, LlamaGenConfig, LlamaGenForConditionalGeneration, NeighborTable

NUM_CODES = 24
# transformers before 5.24 takes where an offloaded model's weights lie, "meta", for where it runs.
OFFLOAD_WARNING = pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device"
)


def tiny_llamagen(attn_implementation: str = "sdpa") -> LlamaGenForConditionalGeneration:
    """LlamaGen with 24 codes on an 8 x 8 grid behind a text prefix of 6."""
    torch.manual_seed(0)
    config = LlamaGenConfig(
        codebook_size=NUM_CODES,
        grid_size=[8, 8],
        prefix_length=6,
        prefix_rotation="identity",
        caption_dim=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,
        attn_implementation=attn_implementation,
    )
    return LlamaGenForConditionalGeneration(config).eval()


def tiny_llama(attn_implementation: str = "sdpa") -> LlamaForCausalLM:
    """A text model with 40 tokens and grouped-query attention."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation=attn_implementation,
    )
    return LlamaForCausalLM(config).eval()


def chameleon_vocabulary() -> dict[str, int]:
    """24 image tokens whose ids are not in the order of their codes, specials, and some words."""
    letters = {str(digit): chr(ord("A") + digit) for digit in range(10)}
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<racm3:break>": 3, "<eoss>": 4, "<image>": 5}
    for code in range(NUM_CODES):
        name = "IMGIMG" + "".join(letters[digit] for digit in str(code)) + "Z"
        vocabulary[name] = 8 + (code * 7) % NUM_CODES
    return vocabulary | {f"word{i}": 8 + NUM_CODES + i for i in range(16)}


def tiny_chameleon(attn_implementation: str = "sdpa") -> ChameleonForConditionalGeneration:
    """Chameleon with a VQ model of 24 codes, in the layout of Anole."""
    torch.manual_seed(2)
    config = ChameleonConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.4,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=None,
        vocabulary_map=chameleon_vocabulary(),
        vq_config={
            "embed_dim": 4,
            "num_embeddings": NUM_CODES,
            "latent_channels": 4,
            "resolution": 16,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
        attn_implementation=attn_implementation,
    )
    return ChameleonForConditionalGeneration(config).eval()


TINY = {"llamagen": tiny_llamagen, "chameleon": tiny_chameleon, "llama": tiny_llama}


def tiny_head(target: PreTrainedModel, **overrides) -> LanternDraftModel:
    """An untrained head for a tiny target; soft enough that q has mass on many tokens, and is accepted now and then."""
    torch.manual_seed(7)
    return LanternDraftModel.for_target(target, initializer_range=0.12, **overrides)


def prompt(target: PreTrainedModel, rows: int = 1, seed: int = 0, guidance: bool = False) -> dict[str, torch.Tensor]:
    """Arguments of `generate` for prompts of unequal length, padded on the left; `guidance` adds another."""
    generator = torch.Generator().manual_seed(seed)
    length = 6
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : row % 3] = 0
    if target.config.model_type == "llamagen":
        features = torch.randn(rows, length, target.config.caption_dim, generator=generator)
        inputs = {"input_ids": target.caption_ids(rows), "attention_mask": mask, "caption_embeds": features}
        negative = {"negative_prompt_ids": target.unconditional_ids(rows), "negative_prompt_attention_mask": mask}
        return inputs | (negative if guidance else {})
    low, high = (32, 48) if target.config.model_type == "chameleon" else (2, 40)
    ids = torch.randint(low, high, (rows, length), generator=generator).masked_fill(
        mask == 0, target.config.pad_token_id
    )
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"negative_prompt_ids": ids[:, -3:]} if guidance else {})


@pytest.fixture(params=sorted(TINY))
def target(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Each tiny target in turn."""
    return TINY[request.param]()


@pytest.fixture
def neighbors() -> NeighborTable:
    """Neighbours in a random codebook of 24 entries."""
    codebook = torch.randn(NUM_CODES, 4, generator=torch.Generator().manual_seed(3))
    return NeighborTable.from_codebook(codebook, 8)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny text-to-image pipeline; nothing writes to it."""
    from pipelines import tiny_pipeline  # which imports this file

    folder = tmp_path_factory.mktemp("pipe")
    tiny_pipeline().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
