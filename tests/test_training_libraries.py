"""Training with the libraries people have beside it, for real: `datasets`, and tensorboard through accelerate."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import Accelerator
from conftest import tiny_llama, tiny_llamagen
from pipelines import tiny_pipeline, tiny_tokenizer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import STEPS, random_data, read_log, same_weights
from typer.testing import CliRunner

from lantern_hf import LanternDraftModel
from lantern_hf.cli import app
from lantern_hf.training import (
    ConditionedSequences,
    FeatureCache,
    PipelineConditioner,
    TrainingConfig,
    load_dataset_rows,
    read_rows,
    train_head,
)
from lantern_hf.training.fingerprint import data_fingerprint

CONFIG = TrainingConfig(steps=3, **STEPS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`datasets` keeps what it read in the test's folder, and shows no bars."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets-cache")
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def token_rows(rows: int = 8) -> list[dict]:
    """Prompts of two lengths and random tokens, as plain lists."""
    draw = np.random.default_rng(0)
    return [{"input_ids": [5, 6, 7][: 2 + row % 2], "tokens": draw.integers(1, 40, 10).tolist()} for row in range(rows)]


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_dataset_trains_the_head_that_its_rows_train(tmp_path: Path) -> None:
    """As `train_head` takes it: in memory, saved to disk, and with processes that load it."""
    target, rows = tiny_llama(), token_rows()
    expected = train_head(target, ConditionedSequences(rows), CONFIG).state_dict()
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(tmp_path / "saved")
    for given in (data, data.with_format("torch"), datasets.load_from_disk(tmp_path / "saved")):
        cache = FeatureCache(tmp_path / "features", 10**6)
        assert same_weights(train_head(target, given, CONFIG, feature_cache=cache).state_dict(), expected)
    parallel = TrainingConfig(steps=3, num_workers=1, **STEPS)
    assert same_weights(train_head(target, data, parallel).state_dict(), expected)
    again = datasets.load_from_disk(tmp_path / "saved")
    assert data_fingerprint(again) == data_fingerprint(datasets.load_from_disk(tmp_path / "saved"))
    assert data_fingerprint(again) != data_fingerprint(again.map(lambda row: {"tokens": row["tokens"][::-1]}))


def test_the_command_reads_what_was_saved_and_what_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved set, a set of splits, a folder that `datasets` reads itself, and our own reading: the same head."""
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("llama")
    tiny_tokenizer().save_pretrained("llama")
    rows = [
        {"text": ("red fox", "a blue bird")[row % 2], "tokens": value["tokens"]}
        for row, value in enumerate(token_rows())
    ]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk("one")
    datasets.DatasetDict({"train": data.select(range(2)), "more": data}).save_to_disk("several")
    Path("lines").mkdir()
    write_lines(Path("lines/train.jsonl"), rows)
    own = write_lines(Path("own.jsonl"), [{"prompt": row["text"], "tokens": row["tokens"]} for row in rows])
    ways = {
        "own": ("--data", own),
        "one": ("--dataset", "one"),
        "several": ("--dataset", "several", "--split", "more"),
        "lines": ("--dataset", "lines", "--split", "train[:8]"),
    }
    heads = {}
    for name, data_options in ways.items():
        options = ("--steps", 2, "--batch-size", 4, "--eval-sequences", 2, "--output-dir", f"runs/{name}")
        arguments = ["train", "--model", "./llama", *data_options, *options]
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.stderr
        heads[name] = LanternDraftModel.from_pretrained(f"runs/{name}").state_dict()
    assert all(same_weights(head, heads["own"]) for head in heads.values())


def test_images_of_a_dataset_become_tokens(tmp_path: Path) -> None:
    pipe, draw, texts = tiny_pipeline(), np.random.default_rng(0), ("red fox", "blue bird", "fox")
    for index in range(3):
        PIL.Image.fromarray(draw.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    write_lines(tmp_path / "metadata.jsonl", [{"file_name": f"{i}.png", "text": text} for i, text in enumerate(texts)])
    conditioner = PipelineConditioner(pipe)
    expected = ConditionedSequences(read_rows(tmp_path), conditioner)
    rows = load_dataset_rows(str(tmp_path))
    assert sorted(rows.column_names) == ["image", "prompt"]
    data = ConditionedSequences(rows, conditioner)
    for item, other in zip(data.__getitems__([2, 0, 1]), expected.__getitems__([2, 0, 1]), strict=True):
        assert same_weights(item, other)
    head = train_head(pipe.transformer, data, TrainingConfig(steps=1, **STEPS))
    assert same_weights(
        head.state_dict(), train_head(pipe.transformer, expected, TrainingConfig(steps=1, **STEPS)).state_dict()
    )


def test_what_a_dataset_lacks_is_named(tmp_path: Path) -> None:
    data = datasets.Dataset.from_list([{"prompt": "fox", "sound": 1}])
    data.save_to_disk(tmp_path / "one")
    with pytest.raises(ValueError, match=r"has the columns \['prompt', 'sound'\].*one of tokens, image"):
        load_dataset_rows(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "several")
    for folder, split, found in (("one", "test", "'train'"), ("several", "train[:1]", "'train' and 'test'")):
        with pytest.raises(ValueError, match=rf"saved with the split {found}, so `split` cannot be"):
            load_dataset_rows(str(tmp_path / folder), split)


def test_tensorboard_is_told_every_number_of_the_log(tmp_path: Path) -> None:
    """Also those of a run that went on, read back with tensorboard's own reader."""
    target = tiny_llamagen()
    data = random_data(target)
    for steps in (2, 3):
        accelerator = Accelerator(log_with="tensorboard", project_dir=tmp_path)
        config = TrainingConfig(steps=steps, save_every=2, schedule="constant", warmup_steps=0, **STEPS)
        train_head(target, data, config, output_dir=tmp_path, eval_dataset=data, accelerator=accelerator)
        assert accelerator.trackers == []
    events = EventAccumulator(str(tmp_path / "lantern_draft_head")).Reload()
    told = {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}
    logged: dict[str, dict[int, float]] = {}
    for line in read_log(tmp_path):
        for name in line.keys() - {"step", "seconds", "eval_sequences", "eval_tree"}:
            logged.setdefault(name, {})[line["step"]] = line[name]
    assert {"loss", "overlap", "lr", "eval_tokens_per_pass", "eval_overlap_5", "eval_accepted_5"} <= logged.keys()
    assert sorted(logged["loss"]) == [1, 2, 3]
    assert sorted(logged["eval_overlap"]) == [2, 3]
    assert told.keys() == logged.keys()
    for name, values in logged.items():
        assert told[name] == pytest.approx(values, rel=1e-6)
    settings = next((tmp_path / "lantern_draft_head").rglob("hparams.yml")).read_text()
    assert "lr: 0.003" in settings


def test_the_command_writes_what_tensorboard_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_pipeline().save_pretrained("pipe")
    rows = [{"prompt": "red fox", "tokens": torch.randint(0, 24, (10,)).tolist()} for _ in range(6)]
    write_lines(tmp_path / "tokens.jsonl", rows)
    arguments = (
        "train --model pipe --data tokens.jsonl --steps 2 --log-every 1 --tracker tensorboard --eval-sequences 1"
    )
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 0, result.stderr
    events = EventAccumulator("runs/head/lantern_draft_head").Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert len(events.Scalars("eval_tokens_per_pass")) == 1
