"""A small Hugging Face hub: the part of its HTTP API that fetching a model uses, over files in memory.

    GET  /api/models/ORG/NAME[/revision/REV]      the commit, the names and sizes of its files
    GET  /api/models/ORG/NAME/tree/REV            the same files with their ids
    HEAD /ORG/NAME/resolve/REV/PATH               commit and ETag; large files redirect to
    GET  /blobs/SHA256                            their bytes, from any offset

Errors have the hub's X-Error-Code.
"""

import asyncio
import hashlib
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from huggingface_hub import constants, file_download

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

COMMIT = "c0ffee" + "0" * 34
SIGNATURE = "X-Amz-Signature=5ec4e7"
"""Of the addresses of large files: who has it can fetch them."""
OTHER_COMMIT = "beef" + "1" * 36


@dataclass
class Repo:
    """A repository: the files of each commit, and the commit of each branch or tag."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str] = field(default_factory=lambda: {"main": COMMIT})
    gated: bool = False
    private: bool = False
    architecture: str = ""
    """What the hub says of .gguf files"""


class FakeHub:
    """Serves in its own thread until it is closed. `requests` are the received requests, in order."""

    def __init__(self, token: str = "hf_right") -> None:
        self.repos: dict[str, Repo] = {}
        self.token = token
        self.requests: list[tuple[str, str]] = []
        self.status = 0
        """If not 0, the status of every reply"""
        self.cut_after = 0
        """If not 0, the next large file is cut off after this many bytes"""
        self.with_token: list[str] = []
        """The paths of requests with a token"""
        self.stall_after = 0
        """If not 0, the next large file stops after this many bytes, and `has_stalled` is set"""
        self.has_stalled = threading.Event()
        self.replies: list[tuple[int, dict[str, str]]] = []
        """Status and headers of the next replies about large files, in place of theirs"""
        self.lists_blobs = True
        """Whether the list of files has their digests; some mirrors' have not"""
        self.has_ranges = True
        self.is_altered = False
        """Whether large files arrive with a wrong byte"""
        self.ranges: list[str] = []
        """The Range headers of requests for large files; empty: none"""
        self._blobs: dict[str, bytes] = {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fake-hub")
        self._thread.start()
        assert self._started.wait(10.0), "the fake hub did not start"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)
        assert not self._thread.is_alive()

    def fetched(self) -> set[str]:
        """The paths of all requested files, and the requested blobs."""
        return {path.partition("/resolve/")[2].partition("/")[2] for _, path in self.requests if "/resolve/" in path}

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._middleware])
        app.router.add_get("/api/models/{org}/{name}", self._info)
        app.router.add_get("/api/models/{org}/{name}/revision/{revision:.+}", self._info)
        app.router.add_get("/api/models/{org}/{name}/tree/{revision:.+}", self._tree)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{path:.+}", self._resolve)
        app.router.add_get("/blobs/{sha}", self._blob)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        # Large files have another address: the client takes a redirect within one address for a renamed repository.
        for _ in range(2):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url, self._blobs_url = (f"http://127.0.0.1:{address[1]}" for address in runner.addresses)
        self._started.set()
        await self._stop.wait()
        assert runner.server is not None
        for site in list(runner.sites):
            await site.stop()
        await asyncio.sleep(0)  # those that were just accepted
        for connection in list(runner.server.connections):  # one that waits for its client would outlive the loop
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()
        await asyncio.sleep(0)

    @web.middleware
    async def _middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        if self.status:
            return web.Response(status=self.status, headers={"Retry-After": "0"})
        authorization = request.headers.get("Authorization")
        if authorization is not None:
            self.with_token.append(request.path)
        if authorization is not None and authorization not in (f"Bearer {self.token}", "Bearer hf_poor"):
            return _error(401, "", "Invalid credentials in Authorization header")
        return await handler(request)

    def _repo(self, request: web.Request) -> tuple[Repo, str] | web.Response:
        """The repository and the commit of a request, or the error reply."""
        repo = self.repos.get(f"{request.match_info['org']}/{request.match_info['name']}")
        if repo is None or (repo.private and not self._may_read(request)):
            return _error(401, "RepoNotFound", "Repository not found")
        revision = request.match_info.get("revision", "main")
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            return _error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit

    def _may_read(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.token}"

    async def _info(self, request: web.Request) -> web.Response:
        match self._repo(request):
            case web.Response() as error:
                return error
            case repo, commit:
                siblings = [_sibling(name, data, self.lists_blobs) for name, data in repo.commits[commit].items()]
                body = {"id": "x/y", "modelId": "x/y", "sha": commit, "siblings": siblings, "gated": repo.gated}
                if repo.architecture:
                    body["gguf"] = {"total": 1, "architecture": repo.architecture}
                return web.json_response({**body, "private": repo.private, "tags": [], "downloads": 0, "likes": 0})
        raise AssertionError

    async def _tree(self, request: web.Request) -> web.Response:
        match self._repo(request):
            case web.Response() as error:
                return error
            case repo, commit:
                entries = []
                for name, data in repo.commits[commit].items():
                    entry = {"type": "file", "path": name, "size": len(data), "oid": _git_oid(data)}
                    if _is_large(name):
                        entry["lfs"] = {"oid": _sha256(data), "size": len(data), "pointerSize": 130}
                    entries.append(entry)
                return web.json_response(entries)
        raise AssertionError

    async def _resolve(self, request: web.Request) -> web.Response:
        match self._repo(request):
            case web.Response() as error:
                return error
            case repo, commit:
                if repo.gated and not self._may_read(request):
                    return _error(
                        403 if "Authorization" in request.headers else 401, "GatedRepo", "Access is restricted"
                    )
                name = request.match_info["path"]
                data = repo.commits[commit].get(name)
                if data is None:
                    return _error(404, "EntryNotFound", "Entry not found")
                headers = {"X-Repo-Commit": commit, "ETag": f'"{_git_oid(data)}"'}
                if not _is_large(name):
                    return web.Response(body=data, headers=headers)
                self._blobs[_sha256(data)] = data
                headers |= {"X-Linked-Etag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
                return web.Response(
                    status=302, headers={**headers, "Location": f"{self._blobs_url}/blobs/{_sha256(data)}?{SIGNATURE}"}
                )
        raise AssertionError

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        if self.replies and request.method == "GET":
            status, given = self.replies.pop(0)
            return web.Response(status=status, headers=given)
        data = self._blobs[request.match_info["sha"]]
        if request.method == "GET":
            self.ranges.append(request.headers.get("Range", ""))
        if self.is_altered:
            data = data[:-1] + bytes([data[-1] ^ 1])
        begin = (request.http_range.start or 0) if self.has_ranges else 0
        headers = {"ETag": f'"{request.match_info["sha"]}"', "Content-Length": str(len(data) - begin)}
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if self.cut_after and request.method == "GET":
            await response.write(data[begin : begin + self.cut_after])
            self.cut_after = 0
            assert request.transport is not None
            request.transport.close()
            return response
        if self.stall_after and request.method == "GET":
            await response.write(data[begin : begin + self.stall_after])
            self.stall_after = 0
            self.has_stalled.set()
            await self._stop.wait()
            return response
        await response.write(data[begin:])
        return response


def _sibling(name: str, data: bytes, has_digest: bool) -> dict[str, Any]:
    """A file in the answer about a repository."""
    found: dict[str, Any] = {"rfilename": name}
    if has_digest:
        found |= {"size": len(data), "blobId": _git_oid(data)}
    if has_digest and _is_large(name):
        found["lfs"] = {"size": len(data), "sha256": _sha256(data), "pointerSize": 130}
    return found


def _error(status: int, code: str, message: str) -> web.Response:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return web.json_response({"error": message}, status=status, headers=headers)


def _is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def use(hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use a hub, with an empty cache in `folder`, and no token."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("HF_TOKEN_PATH", str(folder / "token"))
