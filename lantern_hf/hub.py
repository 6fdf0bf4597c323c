"""Heads and pipelines on the Hub: what pushing and pulling need beyond transformers and diffusers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

__all__ = ["download_pipeline"]

_SNAPSHOT_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
_UNSAFE_OR_FOREIGN = ("*.bin", "*.pt", "*.h5", "*.msgpack", "*.onnx")


def download_pipeline(name: str, parts: Iterable[str], index: str, **kwargs: Any) -> str:
    """Download a pipeline into the cache.

    Args:
        name: Hub id.
        parts: Components to download, with everything in their folders.
        index: File that lists the components.
        **kwargs: `cache_dir`, `revision`, `token`... of `snapshot_download`; others are not read.

    Returns:
        The folder.

    Raises:
        OSError: The repository is missing, out of reach, or holds no pipeline.
    """
    folder = snapshot_download(
        name,
        allow_patterns=[index, *(f"{part}/*" for part in sorted(parts))],
        ignore_patterns=list(_UNSAFE_OR_FOREIGN),
        **{key: kwargs[key] for key in _SNAPSHOT_ARGUMENTS if kwargs.get(key) is not None},
    )
    if not (Path(folder) / index).is_file():
        raise OSError(f"{name} holds no {index}, so it is no pipeline. Check the Hub id.")
    return folder
