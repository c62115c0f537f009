"""What tests of answers side by side read and ask for."""

from __future__ import annotations

from collections.abc import Sequence

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import History
from floe_chat.app.screens.others import OthersScreen
from floe_chat.app.widgets.chat.turns import Turn
from floe_chat.engine.events import Finished
from textual.pilot import Pilot

from .scripted import ScriptedClient, ask, finish, screen_text, stats, until, write

WIDE, NARROW = (120, 36), (80, 24)


def texts(pilot: Pilot[int]) -> list[str]:
    """The messages in the chat."""
    return [turn.text for turn in pilot.app.screen_stack[0].query(Turn)]


def page(pilot: Pilot[int]) -> OthersScreen | None:
    return pilot.app.screen if isinstance(pilot.app.screen, OthersScreen) else None


async def see(pilot: Pilot[int], *words: str) -> None:
    await until(pilot, lambda: all(word in screen_text(pilot) for word in words))


async def answered(pilot: Pilot[int], client: ScriptedClient, text: str = "first") -> None:
    """A chat of one question and its answer."""
    request = await ask(pilot, client, "one")
    client.say(TextDelta(request, text))
    await finish(pilot, client, request)


async def others(pilot: Pilot[int], client: ScriptedClient) -> list[int]:
    """Ask for three others by the command; returns their requests."""
    before = len(client.asked)
    await write(pilot, "/others")
    await pilot.press("enter")
    await until(pilot, lambda: len(client.asked) == before + 3 and page(pilot) is not None)
    return [before + 1, before + 2, before + 3]


def end(client: ScriptedClient, requests: Sequence[int], reason: str = "stop") -> None:
    client.say(*(Finished(request, reason, stats(request)) for request in requests))


def saved(history: History) -> list[tuple[str, str]]:
    """Text and state of every answer that is saved, oldest first."""
    history.settle()
    newest = history.newest()
    assert newest is not None
    return [
        (message.text, message.state) for message in history.tree(newest.id).messages if message.role == "assistant"
    ]


def head(history: History) -> str:
    """The text at the end of the branch that is shown at the next start."""
    history.settle()
    newest = history.newest()
    assert newest is not None and newest.head is not None
    return history.message(newest.head).text
