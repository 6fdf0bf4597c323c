"""The knobs of relaxed acceptance and their checks, shared by the rule and the configuration. Knows no tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["RESIDUALS", "STRICT", "Relaxation", "check_residual"]

RESIDUALS = ("strict", "reference")
"""Residuals after a rejection: the TV-optimal one, and the one of the published code for side-by-side runs."""


@dataclass(frozen=True)
class Relaxation:
    """How much neighbourhood mass a drafted token may borrow. Strict unless a size and one bound are set.

    Attributes:
        neighborhood_size: Nearest codebook entries looked at besides the token itself, at least 0.
        lam: Cap relative to the token, `p'(x) <= lam * p(x)`, at least 1 (LANTERN++, arXiv 2502.06352).
        delta: Absolute cap on the added mass, in [0, 1] (LANTERN, arXiv 2410.03355). At most one of the two is set.

    Raises:
        ValueError: A value is out of range, or both bounds are set.
    """

    neighborhood_size: int = 0
    lam: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        size = self.neighborhood_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(
                f"`neighborhood_size` must be a whole number of at least 0, got {size!r}. "
                "0 is strict acceptance; 10 is the usual size."
            )
        if self.lam is not None and self.delta is not None:
            raise ValueError(
                f"`lam` and `delta` are two rules, got lam={self.lam!r} and delta={self.delta!r}. "
                "Set one and leave the other None."
            )
        if self.lam is not None and not (_is_finite(self.lam) and self.lam >= 1):
            raise ValueError(
                f"`lam` must be a finite number of at least 1, got {self.lam!r}. `lam=1` is strict acceptance; "
                "for an absolute cap in [0, 1] set `delta`."
            )
        if self.delta is not None and not (_is_finite(self.delta) and 0 <= self.delta <= 1):
            raise ValueError(
                f"`delta` must be a number in [0, 1], got {self.delta!r}. `delta=0` is strict acceptance; "
                "for a cap relative to the token, from 1 up, set `lam`."
            )

    @property
    def strict(self) -> bool:
        """Whether no mass can ever be borrowed, so that decoding keeps the target's distribution."""
        return self.neighborhood_size == 0 or (self.lam is None or self.lam == 1) and not self.delta

    def check_table(self, table_size: int | None) -> None:
        """Check that a neighbour table with `table_size` neighbours per entry serves; None: there is no table.

        Raises:
            ValueError: Relaxed without a table, or the table holds fewer neighbours than `neighborhood_size`.
        """
        if self.strict:
            return
        if table_size is None:
            raise ValueError(
                f"`neighborhood_size={self.neighborhood_size}` needs a neighbor table, got `neighbors=None`. "
                "Build one with NeighborTable.from_codebook(codebook, k), or set `neighborhood_size=0` to be strict."
            )
        if self.neighborhood_size > table_size:
            raise ValueError(
                f"`neighborhood_size={self.neighborhood_size}` but the neighbor table holds {table_size} per entry. "
                f"Use at most {table_size}, or build NeighborTable.from_codebook(codebook, k={self.neighborhood_size})."
            )


STRICT = Relaxation()
"""No relaxation: the target's distribution is kept."""


def check_residual(residual: str) -> None:
    """Check the name of a residual.

    Raises:
        ValueError: It is not one of `RESIDUALS`.
    """
    if residual not in RESIDUALS:
        raise ValueError(
            f"`residual` must be one of {', '.join(map(repr, RESIDUALS))}, got {residual!r}. "
            "Use 'strict' unless you compare with the published code."
        )


def _is_finite(value: object) -> bool:
    """Whether a value is a finite real number; `True` is not one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
