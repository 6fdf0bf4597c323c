"""`lantern-hf pull`: download a head, checked."""

from __future__ import annotations

from typing import Annotated

import typer

from lantern_hf.cli.errors import user_errors
from lantern_hf.cli.shared_options import File, Str, Token


def pull(
    repo_id: Annotated[str, typer.Argument(metavar="USER/NAME", help="Hub id of a draft head.")],
    to: Annotated[File, typer.Option(metavar="FOLDER", help="Folder to make.", show_default="the Hub's cache")] = None,
    revision: Annotated[Str, typer.Option(help="Branch, tag or commit.", show_default="main")] = None,
    token: Token = None,
    offline: Annotated[bool, typer.Option("--offline", help="Take it from the cache alone.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Download also what the cache holds.")] = False,
) -> None:
    """Download a draft head, check it, and show where it is."""
    with user_errors():
        from lantern_hf.hub import pull_head

        folder = pull_head(repo_id, to, revision=revision, token=token, local_files_only=offline, force_download=force)
        typer.echo(folder)
