"""A key that is held asks for three other answers, and nothing is lost where that was an accident."""

from __future__ import annotations

from pathlib import Path

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import History
from textual.pilot import Pilot

from .beside import WIDE, answered, end, head, others, page, saved, see, texts
from .scripted import (
    ScriptedClient,
    ask,
    composer,
    finish,
    ready,
    status,
    until,
    write,
)


async def again(pilot: Pilot[int], client: ScriptedClient) -> None:
    """A chat whose answer is being written once more, and has two letters of `alpha`."""
    await answered(pilot, client)
    await pilot.press("ctrl+t")
    await until(pilot, lambda: len(client.asked) == 2)
    client.say(TextDelta(2, "al"))
    await until(pilot, lambda: texts(pilot) == ["one", "al"])


async def test_a_held_key_asks_for_three(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await answered(pilot, client)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2 and client.began == 2)
        await pilot.press("ctrl+t", "ctrl+t", "ctrl+t")
        await until(pilot, lambda: page(pilot) is not None and client.let_go == [None])
        assert len(client.asked) == 2
        end(client, [2], "cancelled")
        await until(pilot, lambda: len(client.asked) == 5)
        await see(pilot, "1 ● waiting", "2 ● waiting", "3 ● waiting")
        client.say(TextDelta(3, "alpha"), TextDelta(4, "beta"), TextDelta(5, "gamma"))
        await see(pilot, "alpha", "beta", "gamma")
        end(client, [3, 4, 5])
        await see(pilot, "3 ● ended")
        await pilot.press("1")
        await until(pilot, lambda: texts(pilot) == ["one", "alpha"])
        assert [text for text, _ in saved(history)] == ["first", "alpha", "beta", "gamma"]


async def test_a_second_press_by_accident_loses_nothing(tmp_path: Path) -> None:
    """1 goes on with the answer as if the key had been pressed once; Escape leaves all that came."""
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, WIDE, history=history) as pilot:
        await again(pilot, client)
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


async def test_an_ordinary_answer_is_not_taken_for_one_that_the_key_began() -> None:
    client = ScriptedClient()
    async with ready(client, WIDE) as pilot:
        request = await ask(pilot, client, "one")
        await pilot.press("ctrl+t")
        await see(pilot, "Stop the running answer first (Esc)")
        await write(pilot, "/others")
        await pilot.press("enter")
        await until(pilot, lambda: composer(pilot).text == "")
        assert page(pilot) is None and client.asked == client.asked[:1]
        await finish(pilot, client, request)


async def test_what_is_queued_follows_the_picked_answer() -> None:
    client = ScriptedClient()
    async with ready(client, WIDE) as pilot:
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
