"""Saved servers: a name for each address, the model there, and the key if the person saved one.

They are in a file of their own, which only the person can read, beside the settings: people show their settings to
others, and keep them in repositories.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...models import private_file
from ...models.errors import FloeError, UsageError
from .file import settings_file

_LARGEST = 1 << 20  # bytes
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


@dataclass(frozen=True, slots=True)
class SavedServer:
    """A server; two names may be of one. `model`: its id there, "" for the only one. `key`: "" if none is saved."""

    name: str = field(compare=False)
    url: str
    model: str = ""
    key: str = field(default="", repr=False)


def servers_file() -> Path:
    """The file of saved servers."""
    return settings_file().with_name("servers.json")


def is_name(text: str) -> bool:
    """Whether `text` can be the name of a saved server; addresses cannot."""
    return _NAME.fullmatch(text) is not None and text != "localhost"


def servers() -> list[SavedServer]:
    """All saved servers, by name. Raises FloeError: the file cannot be read."""
    file = servers_file()
    try:
        found: Any = private_file.read_json(file, _LARGEST)
        private_file.own_file(private_file.real(file))
        read = [SavedServer(**{name: str(value) for name, value in entry.items()}) for entry in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        cause = f"{getattr(error, 'strerror', None) or 'It is not a list of servers'}."
        raise FloeError(f"{file} cannot be read", cause, "Delete it, and save your servers again.") from error
    return sorted((one for one in read if is_name(one.name)), key=lambda one: one.name)


def server(name: str) -> SavedServer:
    """The saved server of this name. Raises UsageError: there is none. FloeError: as `servers`."""
    known = servers()
    for one in known:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in known)
    cause = f"Saved: {names}." if known else "No server is saved yet."
    raise UsageError(f"There is no saved server {name}", cause, "Give an address, such as http://127.0.0.1:8000.")


def keep(added: SavedServer) -> None:
    """Save a server, in place of an earlier one of its name. Raises FloeError: it cannot be written."""
    if not is_name(added.name):
        hint = "Use letters, digits, - and _; at most 40."
        raise UsageError(f"{added.name[:60]!r} cannot be the name of a server", "It could be an address.", hint)
    _write([*(one for one in servers() if one.name != added.name), added])


def forget(name: str) -> None:
    """Delete a saved server and its key. Raises UsageError: there is none. FloeError: it cannot be written."""
    gone = server(name).name
    _write([one for one in servers() if one.name != gone])


def _write(kept: list[SavedServer]) -> None:
    file = servers_file()
    try:
        private_file.make_folder(file.parent)
        text = json.dumps([dataclasses.asdict(one) for one in kept], indent=2)
        private_file.replace(private_file.real(file), f"{text}\n")
    except OSError as error:
        raise private_file.unwritable(file, error) from error
