"""The trainer's own record of a training as the section of a card: what was trained on, how long, and how well.

`train_head` writes `training.json` beside the head; nothing of it is typed by hand, and what it does not say, the card
does not say. The record holds the hash of the weights it is of, so that it is never shown for another head.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers.utils import logging

from lantern_hf._hub_results import plain_text, read_json

__all__ = ["FORMAT", "TRAINING_FILE", "TrainingRecord", "weights_digest"]

TRAINING_FILE = "training.json"
FORMAT = "lantern_hf.training/1"

_MAX_BYTES, _MAX_ITEMS = 2**20, 64

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class TrainingRecord:
    """A record of a training.

    Attributes:
        sequences: Sequences trained on.
        steps: Optimizer steps made.
        global_batch: Sequences of a step, over all processes.
        processes: Processes that trained.
        source: What the sequences are, in words; empty where it is not known.
        settings: Settings that are not the trainer's defaults.
        version: `lantern_hf` that trained it.
        evaluation: Metrics on the evaluation set after the last step, empty without one.
        eval_sequences: Sequences of that set.
        tree: Tree whose tokens per pass were estimated.
        guidance_scale: Guidance of the evaluation, None without.
        weights: Hash of the weights, see `weights_digest`.
    """

    sequences: int
    steps: int
    global_batch: int
    processes: int
    source: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict)
    eval_sequences: int | None = None
    tree: str | None = None
    guidance_scale: float | None = None
    weights: str | None = None

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> TrainingRecord:
        """Read a record: its file, the folder that holds it, or its values.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no record of a training.
        """
        if isinstance(source, Mapping):
            where, values = "`training`", source
        else:
            path = Path(source, TRAINING_FILE) if Path(source).is_dir() else Path(source)
            where, values = str(path), read_json(path, _MAX_BYTES)
        if values.get("format") != FORMAT:
            raise ValueError(
                f"{where} is no record of a training: format {str(values.get('format'))[:40]!r}, expected {FORMAT!r}. "
                f"`train_head` writes one, {TRAINING_FILE}, into its `output_dir`."
            )
        evaluation, settings = _mapping(where, values, "evaluation"), _mapping(where, values, "settings")
        metrics = _mapping(where, evaluation, "metrics")
        scale = evaluation.get("guidance_scale")
        return cls(
            sequences=_count(where, values, "sequences"),
            steps=_count(where, values, "steps"),
            global_batch=_count(where, values, "global_batch"),
            processes=_count(where, values, "processes"),
            source=tuple(plain_text(str(text)) for text in _list(where, values, "source")),
            settings={plain_text(str(name)): value for name, value in settings.items()},
            version=None if values.get("lantern_version") is None else plain_text(str(values["lantern_version"])),
            evaluation={str(name): _number(where, str(name), value) for name, value in metrics.items()},
            eval_sequences=_count(where, evaluation, "sequences") if metrics else None,
            tree=None if evaluation.get("tree") is None else plain_text(str(evaluation["tree"])),
            guidance_scale=None if scale is None else _number(where, "guidance_scale", scale),
            weights=None if values.get("weights_sha256") is None else str(values["weights_sha256"]),
        )

    @classmethod
    def of_head(cls, folder: Path, weights: Sequence[Path]) -> TrainingRecord | None:
        """Read the record beside a head, None without one, or where it is of other weights.

        Raises:
            ValueError: It is there, but no record of a training.
        """
        if not (folder / TRAINING_FILE).is_file():
            return None
        record = cls.read(folder)
        if record.weights == weights_digest(weights):
            return record
        logger.warning(
            f"{TRAINING_FILE} is of other weights than this head (or of these in another dtype), and is not used. If "
            "it is of this head, name it: CardDetails(training=...)."
        )
        return None

    def text(self) -> str:
        """The section of a card, Markdown."""
        made_of = f": {'; '.join(self.source)}" if self.source else ""
        passes = self.steps * self.global_batch / self.sequences
        rows = {
            "sequences": f"{self.sequences:,}{made_of}",
            "steps": f"{self.steps:,} of {self.global_batch} sequences, {passes:.3g} passes over the data",
            "settings": ", ".join(f"`{name}={plain_text(str(value))}`" for name, value in self.settings.items()),
            "trained by": f"lantern_hf {self.version or ''}, {self.processes} process(es)",
        }
        lines = [f"| {name} | {text} |" for name, text in rows.items() if text]
        return "\n\n".join(["\n".join(["| | |", "|---|---|", *lines]), *self._measured()])

    def _measured(self) -> list[str]:
        """Paragraphs of what the evaluation found."""
        names = {1: "overlap"} | {depth: f"overlap_{depth}" for depth in range(2, _MAX_ITEMS)}
        depths = {depth: self.evaluation[name] for depth, name in names.items() if name in self.evaluation}
        if not depths:
            return []
        heads = " | ".join(map(str, depths))
        table = [
            f"| depth | {heads} |",
            f"|---{'|---:' * len(depths)}|",
            f"| sum min(p, q) | {' | '.join(f'{value:.3f}' for value in depths.values())} |",
        ]
        guided = "without guidance" if self.guidance_scale is None else f"at guidance {self.guidance_scale:g}"
        found = [f"After the last step, on {self.eval_sequences:,} sequences kept for evaluation, {guided}:"]
        tokens = self.evaluation.get("tokens_per_pass")
        if tokens is not None and self.tree is not None:
            table += ["", f"Tokens per pass that strict decoding would give with `{self.tree}`: {tokens:.2f}."]
        return [*found, "\n".join(table)]


def weights_digest(files: Sequence[Path]) -> str:
    """SHA-256 of weight files, one after the other in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(files):
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()


def _mapping(where: str, values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of the record that holds names and values, empty where it is missing."""
    found = values.get(name) or {}
    if not isinstance(found, Mapping) or len(found) > _MAX_ITEMS:
        raise ValueError(f"{where} is no record of a training: `{name}` must hold at most {_MAX_ITEMS} named values.")
    return found


def _list(where: str, values: Mapping[str, Any], name: str) -> list[Any]:
    """A part of the record that holds values in order, empty where it is missing."""
    found = values.get(name) or []
    if not isinstance(found, list | tuple) or len(found) > _MAX_ITEMS:
        raise ValueError(f"{where} is no record of a training: `{name}` must be a list of at most {_MAX_ITEMS}.")
    return list(found)


def _count(where: str, values: Mapping[str, Any], name: str) -> int:
    """A whole number of at least 1."""
    found = values.get(name)
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found < 2**53:
        raise ValueError(
            f"{where} is no record of a training: `{name}` must be a whole number of at least 1, got "
            f"{str(found)[:40]!r}."
        )
    return found


def _number(where: str, name: str, value: Any) -> float:
    """A finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{where} is no record of a training: `{name[:40]}` must be a finite number, got {str(value)[:40]!r}."
        )
    return float(value)
