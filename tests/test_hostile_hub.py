"""Repositories that somebody malformed: refused before the download, or before what it holds is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import tiny_head, tiny_llamagen
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect
from pipelines import tiny_pipeline

from lantern_hf import LanternDraftModel, LanternPipeline
from lantern_hf.hub import pull_head

pytestmark = CLIENT_WARNING


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def edit(**changes: object) -> Callable[[dict[str, bytes]], None]:
    """Change values of the config."""

    def change(files: dict[str, bytes]) -> None:
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()

    return change


def put(name: str, content: bytes) -> Callable[[dict[str, bytes]], None]:
    """Put a file there."""
    return lambda files: files.__setitem__(name, content)


def shards(name: str) -> Callable[[dict[str, bytes]], None]:
    """Let an index name a file."""

    def change(files: dict[str, bytes]) -> None:
        files["model.safetensors.index.json"] = json.dumps({"weight_map": {"fc.weight": name}}).encode()
        del files["model.safetensors"]

    return change


def as_pickle(files: dict[str, bytes]) -> None:
    """Weights under a pickle's name."""
    files["pytorch_model.bin"] = files.pop("model.safetensors")


REPOSITORIES = {
    "a name that climbs out": (put("../../../.bashrc", b"x"), r"holds a file named '\.\./\.\./\.\./\.bashrc'", []),
    "a name from the root": (put("/etc/passwd", b"x"), "holds a file named '/etc/passwd'", []),
    "a name with a backslash": (put("..\\evil.json", b"x"), "leads out of its folder", []),
    "a large config": (put("config.json", b" " * 2**21), "2,097,152 bytes, where at most 1,048,576 make sense", []),
    "weights larger than the config implies": (
        put("model.safetensors", bytes(3 * 2**20)),
        "bytes, where at most .* make sense",
        ["config.json"],
    ),
    "a config that implies terabytes": (edit(hidden_size=10**9), "`hidden_size` must be", ["config.json"]),
    "a config of another model": (edit(model_type="llama"), "`model_type` is 'llama'", ["config.json"]),
    "shards that climb out": (
        shards("../../../etc/passwd"),
        "names the file",
        ["config.json", "model.safetensors.index.json"],
    ),
    "shards that are pickles": (
        shards("pytorch_model-00001-of-00001.bin"),
        "names the file",
        ["config.json", "model.safetensors.index.json"],
    ),
    "weights as a pickle": (as_pickle, "holds its weights as pytorch_model.bin, which can run code", ["config.json"]),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_is_refused_before_the_download(hub: FakeHub, tmp_path: Path, name: str) -> None:
    change, message, downloaded = REPOSITORIES[name]
    tiny_head(tiny_llamagen()).push_to_hub("me/head")
    files = dict(hub.repos["me/head"])
    change(files)
    hub.repos["me/evil"] = FakeRepo(files)
    hub.requests.clear()
    for pull in (LanternDraftModel.from_pretrained, lambda repo: pull_head(repo, tmp_path / "to")):
        with pytest.raises(ValueError, match=message) as caught:
            pull("me/evil")
        assert "\n" not in str(caught.value)
    got = [request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /me/evil/resolve")]
    assert got == downloaded
    assert not (tmp_path / "to").exists()
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


def test_a_table_too_large_is_refused_before_the_download(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    head = tiny_head(tiny_llamagen())
    head.push_to_hub("me/head")
    hub.repos["me/head"]["neighbors.safetensors"] = bytes(5000)
    monkeypatch.setattr("lantern_hf.draft_files.MAX_TABLE_BYTES", 4999)
    with pytest.raises(ValueError, match=r"neighbors\.safetensors of me/head has 5,000 bytes, where at most 4,999"):
        LanternDraftModel.from_pretrained("me/head")
    assert hub.count("GET .*/neighbors.safetensors") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_encoder": ["os", "system"]}, r"asks for \[\"os\", \"system\"\] as 'text_encoder'"),
        ({"tokenizer": ["me/evil_code", "Thing"]}, "components may be of transformers, diffusers, lantern_hf only"),
        ({"vq_model": ["diffusers"]}, "asks for"),
        ({"transformer": [1, 2]}, "asks for"),
    ],
)
def test_a_pipeline_of_foreign_classes_is_refused(hub: FakeHub, changes: dict, message: str) -> None:
    tiny_pipeline().push_to_hub("me/pipe")
    repo = hub.repos["me/pipe"]
    repo["model_index.json"] = json.dumps(json.loads(repo["model_index.json"]) | changes).encode()
    hub.requests.clear()
    with pytest.raises(ValueError, match=message):
        LanternPipeline.from_pretrained("me/pipe")
    assert hub.count("GET .*safetensors") == 0


def test_pickles_and_code_of_a_pipeline_are_not_downloaded(hub: FakeHub) -> None:
    tiny_pipeline().push_to_hub("me/pipe")
    repo = hub.repos["me/pipe"]
    for name in ("transformer/pytorch_model.bin", "transformer/modeling.py", "pipeline.py", "extra/config.json"):
        repo[name] = b"x"
    hub.requests.clear()
    LanternPipeline.from_pretrained("me/pipe")
    got = {request.split("/resolve/")[1].partition("/")[2] for request in hub.requests if "GET /me/pipe/res" in request}
    assert all(name.endswith((".json", ".safetensors")) for name in got), got
    assert "extra/config.json" not in got


def test_a_pipelines_head_is_checked_like_any_head(hub: FakeHub) -> None:
    tiny_pipeline().push_to_hub("me/pipe")
    repo = hub.repos["me/pipe"]
    repo["draft_head/model.safetensors"] = bytes(3 * 2**20)
    with pytest.raises(ValueError, match=r"draft_head/model\.safetensors of me/pipe has .* bytes, where at most"):
        LanternPipeline.from_pretrained("me/pipe")
