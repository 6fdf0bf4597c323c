"""Files that are whole or not there: written beside their place, flushed to the disk, then renamed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["flush", "staged_files", "write_file"]

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
            flush(file)
        for file in sorted(written, key=lambda file: (file.name == last, file)):
            place = folder / file.relative_to(staging)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with staged_files(path.parent, path.name) as staging:
        (staging / path.name).write_bytes(content)


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
