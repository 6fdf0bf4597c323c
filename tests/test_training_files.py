"""Files of a training: whole or not there, whatever happens while they are written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import tiny_llamagen
from tiny import STEPS, random_data, same_weights

from lantern_hf import LanternDraftModel
from lantern_hf._files import write_whole
from lantern_hf.training import FeatureCache, TrainingConfig, train_head
from lantern_hf.training.storage import ShardStore


def test_a_crash_while_saving_leaves_the_last_checkpoint_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=4, save_every=2, keep_checkpoints=1, **STEPS)
    whole = train_head(target, data, config).state_dict()
    replace = os.replace

    def killed(source, destination, **kwargs) -> None:
        if str(destination).endswith("step-00000004"):
            raise KeyboardInterrupt
        replace(source, destination, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            train_head(target, data, config, output_dir=tmp_path)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [".step-00000004.tmp", "step-00000002"]
    resumed = train_head(target, data, config, output_dir=tmp_path)
    assert same_weights(resumed.state_dict(), whole)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=2, save_every=1, **STEPS)
    first = train_head(target, data, config, output_dir=tmp_path).state_dict()
    damaged = tmp_path / "checkpoints/step-00000002/training_state.pt"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    second = train_head(target, data, config, output_dir=tmp_path).state_dict()
    assert same_weights(first, second)


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Let no file grow past `limit` bytes, as on a disk that is full: the write fails with an error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_with_a_clear_error_and_the_last_good_checkpoint(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data = random_data(target)
    whole = train_head(target, data, TrainingConfig(steps=2, schedule="constant", **STEPS)).state_dict()
    train_head(target, data, TrainingConfig(steps=1, schedule="constant", **STEPS), output_dir=tmp_path)
    config = TrainingConfig(steps=2, schedule="constant", save_every=1, **STEPS)
    with small_files(20_000), pytest.raises(OSError, match="could not be written: .*The last good .*step-00000001"):
        train_head(target, data, config, output_dir=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert LanternDraftModel.from_pretrained(tmp_path).config.hidden_size == 32  # the first run's
    assert same_weights(train_head(target, data, config, output_dir=tmp_path).state_dict(), whole)


def test_a_full_disk_while_caching_features(tmp_path: Path) -> None:
    target = tiny_llamagen()
    data, config = random_data(target), TrainingConfig(steps=2, **STEPS)
    with small_files(2_000), pytest.raises(OSError, match="could not be written: .*lower `max_bytes`"):
        train_head(target, data, config, feature_cache=FeatureCache(tmp_path / "cache"))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["manifest.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    target = tiny_llamagen()
    with pytest.raises(
        OSError, match="could not be written: Not a directory. Make room, or choose another `output_dir`"
    ):
        train_head(
            target,
            random_data(target),
            TrainingConfig(steps=1, **STEPS | {"log_every": 9}),
            output_dir=tmp_path / "file/x",
        )


def test_shards_are_checked_and_told_apart(tmp_path: Path) -> None:
    store = ShardStore(tmp_path, ".txt", {"of": "letters"})
    store.begin()
    for index in range(2):
        store.write(index, lambda path, index=index: path.write_text("abc" * (index + 1)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "manifest.json",
        "shard-00000.txt",
        "shard-00000.txt.sha256",
        "shard-00001.txt",
        "shard-00001.txt.sha256",
    ]
    assert store.bytes_used() == 9
    store.path(1).write_text("abcabd")
    again = ShardStore(tmp_path, ".txt", {"of": "digits"})
    assert (again.is_whole(0), again.is_whole(1), again.is_damaged(1), again.is_damaged(2)) == (
        True,
        False,
        True,
        False,
    )
    assert again.differences() == ["`of` letters -> digits"]
    (tmp_path / "manifest.json").write_text("{")
    assert again.differences() == ["`manifest.json` cannot be read"]
    (tmp_path / "manifest.json").unlink()
    assert again.differences() == ["`manifest.json` is missing"]
    (tmp_path / "notes.md").touch()
    again.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.md"]
    assert again.differences() == []


def test_a_file_is_whole_or_the_old_one(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    write_whole(tmp_path / "a", lambda path: path.write_text("old"))
    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "a", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]


def test_killed_at_random_moments_nothing_is_broken_or_lost(tmp_path: Path) -> None:
    """Training, feature caching and self-distillation, each killed at 5 moments; see the driver."""
    driver = Path(__file__).parent / "kill_driver.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, driver, tmp_path], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    trials = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(trials) == 15
    assert [trial for trial in trials if trial["broken"] or not trial["same"]] == []
    assert all(trial["killed"] for trial in trials if trial["trial"] < 3)  # the others race with the clock
