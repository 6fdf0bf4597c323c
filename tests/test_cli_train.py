"""`lantern-hf distil` and `lantern-hf train`: in process, and on two processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_line import call, check_refused
from conftest import tiny_llama
from pipelines import tiny_tokenizer
from safetensors.torch import load_file
from tiny import read_log

from lantern_hf import LanternDraftModel, LanternPipeline
from lantern_hf.training import read_rows


def write_tokens(path: Path, rows: int = 12) -> Path:
    """Rows of prompts and random tokens."""
    generator = torch.Generator().manual_seed(0)
    prompts = ("red fox", "a blue bird", "fox")
    lines = [
        {"prompt": prompts[row % 3], "tokens": torch.randint(0, 24, (10,), generator=generator).tolist()}
        for row in range(rows)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_from_prompts_to_a_head_that_draws(model: str, work: Path) -> None:
    (work / "prompts.txt").write_text("red fox\nblue bird\na fox\n")
    made = ("--output-dir", "sequences", "--sequences-per-prompt", 2, "--shard-size", 4)
    result = call("distil", "--model", model, "--prompts", "prompts.txt", *made)
    assert result.exit_code == 0, result.stderr
    assert "6 sequences in 2 shards in sequences" in result.stdout
    rows = read_rows(work / "sequences")
    assert [len(row["tokens"]) for row in rows] == [64] * 6
    settings = json.loads((work / "sequences/manifest.json").read_text())["settings"]
    assert (settings["guidance_scale"], settings["top_k"]) == (2.0, 0)  # the pipeline's own
    options = ("--steps", 3, "--batch-size", 2, "--eval-sequences", 2, "--guidance-scale", 2, "--ema-decay", 0.9)
    result = call("train", "--model", model, "--data", "sequences", *options, "--feature-cache", "cache")
    assert result.exit_code == 0, result.stderr
    assert "tokens a pass (strict), sum min(p, q) by depth" in result.stdout
    assert "Saved the head" in result.stdout
    lines = read_log(work / "runs/head")
    assert [line["step"] for line in lines] == [3, 3]
    assert lines[1]["eval_tokens_per_pass"] >= 1
    assert len(list((work / "cache").glob("shard-*.safetensors"))) == 1
    head = LanternDraftModel.from_pretrained(work / "runs/head")
    pipe = LanternPipeline.from_pretrained(model, draft_head=head)
    pipe.set_progress_bar_config(disable=True)
    assert pipe("red fox").images[0].size == (16, 16)


def test_every_setting_reaches_the_training(model: str, work: Path) -> None:
    write_tokens(work / "tokens.jsonl")
    named = {
        "--steps": 2, "--batch-size": 3, "--gradient-accumulation": 2, "--lr": 0.01, "--warmup-steps": 1,
        "--schedule": "linear", "--weight-decay": 0.1, "--max-grad-norm": 2.0, "--feature-loss-weight": 0.5,
        "--distribution-loss-weight": 0.7, "--feature-noise": 0.05, "--guidance-dropout": 0.2, "--unroll-steps": 2,
        "--unroll-decay": 0.5, "--seed": 7, "--save-every": 1, "--log-every": 1, "--keep-checkpoints": 3,
        "--tree": "narrow_8", "--mixed-precision": "bf16",
    }  # fmt: skip
    flat = [part for pair in named.items() for part in pair]
    shape = ("--head-layers", 2, "--head-intermediate", 24, "--eval-sequences", 0, "--output-dir", "out")
    result = call("train", "--model", model, "--data", "tokens.jsonl", *flat, *shape)
    assert result.exit_code == 0, result.stderr
    state = torch.load(work / "out/checkpoints/step-00000002/training_state.pt", weights_only=True)
    for option, value in named.items():
        assert state["config"][option.removeprefix("--").replace("-", "_")] == value, option
    head = LanternDraftModel.from_pretrained(work / "out")
    assert (head.config.num_hidden_layers, head.config.intermediate_size) == (2, 24)
    again = call("train", "--model", model, "--data", "tokens.jsonl", *flat, *shape, "--steps", 3)
    assert again.exit_code == 0, again.stderr
    assert [line["step"] for line in read_log(work / "out")] == [1, 2, 3]  # it went on


def test_a_transformers_model(work: Path) -> None:
    tiny_llama().save_pretrained("llama")
    tiny_tokenizer().save_pretrained("llama")
    write_tokens(work / "tokens.jsonl")
    result = call("train", "--model", "./llama", "--data", "tokens.jsonl", "--steps", 1, "--device-map", "cpu")
    assert result.exit_code == 0, result.stderr
    assert LanternDraftModel.from_pretrained(work / "runs/head").config.target_model_type == "llama"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("train", (), "--data (files or folders) or --dataset"),
        ("train", ("--data", "tokens.jsonl", "--dataset", "x/y"), "one of them"),
        ("train", ("--data", "gone.jsonl"), "gone.jsonl does not exist"),
        ("train", ("--data", "file"), "line 1: not JSON"),
        ("train", ("--data", "tokens.jsonl", "--lr", "-1"), "`lr` must be positive"),
        ("train", ("--data", "tokens.jsonl", "--steps", "2", "--epochs", "1"), "Exactly one of"),
        ("train", ("--data", "tokens.jsonl", "--eval-sequences", "12"), "below the 12 sequences"),
        ("train", ("--data", "tokens.jsonl", "--num-workers", "2"), "--num-workers must be 0"),
        ("train", ("--data", "tokens.jsonl", "--output-dir", "file"), "is a file"),
        ("train", ("--data", "tokens.jsonl", "--device-map", "auto"), "--device-map spreads transformers models"),
        ("train", ("--data", "tokens.jsonl", "--init-head", "x", "--head-layers", "2"), "a shape of its own"),
        ("train", ("--data", "tokens.jsonl", "--device", "nope"), "--device 'nope' cannot be used"),
        ("train", ("--data", "tokens.jsonl", "--model", "./nowhere"), "does not exist"),
        ("distil", (), "Missing option"),
        ("distil", ("--prompts", "gone.txt"), "gone.txt do not exist"),
        ("distil", ("--prompts", "file", "--top-p", "0"), "`top_p` must be"),
        ("distil", ("--prompts", "file", "--output-dir", "file"), "is a file"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    model: str, work: Path, command: str, arguments: tuple[str, ...], message: str
) -> None:
    write_tokens(work / "tokens.jsonl")
    (work / "file").write_text("x")
    named = () if "--model" in arguments else ("--model", model)
    result = call(command, *arguments, *named)
    check_refused(result, message)
    assert sorted(path.name for path in work.iterdir()) == ["file", "tokens.jsonl"]


def test_a_tracker_that_is_missing(model: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(work / "tokens.jsonl")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = call("train", "--model", model, "--data", "tokens.jsonl", "--tracker", "tensorboard")
    assert "pip install 'lantern_hf[tensorboard]'" in result.stderr


def test_two_processes_give_the_head_of_one(model: str, work: Path) -> None:
    """gloo on the CPU, half the batch each, with noise, dropped prompts and an average of the weights."""
    write_tokens(work / "tokens.jsonl")
    options = ["train", "--model", model, "--data", "tokens.jsonl", "--steps", 6, "--lr", 0.01, "--ema-decay", 0.9]
    options += [
        "--guidance-dropout",
        0.4,
        "--log-every",
        1,
        "--save-every",
        3,
        "--device",
        "cpu",
        "--eval-sequences",
        2,
    ]
    one = call(*options, "--batch-size", 4, "--output-dir", "one")
    assert one.exit_code == 0, one.stderr
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launch += ["-m", "lantern_hf.cli", *map(str, options), "--batch-size", "2"]
    two = subprocess.run(
        [*launch, "--output-dir", "two"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert two.returncode == 0, two.stderr[-3000:]
    logs = read_log(work / "one"), read_log(work / "two")
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    for line, other in zip(*logs, strict=True):
        for name in line.keys() - {"seconds", "step", "eval_tree"}:
            assert other[name] == pytest.approx(line[name], rel=0.01, abs=1e-4), (line["step"], name)
    weights = load_file(work / "one/model.safetensors"), load_file(work / "two/model.safetensors")
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=2e-4, rtol=1e-3)
    assert two.stdout.count("Saved the head") == 1
