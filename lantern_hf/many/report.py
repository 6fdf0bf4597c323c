"""What a run of `generate_many` came to, counted from the lines of its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ManyReport"]


@dataclass(frozen=True)
class ManyReport:
    """A folder of pictures, and what they took.

    Attributes:
        folder: The folder.
        pictures: Line of the manifest of each picture that was asked for, in order.
        drawn: How many of them this run drew; the others were there.
        processes: Processes of this run.
        wall_seconds: Seconds of this run, from the first check to the merged manifest.
    """

    folder: Path
    pictures: list[dict[str, Any]]
    drawn: int
    processes: int
    wall_seconds: float

    @property
    def files(self) -> list[Path]:
        """File of each picture."""
        return [self.folder / entry["file"] for entry in self.pictures]

    @property
    def tokens(self) -> int:
        """Tokens of all pictures."""
        return sum(entry["tokens"] for entry in self.pictures)

    @property
    def passes(self) -> int:
        """Target passes over a tree that the pictures took part in, those over the prompt left out."""
        return sum(entry["passes"] for entry in self.pictures)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a picture got from a target pass, on average over passes."""
        gained = sum(entry["tokens_per_pass"] * entry["passes"] for entry in self.pictures)
        return gained / max(self.passes, 1)

    @property
    def seconds(self) -> float:
        """Seconds of drawing, summed over pictures and so over processes, earlier runs included."""
        return sum(entry["seconds"] for entry in self.pictures)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures and the pictures' lines as plain JSON values."""
        return {
            "folder": str(self.folder),
            "images": len(self.pictures),
            "drawn": self.drawn,
            "kept": len(self.pictures) - self.drawn,
            "processes": self.processes,
            "tokens": self.tokens,
            "passes": self.passes,
            "tokens_per_pass": self.tokens_per_pass,
            "seconds": self.seconds,
            "wall_seconds": self.wall_seconds,
            "pictures": self.pictures,
        }
