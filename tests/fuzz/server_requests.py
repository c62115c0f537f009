"""Requests of strangers to the server: bodies of both protocols, other paths and methods, headers, and broken HTTP.

The demo model answers, by a server of the program's own on a real socket; another one has a key. A request is answered,
or refused with a reason in OpenAI's form, and none of them is a fault of the program's.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import logging
import socket
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from floe_chat.models.catalog import asset

from ..app.server.serving import Served, serving
from . import _hostile

_TEXTS = ("What is an expert?", "", "<|im_end|>", "é🎉", "a\0\x1b[2J", "x" * 3000)
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
_CALL = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"at": "sea"}'}}
_FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
_DRAWING: dict[str, Any] = {
    "n": 2,
    "stop": [".", "x"],
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "min_p": 0.1,
    "top_k": 5,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"7": 5, "9": -100},
    "user": "me",
    "stream": True,
    "stream_options": {"include_usage": True},
    "floe": {"preset": "Balanced", "think": False, "figures": True},
}
_CHAT: dict[str, Any] = {
    "max_completion_tokens": 2,
    "response_format": _FORM,
    "logprobs": True,
    "top_logprobs": 3,
    "tools": [_TOOL],
    "tool_choice": {"type": "function", "function": {"name": "find"}},
    "parallel_tool_calls": False,
}
_RULE = {"sparsity": 0.5, "product": 0.1, "drop": 0.1, "major": 0.2, "weighed": True, "alpha": 0.0, "late": 0.0}
_PATHS = (
    *("/health", "/metrics", "/openapi.json", "/v1/models", "/v1/models/{model}", "/v1/models/", "/v1/models/../x"),
    *("/", "//", "/v1", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/%00", "/\xff", "/" + "a" * 9000),
    *("*", "http://x/v1/models", "/v1/models?x=" + "y" * 300, "/health#x", "/v1/models/%2e%2e%2f", "/[", "//["),
)
_HEADERS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Host", ("localhost", "[::1]:80", "evil.example", "", "[", "a" * 5000, "localhost:x", "127.0.0.1:99999", "\xff")),
    ("Origin", ("null", "http://a.example", "http://[", "http://localhost", "", "http://a.example:x", "\xff", "//[::")),
    ("Authorization", ("Bearer secret", "Bearer", "Basic x", "bearer  secret ", "Bearer \xff", "", "x" * 9000)),
    ("Content-Type", ("text/plain", "application/json; charset=utf-16", "multipart/form-data", "", "\xff")),
    ("Content-Length", ("0", "-1", "1e3", "99999999999999999999", "3", "x")),
    ("Transfer-Encoding", ("chunked", "gzip", "identity", "chunked, chunked")),
    ("Expect", ("100-continue", "x")),
    ("Connection", ("close", "keep-alive", "Upgrade")),
    ("Upgrade", ("websocket", "h2c")),
    ("Content-Encoding", ("gzip", "br")),
    ("Access-Control-Request-Method", ("POST", "X")),
    ("Access-Control-Request-Headers", ("authorization", "x" * 300, "\xff")),
    ("X-Forwarded-For", ("1.2.3.4", "\xff")),
    ("Cookie", ("a=b", "=" * 300)),
)
_METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "X")
_REFUSALS = frozenset({400, 401, 403, 404, 405, 408, 413, 429})
_held = contextlib.ExitStack()
_servers: list[Served] = []


def good(scratch: Path) -> None:
    """Two servers that answer."""
    logging.disable(logging.CRITICAL)
    packed = asset("demo", "packed")
    _servers.append(_held.enter_context(serving(packed)))
    _servers.append(_held.enter_context(serving(packed, key="secret", origins=("http://a.example",))))
    for served in _servers:
        _still_answers(served)


def attempt(seed: int, scratch: Path) -> str:
    rng = Random(seed)
    served = _servers[0] if rng.random() < 0.8 else _servers[1]
    kind = rng.randrange(10)
    method, (path, body) = "POST", _asked(rng, served)
    if kind in (1, 2):
        method, path, body = rng.choice(_METHODS), rng.choice(_PATHS).replace("{model}", served.model), _body(rng, {})
    request = _request(rng, served, method, path, body, headers=(0, 3, 3, 2)[kind] if kind < 4 else 0)
    found = _send(served, _hostile.damaged(rng, request) if kind == 0 else request, whole=kind > 3)
    if seed % 50 == 0:
        _still_answers(served)
    return found


def _still_answers(served: Served) -> None:
    body = {"model": served.model, "messages": [{"role": "user", "content": "What is an expert?"}], "max_tokens": 3}
    sent = _request(Random(0), served, "POST", "/v1/chat/completions", json.dumps(body).encode())
    assert _send(served, sent, whole=True) == "answered"


def _asked(rng: Random, served: Served) -> tuple[str, bytes]:
    """A path and a body for it."""
    chat = rng.random() < 0.75
    fields: dict[str, Any] = {"model": served.model, "max_tokens": rng.choice((1, 2, 5))}
    some = _DRAWING | (_CHAT if chat else {"logprobs": 2})
    fields |= {name: value for name, value in some.items() if rng.random() < 0.15}
    if rng.random() < 0.1:
        fields["floe"] = {"rule": _RULE}
    if rng.random() < 0.3:
        fields["tool_choice" if chat else "stop"] = rng.choice(("none", "auto", "required"))
    if chat:
        fields["messages"] = _messages(rng)
    else:
        fields["prompt"] = rng.choice((rng.choice(_TEXTS), list(rng.choices(_TEXTS, k=rng.randrange(1, 4)))))
    return f"/v1/{'chat/' * chat}completions", _body(rng, fields)


def _messages(rng: Random) -> list[dict[str, Any]]:
    talk: list[dict[str, Any]] = [{"role": rng.choice(("system", "developer")), "content": "Be brief."}]
    talk = talk if rng.random() < 0.3 else []
    content = rng.choice(_TEXTS)
    talk += [{"role": "user", "content": rng.choice((content, [{"type": "text", "text": content}]))}]
    if rng.random() < 0.3:
        talk += [{"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [_CALL]}]
        talk += [{"role": "tool", "tool_call_id": "1", "content": rng.choice(_TEXTS)}]
    return talk


def _body(rng: Random, fields: dict[str, Any]) -> bytes:
    """Fields as they are, or altered; an answer of many tokens is asked for by none of them."""
    if rng.random() < 0.2:
        return json.dumps(fields).encode()
    body = _hostile.text(rng, fields)
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        return body
    if isinstance(given, dict):
        most = given.get("max_tokens")
        if most is None or (type(most) is int and most > 5):
            given["max_tokens"] = 3
        if type(most := given.get("max_completion_tokens")) is int and most > 5:
            given["max_completion_tokens"] = 3
        return json.dumps(given).encode()
    return body


def _request(rng: Random, served: Served, method: str, path: str, body: bytes, headers: int = 0) -> bytes:
    """An HTTP request, with so many headers that are strange."""
    fields = {"Host": urlsplit(served.root).netloc, "Content-Length": str(len(body)), "Connection": "close"}
    if served.key is not None and rng.random() < 0.9:
        fields["Authorization"] = f"Bearer {served.key}"
    for name, values in rng.sample(_HEADERS, headers):
        fields[name] = rng.choice(values)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def _send(served: Served, request: bytes, *, whole: bool) -> str:
    """What comes back: of a request that is `whole` HTTP an answer; of another maybe nothing, once it has ended."""
    address = urlsplit(served.root)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=30) as connection:
        try:
            connection.sendall(request)
            if not whole:
                connection.shutdown(socket.SHUT_WR)
            received = _received(connection)
        except OSError:
            assert not whole
            return "cut off"
    if not whole and (not received or (received.startswith(b"HTTP/1.1 100") and received.count(b"\r\n\r\n") == 1)):
        return "left"
    return _checked(received, request)


def _received(connection: socket.socket) -> bytes:
    parts = list[bytes]()
    while part := connection.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


class _Answer(socket.socket):
    """What `http.client` reads an answer from."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def makefile(self, *_: Any, **__: Any) -> Any:
        return io.BytesIO(self._content)


def _checked(received: bytes, request: bytes) -> str:
    method = request.split(b" ", 1)[0].decode("latin-1")
    answer = http.client.HTTPResponse(_Answer(received), method=method)
    answer.begin()
    content = answer.read()
    for text in (b"bug in floe-chat", b"Traceback", b"Internal Server Error"):
        assert text not in content, content[:2000]
    if answer.status == 200:
        _whole(content, answer.headers.get_content_type())
        return "answered"
    assert answer.status in _REFUSALS, (answer.status, content[:2000])
    if content and answer.headers.get_content_type() == "application/json":
        error = json.loads(content)["error"]
        assert error["message"] and len(error["message"]) < 1500, content[:2000]
    return f"refused {answer.status}"


def _whole(content: bytes, kind: str) -> None:
    """An answer that ends as it should."""
    if kind == "application/json" and content:
        json.loads(content)
    elif kind == "text/event-stream":
        events = content.decode().split("\n\n")
        assert events.pop() == "" and all(event.startswith("data: ") for event in events), content[:2000]
        last = events.pop()
        for event in events:
            assert "choices" in json.loads(event[6:]), event
        assert last == "data: [DONE]" or "error" in json.loads(last[6:]), last
