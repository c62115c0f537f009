"""A screen on which nothing happens does nothing: no timer runs, nothing is looked for, nothing is painted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import History
from floe_chat.models import catalog
from textual.pilot import Pilot
from textual.timer import Timer

from .made_up import progress, running
from .scripted import ScriptedClient, app_for, ask, composer, finish, ready, stats, status, until, write
from .wizardry import shown


def timers(pilot: Pilot[int]) -> list[str]:
    """The timers that will fire, of the program, its screens and all that is on them."""
    return [repr(timer) for timer in _timers(pilot) if timer._active.is_set()]  # pyright: ignore[reportPrivateUsage]


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
        for key in ("f4", "f9", "f1", "f5", "ctrl+r"):  # pages that draw figures need no clock either
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


async def test_the_engine_wakes_the_screen() -> None:
    client = ChatClient(catalog.find(catalog.DEMO))
    try:
        async with app_for(client).run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: status(pilot).state == "ready", 120)
            composer(pilot).put("What is an expert?")
            await pilot.press("enter")
            await until(pilot, lambda: "end of turn" in shown(pilot), 120)
            await until(pilot, lambda: not timers(pilot))
    finally:
        client.close()


async def test_only_a_setup_that_moves_is_watched() -> None:
    async with ready(ScriptedClient()) as pilot:
        app = pilot.app
        setups = app.setups  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
        for state, watched in (("working", True), ("paused", False), ("done", False)):
            setups.setup = running(progress(state))
            await app._switch(None)  # pyright: ignore[reportAttributeAccessIssue, reportPrivateUsage, reportUnknownMemberType]
            await until(pilot, lambda watched=watched: bool(timers(pilot)) == watched)
            assert status(pilot).background
