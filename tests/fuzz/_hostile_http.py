"""Answers over HTTP that an enemy or a broken proxy would give, from a seeded generator."""

from __future__ import annotations

import gzip
import json
from random import Random

from . import _hostile

_STATUSES = (
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
_WORDS = (
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
_HEADERS = (
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


def _location(rng: Random, hub: str) -> str:
    return rng.choice(
        (
            "",
            "/",
            "/elsewhere",
            f"{hub}/elsewhere",
            f"http://localhost:{hub.rpartition(':')[2]}/elsewhere",
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


def message(rng: Random, good: bytes, part: tuple[int, int] | None, hub: str) -> bytes:
    """A whole answer of the hub at this address: mostly one thing of it is wrong."""
    status, headers, body = 200, {"Content-Type": "application/json"}, good
    if part is not None:
        status, headers["Content-Range"] = 206, f"bytes {part[0]}-{part[1] - 1}/{len(good)}"
        body = good[part[0] : part[1]]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        match rng.randrange(5):
            case 0:
                status = rng.choice(_STATUSES)
            case 1 | 2:
                name = rng.choice(_HEADERS)
                headers[name] = _location(rng, hub) if name == "Location" else rng.choice(_WORDS)
            case 3:
                body = _body(rng, body)
            case _:
                headers["Location"], status = _location(rng, hub), rng.choice((301, 302, 303, 307, 308))
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
