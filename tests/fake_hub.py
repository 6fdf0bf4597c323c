"""A Hub in memory: repositories with branches and commits, large files, pull requests, tokens, and faults on demand.

It is a handler for `httpx.MockTransport`, without a socket; `serve` of hub_server.py puts it behind a local one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import huggingface_hub
import pytest
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.utils import httpx

# The client uploads in a way its own HTTP library calls outdated.
CLIENT_WARNING = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload:DeprecationWarning")
TOKEN = "hf_test"
LARGE = (".safetensors", ".png", ".bin")
LICENSES = {"apache-2.0", "mit", "openrail", "other"}
TASKS = {"text-to-image", "text-generation", "unconditional-image-generation"}
RELATIONS = {"adapter", "finetune", "quantized", "merge"}


class FakeRepo(MutableMapping[str, bytes]):
    """Commits and branches; as a mapping it is the files of `main`, and a change to it is a commit."""

    def __init__(self, files: dict[str, bytes] | None = None, private: bool = False, gated: bool = False) -> None:
        self.private, self.gated = private, gated
        self.commits: dict[str, dict[str, bytes]] = {}
        self.refs: dict[str, str] = {}
        self.log: list[tuple[str, str, str]] = []  # (ref, commit, message)
        self.commit({".gitattributes": b"", **(files or {})}, "main", "initial commit")

    def commit(self, files: dict[str, bytes], ref: str, message: str) -> str:
        """Make a commit."""
        seed = json.dumps([len(self.log), ref, message, self.refs.get(ref)])
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha], self.refs[ref] = dict(files), sha
        self.log.append((ref, sha, message))
        return sha

    @property
    def head(self) -> str:
        """Commit of `main`."""
        return self.refs["main"]

    def at(self, revision: str) -> str | None:
        """Commit of a revision."""
        return revision if revision in self.commits else self.refs.get(revision)

    def __getitem__(self, path: str) -> bytes:
        return self.commits[self.head][path]

    def __setitem__(self, path: str, data: bytes) -> None:
        self.commit({**self.commits[self.head], path: data}, "main", f"set {path}")

    def __delitem__(self, path: str) -> None:
        files = dict(self.commits[self.head])
        del files[path]
        self.commit(files, "main", f"delete {path}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.commits[self.head])

    def __len__(self) -> int:
        return len(self.commits[self.head])


class FakeHub:
    """Repositories by name.

    Attributes:
        repos: The repositories.
        requests: `METHOD path` of everything that was asked.
        faults: Called in order with each request; the first that gives a response or raises serves it.
    """

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.requests: list[str] = []
        self.objects: dict[str, bytes] = {}
        self.faults: list[Callable[[httpx.Request], httpx.Response | None]] = []

    def fail(self, pattern: str, fault: int | Exception, times: int = 1) -> None:
        """Let the next `times` requests whose `METHOD path` matches end in a status or an exception."""
        left = [times]

        def serve(request: httpx.Request) -> httpx.Response | None:
            if left[0] == 0 or not re.search(pattern, f"{request.method} {request.url.path}"):
                return None
            left[0] -= 1
            if isinstance(fault, Exception):
                raise fault
            return httpx.Response(fault, json={"error": f"status {fault}"})

        self.faults.append(serve)

    def spoil(self, path: str, change: Callable[[bytes], httpx.Response], times: int = 1) -> None:
        """Let the next `times` downloads of a file be served by `change`, given its content."""
        left = [times]

        def serve(request: httpx.Request) -> httpx.Response | None:
            if left[0] == 0 or request.method != "GET" or not request.url.path.endswith(f"/{path}"):
                return None
            left[0] -= 1
            name, revision = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/.+", request.url.path).groups()
            repo = self.repos[name]
            return change(repo.commits[repo.at(unquote(revision))][path])

        self.faults.append(serve)

    def count(self, pattern: str) -> int:
        """Number of requests so far that match."""
        return sum(bool(re.search(pattern, request)) for request in self.requests)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        for fault in self.faults:
            if (response := fault(request)) is not None:
                return response
        signed_in = request.headers.get("authorization") == f"Bearer {TOKEN}"
        if path == "/api/validate-yaml":
            return validate(json.loads(request.content)["content"])
        if path.startswith("/objects/"):
            self.objects[path.removeprefix("/objects/")] = request.read()
            return httpx.Response(200)
        if path == "/api/whoami-v2":
            return httpx.Response(200, json={"name": "me", "type": "user"}) if signed_in else httpx.Response(401)
        if path == "/api/repos/create":
            return self._create(json.loads(request.content), signed_in)
        match = (
            re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path)
            or re.fullmatch(r"/([^/]+/[^/]+)(/resolve/.+)", path)
            or re.fullmatch(r"/([^/]+/[^/]+)\.git(/info/lfs/.+)", path)
        )
        if match is None:
            return httpx.Response(404)
        name, action = match[1], match[2] or ""
        repo = self.repos.get(name)
        if repo is None or (repo.private and not signed_in):
            return refusal(404 if signed_in else 401, "RepoNotFound")
        if repo.gated and "/resolve/" in action:
            return refusal(403, "GatedRepo")
        if action.startswith("/resolve/"):
            return self._resolve(repo, action, request)
        if request.method == "GET" and action.startswith("/tree/"):
            return self._tree(repo, unquote(action.removeprefix("/tree/")))
        if request.method == "GET":
            return self._info(name, repo, unquote(action.removeprefix("/revision/")) or "main")
        # anybody may upload to a pull request; whether it is one is told with the commit
        allowed = name.startswith("me/") or "create_pr=1" in str(request.url) or re.match("/(preupload|info)/", action)
        if not signed_in or not allowed:
            return refusal(403 if signed_in else 401, "")
        return self._change(name, repo, action, request)

    def _create(self, body: dict, signed_in: bool) -> httpx.Response:
        owner = body.get("organization") or "me"
        name = f"{owner}/{body['name']}"
        if not signed_in or owner != "me":
            return refusal(403 if signed_in else 401, "")
        if name in self.repos:
            return httpx.Response(409, json={"error": "exists"})
        self.repos[name] = FakeRepo(private=body.get("visibility") == "private")
        return httpx.Response(200, json={"url": f"https://huggingface.co/{name}", "name": name})

    def _info(self, name: str, repo: FakeRepo, revision: str) -> httpx.Response:
        sha = repo.at(revision)
        if sha is None:
            return refusal(404, "RevisionNotFound")
        siblings = []
        for path, data in sorted(repo.commits[sha].items()):
            sibling = {"rfilename": path, "size": len(data), "blobId": git_sha1(data)}
            if path.endswith(LARGE):
                sibling["lfs"] = {"size": len(data), "sha256": sha256(data), "pointerSize": 130}
            siblings.append(sibling)
        return httpx.Response(
            200, json={"id": name, "modelId": name, "sha": sha, "private": repo.private, "siblings": siblings}
        )

    def _tree(self, repo: FakeRepo, revision: str) -> httpx.Response:
        sha = repo.at(revision)
        if sha is None:
            return refusal(404, "RevisionNotFound")
        files = repo.commits[sha].items()
        tree = [{"type": "file", "path": path, "size": len(data), "oid": git_sha1(data)} for path, data in files]
        return httpx.Response(200, json=tree)

    def _resolve(self, repo: FakeRepo, action: str, request: httpx.Request) -> httpx.Response:
        revision, _, path = action.removeprefix("/resolve/").partition("/")
        sha, path = repo.at(unquote(revision)), unquote(path)
        if sha is None:
            return refusal(404, "RevisionNotFound")
        if path not in repo.commits[sha]:
            return httpx.Response(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        data = repo.commits[sha][path]
        etag = sha256(data) if path.endswith(LARGE) else git_sha1(data)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{etag}"', "Content-Length": str(len(data))}
        return httpx.Response(200, headers=headers, content=b"" if request.method == "HEAD" else data)

    def _change(self, name: str, repo: FakeRepo, action: str, request: httpx.Request) -> httpx.Response:
        if action.startswith("/info/lfs"):
            objects = json.loads(request.content)["objects"]
            for item in (item for item in objects if item["oid"] not in self.objects):
                item["actions"] = {"upload": {"href": str(request.url.join(f"/objects/{item['oid']}"))}}
            return httpx.Response(200, json={"transfer": "basic", "objects": objects})
        if action.startswith("/preupload"):
            modes = [
                {"path": path, "uploadMode": "lfs" if path.endswith(LARGE) else "regular", "shouldIgnore": False}
                for path in (file["path"] for file in json.loads(request.content)["files"])
            ]
            return httpx.Response(200, json={"files": modes})
        kind, revision = action.strip("/").split("/")[0], unquote(action.rpartition("/")[2])
        if kind == "branch":
            if revision in repo.refs:
                return httpx.Response(409, json={"error": "exists"})
            repo.refs[revision] = json.loads(request.content).get("startingPoint") or repo.head
            return httpx.Response(200)
        assert kind == "commit", action
        return self._commit(name, repo, revision, request)

    def _commit(self, name: str, repo: FakeRepo, revision: str, request: httpx.Request) -> httpx.Response:
        parent = repo.at(revision)
        if parent is None:
            return refusal(404, "RevisionNotFound")
        files, header = dict(repo.commits[parent]), {}
        for line in map(json.loads, request.read().splitlines()):
            value = line["value"]
            if line["key"] == "header":
                header = value
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                del files[value["path"]]
        if header.get("parentCommit", parent) != parent:
            return httpx.Response(412, json={"error": "the repository has changed"})
        is_request = "create_pr=1" in str(request.url)
        ref = f"refs/pr/{sum(known.startswith('refs/pr') for known in repo.refs) + 1}" if is_request else revision
        sha = repo.commit(files, ref, header["summary"])
        result = {"success": True, "commitOid": sha, "commitUrl": f"https://huggingface.co/{name}/commit/{sha}"}
        number = ref.rpartition("/")[2]
        result["pullRequestUrl"] = f"https://huggingface.co/{name}/discussions/{number}" if is_request else None
        return httpx.Response(200, json=result)


def refusal(status: int, code: str) -> httpx.Response:
    """An error as the Hub words it."""
    return httpx.Response(status, headers={"X-Error-Code": code}, json={"error": code})


def validate(card: str) -> httpx.Response:
    """The Hub's rules for a model card's metadata, as far as they are written down."""
    match, errors = REGEX_YAML_BLOCK.search(card), []
    try:
        data = yaml.safe_load(match[2]) if match else None
    except yaml.YAMLError:
        data, errors = None, ["metadata is no YAML"]
    data = data if isinstance(data, dict) else {}
    allowed = {"license": LICENSES, "pipeline_tag": TASKS, "base_model_relation": RELATIONS}
    errors += [
        f'"{key}" must be one of {sorted(v)}' for key, v in allowed.items() if data.get(key, None) not in {None, *v}
    ]
    if "base_model" in data and not re.fullmatch(r"[\w.-]+/[\w.-]+", str(data["base_model"])):
        errors.append('"base_model" must be a model id on hf.co')
    tags = data.get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        errors.append('"tags" must be an array of strings')
    for model in data.get("model-index", []):
        for result in model["results"]:
            kinds = [result["task"]["type"], result["dataset"]["type"], result["dataset"]["name"], model["name"]]
            kinds += [metric["type"] for metric in result["metrics"]]
            values = [metric["value"] for metric in result["metrics"]]
            if not all(isinstance(kind, str) and kind for kind in kinds) or None in values:
                errors.append('"model-index" is not valid')
    body = {"errors": [{"message": error} for error in errors], "warnings": []}
    return httpx.Response(400 if errors else 200, json=body)


def git_sha1(data: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    """Name of a large file's content."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def connect(monkeypatch: Any, cache: Path) -> Iterator[FakeHub]:
    """Let huggingface_hub talk to a Hub in memory: signed in, with an empty cache, and without waits."""
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    impatient = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    for module in ("huggingface_hub.utils._http", "huggingface_hub.file_download", "lantern_hf._hub_errors"):
        monkeypatch.setattr(f"{module}.time", impatient)
    monkeypatch.setattr("lantern_hf._hub_upload.time", impatient)
    fake = FakeHub()
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(fake), follow_redirects=True))
    try:
        yield fake
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
