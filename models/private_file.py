"""The only way to create, replace and read files. The user's own are closed to others, whatever the umask; nothing here
waits for a pipe or reads a device; a file is replaced atomically, even in case of a power cut or a full disk.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import FloeError, UsageError

MODE = 0o600
SHARED = 0o666
"""Before the umask applies: the mode of packs, which several users may read."""

_PARTIAL = ".floe-chat-"  # how the name of a file begins that is being written, followed by the process
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
# Opening a pipe would otherwise wait for its other end. Windows has neither flag, and needs O_BINARY.
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


def real(file: Path) -> Path:
    """The file that a link leads to, or `file` itself.

    Raises:
        OSError: links lead to each other.
    """
    try:
        return file.resolve()
    except RuntimeError as error:  # as Python 3.12 and earlier report it
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file)) from error


def make_folder(folder: Path) -> None:
    """Make `folder` and every missing folder above it with mode 0700; one that exists is left as it is.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        make_folder(folder.parent)  # `mkdir(parents=True)` would give these the umask's mode
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        if not folder.is_dir():
            raise


def own_folder(folder: Path) -> None:
    """Make a folder that only this program uses, and remove other users' access if it exists.

    One that is a link stays as it is: its owner chose that place.

    Raises:
        OSError: as `make_folder`.
    """
    make_folder(folder)
    _close(folder, 0o700)


def own_file(file: Path) -> None:
    """Remove other users' access to a file that only this program uses; the target of a link stays as it is.

    Raises:
        OSError: its mode cannot be changed.
    """
    _close(file, MODE)


@contextmanager
def replacing(file: Path, mode: int = MODE, *, durable: bool = True) -> Generator[Path]:
    """Give the name of a new, empty file beside `file`; when the block ends, it becomes `file`.

    If the block fails, `file` stays as it was and nothing is left beside it. A link is replaced and not followed: use
    `real` for files of the person's own, who may store them elsewhere. The folder has to exist.

    Args:
        mode: MODE, or SHARED for files that are not private. durable: wait until the bytes are on the disk. Without
            that, a power cut can leave the new file empty.

    Raises:
        OSError: it cannot be written, or is a folder, a pipe or a device: renaming would take that away.
    """
    if file.exists() and not file.is_symlink():
        need_ordinary(file)
    _tidy(file.parent)
    partial = file.with_name(f"{_PARTIAL}{os.getpid()}-{secrets.token_hex(4)}.part")
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield partial
        if durable:
            _sync(partial, os.O_RDWR)
        partial.replace(file)
        if durable and os.name != "nt":  # Windows cannot open a folder, and writes renames to the disk itself
            _sync(file.parent, os.O_RDONLY)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _tidy(folder: Path) -> None:
    """Delete the remains of killed processes."""
    for left in folder.glob(f"{_PARTIAL}*.part"):
        import psutil

        pid = left.name.removeprefix(_PARTIAL).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            left.unlink(missing_ok=True)


def replace(file: Path, content: str | bytes, mode: int = MODE, *, durable: bool = True) -> None:
    """Replace `file` by one with this content; see `replacing`."""
    with replacing(file, mode, durable=durable) as partial:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)


def create(file: Path, text: str) -> None:
    """Write `text` into `file`, which must not exist yet.

    Raises:
        FileExistsError: it does. OSError: it cannot be written.
    """
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE))  # so that no other program takes the name
    try:
        replace(file, text)
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise


def open_for(file: Path, flags: int) -> int:
    """A descriptor of `file` for `os.open`'s `flags`; a file that is created gets mode 0600.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
    """
    if file.exists():
        need_ordinary(file)  # first: opening a device can have effects of its own
    descriptor = os.open(file, flags | _FLAGS, MODE)
    try:
        _need_ordinary(os.fstat(descriptor), file)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read(file: Path, most: int) -> bytes:
    """The content of an ordinary file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is a folder, a pipe or a device, or is larger.
    """
    with os.fdopen(open_for(file, os.O_RDONLY), "rb") as opened:
        content = b"" if os.fstat(opened.fileno()).st_size > most else opened.read(most + 1)
        if len(content) > most or os.fstat(opened.fileno()).st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {_size(most)}", str(file))
    return content


def read_json(file: Path, most: int = 1 << 20) -> Any:
    """The value in a JSON file of at most `most` bytes.

    Raises:
        FileNotFoundError: there is none. OSError: as `read`. ValueError: it is not JSON, or is nested too deeply.
    """
    return loads(read(file, most))


def loads(text: str | bytes) -> Any:
    """The value in a JSON text. Raises ValueError: it is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def need_ordinary(file: Path) -> None:
    """Raises OSError: `file` is not there, or is a folder, a pipe or a device."""
    _need_ordinary(file.stat(), file)


def is_ours(file: Path) -> bool:
    """Whether `file` and its folder are this user's and no other user can write there, so that nobody forged it."""
    if os.name == "nt":  # profiles of users are closed to others there
        return True
    try:
        found = file.lstat(), file.parent.stat()
    except OSError:
        return False
    return all(each.st_uid == os.geteuid() and not each.st_mode & 0o022 for each in found)


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _close(path: Path, mode: int) -> None:
    found = path.lstat()
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o077:
        path.chmod(found.st_mode & mode)


def unwritable(file: Path, error: OSError) -> FloeError:
    """Why `file` cannot be written, for a person."""
    if error.errno in FULL:
        cause, hint = f"There is no room left in {file.absolute().parent}.", "Free some space on that disk."
        return FloeError(f"{file} cannot be written", cause, hint)
    return UsageError(f"{file} cannot be written", f"{error.strerror or error}.", "Give another path.")


def _need_ordinary(found: os.stat_result, file: Path) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "it is a folder", str(file))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is not an ordinary file", str(file))


def _size(count: int) -> str:
    return f"{count >> 20:,} MB" if count >= 1 << 20 else f"{count:,} bytes"
