"""`lantern-hf card`: write the card of a head into its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lantern_hf.cli import card_options as options
from lantern_hf.cli.errors import user_errors


def card(
    folder: Annotated[Path, typer.Argument(help="Folder of a draft head.")],
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="Hub id the card is for.")],
    license: options.License = None,
    license_name: options.LicenseName = None,
    license_link: options.LicenseLink = None,
    base_model: options.BaseModel = None,
    benchmark: options.Benchmark = None,
    image: options.Image = None,
    training_data: options.TrainingData = None,
    training_command: options.TrainingCommand = None,
    tags: options.Tags = None,
) -> None:
    """Write README.md into the folder of a draft head; your own text in an earlier one stays."""
    details = locals()
    with user_errors():
        from lantern_hf.hub import write_card

        typer.echo(f"Wrote {write_card(folder, repo_id, options.card_details(details))}")
