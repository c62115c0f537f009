"""What somebody wants set up, and the note of it that any later start of the program finds."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..models import catalog
from ..models.errors import FloeError, UsageError
from ..models.home import expanded
from .disk_use import files

if TYPE_CHECKING:
    from ..models.pack import PackSpec

_NOTE = ".setup.json"  # beside the folder of the pack, while it is not finished
_FETCHED = catalog.FETCHED  # likewise, the folder with what was fetched
_log = logging.getLogger("floe_chat.app")


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants set up.

    Attributes:
        model: a hub id (owner/name), or the folder of a checkpoint. name: what it will be called here.
        up, gate, down, dense: bits per weight, see `PackSpec`. commit: of the hub's repository; "" until it was asked.
        home: the models folder that it goes into, whatever is chosen for others later.
    """

    model: str
    name: str
    up: int = 3
    gate: int = 4
    down: int = 4
    dense: int = 4
    commit: str = ""
    home: Path = field(default_factory=catalog.models_folder)

    @property
    def folder(self) -> Path:
        """Where the pack goes."""
        return self.home / self.name

    @property
    def fetched(self) -> Path:
        """Where shards and small files lie while they are needed."""
        return self.home / (self.name + _FETCHED)

    @property
    def note(self) -> Path:
        """What says that it was begun."""
        return self.home / (self.name + _NOTE)

    @property
    def taken(self) -> int:
        """Bytes of the disk that it takes so far."""
        return _taken(self.folder) + _taken(self.fetched)

    @property
    def local(self) -> Path | None:
        """The folder of the checkpoint, if it is one."""
        return _local(self.model)

    def spec(self) -> PackSpec:
        """Raises: UsageError: widths that there are not."""
        from ..models.pack import PackSpec

        return PackSpec(self.up, self.gate, self.down, self.dense)


def wish(model: str, name: str | None = None, bits: Mapping[str, int] | None = None) -> Wish:
    """What `model` means: a listed name, a hub id, or the folder of a checkpoint; `bits`: widths by `Wish`'s names.

    Raises:
        UsageError: it is none of these, or the name is taken or cannot be a folder's.
    """
    entry = catalog.published(model)
    source = entry.repo if entry and entry.repo else model
    local = _local(source)
    if local is not None:
        source = str(local.resolve())
    elif not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        listed = ", ".join(known.name for known in catalog.PUBLISHED if known.repo)
        raise UsageError(
            f"There is no model {model!r} to set up",
            f"Listed are {listed}.",
            "Give one of these, a hub id (owner/name), or the folder of a downloaded checkpoint.",
        )
    called = name or (entry.name if entry else Path(source).name.lower())
    if called == catalog.DEMO:
        raise UsageError("The name demo is taken", "It is the built-in model's.", "Choose another one with --name.")
    if not re.fullmatch(r"\w[\w.-]*", called) or called.endswith((_NOTE, _FETCHED)):
        raise UsageError(f"A model cannot be called {called!r}", "", "Choose letters, digits, '-' and '_' with --name.")
    wanted = Wish(source, called, **(bits or {}))  # pyright: ignore[reportArgumentType]
    if (wanted.folder / "manifest.json").exists() and not wanted.note.exists():
        raise UsageError(
            f"There is a model called {called} already",
            f"It lies in {wanted.folder}.",
            f"Chat with it: floe-chat --model {called}, or choose another name with --name.",
        )
    return wanted


def _local(model: str) -> Path | None:
    path = expanded(model)
    try:
        return path if path.is_dir() else None
    except OSError:
        return None  # too long a name, or a place that nobody may look into


def unfinished() -> list[Wish]:
    """What was begun and is not finished, by name. Notes that cannot be read are passed over."""
    found: list[Wish] = []
    folder = catalog.models_folder()
    for path in sorted(folder.glob("*" + _NOTE)) if folder.is_dir() else []:
        try:
            begun = Wish(**json.loads(path.read_text(encoding="utf-8")))
            begun.spec()
        except (OSError, ValueError, TypeError, FloeError) as error:
            _log.warning("%s cannot be read: %s", path, error)
        else:
            found.append(begun)
    return found


def forget(begun: Wish) -> None:
    """Give up what was begun: delete what was fetched and packed of it, and the note last.

    Raises:
        FloeError: something cannot be deleted.
    """
    try:
        for folder in (begun.fetched, begun.folder):
            if folder.exists():
                shutil.rmtree(folder)
        begun.note.unlink(missing_ok=True)
    except OSError as error:
        raise FloeError(
            f"{begun.name} cannot be deleted", f"{error.strerror or error}.", "Delete it by hand."
        ) from error


def write_note(begun: Wish) -> None:
    """Note what was begun, in place of an earlier note."""
    path = begun.note
    partial = path.with_suffix(f".{os.getpid()}.part")
    fields = {name: value for name, value in dataclasses.asdict(begun).items() if name != "home"}  # disks move
    partial.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    partial.chmod(0o600)
    partial.replace(path)


def _taken(folder: Path) -> int:
    """Bytes of the disk that a folder's files take; those that are laid out and not written yet take none."""
    return sum(getattr(found, "st_blocks", 0) * 512 or found.st_size for found in files(folder))
