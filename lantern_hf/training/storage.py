"""Shards and folders that are whole or not there. Knows bytes, and nothing of what they hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from lantern_hf._files import digest_file, sync, write_whole

__all__ = ["ShardStore", "remove_leftovers", "replace_folder", "writing"]

_MANIFEST, _SUM = "manifest.json", ".sha256"


@contextmanager
def writing(what: str, hint: str) -> Iterator[None]:
    """Turn whatever a failed write raises (torch and safetensors have their own) into an OSError that says what to do.

    Args:
        what: What is being written, and where.
        hint: What is still there, and what to do.

    Raises:
        OSError: The body failed to write.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        raise OSError(f"{what} could not be written: {reason}. {hint}") from error


def replace_folder(final: Path, write: Callable[[Path], Any]) -> None:
    """Write a folder of files so that it is whole under its name, or not there.

    Args:
        final: The folder; an old one of that name goes the moment the new one comes.
        write: Fills it, told the temporary name.
    """
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for file in temporary.iterdir():
            sync(file)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)  # what is half there must not keep a full disk full
        raise
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    sync(final.parent)


def remove_leftovers(folder: Path) -> None:
    """Remove what a kill left half written in a folder: everything that still has a temporary name."""
    for left in folder.glob(".*.tmp"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        else:
            left.unlink(missing_ok=True)


class ShardStore:
    """A folder of numbered shards, each with its checksum, and a manifest that says what all of them are of.

    A shard's checksum (`sha256sum -c` reads it) is there before the shard, so that a shard under its name is always one
    that can be checked, and a kill at any moment leaves shards that are whole and nothing else under a final name.

    Args:
        folder: The folder.
        suffix: Suffix of a shard.
        manifest: Plain JSON values that tell this collection from any other.

    Example:
        >>> import tempfile
        >>> store = ShardStore(Path(tempfile.mkdtemp()), ".txt", {"of": "letters"})
        >>> store.begin()
        >>> store.write(0, lambda path: path.write_text("abc"))
        >>> store.is_whole(0), store.is_whole(1), store.differences()
        (True, False, [])
    """

    def __init__(self, folder: str | os.PathLike[str], suffix: str, manifest: dict[str, Any]):
        self.folder, self._suffix, self.manifest = Path(folder), suffix, manifest
        self._checked: dict[int, bool] = {}

    def path(self, index: int) -> Path:
        """Name of a shard."""
        return self.folder / f"shard-{index:05d}{self._suffix}"

    def _sum(self, index: int) -> Path:
        return self.path(index).with_name(self.path(index).name + _SUM)

    def differences(self) -> list[str]:
        """Name the manifest's entries that are others in the folder; none when it is empty or of this collection."""
        file = self.folder / _MANIFEST
        if not file.exists():
            return ["`manifest.json` is missing"] if any(self.folder.glob(f"shard-*{self._suffix}")) else []
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return ["`manifest.json` cannot be read"]
        names = sorted(found.keys() | self.manifest.keys())
        return [
            f"`{name}` {found.get(name)} -> {self.manifest.get(name)}"
            for name in names
            if found.get(name) != self.manifest.get(name)
        ]

    def begin(self) -> None:
        """Make the folder and write the manifest, and remove what a kill left half written. For one process alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        text = json.dumps(self.manifest, indent=2, sort_keys=True) + "\n"
        write_whole(self.folder / _MANIFEST, lambda path: path.write_text(text, encoding="utf-8"))

    def clear(self) -> None:
        """Remove all shards, checksums and the manifest, and nothing else."""
        self._checked = {}
        for pattern in (f"shard-*{self._suffix}", f"shard-*{self._suffix}{_SUM}", _MANIFEST):
            for file in self.folder.glob(pattern):
                file.unlink(missing_ok=True)

    def is_whole(self, index: int) -> bool:
        """Whether a shard is there and as it was written; a shard found whole is not read again."""
        if index not in self._checked:
            self._checked[index] = self._check(index)
        return self._checked[index]

    def _check(self, index: int) -> bool:
        path, file = self.path(index), self._sum(index)
        if not path.is_file() or not file.is_file():
            return False
        return file.read_text(encoding="utf-8").split()[:1] == [digest_file(path)]

    def forget(self, index: int) -> None:
        """Look at a shard anew when it is asked about again."""
        self._checked.pop(index, None)

    def is_damaged(self, index: int) -> bool:
        """Whether a shard is there, but not as it was written."""
        return self.path(index).exists() and not self.is_whole(index)

    def write(self, index: int, write: Callable[[Path], Any]) -> None:
        """Write a shard.

        Args:
            index: Its number.
            write: Writes it, told the temporary name.
        """
        path = self.path(index)

        def with_sum(temporary: Path) -> None:
            write(temporary)
            line = f"{digest_file(temporary)}  {path.name}\n"
            write_whole(self._sum(index), lambda file: file.write_text(line, encoding="utf-8"))

        write_whole(path, with_sum)
        self._checked[index] = True

    def bytes_used(self) -> int:
        """Bytes of all shards."""
        return sum(file.stat().st_size for file in self.folder.glob(f"shard-*{self._suffix}"))
