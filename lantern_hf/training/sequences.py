"""Training data as people have it: JSON lines, folders of images, folders that `self_distil` wrote, `datasets`.

A row says what the target is asked for, `"prompt"`, `"class_label"` or the ids themselves (`"input_ids"`), and what it
is to answer: `"tokens"` (token ids) or an image, which the target's own VQ model turns into tokens. For families of
several sizes it may say of what size, `"height"` and `"width"` in pixels.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from torch import Tensor
from torch.utils.data import Dataset

from lantern_hf.training.conditioning import SIDES, Conditioner
from lantern_hf.training.storage import ShardStore

__all__ = ["ConditionedSequences", "describe_rows", "load_dataset_rows", "read_prompts", "read_rows"]

ASKS = ("prompt", "class_label", "input_ids")
_ALONG = ("attention_mask", "image_grid_thw")  # what may stand beside `input_ids`
_CAPTIONS = ("prompt", "text", "caption")
_METADATA = "metadata.jsonl"
_DRAWN = ("guidance_scale", "top_k", "top_p", "temperature")  # settings of `self_distil` that shape the sequences
_SAVED = ("state.json", "dataset_dict.json")  # what `save_to_disk` writes of one split, and of several


class ConditionedSequences(Dataset):
    """Rows turned into what a target reads, as a batch asks for them; tokens of images are kept once computed.

    Args:
        rows: Rows, see the module.
        conditioner: Speaks for the target; only `input_ids` with `tokens` do without.
        source: What the rows are, in words (`describe_rows`), for the record of the training.

    Raises:
        ValueError: A row lacks what it is to ask or to answer.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        conditioner: Conditioner | None = None,
        *,
        source: Sequence[str] = (),
    ):
        self._rows, self._conditioner, self.source = rows, conditioner, list(source)
        self._tokens: dict[int, Tensor] = {}
        if len(rows):
            _check_row(rows[0], "The first row")
        names = {tuple(sorted(row)) for row in rows} if isinstance(rows, list) else set()
        if len(names) > 1:
            raise ValueError(f"All rows must hold the same, got rows of {' and of '.join(map(str, sorted(names)))}.")

    @property
    def fingerprint(self) -> str:
        """A hash of every row, of images by the name and size of their file, and of what encodes them."""
        conditioner = "" if self._conditioner is None else self._conditioner.fingerprint
        digest = hashlib.blake2b(conditioner.encode(), digest_size=16)
        own = getattr(self._rows, "_fingerprint", None)  # a `datasets.Dataset` knows itself without being read
        for row in [{"dataset": own}] if own is not None else self._rows:
            digest.update(repr([(name, _plain(value)) for name, value in sorted(row.items())]).encode())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Give several items, their prompts and images encoded together."""
        rows = [self._rows[index] for index in indices]
        return [
            {**prompt, "tokens": tokens}
            for prompt, tokens in zip(self._prompts(rows), self._answers(indices, rows), strict=True)
        ]

    def _prompts(self, rows: list[Mapping[str, Any]]) -> list[dict[str, Tensor]]:
        """What the target is asked."""
        if "input_ids" in rows[0]:
            names = [name for name in ("input_ids", *_ALONG) if name in rows[0]]
            return [{name: torch.as_tensor(row[name]).long() for name in names} for row in rows]
        return self._speaker().encode_prompts(rows)

    def _answers(self, indices: Sequence[int], rows: list[Mapping[str, Any]]) -> list[Tensor]:
        """What it is to answer, int64."""
        if "tokens" in rows[0]:
            return [torch.as_tensor(row["tokens"]).long() for row in rows]
        missing = [place for place, index in enumerate(indices) if index not in self._tokens]
        if missing:
            images = [_image(rows[place]["image"]) for place in missing]
            asked = [rows[place] for place in missing]
            for place, tokens in zip(missing, self._speaker().encode_images(images, asked), strict=True):
                self._tokens[indices[place]] = tokens.int()
        return [self._tokens[index].long() for index in indices]

    def _speaker(self) -> Conditioner:
        if self._conditioner is None:
            raise ValueError(
                "These rows hold prompts or images, so they need a conditioner. Pass PipelineConditioner(pipe) or "
                "ProcessorConditioner(model, processor)."
            )
        return self._conditioner


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read rows from disk.

    Args:
        path: A file of JSON lines, one row each; a folder of images with `metadata.jsonl` (`file_name` and `text`, as
            `datasets` has it); or a folder that `self_distil` wrote.

    Returns:
        The rows; tokens are int32 tensors, images paths.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: A line is no row, or a shard is damaged; file and line are named.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"Training data {path} does not exist. Name a .jsonl file or a folder.")
    if path.is_file():
        return list(_read_lines(path))
    if (path / _METADATA).is_file():
        return [_image_row(row, path) for row in _read_lines(path / _METADATA, check=False)]
    shards = sorted(path.glob("shard-*.jsonl"))
    if not shards:
        raise ValueError(
            f"{path} holds neither `{_METADATA}` beside images nor shards that `lantern-hf distil` wrote. Name a file "
            "of JSON lines, or add one of the two."
        )
    store = ShardStore(path, ".jsonl", {})
    damaged = [shard.name for shard in shards if not store.is_whole(int(shard.stem.split("-")[1]))]
    if damaged:
        raise ValueError(
            f"{path} holds damaged shards, whose checksums differ: {', '.join(damaged)}. Run `lantern-hf distil` with "
            "the same settings again, which makes them anew."
        )
    return [row for shard in shards for row in _read_lines(shard)]


def describe_rows(path: str | os.PathLike[str]) -> str:
    """Say what `read_rows` reads from a path, without naming the path.

    Args:
        path: As `read_rows`, which has read it.
    """
    path = Path(path)
    if path.is_file():
        return "token sequences"
    if (path / _METADATA).is_file():
        return "captioned images"
    manifest = path / "manifest.json"
    settings = json.loads(manifest.read_text(encoding="utf-8")).get("settings", {}) if manifest.is_file() else {}
    shown = ", ".join(f"{name} {settings[name]}" for name in _DRAWN if name in settings)
    return f"drawn by a model with `lantern-hf distil`{f' ({shown})' if shown else ''}"


def read_prompts(path: str | os.PathLike[str], asks: str = "prompt") -> list[dict[str, Any]]:
    """Read what to ask a target for.

    Args:
        path: A text file with one prompt (or class label) a line, or JSON lines that hold `asks`.
        asks: What the target is asked by, `"prompt"` or `"class_label"`.

    Returns:
        Rows that hold `asks`, and `"height"` and `"width"` where JSON lines have them.

    Raises:
        FileNotFoundError: Nothing is there.
        ValueError: There is no prompt, or a line is none; the line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"Prompts {path} do not exist. Name a text file with one prompt a line, or a .jsonl file."
        )
    if path.suffix == ".jsonl":
        rows = list(_read_lines(path, check=False))
        found = [(number, row.get(asks)) for number, row in enumerate(rows, start=1)]
        sizes = [{side: row[side] for side in SIDES if row.get(side) is not None} for row in rows]
    else:
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]
        sizes = [{} for _ in found]
    if asks == "class_label":
        found = [(number, int(str(value)) if str(value).isdecimal() else None) for number, value in found]
    if wrong := [number for number, value in found if value in (None, "")]:
        raise ValueError(f"{path}, line {wrong[0]}: this target is asked by `{asks}`, and there is none.")
    if not found:
        raise ValueError(f"{path} holds no prompt. Write one a line.")
    return [{asks: value} | size for (_, value), size in zip(found, sizes, strict=True)]


