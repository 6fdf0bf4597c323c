"""What the tests of the command line share."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from lantern_hf.cli import app


def call(*arguments: object) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def check_refused(result: Result, message: str) -> None:
    """Check that a command said no, on one line."""
    assert result.exit_code == 2, result.stdout
    assert message in result.stderr
    assert result.stderr.startswith("lantern-hf: error: ")
    assert result.stderr.count("\n") == 1
