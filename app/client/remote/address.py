"""The address of a server that answers, and the key that it wants."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ....models import private_file
from ....models.errors import UsageError

KEY_VARIABLE = "FLOE_CHAT_KEY"
_LONGEST_KEY = 8192  # bytes
_EXAMPLE = "Example: floe-chat --connect http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server answers.

    Attributes:
        base: what paths such as /models are added to, "https://example.org/v1". host: and its port, for people.
        name: the host alone. loopback: the server is on this machine. encrypted: whether TLS protects what is sent.
    """

    base: str
    host: str
    name: str
    loopback: bool
    encrypted: bool

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address in `text`; a path is kept, and without one it is /v1. Without http:// only for this machine.

        Raises:
            UsageError: it is not an address, or holds a password or a query.
        """
        given = text.strip()
        parts = _split(given if "://" in given else f"http://{given}", given)
        name = parts.hostname or ""
        loopback = _is_loopback(name)
        if "://" not in given and not loopback:
            raise _unusable(given, "It does not say whether to encrypt.", f"Write https://{given} or http://{given}")
        path = parts.path.rstrip("/") or "/v1"
        for tail in ("/chat/completions", "/models"):
            path = path.removesuffix(tail)
        shown = f"[{name}]" if ":" in name else name
        host = shown if parts.port is None else f"{shown}:{parts.port}"
        return cls(f"{parts.scheme}://{host}{path}", host, name, loopback, parts.scheme == "https")


def _split(text: str, given: str) -> SplitResult:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise _unusable(given, f"{error}.") from error
    if parts.username is not None or parts.password is not None:
        hint = f"Put the key into a file and give --key-file, or set {KEY_VARIABLE}."
        raise UsageError("The address must not hold a password", "Other users can see command lines.", hint)
    if parts.scheme not in ("http", "https"):
        raise _unusable(given, "It begins neither with http:// nor with https://.")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", parts.hostname or "", re.ASCII) or port == 0:
        raise _unusable(given, "It names no host, or one that is not written in ASCII.")
    if parts.query or parts.fragment or not re.fullmatch(r"[A-Za-z0-9._~/@:+-]*", parts.path, re.ASCII):
        raise _unusable(given, "Its path has characters that do not belong there.")
    return parts


def _unusable(given: str, cause: str, hint: str = _EXAMPLE) -> UsageError:
    return UsageError(f"{given[:200]!r} is not the address of a server", cause, hint)


def _is_loopback(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Key:
    """A server's key. It never appears in a log, a traceback or an error."""

    value: str = field(default="", repr=False)

    def hidden_in(self, text: str) -> str:
        """`text` without the key, which some servers repeat in their refusals."""
        return text.replace(self.value, "(the key)") if self.value else text


def read_key(file: Path | None) -> Key:
    """The key in `file`, or in the variable FLOE_CHAT_KEY, which other programs started from here do not get.

    Raises:
        UsageError: the file cannot be read, others may read it, or it does not hold one line of visible ASCII.
    """
    given = os.environ.pop(KEY_VARIABLE, "")
    if file is None:
        return _checked(given, KEY_VARIABLE)
    try:
        content = private_file.read(file, _LONGEST_KEY)
        shared = os.name != "nt" and file.stat().st_mode & 0o077
    except OSError as error:
        raise UsageError(
            f"{file} cannot be read", f"{error.strerror or error}.", "Give a file with the key."
        ) from error
    if shared:
        raise UsageError(f"Other users can read {file}", "It holds a key.", f"Close it: chmod 600 {file}")
    return need_key(content.decode("ascii", "replace"), str(file))


def need_key(text: str, where: str) -> Key:
    """The key in `text`, which came from `where`. Raises UsageError: there is none, or it is not one."""
    key = _checked(text, where)
    if not key.value:
        raise UsageError(f"{where} holds no key", "It is empty.", "Give the key in one line.")
    return key


def _checked(text: str, where: str) -> Key:
    key = text.strip()
    if not re.fullmatch(r"[\x21-\x7e]*", key):
        raise UsageError(f"{where} does not hold a key", "A key is one line of ASCII characters.", "Copy it again.")
    return Key(key)
