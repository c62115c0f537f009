"""Writing: attached files and long texts, completion, commands, the questions before, the editor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.widgets.chat.chips import Chip
from floe_chat.app.widgets.chat.completion import Completion
from textual import events
from textual.drivers.headless_driver import HeadlessDriver
from textual.pilot import Pilot

from .scripted import ScriptedClient, ask, chatting, composer, finish, order, ready, screen_text, text_of, until, write
from .wizardry import shown


def chips(pilot: Pilot[int]) -> list[str]:
    return [text_of(chip) for chip in pilot.app.screen_stack[0].query(Chip)]


async def test_files_and_long_texts_are_attached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").write_text("```\nin a fence\n```\n\x1b[31m")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    async with chatting() as (client, pilot):
        composer(pilot).post_message(events.Paste("line\n" * 30))
        await until(pilot, lambda: chips(pilot) == ["▤ pasted 1  30 tokens  ×"])
        await write(pilot, "see @not")
        await until(pilot, lambda: pilot.app.screen.query_one(Completion).is_open)
        await pilot.press("enter")
        await until(pilot, lambda: len(chips(pilot)) == 2 and composer(pilot).text == "see ")
        for name, reason in (
            ("picture.png", "binary"),
            ("none", "No such file"),
            ("~nobody-of-that-name/x", "~nobody-of-that-name/x cannot be attached: No such file"),
        ):
            await order(pilot, f"/file {name}")
            await until(pilot, lambda reason=reason: reason in screen_text(pilot))
        await write(pilot, "this")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 1)
        asked = client.asked[0][0].text
        assert asked.startswith("this\n\npasted 1:\n```\nline\n") and "notes.md:\n````\n```\nin a fence" in asked
        assert chips(pilot) == [] and "▤ notes.md" in screen_text(pilot) and "in a fence" not in screen_text(pilot)
        client.say(TextDelta(1, "yes"))
        await finish(pilot, client, 1)
        await order(pilot, "/edit")
        await until(pilot, lambda: composer(pilot).text == "this" and len(chips(pilot)) == 2)
        await pilot.press("escape", "backspace")
        assert chips(pilot) == []


async def test_files_with_odd_names_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my dir").mkdir()
    (tmp_path / "my dir" / "A file.txt").write_text("in a folder with a space")
    (tmp_path / "two\nlines.txt").write_text("so is its name")
    (tmp_path / "many").mkdir()
    for number in range(12):
        (tmp_path / "many" / f"{number:02}").write_text("x")
    async with ready(ScriptedClient()) as pilot:
        completion = pilot.app.screen.query_one(Completion)
        await write(pilot, "see @./my")
        await until(pilot, lambda: completion.is_open)
        await pilot.press("enter", "a")
        assert composer(pilot).text == 'see @"./my dir/a' and completion.is_open
        await pilot.press("enter")
        await until(pilot, lambda: chips(pilot) == ["▤ A file.txt  6 tokens  ×"])
        assert composer(pilot).text == "see "
        await write(pilot, "@lines")
        await until(pilot, lambda: completion.is_open)
        assert "two\ufffdlines.txt" in screen_text(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: chips(pilot)[1:] == ["▤ two\ufffdlines.txt  4 tokens  ×"])
        await write(pilot, "@./many/")
        await until(pilot, lambda: "… 5 more: keep typing" in screen_text(pilot))
        await pilot.press("up")
        assert completion.chosen == "./many/06" and completion.size.height == 8


async def test_commands_are_completed_and_questions_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chatting() as (client, pilot):
        await write(pilot, "/ren")
        await until(pilot, lambda: "Give this chat a title" in screen_text(pilot))
        await pilot.press("tab", "x", "enter")
        await until(pilot, lambda: composer(pilot).border_title == "x")
        await write(pilot, "/rename")
        await pilot.press("escape", "enter")
        await until(pilot, lambda: "/rename TITLE" in screen_text(pilot) and composer(pilot).text == "/rename ")
        composer(pilot).put("half a thought")
        await pilot.app._chat.do("rename")  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        await until(pilot, lambda: "Send or clear your text first, then type /rename TITLE" in screen_text(pilot))
        assert composer(pilot).text == "half a thought"
        await order(pilot, "/nothing")
        await until(pilot, lambda: "There is no command /nothing" in screen_text(pilot))
        composer(pilot).put("")
        for number, text in enumerate(("one", "/usr/bin is a folder"), 1):
            await order(pilot, text)
            await until(pilot, lambda number=number: len(client.asked) == number)
            client.say(TextDelta(number, "yes"))
            await finish(pilot, client, number)
        await write(pilot, "draft")
        await pilot.press("home", "up")
        assert composer(pilot).text == "draft"
        composer(pilot).put("")
        await pilot.press("up", "up")
        assert composer(pilot).text == "one"
        await pilot.press("down", "down")
        assert composer(pilot).text == ""
        monkeypatch.setenv("VISUAL", "no-such-editor")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: "cannot run in this" in screen_text(pilot))
        await ask(pilot, client, "three")


async def test_no_enter_is_lost_and_none_runs_a_careful_command_by_its_first_letters() -> None:
    async with chatting() as (client, pilot):
        await finish(pilot, client, await ask(pilot, client, "keep me"))
        await write(pilot, "/rena")
        await until(pilot, lambda: pilot.app.screen.query_one(Completion).is_open)
        for key in (*"me", "space", "a", "enter", "b"):  # all of them before the completion hears of any
            composer(pilot).post_message(events.Key(key, " " if key == "space" else key if len(key) == 1 else None))
        await until(pilot, lambda: composer(pilot).border_title == "a" and composer(pilot).text == "b")
        composer(pilot).put("")
        await write(pilot, "/d")
        await pilot.press("enter")
        await until(pilot, lambda: "Press Enter again: Delete this chat" in screen_text(pilot))
        assert composer(pilot).text == "/delete" and "keep me" in screen_text(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "keep me" not in screen_text(pilot))
        await write(pilot, "/und")
        await pilot.press("enter")
        await until(pilot, lambda: "keep me" in screen_text(pilot))
        await write(pilot, "/delet")
        await pilot.press("escape", "enter")
        await until(pilot, lambda: "There is no command /delet" in screen_text(pilot))


async def test_files_that_were_taken_away_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ready(ScriptedClient()) as pilot:
        for number in (1, 2):
            composer(pilot).post_message(events.Paste("line\n" * 30))
            await until(pilot, lambda number=number: len(chips(pilot)) == number)
        both = chips(pilot)
        await write(pilot, "text")
        monkeypatch.setattr("floe_chat.app.widgets.chat.composer._HELD_SECONDS", 60)
        await pilot.press(*["backspace"] * 9)
        assert composer(pilot).text == "" and chips(pilot) == both
        monkeypatch.setattr("floe_chat.app.widgets.chat.composer._HELD_SECONDS", 0)
        await pilot.press("backspace")
        await until(pilot, lambda: "Removed pasted 2; Ctrl+Z brings it back" in screen_text(pilot))
        assert await pilot.click(Chip) and chips(pilot) == []
        await write(pilot, "text")
        await pilot.press("ctrl+z", "ctrl+z")
        await until(pilot, lambda: chips(pilot) == both)
        assert composer(pilot).text == "text"
        await pilot.press("ctrl+z")
        assert composer(pilot).text != "text"


async def test_a_text_that_is_too_large_stays_marked_until_it_is_cut_or_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "large.txt").write_text("word\n" * 700)
    async with chatting() as (client, pilot):
        composer(pilot).post_message(events.Paste("one two\n" * 400))
        large = "▤ pasted 1  too large  800 of 600 tokens  cut  ×"
        await until(pilot, lambda: chips(pilot) == [large])
        await until(pilot, lambda: "too large: 800 tokens" in shown(pilot))
        await write(pilot, "this")
        await pilot.press("enter")
        await until(pilot, lambda: composer(pilot).text == "this" and chips(pilot) == [large])
        assert not client.asked
        await pilot.press(*["backspace"] * 4)
        await order(pilot, "/file large.txt")
        await until(pilot, lambda: chips(pilot) == [large, "▤ large.txt  too large  700 of 600 tokens  cut  ×"])
        await order(pilot, "/cut")
        await until(pilot, lambda: all("beginning" in chip and "too large" not in chip for chip in chips(pilot)))
        await pilot.press("ctrl+z", "ctrl+z")  # lossless
        await until(pilot, lambda: sorted("too large" in chip for chip in chips(pilot)) == [True, True])
        composer(pilot).post_message(events.Paste("x" * 20_000))  # more than any window's tokens could be
        await until(pilot, lambda: "▤ pasted 2  too large  ~5.0k of 600 tokens  cut  ×" in chips(pilot))
        app = pilot.app
        for chip in app.screen.query(Chip):
            assert await pilot.click(chip, offset=(chip.size.width, 0))
            await until(pilot, lambda: len(chips(pilot)) < 3)
            break
        await order(pilot, "/cut")
        await until(pilot, lambda: all("too large" not in chip for chip in chips(pilot)))
        await write(pilot, "this")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 1)
        held = client.count(client.asked[0][0].text)
        assert held is not None and "one two" in client.asked[0][0].text


async def test_a_question_that_came_back_and_was_changed_stays() -> None:
    async with chatting() as (client, pilot):
        for text in ("one", "two words"):
            await finish(pilot, client, await ask(pilot, client, text))
        for keys, text in ((("backspace",) * 3, "two wo"), (("ctrl+w",), "two "), (("home", "delete"), "wo words")):
            composer(pilot).put("")
            await pilot.press("up", *keys, "up", "up", "down", "down", "down")
            assert composer(pilot).text == text
        composer(pilot).put("")
        await pilot.press("up")
        composer(pilot).post_message(events.Paste("!"))
        await pilot.press("down", "down")
        assert composer(pilot).text == "two words!"


async def test_an_editor_that_cannot_be_started_leaves_the_screen_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def noting(what: str) -> Callable[[HeadlessDriver], None]:
        return lambda _driver: begun.append(what)

    monkeypatch.setattr(HeadlessDriver, "can_suspend", True)
    monkeypatch.setattr(HeadlessDriver, "suspend_application_mode", noting("lent"))
    monkeypatch.setattr(HeadlessDriver, "resume_application_mode", noting("back"))
    async with ready(ScriptedClient()) as pilot:
        composer(pilot).put("half a thought")
        for editor, reason in (
            ("no-such-editor", "no-such-editor cannot be started (No such file or directory)"),
            ("vim 'x", "vim 'x cannot be started (No closing quotation)"),
            (" ", "No editor is set"),
            (f"{sys.executable} {tmp_path}/none.py", "ended with code 2; your text is unchanged"),
        ):
            monkeypatch.setenv("VISUAL", editor)
            await pilot.press("ctrl+g")
            await until(pilot, lambda reason=reason: reason in screen_text(pilot))
            assert composer(pilot).text == "half a thought"
        assert begun == ["lent", "back"] * 2
        script = tmp_path / "editor.py"
        script.write_text("import sys, pathlib; pathlib.Path(sys.argv[1]).write_text('a whole thought')")
        monkeypatch.setenv("VISUAL", f"{sys.executable} {script}")
        await pilot.press("ctrl+g")
        await until(pilot, lambda: composer(pilot).text == "a whole thought")
