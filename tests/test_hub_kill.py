"""SIGKILL at random moments of a push and of a save: local files stay whole, the repository is whole or unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import NUM_CODES, tiny_head, tiny_llamagen
from fake_hub import CLIENT_WARNING, TOKEN, FakeHub, FakeRepo, connect
from hub_server import serve

import lantern_hf
from lantern_hf import LanternDraftModel, NeighborTable

pytestmark = CLIENT_WARNING

KILLS = 6

# One process that imports everything once, then forks a child for each run and kills it at a random moment of the time
# that an undisturbed run takes.
PARENT = """
import json, os, random, signal, sys, time, warnings
warnings.simplefilter("ignore")
import torch
torch.set_num_threads(1)
from huggingface_hub import constants, set_client_factory
from huggingface_hub.utils import httpx
from lantern_hf import LanternDraftModel
from lantern_hf.hub import CardDetails, push_folder

class ToTheEndpoint(httpx.HTTPTransport):  # older clients check a card at huggingface.co whatever the endpoint
    def handle_request(self, request):
        place = httpx.URL(constants.ENDPOINT)
        request.url = request.url.copy_with(scheme=place.scheme, host=place.host, port=place.port)
        return super().handle_request(request)

set_client_factory(lambda: httpx.Client(transport=ToTheEndpoint(), follow_redirects=True))
what, folder, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
head = LanternDraftModel.from_pretrained(folder)

def work(number):
    if what == "push":
        push_folder(folder, "me/head", card=CardDetails(training_data=f"run {number}"))
    else:
        with torch.no_grad():
            head.fc.weight.fill_(float(number))
        head.config.hidden_act = "relu"
        head.save_pretrained(folder)

def run(number, seconds):
    child = os.fork()
    if child == 0:
        work(number)
        os._exit(0)
    if seconds is None:
        assert os.waitpid(child, 0)[1] == 0
        return
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

start = time.perf_counter()
run(0, None)
taken = time.perf_counter() - start
random.seed(1)
for number in range(1, kills + 1):
    run(number, random.uniform(0, taken))
    print(json.dumps(number), flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A head with its table."""
    head = tiny_head(tiny_llamagen())
    codebook = torch.randn(NUM_CODES, 4, generator=torch.Generator().manual_seed(0))
    head.neighbors = NeighborTable.from_codebook(codebook, 4)
    head.save_pretrained(tmp_path / "head")
    return tmp_path / "head"


def runs(what: str, folder: Path, **env: str) -> Iterator[int]:
    """Number of each run, after it was killed and before the next begins."""
    env |= {"PYTHONPATH": str(Path(lantern_hf.__file__).parent.parent)}
    command: list[Any] = [sys.executable, "-c", PARENT, what, folder, str(KILLS)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | env, text=True, **pipes) as process:
        for _ in range(KILLS):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            yield json.loads(line)
            process.stdin.write("\n")
            process.stdin.flush()
    assert process.returncode == 0


def test_killed_pushes(folder: Path, tmp_path: Path) -> None:
    hub = FakeHub()
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with serve(hub) as endpoint:
        env = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        for number in runs("push", folder, HF_HOME=str(tmp_path / "home"), **env):
            assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
            repo: FakeRepo = hub.repos["me/head"]
            assert len(repo.log) <= 2 + number
            for files in list(repo.commits.values())[1:]:  # after the one that made the repository
                assert files["model.safetensors"] == before["model.safetensors"]
                assert files["neighbors.safetensors"] == before["neighbors.safetensors"]
                assert {"README.md", "config.json", "custom_generate/generate.py"} < files.keys()


def test_what_killed_pushes_left_can_be_pulled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with the client in this process: every request of a push in turn is the last one."""
    with connect(monkeypatch, tmp_path / "cache") as hub:
        head = LanternDraftModel.from_pretrained(folder)
        head.push_to_hub("me/head")
        count = len(hub.requests)
        for last in range(1, count + 1):
            with torch.no_grad():
                head.fc.bias.fill_(float(last))
            left = [last]

            def stop(request: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt

            hub.faults.append(stop)
            with contextlib.suppress(KeyboardInterrupt):
                head.push_to_hub("me/head")
            hub.faults.clear()
            loaded = LanternDraftModel.from_pretrained("me/head")
            assert len(set(loaded.fc.bias.tolist())) in (1, 32)
            assert loaded.neighbors.k == 4


def test_killed_saves(folder: Path) -> None:
    for number in runs("save", folder):
        head = LanternDraftModel.from_pretrained(folder)
        value = set(head.fc.weight.flatten().tolist())
        assert len(value) == 1
        assert value <= {float(earlier) for earlier in range(number + 1)}
        assert head.config.hidden_act == "relu"
        assert head.neighbors.k == 4
    assert not [file for file in folder.iterdir() if file.suffix == ".tmp"]
