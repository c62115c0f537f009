"""What failed or abandoned setups left in the models folder: downloads, unfinished packs and notes that nothing
continues.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...models import catalog
from ...models.errors import FloeError
from .disk_use import files
from .wish import bad_notes, discard, unfinished


@dataclass(frozen=True, slots=True)
class Leftover:
    """Files of a setup without a usable note. paths: folders and the note. bytes: of the disk. cause: a sentence."""

    name: str
    paths: tuple[Path, ...]
    bytes: int
    cause: str


def leftovers() -> list[Leftover]:
    """What is left, by name; reads the disk. A folder that holds anything else is not among it."""
    home, waiting, causes = catalog.models_folder(), {one.name for one in unfinished()}, dict[str, list[str]]()
    found: dict[str, list[Path]] = {}
    for note in bad_notes():
        found.setdefault(note.name, []).append(note.path)
        causes.setdefault(note.name, []).append(str(note))
    try:
        folders = sorted(path for path in home.iterdir() if path.is_dir() and not path.is_symlink())
    except OSError:
        folders = []  # there is none, or it cannot be read, which `catalog.installed` reports
    for folder in folders:
        name = folder.name.removesuffix(catalog.FETCHED)
        if name not in waiting and (cause := _is_left(folder)):
            found.setdefault(name, []).append(folder)
            causes.setdefault(name, []).append(cause)
    return [
        Leftover(name, tuple(paths), sum(map(_taken, paths)), " ".join(causes[name]))
        for name, paths in sorted(found.items())
    ]


def clear(one: Leftover) -> None:
    """Delete it.

    Raises:
        TryAgainError: another process still writes into one of its folders. FloeError: something cannot be deleted.
    """
    from ...models.pack.manifest import FETCHING, UNFINISHED
    from ...models.packing.workplace import locked

    for note in bad_notes():
        if note.path in one.paths:
            discard(note)
    for folder in one.paths:
        if not _is_left(folder):  # a note, or it has become something else since
            continue
        for marker in (UNFINISHED, FETCHING):
            if (folder / marker).exists():
                with locked(folder / marker, f"Another floe-chat is using {folder}"):
                    pass
        try:
            shutil.rmtree(folder)
        except OSError as error:
            cause = f"{error.strerror or error}."
            raise FloeError(f"{folder} cannot be deleted", cause, "Delete it by hand.") from error


def _is_left(folder: Path) -> str:
    """Why a folder is left over, in a sentence; "" if it is not."""
    from ...models.pack.manifest import FETCHING, FILE_NAME, UNFINISHED
    from ...models.packing.workplace import is_ours

    if folder.is_symlink() or not folder.is_dir() or not is_ours(folder):
        return ""
    if folder.name.endswith(catalog.FETCHED):
        return "Downloads of a setup or a repair that did not end."
    marks = any((folder / marker).exists() for marker in (UNFINISHED, FETCHING))
    if (folder / FILE_NAME).exists() or not marks:
        return ""
    return "A pack that was begun; if you began it with `floe-chat pack`, the same command continues it."


def _taken(path: Path) -> int:
    """Bytes of the disk."""
    with suppress(OSError):
        if path.is_file():
            return path.lstat().st_size
    return sum(getattr(found, "st_blocks", 0) * 512 or found.st_size for found in files(path))
