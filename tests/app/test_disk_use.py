"""Folders are counted while others work in them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.setup.disk_use import files


def test_what_goes_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    (tmp_path / "gone").write_bytes(b"12")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inner").write_bytes(b"123")
    (tmp_path / "gone folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert sorted(found.st_size for found in files(tmp_path)) == [2, 3, 5]
    original = os.walk

    def walk(*given: Any, **named: Any) -> Iterator[Any]:
        for where, folders, names in original(*given, **named):
            if where == str(tmp_path):
                (tmp_path / "gone").unlink()
                (tmp_path / "gone folder").rmdir()
            yield where, folders, names

    monkeypatch.setattr(os, "walk", walk)
    assert sorted(found.st_size for found in files(tmp_path)) == [3, 5]
    assert list(files(tmp_path / "nowhere")) == []
