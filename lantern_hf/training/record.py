"""The record of a training, `training.json`: what a head's card says of how it was trained.

Figures come from the log, settings from the configuration, and nothing that was not measured is written.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lantern_hf._files import write_whole
from lantern_hf._hub_training import FORMAT, TRAINING_FILE, weights_digest
from lantern_hf._version import __version__
from lantern_hf.head_files import weight_files
from lantern_hf.training.config import TrainingConfig

__all__ = ["write_record"]

# Told otherwise, or of no consequence for the head.
_LEFT_OUT = {
    "steps", "epochs", "batch_size", "gradient_accumulation", "save_every", "log_every", "keep_checkpoints", "tree",
    "num_workers", "activation_checkpointing",
}  # fmt: skip


def write_record(
    folder: Path,
    log: Path,
    config: TrainingConfig,
    *,
    steps: int,
    processes: int,
    sequences: int,
    source: Sequence[str] = (),
) -> None:
    """Write the record of the head that lies in a folder.

    Args:
        folder: The head's folder.
        log: The training's log; the evaluation after the last step is taken from it.
        config: Settings of the training.
        steps: Optimizer steps made.
        processes: Processes that made them.
        sequences: Sequences trained on.
        source: What the sequences are, in words.
    """
    defaults = {item.name: item.default for item in dataclasses.fields(config)}
    chosen = {name: getattr(config, name) for name in defaults if name not in _LEFT_OUT}
    record: dict[str, Any] = {
        "format": FORMAT,
        "lantern_version": __version__,
        "sequences": sequences,
        "source": list(source),
        "steps": steps,
        "global_batch": config.batch_size * config.gradient_accumulation * processes,
        "processes": processes,
        "settings": {name: value for name, value in chosen.items() if value != defaults[name]},
        "weights_sha256": weights_digest(weight_files(folder)),
    }
    if evaluation := _evaluation(log, steps):
        record["evaluation"] = evaluation | {"guidance_scale": config.guidance_scale}
    text = json.dumps(record, indent=2) + "\n"
    write_whole(folder / TRAINING_FILE, lambda path: path.write_text(text, encoding="utf-8"))


def _evaluation(log: Path, step: int) -> dict[str, Any]:
    """What the log holds of the evaluation after a step; empty without one."""
    for line in reversed(log.read_text(encoding="utf-8").splitlines() if log.is_file() else []):
        values = json.loads(line)
        # A log that an earlier release wrote does not say what was evaluated.
        if values.pop("step") == step and "eval_sequences" in values:
            about = {"sequences": values.pop("eval_sequences"), "tree": values.pop("eval_tree")}
            return about | {"metrics": {name.removeprefix("eval_"): value for name, value in values.items()}}
    return {}
