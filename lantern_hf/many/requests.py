"""What to draw: read from files, named, seeded. Knows no model and no folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["MAX_SEED", "ImageRequest", "Picture", "pictures_of", "read_requests"]

MAX_SEED = 2**62
"""Largest seed; `lantern-hf generate --seed` takes it as well."""

_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class ImageRequest:
    """One prompt.

    Attributes:
        prompt: Text, or the number of a class for a class-conditional model.
        id: Stem of the file names: up to 100 letters, digits, `.`, `_` and `-`.
        seed: Seed of the first picture; further ones count on from it. None: one that follows from the seed of the run,
            the id and the picture's number, and from nothing else.
        source: Where it comes from, for errors, such as `"prompts.txt, line 3"`.

    Raises:
        ValueError: The id names no file, or the seed is out of range.
        TypeError: The prompt is no text.
    """

    prompt: str
    id: str
    seed: int | None = None
    source: str = ""

    def __post_init__(self) -> None:
        where = f"{self.source}: " if self.source else ""
        if not isinstance(self.prompt, str):
            raise TypeError(f"{where}`prompt` must be a text, got {self.prompt!r}.")
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise ValueError(
                f"{where}`id` must be up to 100 letters, digits, '.', '_' or '-' and begin with none of the last, got "
                f"{self.id!r}. It names the picture's file."
            )
        whole = self.seed is None or (isinstance(self.seed, int) and not isinstance(self.seed, bool))
        if not whole or not 0 <= (self.seed or 0) <= MAX_SEED:
            raise ValueError(f"{where}`seed` must be a whole number in [0, 2**62], got {self.seed!r}.")


@dataclass(frozen=True)
class Picture:
    """One picture to draw.

    Attributes:
        id: Of its request.
        image: Number among the pictures of its request, from 1.
        prompt: Text or class.
        seed: Decides every draw.
        source: Where the request comes from.
    """

    id: str
    image: int
    prompt: str
    seed: int
    source: str = ""

    @property
    def file(self) -> str:
        """Name of its file. The first has no number, so that asking for more of each prompt later keeps it."""
        return f"{self.id}.png" if self.image == 1 else f"{self.id}-{self.image}.png"


def read_requests(path: str | os.PathLike[str]) -> list[ImageRequest]:
    """Read prompts from a file.

    Args:
        path: A text file with a prompt a line; or JSON lines (`.jsonl`) with `prompt` (or `class_label`) and, where
            wanted, `seed` and `id`, whose other keys are passed over. Blank lines are skipped; a prompt without `id` is
            named by the number of its line.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds no prompt, or a line is none; the line is named.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Name a text file with a prompt a line, or a .jsonl file.")
    read = _json_request if path.suffix.lower() in _JSON_LINES else _text_request
    requests = [read(line, f"{number:05d}", f"{path}, line {number}") for number, line in _lines(path)]
    if not requests:
        raise ValueError(f"{path} holds no prompt. Write one a line.")
    return requests


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, and their numbers from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line.strip()


def _text_request(line: str, name: str, source: str) -> ImageRequest:
    """A line of text is a prompt."""
    if line.startswith("{") and isinstance(_json(line), dict):
        raise ValueError(f"{source}: this is JSON in a text file. Name the file .jsonl to have it read.")
    return ImageRequest(line, name, source=source)


def _json_request(line: str, name: str, source: str) -> ImageRequest:
    """A line of JSON is a prompt with what belongs to it."""
    row = _json(line)
    if not isinstance(row, dict):
        raise ValueError(f'{source}: not a JSON object. Write {{"prompt": "a red fox"}}.')
    if ("prompt" in row) == ("class_label" in row):
        raise ValueError(f"{source}: needs one of `prompt` and `class_label`, has the keys {sorted(row)}.")
    prompt = row["prompt"] if "prompt" in row else str(row["class_label"])
    given = row.get("id", name)
    given = str(given) if isinstance(given, int) and not isinstance(given, bool) else given
    try:
        return ImageRequest(prompt, given, row.get("seed"), source)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _json(line: str) -> Any:
    """What a line of JSON says; None when it is none."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def pictures_of(requests: Sequence[ImageRequest], num_images: int, seed: int) -> list[Picture]:
    """List the pictures of all requests, in order.

    Args:
        requests: What is asked for.
        num_images: Pictures of each.
        seed: Seed of the run, for requests without one.

    Raises:
        ValueError: Two of them would have the same file (names that differ in case alone count as the same).
    """
    pictures = [
        Picture(request.id, image, request.prompt, _seed(request, image, seed), request.source)
        for request in requests
        for image in range(1, num_images + 1)
    ]
    named: dict[str, Picture] = {}
    for picture in pictures:
        other = named.setdefault(picture.file.lower(), picture)
        if other is not picture:
            raise ValueError(
                f"{picture.source or picture.id}: {picture.file} is also a picture of "
                f"{other.source or other.id}. Give one of them another `id`."
            )
    return pictures


def _seed(request: ImageRequest, image: int, seed: int) -> int:
    """Seed of one picture of a request."""
    if request.seed is not None:
        return request.seed + image - 1
    digest = hashlib.blake2b(f"{seed} {request.id} {image}".encode(), digest_size=4)
    return int.from_bytes(digest.digest(), "big")
