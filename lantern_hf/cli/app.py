"""The commands of `lantern-hf` and their options. Work is imported when a command runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from lantern_hf._version import __version__
from lantern_hf.cli.card import card
from lantern_hf.cli.convert_command import convert
from lantern_hf.cli.errors import OneLineErrors, UserError
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.cli.pull import pull
from lantern_hf.cli.push import push
from lantern_hf.cli.train_command import distil, train

app = typer.Typer(
    cls=OneLineErrors,
    name="lantern-hf",
    help="Generate images with LANTERN++: several tokens from each pass of the model.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

_DECODING, _IMAGE, _OUTPUT, _MACHINE = "Decoding", "Image", "Output", "Machine"


class Dtype(str, Enum):
    """Dtypes a model can be loaded in."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Generate images with LANTERN++: several tokens from each pass of the model."""
    if version:
        typer.echo(f"lantern-hf {__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT...", help="What to draw; several prompts are quoted one by one."),
    ],
    model: Annotated[
        Optional[str],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Option(help="Folder or Hub id of a LanternPipeline.", show_default="the embedded emoji model"),
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare",
            help="Also decode plainly from the same seeds: images come side by side, LANTERN++ left, plain right. "
            "LANTERN++ runs first, so that warming up counts against it.",
        ),
    ] = False,
    lam: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            help="Relative cap of relaxed acceptance, at least 1.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    neighborhood_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="Codebook neighbours a token may borrow from.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    delta: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Absolute cap in [0, 1], instead of --lam.", rich_help_panel=_DECODING),
    ] = None,
    tree: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Draft tree, such as eagle_25 or narrow_12.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Keep the model's distribution exactly.", rich_help_panel=_DECODING),
    ] = False,
    guidance_scale: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Classifier-free guidance; 1 is off.", show_default="the model's", rich_help_panel=_IMAGE),
    ] = None,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Codes to draw from; 0 is all.", show_default="the model's", rich_help_panel=_IMAGE),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature.", rich_help_panel=_IMAGE)] = 1.0,
    num_images: Annotated[int, typer.Option(min=1, help="Images of each prompt.", rich_help_panel=_IMAGE)] = 1,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**62, help="Image number i draws from seed + i.", rich_help_panel=_IMAGE),
    ] = 0,
    out: Annotated[
        Path,
        typer.Option(
            help="Image file, or a folder. Several images are numbered: fox.png becomes fox-1.png, fox-2.png. Existing "
            "files are replaced.",
            rich_help_panel=_OUTPUT,
        ),
    ] = Path("lantern.png"),
    report: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.json", help="Also write every figure as JSON.", rich_help_panel=_OUTPUT),
    ] = None,
    scale: Annotated[
        int,
        typer.Option(min=1, max=32, help="Enlarge the saved images (Lanczos).", rich_help_panel=_OUTPUT),
    ] = 1,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, mps...; auto takes an accelerator.", rich_help_panel=_MACHINE)
    ] = "auto",
    dtype: Annotated[
        Dtype,
        typer.Option(help="auto is float32 on cpu and mps, else bfloat16.", rich_help_panel=_MACHINE),
    ] = Dtype.auto,
) -> None:
    """Draw images, and show how many passes of the model that took."""
    options = GenerateOptions(
        prompts=tuple(prompts),
        model=model,
        compare=compare,
        seed=seed,
        lam=lam,
        neighborhood_size=neighborhood_size,
        delta=delta,
        tree=tree,
        strict=strict,
        guidance_scale=guidance_scale,
        top_k=top_k,
        temperature=temperature,
        num_images=num_images,
        out=out,
        report=report,
        scale=scale,
        device=device,
        dtype=dtype.value,
    )
    from lantern_hf.cli.generate import run

    try:
        run(options)
    except (ValueError, OSError, ImportError, MemoryError) as error:
        raise UserError(error) from error


app.command()(train)
app.command()(distil)
app.command()(convert)
app.command()(push)
app.command()(pull)
app.command()(card)


def main() -> None:
    """Run the command line."""
    app(prog_name="lantern-hf")
