"""The Hub on a bad day: no token, nothing there, a network that breaks, downloads cut short or changed, rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import tiny_head, tiny_llama
from fake_hub import CLIENT_WARNING, FakeHub, FakeRepo, connect
from huggingface_hub.utils import httpx

from lantern_hf import LanternDraftModel
from lantern_hf._hub_errors import WAITS_S

pytestmark = CLIENT_WARNING

ATTEMPTS = len(WAITS_S) + 1


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A Hub without a network."""
    with connect(monkeypatch, tmp_path / "cache") as fake:
        yield fake


def head(seed: float = 0.0) -> LanternDraftModel:
    """A tiny head; other seeds give other weights."""
    made = tiny_head(tiny_llama())
    with torch.no_grad():
        made.fc.weight += seed
    return made


def load(name: str = "me/head", **kwargs: object) -> LanternDraftModel:
    return LanternDraftModel.from_pretrained(name, **kwargs)


def equal(one: LanternDraftModel, other: LanternDraftModel) -> bool:
    return torch.equal(one.fc.weight, other.fc.weight)


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.rglob("*.incomplete")]


# ---- what is not there, or not allowed ------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [None, False])
def test_no_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, token: bool | None) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PermissionError, match="Pushing needs a token. Sign in with `hf auth login`"):
        head().push_to_hub("me/head", token=token)
    assert hub.requests == []


def test_a_token_without_the_right(hub: FakeHub) -> None:
    with pytest.raises(PermissionError, match=r"refuses other/head \(status 403\).*pass `token=`"):
        head().push_to_hub("other/head")
    with pytest.raises(PermissionError, match="status 401"):
        head().push_to_hub("me/head", token="hf_wrong")
    assert hub.repos == {}


def test_missing_repository_revision_and_file(hub: FakeHub) -> None:
    with pytest.raises(FileNotFoundError, match="no repository me/head on the Hub. Check the name; if it is private"):
        load()
    head().push_to_hub("me/head")
    with pytest.raises(FileNotFoundError, match="me/head has no revision 'v9'"):
        load(revision="v9")
    with pytest.raises(FileNotFoundError, match="holds no part/config.json"):
        load(subfolder="part")
    del hub.repos["me/head"]["model.safetensors"]
    with pytest.raises(FileNotFoundError, match=r"me/head holds no model\.safetensors"):
        load()


def test_private_and_gated_repositories(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    head().push_to_hub("me/head", private=True)
    hub.repos["me/gated"] = FakeRepo(dict(hub.repos["me/head"]), gated=True)
    with pytest.raises(PermissionError, match="me/gated is gated: ask for access"):
        load("me/gated")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(FileNotFoundError, match="if it is private, sign in"):
        load()
    assert equal(load(token="hf_test"), head())


def test_a_card_the_hub_refuses_changes_nothing(hub: FakeHub) -> None:
    made = head()
    made.config.verifier = {"name_or_path": "someone/model", "architectures": None}
    from lantern_hf.hub import CardDetails

    with pytest.raises(ValueError, match='not valid on the Hub: .*"license" must be one of'):
        made.push_to_hub("me/head", card=CardDetails(license="wtf-9"))
    assert hub.repos == {}


def test_weights_that_are_no_numbers_are_not_published(hub: FakeHub) -> None:
    with pytest.raises(ValueError, match=r"fc\.weight of .*holds NaN or infinity"):
        head(float("nan")).push_to_hub("me/head")
    assert hub.requests == []


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [httpx.ConnectError("no route"), httpx.ReadTimeout("slow"), 503, 429])
@pytest.mark.parametrize("where", ["GET /api/models", "HEAD", "GET .*/resolve/.*/model.safetensors"])
def test_a_pull_tries_again(hub: FakeHub, where: str, fault: int | Exception) -> None:
    head().push_to_hub("me/head")
    if where.startswith("GET .*") and fault == 503:
        fault = 429  # the client takes a 503 from the download server for final
    hub.fail(where, fault, times=2)
    assert equal(load(), head())


def test_a_pull_gives_up_with_a_clear_error(hub: FakeHub, tmp_path: Path) -> None:
    head().push_to_hub("me/head")
    hub.requests.clear()
    hub.fail("GET /api/models", httpx.ConnectError("no route"), times=10**6)
    message = rf"could not be reached for me/head in {ATTEMPTS} attempts \(ConnectError: no route\)\. Check the conn"
    with pytest.raises(OSError, match=message) as caught:
        load()
    assert "\n" not in str(caught.value)
    assert hub.count("GET /api/models/me/head") == ATTEMPTS
    hub.faults.clear()
    hub.fail("GET .*/model.safetensors", httpx.ConnectError("no route"), times=10**6)
    with pytest.raises(OSError, match=r"for model\.safetensors of me/head"):
        load()
    assert leftovers(tmp_path) == []
    hub.faults.clear()
    assert equal(load(), head())


