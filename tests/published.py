"""Tiny checkpoints in every published layout, made from the recorded weights by renaming and fusing."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

GOLDEN = Path(__file__).parent / "golden"
_INNER = {
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def golden(name: str) -> dict[str, Tensor]:
    """Recorded weights or inputs."""
    return load_file(GOLDEN / f"{name}.safetensors")


def golden_config(name: str) -> dict[str, Any]:
    """Recorded `config.json`."""
    return json.loads((GOLDEN / f"{name}_config.json").read_text())


def class_conditional(weights: Mapping[str, Tensor], classes: int = 5) -> dict[str, Tensor]:
    """The target with a class table in place of its text prefix."""
    kept = {key: value for key, value in weights.items() if "cls_embedding" not in key}
    width = weights["lm_head.weight"].shape[1]
    table = torch.randn(classes + 1, width, generator=torch.Generator().manual_seed(2))
    return kept | {"model.cls_embedding.embedding_table.weight": table}


def foundation(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hub-style LlamaGen weights under FoundationVision's names, query, key and value fused."""
    fused = {}
    for key, value in weights.items():
        if key.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if key.endswith("q_proj.weight"):
            parts = [weights[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            key, value = key.replace("self_attn.q_proj", "attention.wqkv"), torch.cat(parts)
        for ours, theirs in _INNER.items():
            key = key.replace(ours, theirs)
        fused[key.removeprefix("model.")] = value
    return fused


def training_file(path: Path, weights: Mapping[str, Tensor], wrapper: str | None = "model") -> Path:
    """A `.pt` as LlamaGen's training leaves it, or the bare state dict of its FSDP training."""
    leftovers = {"optimizer": {"state": {0: torch.zeros(3)}}, "steps": 7, "args": Namespace(lr=1e-4, name="XL")}
    torch.save(dict(weights) if wrapper is None else {wrapper: dict(weights), **leftovers}, path)
    return path


def folder(path: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any] | None, form: str) -> Path:
    """A Hub folder: `safetensors`, `bin`, or either in three `sharded` files with an index."""
    path.mkdir()
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    suffix, stem = ("bin", "pytorch_model") if "bin" in form else ("safetensors", "model")
    if "sharded" not in form:
        _save(dict(weights), path / f"{stem}.{suffix}")
        return path
    keys, where = list(weights), {}
    for number in range(3):
        name = f"{stem}-{number + 1:05d}-of-00003.{suffix}"
        shard = {key: weights[key] for key in keys[number::3]}
        _save(shard, path / name)
        where |= dict.fromkeys(shard, name)
    (path / f"{stem}.{suffix}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path


def _save(weights: dict[str, Tensor], path: Path) -> None:
    """Write one weight file."""
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
