"""Options of the commands that write a card."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from lantern_hf.cli.shared_options import File, Str

if TYPE_CHECKING:
    from lantern_hf.hub import CardDetails

_PANEL = "Card"

License = Annotated[Str, typer.Option(help="Licence as the Hub names it, such as apache-2.0.", rich_help_panel=_PANEL)]
LicenseName = Annotated[
    Str, typer.Option(help="Name of a licence of its own, with --license other.", rich_help_panel=_PANEL)
]
LicenseLink = Annotated[Str, typer.Option(help="Link to it.", rich_help_panel=_PANEL)]
BaseModel = Annotated[
    Str, typer.Option(help="Hub id of the target.", show_default="the one it was trained for", rich_help_panel=_PANEL)
]
Benchmark = Annotated[
    File,
    typer.Option(
        metavar="FILE.json", help="Benchmark result; the card's figures come from it alone.", rich_help_panel=_PANEL
    ),
]
Image = Annotated[File, typer.Option(help="Picture to show: PNG, JPEG or WebP.", rich_help_panel=_PANEL)]
TrainingData = Annotated[Str, typer.Option(help="What it was trained on, in words.", rich_help_panel=_PANEL)]
TrainingCommand = Annotated[Str, typer.Option(help="Command that trained it.", rich_help_panel=_PANEL)]
Tags = Annotated[
    Optional[list[str]],  # noqa: UP045  typer reads this at run time, also on Python 3.10
    typer.Option("--tag", help="Further tag; may be given several times.", rich_help_panel=_PANEL),
]


def card_details(options: Mapping[str, Any]) -> CardDetails:
    """Turn the options of a command, as its `locals()` has them, into what a card is made from."""
    from lantern_hf.hub import CardDetails

    values = {field.name: options[field.name] for field in fields(CardDetails) if field.name in options}
    return CardDetails(**values | {"tags": tuple(options["tags"] or ())})
