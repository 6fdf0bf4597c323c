"""Where a command writes: checked before any work, and written so that no half-written file is ever seen."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")


def image_paths(out: Path, count: int) -> list[Path]:
    """Name the files of `count` images.

    Args:
        out: A file, or a folder: one that exists, or a name without suffix.
        count: Images.

    Returns:
        `out` itself for one image, `stem-1.png`, `stem-2.png`... for several; in a folder the stem is `lantern`.

    Raises:
        ValueError: The suffix is of no image.
    """
    file = out / "lantern.png" if out.is_dir() or not out.suffix else out
    if file.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out must end in {', '.join(SUFFIXES)} or be a folder, got {str(out)!r}.")
    if count == 1:
        return [file]
    return [file.with_name(f"{file.stem}-{number}{file.suffix}") for number in range(1, count + 1)]


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written.

    Raises:
        ValueError: The path is a folder, or its folder cannot be written or made.
    """
    if path.is_dir():
        raise ValueError(f"{option} {str(path)!r} is a folder. Name a file.")
    _try_out(path.absolute().parent, path, option)


def check_folder(folder: Path, option: str) -> None:
    """Refuse a folder that could not be written.

    Raises:
        ValueError: It is a file, or cannot be made or written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} {str(folder)!r} is a file. Name a folder.")
    _try_out(folder.absolute(), folder, option)


def _try_out(folder: Path, named: Path, option: str) -> None:
    """Write a nameless file in a folder, or in the nearest above it that exists."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} cannot be written to {str(named)!r}: {error.strerror}. Choose another place."
        ) from error


def write_all(writers: dict[Path, Callable[[Path], None]]) -> None:
    """Write several files, all or none: each under a temporary name, then all renamed.

    Args:
        writers: For each file what writes it, told the temporary name. Missing folders are made.

    Raises:
        OSError: One could not be written; none of them is there then.
    """
    temporary = {path: path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}") for path in writers}
    try:
        for path, write in writers.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary[path])
        for path, written in temporary.items():
            os.replace(written, path)
    finally:
        for written in temporary.values():
            written.unlink(missing_ok=True)
