"""Pipelines on the Hub, by the rules that hold for heads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect, validate
from huggingface_hub import ModelCard
from pipelines import seed, tiny_class_pipeline, tiny_pipeline

from lantern_hf import LanternPipeline
from lantern_hf.hub import CardDetails

pytestmark = CLIENT_WARNING


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def draw(pipe: LanternPipeline) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    return np.asarray(pipe("red fox", generator=seed()).images[0])


def test_push_and_pull(hub: FakeHub) -> None:
    pipe = tiny_pipeline()
    expected = draw(pipe)
    commit = pipe.push_to_hub("me/pipe", private=True, card=CardDetails(license="apache-2.0"))
    repo = hub.repos["me/pipe"]
    assert (commit.oid, repo.private, len(repo.log)) == (repo.head, True, 2)
    loaded = LanternPipeline.from_pretrained("me/pipe")
    assert torch.equal(loaded.draft_head.neighbors.indices, pipe.draft_head.neighbors.indices)
    assert np.array_equal(draw(loaded), expected)
    hub.requests.clear()
    assert np.array_equal(draw(LanternPipeline.from_pretrained("me/pipe", local_files_only=True)), expected)
    assert hub.requests == []


def test_card(hub: FakeHub) -> None:
    tiny_pipeline().push_to_hub("me/pipe", card=CardDetails(license="mit", training_data="Two words."))
    repo = hub.repos["me/pipe"]
    text = repo["README.md"].decode()
    assert validate(text).status_code == 200
    data = ModelCard(text).data
    assert (data.library_name, data.pipeline_tag, data.license) == ("lantern_hf", "text-to-image", "mit")
    assert 'LanternPipeline.from_pretrained("me/pipe")' in text
    assert "8 x 8 codes of 24" in text
    repo["README.md"] = (text + "\nWords of a person.\n").encode()
    tiny_class_pipeline().push_to_hub("me/pipe")
    text = repo["README.md"].decode()
    assert text.endswith("Words of a person.\n")
    assert "class_labels=1" in text
    assert ModelCard(text).data.license == "mit"


def test_branch_pull_request_and_save_with_push(hub: FakeHub, tmp_path: Path) -> None:
    pipe = tiny_pipeline(head=False)
    pipe.save_pretrained(tmp_path / "pipe", push_to_hub=True, private=True)
    repo = hub.repos["me/pipe"]
    assert repo.private
    assert "model_index.json" in repo
    pipe.push_to_hub("me/pipe", revision="v2", commit_message="Second")
    assert repo.log[-1][::2] == ("v2", "Second")
    assert pipe.push_to_hub("me/pipe", create_pr=True).pr_url.endswith("/discussions/1")
    assert len([entry for entry in repo.log if entry[0] == "main"]) == 2


def test_refusals(hub: FakeHub, tmp_path: Path) -> None:
    pipe = tiny_pipeline()
    with pytest.raises(ValueError, match="`safe_serialization=False` would write pickles"):
        pipe.save_pretrained(tmp_path / "pipe", safe_serialization=False)
    assert not (tmp_path / "pipe").exists()
    with torch.no_grad():
        pipe.vq_model.quantize.embedding.weight[0] = float("nan")
    with pytest.raises(ValueError, match="holds NaN or infinity"):
        pipe.push_to_hub("me/pipe")
    assert hub.requests == []
    with pytest.raises(FileNotFoundError, match="no repository me/missing"):
        LanternPipeline.from_pretrained("me/missing")


def test_a_repository_without_index_is_no_pipeline(hub: FakeHub) -> None:
    hub.repos["me/other"] = FakeRepo({"config.json": b"{}"})
    with pytest.raises(FileNotFoundError, match=r"holds no model_index\.json, so it is no pipeline"):
        LanternPipeline.from_pretrained("me/other")


def test_an_interrupted_download_is_not_what_offline_use_finds(hub: FakeHub) -> None:
    pipe = tiny_pipeline(head=False)
    pipe.push_to_hub("me/pipe")
    expected = draw(LanternPipeline.from_pretrained("me/pipe"))
    with torch.no_grad():
        pipe.transformer.lm_head.weight += 1
    pipe.push_to_hub("me/pipe")
    hub.fail("GET .*/transformer/model.safetensors", 500, times=10**6)
    with pytest.raises(OSError, match=r"transformer/model\.safetensors of me/pipe"):
        LanternPipeline.from_pretrained("me/pipe")
    assert np.array_equal(draw(LanternPipeline.from_pretrained("me/pipe", local_files_only=True)), expected)
