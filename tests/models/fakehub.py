"""A hub for tests: model repositories over real HTTP, with whatever goes wrong on the way to one.

    with FakeHub({"floe/tiny": folder}) as hub:
        hub.faults.append(Fault("GET /storage/.*model-00002-", reset_after=100_000))
        ...                             # HF_ENDPOINT=hub.url
        assert hub.requests[0].status == 200

As on the real one, large files (safetensors, tokenizer.model, pickles) are kept elsewhere: the hub answers 302 with a
signed address on a second port, which asks for no token. Small ones are led to /api/resolve-cache by a 307. Beside
that, /plain/owner/name/ is a repository's folder as any web server has it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from floe_chat.models.hub.download import Download

ALWAYS = 1 << 30
PORTAL = b"<!DOCTYPE html><html><title>Welcome aboard</title>Please accept our terms to use this network.</html>"
_LARGE = (".safetensors", ".gguf", ".pt", ".pth", ".bin", ".model")


@dataclass(slots=True)
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD /path" holds `match`, a regular expression.

    Attributes:
        status, headers, body: answered in place of everything. portal: a network's login page answers, with status 200.
        reset_after, close_after: the connection is reset, or closed as if all were well, after so many bytes of a body.
        stall_after: nothing follows so many bytes until the hub's `unstalled` is set. rate: bytes/s.
        flip: one byte of the file is wrong. ignore_range: all of the file comes, with status 200.
        short: the body, well-formed, ends so many bytes early. linked_size, total: by how much the size is wrong in the
        header of the redirect, and in Content-Range.
    """

    match: str
    times: int = 1
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""
    portal: bool = False
    reset_after: int | None = None
    close_after: int | None = None
    stall_after: int | None = None
    rate: float | None = None
    flip: bool = False
    ignore_range: bool = False
    short: int = 0
    linked_size: int = 0
    total: int = 0


@dataclass(slots=True)
class Request:
    """One request as it came. `storage`: to the second port. `sent`: bytes of the body that went out."""

    method: str
    path: str
    storage: bool
    range: str | None
    token: str | None
    agent: str
    cookie: str | None = None
    status: int = 0
    sent: int = 0


@dataclass(frozen=True, slots=True)
class Published:
    """One file of a repository."""

    path: Path
    size: int
    blob: str
    sha256: str | None

    @property
    def etag(self) -> str:
        return self.sha256 or self.blob

    @property
    def lfs(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "oid": self.sha256, "size": self.size, "pointerSize": 135}


@functools.cache
def _published(path: Path, _changed: int) -> Published:
    """Read once, since many tests publish the same files."""
    data = path.read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    sha256 = hashlib.sha256(data).hexdigest() if path.name.endswith(_LARGE) else None
    return Published(path, len(data), blob, sha256)


