"""The commands of `lantern-hf` and their options. Work is imported when a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_hf._version import __version__
from lantern_hf.cli.card import card
from lantern_hf.cli.convert_command import convert
from lantern_hf.cli.errors import OneLineErrors
from lantern_hf.cli.generate_command import generate
from lantern_hf.cli.pull import pull
from lantern_hf.cli.push import push
from lantern_hf.cli.train_command import distil, train

app = typer.Typer(
    cls=OneLineErrors,
    name="lantern-hf",
    help="Generate images with LANTERN++: several tokens from each pass of the model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Generate images with LANTERN++: several tokens from each pass of the model."""
    if version:
        typer.echo(f"lantern-hf {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app.command()(generate)
app.command()(train)
app.command()(distil)
app.command()(convert)
app.command()(push)
app.command()(pull)
app.command()(card)


def main() -> None:
    """Run the command line."""
    app(prog_name="lantern-hf")
