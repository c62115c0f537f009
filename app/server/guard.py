"""Who may ask: by the key, and not from a web page that nobody allowed."""

from __future__ import annotations

import hmac
from collections.abc import Collection
from urllib.parse import SplitResult, urlsplit

from starlette.requests import HTTPConnection

from .refusals import RefusedError

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
OPEN = frozenset({"/health"})
"""Paths that need no key."""


class Guard:
    """Checks requests.

    Args:
        key: None: whoever reaches this server may ask. hosts: names by which it may be called, None: any. A page of
            another site whose name leads here by a lying name server is refused that way. origins: pages that may ask.
    """

    def __init__(self, key: str | None, hosts: Collection[str] | None, origins: Collection[str]) -> None:
        self._key = None if key is None else key.encode()
        self._hosts, self._origins = hosts, frozenset(origins)

    def check(self, asked: HTTPConnection) -> None:
        """Raises RefusedError: this request is not allowed."""
        host = asked.headers.get("host", "")
        if self._hosts is not None and _name(host) not in self._hosts:
            raise RefusedError(403, f"This server is not called {host[:100]!r}.", None, "wrong_host")
        origin = asked.headers.get("origin")
        if origin is not None and origin not in self._origins and _split(origin).netloc != host:
            message = f"Pages of {origin[:100]!r} may not ask this server. Start it with --allow-origin to let them."
            raise RefusedError(403, message, None, "wrong_origin")
        if self._key is not None and asked.scope["path"] not in OPEN and asked.scope.get("method") != "OPTIONS":
            kind, _, given = asked.headers.get("authorization", "").partition(" ")
            given = given.strip() if kind.lower() == "bearer" else ""
            if not hmac.compare_digest(given.encode("latin-1", "replace"), self._key):
                message = "The key is wrong, or there is none. Send it as: Authorization: Bearer KEY"
                raise RefusedError(401, message, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


def _name(host: str) -> str:
    return _split(f"//{host}").hostname or ""


def _split(url: str) -> SplitResult:
    """The parts of an address; none of what is no address, such as "http://["."""
    try:
        return urlsplit(url)
    except ValueError:
        return SplitResult("", "", "", "", "")
