"""Three other answers side by side: asked for, by a key that is held too, stopped and picked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from floe_chat.app.client.interface import TextDelta, ThoughtDelta
from floe_chat.app.history import History
from floe_chat.app.screens.others import OthersScreen
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.turns import Turn
from floe_chat.engine.events import Failed, Finished, PrefillProgress
from floe_chat.models.errors import FloeError
from textual.pilot import Pilot

from .scripted import (
    LOADED,
    ScriptedClient,
    chatting,
    click,
    composer,
    exchange,
    finish,
    order,
    ready,
    screen_text,
    stats,
    status,
    until,
    write,
)


async def test_three_answers_come_side_by_side_and_one_is_picked(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        await order(pilot, "/set seed 7")
        requests = await others(pilot, client)
        assert [sampling.seed for sampling in client.samplings[1:]] == [None] * 3
        assert client.asked[1:] == [client.asked[0]] * 3 and client.began == 2
        await see(pilot, "▸1 ● waiting", "2 ● waiting", "3 ● waiting", "one")
        a, b, c = requests
        client.say(PrefillProgress(a, 5, 20), TextDelta(b, "**bold** \x1b[31mred"), ThoughtDelta(c, "Hm.", 2), stats(b))
        await see(
            pilot, "1 ● reading", "2 ● writing · 42 tokens", "3 ● thinking", "bold \ufffd[31mred", "Thinking, 2 tokens"
        )
        client.say(TextDelta(a, "alpha"), TextDelta(c, "gamma"))
        await see(pilot, "alpha", "gamma")
        await until(
            pilot, lambda: [text for text, _ in saved(history)][1:] == ["alpha", "**bold** \x1b[31mred", "gamma"]
        )
        assert head(history) == "first"  # until one is picked
        end(client, [a, c])
        await see(pilot, "1 ● ended", "3 ● ended · 42 tokens", "Thought for 2 tokens")
        assert status(pilot).state == "writing"
        await pilot.press("3")
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "gamma"])
        assert client.let_go == [b] and composer(pilot).has_focus
        end(client, [b], "cancelled")
        await until(pilot, lambda: status(pilot).state in ("ready", "stopped"))
        assert saved(history) == [
            *(("first", "complete"), ("alpha", "complete")),
            *(("**bold** \x1b[31mred", "stopped"), ("gamma", "complete")),
        ]
        assert head(history) == "gamma"
        await pilot.press("ctrl+up", "left")
        await until(pilot, lambda: "3/4" in screen_text(pilot) and texts(pilot)[1].startswith("**bold**"))


async def test_one_that_is_being_written_goes_on_and_escape_shows_the_answer_before(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        a, b, c = await others(pilot, client)
        client.say(TextDelta(b, "be"))
        await see(pilot, "2 ● writing")
        await pilot.press("right", "enter")
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "be"])
        assert client.let_go == [a, c] and status(pilot).state == "writing"
        client.say(TextDelta(a, "late"), TextDelta(b, "ta"))
        end(client, [a, c], "cancelled")
        await until(pilot, lambda: texts(pilot) == ["one", "beta"])
        client.say(TextDelta(b, "!"))
        await finish(pilot, client, b)
        assert saved(history) == [("first", "complete"), ("beta!", "complete")]
        await see(pilot, "beta!", "2/2", "end of turn")
        a, b, c = await others(pilot, client)
        client.say(TextDelta(a, "alpha"))
        await see(pilot, "1 ● writing")
        await pilot.press("escape")
        await until(pilot, lambda: client.let_go[2:] == [None] and status(pilot).state == "stopping")
        end(client, [a, b, c], "cancelled")
        await see(pilot, "1 ● stopped", "2 ● stopped", "3 ● stopped", "It had no text yet")
        await pilot.press("2")
        await see(pilot, "Answer 2 has no text")
        await pilot.press("escape")
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "beta!"])
        assert saved(history)[1:] == [("beta!", "complete"), ("alpha", "stopped")] and head(history) == "beta!"
        await pilot.press("ctrl+up", "right")
        await until(pilot, lambda: texts(pilot) == ["one", "alpha"] and "3/3" in screen_text(pilot))


async def test_each_fails_for_itself_and_so_does_picking_in_a_chat_that_is_gone(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        a, b, c = await others(pilot, client)
        client.say(TextDelta(a, "alpha"), Failed("It broke", "A reason", "A hint", a), Failed("It broke", "", "", b))
        await see(pilot, "1 ● failed", "2 ● failed", "alpha", "A reason", "What to do: A hint")
        assert status(pilot).state != "ready"
        client.say(TextDelta(c, "gamma"))
        end(client, [c])
        await see(pilot, "3 ● ended")
        await pilot.press("1")
        await until(pilot, lambda: texts(pilot) == ["one", "alpha"])
        assert saved(history) == [("first", "complete"), ("alpha", "failed"), ("gamma", "complete")]
        client.refuse = FloeError("It does not fit", "too long", "Shorten it")
        await order(pilot, "/others")
        await see(pilot, "It does not fit", "1 ● failed", "3 ● failed")
        await pilot.press("escape")
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "alpha"])
        client.refuse = None
        requests = await others(pilot, client)
        client.say(TextDelta(requests[0], "late"))
        await see(pilot, "late")
        another = History(tmp_path / "history.db")
        newest = another.newest()
        assert newest is not None
        another.delete(newest.id)
        another.settle()
        await pilot.press("1")
        await until(pilot, lambda: page(pilot) is None and "There is no such chat" in screen_text(pilot))
        end(client, requests, "cancelled")
        await until(pilot, lambda: status(pilot).state in ("ready", "stopped"))


async def test_a_narrow_screen_shows_one_at_a_time(tmp_path: Path) -> None:
    async with chatting(NARROW) as (client, pilot):
        await answered(pilot, client)
        a, b, c = await others(pilot, client)
        client.say(TextDelta(a, "alpha"), TextDelta(b, "beta"), TextDelta(c, "gamma"))
        await see(pilot, "▸1 ● writing", "3 ● writing", "alpha")
        assert "beta" not in screen_text(pilot)
        await pilot.press("tab")
        await see(pilot, "▸2", "beta")
        assert "alpha" not in screen_text(pilot)
        opened = page(pilot)
        assert opened is not None
        await click(pilot, opened.columns[2].heading)
        await see(pilot, "▸3", "gamma")
        await click(pilot, opened.query(AnswerTurn).last())
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "gamma"])


# What tests of answers side by side read and ask for


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
    await exchange(pilot, client, "one", text)


async def others(pilot: Pilot[int], client: ScriptedClient) -> list[int]:
    """Ask for three others by the command; returns their requests."""
    before = len(client.asked)
    await order(pilot, "/others")
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


@pytest.mark.thorough
async def test_a_second_press_by_accident_loses_nothing_and_a_held_key_asks_for_three(tmp_path: Path) -> None:
    """1 goes on with the answer as if the key had been pressed once; Escape leaves all that came."""
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2)
        client.say(TextDelta(2, "al"))
        await until(pilot, lambda: texts(pilot) == ["one", "al"])
        await pilot.press("ctrl+t")
        await see(pilot, "1 ● writing")
        await pilot.press("1")
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "al"])
        client.say(TextDelta(2, "pha"))
        await finish(pilot, client, 2)
        assert client.cancelled == 0 and len(client.asked) == 2
        assert saved(history) == [("first", "complete"), ("alpha", "complete")] and head(history) == "alpha"
        await see(pilot, "alpha", "2/2")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 3)
        await pilot.press("ctrl+t", "escape", "escape")  # before anything came
        await until(pilot, lambda: page(pilot) is None and texts(pilot) == ["one", "alpha"])
        end(client, [3], "cancelled")
        await until(pilot, lambda: status(pilot).state in ("ready", "stopped"))
        assert len(client.asked) == 3 and saved(history) == [("first", "complete"), ("alpha", "complete")]
        assert head(history) == "alpha"
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 4 and client.began == 4)
        let_go = len(client.let_go)
        await pilot.press("ctrl+t", "ctrl+t", "ctrl+t")
        await until(pilot, lambda: page(pilot) is not None and client.let_go[let_go:] == [None])
        assert len(client.asked) == 4
        end(client, [4], "cancelled")
        await until(pilot, lambda: len(client.asked) == 7)
        await see(pilot, "1 ● waiting", "2 ● waiting", "3 ● waiting")
        client.say(TextDelta(5, "beta"), TextDelta(6, "gamma"), TextDelta(7, "delta"))
        end(client, [6, 7])
        await see(pilot, "1 ● writing", "beta", "gamma", "delta", "3 ● ended")
        # A command from the palette leaves the page first.
        await pilot.press("ctrl+p")
        await write(pilot, "new chat")
        await see(pilot, "New chat")
        await pilot.press("down", "enter")
        await until(pilot, lambda: len(pilot.app.screen_stack) == 1 and texts(pilot) == [])
        end(client, [5], "cancelled")
        await until(pilot, lambda: status(pilot).state == "ready")
        states = [*(("first", "complete"), ("alpha", "complete")), *(("beta", "stopped"), ("gamma", "complete"))]
        assert saved(history) == [*states, ("delta", "complete")]


@pytest.mark.thorough
async def test_what_is_queued_follows_the_picked_answer_and_another_model_stops_them(tmp_path: Path) -> None:
    async with chatting(WIDE) as (client, pilot):
        await answered(pilot, client)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2)
        client.say(TextDelta(2, "alpha"))
        await until(pilot, lambda: texts(pilot) == ["one", "alpha"])
        await write(pilot, "two")
        await pilot.press("enter", "ctrl+t")
        await see(pilot, "1 ● writing")
        end(client, [2])
        await until(pilot, lambda: len(client.asked) == 4)
        client.say(TextDelta(3, "beta"))
        end(client, [3, 4])
        await see(pilot, "2 ● ended", "3 ● ended")
        assert len(client.asked) == 4
        await pilot.press("2")
        await until(pilot, lambda: len(client.asked) == 5)
        assert [turn.text for turn in client.asked[4]] == ["one", "beta", "two"]
        await finish(pilot, client, 5)
        requests, let_go = await others(pilot, client), len(client.let_go)
        client.say(TextDelta(requests[0], "alpha"))
        await see(pilot, "alpha")
        chat = pilot.app.screen_stack[0]
        chat.controller.model.switch(tmp_path)  # type: ignore[attr-defined]
        await until(pilot, lambda: client.let_go[let_go:] == [None])
        end(client, requests, "cancelled")
        await until(pilot, lambda: client.opened == [tmp_path])
        client.say(LOADED)
        await see(pilot, "1 ● stopped")
        await pilot.press("1")
        await until(pilot, lambda: texts(pilot)[-2:] == ["two", "alpha"])


async def test_quitting_and_ctrl_c_end_them_properly(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2)
        client.say(TextDelta(2, "alpha"))
        await until(pilot, lambda: texts(pilot) == ["one", "alpha"])
        await pilot.press("ctrl+t")
        await see(pilot, "1 ● writing")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: client.let_go == [None])
        end(client, [2], "cancelled")
        await see(pilot, "1 ● stopped", "2 ● stopped")
        await pilot.press("escape")
        await until(pilot, lambda: page(pilot) is None and len(client.asked) == 2)
        _, b, _ = await others(pilot, client)
        client.say(TextDelta(b, "beta"))
        await see(pilot, "beta")
        await pilot.press("ctrl+q")
    history.close()
    again = History(tmp_path / "history.db")
    assert saved(again) == [("first", "complete"), ("alpha", "stopped"), ("beta", "stopped")]
    assert head(again) == "alpha"
