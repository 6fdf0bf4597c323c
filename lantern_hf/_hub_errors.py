"""Asking the Hub: our name to it, attempts with waits in between, and errors that say in one line what to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from transformers.utils import logging

from lantern_hf._version import __version__

__all__ = [
    "HTTP_ERRORS",
    "at_revision",
    "check_online",
    "hub_api",
    "hub_error",
    "is_transient",
    "one_line",
    "retry_waits",
    "with_retries",
]

logger = logging.get_logger(__name__)

WAITS_S = (1.0, 2.0, 4.0)
"""Seconds between attempts to reach the Hub; one attempt more than there are waits."""

_BUSY = (408, 429, 500, 502, 503, 504)
# The HTTP library's base class; which library it is depends on the release of huggingface_hub.
_HttpError: Any = HfHubHTTPError.__mro__[1]

HTTP_ERRORS: Any = (_HttpError, OSError)
"""What asking the Hub raises."""

_T = TypeVar("_T")


def hub_api(token: str | bool | None = None) -> HfApi:
    """The Hub's client, under our name."""
    return HfApi(token=token, library_name="lantern_hf", library_version=__version__)


def check_online(name: str) -> None:
    """Refuse to go on without the Hub.

    Raises:
        OSError: The environment says not to ask it.
    """
    if constants.is_offline_mode():
        raise OSError(f"{name} is on the Hub, and HF_HUB_OFFLINE says not to ask it. Unset it.")


def retry_waits() -> list[float | None]:
    """Seconds to wait after each failed attempt, None after the last one."""
    return [*WAITS_S, None]


def with_retries(call: Callable[[], _T]) -> _T:
    """Call until the network lets it through, with growing waits in between.

    Args:
        call: What to try; it must be harmless to repeat.

    Raises:
        Exception: Whatever the last attempt raised, or the first that another attempt would not mend.
    """
    for wait in retry_waits():
        try:
            return call()
        except HTTP_ERRORS as error:
            if wait is None or not is_transient(error):
                raise
            logger.info(f"{one_line(error)}; trying again in {wait:g} s")
            time.sleep(wait)
    raise AssertionError("the last attempt returns or raises")


def is_transient(error: BaseException) -> bool:
    """Whether an error is of the network or of a busy server, so that another attempt may succeed."""
    if isinstance(error, HfHubHTTPError):
        return getattr(error.response, "status_code", None) in _BUSY
    if isinstance(error, LocalEntryNotFoundError):  # the client's word for "could not ask, and not in the cache"
        return True
    return isinstance(error, _HttpError | ConnectionError | TimeoutError)


def hub_error(error: BaseException, name: str, revision: str | None = None, file: str | None = None) -> OSError:
    """Say in one line what the Hub or the network refused, and what to do.

    Args:
        error: What the client raised.
        name: Hub id.
        revision: Revision that was asked for.
        file: File that was asked for.

    Returns:
        The error to raise; a `FileNotFoundError` where something does not exist.
    """
    sign_in = "sign in with `hf auth login`, set HF_TOKEN, or pass `token=`"
    if isinstance(error, GatedRepoError):
        return PermissionError(f"{name} is gated: ask for access at https://huggingface.co/{name}, then {sign_in}.")
    if isinstance(error, RepositoryNotFoundError):
        return FileNotFoundError(
            f"There is no repository {name} on the Hub. Check the name; if it is private, {sign_in}."
        )
    if isinstance(error, RevisionNotFoundError):
        return FileNotFoundError(f"{name} has no revision {revision!r}. Name a branch, a tag or a commit.")
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return FileNotFoundError(f"{at_revision(name, revision)} holds no {file}. Check the name and revision.")
    what = name if file is None else f"{file} of {name}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return PermissionError(f"The Hub refuses {what} (status {status}): {sign_in} with the right to it.")
    if status is not None and not is_transient(error):
        return OSError(f"The Hub refuses {what} (status {status}): {one_line(error)}")
    if is_transient(error):
        cause = error.__cause__ or error
        reason = f"status {status}" if status is not None else f"{type(cause).__name__}: {one_line(cause)}"
        return OSError(
            f"The Hub could not be reached for {what} in {len(WAITS_S) + 1} attempts ({reason}). Check the connection "
            "and try again; set HF_HUB_OFFLINE=1 to use the cache alone."
        )
    return OSError(f"{what} could not be downloaded: {one_line(error)} Try again.")


def one_line(error: object) -> str:
    """The text of an error on one line."""
    return " ".join(str(error).split())


def at_revision(name: str, revision: str | None) -> str:
    """Name a repository and its revision, for messages."""
    return name if revision is None else f"{name} at revision {revision!r}"
