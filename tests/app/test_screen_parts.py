"""The screen's parts that need no chat."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.client.bridge import merged
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.screens.history import when
from floe_chat.app.setup.disk_use import files
from floe_chat.app.text import units
from floe_chat.app.text.plain_text import printable
from floe_chat.app.text_files import is_outside, listing, matching, meant, outside
from floe_chat.app.widgets.chat.completion import Completable, wanted
from floe_chat.app.widgets.common.clipboard import local_tool
from floe_chat.app.widgets.common.hanging_list import Hanging
from floe_chat.app.widgets.markdown.fences import FenceSplitter
from floe_chat.app.widgets.markdown.markdown import AnswerParser
from floe_chat.app.widgets.panel.heat import bars, condense, stretch
from floe_chat.engine.events import Finished, NewTokens
from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from .scripted import LOADED, stats


def test_one_drain_joins_text_and_keeps_order() -> None:
    updates = [
        NewTokens(1, (5,)),
        TextDelta(1, "a"),
        TextDelta(1, "b"),
        stats(1, measured=False),
        stats(1),
        TextDelta(1, "c"),
        Finished(1, "stop", stats(1)),
        TextDelta(2, "d"),
    ]
    assert merged(updates) == [
        TextDelta(1, "ab"),
        stats(1),
        TextDelta(1, "c"),
        Finished(1, "stop", stats(1)),
        TextDelta(2, "d"),
    ]


def test_the_packs_name_is_made_printable() -> None:
    assert merged([dataclasses.replace(LOADED, model="a\x1b]0;b")]) == [
        dataclasses.replace(LOADED, model="a\ufffd]0;b"),
    ]


def test_completion_knows_what_is_being_written() -> None:
    assert wanted("/re", first_line=True) == Completable("command", "re")
    assert wanted("/re", first_line=False) is None and wanted("/re x", first_line=True) is None
    assert wanted("see @src/ma", first_line=False) == Completable("file", "src/ma")
    assert wanted('see @"./my dir/a', first_line=False) == Completable("file", "./my dir/a", quoted=True)
    assert wanted('see @"a b"', first_line=False) is None and wanted("@", first_line=True) == Completable("file", "")
    assert wanted("mail me@home", first_line=True) is None and wanted("@a b", first_line=True) is None


def test_files_are_found_by_their_letters(tmp_path: Path) -> None:
    for name in ("main.py", "src/domain.txt", "src/map_in.c", ".git/main", "node_modules/main.js", "x/y/other"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    paths = listing(tmp_path)
    assert paths == ["main.py", "src/domain.txt", "src/map_in.c", "x/y/other"]
    assert matching("main", paths) == ["main.py", "src/domain.txt", "src/map_in.c"]
    assert matching("SRC/D", paths) == ["src/domain.txt"] and matching("", paths)[:2] == ["main.py", "x/y/other"]
    assert {f"{tmp_path}/main.py", f"{tmp_path}/src/"} < set(outside(f"{tmp_path}/"))
    assert outside(f"{tmp_path}/SR") == [f"{tmp_path}/src/"]
    assert is_outside("~") and outside("~") == ["~/"] and is_outside("..") and not is_outside("~tilde")
    assert outside(f"{tmp_path}/none/") == []


def test_paths_are_taken_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for written, path in (
        ("~/notes.md", "/home/me/notes.md"),
        ("~nobody-of-that-name/x", "~nobody-of-that-name/x"),
        ("~\0/x", "~\0/x"),
        ("my dir/a file.txt", "my dir/a file.txt"),
        ('"my dir/a file.txt"', "my dir/a file.txt"),
        ("'~/my dir/it'", "/home/me/my dir/it"),
        (r"my\ dir/a\ file.txt", "my dir/a file.txt"),
        ("it's.txt", "it's.txt"),
    ):
        assert meant(written) == Path(path)


def test_the_desktops_clipboard_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "xclip"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert local_tool({"DISPLAY": ":0"}) == (str(tool), "-selection", "clipboard")
    assert local_tool({"DISPLAY": ":0", "SSH_CONNECTION": "x"}) is None
    assert local_tool({"WAYLAND_DISPLAY": "w"}) is None and local_tool({}) is None


def test_moments_as_people_say_them() -> None:
    noon = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))
    assert when(noon - 3600, noon) == "11:00" and when(noon - 86_400, noon) == "yesterday 12:00"
    assert when(noon - 20 * 86_400, noon) == "1 Nov 2026"


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("plain `code` and ``more``\n", ""),
        ("a\n```py\nx = 1\n```\nb", ""),
        ("a\n```py\nx = 1\n", "```py\nx = 1\n"),
        ("~~~\n```\n~~~\nend", ""),
        ("````\n```\n", "````\n```\n"),
        ("- item\n- ```py\n  x\n  ```\nend", ""),
        ("1. > ```\ncode", "```\ncode"),
        ("```inline``` text\n", ""),
        ("``", "``"),
    ],
)
def test_fences_are_held_until_they_close(text: str, held: str, step: int) -> None:
    splitter = FenceSplitter()
    ready = "".join(splitter.feed(text[start : start + step]) for start in range(0, len(text), step))
    assert ready + splitter.held == text
    assert splitter.held.endswith(held) and bool(splitter.held) == bool(held)


def test_figures_in_words() -> None:
    assert [units.rate(value) for value in (None, 0.5, 6.128, 61.34, 613.4)] == ["—", "0.500", "6.13", "61.3", "613"]
    assert [units.size(value) for value in (None, 0, 999, 1000, 1.31e9, 4.2e15)] == [
        "—",
        "0 B",
        "999 B",
        "1.00 kB",
        "1.31 GB",
        "4,200 TB",
    ]
    assert (units.share(0.384), units.seconds(0.123), units.seconds(12.34)) == ("38 %", "123 ms", "12.3 s")


def test_small_pictures() -> None:
    assert bars([0, 1, 8]) == [" ▁█"]
    assert bars([0.001, 16], rows=2) == [" █", "▁█"]
    assert bars([]) == [""] and bars([0, 0]) == ["  "]
    assert condense(range(6), 3) == [0.5, 2.5, 4.5] and condense([1.0], 3) == [1.0] and condense([1.0, 2.0], 0) == []
    assert stretch("ab", 7) == "aaabbb" and stretch("ab", 1) == "ab"


@pytest.mark.parametrize(
    "text",
    [
        "https://e.org/%1b]0;x%07",
        "<https://e.org/%1b[31m>",
        "`\x1b[2J`",
        "![\x1b](%1b)",
        "```\n\x1b\n```",
        "www.e.org/%9b",
    ],
)
def test_no_answer_renders_control_characters(text: str) -> None:
    tokens = AnswerParser().parse(text)
    contents = [part.content for token in tokens for part in (token, *(token.children or ()))]
    assert any("\ufffd" in content for content in contents)
    assert all(printable(content) == content for content in contents)


def test_control_characters_become_visible() -> None:
    assert printable("a\x1b[2J\tb\r\nc\rd\x9b\x7f\ud800é") == "a\ufffd[2J\tb\nc\nd\ufffd\ufffd\ufffdé"


# Lines that fold go on below their own beginning


LINES = Content.styled("● ", "green"), Content("one name"), Content.styled("found among 日本語 words", "bold")


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (40, ["● one name", "  found among 日本語 words"]),
        (15, ["● one name", "  found among", "  日本語 words"]),
        (8, ["● one", "  name", "  found", "  among", "  日本語", "  words"]),
    ],
)
async def test_folded_lines_hang(width: int, shown: list[str]) -> None:
    class Shows(App[None]):
        CSS = "OptionList { border: none; padding: 0; scrollbar-size: 0 0; } .option-list--option { padding: 0; }"

        def compose(self) -> ComposeResult:
            yield OptionList(Option(Hanging(*LINES)), Option(Hanging(LINES[0], Content())))

    async with Shows().run_test(size=(width, 12)) as pilot:
        found = pilot.app.query_one(OptionList)
        lines = [found.render_line(y).text.rstrip() for y in range(len(shown) + 2)]
        assert lines == [*shown, "●", ""]
        assert Hanging(*LINES).get_optimal_width({}, width) == len("● found among 日本語 words") + 3


# Folders are counted while others work in them


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
