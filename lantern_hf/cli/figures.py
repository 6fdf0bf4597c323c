"""The figures a decoding gives, as a table for people and as JSON for programs; both from the same numbers."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from rich.table import Table

from lantern_hf._version import __version__
from lantern_hf.assets import EMBEDDED
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.pipeline import LanternPipeline
from lantern_hf.stats import DecodingStats


@dataclass(frozen=True)
class Decoding:
    """One way of decoding all prompts.

    Attributes:
        stats: Statistics of each prompt.
        seconds: Wall-clock seconds of each prompt, text encoder and pixels included.
    """

    stats: list[DecodingStats]
    seconds: list[float]

    def figures(self) -> dict[str, float]:
        """Give the figures of all prompts together."""
        merged = self.stats[0]
        for stats in self.stats[1:]:
            merged = merged.merge(stats)
        tokens = sum(merged.new_tokens)
        return {
            "tokens": tokens,
            "target_passes": merged.passes,
            "prompt_passes": merged.prefill_passes,
            "tokens_per_pass": merged.tokens_per_pass,
            "decoding_seconds": merged.seconds["total"],
            "seconds": sum(self.seconds),
            "relaxed_tv_per_token": merged.relaxed_tv_per_token,
        }

    def to_dict(self) -> dict[str, Any]:
        """Give the figures, and the statistics of every prompt, as plain JSON values."""
        prompts = [
            stats.to_dict() | {"wall_seconds": seconds} for stats, seconds in zip(self.stats, self.seconds, strict=True)
        ]
        return self.figures() | {"per_prompt": prompts}


def ratios(lantern: dict[str, float], plain: dict[str, float]) -> dict[str, float]:
    """How many times less (of passes and seconds) or more (of tokens a pass) LANTERN++ takes than plain decoding."""
    less = {name: plain[name] / max(lantern[name], 1e-9) for name in ("target_passes", "decoding_seconds", "seconds")}
    return less | {"tokens_per_pass": lantern["tokens_per_pass"] / max(plain["tokens_per_pass"], 1e-9)}


def model_name(options: GenerateOptions) -> str:
    """The model as the user named it."""
    return options.model or f"embedded ({EMBEDDED})"


def environment(pipe: LanternPipeline) -> dict[str, Any]:
    """What figures were measured with, as plain JSON values."""
    return {
        "device": str(pipe.device),
        "dtype": str(pipe.transformer.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "versions": {
            "lantern_hf": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "diffusers": diffusers.__version__,
            "python": platform.python_version(),
        },
    }


_ROWS = (
    ("target passes", "target_passes", "{:.0f}"),
    ("tokens per pass", "tokens_per_pass", "{:.2f}"),
    ("decoding, s", "decoding_seconds", "{:.2f}"),
    ("in all, s", "seconds", "{:.2f}"),
    ("relaxed TV per token", "relaxed_tv_per_token", "{:.4f}"),
)


def table(results: dict[str, dict[str, float]], ratio: dict[str, float] | None) -> Table:
    """Lay the figures out, one column for each way of decoding.

    Args:
        results: Figures by the name of the way.
        ratio: As `ratios` gives it, for a last column.
    """
    names = {"lantern": "LANTERN++", "plain": "plain"}
    view = Table(box=None, pad_edge=False)
    view.add_column("")
    for name in [*(names[key] for key in results), *(["ratio"] if ratio else [])]:
        view.add_column(name, justify="right")
    for label, key, form in _ROWS:
        cells = [form.format(figures[key]) for figures in results.values()]
        if ratio is not None:
            cells.append(f"{ratio[key]:.2f}x" if key in ratio else "")
        view.add_row(label, *cells)
    return view


def summary(figures: dict[str, float], plain_passes: int) -> str:
    """Say in one sentence what was saved.

    Args:
        figures: Figures of the decoding.
        plain_passes: Passes that one token a pass takes.
    """
    tokens, passes = int(figures["tokens"]), int(figures["target_passes"])
    text = f"{tokens} tokens in {passes} target passes"
    if passes >= plain_passes:
        return f"{text}, one token a pass."
    saved = 1 - passes / plain_passes
    return f"{text} instead of {plain_passes}: {saved:.0%} saved, {figures['tokens_per_pass']:.2f} tokens a pass."
