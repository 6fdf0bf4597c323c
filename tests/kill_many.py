"""Kills `generate_many` at every file system event, on one process and on two, and looks at what is left; not a test
itself.

python tests/kill_many.py FOLDER

Processes are forked from this one, which has loaded everything; two of them find each other as those of a launcher do.
Prints one line of JSON for each trial.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from kill_driver import child, finish
from pipelines import tiny_class_pipeline
from transformers.utils import logging

from lantern_hf import generate_many
from lantern_hf._files import digest_file
from lantern_hf._processes import MainProcessError

PIPE = tiny_class_pipeline()
PROMPTS = [str(label) for label in range(3)]


def draw(folder: Path, prompts: list[str] = PROMPTS) -> None:
    """Two batches, of two pictures and of one."""
    generate_many(PIPE, prompts, folder, batch_size=2, guidance_scale=1.0)


def pictures(folder: Path) -> dict[str, str]:
    """Hash of each picture there."""
    return {path.name: digest_file(path) for path in sorted(folder.glob("[!.]*.png"))}


def lines(folder: Path) -> list[dict[str, Any]]:
    """Whole lines of all manifests there."""
    whole = [line for path in folder.glob("manifest*.jsonl") for line in path.read_text().split("\n")[:-1]]
    return [json.loads(line) for line in whole]


def look(folder: Path, expected: dict[str, str]) -> dict[str, Any]:
    """Look at what a kill left, run to the end, look again."""
    known = {line["file"]: line["sha256"] for line in lines(folder)}
    broken = [name for name, digest in pictures(folder).items() if known.get(name) != digest]
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*.png")}
    report = generate_many(PIPE, PROMPTS, folder, batch_size=2, guidance_scale=1.0)
    touched = [name for name, time in kept.items() if (folder / name).stat().st_mtime_ns != time]
    return {
        "broken": broken,
        "touched": touched,
        "redone": report.drawn - (len(PROMPTS) - len(known)),
        "same": pictures(folder) == expected == {line["file"]: line["sha256"] for line in lines(folder)},
        "each_once": len(lines(folder)) == len(PROMPTS),
        "left": sorted({path.name for path in folder.iterdir()} - expected.keys()),
    }


def ranked(rank: int, port: int, outcome: Path, folder: Path, prompts: list[str] = PROMPTS) -> None:
    """Work as one of two processes, and write down how it ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    PartialState._reset_state()
    try:
        draw(folder, prompts)
    except (ValueError, MainProcessError) as error:
        outcome.write_text(f"{type(error).__name__}: {error}")
        return
    outcome.write_text("done")


def two(folder: Path, killed: int = 0, kill_at: int | None = None, **kwargs: Any) -> list[str]:
    """Run two processes, of which one may kill itself; the other is then ended, as a launcher does. How they ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outcomes = [folder.parent / f"{folder.name}.{rank}" for rank in (0, 1)]
    works = [partial(ranked, rank, port, outcomes[rank], **kwargs) for rank in (0, 1)]
    pids = [child(work, folder, kill_at if rank == killed else None) for rank, work in enumerate(works)]
    if finish(pids[killed]):
        os.kill(pids[1 - killed], signal.SIGKILL)
        os.waitpid(pids[1 - killed], 0)  # it may have failed before, missing the other
    else:
        finish(pids[1 - killed])
    return [outcome.read_text() if outcome.exists() else "killed" for outcome in outcomes]


def say(**values: Any) -> None:
    """Print a line."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main(root: Path) -> None:
    """Run all trials."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    whole = root / "whole"
    finish(child(draw, whole))
    events = int((root / "whole.events").read_text())
    expected = pictures(whole)
    say(work="whole", files=sorted(expected), events=events)
    for kill_at in range(1, events + 1):
        folder = root / f"one-{kill_at}"
        killed = finish(child(draw, folder, kill_at))
        say(work="one", kill_at=kill_at, killed=killed, **look(folder, expected))
    for rank, kill_at in ((0, 6), (0, 12), (1, 3), (1, 8), (1, 10)):
        folder = root / f"two-{rank}-{kill_at}"
        ends = two(folder, rank, kill_at)
        say(work="two", kill_at=[rank, kill_at], killed=ends[rank] == "killed", **look(folder, expected))
    folder = root / "together"
    say(work="together", ends=two(folder), **look(folder, expected))
    say(work="refused", ends=two(root / "refused", prompts=["0", "fox"]), there=(root / "refused").exists())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
