"""What a training tells while it runs: a log of JSON lines, the trackers of accelerate, and a progress bar."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers.utils import logging

from lantern_hf._files import write_whole
from lantern_hf.training.storage import writing

__all__ = ["LOG", "Reporter"]

LOG = "log.jsonl"
_TRACKED = "lantern_draft_head"


class Reporter:
    """Reports on the main process; the others stay silent.

    Args:
        folder: Gets the log; None writes none.
        accelerator: Its trackers, if it has any, get every number.
        settings: Settings of the run, for the trackers.
    """

    def __init__(self, folder: Path | None, accelerator: Accelerator, settings: dict[str, Any]):
        self._main, self._accelerator = accelerator.is_main_process, accelerator
        self._log = None if folder is None or not self._main else folder / LOG
        self._started = time.perf_counter()
        self._bar: Any = None
        self._evaluated: dict[str, str] = {}
        self._own_trackers = bool(accelerator.log_with) and not accelerator.trackers
        if self._own_trackers:
            plain = {
                name: value if isinstance(value, int | float | str) else str(value) for name, value in settings.items()
            }
            accelerator.init_trackers(_TRACKED, config=plain)

    def begin(self, step: int, total: int) -> Any:
        """Drop what the log says of steps that are about to be made again, and give the progress bar."""
        if self._log is not None and self._log.exists():
            lines = self._log.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
            text = "".join(f"{line}\n" for line in kept)
            write_whole(self._log, lambda path: path.write_text(text, encoding="utf-8"))
        bar = logging.tqdm(total=total, initial=step, desc="Training head", disable=not self._main or None)
        self._bar = bar
        return bar

    def steps(self, step: int, means: dict[str, float], lr: float) -> None:
        """Report the mean of the last steps."""
        seconds = round(time.perf_counter() - self._started, 3)
        self._write(step, means | {"lr": lr}, {"seconds": seconds})
        if self._bar is not None:
            shown = {"loss": f"{means['loss']:.4f}", "overlap": f"{means['overlap']:.3f}"}
            self._bar.set_postfix(shown | self._evaluated)

    def evaluation(self, step: int, means: dict[str, float], *, sequences: int, tree: str) -> None:
        """Report an evaluation on so many sequences, whose tokens per pass are those with `tree`."""
        self._evaluated = {"tokens/pass": f"{means['tokens_per_pass']:.2f}"}
        about: dict[str, float | str] = {"eval_sequences": sequences, "eval_tree": tree}
        self._write(step, {f"eval_{name}": value for name, value in means.items()}, about)

    def end(self) -> None:
        """Close the trackers that were opened here."""
        if self._own_trackers:
            for tracker in self._accelerator.trackers:
                tracker.finish()
            self._accelerator.trackers = []

    def _write(self, step: int, values: dict[str, float], untracked: Mapping[str, float | str]) -> None:
        """Append a line to the log, and tell the trackers."""
        if self._accelerator.trackers:
            self._accelerator.log(values, step=step)
        if self._log is None:
            return
        line = json.dumps({"step": step, **values, **untracked}) + "\n"
        hint = "Checkpoints written before are good; make room, and run again to go on."
        with writing(f"{self._log}", hint), open(self._log, "a", encoding="utf-8") as file:
            file.write(line)
