"""A hub, its storage, or a proxy in between that answers whatever it likes, over real HTTP."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from floe_chat.app.setup.setups import look_up
from floe_chat.app.setup.wish import Wish
from floe_chat.models import catalog
from floe_chat.models.checkpoint_files import INDEX
from floe_chat.models.errors import FloeError
from floe_chat.models.hub import hub_errors, hub_request, repository
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.repository import resolve

from . import _hostile

REPO = "floe/tiny"
TOKEN = "hf_secret"
HASTY = Patience(
    connections=2,
    piece=300,
    first_wait=0.0,
    longest_wait=0.001,
    give_up=0.05,
    silence=0.1,
    longest_asked=0.0,
    sync=0.01,
)
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


def _shard(number: int) -> bytes:
    header = {
        f"layer.{number}.{part}": {"dtype": "U8", "shape": [4, 50], "data_offsets": [n * 200, n * 200 + 200]}
        for n, part in enumerate("ab")
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(200)) * 2


FILES: dict[str, bytes] = {
    **{shard: _shard(number) for number, shard in enumerate(SHARDS)},
    INDEX: json.dumps(
        {"weight_map": {f"layer.{n}.{part}": shard for n, shard in enumerate(SHARDS) for part in "ab"}}
    ).encode(),
    "config.json": json.dumps(
        {
            "model_type": "mixtral",
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "num_attention_heads": 4,
            "vocab_size": 300,
        }
    ).encode(),
    "tokenizer.json": b"{}",
}


def _listing(files: dict[str, bytes]) -> dict[str, Any]:
    siblings: list[dict[str, Any]] = []
    for name, content in files.items():
        entry: dict[str, Any] = {"rfilename": name, "size": len(content)}
        entry["blobId"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        if name.endswith("safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
        siblings.append(entry)
    return {"id": REPO, "sha": "ab" * 20, "gated": False, "siblings": siblings}


class Hub:
    """Answers every connection by `answer`, a function of the request's path and range; may lie, stall and reset."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.answer: Callable[[str, str], bytes] = lambda _path, _range: b""
        self.ending: Callable[[], str] = lambda: ""
        self.strangers: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(2)
                request = b""
                while b"\r\n\r\n" not in request:
                    if not (part := connection.recv(65536)):
                        return
                    request += part
                text = request.decode("latin-1")
                path, *headers = text.split("\r\n")
                wanted = next((line[6:].strip() for line in headers if line.lower().startswith("range:")), "")
                if "/elsewhere" in path or not path.startswith("GET "):
                    self.strangers.append(text)
                connection.sendall(self.answer(path.split(" ")[1], wanted))
                match self.ending():
                    case "reset":
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    case "stall":
                        connection.recv(1)
                    case _:
                        pass
        except OSError:
            pass  # it had enough, as hostile answers make it


STATUSES = (
    200,
    200,
    200,
    206,
    204,
    301,
    302,
    307,
    308,
    400,
    401,
    403,
    404,
    408,
    410,
    416,
    418,
    429,
    451,
    500,
    503,
    599,
    999,
)
WORDS = (
    "",
    "0",
    "-1",
    "1",
    "²",
    "9" * 30,
    "9" * 5000,
    "inf",
    "nan",
    "1e400",
    "Fri, 31 Dec 9999 23:59:59 GMT",
    "Thu, 01 Jan 0001 00:00:00 +2359",
    "\xff\xfe",
    "a" * 60_000,
    "\x1b[2J",
    "bytes 0-5/6",
    "bytes 0-99999999999999999999/7",
    "bytes */*",
    "GatedRepo",
    "RepoNotFound",
    "EntryNotFound",
    "RevisionNotFound",
    "gzip",
    "gzip, gzip, gzip",
    "br",
    "identity",
    "text/html",
    "chunked",
    '"api";r=0;t=9',
    'W/"x"',
    "=?utf-8?b?////?=",
)
HEADERS = (
    "Content-Type",
    "Content-Length",
    "Content-Encoding",
    "Transfer-Encoding",
    "Content-Range",
    "Retry-After",
    "RateLimit",
    "X-Error-Code",
    "X-Error-Message",
    "X-Linked-Size",
    "X-Linked-ETag",
    "ETag",
    "Location",
    "Set-Cookie",
    "Connection",
    "Upgrade",
    "X-Repo-Commit",
)


