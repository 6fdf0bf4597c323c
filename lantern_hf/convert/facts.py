"""Facts that weights do not tell: the grid of an image and the number of heads, from options, configs and names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lantern_hf.convert.checkpoint import Checkpoint
from lantern_hf.convert.plan import Options, refuse

__all__ = ["config_grid", "config_number", "config_section", "find_grid", "find_heads"]

# Heads by width, of the published LlamaGen sizes; not always 64 wide, so that nothing else can be guessed.
_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 3200: 32, 4096: 32}
_PIXELS_PER_TOKEN = 16
_MAX_SIDE = 256  # 4096 px
_INPUT_TYPES = {"t2i": 16, "t2i2": 32}
_STAGES = (
    (re.compile(r"t2i-2|t2i2|llamagen2|stage[ _-]?(2|ii)(?![a-z])"), 32),
    (re.compile(r"t2i_drafter|llamagen-t2i|llamagen_drafter|stage[ _-]?(1|i)(?![a-z])"), 16),
)


def config_number(config: Mapping[str, Any], name: str, default: float, most: float = math.inf) -> float:
    """Read a number above 0 of a `config.json`.

    Args:
        config: Its content.
        name: Name of the number.
        default: What an absent or null one is.
        most: Largest value that makes sense.

    Returns:
        The number.

    Raises:
        ValueError: It is no number, or out of range.
    """
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        raise refuse(f"`{name}` {value!r} in config.json", f"a number above 0, at most {most:g}", "Correct it.")
    return value


def config_section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Read an object of a `config.json`; an empty one where it is absent.

    Raises:
        ValueError: It is something else.
    """
    value = config.get(name) or {}
    if not isinstance(value, Mapping):
        raise refuse(f"`{name}` {value!r} in config.json", "an object", "Correct it.")
    return value


def find_heads(hidden: int, config: Mapping[str, Any], given: int | None) -> tuple[int, str]:
    """Settle the number of query heads.

    Args:
        hidden: Width of the model.
        config: Its `config.json`, perhaps empty.
        given: What the user said.

    Returns:
        The number, and where it comes from.

    Raises:
        ValueError: Nothing tells it, the user and the config disagree, or it does not divide the width.
    """
    written = config.get("num_attention_heads")
    if given and written and given != written:
        raise refuse(f"{given} heads", f"{written}, as config.json says", "Leave out the number of heads.")
    heads, source = next(
        (
            (value, words)
            for value, words in (
                (given, "as you said"),
                (written, "config.json"),
                (_HEADS.get(hidden), "published size"),
            )
            if value
        ),
        (0, ""),
    )
    if not heads:
        raise refuse(
            f"width {hidden} without config.json, so the number of heads is unknown",
            f"a published width ({', '.join(map(str, _HEADS))})",
            "Pass --heads (num_attention_heads).",
        )
    if not isinstance(heads, int) or hidden % heads or hidden // heads % 4:
        raise refuse(f"{heads!r} heads for width {hidden}", "a divisor with heads of 4n", "Correct --heads.")
    return heads, source


def config_grid(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Read the grid from a published `config.json`; None where it does not tell."""
    block, stage = config.get("block_size"), _INPUT_TYPES.get(str(config.get("input_type")))
    if not isinstance(block, int) or block < 1 or math.isqrt(block) ** 2 != block:
        return (stage, stage) if stage else None  # a drafter names its stage alone
    side = math.isqrt(block)
    if stage and side != stage and side in _INPUT_TYPES.values():
        return None  # one stage's block size with the other's name: neither is to be trusted
    return side, side


def find_grid(checkpoint: Checkpoint, options: Options, written: tuple[int, int] | None) -> tuple[tuple[int, int], str]:
    """Settle the grid of an image.

    Args:
        checkpoint: The source; its name may tell the stage or the pixels (`stage2_512`, `c2i_XL_384`, `T2I-2`).
        options: What the user said.
        written: What `config.json` says.

    Returns:
        Height and width in tokens, and where they come from.

    Raises:
        ValueError: Nothing tells it, it is out of range, or the user and the config disagree.
    """
    if any(not 1 <= side <= _MAX_SIDE for side in options.grid or written or ()):
        raise refuse(f"grid {options.grid or written}", f"sides from 1 to {_MAX_SIDE}", "Correct the grid.")
    if options.grid and written and options.grid != written:
        raise refuse(
            f"grid {options.grid[0]}x{options.grid[1]}",
            f"{written[0]}x{written[1]}, as config.json says",
            "Leave out the grid, or use the weights of the other stage.",
        )
    if options.grid:
        return options.grid, "as you said"
    if written:
        return written, "config.json"
    for name in reversed(Path(checkpoint.label).parts[-2:]):
        if side := _side(name.lower()):
            return (side, side), f"from the name {name!r}"
    raise refuse(
        "neither config.json nor a telling name, so the grid of an image is unknown",
        "a name such as t2i_XL_stage1_256.pt",
        "Pass --grid, 16 for 256 px or 32 for 512 px.",
    )


def _side(name: str) -> int | None:
    """Read the grid's side from a name, by its pixels or its stage."""
    if match := re.search(r"(?<!\d)(256|384|512)(?!\d)", name):
        return int(match[1]) // _PIXELS_PER_TOKEN
    return next((side for pattern, side in _STAGES if pattern.search(name)), None)
