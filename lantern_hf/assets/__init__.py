"""Where the embedded model lies. Knows a folder and its name; loading is `LanternPipeline`'s business."""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED", "embedded_model_path"]

EMBEDDED = "emoji"
"""Name of the embedded text-to-image model."""


def embedded_model_path() -> Path:
    """Give the folder of the embedded model, in the layout of `LanternPipeline.save_pretrained`.

    Raises:
        FileNotFoundError: This installation came without it.
    """
    path = Path(__file__).parent / EMBEDDED
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(
            f"The embedded model is not in {path}. Reinstall lantern_hf from a release, or name another model "
            "(a folder or Hub id of a LanternPipeline)."
        )
    return path
