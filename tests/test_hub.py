"""Heads on the Hub: what a push makes, what a pull takes, and revisions, pull requests and offline use."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import NUM_CODES, prompt, tiny_head, tiny_llamagen
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModel

import lantern_hf
from lantern_hf import LanternConfig, LanternDraftModel, NeighborTable
from lantern_hf.hub import CardDetails, pull_head, push_folder

pytestmark = CLIENT_WARNING

TARGET = "LlamaGenForConditionalGeneration"
FILES = {
    "README.md",
    "config.json",
    "custom_generate/generate.py",
    "custom_generate/requirements.txt",
    "model.safetensors",
    "neighbors.safetensors",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def head_with_table(seed: int = 0) -> LanternDraftModel:
    """A head of the tiny LlamaGen, with the table of a random codebook."""
    head = tiny_head(tiny_llamagen())
    head.config.verifier = {"name_or_path": "someone/tiny-llamagen", "architectures": [TARGET]}
    codebook = torch.randn(NUM_CODES, 4, generator=torch.Generator().manual_seed(seed))
    head.neighbors = NeighborTable.from_codebook(codebook, 12)
    return head


def assert_same(one: LanternDraftModel, other: LanternDraftModel) -> None:
    """The same weights and table, bit for bit."""
    assert one.state_dict().keys() == other.state_dict().keys()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    assert torch.equal(one.neighbors.indices, other.neighbors.indices)
    assert one.neighbors.hashes == other.neighbors.hashes


def test_push_makes_one_commit_with_everything(hub: FakeHub) -> None:
    head = head_with_table()
    commit = head.push_to_hub("me/head", commit_message="First head")
    repo = hub.repos["me/head"]
    assert repo.keys() - {".gitattributes"} == FILES
    assert [entry[2] for entry in repo.log] == ["initial commit", "First head"]
    assert hub.count("POST .*/commit/") == 1
    assert commit.oid == repo.head
    config = json.loads(repo["config.json"])
    assert config["model_type"] == "lantern_draft"
    assert (config["format_version"], config["lantern_version"]) == (1, lantern_hf.__version__)
    assert config["verifier"] == {"name_or_path": "someone/tiny-llamagen", "architectures": [TARGET]}
    assert (config["codebook_size"], config["grid"]) == (NUM_CODES, [8, 8])
    assert LanternConfig.from_dict(config["lantern_config"]) == LanternConfig()


@pytest.mark.parametrize("load", [LanternDraftModel.from_pretrained, AutoModel.from_pretrained])
def test_pull_gives_the_head_bit_for_bit(hub: FakeHub, load) -> None:
    head = head_with_table()
    head.push_to_hub("me/head")
    loaded = load("me/head")
    assert isinstance(loaded, LanternDraftModel)
    assert_same(loaded, head)
    assert loaded.config.name_or_path == "me/head"
    assert loaded.dtype == torch.float32
    assert AutoConfig.from_pretrained("me/head").codebook_size == NUM_CODES


def test_only_the_files_of_a_head_are_downloaded(hub: FakeHub) -> None:
    head_with_table().push_to_hub("me/head")
    hub.repos["me/head"]["pytorch_model.bin"] = b"pickled"
    hub.requests.clear()
    LanternDraftModel.from_pretrained("me/head")
    fetched = {request.rpartition("/")[2] for request in hub.requests if request.startswith("GET /me/head/resolve")}
    assert fetched == {"config.json", "model.safetensors", "neighbors.safetensors"}
    hub.requests.clear()
    LanternDraftModel.from_pretrained("me/head")
    assert [request for request in hub.requests if "/resolve/" in request] == []  # the cache has the commit


def test_settings_of_a_load_reach_it(hub: FakeHub) -> None:
    head_with_table().push_to_hub("me/head")
    loaded, info = LanternDraftModel.from_pretrained(
        "me/head", dtype=torch.bfloat16, attn_implementation="eager", attention_dropout=0.25, output_loading_info=True
    )
    assert (loaded.dtype, loaded.config._attn_implementation) == (torch.bfloat16, "eager")
    assert (loaded.config.attention_dropout, info["missing_keys"]) == (0.25, set())


def test_a_model_generates_with_a_head_by_name(hub: FakeHub) -> None:
    target = tiny_llamagen()
    head = tiny_head(target)
    head.config.lantern_config = LanternConfig.strict("narrow_8").to_dict()
    head.push_to_hub("me/head", revision="v2")
    inputs = prompt(target) | {"max_new_tokens": 20, "do_sample": False}
    expected = target.generate(**inputs)
    hub.requests.clear()
    attached = lantern_hf.attach(target)
    for name in ("me/head@v2", "me/head@v2"):
        assert torch.equal(attached.generate(**inputs, assistant=name), expected)
    assert hub.count("GET /api/models") == 1  # loaded once
    lantern_hf.detach(target)
    unattached = {"custom_generate": lantern_hf.lantern_generate, "assistant": "me/head@v2"}
    for _ in range(2):
        assert torch.equal(target.generate(**inputs, **unattached), expected)
    assert hub.count("GET /api/models") == 2
    with pytest.raises(FileNotFoundError, match="me/head has no revision 'v3'"):
        target.generate(**inputs, custom_generate=lantern_hf.lantern_generate, assistant="me/head@v3")


def test_revision_private_and_repository_without_user(hub: FakeHub) -> None:
    head = head_with_table()
    head.push_to_hub("head", private=True)
    repo = hub.repos["me/head"]
    assert repo.private
    first = repo.head
    head.neighbors = None
    head.push_to_hub("me/head", revision="no-table")
    assert repo.head == first
    assert "neighbors.safetensors" not in repo.commits[repo.refs["no-table"]]  # the stale table goes
    assert LanternDraftModel.from_pretrained("me/head", revision="no-table").neighbors is None
    assert LanternDraftModel.from_pretrained("me/head", revision=first).neighbors is not None


def test_pull_request(hub: FakeHub) -> None:
    head = head_with_table()
    hub.repos["other/head"] = FakeRepo({"README.md": b"# theirs\n"})
    before = hub.repos["other/head"].head
    commit = head.push_to_hub("other/head", create_pr=True)
    assert commit.pr_url == "https://huggingface.co/other/head/discussions/1"
    assert hub.repos["other/head"].head == before
    assert hub.count("POST /api/repos/create") == 0
    assert_same(LanternDraftModel.from_pretrained("other/head", revision="refs/pr/1"), head)
    with pytest.raises(ValueError, match="opens a pull request for `main`, got revision='v1'"):
        head.push_to_hub("other/head", create_pr=True, revision="v1")


def test_save_with_push_uploads_the_same(hub: FakeHub, tmp_path: Path) -> None:
    head_with_table().save_pretrained(tmp_path / "saved", push_to_hub=True, repo_id="me/saved", token="hf_test")
    assert hub.repos["me/saved"].keys() - {".gitattributes"} == FILES


def test_push_and_pull_of_a_folder(hub: FakeHub, tmp_path: Path) -> None:
    head = head_with_table()
    head.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    shards = sorted(path.name for path in (tmp_path / "saved").glob("model-*.safetensors"))
    assert len(shards) > 1
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    push_folder(tmp_path / "saved", "me/sharded")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert set(shards) < hub.repos["me/sharded"].keys()
    folder = pull_head("me/sharded", tmp_path / "new" / "copy")
    assert_same(LanternDraftModel.from_pretrained(folder), head)
    assert (folder / "README.md").read_bytes() == hub.repos["me/sharded"]["README.md"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["copy"]
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        pull_head("me/sharded", folder)
    assert pull_head("me/sharded").name == hub.repos["me/sharded"].head
    # one file again: the shards go, here and there
    head.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("model-*"))
    assert_same(LanternDraftModel.from_pretrained(tmp_path / "saved"), head)


def test_a_machines_folder_is_not_published(hub: FakeHub) -> None:
    head = head_with_table()
    head.config.verifier["name_or_path"] = "/home/somebody/models/llamagen-xl"
    head.push_to_hub("me/head")
    assert json.loads(hub.repos["me/head"]["config.json"])["verifier"]["name_or_path"] == "llamagen-xl"
    assert not any(b"somebody" in content for content in hub.repos["me/head"].values())
    assert "base_model" not in ModelCard(hub.repos["me/head"]["README.md"].decode()).data.to_dict()
    head.push_to_hub("me/head", card=CardDetails(base_model="someone/xl"))
    assert json.loads(hub.repos["me/head"]["config.json"])["verifier"]["name_or_path"] == "someone/xl"


def test_offline_use_from_the_cache(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    head = head_with_table()
    head.push_to_hub("me/head")
    with pytest.raises(FileNotFoundError, match=r"me/head is not in the cache, and the Hub is not asked \(offline\)"):
        LanternDraftModel.from_pretrained("me/head", local_files_only=True)
    LanternDraftModel.from_pretrained("me/head")
    hub.requests.clear()
    assert_same(LanternDraftModel.from_pretrained("me/head", local_files_only=True), head)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_same(LanternDraftModel.from_pretrained("me/head"), head)
    assert hub.requests == []
    with pytest.raises(OSError, match="HF_HUB_OFFLINE says not to ask it"):
        head.push_to_hub("me/head")


def test_what_is_no_folder_and_no_hub_id(tmp_path: Path) -> None:
    for name in (str(tmp_path / "absent"), "a/b/c", "../up", ""):
        with pytest.raises(ValueError, match="is neither a folder nor a Hub id"):
            LanternDraftModel.from_pretrained(name)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; name the folder"):
        LanternDraftModel.from_pretrained(tmp_path / "file")


def test_a_head_keeps_its_table(tmp_path: Path) -> None:
    head = head_with_table()
    head.save_pretrained(tmp_path)
    loaded = LanternDraftModel.from_pretrained(tmp_path)
    assert_same(loaded, head)
    loaded.neighbors = None
    loaded.save_pretrained(tmp_path)  # the stale table goes
    assert LanternDraftModel.from_pretrained(tmp_path).neighbors is None


def test_a_head_refuses_the_table_of_another_codebook(tmp_path: Path) -> None:
    head = head_with_table()
    head.save_pretrained(tmp_path)
    head.neighbors = NeighborTable.from_codebook(torch.randn(30, 4), 5)
    with pytest.raises(ValueError, match="covers 30 codes, but this head drafts from a codebook of 24"):
        head.save_pretrained(tmp_path)
    head.neighbors.save(tmp_path / "neighbors.safetensors")
    with pytest.raises(ValueError, match="covers 30 codes"):
        LanternDraftModel.from_pretrained(tmp_path)
