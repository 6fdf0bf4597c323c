"""What a user gives for prompts, as a list; and the reading of captions, for those who look for it here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lantern_hf._captions import check_lengths, class_ids, encode_prompts

__all__ = ["check_lengths", "class_ids", "encode_prompts", "one_an_image", "prompt_list"]


def prompt_list(prompt: str | Sequence[str]) -> list[str]:
    """Give the prompts as a list.

    Raises:
        TypeError: Something else than strings.
        ValueError: There is none.
    """
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not all(isinstance(text, str) for text in prompts):
        kinds = sorted({type(text).__name__ for text in prompts})
        raise TypeError(f"`prompt` must be a string or a list of strings, got {', '.join(kinds)}.")
    if not prompts:
        raise ValueError("`prompt` is an empty list. Pass at least one text.")
    return prompts


def one_an_image(name: str, value: Any, prompts: int, each: int) -> list[Any] | None:
    """Repeat what is one for all prompts, or one a prompt, so that every image has its own.

    Args:
        name: Name of the argument, for the error.
        value: Text or number, a list of them, or None.
        prompts: Number of prompts.
        each: Images of a prompt.

    Raises:
        ValueError: Another number of values than prompts.
    """
    if value is None:
        return None
    values = [value] * prompts if isinstance(value, str | int) else list(value)
    if len(values) != prompts:
        raise ValueError(f"`{name}` has {len(values)} values for {prompts} prompts. Pass one, or one a prompt.")
    return [one for one in values for _ in range(each)]
