"""A request to set up a model, and the note in which later starts of the program find it."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...models import catalog, private_file
from ...models.errors import FloeError, UsageError
from ...models.gguf.parts import is_gguf
from ...models.paths import expanded, is_folder_name
from .disk_use import files
from .links import leads_to, need_free

if TYPE_CHECKING:
    from ...models.catalog_entry import ReadyPack
    from ...models.packing.pack import PackSpec

_NOTE = ".setup.json"  # beside the pack's folder, until the pack is finished
_FETCHED = catalog.FETCHED  # likewise, the folder with the downloads
_HUB_ID = r"[\w.-]+/[\w.-]+(:[\w.+-]+)?"
_ADDRESS = r"https?://[a-z0-9.:\[\]-]+(/[!-~]*)?"


@dataclass(frozen=True, slots=True)
class Wish:
    """A request to set up a model.

    Attributes:
        model: a hub id (owner/name, with ":Q4_K_M" for such a GGUF file), the folder of a checkpoint or of a pack, a
            GGUF file, or an address on another host. name: what it will be called here.
        up, gate, down, dense, draft: bits per weight, and whether to pack the drafting head, see `PackSpec`. commit: of
            the hub's repository; "" until it is known.
        pack: the sha256 of a ready pack's manifest.json; "" for a checkpoint, and until it is known.
        to: a folder on another disk that stores the pack, to which the models folder then has a link; "" for none.
        home: its models folder, even if another one is chosen later for other models.
    """

    model: str
    name: str
    up: int = 3
    gate: int = 4
    down: int = 4
    dense: int = 4
    draft: bool = True
    commit: str = ""
    pack: str = ""
    to: str = ""
    home: Path = field(default_factory=catalog.models_folder)

    @property
    def folder(self) -> Path:
        """The pack's folder, or the link to it."""
        return self.home / self.name

    @property
    def place(self) -> Path:
        """The pack's folder itself."""
        return self.beside / self.name

    @property
    def beside(self) -> Path:
        """The folder in which the pack and its downloads are stored."""
        return Path(self.to) if self.to else self.home

    @property
    def fetched(self) -> Path:
        """Where shards and small files are stored while they are needed."""
        return self.beside / (self.name + _FETCHED)

    @property
    def note(self) -> Path:
        """The file that records this setup until it is finished."""
        return self.home / (self.name + _NOTE)

    @property
    def taken(self) -> int:
        """Disk space taken so far, in bytes."""
        return _taken(self.place) + _taken(self.fetched)

    @property
    def local(self) -> Path | None:
        """The folder of the checkpoint or pack, or the GGUF file, if it is one."""
        return _local(self.model)

    def spec(self) -> PackSpec:
        """Raises: UsageError: a width that packs do not have."""
        from ...models.packing.pack import PackSpec

        return PackSpec(self.up, self.gate, self.down, self.dense, draft=self.draft)


def wish(
    model: str, name: str | None = None, bits: Mapping[str, int] | None = None, to: str | Path | None = None
) -> Wish:
    """A setup of `model`, as `catalog.source` understands it; `bits`: widths by `Wish`'s names. to: see `Wish`.

    Raises:
        UsageError: it is not a model, or the name is taken or invalid as a folder name.
    """
    plain = name is None and _is_name(model) and catalog.published(model) is None
    if plain and ((folder := catalog.models_folder() / model) / "manifest.json").exists():
        raise _there(model, model, folder)
    source = catalog.source(model)
    called = name or source.name
    if called == catalog.DEMO:
        raise UsageError(
            "The name demo is taken", "It is the name of the built-in model.", "Choose another name with --name."
        )
    if not _is_name(called):
        raise UsageError(
            f"A model cannot be called {called!r}", "", "Give a name of letters, digits, '-' and '_' with --name."
        )
    away = "" if to is None else str(expanded(to).absolute())
    if away and Path(away).resolve() == catalog.models_folder().resolve():
        away = ""
    wanted = Wish(source.place, called, commit=source.commit, to=away, **(bits or {}))  # pyright: ignore[reportArgumentType]
    for folder in (wanted.folder, wanted.place):
        if (folder / "manifest.json").exists() and not wanted.note.exists():
            raise _there(called, called if folder == wanted.folder else folder, folder)
    check_folders(wanted)
    return wanted


def _there(called: str, known: str | Path, folder: Path) -> UsageError:
    return UsageError(
        f"There is already a model called {called}",
        f"Folder: {folder}.",
        f"Chat with it (floe-chat --model {known}), or choose another name with --name.",
    )


def of_ready(wanted: Wish, ready: ReadyPack) -> Wish:
    """The same setup with a ready pack."""
    return dataclasses.replace(
        wanted,
        model=ready.place,
        commit=ready.commit,
        pack=ready.digest,
        up=ready.up,
        gate=ready.gate,
        down=ready.down,
        dense=ready.dense,
    )


def check_folders(wanted: Wish) -> None:
    """Raises: UsageError: a folder that the setup would write into, and delete later, holds other files."""
    if wanted.to:
        need_free(wanted.folder, wanted.place)
    for folder in (wanted.place, wanted.fetched):
        if folder.exists():
            from ...models.packing.workplace import is_ours  # imports torch

            if not is_ours(folder):
                raise UsageError(
                    f"The name {wanted.name} is taken",
                    f"{folder} holds other files.",
                    "Choose another name with --name.",
                )


