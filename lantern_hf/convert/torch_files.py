"""Tensors of a file that `torch.save` wrote, without running what it may hold and without copying what it claims.

A `.bin`, `.pt`, `.pth` or `.ckpt` file is a zip archive around a pickle. Before torch sees it, the archive's directory
and the pickle's instructions are read: anything but plain tensors in plain containers is refused, by name. torch then
reads it with `weights_only=True` and maps it into memory, so that a tensor costs nothing until its rows are read. This
file knows no model.
"""

from __future__ import annotations

import argparse
import pickle
import pickletools
import re
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["load_torch_file"]

# Names under which files keep their state dict; the first that is there wins.
WRAPPERS = ("model", "module", "state_dict")
# What torch.save writes for tensors in dicts, lists and tuples, and nothing else.
_OPCODES = re.compile(
    "PROTO|STOP|MARK|PUT|BINPUT|LONG_BINPUT|GET|BINGET|LONG_BINGET|BINPERSID|GLOBAL|REDUCE|NEWOBJ|BUILD|EMPTY_DICT|"
    "DICT|SETITEM|SETITEMS|EMPTY_LIST|LIST|APPEND|APPENDS|EMPTY_TUPLE|TUPLE|TUPLE1|TUPLE2|TUPLE3|BINUNICODE|"
    "SHORT_BINSTRING|BINSTRING|NONE|NEWTRUE|NEWFALSE|BININT|BININT1|BININT2|LONG1|BINFLOAT"
)
# LlamaGen's training script keeps its arguments, a plain record, beside the weights.
_GLOBALS = re.compile(
    r"collections\.OrderedDict|argparse\.Namespace|torch\._utils\._rebuild_(?:tensor_v2|parameter)|torch\.Size|"
    r"torch\.device|torch\.(?:Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|"
    r"torch\.storage\.UntypedStorage|torch\.(?:float(?:16|32|64)|bfloat16|u?int8|int(?:16|32|64)|bool)"
)
_MAX_PICKLE = 64 * 2**20  # LlamaGen-3B's is 30 kB
_FAILURES = (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, AssertionError, OSError)


def load_torch_file(path: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Map the tensors of a torch file into memory.

    Args:
        path: File that `torch.save` wrote (torch 1.6 or newer).

    Returns:
        Tensors by name, views of the file; and the names of everything else in it, which is not read.

    Raises:
        ValueError: The file is damaged, holds code, or claims more than its size.
    """
    _check_pickle(_read_pickle(path), path.name)
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except _FAILURES as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path.name} cannot be read by torch: {reason}") from error
    tensors, leftovers = _unwrap(content, path.name)
    size = path.stat().st_size
    for key, value in tensors.items():
        # A stride of 0 makes terabytes of one number, which would come true when rows are copied.
        if value.numel() * value.element_size() > size:
            raise ValueError(
                f"{path.name} is {size} bytes long, but `{key}` claims shape {tuple(value.shape)} in {value.dtype}. "
                "The file is damaged or made to do harm; download it again."
            )
    return tensors, leftovers


def _read_pickle(path: Path) -> bytes:
    """Check the archive's directory and read the pickle in it."""
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path.name} is no file of torch.save: {_describe_start(path)}")
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_entries(entries, size, path.name)
            return archive.read(next(entry for entry in entries if entry.filename.endswith("/data.pkl")))
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, struct.error) as error:
        raise ValueError(f"{path.name} is damaged: {error}. Download it again.") from error


def _describe_start(path: Path) -> str:
    """Say what a file that is no zip archive looks like."""
    with path.open("rb") as file:
        start = file.read(64)
    if not start:
        return "it is empty. Download it again."
    if start.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer. Download the real file: git lfs pull, or huggingface_hub."
    if start.startswith(b"\x80"):
        return (
            "it is a pickle of before torch 1.6. Save it again where you trust it: "
            "torch.save(torch.load(path, weights_only=True), path)."
        )
    if start.startswith(b"PK"):
        return "its end is missing. Download it again."
    return f"it starts with {start[:16]!r}. Download it again."


def _check_entries(entries: list[zipfile.ZipInfo], size: int, name: str) -> None:
    """Refuse archives that torch.save does not write."""
    names = [entry.filename for entry in entries]
    if any(entry.endswith("/constants.pkl") for entry in names):
        raise ValueError(f"{name} is a TorchScript program, not a state dict. Save its state_dict().")
    if sum(entry.endswith("/data.pkl") for entry in names) != 1:
        raise ValueError(f"{name} is a zip archive, but not one of torch.save: it has no data.pkl, or several.")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError(f"{name} is a compressed archive, which torch.save never writes. Unpack it first.")
    if (claimed := sum(entry.file_size for entry in entries)) > size:
        raise ValueError(f"{name} is {size} bytes long, but its entries claim {claimed}. Download it again.")
    if (length := next(e.file_size for e in entries if e.filename.endswith("/data.pkl"))) > _MAX_PICKLE:
        raise ValueError(f"{name} holds a pickle of {length} bytes; at most {_MAX_PICKLE} are read.")


def _check_pickle(data: bytes, name: str) -> None:
    """Refuse a pickle that does more than put tensors into containers."""
    reason = None
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if not _OPCODES.fullmatch(opcode.name):
                reason = f"the pickle instruction {opcode.name}"
            elif opcode.name == "GLOBAL" and not _GLOBALS.fullmatch(str(argument).replace(" ", ".")):
                reason = f"`{str(argument).replace(' ', '.')}`"
            if reason:
                break
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}. Download it again.") from error
    if reason:
        raise ValueError(
            f"{name} holds {reason}, which is more than weights, and may run code. If you trust it, save the weights "
            "alone elsewhere: torch.save({'state_dict': state_dict}, path)."
        )


def _unwrap(content: Any, name: str) -> tuple[dict[str, Tensor], list[str]]:
    """Find the state dict in what a file holds."""
    leftovers: list[str] = []
    if isinstance(content, Mapping):
        for wrapper in WRAPPERS:
            if isinstance(content.get(wrapper), Mapping):
                leftovers = [str(key) for key in content if key != wrapper]
                content = content[wrapper]
                break
    if not isinstance(content, Mapping):
        raise ValueError(f"{name} holds a {type(content).__name__}, expected a dict of tensors.")
    tensors = {str(key): value.detach() for key, value in content.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError(f"{name} holds no tensors, only {[str(key) for key in content][:5]}.")
    return tensors, leftovers + [str(key) for key, value in content.items() if not isinstance(value, Tensor)]
