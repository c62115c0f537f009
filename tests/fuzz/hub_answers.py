"""A hub, its storage, or a proxy in between that answers whatever it likes, over real HTTP."""

from __future__ import annotations

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

import torch
from floe_chat.app.setup.setups import look_up
from floe_chat.app.setup.wish import Wish
from floe_chat.models import catalog
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.checkpoint_files import INDEX
from floe_chat.models.errors import FloeError
from floe_chat.models.hub import hub_errors, hub_request, places, repository
from floe_chat.models.hub.download import Download
from floe_chat.models.hub.fetch_loop import Patience
from floe_chat.models.hub.remote_checkpoint import HubShelf
from floe_chat.models.hub.remote_gguf import remote
from floe_chat.models.hub.repository import resolve

from ..helpers import make_checkpoint
from ..models.gguf.converting import convert
from . import _hostile, _hostile_http

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
GGUF = "tiny-Q8_0.gguf"
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
        if name.endswith((".safetensors", ".gguf")):
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
            return _hostile_http.message(rng, *_served(path, wanted, files, listing), HUB.url)

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
    if name == GGUF:
        return _hostile.damaged(rng, good[:4000]) + good[4000:]
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


def gguf(folder: Path) -> str:
    """A GGUF file: what a packer asks of it first, and one tensor."""
    repo, _ = places.look_up(f"{REPO}:Q8_0")
    with remote(repo, folder, tuning=HASTY) as shelf:
        checkpoint = Checkpoint(shelf)
        name = checkpoint.dense_names()[0]
        shelf.order(checkpoint.files(name))
        assert checkpoint.tensor(name).numel()
    return "a tensor"


ACTS = (look, headers, small, fetch, gguf)


def good(scratch: Path) -> None:
    """Each act with an honest hub."""
    source = make_checkpoint(scratch / "source", hidden=32, intermediate=64, dtype=torch.float16)
    FILES[GGUF] = convert(source, scratch / GGUF, "Q8_0").read_bytes()
    HUB.answer = lambda path, wanted: _honest(Random(0), path, wanted, FILES, json.dumps(_listing(FILES)).encode())
    HUB.ending = lambda: ""
    for act in ACTS[1:]:
        act(scratch / "folder")
        shutil.rmtree(scratch / "folder", ignore_errors=True)