def _is_name(name: object) -> bool:
    return is_folder_name(name) and not str(name).endswith((_NOTE, _FETCHED))


def _local(model: str) -> Path | None:
    path = expanded(model)
    try:
        return path if path.is_dir() or is_gguf(path) else None
    except (OSError, ValueError):
        return None  # too long a name, or a folder that may not be read


@dataclass(frozen=True, slots=True)
class BadNote:
    """A setup note that is ignored, and why, in a sentence."""

    path: Path
    cause: str

    @property
    def name(self) -> str:
        """Of the setup that it is called after."""
        return self.path.name.removesuffix(_NOTE)

    def __str__(self) -> str:
        return f"The setup note {self.path} is ignored: {self.cause}"


def unfinished() -> list[Wish]:
    """Unfinished setups, by name. `bad_notes` has the notes that cannot be used."""
    return [note for note in _notes() if isinstance(note, Wish)]


def bad_notes() -> list[BadNote]:
    """The setup notes that cannot be used; `discard` deletes one."""
    return [note for note in _notes() if isinstance(note, BadNote)]


def _notes() -> list[Wish | BadNote]:
    folder = catalog.models_folder()
    try:
        return [_read(path) for path in sorted(folder.glob("*" + _NOTE))]
    except OSError:
        return []  # the models folder cannot be read: `catalog.installed` reports that


def _read(path: Path) -> Wish | BadNote:
    try:
        fields = private_file.read_json(path)
        wanted = Wish(**_checked(fields))
        if wanted.name != path.name.removesuffix(_NOTE):  # otherwise `forget` would delete another folder
            raise ValueError("its model's name differs from the file's")
        wanted.spec()
    except UsageError as error:
        return BadNote(path, f"{error.title}.")
    except (OSError, ValueError, TypeError) as error:
        return BadNote(path, f"{error}.")
    return wanted


def _checked(fields: Any) -> dict[str, Any]:
    """The fields of a note, types checked; the models folder is not among them."""
    named = {"int": int, "bool": bool, "str": str}
    kinds = {field.name: named.get(str(field.type), str) for field in dataclasses.fields(Wish)}
    del kinds["home"]
    if not isinstance(fields, dict) or not {"model", "name"} <= fields.keys() <= kinds.keys():
        raise ValueError("its fields are not those of a setup note")
    for name, value in fields.items():
        if type(value) is not kinds[name]:
            words = {int: "a number", bool: "true or false", str: "text"}
            raise ValueError(f"its {name} is not {words[kinds[name]]}")
    if not _is_name(fields["name"]) or fields["name"] == catalog.DEMO:
        raise ValueError("its name cannot be a model's")
    if not (re.fullmatch(f"{_HUB_ID}|{_ADDRESS}", fields["model"]) or Path(fields["model"]).is_absolute()):
        raise ValueError("its model is neither a hub id nor a path nor an address")
    if not re.fullmatch("([0-9a-f]{7,64})?", fields.get("commit", "")):
        raise ValueError("its commit is not a commit's hash")
    if (to := fields.get("to", "")) and not Path(to).is_absolute():
        raise ValueError("its other folder is not an absolute path")
    if not re.fullmatch("([0-9a-f]{64})?", fields.get("pack", "")):
        raise ValueError("its pack is not a hash")
    return fields


def forget(begun: Wish) -> None:
    """Abandon a setup: delete its downloads, its pack and, last, its note.

    A folder that no setup created stays. Of a link only the link is deleted, unless the setup itself stores its pack on
    another disk.

    Raises:
        FloeError: something cannot be deleted.
    """
    try:
        clear_fetched(begun)
        if begun.to and leads_to(begun.folder, begun.place):
            _delete(begun.place)
        _delete(begun.folder)
        begun.note.unlink(missing_ok=True)
    except OSError as error:
        raise FloeError(
            f"{begun.name} cannot be deleted", f"{error.strerror or error}.", "Delete it by hand."
        ) from error


def clear_fetched(begun: Wish) -> None:
    """Delete a setup's downloads. Raises: OSError: it cannot be deleted."""
    if not begun.to or leads_to(begun.folder, begun.place):  # else a note names a folder in which nothing was begun
        _delete(begun.fetched)


def _delete(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        from ...models.packing.workplace import is_ours  # imports torch

        if is_ours(folder):
            shutil.rmtree(folder)


def discard(note: BadNote) -> None:
    """Delete a note that cannot be used, and nothing else.

    Raises:
        FloeError: it cannot be deleted.
    """
    try:
        note.path.unlink(missing_ok=True)
    except OSError as error:
        raise FloeError(
            f"{note.path} cannot be deleted", f"{error.strerror or error}.", "Delete it by hand."
        ) from error


def write_note(begun: Wish) -> None:
    """Record a setup, in place of an earlier note."""
    fields = {name: value for name, value in dataclasses.asdict(begun).items() if name != "home"}  # disks move
    if begun.draft:
        del fields["draft"]  # which earlier versions do not know
    private_file.replace(begun.note, json.dumps(fields, indent=2))


def _taken(folder: Path) -> int:
    """Disk space of a folder's files, in bytes; reserved but unwritten space does not count."""
    return sum(getattr(found, "st_blocks", 0) * 512 or found.st_size for found in files(folder))