def _location(rng: Random) -> str:
    return rng.choice(
        (
            "",
            "/",
            "/elsewhere",
            f"{HUB.url}/elsewhere",
            f"http://localhost:{HUB.url.rpartition(':')[2]}/elsewhere",
            "//",
            "http://",
            "http://[::1",
            "http://127.0.0.1:99999/",
            "http://127.0.0.1:1/",
            "ftp://127.0.0.1/x",
            "file:///etc/passwd",
            "http://user:password@127.0.0.1:1/",
            "http://\xff/",
            "http://xn--a/",
            "http://" + "a." * 200,
            "?x=" + "y" * 9000,
            "javascript:1",
            "data:,x",
        )
    )


def _body(rng: Random, good: bytes) -> bytes:
    match rng.randrange(12):
        case 0:
            return b""
        case 1:
            return b"<html>Sign in</html>"
        case 2:
            return _hostile.damaged(rng, good)
        case 3:
            return gzip.compress(gzip.compress(bytes(50 << 20), 1), 1)
        case 4:
            return _hostile.text(rng, {"error": "Out of order"})
        case 5:
            return json.dumps({"error": _hostile.value(rng)}).encode()
        case 6:
            return good + rng.randbytes(rng.choice((1, 5000)))
        case 7:
            return good[: rng.randrange(len(good) + 1)]
        case 8:
            return b"x" * rng.choice((70_000, 3 << 20))
        case _:
            return good


def _message(rng: Random, good: bytes, part: tuple[int, int] | None) -> bytes:
    """A whole answer: mostly one thing of it is wrong."""
    status, headers, body = 200, {"Content-Type": "application/json"}, good
    if part is not None:
        status, headers["Content-Range"] = 206, f"bytes {part[0]}-{part[1] - 1}/{len(good)}"
        body = good[part[0] : part[1]]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        match rng.randrange(5):
            case 0:
                status = rng.choice(STATUSES)
            case 1 | 2:
                name = rng.choice(HEADERS)
                headers[name] = _location(rng) if name == "Location" else rng.choice(WORDS)
            case 3:
                body = _body(rng, body)
            case _:
                headers["Location"], status = _location(rng), rng.choice((301, 302, 303, 307, 308))
    return _framed(rng, status, headers, body)


def _framed(rng: Random, status: int, headers: dict[str, str], body: bytes) -> bytes:
    if rng.random() < 0.15:
        headers["Transfer-Encoding"] = "chunked"
        size = (
            rng.choice((b"%x", b"0%x", b"-%x", b"%x;x=y", b"%xg")) % len(body)
            if rng.random() < 0.5
            else b"%x" % len(body)
        )
        body = size + b"\r\n" + body + b"\r\n" + rng.choice((b"0\r\n\r\n", b"0\r\n", b"0\r\nX-Late: y\r\n\r\n"))
    else:
        headers.setdefault("Content-Length", str(len(body) if rng.random() < 0.9 else rng.choice((0, 1, 1 << 40))))
    lines = [f"HTTP/1.1 {status} Words", *(f"{name}: {word}" for name, word in headers.items()), "Connection: close"]
    if rng.random() < 0.03:
        lines = rng.choice((["HTTP/9.9 200 OK"], ["ICY 200 OK"], [""], ["HTTP/1.1 2"], [*lines, "No colon"], lines * 2))
    if rng.random() < 0.03:
        lines[:0] = ["HTTP/1.1 100 Continue", "", "HTTP/1.1 103 Early", ""]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "replace") + body


def _served(path: str, wanted: str, files: dict[str, bytes], listing: bytes) -> tuple[bytes, tuple[int, int] | None]:
    """What an honest hub would give for a request: all of a file, and the part of it that was asked for."""
    name = path.rpartition("/")[2]
    content = listing if path.startswith("/api/") else files.get(name, b"")
    if wanted.startswith("bytes="):
        start, _, end = wanted[6:].partition("-")
        return content, (int(start), min(len(content), int(end) + 1))
    return content, None


def _honest(rng: Random, path: str, wanted: str, files: dict[str, bytes], listing: bytes) -> bytes:
    content, part = _served(path, wanted, files, listing)
    status, extra = (
        ("200", "") if part is None else ("206", f"Content-Range: bytes {part[0]}-{part[1] - 1}/{len(content)}\r\n")
    )
    body = content if part is None else content[part[0] : part[1]]
    head = f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}\r\n{extra}Connection: close\r\n\r\n"
    return head.encode() + body


