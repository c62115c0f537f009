"""Messages that are edited, answered again, continued, deleted and forked, by keys."""

from __future__ import annotations

from floe_chat.app.client.interface import PromptTurn, TextDelta
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.blocks import ErrorBlock
from floe_chat.app.widgets.chat.transcript import Transcript
from floe_chat.app.widgets.chat.turns import Tail, UserTurn
from floe_chat.models.errors import FloeError
from textual.pilot import Pilot

from .scripted import (
    ScriptedClient,
    ask,
    chatting,
    click,
    composer,
    exchange,
    finish,
    order,
    screen_text,
    status,
    text_of,
    until,
)
from .wizardry import shown


def texts(pilot: Pilot[int]) -> list[str]:
    """What the messages on the screen say, in order."""
    blocks = pilot.app.screen_stack[0].query_one(Transcript).children
    return [block.text for block in blocks if isinstance(block, UserTurn | AnswerTurn)]


async def answered(pilot: Pilot[int], client: ScriptedClient, count: int, text: str) -> None:
    """Wait for the request number `count`, and answer it."""
    await until(pilot, lambda: len(client.asked) == count and status(pilot).state.startswith("reading"))
    client.say(TextDelta(count, text))
    await finish(pilot, client, count)


async def test_every_version_is_kept() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first")
        await exchange(pilot, client, "two", "second")
        await pilot.press("ctrl+t")
        await answered(pilot, client, 3, "other")
        assert client.asked[2][-1].text == "two" and texts(pilot) == ["one", "first", "two", "other"]
        await pilot.press("ctrl+up")
        await until(pilot, lambda: "2/2" in screen_text(pilot) and "again r" in screen_text(pilot))
        await pilot.press("left")
        await until(pilot, lambda: texts(pilot)[-1] == "second" and "1/2" in screen_text(pilot))
        await pilot.press("left")
        await until(pilot, lambda: "This message has no earlier version" in screen_text(pilot))
        await pilot.press("up", "up", "up", "e")
        await until(pilot, lambda: composer(pilot).text == "one" and composer(pilot).has_focus)
        await pilot.press("end", "x", "enter")
        await answered(pilot, client, 4, "new")
        assert client.asked[3] == (PromptTurn("user", "onex"),) and texts(pilot) == ["onex", "new"]
        await pilot.press("ctrl+up", "up", "left")
        await until(pilot, lambda: texts(pilot) == ["one", "first", "two", "other"])
        await pilot.press("escape")
        await exchange(pilot, client, "three", "third")
        assert [message.text for message in client.asked[4]] == ["one", "first", "two", "other", "three"]


async def test_an_answer_stopped_before_its_first_word_gives_way_to_the_one_before() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2 and texts(pilot) == ["one", ""])
        await pilot.press("escape")
        await finish(pilot, client, 2, "cancelled")
        await until(pilot, lambda: "The answer was empty; the one before it is shown again" in screen_text(pilot))
        assert texts(pilot) == ["one", "first"]


async def test_the_context_is_that_of_the_branch_on_the_screen() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first answer")
        await pilot.press("ctrl+t")
        await answered(pilot, client, 2, "another one of more words")
        assert "context 62/1000" in screen_text(pilot)  # as the engine told it
        await pilot.press("ctrl+up", "left")
        await until(pilot, lambda: "context 3/1000" in screen_text(pilot))
        await pilot.press("right")
        await until(pilot, lambda: "context 6/1000" in screen_text(pilot))
        await pilot.press("escape")
        await order(pilot, "/new")
        await until(pilot, lambda: "context 0/1000" in screen_text(pilot))
        await order(pilot, "/last")
        await until(pilot, lambda: "context 6/1000" in screen_text(pilot))


async def test_an_answer_is_edited_and_goes_on() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first", "length")
        await order(pilot, "/more")
        await answered(pilot, client, 2, " and more")
        assert client.begun == ["", "first"] and client.asked[1] == (PromptTurn("user", "one"),)
        assert texts(pilot) == ["one", "first and more"]
        await pilot.press("ctrl+up", "e")
        await until(pilot, lambda: "Editing the answer" in screen_text(pilot))
        await pilot.press("escape")
        assert composer(pilot).text == ""
        await pilot.press("ctrl+up", "e", "!", "enter")
        await until(pilot, lambda: texts(pilot) == ["one", "first and more!"])
        assert len(client.asked) == 2 and "written by you" in screen_text(pilot) and "2/2" in screen_text(pilot)
        await ask(pilot, client, "next")
        assert client.asked[2][1] == PromptTurn("assistant", "first and more!")


async def test_deleting_is_taken_back_and_a_fork_is_a_chat_of_its_own() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first")
        await exchange(pilot, client, "two", "second")
        await pilot.press("ctrl+up", "up", "d")
        await until(pilot, lambda: texts(pilot) == ["one", "first"])
        await pilot.press("ctrl+up", "d")
        await until(pilot, lambda: texts(pilot) == ["one"])
        for back in (["one", "first"], ["one", "first", "two", "second"]):
            await order(pilot, "/undo")
            await until(pilot, lambda back=back: texts(pilot) == back)
        await pilot.press("ctrl+up", "up", "up", "f")
        await until(pilot, lambda: texts(pilot) == ["one", "first"] and composer(pilot).has_focus)
        await exchange(pilot, client, "else", "third")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen_text(pilot).count("4 messages") == 2)


async def test_while_an_answer_runs_messages_stay_as_they_are() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "```\nx = 1\n```\n\n```\ny = 2\n```\n")
        await pilot.press("ctrl+up", "y")
        await until(pilot, lambda: pilot.app.clipboard == "x = 1\n")
        await pilot.press("y")
        await until(pilot, lambda: pilot.app.clipboard == "y = 2\n")
        await pilot.press("up", "c")
        await until(pilot, lambda: pilot.app.clipboard == "one")
        await pilot.press("escape")
        request = await ask(pilot, client, "two")
        for key in "erdm":
            await pilot.press("ctrl+up", key)
            await until(pilot, lambda: "Stop the running answer first (Esc)" in screen_text(pilot))
            await pilot.press("escape")
        client.say(TextDelta(request, "second"))
        await finish(pilot, client, request)
        client.refuse = FloeError("It does not fit", "too long", "Shorten it")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: bool(pilot.app.query(ErrorBlock)))
        assert texts(pilot)[2:] == ["two", "second"]
        code = pilot.app.query_one("CodeBar")
        await click(pilot, code)
        assert "copy" in text_of(code)


async def test_the_bar_names_every_key_on_a_narrow_screen() -> None:
    async with chatting(size=(60, 20)) as (client, pilot):
        await exchange(pilot, client, "one", "Plain `words`.")
        await pilot.press("ctrl+up")
        await until(pilot, lambda: "delete d" in shown(pilot))
        assert "code" not in shown(pilot)
        await pilot.press("escape", "ctrl+t")
        await answered(pilot, client, 2, "Look:\n\n```\nx = 1\n```\n\n" + "and more words\n\n" * 9)
        await pilot.press("ctrl+up")
        for words in ("‹ 2/2 ›", "copy c", "code y", "edit e", "again r", "more m", "fork f", "delete d"):
            await until(pilot, lambda words=words: words in shown(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: "delete d" not in shown(pilot))
        await pilot.hover(pilot.app.query(Tail).last())
        await until(pilot, lambda: "delete" in shown(pilot))
        assert pilot.app.query(Tail).last().size.height == 1
