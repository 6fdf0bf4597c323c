"""A push: what the repository holds now, and one commit that makes it hold what it should.

Everything is looked at before the first change, so that a push either makes its one commit or changes nothing but,
for a new repository, that there is one. Knows names and bytes; what they mean is the caller's business.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, ModelCard, get_token

from lantern_hf._hub_download import Repository
from lantern_hf._hub_errors import (
    HTTP_ERRORS,
    check_online,
    hub_api,
    hub_error,
    is_transient,
    one_line,
    retry_waits,
    with_retries,
)

__all__ = ["CARD", "Push"]

CARD = "README.md"
_MAX_CARD = 2**20


@dataclass(frozen=True)
class Push:
    """A push to come.

    Args:
        repo_id: Hub id; a name without user goes to the token's own account.
        message: First line of the commit.
        description: Rest of the commit message.
        revision: Branch; made from `main` if there is none. Default: `main`.
        private: Whether a repository that is made is private. Default: as the account is set.
        token: As in huggingface_hub.
        create_pr: Open a pull request instead of committing.

    Raises:
        ValueError: A pull request for another branch than `main`.
    """

    repo_id: str
    message: str
    description: str | None = None
    revision: str | None = None
    private: bool | None = None
    token: str | bool | None = None
    create_pr: bool = False

    def __post_init__(self) -> None:
        if self.create_pr and self.revision not in (None, "main"):
            raise ValueError(f"`create_pr=True` opens a pull request for `main`, got revision={self.revision!r}.")

    def send(
        self,
        files: Mapping[str, Path | bytes],
        card: Callable[[str, str | None], str],
        stale: Iterable[str] = (),
    ) -> CommitInfo:
        """Commit files and a card.

        Args:
            files: What to upload, by name in the repository: a local file or bytes.
            card: Given the full Hub id and the card that is there (None: no card), gives the new one.
            stale: Names to delete where the repository has them and `files` does not.

        Returns:
            The commit; `pr_url` of a pull request.

        Raises:
            PermissionError: No token, or one without the right.
            ValueError: The card is not valid on the Hub, or the one there cannot be merged with.
            OSError: The Hub refuses or cannot be reached, or the repository changed meanwhile.
        """
        if self.token is False or (not isinstance(self.token, str) and get_token() is None):
            raise PermissionError(
                "Pushing needs a token. Sign in with `hf auth login`, set HF_TOKEN, or pass `token=`."
            )
        check_online(self.repo_id)
        name = self._full_name()
        found, is_branch = self._look(name)
        text = card(name, None if found is None else _text_of(found))
        self._validate(name, text)
        deleted = [] if found is None else [file for file in stale if found.holds(file) and file not in files]
        parent = None if found is None else found.commit
        try:
            if found is None:
                hub_api(self.token).create_repo(name, private=self.private, exist_ok=True)
                parent = hub_api(self.token).model_info(name).sha
            if self.revision is not None and not is_branch:
                hub_api(self.token).create_branch(name, branch=self.revision, revision=parent, exist_ok=True)
        except HTTP_ERRORS as error:
            raise hub_error(error, name, self.revision) from error
        return self._commit(name, {**files, CARD: text.encode()}, deleted, parent)

    def _full_name(self) -> str:
        """The Hub id with its user."""
        if "/" in self.repo_id:
            return self.repo_id
        try:
            return f"{with_retries(hub_api(self.token).whoami)['name']}/{self.repo_id}"
        except HTTP_ERRORS as error:
            raise hub_error(error, self.repo_id) from error

    def _look(self, name: str) -> tuple[Repository | None, bool]:
        """The repository as it is, and whether the branch is there; a branch to be made looks like `main`."""
        for revision in dict.fromkeys([self.revision, None]):
            try:
                found = Repository.open(name, revision=revision, token=self.token)
            except FileNotFoundError:
                continue
            if found.files is None:
                raise OSError(f"Pushing to {name} needs the Hub, which is out of reach. Try again.")
            return found, revision == self.revision
        return None, self.revision in (None, "main")

    def _validate(self, name: str, text: str) -> None:
        """Let the Hub check the card before anything is changed."""
        try:
            with_retries(ModelCard(text).validate)
        except ValueError as error:
            raise ValueError(f"The card is not valid on the Hub: {_reasons(error)}") from error
        except HTTP_ERRORS as error:
            raise hub_error(error, name) from error

    def _commit(
        self, name: str, files: Mapping[str, Path | bytes], deleted: list[str], parent: str | None
    ) -> CommitInfo:
        """Make the one commit."""

        def commit() -> CommitInfo:
            # made anew for each attempt, since the client notes in them how far it came
            operations = [CommitOperationAdd(file, content) for file, content in sorted(files.items())]
            try:
                return hub_api(self.token).create_commit(
                    name,
                    [*operations, *map(CommitOperationDelete, deleted)],
                    commit_message=self.message,
                    commit_description=self.description,
                    revision=self.revision,
                    create_pr=self.create_pr,
                    parent_commit=parent,
                )
            except RuntimeError as error:  # how the client passes on what an upload thread met
                if isinstance(error.__cause__, HTTP_ERRORS):
                    raise error.__cause__ from error
                raise OSError(f"A file could not be uploaded to {name}: {one_line(error)}") from error

        for wait in retry_waits():
            try:
                return commit()
            except HTTP_ERRORS as error:
                if getattr(getattr(error, "response", None), "status_code", None) in (409, 412):
                    raise OSError(
                        f"{name} changed while this push was under way, so nothing was committed. Push again."
                    ) from error
                if wait is None or not is_transient(error):
                    raise hub_error(error, name, self.revision) from error
                self._check_unmoved(name, parent, error)
                time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _check_unmoved(self, name: str, parent: str | None, error: BaseException) -> None:
        """Refuse to commit again what the Hub may have committed before the connection broke."""
        now = with_retries(lambda: hub_api(self.token).model_info(name, revision=self.revision).sha)
        if self.create_pr or now != parent:
            raise OSError(
                f"The connection broke while the commit was made, and {name} may hold it already (commit {now}). Look "
                "at it on the Hub before you push again."
            ) from error


def _reasons(error: ValueError) -> str:
    """What the Hub found wrong with a card, from its answer."""
    try:
        return one_line("; ".join(str(found["message"]) for found in json.loads(str(error))["errors"]))[:400]
    except (ValueError, TypeError, KeyError):
        return one_line(error)[:400]


def _text_of(repository: Repository) -> str | None:
    """The card of a repository, None if it has none."""
    if not repository.holds(CARD):
        return None
    raw = repository.fetch(CARD, _MAX_CARD).read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"The card of {repository.name} is not UTF-8 text. Write it anew on the Hub.") from error