def _patient() -> None:
    """Waits are cut short, or a campaign would consist of them."""
    repository._LONGEST_WAIT, repository._PATIENCE_S = 0.0, 3.0  # pyright: ignore[reportPrivateUsage]
    hub_errors.backoff = lambda failures, first=0.0, longest=0.0: 0.0
    hub_request.SILENCE_S, hub_request._CONNECT_S, hub_request._SHORT_S = 0.1, 0.5, 0.1  # pyright: ignore[reportPrivateUsage]


HUB = Hub()
_patient()
os.environ.update(HF_ENDPOINT=HUB.url, HF_TOKEN=TOKEN, FLOE_CHAT_OFFLINE="0", NO_PROXY="127.0.0.1,localhost")


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    files, listing = dict(FILES), json.dumps(_listing(FILES)).encode()
    content = rng.choice(("none", "none", "listing", "listing", "file", "file", "file"))
    if content == "listing":
        listing = _hostile.text(rng, _listing(FILES))
    elif content == "file":  # of the publisher's own making: sizes and hashes are right
        name = rng.choice([*FILES, *SHARDS])
        files[name] = _published(rng, name)
        listing = json.dumps(_listing(files)).encode()
    wrong = 0.0 if content != "none" and rng.random() < 0.8 else rng.choice((0.2, 0.5, 1.0))
    lock = threading.Lock()

    def answer(path: str, wanted: str) -> bytes:
        with lock:
            if rng.random() >= wrong:
                return _honest(rng, path, wanted, files, listing)
            return _message(rng, *_served(path, wanted, files, listing))

    HUB.answer = answer
    HUB.ending = lambda: rng.choice(("", "", "", "", "", "", "", "reset", "stall")) if rng.random() < wrong else ""
    HUB.strangers.clear()
    folder = scratch / "folder"
    try:
        return ACTS[seed % len(ACTS)](folder)
    except FloeError as error:
        said = str(error)
        assert "bug in floe-chat" not in said and len(said) < 6100 and "inf " not in said, said[:300]
        assert TOKEN not in said
        return f"refused: {type(error).__name__}"
    finally:
        HUB.answer = lambda _path, _range: b""
        shutil.rmtree(folder, ignore_errors=True)
        elsewhere = [text for text in HUB.strangers if TOKEN in text and "localhost" in text]
        assert not elsewhere, "the token went to another host"


def _published(rng: Random, name: str) -> bytes:
    good = FILES[name]
    if not name.endswith("safetensors"):
        return _hostile.text(rng, json.loads(good))
    if rng.random() < 0.3:
        return _hostile.damaged(rng, good)
    length = int.from_bytes(good[:8], "little")
    header = _hostile.text(rng, json.loads(good[8 : 8 + length]))
    size = rng.choice((len(header), len(header), len(header), length, 0, 1 << 62))
    return size.to_bytes(8, "little") + header + good[8 + length :]


def look(_folder: Path) -> str:
    """As the wizard and `plan` ask."""
    entry = look_up(Wish(REPO, "tiny", home=catalog.models_folder()))
    return f"looked up: {entry.sizes.model_type}"


def headers(_folder: Path) -> str:
    """As a setup asks before the first weight."""
    repo = resolve(REPO)
    found = {file.name: repo.header(file.name) for file in repo.shards()}
    repo.check_index(found)
    return f"{len(found)} headers"


def small(folder: Path) -> str:
    """Small files, into a folder."""
    with HubShelf(resolve(REPO), folder, tuning=HASTY) as shelf:
        got = [shelf.small(name) for name in ("config.json", "tokenizer.json", INDEX)]
    assert all(path is None or path.parent == folder for path in got)
    return f"{sum(path is not None for path in got)} small files"


def fetch(folder: Path) -> str:
    """Shards, into a folder: whole and right, or not at all."""
    repo = resolve(REPO)
    names = [file.name for file in repo.files if file.name.endswith("safetensors")][:2]
    with Download(repo, names, folder, tuning=HASTY).start() as download:
        for name in names:
            path, file = download.wait(name), repo.file(name)
            assert file is not None and path.parent == folder
            digest = file.digest()
            digest.update(path.read_bytes())
            assert digest.hexdigest() == file.hash
    return f"{len(names)} shards"


ACTS = (look, headers, small, fetch)


def good(scratch: Path) -> None:
    """Each act with an honest hub."""
    HUB.answer = lambda path, wanted: _honest(Random(0), path, wanted, FILES, json.dumps(_listing(FILES)).encode())
    HUB.ending = lambda: ""
    for act in ACTS[1:]:
        act(scratch / "folder")
        shutil.rmtree(scratch / "folder", ignore_errors=True)
