"""Heads that somebody malformed, by accident or not: each refused with its reason, without taking memory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hostile
import pytest
import torch
from conftest import NUM_CODES, tiny_head, tiny_llamagen
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from lantern_hf import LanternDraftModel, NeighborTable


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound head with its table."""
    folder = tmp_path_factory.mktemp("sound")
    head = tiny_head(tiny_llamagen())
    codebook = torch.randn(NUM_CODES, 4, generator=torch.Generator().manual_seed(0))
    head.neighbors = NeighborTable.from_codebook(codebook, 4)
    head.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def outcome(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process that tried every case reports."""
    work = tmp_path_factory.mktemp("work")
    command = [sys.executable, hostile.__file__, str(sound), str(work)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def test_the_head_is_sound_without_the_change(sound: Path) -> None:
    assert LanternDraftModel.from_pretrained(sound).neighbors.k == 4


@pytest.mark.parametrize("name", hostile.CASES)
def test_is_refused_with_its_reason(name: str, outcome: dict[str, Any]) -> None:
    text = outcome["refusals"][name]
    assert text != "loaded"
    assert "\n" not in text
    assert re.search(hostile.CASES[name][1], text), text
    assert len(text) < 1500


def test_none_takes_memory(outcome: dict[str, Any]) -> None:
    """The address space was limited to 1 GB more than a sound head needs; what was really used is far less."""
    assert len(outcome["refusals"]) >= 60
    assert outcome["grown"] < 2**28


def test_keys_of_transformers_are_not_acted_on(sound: Path, tmp_path: Path) -> None:
    """Some build tables of any size or download code; a head's config has no use for them."""
    values = json.loads((sound / "config.json").read_text())
    keys = {"num_labels": 10**10, "quantization_config": {"quant_method": "awq"}, "attn_implementation": "some/kernel"}
    keys |= {
        "_attn_implementation": "some/kernel",
        "id2label": 3,
        "a_later_field": 1,
        "auto_map": {"AutoModel": "evil.Model"},
    }
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(values | keys))
    head = LanternDraftModel.from_pretrained(tmp_path)
    assert (head.config.num_labels, head.config._attn_implementation) == (2, "sdpa")
    assert not hasattr(head.config, "quantization_config")
    assert not hasattr(head.config, "a_later_field")
    assert AutoConfig.from_pretrained(tmp_path).num_labels == 2


def test_copies_of_the_targets_matrices_are_not_read(sound: Path, tmp_path: Path) -> None:
    for file in sound.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(sound / "model.safetensors")
    copies = {name: torch.full((NUM_CODES, 32), float("nan")) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(weights | copies, tmp_path / "model.safetensors", {"format": "pt"})
    head = LanternDraftModel.from_pretrained(tmp_path)
    assert head.state_dict().keys() == weights.keys()


@pytest.mark.parametrize(
    "arguments", [{"use_safetensors": False}, {"variant": "fp16"}, {"gguf_file": "a.gguf"}, {"from_tf": True}]
)
def test_other_formats_are_not_for_a_head(sound: Path, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"is not for a draft head, which is read from model\.safetensors alone"):
        LanternDraftModel.from_pretrained(sound, **arguments)
