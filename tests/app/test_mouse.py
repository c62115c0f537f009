"""What the screens offer by keys can be clicked where it is written."""

from __future__ import annotations

import pytest
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.widgets.common.hints import rows
from floe_chat.app.widgets.common.keys import key_name
from floe_chat.engine.events import PrefillProgress
from textual import events
from textual.pilot import Pilot

from .scenes import showing, still
from .scripted import ask, chatting, until
from .wizardry import lines, shown


async def click(pilot: Pilot[int], words: str) -> None:
    """Click where these words begin, as soon as they are on the screen; the lowest place if there are several."""
    await until(pilot, lambda: any(words in line for line in lines(pilot)))
    await still(pilot)
    y = max(y for y, line in enumerate(lines(pilot)) if words in line)
    x = lines(pilot)[y].index(words)
    for kind in (events.MouseDown, events.MouseUp):  # the pilot's own clicks do not reach the rim of a padded screen
        pilot.app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, screen_x=x, screen_y=y))
        await pilot.pause()


async def see(pilot: Pilot[int], words: str) -> None:
    await until(pilot, lambda: words in shown(pilot))


async def test_the_bottom_row_of_the_chat() -> None:
    async with chatting(size=(150, 40)) as (client, pilot):
        for words, page, leave in (
            ("F1 help", "Function keys", "Esc closes"),
            ("Ctrl+P commands", "Search for commands", ""),
            ("Balanced", "Custom", "Esc closes"),
            ("scripted", "Installed", "Esc back"),
        ):
            await click(pilot, words)
            await see(pilot, page)
            if leave:
                await click(pilot, leave)
            else:
                await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
        request = await ask(pilot, client)
        client.say(PrefillProgress(request, 1, 20))
        await click(pilot, "Esc stop")
        await until(pilot, lambda: client.cancelled == 1)


async def test_stopping_stays_in_reach_on_a_narrow_terminal() -> None:
    async with chatting(size=(60, 20)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(PrefillProgress(request, 1, 20))
        await click(pilot, "Esc stop")
        await until(pilot, lambda: client.cancelled == 1)


async def test_the_way_through_the_wizard(monkeypatch: pytest.MonkeyPatch) -> None:
    async with showing("wizard-machine", (100, 34), monkeypatch) as stage:
        pilot = stage.pilot
        await click(pilot, "Enter continues")
        await see(pilot, "Speed: ")
        await click(pilot, "Esc back")
        await see(pilot, "This machine")
        await click(pilot, "Enter continues")
        await see(pilot, "Speed: ")
        await click(pilot, "F other folder")
        await see(pilot, "Models folder")
        await click(pilot, "Ctrl+D demo model")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))


async def test_asked_before_something_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with showing("models", (100, 34), monkeypatch) as stage:
        pilot = stage.pilot
        await click(pilot, "olmoe")  # a click on a line chooses it
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
    async with showing("models-remove", (100, 34), monkeypatch) as stage:
        pilot = stage.pilot
        await click(pilot, "N or Esc cancels")
        await see(pilot, "X deletes it")
        await click(pilot, "X deletes it")
        await see(pilot, "Y deletes")


def test_hints_are_rows_of_names_of_keys() -> None:
    assert [key_name(key) for key in ("ctrl+p", "f1", "escape", "q", "pageup,up")] == [
        "Ctrl+P",
        "F1",
        "Esc",
        "q",
        "PageUp",
    ]
    assert rows(("Enter chooses", "Esc back", "S stops"), 24) == [["Enter chooses", "Esc back"], ["S stops"]]