def load_dataset_rows(name: str, split: str = "train", **kwargs: Any) -> Sequence[Mapping[str, Any]]:
    """Load rows with `datasets`, from the Hub or from a folder that `save_to_disk` wrote.

    Args:
        name: Hub id or folder.
        split: Split, such as `"train[:1000]"`; of a saved folder a whole one.
        **kwargs: Further arguments of `datasets.load_dataset`.

    Returns:
        A `datasets.Dataset` with the columns this module knows; `text` and `caption` are renamed `prompt`.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: The columns are others, or a saved folder holds no such split.
    """
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            "Training on a dataset of the Hub needs `datasets`. Install it with: pip install 'lantern_hf[datasets]'."
        ) from error
    if Path(name).is_dir() and any(Path(name, file).is_file() for file in _SAVED):
        data: Any = _saved_split(name, datasets.load_from_disk(name), split)
    else:
        data = datasets.load_dataset(name, split=split, **kwargs)
    caption = next((column for column in _CAPTIONS if column in data.column_names), None)
    if caption not in (None, "prompt"):
        data = data.rename_column(caption, "prompt")
    # Beside images such columns say how large these are, and not what to ask for.
    sides = SIDES if "tokens" in data.column_names else ()
    known = [column for column in (*ASKS, *_ALONG, *sides, "tokens", "image") if column in data.column_names]
    if not {"tokens", "image"} & set(known) or not set(ASKS) & set(known):
        raise ValueError(
            f"{name} has the columns {data.column_names}. Training needs one of {', '.join((*ASKS, *_CAPTIONS[1:]))} "
            "and one of tokens, image."
        )
    return data.select_columns(known)


