"""Waiting until a screen has taken in what it was sent, where Textual's pilot waits until the process is quiet.

After every key the pilot sleeps 20 ms twice, and up to a second while an engine's thread computes. Most of the time of
the screen tests went there. A screen has settled when no widget has a message left and it has been painted.
"""

from __future__ import annotations

import asyncio

import pytest
import textual.app
import textual.pilot
from textual.app import App
from textual.message_pump import MessagePump, active_app

ROUNDS = 50  # an answer that streams never settles
PATIENCE = 60.0  # seconds; the tests' own time limit says where it hangs


async def settle(_least: float = 0, _most: float = 0) -> None:
    """Let messages pass until no widget has one left, or ROUNDS times."""
    app = active_app.get()
    for _ in range(ROUNDS):
        focused = app.screen.focused
        # Keys go down this way, and what comes of them goes up.
        if not await handled(app, [app, app.screen, *(focused.ancestors_with_self if focused else ())]):
            return
        app.screen._on_timer_update()  # pyright: ignore[reportPrivateUsage]
        if not any(pump.message_queue_size for pump in (app, *app.screen.walk_children(with_self=True))):
            return


async def handled(app: App[object], pumps: list[MessagePump]) -> bool:
    """Wait until each of `pumps` has handled what it has now; whether the application still runs."""
    left = set(map(id, pumps))
    done = asyncio.Event()

    def one(pump: int) -> None:
        left.discard(pump)
        if not left:
            done.set()

    for pump in pumps:
        if not pump.call_later(one, id(pump)):
            one(id(pump))
    failed = app._exception_event  # pyright: ignore[reportPrivateUsage]
    waiting = [asyncio.ensure_future(event.wait()) for event in (done, failed)]
    await asyncio.wait(waiting, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    return done.is_set() and app.is_running


def use_settling(patch: pytest.MonkeyPatch) -> None:
    """Let the pilot wait in this way, after keys, clicks and pauses without a time."""
    patch.setattr(textual.app, "wait_for_idle", settle)
    patch.setattr(textual.pilot, "wait_for_idle", settle)
