"""`push_to_hub`, a method of heads and of pipelines. They have `save_pretrained`, and `_push` for what it wrote."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo

from lantern_hf._hub_card import CardDetails
from lantern_hf._hub_upload import Push

__all__ = ["push_to_hub"]


def push_to_hub(
    self: Any,
    repo_id: str,
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    tags: list[str] | None = None,
    card: CardDetails | None = None,
) -> CommitInfo:
    """Publish in one commit: what `save_pretrained` writes, a card, and of a head code for `custom_generate=`.

    Args:
        repo_id: Hub id; without a user it goes to the token's own account. Made if there is none.
        commit_message: First line of the commit.
        commit_description: Rest of the commit message.
        private: Whether a repository that is made is private.
        token: As in transformers.
        revision: Branch; made if there is none.
        create_pr: Open a pull request instead.
        tags: Further tags of the card.
        card: Licence, training, benchmark, picture. What a person wrote into an existing card stays.

    Returns:
        The commit, with `commit_url` and `pr_url`.

    Raises:
        PermissionError: No token, or one without the right.
        ValueError: Weights are not finite, or the card is not valid.
        OSError: The Hub refuses or cannot be reached; the repository is then as it was.
    """
    details = card or CardDetails()
    push = Push(
        repo_id,
        commit_message or self._push_message,
        description=commit_description,
        private=private,
        token=token,
        revision=revision,
        create_pr=create_pr,
    )
    with tempfile.TemporaryDirectory(prefix="lantern-push-") as folder:
        self.save_pretrained(folder)
        return self._push(Path(folder), push, replace(details, tags=[*details.tags, *(tags or ())]))