def _saved_split(name: str, saved: Any, split: str) -> Any:
    """One split of what `save_to_disk` wrote."""
    splits = saved if isinstance(saved, dict) else {"train" if saved.split is None else str(saved.split): saved}
    if split not in splits:
        raise ValueError(
            f"{name} was saved with the split {' and '.join(map(repr, splits))}, so `split` cannot be {split!r}. Name "
            "a whole split; for a part of one, save that part."
        )
    return splits[split]


def _read_lines(path: Path, check: bool = True) -> Iterator[dict[str, Any]]:
    """Rows of a file of JSON lines; blank lines are passed over."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error
            if check:
                _check_row(row, f"{path}, line {number}")
                row |= {name: _ids(row[name], path, number) for name in ("tokens", "input_ids") if name in row}
            yield row


def _ids(values: Any, path: Path, number: int) -> Tensor:
    """Token ids as a compact tensor."""
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values) or not values:
        raise ValueError(f"{path}, line {number}: `tokens` and `input_ids` must be lists of token ids.")
    return torch.tensor(values, dtype=torch.int32)


def _check_row(row: Any, where: str) -> None:
    """Refuse a row that asks or answers nothing."""
    if not isinstance(row, Mapping) or not any(name in row for name in ASKS):
        found = sorted(row) if isinstance(row, Mapping) else type(row).__name__
        raise ValueError(f"{where}: a row needs one of {', '.join(ASKS)}, got {found}.")
    if "tokens" not in row and "image" not in row:
        raise ValueError(f"{where}: a row needs `tokens` (token ids) or `image` (a file), got {sorted(row)}.")


def _image_row(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A row of `metadata.jsonl` in our names."""
    caption = next((row[name] for name in _CAPTIONS if name in row), None)
    file = folder / str(row.get("file_name"))
    if "class_label" not in row and caption is None:
        raise ValueError(f"{folder / _METADATA}: a row needs one of {', '.join(_CAPTIONS)}, got {sorted(row)}.")
    if not file.is_file():
        raise FileNotFoundError(f"{folder / _METADATA} names {row.get('file_name')!r}, which is not in {folder}.")
    return {"image": str(file)} | ({"prompt": caption} if caption is not None else {"class_label": row["class_label"]})


def _image(value: Any) -> PIL.Image.Image:
    """An image, opened if it is a file."""
    if isinstance(value, PIL.Image.Image):
        return value
    with PIL.Image.open(value) as image:
        image.load()
        return image


def _plain(value: Any) -> Any:
    """What a value is hashed by."""
    if isinstance(value, Tensor):
        return hashlib.blake2b(value.long().numpy().tobytes(), digest_size=16).hexdigest()
    if isinstance(value, PIL.Image.Image):
        return hashlib.blake2b(value.tobytes(), digest_size=16).hexdigest()
    is_file = isinstance(value, str) and len(value) < 4096 and os.path.isfile(value)
    return (value, os.path.getsize(value)) if is_file else value