def test_out_of_reach_the_cache_serves(hub: FakeHub) -> None:
    head().push_to_hub("me/head")
    load()
    hub.fail(".*", httpx.ConnectError("no route"), times=10**6)
    assert equal(load(), head())
    with pytest.raises(OSError, match="could not be reached"):
        load(force_download=True)


class Broken(httpx.SyncByteStream):
    """Half a body, and then the connection is gone."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        yield self._data[: len(self._data) // 2]
        raise httpx.RemoteProtocolError("peer closed connection")


def half(data: bytes) -> httpx.Response:
    """A download that breaks off."""
    return httpx.Response(200, headers={"Content-Length": str(len(data))}, stream=Broken(data))


def short(data: bytes) -> httpx.Response:
    """A download that ends early and says that is all."""
    return httpx.Response(200, content=data[: len(data) // 2])


def flipped(data: bytes) -> httpx.Response:
    """A download of the right length with one bit wrong near the end, where only a hash sees it."""
    return httpx.Response(200, content=data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])


def test_a_download_that_breaks_off_is_taken_up_again(hub: FakeHub) -> None:
    head().push_to_hub("me/head")
    hub.spoil("model.safetensors", half, times=2)
    assert equal(load(), head())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (half, "could not be reached for model.safetensors"),
        (short, "model.safetensors of me/head could not be downloaded: Consistency check failed"),
        (flipped, "model.safetensors of me/head arrived corrupt: its hash is not the one the Hub lists"),
    ],
)
def test_a_bad_download_leaves_the_cache_usable(
    hub: FakeHub, tmp_path: Path, change: Callable[[bytes], httpx.Response], message: str
) -> None:
    head().push_to_hub("me/head")
    load()
    old = hub.repos["me/head"].head
    head(1.0).push_to_hub("me/head")
    hub.spoil("model.safetensors", change, times=10**6)
    with pytest.raises(OSError, match=message):
        load()
    assert leftovers(tmp_path) == []
    assert equal(load(revision=old), head())
    assert equal(load(local_files_only=True), head())  # offline, main is still the last whole commit
    hub.faults.clear()
    assert equal(load(), head(1.0))
    assert equal(load(local_files_only=True), head(1.0))


def test_a_config_that_was_changed_on_the_way(hub: FakeHub) -> None:
    head().push_to_hub("me/head")
    hub.spoil("config.json", lambda data: httpx.Response(200, content=data.replace(b"silu", b"relu")))
    with pytest.raises(OSError, match=r"config\.json of me/head arrived corrupt"):
        load()
    assert load().config.hidden_act == "silu"


# ---- pushes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["POST /api/validate-yaml", "POST .*/lfs/objects/batch", "PUT /objects", "/commit/"])
@pytest.mark.parametrize("fault", [httpx.ConnectError("no route"), 503])
def test_a_push_tries_again_and_commits_once(hub: FakeHub, where: str, fault: int | Exception) -> None:
    head().push_to_hub("me/head")
    hub.fail(where, fault, times=1)
    head(1.0).push_to_hub("me/head")
    assert len(hub.repos["me/head"].log) == 3
    assert equal(load(), head(1.0))


@pytest.mark.parametrize("where", ["PUT /objects", "/commit/"])
def test_a_push_that_fails_changes_nothing(hub: FakeHub, where: str) -> None:
    head().push_to_hub("me/head")
    hub.fail(where, httpx.ConnectError("no route"), times=10**6)
    with pytest.raises(OSError, match="could not be reached"):
        head(1.0).push_to_hub("me/head")
    assert len(hub.repos["me/head"].log) == 2
    hub.faults.clear()
    assert equal(load(), head())


def test_a_commit_whose_answer_is_lost_is_not_made_twice(hub: FakeHub) -> None:
    head().push_to_hub("me/head")

    def lose(request: httpx.Request) -> httpx.Response | None:
        if "/commit/" in request.url.path:
            hub.faults.clear()
            hub(request)
            raise httpx.ReadTimeout("no answer")
        return None

    hub.faults.append(lose)
    with pytest.raises(OSError, match=r"may hold it already \(commit [0-9a-f]{40}\)"):
        head(1.0).push_to_hub("me/head")
    assert len(hub.repos["me/head"].log) == 3


def test_a_rival_push_is_not_overwritten(hub: FakeHub) -> None:
    head().push_to_hub("me/head")

    def rival(request: httpx.Request) -> httpx.Response | None:
        if "/preupload/" in request.url.path:
            hub.faults.clear()
            hub.repos["me/head"]["README.md"] = b"# written meanwhile\n"
        return None

    hub.faults.append(rival)
    with pytest.raises(OSError, match="me/head changed while this push was under way, so nothing was committed"):
        head(1.0).push_to_hub("me/head")
    assert hub.repos["me/head"]["README.md"] == b"# written meanwhile\n"
