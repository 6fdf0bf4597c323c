"""What the files of a draft head must be, checked on their headers before a byte of weights is read.

Weights and table come from somebody else. Their safetensors headers name every tensor's shape and dtype, and the
library checks that these fill the file exactly; so once the header agrees with what the config implies, loading needs
no more memory than the file has bytes. Nothing but safetensors is ever opened.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_hf._hub_results import read_json
from lantern_hf.config import LanternConfig
from lantern_hf.draft_config import LanternDraftConfig

__all__ = [
    "CONFIG_FILE",
    "INDEX_FILE",
    "MAX_CONFIG_BYTES",
    "NEIGHBORS_FILE",
    "WEIGHTS_FILE",
    "check_finite",
    "check_weights",
    "max_weight_bytes",
    "read_config",
    "shard_names",
    "weight_files",
]

CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE = "config.json", "model.safetensors", "model.safetensors.index.json"
# The neighbour table of a head lies beside its weights; a repository without it is a head without a table.
NEIGHBORS_FILE = "neighbors.safetensors"
MAX_CONFIG_BYTES = 2**20

_MAX_HEADER, _MAX_SHARDS = 2**20, 64
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_FOREIGN = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.bin", "model.pt", "model.ckpt", "model.pkl")
_DTYPES = {"F64", "F32", "F16", "BF16"}
# Published drafters carry copies of the target's two matrices, which are never read.
_IGNORED = {"embed_tokens.weight", "lm_head.weight"}


def read_config(path: Path) -> LanternDraftConfig:
    """Read and check the config of a head.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is no config of a head, or one of a head that cannot be.
    """
    values = read_json(path, MAX_CONFIG_BYTES)
    try:
        config = LanternDraftConfig.from_dict(values)
        if config.lantern_config is not None:
            LanternConfig.from_dict(config.lantern_config)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no config of a draft head: {error}") from error
    return config


def shard_names(index: Path) -> list[str]:
    """Names of the files that an index spreads the weights over.

    Raises:
        ValueError: It is no index, or names files that lie elsewhere.
    """
    weight_map = read_json(index, MAX_CONFIG_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} is no index of weights: it has no `weight_map`. Save the head again.")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not _SHARD.fullmatch(name):
            raise ValueError(
                f"{index} names the file {name[:80]!r}, where only model-00001-of-00002.safetensors and the like are "
                "allowed. Do not use this head."
            )
    if len(names) > _MAX_SHARDS:
        raise ValueError(f"{index} names {len(names)} files, at most {_MAX_SHARDS} are allowed. Save the head again.")
    return names


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a head in a folder.

    Raises:
        FileNotFoundError: There are none, or one that the index names is missing.
        ValueError: The index is unsound.
    """
    single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
    if single.is_file():
        return [single]
    if not index.is_file():
        foreign = next((name for name in _FOREIGN if (folder / name).exists()), None)
        if foreign is not None:
            raise ValueError(
                f"{folder} holds its weights as {foreign}, which can run code when it is read. A head is read from "
                f"{WEIGHTS_FILE} alone; turn it into one with `lantern-hf convert`."
            )
        raise FileNotFoundError(f"{folder} holds no {WEIGHTS_FILE}, so it is no draft head. Check the name.")
    files = [folder / name for name in shard_names(index)]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {file.name}, which is missing. Copy or download the head again.")
    return files


def check_weights(files: list[Path], expected: Mapping[str, torch.Size], max_bytes: int) -> None:
    """Compare the headers of weight files with what a config implies; no weight is read.

    Args:
        files: Weight files.
        expected: Shape of every parameter.
        max_bytes: Largest size of a file.

    Raises:
        ValueError: A file is no safetensors file or too large, or a tensor is missing, unknown, twice there, or of
            another shape or dtype.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        if file.stat().st_size > max_bytes:
            raise ValueError(
                f"{file} has {file.stat().st_size:,} bytes, where the config implies at most {max_bytes:,}. It was not "
                "loaded."
            )
        header = _header(file)
        if twice := sorted(found.keys() & header.keys()):
            raise ValueError(f"{file} holds {twice[0]!r} for the second time. Save the head again.")
        found |= header
    where = files[0] if len(files) == 1 else files[0].parent
    wrong = {
        "missing_keys": sorted(expected.keys() - found.keys()),
        "unexpected_keys": sorted(found.keys() - expected.keys() - _IGNORED),
        "mismatched_keys": [
            f"{name} {list(found[name][1])}, the config implies {list(shape)}"
            for name, shape in sorted(expected.items())
            if name in found and found[name][1] != tuple(shape)
        ],
        "dtypes": [f"{name} {dtype}" for name, (dtype, _) in sorted(found.items()) if dtype not in _DTYPES],
    }
    if problems := {kind: _few(names) for kind, names in wrong.items() if names}:
        raise ValueError(
            f"The weights of this draft head do not fit its config: {problems}. "
            f"The files are incomplete or of another format ({where}); save the head again with `save_pretrained`."
        )


def max_weight_bytes(config: LanternDraftConfig, expected: Mapping[str, torch.Size]) -> int:
    """Largest size that the weights of a head can have reason to have, in bytes.

    Args:
        config: Its config.
        expected: Shape of every parameter.
    """
    own = sum(math.prod(shape) for shape in expected.values())
    copies = 2 * (config.target_vocab_size or 2**18) * max(config.hidden_size, config.target_hidden_size)
    return 8 * (own + copies) + _MAX_HEADER


def check_finite(name: object, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that are not all numbers.

    Raises:
        ValueError: One holds NaN or infinity.
    """
    for key, tensor in tensors.items():
        if tensor.device.type != "meta" and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{key} of {name} holds NaN or infinity. The training diverged or the file is damaged.")


def _header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor of a safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as raw:
        start = raw.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else size + 1
    if length > size:
        raise ValueError(f"{path} is not a safetensors file, or is cut off. Copy or download it again.")
    if length > _MAX_HEADER:
        raise ValueError(
            f"{path} has a header of {length:,} bytes, where at most {_MAX_HEADER:,} make sense. It was not loaded."
        )
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            parts: dict[str, Any] = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is not a safetensors file, or is damaged: {error}. Copy or download it again."
        ) from error


def _few(names: list[str]) -> list[str]:
    """The first names of a list, for a message."""
    short = [name[:120] for name in names[:5]]
    return short if len(names) <= 5 else [*short, f"and {len(names) - 5} more"]
