"""What a conversion found, used, left out and measured, as values and as lines of text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ConversionReport"]


@dataclass
class ConversionReport:
    """A finished conversion.

    Attributes:
        kind: What the source was, in words.
        source: What the user named.
        out: The folder.
        files: Its weight files.
        tensors: Tensors written.
        parameters: Numbers in them.
        dtype: Their dtype, without `torch.`.
        facts: What was found or inferred, in words, by name.
        ignored: Reason by name of each source tensor that was left out.
        leftovers: Names of what the files held besides tensors.
        max_error: Largest difference between the published rule and the result in one forward; None if not verified.
        scale: Largest value of the rule in that forward.
    """

    kind: str
    source: str
    out: Path
    files: list[str]
    tensors: int
    parameters: int
    dtype: str
    facts: dict[str, str]
    ignored: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    max_error: float | None = None
    scale: float | None = None

    def lines(self) -> list[str]:
        """Say it in lines."""
        lines = [f"{self.kind}: {self.source} -> {self.out}"]
        lines += [f"  {name}: {words}" for name, words in self.facts.items()]
        lines.append(f"  weights: {self.tensors} tensors, {self.parameters / 1e6:.1f}M parameters, {self.dtype}")
        for reason, count in Counter(self.ignored.values()).items():
            names = [name for name, other in self.ignored.items() if other == reason]
            lines.append(f"  ignored: {names[0]}{f' and {count - 1} more' if count > 1 else ''} ({reason})")
        if self.leftovers:
            lines.append(f"  not read: {', '.join(self.leftovers[:5])}{', ...' if len(self.leftovers) > 5 else ''}")
        if self.max_error is not None:
            lines.append(f"  verified: largest error {self.max_error:.2g} of values up to {self.scale:.3g}")
        return lines
