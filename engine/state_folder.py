"""Where states of saved chats are between two starts. All of it is a cache, which may vanish at any time.

A file's name says of which chat, which pack, and computed in which form; `decoder/state_files.py` has what is in it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import platformdirs

from ..models import private_file
from ..models.pack.marks import FILE_NAME

ENDING = ".safetensors"
_GONE = ".gone"  # its time is when a chat, or a part of it, was deleted
_GONE_S = 30 * 24 * 3600.0  # how long a program may still have that in memory
_SHARE = 4  # one part in so many of what is free
_log = logging.getLogger("floe_chat.engine")


def states_folder() -> Path:
    """The folder of all of them."""
    return Path(platformdirs.user_cache_dir("floe-chat", appauthor=False)) / "states"


def pack_mark(pack: Path) -> str:
    """By what files name a pack: its manifest has the sha256 of all that it holds.

    Raises:
        OSError: it has none.
    """
    return hashlib.sha256((pack / FILE_NAME).read_bytes()).hexdigest()[:16]


def file_of(chat: int, mark: str, form: str) -> Path:
    """The file with the states of a chat, by a pack of this mark and a form of computing them."""
    return states_folder() / f"{chat}.{mark}.{hashlib.sha256(form.encode()).hexdigest()[:16]}{ENDING}"


def forget(chat: int) -> None:
    """A chat, or a part of it, was deleted: delete its states, and keep none of answers that began before now."""
    try:
        if (folder := states_folder()).is_dir():
            private_file.replace(folder / f"{chat}{_GONE}", "", durable=False)
    except OSError as error:
        _log.warning("that a chat was deleted could not be noted: %s", error)
    delete(states_folder().glob(f"{chat}.*{ENDING}"))


def forget_pack(pack: Path) -> None:
    """Delete the states that a pack computed."""
    with suppress(OSError):  # without a manifest it never answered
        delete(states_folder().glob(f"*.{pack_mark(pack)}.*"))


def total() -> int:
    """How many bytes all states take."""
    return sum(map(_size, files()))


def forgotten(chat: int, begun: float) -> bool:
    """Whether something of a chat was deleted since `begun`, by time.time()."""
    try:
        return (states_folder() / f"{chat}{_GONE}").stat().st_mtime >= begun
    except OSError:
        return False


def files() -> list[Path]:
    """All of them, the one used last at the end."""
    return sorted(states_folder().glob(f"*{ENDING}"), key=_used)


def make_room(file: Path, nbytes: int, most: int) -> bool:
    """Whether `file` may take so many bytes, where all together may take `most` and a quarter of what is free; those
    used longest ago give way to it.
    """
    others = [one for one in files() if one != file]
    taken = sum(map(_size, others))
    most = min(most, (shutil.disk_usage(file.parent).free + taken + _size(file)) // _SHARE)
    if nbytes > most:
        return False
    while taken + nbytes > most:
        taken -= _size(others[0])
        delete([others.pop(0)])
    delete(gone for gone in file.parent.glob(f"*{_GONE}") if _used(gone) < time.time() - _GONE_S)
    return True


def secret() -> bytes:
    """What this user's files are sealed with, so that one from elsewhere is known.

    Raises:
        OSError: it can be neither read nor made.
    """
    file = states_folder() / "key"
    if not private_file.is_ours(file) or len(found := private_file.read(file, 32)) != 32:
        found = secrets.token_bytes(32)
        private_file.replace(file, found)
    return found


def delete(files: Iterable[Path]) -> None:
    """Delete these; what cannot be deleted, the log says."""
    for file in files:
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("states of a chat could not be deleted: %s", error)


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return 0


def _used(file: Path) -> float:
    try:
        return os.lstat(file).st_mtime
    except OSError:
        return 0.0
