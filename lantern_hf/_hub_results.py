"""A benchmark result file as the table and the `model-index` of a card: figures are read, never typed.

The file is what `examples/emoji/benchmark.py` writes: `steps` names each way of decoding and its tokens a pass;
`seconds` and `speed_over_plain`, where there are any, name the same ways.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

__all__ = ["Benchmark", "Decoding", "plain_text", "read_json"]

_MAX_BYTES, _MAX_ROWS, _MAX_NAME = 2**22, 500, 80


@dataclass(frozen=True)
class Decoding:
    """One way of decoding and its figures.

    Attributes:
        name: Such as `eagle_25 strict`.
        tokens_per_pass: New tokens by target passes.
        relaxed_tv_per_token: Bound on the total variation that relaxing costs; None if not measured.
        seconds: Median of an image; None if not measured.
        speed: Median, lower and upper quartile of the speed over plain decoding; None if not measured.
    """

    name: str
    tokens_per_pass: float
    relaxed_tv_per_token: float | None = None
    seconds: float | None = None
    speed: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Benchmark:
    """A benchmark result.

    Attributes:
        decodings: The ways that were measured.
        conditions: What it was measured with, in words.
        dataset: Name of the prompts.
    """

    decodings: tuple[Decoding, ...]
    conditions: str
    dataset: str

    @classmethod
    def read(cls, source: str | os.PathLike[str] | Mapping[str, Any]) -> Benchmark:
        """Read a result file, or the values of one.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is no benchmark result.
        """
        where = "`benchmark`" if isinstance(source, Mapping) else os.fspath(source)
        values = source if isinstance(source, Mapping) else read_json(Path(source), _MAX_BYTES)
        steps = values.get("steps")
        if not isinstance(steps, Mapping) or not 0 < len(steps) <= _MAX_ROWS:
            raise ValueError(
                f"{where} is no benchmark result: it has no `steps` with 1 to {_MAX_ROWS} ways of decoding. "
                "Write one with examples/emoji/benchmark.py."
            )
        rows = tuple(_decoding(where, name, values) for name in steps)
        prompts = values.get("dataset")
        return cls(rows, _conditions(values), plain_text(prompts) if isinstance(prompts, str) else "benchmark prompts")

    def table(self) -> str:
        """The figures as a Markdown table, columns without any figure left out."""
        columns = {
            "decoding": [f"`{row.name}`" for row in self.decodings],
            "tokens per pass": [f"{row.tokens_per_pass:.2f}" for row in self.decodings],
            "relaxed TV per token": [_figure(row.relaxed_tv_per_token, ".3f") for row in self.decodings],
            "seconds": [_figure(row.seconds, ".2f") for row in self.decodings],
            "speed over plain (quartiles)": [
                "" if row.speed is None else "{:.2f} ({:.2f}-{:.2f})".format(*row.speed) for row in self.decodings
            ],
        }
        shown = {name: cells for name, cells in columns.items() if any(cells)}
        lines = [list(shown), ["---", *["---:"] * (len(shown) - 1)], *zip(*shown.values(), strict=True)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)

    def eval_results(self, task: str) -> list[EvalResult]:
        """The figures for the `model-index` of a card.

        Args:
            task: The card's pipeline tag.
        """
        metrics = []
        for row in self.decodings:
            metrics.append(("tokens_per_pass", "Tokens per target pass", row.name, row.tokens_per_pass))
            if row.speed is not None:
                metrics.append(("speed_over_plain", "Speed over plain decoding, median", row.name, row.speed[0]))
        return [
            EvalResult(
                task_type=task,
                dataset_type="prompts",
                dataset_name=self.dataset,
                metric_type=kind,
                metric_name=f"{label}, {name}",
                metric_value=round(value, 4),
            )
            for kind, label, name, value in metrics
        ]


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Args:
        path: The file.
        max_bytes: Largest size to read.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is too large, no JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}.")
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} has {size:,} bytes, where at most {max_bytes:,} make sense. It was not loaded.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}.")
    return values


def _decoding(where: str, name: Any, values: Mapping[str, Any]) -> Decoding:
    """One row of the file."""
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME or not name.isprintable() or set(name) & set("|`<>"):
        raise ValueError(f"{where} is no benchmark result: {str(name)[:80]!r} names no way of decoding.")
    step = values["steps"][name]
    if not isinstance(step, Mapping):
        raise ValueError(f"{where} is no benchmark result: `steps[{name!r}]` must be an object.")

    def number(source: Any, key: str, lowest: float) -> float | None:
        value = source.get(key) if isinstance(source, Mapping) else None
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value < math.inf:
            raise ValueError(
                f"{where} is no benchmark result: `{key}` of {name!r} must be a number of at least {lowest:g}, got "
                f"{str(value)[:40]!r}."
            )
        return float(value)

    tokens = number(step, "tokens_per_pass", 0.0)
    if tokens is None:
        raise ValueError(f"{where} is no benchmark result: {name!r} has no `tokens_per_pass`.")
    seconds = number(_part(values, "seconds", name), "median", 0.0)
    speeds = _part(values, "speed_over_plain", name)
    low, middle, high = (number(speeds, key, 0.0) for key in ("q25", "median", "q75"))
    speed = None if middle is None else (middle, middle if low is None else low, middle if high is None else high)
    return Decoding(name, tokens, number(step, "relaxed_tv_per_token", 0.0), seconds, speed)


def _part(values: Mapping[str, Any], part: str, name: str) -> Any:
    """What a part of the file says of one way of decoding, None if nothing."""
    found = values.get(part)
    return found.get(name) if isinstance(found, Mapping) else None


def _conditions(values: Mapping[str, Any]) -> str:
    """What was measured with, from the fields a result may have."""
    machine = values.get("machine")
    parts = dict(machine) if isinstance(machine, Mapping) else {}
    parts |= {key: values[key] for key in ("dtype", "guidance", "seed", "device") if key in values}
    shown = [f"{key} {value}" for key, value in parts.items() if isinstance(value, str | int | float)]
    return ", ".join(plain_text(text) for text in shown[:20])


def plain_text(text: str) -> str:
    """Text without what Markdown or HTML would read as markup, on one line and of a length one can read."""
    kept = "".join(" " if mark.isspace() else mark for mark in text if mark.isprintable() or mark.isspace())
    return kept.translate({ord(mark): None for mark in "|`<>[]*"}).strip()[:200]


def _figure(value: float | None, form: str) -> str:
    """A number, or nothing."""
    return "" if value is None else format(value, form)
