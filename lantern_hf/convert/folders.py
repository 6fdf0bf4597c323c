"""A result folder that is whole or not there: made beside its place under another name, then renamed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lantern_hf._files import sync

__all__ = ["check_free", "new_folder"]

_being_written: set[Path] = set()


def check_free(out: Path) -> None:
    """Refuse a place where something is.

    Raises:
        FileExistsError: A file, or a folder that is not empty.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f"{str(out)!r} is there already. Remove it, or choose another folder.")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the name `out` when all went well, and is removed otherwise.

    A killed process leaves its folder, `.<name>.<pid>-<random>.partial`, behind; the next call for the same name
    removes it.

    Args:
        out: The folder to be; it must not exist, or be empty.

    Raises:
        FileExistsError: Something is there.
    """
    out = out.absolute()
    check_free(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(out)
    partial = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    _being_written.add(partial)
    try:
        partial.mkdir()
        yield partial
        for path in sorted(partial.rglob("*"), reverse=True):
            sync(path)
        sync(partial)
        if out.is_dir():  # empty, or the check above would have refused it
            out.rmdir()
        os.rename(partial, out)  # fails, rather than replaces, where something has come in between
        sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        _being_written.discard(partial)


def _remove_orphans(out: Path) -> None:
    """Remove what killed processes of this machine left of the same folder."""
    pattern = re.compile(rf"\.{re.escape(out.name)}\.(\d+)-\w+\.partial")
    for path in list(out.parent.iterdir()):
        match = pattern.fullmatch(path.name)
        if match and path not in _being_written and not _is_other_process(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_other_process(pid: int) -> bool:
    """Whether another process with this number runs (on Windows, where asking would end it: perhaps)."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it runs, and is someone else's
        return True
    return pid != os.getpid()  # containers hand out the same numbers again
