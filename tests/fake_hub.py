"""A Hub in memory behind `httpx2.MockTransport`: what pushing and pulling ask for, and no socket."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import httpx2

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name, each a dict of file contents; every push makes the one commit `COMMIT`.

    Call it as the handler of a `MockTransport`.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path, method = request.url.path, request.method
        if path == "/api/repos/create":
            body = json.loads(request.content)
            name = f"{body['organization']}/{body['name']}" if body.get("organization") else f"me/{body['name']}"
            self.repos.setdefault(name, {})
            return self._json({"url": f"https://huggingface.co/{name}", "id": name, "name": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path == "/api/whoami-v2":
            return self._json({"name": "me", "type": "user", "orgs": [], "auth": {}})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            return self._api(match[1], match[2] or "", request)
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[3], method)
        return httpx2.Response(404)

    def _json(self, value: object) -> httpx2.Response:
        return httpx2.Response(200, json=value)

    def _api(self, name: str, action: str, request: httpx2.Request) -> httpx2.Response:
        if name not in self.repos:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        if action.startswith("/preupload"):
            files = json.loads(request.content)["files"]
            # nothing by LFS: the client base64s everything into the commit
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self._json({"files": modes})
        if action.startswith("/commit"):
            return self._commit(name, request.read())
        if action.startswith("/tree"):
            files = [
                {"type": "file", "path": path, "size": len(data), "oid": _sha1(data)}
                for path, data in self._sorted(name)
            ]
            return self._json(files)
        siblings = [{"rfilename": path} for path, _ in self._sorted(name)]
        return self._json(
            {"id": name, "modelId": name, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
        )

    def _sorted(self, name: str) -> list[tuple[str, bytes]]:
        return sorted(self.repos[name].items())

    def _commit(self, name: str, lines: bytes) -> httpx2.Response:
        for line in map(json.loads, lines.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.repos[name][value["path"]] = base64.b64decode(value["content"])
        url = f"https://huggingface.co/{name}/commit/{COMMIT}"
        return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url})

    def _resolve(self, name: str, path: str, method: str) -> httpx2.Response:
        files = self.repos.get(name)
        if files is None:
            return httpx2.Response(404, headers={"X-Error-Code": "RepoNotFound"})
        if path not in files:
            return httpx2.Response(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        data = files[path]
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{_sha1(data)}"', "Content-Length": str(len(data))}
        return httpx2.Response(200, headers=headers, content=b"" if method == "HEAD" else data)


def _sha1(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
