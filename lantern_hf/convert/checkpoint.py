"""Published checkpoints as they lie on a disk: names, shapes and rows of tensors, read when they are asked for.

One file or several with an index, in safetensors or in torch's format. One file is open at a time, so that reading in
the order of `tensors` never holds more than the largest of them. This file knows no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lantern_hf.convert.torch_files import load_torch_file

__all__ = ["DTYPES", "TORCH_SUFFIXES", "Checkpoint", "Entry", "read_json"]

# safetensors' names of the dtypes that weights have; another one reads as None.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
TORCH_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin")
_MAX_JSON = 64 * 2**20  # Anole's config.json, which spells its vocabulary, is 1.7 MB
# Left in the names by DistributedDataParallel and torch.compile.
_WRAPPING = re.compile(r"^(?:(?:module|_orig_mod)\.)+")


class Entry(NamedTuple):
    """What a tensor is, without its numbers.

    Attributes:
        shape: Its shape.
        dtype: Its dtype; None where that is none of weights.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None


class _SafetensorsFile:
    """Entries and rows of an open safetensors file."""

    def __init__(self, path: Path):
        self._stack = ExitStack()
        try:
            self._file = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path.name} is no safetensors file, or damaged: {error}. Download it again.") from error
        self.leftovers: list[str] = []
        slices = {key: self._file.get_slice(key) for key in self._file.keys()}  # noqa: SIM118  not a mapping
        self.entries = {k: Entry(tuple(s.get_shape()), DTYPES.get(str(s.get_dtype()))) for k, s in slices.items()}

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Copy rows `start .. stop - 1` of a tensor."""
        return self._file.get_slice(key)[start:stop]

    def close(self) -> None:
        """Unmap the file."""
        self._stack.close()


class _TorchFile:
    """Entries and rows of a torch file, mapped into memory."""

    def __init__(self, path: Path):
        self._tensors, self.leftovers = load_torch_file(path)
        self.entries = {key: Entry(tuple(value.shape), value.dtype) for key, value in self._tensors.items()}

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Give rows `start .. stop - 1` of a tensor, a view of the file."""
        return self._tensors[key][start:stop]

    def close(self) -> None:
        """Unmap the file."""
        self._tensors = {}


class Checkpoint:
    """Tensors of a published model, by name.

    Args:
        path: A weight file, or a folder with weights, an index when there are several, and `config.json`.
        label: What the user called it; the path by default.

    Attributes:
        path: Where it lies.
        label: What the user called it.
        config: Content of `config.json`; empty where there is none.
        files: Its weight files.
        tensors: Shape and dtype of each tensor, file by file. Names are without `module.` and `_orig_mod.`.
        leftovers: Names of what the files hold besides tensors.

    Raises:
        FileNotFoundError: There is no such file or folder.
        ValueError: A file is damaged, of another format, or not what the index says.
    """

    def __init__(self, path: Path, label: str | None = None):
        self.path, self.label = path, str(path) if label is None else label
        if not path.exists():
            raise FileNotFoundError(f"{str(path)!r} does not exist. Name a weight file or a folder.")
        self.files, index = _weight_files(path)
        self.config = _read_config(path)
        self.tensors: dict[str, Entry] = {}
        self.leftovers: list[str] = []
        self._home: dict[str, tuple[int, str]] = {}
        self._open: tuple[int, _SafetensorsFile | _TorchFile] | None = None
        for number in range(len(self.files)):
            self._list(number)
        if missing := sorted(index.keys() - {key for _, key in self._home.values()}):
            raise ValueError(f"{_some(missing)} of the index is in none of the {len(self.files)} files it names.")
        self.close()

    def _list(self, number: int) -> None:
        """Note what one file holds."""
        file = self._file(number)
        self.leftovers += file.leftovers
        for key, entry in file.entries.items():
            name = _WRAPPING.sub("", key)
            if name in self._home:
                raise ValueError(f"`{name}` is there twice, at last in {self.files[number].name}.")
            self.tensors[name], self._home[name] = entry, (number, key)

    def _file(self, number: int) -> _SafetensorsFile | _TorchFile:
        """Open a file, and close the one that was open."""
        if self._open is None or self._open[0] != number:
            self.close()
            path = self.files[number]
            self._open = number, _SafetensorsFile(path) if path.suffix == ".safetensors" else _TorchFile(path)
        return self._open[1]

    def rows(self, key: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Read some rows of a tensor.

        Args:
            key: Its name in `tensors`.
            start: First row.
            stop: Row after the last one; None reads to the end.

        Returns:
            `(stop - start, ...)` in the file's dtype; it may be a view of the file.
        """
        number, name = self._home[key]
        stop = self.tensors[key].shape[0] if stop is None else stop
        return self._file(number).rows(name, start, stop)

    def close(self) -> None:
        """Unmap the open file."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Find the weight files, and the index that names their tensors if there is one."""
    if path.is_file():
        if path.name.endswith(".index.json"):
            return _indexed_files(path)
        if path.suffix not in (".safetensors", *TORCH_SUFFIXES):
            raise ValueError(f"{path.name} is no weight file; expected .safetensors or {', '.join(TORCH_SUFFIXES)}.")
        return [path], {}
    for name in _NAMES:
        if (path / name).is_file():
            return [path / name], {}
        if (path / f"{name}.index.json").is_file():
            return _indexed_files(path / f"{name}.index.json")
    found = sorted(file for file in path.iterdir() if file.suffix in (".safetensors", *TORCH_SUFFIXES))
    if len(found) != 1:
        names = f"several: {[file.name for file in found[:5]]}. Name one of them." if found else "none."
        raise ValueError(f"{str(path)!r} should hold one weight file (or {', '.join(_NAMES)}), but holds {names}")
    return found, {}


def _indexed_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Read an index of sharded weights."""
    index = read_json(path).get("weight_map")
    if not isinstance(index, Mapping) or not index or not all(isinstance(name, str) for name in index.values()):
        raise ValueError(f"{path.name} has no `weight_map` of tensor names to file names.")
    for name in index.values():
        if Path(name).name != name or Path(name).suffix not in (".safetensors", *TORCH_SUFFIXES):
            raise ValueError(f"{path.name} names {name!r}, which is no weight file beside it.")
    files = [path.parent / name for name in dict.fromkeys(index.values())]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{_some(missing)} of {path.name} is missing. Download it too.")
    return files, dict(index)


def _read_config(path: Path) -> dict[str, Any]:
    """Read the `config.json` of a folder, or beside a file that has the name such a folder gives it."""
    folder = path if path.is_dir() else path.parent
    beside = path.is_dir() or path.name in _NAMES or path.name.endswith(".index.json")
    return read_json(folder / "config.json") if beside and (folder / "config.json").is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: The file is no JSON object, or larger than 64 MB.
    """
    if (size := path.stat().st_size) > _MAX_JSON:
        raise ValueError(f"{path.name} is {size} bytes long; at most {_MAX_JSON} are read.")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is no JSON: {error}. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds a {type(content).__name__}, expected an object.")
    return content


def _some(names: list[str]) -> str:
    """Name the first of several."""
    return f"{names[0]!r}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
