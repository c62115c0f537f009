"""Values, JSON texts and bytes as an enemy or a broken disk would have them, from a seeded generator."""

from __future__ import annotations

import json
from random import Random
from typing import Any

NAMES = (
    "../../x",
    "..",
    ".",
    "/",
    "/etc/passwd",
    "a/b",
    "",
    "a\0b",
    "x" * 5000,
    "CON",
    "~root",
    "\u202egpj.exe",
    "ü",
    "-rf",
)
NUMBERS: tuple[Any, ...] = (
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    -0.0,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
SCALARS: tuple[Any, ...] = (*NAMES, *NUMBERS, None, True, False, "\ud800", "\x1b[2J", "9" * 5000, "1e400", "²")


def scalar(rng: Random) -> Any:
    """Something that hardly any field expects."""
    return rng.choice(SCALARS)


def value(rng: Random, depth: int = 3) -> Any:
    """A scalar, or a list or object of some."""
    kind = rng.randrange(8) if depth else 0
    if kind == 6:
        return [value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 40)))]
    if kind == 7:
        return {str(scalar(rng)): value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))}
    return scalar(rng)


def altered(rng: Random, good: Any, changes: int = 1) -> Any:
    """A copy of `good`, which JSON can hold, with so many places of it changed, added or gone."""
    copy = json.loads(json.dumps(good))
    for _ in range(changes):
        copy = _altered(rng, copy)
    return copy


def _altered(rng: Random, good: Any) -> Any:
    if isinstance(good, dict) and good and rng.random() < 0.9:
        key = rng.choice(list(good))
        match rng.randrange(8):
            case 0:
                del good[key]
            case 1:
                good[str(scalar(rng))] = value(rng)
            case 2:
                good[rng.choice(list(good))] = good[key]
            case _:
                good[key] = _altered(rng, good[key])
        return good
    if isinstance(good, list) and good and rng.random() < 0.9:
        at = rng.randrange(len(good))
        match rng.randrange(8):
            case 0:
                del good[at]
            case 1:
                good.insert(at, value(rng))
            case 2:
                good.append(good[at])
            case _:
                good[at] = _altered(rng, good[at])
        return good
    if type(good) is int and rng.random() < 0.5:
        return good + rng.choice((-1, 1, 7, -good, 10**6, 1 << 40))
    if isinstance(good, str) and good and rng.random() < 0.3:
        return rng.choice((good.upper(), good[:-1], good + good, good + "/../x", " " + good))
    return value(rng)


def text(rng: Random, good: Any) -> bytes:
    """`good` as JSON, mostly altered as a value, sometimes as bytes, now and then something else altogether."""
    kind = rng.randrange(20)
    if kind == 0:
        return rng.choice((b"", b"null", b"[]", b"{}", b"\xff\xfe", b"\xef\xbb\xbf{}", b"0", b'"', b"NaN", b"{}{}"))
    if kind == 1:
        return rng.choice((b"[", b'{"a":', b'[{"":')) * rng.choice((10, 100_000))
    if kind == 2:
        return b"[" + b"9" * rng.choice((10, 5000)) + b"]"
    content = json.dumps(altered(rng, good, rng.choice((1, 1, 1, 2, 5)))).encode()
    return damaged(rng, content) if kind < 6 else content


def damaged(rng: Random, content: bytes) -> bytes:
    """Bytes cut off, flipped, doubled, overwritten or put in."""
    raw = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                del raw[at:]
            case 1 if at < len(raw):
                raw[at] ^= 1 << rng.randrange(8)
            case 2:
                raw[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
            case 3:
                raw[at:at] = raw[max(0, at - 20) : at]
            case _:
                raw[at : at + 8] = rng.choice((bytes(8), b"\xff" * 8, rng.randbytes(8)))
    return bytes(raw)
