"""A screen on which nothing happens does nothing, and repaints take few lines of what they do not touch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import History
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.widgets.answer_markdown import AnswerMarkdown
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.chat.transcript import Transcript
from floe_chat.app.widgets.common.stable_text import Ground
from floe_chat.app.widgets.panel.dashboard import PerformancePanel
from rich.cells import cell_len
from textual._compositor import Compositor, LayoutUpdate
from textual.geometry import Region
from textual.pilot import Pilot
from textual.timer import Timer
from textual.widget import Widget

from .made_up import progress, running
from .scripted import ScriptedClient, ask, chatting, exchange, finish, ready, screen_text, stats, status, until, write
from .wizardry import lines


def timers(pilot: Pilot[int]) -> list[str]:
    """The timers that will fire, of the program, its screens and all that is on them; and what is done `later`."""
    due = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
    calls = [each for each in due if not each.cancelled() and getattr(each._callback, "__name__", "") == "call_next"]
    ticking = [each for each in _timers(pilot) if each._active.is_set()]  # pyright: ignore[reportPrivateUsage]
    return [repr(each) for each in (*ticking, *calls)]


def _timers(pilot: Pilot[int]) -> Iterator[Timer]:
    for owner in (
        pilot.app,
        *pilot.app.screen_stack,
        *(node for one in pilot.app.screen_stack for node in one.query()),
    ):
        for timer in owner._timers:  # pyright: ignore[reportPrivateUsage]
            if timer._task is not None and not timer._task.done():  # pyright: ignore[reportPrivateUsage]
                yield timer


class CountingClient(ScriptedClient):
    """Counts how often somebody looks for news."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = 0

    def poll(self, timeout: float = 0.0) -> list:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
        self.looks += 1
        return super().poll(timeout)


async def test_nothing_runs_while_nothing_happens(tmp_path: Path) -> None:
    client, history = CountingClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await until(pilot, lambda: not timers(pilot))
        request = await ask(pilot, client)
        client.say(TextDelta(request, "An answer."), stats(request))
        await finish(pilot, client, request)
        await write(pilot, "a draft")
        await until(pilot, lambda: not timers(pilot))
        for key in ("f4", "f9", "f5", "ctrl+r"):  # pages that draw figures need no clock either
            await pilot.press(key)
            await until(pilot, lambda key=key: len(timers(pilot)) == (key == "ctrl+r"))  # other programs' chats
            await pilot.press("escape")
        await until(pilot, lambda: not timers(pilot))
        looks = client.looks
        await pilot.pause()
        assert client.looks == looks
        client.say(*[stats(request)] * 3)
        await until(pilot, lambda: client.looks == looks + 1)
    history.close()


async def test_only_a_setup_that_moves_is_watched() -> None:
    async with ready(ScriptedClient()) as pilot:
        app = pilot.app
        setups = app.setups  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        for state, watched in (("working", True), ("paused", False), ("done", False)):
            setups.setup = running(progress(state))
            await app._switch(None)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage, reportUnknownMemberType]
            await until(pilot, lambda watched=watched: bool(timers(pilot)) == watched)
            assert status(pilot).background


# Repaints take few lines of what they do not touch, and paint what Textual would


@pytest.mark.thorough
async def test_a_ground_draws_what_textual_would_draw() -> None:
    async with chatting(size=(120, 24)) as (client, pilot):
        for number in range(3):
            await exchange(pilot, client, f"question {number}", "- a list\n- of two\n\n" * 4)
        await pilot.press("ctrl+up")  # a message is selected: there is a line beside it
        await pilot.pause()
        grounds = [node for node in (pilot.app.screen, *pilot.app.screen.query()) if isinstance(node, Ground)]
        assert {type(one) for one in grounds} >= {ChatScreen, Transcript, AnswerTurn, AnswerMarkdown, PerformancePanel}
        for one in grounds:
            for crop in (one.size.region, Region(0, 3, 9, 4)):
                wanted = Widget.render_lines(one, crop)
                assert [line.simplify() for line in one.render_lines(crop)] == [line.simplify() for line in wanted]


@pytest.mark.usefixtures("painted")
@pytest.mark.thorough
async def test_text_of_an_answer_leaves_the_other_widgets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client, rendered = ScriptedClient(), dict[str, int]()
    async with ready(client) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "one"))
        await until(pilot, lambda: "one" in screen_text(pilot))
        render_lines = Widget.render_lines

        def noted(self: Widget, crop: Region) -> object:
            rendered[type(self).__name__] = crop.height
            return render_lines(self, crop)

        await until(pilot, lambda: not timers(pilot))  # figures are painted once a second
        monkeypatch.setattr(Widget, "render_lines", noted)
        client.say(TextDelta(request, " two"))
        await until(pilot, lambda: "Paragraph" in rendered)
        monkeypatch.undo()
    assert not {"Composer", "Drawing", "ExpertMap"} & rendered.keys(), rendered
    assert {rendered[one.__name__] for one in (ChatScreen, Transcript, AnswerTurn, PerformancePanel)} == {1}


@pytest.mark.thorough
async def test_the_text_field_is_as_high_as_its_text() -> None:
    async with ready(ScriptedClient()) as pilot:
        composer = pilot.app.screen.query_one(Composer)
        least, heights = composer.size.height, list[int]()
        for _ in range(6):
            await pilot.press("a", "ctrl+j")
            await pilot.pause()
            heights.append(composer.size.height)
        assert heights == list(range(least + 1, least + 7))
        for _ in range(12):
            await pilot.press("backspace")
        await pilot.pause()
        assert composer.size.height == least and not composer.text


async def test_emoji_are_drawn_as_all_terminals_count_them() -> None:
    drawn = {
        "a \u2764\ufe0f b": "a \u2764  b",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467!": "\U0001f468!",
        "\U0001f44d\U0001f3fd 1\ufe0f\u20e3": "\U0001f44d 1 ",
        "\U0001f3fd": "",
        "\u0915\u094d\u200d\u0937 日本 \U0001f600": "\u0915\u094d\u200d\u0937 日本 \U0001f600",
    }
    assert list(map(cell_len, drawn)) == list(map(cell_len, drawn.values()))
    answer = "\n\n".join(f"[[{text}]]" for text in drawn)
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, answer))
        await until(pilot, lambda: screen_text(pilot).count("]]") == len(drawn))
        for expected in drawn.values():
            assert any(f"[[{expected}]]" in line for line in lines(pilot)), ascii(expected)
        await finish(pilot, client, request)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: pilot.app.clipboard == answer)


@pytest.mark.usefixtures("painted")
async def test_the_whole_screen_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ready(ScriptedClient()) as pilot:
        painted: list[Compositor] = []
        original = Compositor.render_full_update

        def noted(self: Compositor, simplify: bool = False) -> LayoutUpdate:
            painted.append(self)
            return original(self, simplify)

        monkeypatch.setattr(Compositor, "render_full_update", noted)
        await pilot.press("ctrl+l")
        await until(pilot, lambda: bool(painted))
        assert painted == [pilot.app.screen._compositor]  # pyright: ignore[reportPrivateUsage]
