"""`lantern-hf push`, `pull` and `card`, in process against a Hub in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import PIL.Image
import pytest
import torch
from command_line import call, check_refused
from conftest import tiny_head, tiny_llamagen
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect
from pipelines import tiny_pipeline

from lantern_hf import LanternDraftModel

pytestmark = CLIENT_WARNING


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network, and a folder to work in with a head."""
    monkeypatch.chdir(tmp_path)
    tiny_head(tiny_llamagen()).save_pretrained(tmp_path / "head")
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def test_push_pull_and_load(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"steps": {"eagle_25 strict": {"tokens_per_pass": 2.5}}}))
    PIL.Image.new("RGB", (4, 4)).save(tmp_path / "fox.png")
    card = ("--license", "mit", "--benchmark", "result.json", "--image", "fox.png", "--tag", "a", "--tag", "b")
    card += ("--base-model", "someone/xl", "--training-data", "Drawings.", "--training-command", "train it")
    result = call("push", "head", "me/head", "--private", "--message", "Mine", *card)
    assert result.exit_code == 0, result.stderr
    repo = hub.repos["me/head"]
    assert result.stdout == f"https://huggingface.co/me/head/commit/{repo.head}\n"
    assert (repo.private, [entry[2] for entry in repo.log]) == (True, ["initial commit", "Mine"])
    text = repo["README.md"].decode()
    for words in ("license: mit", "- a\n- b", "base_model: someone/xl", "Drawings.", "train it", "| 2.50 |"):
        assert words in text
    assert "picture.png" in repo
    result = call("pull", "me/head", "--to", "copy")
    assert (result.exit_code, result.stdout) == (0, "copy\n")
    loaded = LanternDraftModel.from_pretrained("copy")
    assert torch.equal(loaded.fc.weight, LanternDraftModel.from_pretrained("head").fc.weight)
    result = call("pull", "me/head", "--offline")
    assert result.exit_code == 0
    assert Path(result.stdout.strip()).name == repo.head


def test_branch_and_pull_request(hub: FakeHub) -> None:
    assert call("push", "head", "me/head", "--revision", "v1").exit_code == 0
    assert hub.repos["me/head"].refs.keys() == {"main", "v1"}
    assert call("pull", "me/head", "--revision", "v1").exit_code == 0
    hub.repos["other/head"] = FakeRepo()
    result = call("push", "head", "other/head", "--create-pr")
    assert result.stdout == "https://huggingface.co/other/head/discussions/1\n"


def test_card(hub: FakeHub) -> None:
    result = call("card", "head", "me/head", "--license", "mit")
    assert (result.exit_code, result.stdout) == (0, "Wrote head/README.md\n")
    path = Path("head", "README.md")
    path.write_text(path.read_text() + "\nMy own words.\n")
    assert call("card", "head", "me/head", "--training-data", "More.").exit_code == 0
    assert "More." in path.read_text()
    assert path.read_text().endswith("My own words.\n")
    assert hub.requests == []  # nothing of this needs the Hub
    assert call("push", "head", "me/head").exit_code == 0


def test_errors_are_one_line(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path / "pipe")
    (tmp_path / "bad.json").write_text("{}")
    for arguments, message in {
        ("push", "absent", "me/head"): "holds no model.safetensors",
        ("push", "pipe", "me/pipe"): "'pipe' is a pipeline. Push it with LanternPipeline.from_pretrained('pipe')",
        ("push", "head", "other/head"): "status 403",
        ("push", "head", "me/head", "--license", "MIT License"): "`license` must be an identifier",
        ("push", "head", "me/head", "--license", "wtf-9"): "not valid on the Hub",
        ("push", "head", "me/head", "--benchmark", "bad.json"): "is no benchmark result",
        ("pull", "me/absent"): "There is no repository me/absent on the Hub",
        ("pull", "me/absent", "--offline"): "not in the cache",
        ("pull", "me/absent", "--to", "head"): "exists and is not empty",
        ("card", "absent", "me/head"): "holds no model.safetensors",
    }.items():
        check_refused(call(*arguments), message)
    monkeypatch.delenv("HF_TOKEN")
    assert "Pushing needs a token" in call("push", "head", "me/head").stderr
    assert hub.repos == {}
