"""The command `lantern-hf generate` and its options. Work is imported when it runs."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from lantern_hf.cli.errors import user_errors
from lantern_hf.cli.options import GenerateOptions
from lantern_hf.cli.shared_options import MACHINE, Device, Dtype, File, Float, Int, Str, plain

_DECODING, _IMAGE, _MANY, _OUTPUT = "Decoding", "Image", "Many prompts", "Output"


def generate(
    prompts: Annotated[
        Optional[list[str]],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Argument(metavar="PROMPT...", help="What to draw; several prompts are quoted one by one."),
    ] = None,
    prompts_file: Annotated[
        File,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="In place of PROMPT: a text file with a prompt a line, or JSON lines with prompt, seed and id.",
            rich_help_panel=_MANY,
        ),
    ] = None,
    batch_size: Annotated[
        Int,
        typer.Option(min=1, help="Images drawn together on a process.", show_default="8", rich_help_panel=_MANY),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite", help="Replace images of other prompts or settings in the folder.", rich_help_panel=_MANY
        ),
    ] = False,
    model: Annotated[
        Str,
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
        Float,
        typer.Option(
            help="Relative cap of relaxed acceptance, at least 1.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    neighborhood_size: Annotated[
        Int,
        typer.Option(
            help="Codebook neighbours a token may borrow from.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    delta: Annotated[
        Float,
        typer.Option(help="Absolute cap in [0, 1], instead of --lam.", rich_help_panel=_DECODING),
    ] = None,
    tree: Annotated[
        Str,
        typer.Option(
            help="Draft tree, such as eagle_25 or narrow_12.", show_default="the head's", rich_help_panel=_DECODING
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Keep the model's distribution exactly.", rich_help_panel=_DECODING),
    ] = False,
    guidance_scale: Annotated[
        Float,
        typer.Option(help="Classifier-free guidance; 1 is off.", show_default="the model's", rich_help_panel=_IMAGE),
    ] = None,
    top_k: Annotated[
        Int,
        typer.Option(help="Codes to draw from; 0 is all.", show_default="the model's", rich_help_panel=_IMAGE),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Softmax temperature.", rich_help_panel=_IMAGE)] = 1.0,
    num_images: Annotated[int, typer.Option(min=1, help="Images of each prompt.", rich_help_panel=_IMAGE)] = 1,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**62,
            help="Image number i draws from seed + i; with --prompts the id of a prompt counts, not its place.",
            rich_help_panel=_IMAGE,
        ),
    ] = 0,
    out: Annotated[
        File,
        typer.Option(
            help="Image file, or a folder. Several images are numbered: fox.png becomes fox-1.png, fox-2.png. Existing "
            "files are replaced. With --prompts a folder, where a run that was stopped goes on.",
            show_default="lantern.png, or lantern-images",
            rich_help_panel=_OUTPUT,
        ),
    ] = None,
    report: Annotated[
        File,
        typer.Option(metavar="FILE.json", help="Also write every figure as JSON.", rich_help_panel=_OUTPUT),
    ] = None,
    scale: Annotated[
        int,
        typer.Option(min=1, max=32, help="Enlarge the saved images (Lanczos).", rich_help_panel=_OUTPUT),
    ] = 1,
    device: Device = "auto",
    dtype: Annotated[
        Dtype,
        typer.Option(help="auto is float32 on cpu and mps, else bfloat16.", rich_help_panel=MACHINE),
    ] = Dtype.auto,
) -> None:
    """Draw images, and show how many passes of the model that took.

    With --prompts, `accelerate launch` and `torchrun` start several processes, which share the work.
    """
    options = GenerateOptions.of(plain(locals()))
    with user_errors():
        if options.prompts_file is None:
            from lantern_hf.cli.generate import run
        else:
            from lantern_hf.cli.generate_many import run

        run(options)
