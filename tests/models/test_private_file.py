"""The user's own files: private whatever the umask, whole, and never a pipe or a device that is waited for."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.models import private_file

pytestmark = pytest.mark.skipif(os.name == "nt", reason="modes and pipes of POSIX")


@pytest.fixture(params=[0o000, 0o002, 0o077], ids=oct, autouse=True)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_folders_that_are_made_are_private_and_others_are_left_alone(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(mode=0o755)
    there.chmod(0o755)
    private_file.make_folder(there / "a" / "b" / "c")
    private_file.make_folder(there)
    assert [mode(there / way) for way in ("a", "a/b", "a/b/c")] == [0o700] * 3 and mode(there) == 0o755
    private_file.own_folder(there)
    assert mode(there) == 0o700
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        private_file.make_folder(tmp_path / "file")
    with pytest.raises(NotADirectoryError):
        private_file.make_folder(tmp_path / "file" / "below")


def test_what_a_link_points_to_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs").chmod(0o775)
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "theirs" / "file").chmod(0o664)
    (tmp_path / "folder").symlink_to("theirs")
    (tmp_path / "file").symlink_to("theirs/file")
    private_file.own_folder(tmp_path / "folder")
    private_file.own_file(tmp_path / "file")
    assert (mode(tmp_path / "theirs"), mode(tmp_path / "theirs" / "file")) == (0o775, 0o664)


def test_bytes_reach_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, seen, fsync = tmp_path / "file", list[tuple[bool, str]](), os.fsync
    private_file.create(file, "old")

    def noted(descriptor: int) -> None:
        seen.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), file.read_text()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    private_file.replace(file, "new", durable=False)
    assert seen == []
    private_file.replace(file, "newer")
    assert seen == [(False, "new"), (True, "newer")]


def test_files_are_private_and_whole(tmp_path: Path, umask: int) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    private_file.create(file, "one")
    link.symlink_to(file)
    private_file.replace(private_file.real(link), b"two")
    assert link.is_symlink() and file.read_text() == "two" and mode(file) == 0o600
    with pytest.raises(FileExistsError):
        private_file.create(file, "three")
    assert file.read_text() == "two" and {path.name for path in tmp_path.iterdir()} == {"file", "link"}
    os.close(private_file.open_for(tmp_path / "new", os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    assert mode(tmp_path / "new") == 0o600
    private_file.replace(link, b"", private_file.SHARED, durable=False)
    assert not link.is_symlink() and file.read_text() == "two" and mode(link) == 0o666 & ~umask


def test_a_file_is_replaced_at_the_end_of_the_block_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RuntimeError), private_file.replacing(file) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
    with private_file.replacing(file) as partial:
        partial.write_text("new")
        assert file.read_text() == "old" and mode(partial) == 0o600
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_what_a_killed_process_was_writing_is_deleted(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path; from floe_chat.models import private_file\n"
        "with private_file.replacing(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)"
    )
    file = tmp_path / "file"
    assert subprocess.run([sys.executable, "-c", program, str(file)], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1 and not file.exists()
    private_file.replace(file, "whole")
    assert list(tmp_path.iterdir()) == [file]


def test_what_is_no_ordinary_file_is_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")  # a device may only be tried where nobody is root
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "link", "folder"):
        with pytest.raises(OSError, match=r"not an ordinary file|is a folder"):
            private_file.replace(private_file.real(tmp_path / name), "text")
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(OSError, match="symbolic links"):
        private_file.replace(private_file.real(tmp_path / "link"), "text")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode) and (tmp_path / "link").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", "link", "folder"}


def test_only_ordinary_files_of_a_size_are_read_and_nothing_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert private_file.read(tmp_path / "link", 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        private_file.read(tmp_path / "file", 4)
    for strange, why in (("pipe", "not an ordinary file"), ("/dev/zero", "not an ordinary file"), (".", "a folder")):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_CREAT):
            with pytest.raises(OSError, match=why):
                private_file.open_for(tmp_path / strange, flags)
        with pytest.raises(OSError, match=why):
            private_file.read(tmp_path / strange, 5)
    with pytest.raises(FileNotFoundError):
        private_file.read(tmp_path / "nothing", 5)


def test_a_file_where_others_can_write_is_not_ours(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    private_file.own_folder(folder)
    file = folder / "stamp"
    private_file.create(file, "")
    assert private_file.is_ours(file) and not private_file.is_ours(folder / "nothing")
    file.chmod(0o620)
    assert not private_file.is_ours(file)
    file.chmod(0o600)
    folder.chmod(0o777)
    assert not private_file.is_ours(file)
    private_file.own_folder(folder)
    (folder / "link").symlink_to(file)
    assert private_file.is_ours(file) and mode(folder) == 0o700


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b" " * (2 << 20)])
def test_refuses_what_is_no_small_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "good").write_text('{"a": [1, 2.5, null]}')
    (tmp_path / "link").symlink_to(tmp_path / "good")
    assert private_file.read_json(tmp_path / "link") == {"a": [1, 2.5, None]}
    (tmp_path / "note").write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        private_file.read_json(tmp_path / "note")


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "sparse", "circle", "absent"])
def test_neither_waits_nor_swells(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "note"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "folder":
            path.mkdir()
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        case "circle":
            path.symlink_to("note")
        case _:
            pass
    with pytest.raises(FileNotFoundError if kind == "absent" else (OSError, ValueError)):
        private_file.read_json(path)
