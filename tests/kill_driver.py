"""Kills trainings, feature caching and self-distillation with SIGKILL and looks at what is left; not a test itself.

python tests/kill_driver.py FOLDER

Children are forked from one process with one thread. Three of five children kill themselves at a seeded number of file
system events (before the event happens, as audit hooks see them), two are killed from outside at a seeded share of the
time that an undisturbed child takes. Each is then run to its end and compared with the undisturbed one. Prints one line
of JSON for each trial.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from pipelines import tiny_pipeline
from safetensors.torch import load_file
from tiny import random_data
from transformers.utils import logging

from lantern_hf._files import digest_file
from lantern_hf.training import DistilConfig, FeatureCache, PipelineConditioner, TrainingConfig, self_distil, train_head

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
PIPE = tiny_pipeline()
TARGET = PIPE.transformer
DATA = random_data(TARGET)
SETTINGS = {"batch_size": 4, "lr": 3e-3, "schedule": "constant", "log_every": 1, "save_every": 1, "ema_decay": 0.9}


def train(folder: Path) -> None:
    """Four steps, a checkpoint after each."""
    train_head(TARGET, DATA, TrainingConfig(steps=4, **SETTINGS), output_dir=folder)


def cache(folder: Path) -> None:
    """Fill a cache of 8 shards, and train a step on it."""
    features = FeatureCache(folder / "cache", shard_bytes=1)
    train_head(TARGET, DATA, TrainingConfig(steps=1, **SETTINGS), output_dir=folder, feature_cache=features)


def distil(folder: Path) -> None:
    """Generate 5 shards of two sequences."""
    prompts = [{"prompt": "red fox"}, {"prompt": "a blue bird"}]
    config = DistilConfig(sequences_per_prompt=5, guidance_scale=2.0, max_new_tokens=6, batch_size=1, shard_size=2)
    self_distil(PipelineConditioner(PIPE), prompts, folder, config)


def child(work: Callable[[Path], None], folder: Path, kill_at: int | None = None) -> int:
    """Fork a child that works, and kills itself at an event."""
    if pid := os.fork():
        return pid
    try:
        seen = [0]

        def watch(event: str, arguments: tuple) -> None:
            if event in EVENTS and str(folder) in str(arguments[0]):
                seen[0] += 1
                if seen[0] == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work(folder)
        if kill_at is None:
            (folder.parent / f"{folder.name}.events").write_text(str(seen[0]))
    except BaseException:  # noqa: BLE001  a child must never run on as a second parent
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def finish(pid: int) -> bool:
    """Wait for a child; whether it was killed."""
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status) == signal.SIGKILL
    assert os.WEXITSTATUS(status) == 0, "a child failed"
    return False


def broken(folder: Path) -> list[str]:
    """Files under a final name that cannot be read."""
    found = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_dir() or any(part.startswith(".") for part in parts) or path.suffix == ".sha256":
            continue
        try:
            if path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".pt":
                torch.load(path, weights_only=True)
            elif path.suffix == ".jsonl":
                [json.loads(line) for line in path.read_text().splitlines()]
            elif path.suffix == ".json":
                json.loads(path.read_text())
            if path.name.startswith("shard-"):
                assert Path(f"{path}.sha256").read_text().split()[0] == digest_file(path)
        except Exception as error:  # noqa: BLE001  whatever reading raises, it is broken
            found.append(f"{path}: {error}")
    return found


def results(folder: Path) -> dict[str, object]:
    """What a run comes to: every shard and every weight of the saved head."""
    shards = {path.name: digest_file(path) for path in sorted(folder.rglob("shard-*")) if path.suffix != ".sha256"}
    head = folder / "model.safetensors"
    return shards | ({"head": digest_file(head)} if head.exists() else {})


def main(root: Path) -> None:
    """Run all trials."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rng = random.Random(0)
    for work in (train, cache, distil):
        undisturbed = root / f"{work.__name__}-whole"
        start = time.perf_counter()
        finish(child(work, undisturbed))
        seconds = time.perf_counter() - start
        events = int((root / f"{undisturbed.name}.events").read_text())
        expected = results(undisturbed)
        for trial in range(5):
            folder = root / f"{work.__name__}-{trial}"
            if trial < 3:
                killed = finish(child(work, folder, rng.randrange(1, events + 1)))
            else:
                pid = child(work, folder)
                time.sleep(rng.random() * seconds)
                os.kill(pid, signal.SIGKILL)
                killed = finish(pid)
            left = broken(folder)
            finish(child(work, folder))
            same = results(folder) == expected and not broken(folder) and not list(folder.rglob(".*tmp"))
            line = {"work": work.__name__, "trial": trial, "killed": killed, "broken": left, "same": same}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
