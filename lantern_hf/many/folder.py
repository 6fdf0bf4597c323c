"""The folder of a run: pictures and the lines that tell what they are, so kept that a kill at any moment loses nothing.

Each process appends to a shard of its own, `manifest-00000.jsonl`; the main one merges the shards into `manifest.jsonl`
at the end, and at the next start if it came to none. A batch of pictures is written in three steps: all files under
temporary names, all lines in one append, all renames. Once the lines are on the disk the batch is done, and renames
that did not happen are made up for at the next start. Knows bytes and lines, no model.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lantern_hf._files import digest_file, sync, write_whole

__all__ = ["KEYS", "MANIFEST", "PictureFolder"]

MANIFEST = "manifest.jsonl"

KEYS = ("file", "sha256", "id", "image", "prompt", "seed", "settings", "tokens", "passes", "tokens_per_pass", "seconds")
"""What a line of a manifest holds at least."""

_SHARDS, _LOCKS, _TEMPORARY = "manifest-*.jsonl", ".process-*.lock", (".*.png.tmp", f".{MANIFEST}.*.tmp")

Entry = dict[str, Any]


class PictureFolder:
    """A folder of pictures as one process sees it.

    Args:
        path: The folder; made when it is needed.
        process: Number of the process.

    Attributes:
        entries: Line of each picture that is done, by file name, as the last `recover` or `merge` found them.
    """

    def __init__(self, path: str | os.PathLike[str], process: int = 0):
        self.path, self._process = Path(path), process
        self.entries: dict[str, Entry] = {}
        self._lock: FileLock | None = None

    def open(self) -> None:
        """Make the folder, and keep other runs from working in it.

        Raises:
            OSError: Another process does, or the folder cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked(self._lock_file)

    def recover(self) -> None:
        """Take up what earlier runs left: their lines, their renames. For the main process alone, after `open`.

        Raises:
            OSError: A process of an earlier run still works here.
            ValueError: The manifest cannot be read.
        """
        for lock in self.path.glob(_LOCKS):  # processes outlive a launcher that was killed
            if lock != self._lock_file:
                self._locked(lock).release()
                lock.unlink(missing_ok=True)
        self.merge()
        for file, entry in self.entries.items():
            left = self._temporary(file)
            if left.is_file() and digest_file(left) == entry["sha256"]:
                os.replace(left, self.path / file)
        for pattern in _TEMPORARY:
            for left in self.path.glob(pattern):
                left.unlink(missing_ok=True)
        sync(self.path)

    def is_whole(self, file: str) -> bool:
        """Whether a picture is done, and its file there as it was written."""
        path = self.path / file
        return file in self.entries and path.is_file() and digest_file(path) == self.entries[file]["sha256"]

    def commit(self, contents: Sequence[bytes], entries: Sequence[Entry]) -> None:
        """Add a batch of pictures, all or none of them.

        Args:
            contents: Bytes of their files.
            entries: Their lines, `"file"` among them; the hash is added.

        Raises:
            OSError: The disk is full. What was added before stays good.
        """
        lines = []
        for content, entry in zip(contents, entries, strict=True):
            temporary = self._temporary(entry["file"])
            temporary.write_bytes(content)
            sync(temporary)
            lines.append(entry | {"sha256": hashlib.sha256(content).hexdigest()})
        with open(self._shard, "ab") as shard:
            shard.write("".join(map(_line, lines)).encode())
            shard.flush()
            os.fsync(shard.fileno())
        sync(self.path)  # the names of the shard and of the temporary files, before anything rests on them
        for entry in lines:
            os.replace(self._temporary(entry["file"]), self.path / entry["file"])
        sync(self.path)

    def merge(self, order: Iterable[str] = ()) -> None:
        """Merge all shards into the manifest, and remove them. For the main process alone, when no other appends.

        Args:
            order: File names in the order their lines shall have; lines of other files come behind.
        """
        manifest, shards = self.path / MANIFEST, sorted(self.path.glob(_SHARDS))
        found = _read(manifest) if manifest.is_file() else {}
        for shard in shards:
            found |= _read(shard, torn=True)
        self.entries = {file: found.pop(file) for file in order if file in found} | found
        if shards:
            text = "".join(map(_line, self.entries.values()))
            write_whole(manifest, lambda path: path.write_text(text, encoding="utf-8"))
        for shard in shards:
            shard.unlink()

    def close(self) -> None:
        """Let other runs in; without effect on a folder that is not open."""
        if self._lock is not None:
            self._lock.release()
            self._lock_file.unlink(missing_ok=True)
            self._lock = None

    @property
    def _shard(self) -> Path:
        return self.path / f"manifest-{self._process:05d}.jsonl"

    @property
    def _lock_file(self) -> Path:
        return self.path / f".process-{self._process:05d}.lock"

    def _temporary(self, file: str) -> Path:
        return self.path / f".{file}.tmp"

    def _locked(self, file: Path) -> FileLock:
        """Take a lock; a process that dies lets go of it."""
        lock = FileLock(file)
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise OSError(
                f"Another run is at work in {self.path} (it holds {file.name}). Wait for it, end it, or use another "
                "folder."
            ) from error
        return lock


def _line(entry: Entry) -> str:
    """A line of the manifest."""
    return json.dumps(entry, ensure_ascii=False) + "\n"


def _read(path: Path, torn: bool = False) -> dict[str, Entry]:
    """Lines of a manifest by file name; a last one that was cut short is passed over in a shard."""
    *lines, rest = path.read_bytes().split(b"\n")
    if rest and not torn:
        lines.append(rest)
    entries = {}
    for number, line in enumerate(lines, start=1):
        try:
            entry = json.loads(line)
            entries[_file_name(entry)] = entry
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"{path}, line {number} is no line of a manifest. Remove the line, whose picture is then drawn anew "
                "with --overwrite (`overwrite=True`)."
            ) from error
    return entries


def _file_name(entry: Entry) -> str:
    """Name of an entry's file; a manifest is a file that anybody can write, so it must lead nowhere else."""
    name = entry["file"]
    if Path(name).name != name or not name.endswith(".png") or not set(KEYS) <= entry.keys():
        raise ValueError(name)
    return name
