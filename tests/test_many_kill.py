"""Many prompts on processes that are killed, and on those that `accelerate launch` starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import call

import lantern_hf

HERE = Path(__file__).parent


def run(*command: object) -> subprocess.CompletedProcess[str]:
    """Run a command of this Python with this package."""
    paths = os.pathsep.join([str(Path(lantern_hf.__file__).parent.parent), str(HERE)])
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=env, check=False)


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the driver saw."""
    result = run(HERE / "kill_many.py", tmp_path_factory.mktemp("kills"))
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


WHOLE = {"broken": [], "touched": [], "redone": 0, "same": True, "each_once": True, "left": ["manifest.jsonl"]}


def test_a_kill_at_every_event_loses_and_repeats_nothing(trials: list[dict[str, Any]]) -> None:
    assert trials[0]["files"] == ["00001.png", "00002.png", "00003.png"]
    one = [trial for trial in trials if trial["work"] == "one"]
    assert [trial["kill_at"] for trial in one] == list(range(1, trials[0]["events"] + 1))
    assert len(one) > 20
    for trial in one:
        assert trial["killed"], trial
        assert WHOLE.items() <= trial.items(), trial


def test_two_processes_of_which_one_is_killed(trials: list[dict[str, Any]]) -> None:
    pairs = [trial for trial in trials if trial["work"] == "two"]
    assert len(pairs) == 5
    for trial in pairs:
        assert trial["killed"], trial
        assert WHOLE.items() <= trial.items(), trial


def test_two_processes_draw_what_one_draws(trials: list[dict[str, Any]]) -> None:
    together = next(trial for trial in trials if trial["work"] == "together")
    assert together["ends"] == ["done", "done"]
    assert WHOLE.items() <= together.items(), together


def test_the_main_process_refuses_for_all(trials: list[dict[str, Any]]) -> None:
    refused = next(trial for trial in trials if trial["work"] == "refused")
    reason = "prompt 2: This model draws classes: a prompt must be the number of one, got 'fox'."
    assert refused["ends"] == [f"ValueError: {reason}", f"MainProcessError: {reason}"]
    assert not refused["there"]


def test_accelerate_launch_goes_on_where_another_run_stopped(model: str, work: Path) -> None:
    (work / "prompts.txt").write_text("red fox\n\nblue bird\na fox\nbird\n")
    options = ["generate", "--model", model, "--prompts", "prompts.txt", "--batch-size", 1, "--device", "cpu"]
    assert call(*options, "--out", "one").exit_code == 0
    whole = {path.name: path.read_bytes() for path in (work / "one").iterdir()}
    lines = whole.pop("manifest.jsonl").decode().splitlines(keepends=True)
    # As two processes leave it when they are killed: one behind its lines, one in the middle of a line.
    (work / "two").mkdir()
    (work / "two/manifest-00000.jsonl").write_text(lines[0])
    (work / "two/manifest-00001.jsonl").write_text(lines[1] + lines[2][:50])
    (work / "two/00001.png").write_bytes(whole["00001.png"])
    (work / "two/.00003.png.tmp").write_bytes(whole["00003.png"])
    (work / "two/.00004.png.tmp").write_bytes(whole["00004.png"][:50])
    launch = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--main_process_port", 0]
    two = run(*launch, "-m", "lantern_hf.cli", *options, "--out", "two", "--report", "report.json")
    assert two.returncode == 0, two.stderr[-3000:]
    assert two.stdout.startswith("4 images in two: 2 drawn now by 2 processes, 2 there before.\n")
    assert two.stdout.count("tokens a pass") == 1
    found = {path.name: path.read_bytes() for path in (work / "two").iterdir()}
    merged = [json.loads(line) for line in found.pop("manifest.jsonl").splitlines()]
    assert found == whole
    assert [entry["file"] for entry in merged] == sorted(whole)
    assert merged[:2] == [json.loads(line) for line in lines[:2]]
    report = json.loads((work / "report.json").read_text())
    assert (report["images"], report["drawn"], report["kept"], report["processes"]) == (4, 2, 2, 2)
    assert report["pictures"] == merged
