"""`LanternConfig`: what a user sets for one generation, checked at construction. Knows no model, table or tensor."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lantern_hf.relaxation import Relaxation, check_residual
from lantern_hf.tree import DraftTree, get_tree

__all__ = ["DEFAULT_LAM", "LanternConfig"]

DEFAULT_LAM = 2.0
"""Relative cap when neither cap is given (LANTERN++, arXiv 2502.06352)."""


@dataclass(frozen=True)
class LanternConfig:
    """Settings of relaxed tree decoding. The default is LANTERN++ with 10 neighbours and `lam=2.0`.

    Attributes:
        tree: Preset name in `TREES`, or the choices of a tree: `[[0], [1], [0, 0]]`. A `DraftTree` is stored as its
            choices.
        neighborhood_size: Codebook neighbours whose mass a token may borrow, at least 0. 0 is strict acceptance.
        lam: Relative cap, `p'(x) <= lam * p(x)`, at least 1; 1 is strict. Filled with `DEFAULT_LAM` when `delta` is not
            given either.
        delta: Absolute cap on the borrowed mass in [0, 1] (LANTERN, arXiv 2410.03355); 0 is strict. Not with `lam`.
        residual: `"strict"` (TV-optimal) or `"reference"` (as in the published code, for side-by-side runs).

    Raises:
        ValueError: A setting is out of range. The message names it, its value, what is allowed and what to do.

    Example:
        >>> LanternConfig(delta=0.1).lam is None, LanternConfig().lam
        (True, 2.0)
    """

    tree: str | Sequence[Sequence[int]] | DraftTree = "eagle_25"
    neighborhood_size: int = 10
    lam: float | None = None
    delta: float | None = None
    residual: str = "strict"

    def __post_init__(self) -> None:
        object.__setattr__(self, "tree", _plain_tree(self.tree))
        if self.lam is None and self.delta is None:
            object.__setattr__(self, "lam", DEFAULT_LAM)
        check_residual(self.residual)
        _ = self.relaxation  # checks the three knobs

    @classmethod
    def strict(cls, tree: str | Sequence[Sequence[int]] | DraftTree = "eagle_25") -> LanternConfig:
        """Settings that keep the target's distribution exactly."""
        return cls(tree=tree, neighborhood_size=0, lam=1.0)

    @property
    def is_strict(self) -> bool:
        """Whether these settings keep the target's distribution."""
        return self.relaxation.strict

    @property
    def relaxation(self) -> Relaxation:
        """The knobs of the acceptance rule."""
        return Relaxation(self.neighborhood_size, self.lam, self.delta)

    @property
    def draft_tree(self) -> DraftTree:
        """The tree itself, on the CPU."""
        return get_tree(self.tree)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; `from_dict` reads them back."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if not isinstance(self.tree, str):
            values["tree"] = [list(path) for path in get_tree(self.tree).choices]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LanternConfig:
        """Build from plain values; keys of a later release are dropped with a warning.

        Raises:
            ValueError: A setting is out of range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(str(key) for key in values if key not in known)
        if unknown:
            warnings.warn(
                f"LanternConfig does not know {', '.join(map(repr, unknown))} and drops it. Known keys: "
                f"{', '.join(sorted(known))}. Check the spelling, or update lantern_hf.",
                stacklevel=2,
            )
        return cls(**{key: value for key, value in values.items() if key in known})

    @classmethod
    def resolve(cls, value: LanternConfig | Mapping[str, Any] | None) -> LanternConfig:
        """Turn what a user may pass as `lantern_config` into settings; None is the default.

        Raises:
            ValueError: It is no config, mapping or None, or a setting is out of range.
        """
        if value is None:
            return cls()
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        raise ValueError(
            f"`lantern_config` must be a LanternConfig, a dict of its settings or None, got {type(value).__name__}. "
            "Example: LanternConfig(neighborhood_size=10, lam=2.0)."
        )


def _plain_tree(tree: str | Sequence[Sequence[int]] | DraftTree) -> str | tuple[tuple[int, ...], ...]:
    """Check a tree and reduce it to what JSON can hold: a name or choices."""
    checked = get_tree(tree)
    if isinstance(tree, str):
        return tree
    if not checked.has_default_rows:
        raise ValueError(
            "`tree` is composed: some of its nodes are not drawn from their parent's row, which a config cannot hold. "
            "Give the config the plain tree and compose it in the candidate generator."
        )
    return checked.choices
