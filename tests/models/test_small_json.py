"""Files that are read back may be anything by then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from floe_chat.models import private_file, small_json
from floe_chat.models.home import is_folder_name


def test_reads_json(tmp_path: Path) -> None:
    (tmp_path / "note").write_text('{"a": [1, 2.5, null]}')
    (tmp_path / "link").symlink_to(tmp_path / "note")
    assert small_json.read(tmp_path / "note") == small_json.read(tmp_path / "link") == {"a": [1, 2.5, None]}


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"NaN", b"[Infinity]", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b" " * (2 << 20)]
)
def test_refuses_what_is_no_small_json(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "note").write_bytes(content)
    with pytest.raises((OSError, ValueError)):
        small_json.read(tmp_path / "note")


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
        small_json.read(path)


@pytest.mark.parametrize("name", ["tiny", "mixtral-8x7b_3.4", "größer", "a" * 120])
def test_names_of_folders(name: str) -> None:
    assert is_folder_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "/", "-rf", ".hidden", "a b", "a\0", "a" * 121, 5]
)
def test_names_that_lead_elsewhere(name: object) -> None:
    assert not is_folder_name(name)


def test_links_in_a_circle_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "note").symlink_to("note")
    with pytest.raises(OSError, match="symbolic links"):
        private_file.replace(tmp_path / "note", "{}")