class Repository:
    """The files of a folder as one commit."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.files: dict[str, Published] = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            self.files[path.relative_to(folder).as_posix()] = _published(path, path.stat().st_mtime_ns)
        self.commit = hashlib.sha1("".join(file.etag for file in self.files.values()).encode()).hexdigest()

    def tree(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "oid": file.blob, "size": file.size, "path": name}
            | ({"lfs": file.lfs} if file.sha256 else {})
            for name, file in self.files.items()
        ]

    def info(self, *, gated: bool, blobs: bool) -> dict[str, Any]:
        siblings = [
            {"rfilename": name}
            | ({"blobId": file.blob, "size": file.size} if blobs else {})
            | ({"lfs": file.lfs} if blobs and file.sha256 else {})
            for name, file in self.files.items()
        ]
        fields = {"id": self.name, "modelId": self.name, "sha": self.commit, "private": False, "tags": []}
        return fields | {"_id": "0", "gated": "auto" if gated else False, "siblings": siblings}


class FakeHub:
    """The server. Use as a context manager.

    Args:
        files: repository id -> the folder with its files, read when the hub is made. gated, private: ids of which the
        files, or everything, are served only with `token`. link_uses: how often a signed address works.

    Attributes:
        token, stranger: one that may read everything, and one of an account that has accepted no terms.
        url: for HF_ENDPOINT. faults: what goes wrong; may be changed at any time. requests: all that came, in order.
    """

    def __init__(
        self,
        files: Mapping[str, Path],
        *,
        gated: Iterable[str] = (),
        private: Iterable[str] = (),
        link_uses: int = ALWAYS,
    ) -> None:
        self.repositories = {name: Repository(name, folder) for name, folder in files.items()}
        self.gated, self.private, self.link_uses = set(gated), set(private), link_uses
        self.token, self.stranger = "hf_valid", "hf_stranger"
        self.faults: list[Fault] = []
        self.requests: list[Request] = []
        self.unstalled = threading.Event()
        self.links: dict[str, int] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self._servers = [_Server(self, storage=False), _Server(self, storage=True)]
        self.url, self.storage_url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> Self:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.unstalled.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def used_by(self, patch: pytest.MonkeyPatch, home: Path) -> None:
        """Make this the hub of our code in this process, without the machine's own tokens, cache and proxies."""
        from huggingface_hub import constants

        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"):
            patch.delenv(name, raising=False)
            patch.delenv(name.lower(), raising=False)
        patch.setenv("HF_ENDPOINT", self.url)
        patch.setenv("FLOE_CHAT_OFFLINE", "0")
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_STORED_TOKENS_PATH", str(home / "stored_tokens"))
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))

    def sent(self, match: str = "") -> int:
        """Bytes of bodies that went out for paths that hold `match`."""
        return sum(request.sent for request in self.requests if match in request.path)

    def fault_for(self, request: Request) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.match, f"{request.method} {request.path}"):
                    fault.times -= 1
                    return fault
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, hub: FakeHub, *, storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.storage = storage

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is none of the test's business."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        """Not onto the test's output."""

    def do_GET(self) -> None:
        hub, parts = self.server.hub, urlsplit(self.path)
        self.path, self.query = unquote(parts.path), parse_qs(parts.query)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        agent = self.headers.get("User-Agent", "")
        self.request_seen = Request(
            self.command,
            self.path,
            self.server.storage,
            self.headers.get("Range"),
            token,
            agent,
            self.headers.get("Cookie"),
        )
        fault = hub.fault_for(self.request_seen)
        if fault is not None and fault.portal:
            self.reply(200, PORTAL, {"Content-Type": "text/html; charset=utf-8"})
        elif fault is not None and fault.status is not None:
            self.reply(fault.status, fault.body, fault.headers, fault)
        elif self.server.storage:
            self.store(fault)
        else:
            self.serve(fault)

    do_HEAD = do_GET  # noqa: N815 - the library's name

    def reply(
        self,
        status: int,
        body: bytes | dict[str, Any] | list[Any] = b"",
        headers: Mapping[str, str] = {},
        fault: Fault | None = None,
    ) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.begin(status, {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers})
        if self.command != "HEAD":
            self.send_body(bytearray(content), fault or Fault(""))

    def write(self, content: bytes | bytearray) -> None:
        """Counted first: who asks how much was sent may have read it before this thread goes on."""
        self.request_seen.sent += len(content)
        try:
            self.wfile.write(content)
        except OSError:
            self.request_seen.sent -= len(content)
            raise

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.request_seen.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def refuse(self, status: int, code: str, message: str) -> None:
        self.reply(status, {"error": message}, {"X-Error-Code": code, "X-Error-Message": message})

    def serve(self, fault: Fault | None) -> None:
        """The hub itself."""
        hub, token = self.server.hub, self.request_seen.token
        if self.path.startswith("/plain/"):
            self.serve_plainly(fault)
            return
        if token not in (None, hub.token, hub.stranger):
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return
        route = (
            re.fullmatch(r"/api/models/(?P<id>[^/]+/[^/]+)(?:/(?P<kind>revision|tree)/(?P<revision>[^/]+))?", self.path)
            or re.fullmatch(r"/(?P<id>[^/]+/[^/]+)/(?P<kind>resolve)/(?P<revision>[^/]+)/(?P<file>.+)", self.path)
            or re.fullmatch(
                r"/api/(?P<kind>resolve-cache)/models/(?P<id>[^/]+/[^/]+)/(?P<revision>[^/]+)/(?P<file>.+)", self.path
            )
        )
        repository = hub.repositories.get(route["id"]) if route else None
        if route is None or repository is None or (repository.name in hub.private and token != hub.token):
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif (route["revision"] or "main") not in ("main", repository.commit):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {route['revision']}")
        elif route["kind"] == "tree":
            self.reply(200, repository.tree())
        elif route["kind"] in (None, "revision"):
            info = repository.info(gated=repository.name in hub.gated, blobs="blobs" in self.query)
            self.reply(200, info, fault=fault)
        elif repository.name in hub.gated and token != hub.token:
            self.refuse(403 if token else 401, "GatedRepo", f"Access to model {repository.name} is restricted")
        elif route["file"] not in repository.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            self.serve_file(repository, route["kind"], route["file"], fault)

    def serve_file(self, repository: Repository, kind: str, name: str, fault: Fault | None) -> None:
        hub, file = self.server.hub, repository.files[name]
        headers = {"X-Repo-Commit": repository.commit, "ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        if file.sha256:
            with hub.lock:
                key = f"{next(hub.numbers):06d}"
                hub.links[key] = hub.link_uses
            size = file.size + (fault.linked_size if fault else 0)
            headers |= {"X-Linked-Size": str(size), "X-Linked-ETag": f'"{file.sha256}"'}
            address = f"{hub.storage_url}/storage/{file.sha256}/{quote(name)}?signature={key}"
            self.reply(302, b"", headers | {"Location": address})
        elif kind == "resolve":
            address = f"/api/resolve-cache/models/{repository.name}/{repository.commit}/{quote(name)}"
            self.reply(307, b"", headers | {"Location": address})
        else:
            self.send_file(file, headers, fault)

    def serve_plainly(self, fault: Fault | None) -> None:
        """A web server that knows nothing of models."""
        name, _, file = self.path.removeprefix("/plain/").rpartition("/")
        repository = self.server.hub.repositories.get(name)
        if repository is None or file not in repository.files:
            self.reply(404, b"<html>Not found</html>", {"Content-Type": "text/html"}, fault)
        else:
            self.send_file(repository.files[file], {}, fault)

    def store(self, fault: Fault | None) -> None:
        """Where the large files are."""
        hub = self.server.hub
        key = "".join(self.query.get("signature", []))
        with hub.lock:
            uses = hub.links.get(key, 0)
            hub.links[key] = uses - 1
        if uses <= 0:
            self.reply(403, b"<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "application/xml"})
            return
        sha256 = self.path.split("/")[2]
        files = (file for repository in hub.repositories.values() for file in repository.files.values())
        self.send_file(next(file for file in files if file.sha256 == sha256), {}, fault)

    def send_file(self, file: Published, headers: Mapping[str, str], fault: Fault | None) -> None:
        fault = fault or Fault("")
        start, end, status = 0, file.size, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if wanted and not fault.ignore_range:
            start, end, status = int(wanted[1]), min(int(wanted[2] or file.size) + 1, file.size), 206
            if start >= file.size:
                self.reply(416, b"", {"Content-Range": f"bytes */{file.size}"})
                return
        end -= fault.short
        if status == 206:
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{file.size + fault.total}"}
        with file.path.open("rb") as raw:
            raw.seek(start)
            data = bytearray(raw.read(end - start))
        if fault.flip:
            data[len(data) // 2] ^= 0x40
        kind = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        self.begin(status, {**headers, **kind})
        if self.command != "HEAD":
            self.send_body(data, fault)

    def send_body(self, data: bytearray, fault: Fault) -> None:
        stops = (fault.reset_after, fault.close_after, fault.stall_after)
        stop = min((stop for stop in stops if stop is not None), default=len(data))
        step = 1 << 16 if fault.rate is None else max(1, int(fault.rate / 50))
        for offset in range(0, min(stop, len(data)), step):
            part = data[offset : min(offset + step, stop)]
            self.write(part)
            if fault.rate is not None:
                time.sleep(len(part) / fault.rate)
        if fault.stall_after is not None:
            self.server.hub.unstalled.wait()
            self.close_connection = True
        elif stop < len(data):
            self.close_connection = True
            if fault.reset_after is not None:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()


def wait_all(download: Download) -> None:
    """Wait until every file of a download is here. Raises: FloeError as `Download.wait`."""
    for file in download.progress().files:
        download.wait(file.name)
