"""From what a user names to files on this machine: a path, a Hub id, or a file in a Hub repository."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download

from lantern_hf.convert.checkpoint import TORCH_SUFFIXES, Checkpoint

__all__ = ["open_source"]

_ID = re.compile(r"[\w.-]+/[\w.-]+")
_FILE = re.compile(r"([\w.-]+/[\w.-]+)/([\w./-]+\.(?:safetensors|bin|pt|pth|ckpt))")


def open_source(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a checkpoint, downloaded if need be.

    Args:
        source: A weight file or folder, a Hub id (`jadohu/llamagen_drafter`), or a file of a Hub repository
            (`someone/llamagen/t2i_XL_stage1_256.pt`).
        revision: Branch, tag or commit on the Hub.

    Returns:
        The checkpoint.

    Raises:
        FileNotFoundError: A path that does not exist.
        OSError: The repository is missing or out of reach.
        ValueError: The files are damaged, or of another format.
    """
    path, name = Path(source).expanduser(), str(source)
    if path.exists() or path.is_absolute() or name.startswith("."):
        return Checkpoint(path, name)
    if match := _FILE.fullmatch(name):
        return Checkpoint(Path(hf_hub_download(match[1], match[2], revision=revision)), name)
    if not _ID.fullmatch(name) or path.suffix in (".safetensors", *TORCH_SUFFIXES):
        raise FileNotFoundError(f"{name!r} does not exist. Name a file, a folder, or a Hub id such as someone/drafter.")
    folder = _download(name, revision, (".safetensors",))
    if not any(folder.glob("*.safetensors")):
        folder = _download(name, revision, TORCH_SUFFIXES)
    return Checkpoint(folder, name)


def _download(name: str, revision: str | None, suffixes: tuple[str, ...]) -> Path:
    """Download the weights at the top of a repository, and the JSON files that describe them."""
    patterns = ["*.json", *(f"*{suffix}" for suffix in suffixes)]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
