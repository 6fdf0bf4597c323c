"""Conversions that are killed, and conversions of large files: nothing broken, nothing large in memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from published import folder, foundation, golden, golden_config, training_file
from safetensors.torch import load_file, save_file

from lantern_hf import LlamaGenForConditionalGeneration
from lantern_hf.convert import convert
from lantern_hf.convert.folders import new_folder
from lantern_hf.convert.writer import ShardWriter, Slot

KILL = """
import os, random, shutil, signal, sys
from pathlib import Path

import lantern_hf.convert
from lantern_hf.convert import convert

source, out = sys.argv[1:]
home = str(Path(lantern_hf.convert.__file__).parent)


def run(out, limit=None):
    # Kills itself before line number `limit` of the conversion; gives the number of lines.
    lines = 0

    def at_line(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        if lines == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return at_line

    sys.settrace(lambda frame, *_: at_line if frame.f_code.co_filename.startswith(home) else None)
    convert(source, out, grid=4, num_attention_heads=4, prefix_length=6, max_shard_size="100KB")
    sys.settrace(None)
    return lines


total = run(out + "-whole")
for moment in random.Random(0).sample(range(1, total), 5):
    child = os.fork()
    if child == 0:
        run(out, moment)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    state = "absent"
    if Path(out).exists():
        whole = [(path.name, path.read_bytes()) for path in sorted(Path(out + "-whole").iterdir())]
        found = [(path.name, path.read_bytes()) for path in sorted(Path(out).iterdir())]
        state = "whole" if found == whole else "broken"
        shutil.rmtree(out)
    print(os.WTERMSIG(status), state)
"""

# The kernel's own peak, of this program alone: getrusage also remembers what started it.
MEASURE = """
import re, sys

from lantern_hf.convert import convert

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(name + r":\\s+(\\d+) kB", file.read())[1]) * 1024

small, large, out = sys.argv[1:]
convert(small, out + "-small")  # whatever is loaded once is loaded now
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # forget the peak so far
before = status("VmRSS")
convert(large, out)
print(status("VmHWM") - before)
"""


def python(code: str, *arguments: Path) -> list[str]:
    """Run a script in a process of its own, on one thread so that it may fork; gives its lines."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


def test_killed_at_five_moments(tmp_path: Path) -> None:
    weights = golden("llamagen_target")
    source = training_file(tmp_path / "t2i.pt", foundation(weights))
    results = [line.split() for line in python(KILL, source, tmp_path / "out")]
    assert len(results) == 5
    assert {signal for signal, _ in results} == {"9"}
    assert {state for _, state in results} <= {"absent", "whole"}
    assert ["9", "absent"] in results
    convert(source, tmp_path / "out", grid=4, num_attention_heads=4, prefix_length=6, max_shard_size="100KB")
    assert not list(tmp_path.glob(".*"))
    first, second = tmp_path / "out-whole", tmp_path / "out"
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    assert all((second / path.name).read_bytes() == path.read_bytes() for path in first.iterdir())
    LlamaGenForConditionalGeneration.from_pretrained(second)


def large_target(path: Path, form: str) -> Path:
    """LlamaGen in three files of up to 80 MB, with B's width."""
    width, inner = 768, 2048
    shapes = {
        "model.embed_tokens.weight": (4096, width),
        "lm_head.weight": (4096, width),
        "model.norm.weight": (width,),
    }
    shapes["model.cls_embedding.embedding_table.weight"] = (11, width)
    for index in range(6):
        layer = f"model.layers.{index}."
        shapes |= {f"{layer}self_attn.{name}_proj.weight": (width, width) for name in "qkvo"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (width, inner)}
        shapes |= {f"{layer}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    weights = {key: torch.full(shape, 0.01) for key, shape in shapes.items()}
    folder(path, weights, {"block_size": 256}, form)
    return path


@pytest.mark.parametrize("form", ["sharded safetensors", "sharded bin"])
def test_memory_stays_at_the_largest_file(form: str, tmp_path: Path) -> None:
    large = large_target(tmp_path / "large", form)
    small = folder(tmp_path / "small", golden("llamagen_target"), golden_config("llamagen_target"), form)
    largest = max(file.stat().st_size for file in large.iterdir())
    assert 55e6 < largest < 85e6
    (growth,) = map(int, python(MEASURE, small, large, tmp_path / "out"))
    assert growth < 1.3 * largest
    assert sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors")) > 2.9 * 55e6


def fill(out: Path, meanwhile: Callable[[], None]) -> None:
    """Make a folder while something happens."""
    with new_folder(out) as partial:
        (partial / "mine").write_bytes(b"mine")
        meanwhile()


def come_in_between(out: Path) -> None:
    """Take a place that was free."""
    out.mkdir()
    (out / "theirs").touch()


def fail() -> None:
    """Run out of disk."""
    raise OSError("no space")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"):
        fill(tmp_path / "out", fail)
    assert not list(tmp_path.iterdir())


def test_someone_who_came_in_between_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not empty|exists"):
        fill(tmp_path / "out", partial(come_in_between, tmp_path / "out"))
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "theirs"]


def test_two_at_once_do_not_take_each_other_for_orphans(tmp_path: Path) -> None:
    def inner() -> None:
        with pytest.raises(OSError, match="not empty|exists"):
            fill(tmp_path / "out", partial(come_in_between, tmp_path / "out"))
        (tmp_path / "out" / "theirs").unlink()

    fill(tmp_path / "out", inner)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_a_gap_is_loud(dtype: torch.dtype, tmp_path: Path) -> None:
    slots = [Slot("a", (3, 2), dtype), Slot("b", (2, 2), dtype)]
    writer = ShardWriter(tmp_path / "x.safetensors", slots)
    writer.write(slots[0], torch.ones(3, 2, dtype=dtype))
    with pytest.raises(RuntimeError, match="`b` was not written in full"):
        writer.close()
    found = load_file(tmp_path / "x.safetensors")
    assert bool(found["b"].isnan().all())
    assert bool((found["a"] == 1).all())


def test_the_writer_writes_what_the_library_does(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(5, 3), "a.weight": torch.randn(4), "c": torch.randn(2, 2, 3, 3)}
    save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    slots = [Slot(key, tuple(tensors[key].shape), torch.float32) for key in sorted(tensors)]  # the library's order
    writer = ShardWriter(tmp_path / "ours.safetensors", slots)
    for slot in slots:
        for rows in tensors[slot.name].split(2):
            writer.write(slot, rows)
    writer.close()
    assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
