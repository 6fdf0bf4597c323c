"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["digest_file", "staged_files", "sync", "write_file", "write_whole"]

_PREFIX = ".saving-"


@contextmanager
def staged_files(folder: Path, last: str) -> Iterator[Path]:
    """Give a folder to write into, whose files then take their places in `folder` one by one.

    A kill leaves each file old or new, never broken; after an error nothing has changed.

    Args:
        folder: Where the files belong; made if it is missing. Files of other names stay.
        last: Name of the file to move last, without which a reader finds nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_PREFIX}*"):  # by a save that was killed
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=folder))
    try:
        yield staging
        written = [file for file in staging.rglob("*") if file.is_file()]
        for file in written:
            sync(file)
        for file in sorted(written, key=lambda file: (file.name == last, file)):
            place = folder / file.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file so that it is whole under its name, or not there (or the old one still).

    Processes and threads may write the same file at once; one of them wins.

    Args:
        path: The file; its folder exists.
        write: Writes it, told the temporary name, `.<name>.<random>.tmp` in the same folder.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with staged_files(path.parent, path.name) as staging:
        (staging / path.name).write_bytes(content)


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()  # `hashlib.file_digest` is new in Python 3.11
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
