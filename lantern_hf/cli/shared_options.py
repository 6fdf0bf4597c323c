"""Options that several commands have, each defined once."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

MACHINE = "Machine"

# typer reads these at run time, also on Python 3.10.
Int = Optional[int]  # noqa: UP045
Float = Optional[float]  # noqa: UP045
Str = Optional[str]  # noqa: UP045
File = Optional[Path]  # noqa: UP045


class Dtype(str, Enum):
    """Dtypes of a model."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Target = Annotated[
    Str,
    typer.Option(
        help="Target: folder or Hub id of a pipeline or a transformers model.", show_default="the embedded emoji model"
    ),
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, mps...; auto takes an accelerator.", rich_help_panel=MACHINE)
]
TargetDtype = Annotated[
    Dtype, typer.Option(help="Of the target; auto is float32 on cpu and mps.", rich_help_panel=MACHINE)
]
DeviceMap = Annotated[Str, typer.Option(help="Spread a transformers model, such as auto.", rich_help_panel=MACHINE)]
Height = Annotated[
    Int,
    typer.Option(
        min=1,
        help="Height of the images in pixels, for families of several sizes.",
        show_default="the rows' own, or the family's",
        rich_help_panel="Data",
    ),
]
Width = Annotated[
    Int, typer.Option(min=1, help="Width of the images.", show_default="as --height", rich_help_panel="Data")
]
Token = Annotated[Str, typer.Option(help="Access token; others can see it, HF_TOKEN or `hf auth login` are better.")]


def plain(options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the options of a command, as its `locals()` has them, as plain values."""
    return {name: value.value if isinstance(value, Enum) else value for name, value in options.items()}
