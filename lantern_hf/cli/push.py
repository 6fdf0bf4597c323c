"""`lantern-hf push`: publish a head in one commit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from lantern_hf.cli import card_options as options
from lantern_hf.cli.errors import user_errors
from lantern_hf.cli.shared_options import Str, Token


def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a draft head.")],
    repo_id: Annotated[
        str, typer.Argument(metavar="USER/NAME", help="Hub id; without USER it goes to your own account.")
    ],
    message: Annotated[str, typer.Option(help="First line of the commit.")] = "Upload draft head",
    private: Annotated[
        Optional[bool],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Option("--private/--public", help="For a repository that is made.", show_default="your account's"),
    ] = None,
    revision: Annotated[Str, typer.Option(help="Branch; made if there is none.", show_default="main")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Open a pull request instead.")] = False,
    token: Token = None,
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
    """Publish a draft head on the Hub, with a card, in one commit."""
    details = locals()
    with user_errors():
        from lantern_hf.hub import push_folder

        commit = push_folder(
            folder,
            repo_id,
            card=options.card_details(details),
            message=message,
            private=private,
            revision=revision,
            create_pr=create_pr,
            token=token,
        )
        typer.echo(commit.pr_url or commit.commit_url)
