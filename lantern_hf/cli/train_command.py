"""The options of `lantern-hf train` and `lantern-hf distil`. Work is imported when a command runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from lantern_hf.cli import shared_options as shared
from lantern_hf.cli.errors import user_errors
from lantern_hf.cli.shared_options import MACHINE, Dtype, File, Float, Int, Str

_DATA, _HEAD, _LOSS, _STEPS, _OUTPUT, _DRAWS = "Data", "Head", "Loss", "Optimization", "Output", "Sampling"


class Schedule(str, Enum):
    """What follows the warm-up."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


class Precision(str, Enum):
    """Precision of forward passes."""

    auto = "auto"
    no = "no"
    bf16 = "bf16"


def train(
    model: shared.Target = None,
    data: Annotated[
        Optional[list[Path]],  # noqa: UP045  typer reads this at run time, also on Python 3.10
        typer.Option(
            help="JSON lines with `tokens` and `prompt`, `class_label` or `input_ids`; a folder that `lantern-hf "
            "distil` wrote; or a folder of images with metadata.jsonl. May be given several times.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    dataset: Annotated[
        Str, typer.Option(help="In place of --data: Hub id or folder, read by `datasets`.", rich_help_panel=_DATA)
    ] = None,
    split: Annotated[str, typer.Option(help="Split of --dataset.", rich_help_panel=_DATA)] = "train",
    height: shared.Height = None,
    width: shared.Width = None,
    eval_sequences: Annotated[
        Int,
        typer.Option(
            min=0, help="Sequences kept for evaluation.", show_default="5 %, at most 64", rich_help_panel=_DATA
        ),
    ] = None,
    num_workers: Annotated[
        Int,
        typer.Option(min=0, help="Processes that load token sequences.", show_default="0", rich_help_panel=_DATA),
    ] = None,
    feature_cache: Annotated[
        File,
        typer.Option(
            help="Folder to keep the target's hidden states in, so that it runs once a sequence, not once an epoch.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    feature_cache_gib: Annotated[
        float, typer.Option(min=0.001, help="Most the cache may take, in GiB.", rich_help_panel=_DATA)
    ] = 20.0,
    init_head: Annotated[
        Str, typer.Option(help="Folder or Hub id of a head to start from.", rich_help_panel=_HEAD)
    ] = None,
    head_layers: Annotated[
        Int, typer.Option(min=1, help="Layers of a new head.", show_default="1", rich_help_panel=_HEAD)
    ] = None,
    head_intermediate: Annotated[
        Int,
        typer.Option(
            min=1, help="Width of its feed-forward layer.", show_default="the target's", rich_help_panel=_HEAD
        ),
    ] = None,
    ema_decay: Annotated[
        Float,
        typer.Option(
            help="Save a running average of the weights with this decay, such as 0.999.", rich_help_panel=_HEAD
        ),
    ] = None,
    feature_loss_weight: Annotated[
        Float,
        typer.Option(help="Weight of SmoothL1 on hidden states.", show_default="1.0", rich_help_panel=_LOSS),
    ] = None,
    distribution_loss_weight: Annotated[
        Float,
        typer.Option(help="Weight of the cross-entropy to the target.", show_default="0.1", rich_help_panel=_LOSS),
    ] = None,
    overlap_loss_weight: Annotated[
        Float,
        typer.Option(
            help="Weight of 1 - overlap, the chance that a drafted token is rejected.",
            show_default="0.0",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    feature_noise: Annotated[
        Float,
        typer.Option(help="Half width of the noise on hidden states.", show_default="0.1", rich_help_panel=_LOSS),
    ] = None,
    guidance_dropout: Annotated[
        Float,
        typer.Option(
            help="Share of sequences read behind the unconditional prompt.", show_default="0.1", rich_help_panel=_LOSS
        ),
    ] = None,
    guidance_scale: Annotated[
        Float,
        typer.Option(
            help="Train on guided distributions of this scale; doubles a forward.",
            show_default="off",
            rich_help_panel=_LOSS,
        ),
    ] = None,
    unroll_steps: Annotated[
        Int,
        typer.Option(
            min=1, max=3, help="Train the head on its own output, so deep.", show_default="1", rich_help_panel=_LOSS
        ),
    ] = None,
    unroll_decay: Annotated[
        Float,
        typer.Option(help="Weight of each depth relative to the last.", show_default="0.8", rich_help_panel=_LOSS),
    ] = None,
    steps: Annotated[
        Int, typer.Option(min=1, help="Optimizer steps, in place of --epochs.", rich_help_panel=_STEPS)
    ] = None,
    epochs: Annotated[
        Float, typer.Option(help="Passes over the data.", show_default="20", rich_help_panel=_STEPS)
    ] = None,
    batch_size: Annotated[
        Int,
        typer.Option(min=1, help="Sequences of a forward on one process.", show_default="8", rich_help_panel=_STEPS),
    ] = None,
    gradient_accumulation: Annotated[
        Int, typer.Option(min=1, help="Forwards of a step.", show_default="1", rich_help_panel=_STEPS)
    ] = None,
    lr: Annotated[Float, typer.Option(help="Peak learning rate.", show_default="1e-4", rich_help_panel=_STEPS)] = None,
    warmup_steps: Annotated[
        Int, typer.Option(min=0, help="Steps of warm-up.", show_default="3 %", rich_help_panel=_STEPS)
    ] = None,
    schedule: Annotated[
        Schedule, typer.Option(help="What follows the warm-up.", rich_help_panel=_STEPS)
    ] = Schedule.cosine,
    weight_decay: Annotated[
        Float, typer.Option(help="Decay of matrices.", show_default="0.01", rich_help_panel=_STEPS)
    ] = None,
    max_grad_norm: Annotated[
        Float, typer.Option(help="Norm gradients are clipped to.", show_default="0.5", rich_help_panel=_STEPS)
    ] = None,
    seed: Annotated[Int, typer.Option(min=0, help="Decides every draw.", rich_help_panel=_STEPS)] = 0,
    output_dir: Annotated[
        Path,
        typer.Option(help="Gets the head, log.jsonl and checkpoints; a run goes on there.", rich_help_panel=_OUTPUT),
    ] = Path("runs/head"),
    save_every: Annotated[
        Int,
        typer.Option(
            min=1, help="Steps between checkpoints and evaluations.", show_default="1000", rich_help_panel=_OUTPUT
        ),
    ] = None,
    keep_checkpoints: Annotated[
        Int, typer.Option(min=1, help="Newest checkpoints kept.", show_default="2", rich_help_panel=_OUTPUT)
    ] = None,
    log_every: Annotated[
        Int, typer.Option(min=1, help="Steps between lines of the log.", show_default="10", rich_help_panel=_OUTPUT)
    ] = None,
    tree: Annotated[
        Str,
        typer.Option(
            help="Draft tree whose tokens a pass are estimated.", show_default="eagle_25", rich_help_panel=_OUTPUT
        ),
    ] = None,
    tracker: Annotated[
        Str, typer.Option(help="Tracker of accelerate, such as tensorboard.", rich_help_panel=_OUTPUT)
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.TargetDtype = Dtype.auto,
    device_map: shared.DeviceMap = None,
    mixed_precision: Annotated[
        Precision, typer.Option(help="auto is bf16 on cuda.", rich_help_panel=MACHINE)
    ] = Precision.auto,
    activation_checkpointing: Annotated[
        bool,
        typer.Option("--activation-checkpointing", help="Trade time for memory.", rich_help_panel=MACHINE),
    ] = False,
) -> None:
    """Train a draft head for a target, or go on with it; `accelerate launch` and `torchrun` start several processes."""
    options = shared.plain(locals())
    with user_errors(FloatingPointError):
        from lantern_hf.cli.train import run

        run(options)


def distil(
    prompts: Annotated[
        Path,
        typer.Option(help="Text file with a prompt (or class label) a line, or JSON lines.", rich_help_panel=_DATA),
    ],
    model: shared.Target = None,
    output_dir: Annotated[
        Path, typer.Option(help="Gets the shards; a run goes on there.", rich_help_panel=_OUTPUT)
    ] = Path("runs/sequences"),
    sequences_per_prompt: Annotated[
        Int, typer.Option(min=1, help="Sequences of each prompt.", show_default="1", rich_help_panel=_DATA)
    ] = None,
    height: shared.Height = None,
    width: shared.Width = None,
    guidance_scale: Annotated[
        Float,
        typer.Option(
            help="Guidance; 1 is off.", show_default="the pipeline's, or the family's", rich_help_panel=_DRAWS
        ),
    ] = None,
    top_k: Annotated[
        Int,
        typer.Option(
            help="Tokens to draw from; 0 is all.",
            show_default="the pipeline's, or the family's",
            rich_help_panel=_DRAWS,
        ),
    ] = None,
    top_p: Annotated[
        Float,
        typer.Option(help="Probability mass to draw from.", show_default="the model's, or 1.0", rich_help_panel=_DRAWS),
    ] = None,
    temperature: Annotated[
        Float, typer.Option(help="Softmax temperature.", show_default="the model's, or 1.0", rich_help_panel=_DRAWS)
    ] = None,
    max_new_tokens: Annotated[
        Int, typer.Option(min=2, help="Tokens of a sequence.", show_default="one image", rich_help_panel=_DRAWS)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides every draw.", rich_help_panel=_DRAWS)] = 0,
    head: Annotated[
        Str,
        typer.Option(
            help="Head to decode faster with, strictly.", show_default="the pipeline's", rich_help_panel=MACHINE
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Use no head.", rich_help_panel=MACHINE)] = False,
    tree: Annotated[
        Str, typer.Option(help="Draft tree of the head.", show_default="eagle_25", rich_help_panel=MACHINE)
    ] = None,
    batch_size: Annotated[
        Int, typer.Option(min=1, help="Sequences generated together.", show_default="8", rich_help_panel=MACHINE)
    ] = None,
    shard_size: Annotated[
        Int,
        typer.Option(
            min=1, help="Sequences of a shard, the most a kill loses.", show_default="64", rich_help_panel=_OUTPUT
        ),
    ] = None,
    device: shared.Device = "auto",
    dtype: shared.TargetDtype = Dtype.auto,
    device_map: shared.DeviceMap = None,
) -> None:
    """Have a target generate training sequences for its head, or go on with it; data for `lantern-hf train --data`."""
    options = shared.plain(locals())
    with user_errors(FloatingPointError):
        from lantern_hf.cli.distil import run

        run(options)
