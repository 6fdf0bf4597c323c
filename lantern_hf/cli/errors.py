"""How the command line fails: one line on stderr and exit code 2, never a traceback for what the user can put right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

# Newer typer carries its own copy of click, older ones use the real one; this is ClickException of either.
_ClickException: Any = typer.BadParameter.__mro__[2]


class UserError(Exception):
    """Something the user can put right.

    Args:
        error: What went wrong; only its text is shown, on one line.
    """

    def __init__(self, error: object):
        super().__init__(" ".join(str(error).split()))


@contextmanager
def user_errors(*further: type[Exception]) -> Iterator[None]:
    """Turn what a user can put right into a `UserError`; anything else is a defect and keeps its traceback.

    Args:
        *further: Errors of this command besides those of any.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError, MemoryError, *further)
    try:
        yield
    except kinds as error:
        raise UserError(error) from error


class OneLineErrors(TyperGroup):
    """A command group that reports errors on one line."""

    def main(  # type: ignore[override]
        self, args: Any = None, *, standalone_mode: bool = True, **kwargs: Any
    ) -> Any:
        """Run a command and exit with its code; arguments as in click."""
        try:
            result = super().main(args, **kwargs | {"standalone_mode": False})
        except (UserError, _ClickException) as error:
            text = str(error) if isinstance(error, UserError) else str(UserError(error.format_message()))
            typer.echo(f"lantern-hf: error: {text}", err=True)
            sys.exit(2)
        except typer.Abort:
            typer.echo("lantern-hf: aborted", err=True)
            sys.exit(130)
        if not standalone_mode:
            return result
        sys.exit(result if isinstance(result, int) else 0)
