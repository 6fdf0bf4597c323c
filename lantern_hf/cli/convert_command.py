"""The command `lantern-hf convert` and its options. Work is imported when it runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from lantern_hf.cli.errors import user_errors
from lantern_hf.cli.shared_options import Dtype, Int, Str

_PIPELINE, _FACTS = "A whole pipeline", "What weights do not tell"


class Kind(str, Enum):
    """Published models that can be converted."""

    auto = "auto"
    llamagen = "llamagen"
    head = "head"
    llamagen_vq = "llamagen-vq"
    chameleon_vq = "chameleon-vq"
    chameleon = "chameleon"


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Weight file, folder, Hub id (jadohu/llamagen_drafter), or file of a Hub repository "
            "(someone/llamagen/t2i_XL_stage1_256.pt).",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to make; nothing may be there.")],
    kind: Annotated[Kind, typer.Option(help="What SOURCE is; auto tells it by the names of its tensors.")] = Kind.auto,
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the result; auto is the source's.")] = Dtype.auto,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run the published rule and the result once, and compare.")
    ] = False,
    grid: Annotated[
        Str,
        typer.Option(
            help="Image size in tokens: 16, or 16x24.", show_default="config.json or name", rich_help_panel=_FACTS
        ),
    ] = None,
    prefix_length: Annotated[
        Int,
        typer.Option(min=1, help="Positions before the image.", show_default="the weights'", rich_help_panel=_FACTS),
    ] = None,
    heads: Annotated[
        Int,
        typer.Option(min=1, help="Attention heads.", show_default="config.json or the width", rich_help_panel=_FACTS),
    ] = None,
    target: Annotated[
        Str,
        typer.Option(help="Folder or Hub id of the target that a head is for.", rich_help_panel=_FACTS),
    ] = None,
    vq: Annotated[
        Str,
        typer.Option(
            help="VQ model: of the pipeline, or the one that a Chameleon checkpoint lacks.", rich_help_panel=_PIPELINE
        ),
    ] = None,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline", help="Make a LanternPipeline of SOURCE, a LlamaGen, and --vq.", rich_help_panel=_PIPELINE
        ),
    ] = False,
    head: Annotated[
        Str,
        typer.Option(help="Draft head of the pipeline.", rich_help_panel=_PIPELINE),
    ] = None,
    text_encoder: Annotated[
        Str,
        typer.Option(help="T5 encoder of the pipeline, such as google/flan-t5-xl.", rich_help_panel=_PIPELINE),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Size of one weight file.")] = "5GB",
    revision: Annotated[
        Str,
        typer.Option(help="Branch, tag or commit of SOURCE on the Hub."),
    ] = None,
) -> None:
    """Turn published weights into a folder that from_pretrained loads."""
    shared: dict[str, Any] = {
        "dtype": dtype.value,
        "verify": verify,
        "grid": grid,
        "prefix_length": prefix_length,
        "num_attention_heads": heads,
        "max_shard_size": max_shard_size,
    }
    parts = {"vq": vq, "head": head, "text_encoder": text_encoder}
    alone = {"kind": kind.value, "target": target, "revision": revision}
    with user_errors():
        from lantern_hf.cli.convert import run

        run(source, out, pipeline, shared, parts, alone)
