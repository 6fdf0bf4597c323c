"""The work of `lantern-hf train`: load a target and its data, train a head, say how good it is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch.utils.data import Subset

from lantern_hf._processes import process_state
from lantern_hf.cli.files import check_folder
from lantern_hf.cli.setup import quiet, resolve_device, resolve_dtype
from lantern_hf.cli.train_target import LoadedTarget, load_target
from lantern_hf.draft import LanternDraftModel
from lantern_hf.training import (
    ConditionedSequences,
    FeatureCache,
    TrainingConfig,
    describe_rows,
    load_dataset_rows,
    read_rows,
    train_head,
)
from lantern_hf.training.runtime import seed_of, seeded

DEFAULT_EPOCHS = 20.0
_EVAL_SHARE, _EVAL_MOST = 0.05, 64
_GIB = 2**30


def run(options: Mapping[str, Any]) -> None:
    """Run the command.

    Args:
        options: Every option of the command by its name; None is the default.

    Raises:
        ValueError: An option is out of range, or model and data do not fit.
        OSError: Something is missing, or cannot be written.
    """
    check_folder(options["output_dir"], "--output-dir")
    accelerator = make_accelerator(options["device"], options["tracker"], options["output_dir"])
    device = resolve_device(options["device"], accelerator.device)
    config = training_config(options, device)
    rows = _rows(options)
    with quiet(local=True):
        size, dtype = (options["height"], options["width"]), resolve_dtype(options["dtype"], device)
        loaded = load_target(options["model"], dtype, device, options["device_map"], size)
        head = _head(options, loaded, config.seed)
    if loaded.conditioner is not None and "input_ids" not in rows[0]:
        loaded.conditioner.check(config.guidance_scale or 1.0)
    data = ConditionedSequences(rows, loaded.conditioner, source=_source(options))
    train, evaluation = _split(data, options["eval_sequences"])
    if config.num_workers and not {"input_ids", "tokens"} <= set(rows[0]):
        raise ValueError("--num-workers must be 0 for prompts and images, which the model's own parts read here.")
    cache = options["feature_cache"]
    trained = train_head(
        loaded.target,
        train,
        config,
        head=head,
        output_dir=options["output_dir"],
        eval_dataset=evaluation,
        feature_cache=None if cache is None else FeatureCache(cache, int(options["feature_cache_gib"] * _GIB)),
        accelerator=accelerator,
        target_options=None if loaded.conditioner is None else loaded.conditioner.target_options,
    )
    if accelerator.is_main_process:
        _show(options["output_dir"], trained)
    accelerator.end_training()


def make_accelerator(device: str, tracker: str | None, folder: Path) -> Accelerator:
    """Make the accelerator: one process, or what `accelerate launch` started.

    Raises:
        ImportError: The tracker is not installed.
    """
    if tracker == "tensorboard" and not (
        importlib.util.find_spec("tensorboard") or importlib.util.find_spec("tensorboardX")
    ):
        raise ImportError(
            "--tracker tensorboard needs tensorboard. Install it with: pip install 'lantern_hf[tensorboard]'."
        )
    # Precision is a setting of the training, and accelerate's would wrap the head's forward.
    on_cpu = process_state(cpu=device == "cpu").device.type == "cpu"
    return Accelerator(cpu=on_cpu, mixed_precision="no", log_with=tracker, project_dir=folder)


def training_config(options: Mapping[str, Any], device: torch.device) -> TrainingConfig:
    """Settings of the training; what was not named has the library's default.

    Raises:
        ValueError: A setting is out of range.
    """
    names = {field.name for field in dataclasses.fields(TrainingConfig)}
    values = {name: value for name, value in options.items() if name in names and value is not None}
    if values.get("mixed_precision", "auto") == "auto":
        values["mixed_precision"] = "bf16" if device.type == "cuda" else "no"
    if "steps" not in values:
        values.setdefault("epochs", DEFAULT_EPOCHS)
    return TrainingConfig(**values)


def _rows(options: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The training data that was named."""
    paths, name = options["data"] or [], options["dataset"]
    if bool(paths) == (name is not None):
        raise ValueError(
            "Name the training data by --data (files or folders) or --dataset (of `datasets`), one of them."
        )
    if name is not None:
        rows = load_dataset_rows(name, options["split"])
    else:
        rows = [row for path in paths for row in read_rows(path)]
    if len(rows) < 2:
        raise ValueError(f"Training needs at least 2 sequences, got {len(rows)}.")
    return rows


def _source(options: Mapping[str, Any]) -> list[str]:
    """What the training data are, for the record; a path on this machine says nothing to anybody else."""
    if options["data"]:
        return list(dict.fromkeys(describe_rows(path) for path in options["data"]))
    name = options["dataset"]
    return ["a saved dataset" if Path(name).exists() else f"dataset {name}, split {options['split']}"]


def _split(data: ConditionedSequences, wanted: int | None) -> tuple[Any, Any]:
    """Keep evenly spaced sequences for evaluation; give the others and these."""
    count = min(int(_EVAL_SHARE * len(data)), _EVAL_MOST) if wanted is None else wanted
    if count >= len(data):
        raise ValueError(f"--eval-sequences must be below the {len(data)} sequences there are, got {count}.")
    kept = {(2 * place + 1) * len(data) // (2 * count) for place in range(count)}
    return _subset(data, [index for index in range(len(data)) if index not in kept]), _subset(data, sorted(kept))


def _subset(data: ConditionedSequences, indices: list[int]) -> Any:
    """Some of the sequences, which say who they are."""
    part: Any = Subset(data, indices)
    part.fingerprint, part.source = f"{data.fingerprint} {seed_of(indices)}", data.source
    return part


def _head(options: Mapping[str, Any], loaded: LoadedTarget, seed: int) -> LanternDraftModel | None:
    """The head to start from; None is a new one of the default shape."""
    shape = {"num_hidden_layers": options["head_layers"], "intermediate_size": options["head_intermediate"]}
    given = {name: value for name, value in shape.items() if value is not None}
    if options["init_head"] is not None:
        if given:
            raise ValueError("--init-head has a shape of its own. Leave out --head-layers and --head-intermediate.")
        return LanternDraftModel.from_pretrained(options["init_head"])
    if not given:
        return None
    with seeded(torch.device("cpu"), seed, "head"):
        return LanternDraftModel.for_target(loaded.target, dtype=torch.float32, **given)


def _show(folder: Path, head: LanternDraftModel) -> None:
    """Say how good the head is and where it lies."""
    console = Console(highlight=False)
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    last = next((line for line in reversed(log) if "eval_tokens_per_pass" in line), None)
    if last is not None:
        depths = [
            f"{last[name]:.2f}"
            for name in ("eval_overlap", *(f"eval_overlap_{d}" for d in range(2, 6)))
            if name in last
        ]
        figure = f"{last['eval_tokens_per_pass']:.2f} tokens a pass (strict)"
        text = f"Evaluation: {figure}, sum min(p, q) by depth {' '.join(depths)}."
        console.print(text, markup=False, soft_wrap=True)
    millions = sum(parameter.numel() for parameter in head.parameters()) / 1e6
    console.print(f"Saved the head ({millions:.2f}M weights) to {folder}", markup=False, soft_wrap=True)
