"""Chats that are kept: the list, the search, thousands of messages, crashes, two at once, and what was not sent."""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from floe_chat.app.client.interface import PromptTurn, TextDelta
from floe_chat.app.history import (
    Attachment,
    ChatSetup,
    Conversation,
    History,
    Message,
    Tree,
    Unsent,
    new_id,
    open_history,
)
from floe_chat.app.screens.history import HistoryScreen
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.blocks import ErrorBlock, Note, Welcome
from floe_chat.app.widgets.chat.transcript import PAGE, Transcript
from floe_chat.app.widgets.chat.turns import Tail, Turn, UserTurn
from floe_chat.engine.events import PresetChanged, Rule
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
    ready,
    screen_text,
    status,
    text_of,
    until,
    write,
)
from .wizardry import shown as all_of_it


def long_tree(count: int) -> Tree:
    """A conversation of `count` messages in one branch."""
    messages: list[Message] = []
    for at in range(count):
        role = "assistant" if at % 2 else "user"
        parent = messages[-1].id if messages else None
        text = f"number {at}"
        messages.append(Message(at + 1, 0, parent, at, role, text, "complete", at, "scripted", "", None, (), 1, 1))
    return Tree(Conversation(0, 0, "Long", 0, 0, ChatSetup(), count), tuple(messages))


def transcript(pilot: Pilot[int]) -> Transcript:
    return pilot.app.screen_stack[0].query_one(Transcript)


def shown(pilot: Pilot[int]) -> list[str]:
    """The texts of the messages that are mounted."""
    return [block.text for block in transcript(pilot).children if isinstance(block, Turn)]


async def test_chats_are_kept_found_renamed_and_deleted(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await exchange(pilot, client, "about ice", "floes drift")
        await order(pilot, "/rename Cold \x1bthings")
        await until(pilot, lambda: "Cold" in str(composer(pilot).border_title))
        await pilot.press("ctrl+n")
        await until(pilot, lambda: bool(pilot.app.query(Welcome)))
        await exchange(pilot, client, "about fire", "flames rise")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Cold" in screen_text(pilot) and screen_text(pilot).count("2 messages") == 2)
        await write(pilot, "drif")
        await until(pilot, lambda: "floes drift" in screen_text(pilot) and screen_text(pilot).count("2 messages") == 0)
        await pilot.press("t", "enter")  # at once: before anything can be found
        await until(pilot, lambda: shown(pilot) == ["about ice", "floes drift"])
        await pilot.press("escape", "up")
        assert composer(pilot).text == "about ice"
    assert history.close()
    again, second = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(again, history=second) as pilot:
        await pilot.press("ctrl+r")
        await until(pilot, lambda: screen_text(pilot).count("2 messages") == 2)
        other = History(tmp_path / "history.db")
        other.ask(other.begin(ChatSetup()), None, "from elsewhere")
        await until(pilot, lambda: "from elsewhere" in screen_text(pilot))
        assert other.close()
        await pilot.press("ctrl+d")
        await until(pilot, lambda: "from elsewhere" not in screen_text(pilot))
        await pilot.press("ctrl+z")
        await until(pilot, lambda: "from elsewhere" in screen_text(pilot))
        await pilot.press("down", "enter")
        await until(pilot, lambda: shown(pilot) == ["about fire", "flames rise"])
        await exchange(pilot, again, "and smoke", "it rises too")
        assert [message.text for message in again.asked[0]] == ["about fire", "flames rise", "and smoke"]
        await write(pilot, "/export chat.json")
        await write(pilot, "")
        await order(pilot, f"/export {tmp_path}/chat.md")
        await until(pilot, lambda: (tmp_path / "chat.md").exists())
        assert (tmp_path / "chat.md").stat().st_mode & 0o077 == 0 and "it rises too" in (
            tmp_path / "chat.md"
        ).read_text()
        await order(pilot, "/export ~nobody-of-that-name/chat.md")
        await until(pilot, lambda: "~nobody-of-that-name/chat.md cannot be written" in screen_text(pilot))
        await order(pilot, "/delete")
        await until(pilot, lambda: shown(pilot) == [] and bool(pilot.app.query(Welcome)))
        await order(pilot, "/undo")
        await until(pilot, lambda: len(shown(pilot)) == 4)
    assert second.close()


@asynccontextmanager
async def at_the_end_of(client: ScriptedClient, count: int) -> AsyncGenerator[Pilot[int]]:
    """The screen with a chat of so many messages, taken up again."""
    history = History(None)
    history.add(long_tree(count))
    assert history.settle(60)
    async with ready(client, size=(80, 24), history=history) as pilot:
        await order(pilot, "/last")
        await until(pilot, lambda: f"number {count - 1}" in screen_text(pilot))
        yield pilot


@pytest.mark.thorough
async def test_what_is_loaded_above_does_not_end_the_following() -> None:
    async with at_the_end_of(ScriptedClient(), 40) as pilot:
        await until(pilot, lambda: len(shown(pilot)) > PAGE)
        await transcript(pilot).note("\n".join(f"line {number}" for number in range(50)))
        await until(pilot, lambda: "line 49" in screen_text(pilot))


@pytest.mark.thorough
async def test_thousands_of_messages_are_a_window() -> None:
    client = ScriptedClient()
    async with at_the_end_of(client, 3000) as pilot:
        assert len(shown(pilot)) < 60
        view = transcript(pilot)
        await pilot.press(*["pageup"] * 6)
        await until(pilot, lambda: int(shown(pilot)[0].split()[1]) < 2970)
        top = next(block for block in view.children if isinstance(block, Turn) and block.region.y >= view.region.y)
        before = top.region.y
        await pilot.press("pageup", "pagedown")
        await until(pilot, lambda: abs(top.region.y - before) <= 1)
        await pilot.press("ctrl+up", "home")
        await until(pilot, lambda: shown(pilot)[0] == "number 0" and "number 0" in screen_text(pilot))
        await pilot.press(*["pagedown"] * 8)
        await until(pilot, lambda: int(shown(pilot)[-1].split()[1]) > 20)
        numbers = [int(text.split()[1]) for text in shown(pilot)]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) and len(numbers) < 60
        await pilot.press("escape")
        await exchange(pilot, client, "last one", "done")
        await until(pilot, lambda: shown(pilot)[-2:] == ["last one", "done"] and view.is_vertical_scroll_end)
        asked = [message.text for message in client.asked[0]]
        assert (
            asked[-3:] == ["number 2998", "number 2999", "last one"] and asked[0] == f"number {3000 - len(asked) + 1}"
        )


async def test_what_a_crash_left_is_told_and_goes_on(tmp_path: Path) -> None:
    store = open_history(tmp_path / "history.db").store
    conversation, question, answer = new_id(), new_id(), new_id()
    with store.transaction():
        store.add_conversation(conversation, ChatSetup())
        store.add_question(question, conversation, None, "before", ())
        store.begin_answer(answer, question, "scripted", "Balanced", "nowhere:1:1")
        store.write_answer(answer, "half of", "So:")
    # Written by a process of this machine that is no more.
    with store.transaction():
        store.reopen_answer(answer, "scripted", "Balanced", f"{platform.node()}:999999999:1")
    store.close()
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await until(pilot, lambda: any("cut off" in text_of(note) for note in pilot.app.query(Note)))
        await order(pilot, "/last")
        await until(pilot, lambda: "half of" in screen_text(pilot) and "cut off" in screen_text(pilot))
        await pilot.press("ctrl+up", "m")
        await until(pilot, lambda: (client.begun, client.thoughts) == (["half of"], ["So:"]))
        client.say(TextDelta(1, " it"))
        await finish(pilot, client, 1)
        await until(pilot, lambda: shown(pilot) == ["before", "half of it"])
    assert history.close()


async def test_a_damaged_history_is_told_and_the_chat_goes_on(tmp_path: Path) -> None:
    (tmp_path / "history.db").write_bytes(b"not a database, and long enough to be looked at" * 50)
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await until(pilot, lambda: "The history was damaged" in screen_text(pilot))
        await exchange(pilot, client, "still", "here")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: isinstance(pilot.app.screen, HistoryScreen) and "still" in screen_text(pilot))
        assert not [turn for turn in pilot.app.screen_stack[0].query(UserTurn) if turn.note]
    assert history.close()


# What is kept over restarts besides messages: what was not sent yet, and the quality that a chat was given


BY_HAND = Rule(0.4, product=0.6, late=0.25)


def left_behind(file: Path, *questions: Unsent) -> None:
    """What a floe-chat that was killed had noted."""
    store = open_history(file).store
    with store.transaction():
        store.keep_unsent(f"{platform.node()}:999999999:1", questions)
    store.close()


def noted(file: Path) -> list[Unsent]:
    """All that is noted now, whoever wrote it."""
    store = open_history(file).store
    found = store.unsent(lambda _writer, _at: False)
    store.close()
    return [question for questions in found.values() for question in questions]


@pytest.mark.thorough
async def test_what_was_not_sent_is_noted_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    client, history = ScriptedClient(), History(file)
    async with ready(client, history=history) as pilot:
        request = await ask(pilot, client, "first")
        for waiting in ("second", "third"):
            await order(pilot, waiting)
        await until(pilot, lambda: screen_text(pilot).count("queued until") == 2)
        await write(pilot, "fou")
        await until(pilot, lambda: noted(file) == [Unsent("second"), Unsent("third"), Unsent("fou")])
        await finish(pilot, client, request, waiting=True)
        await until(pilot, lambda: noted(file) == [Unsent("third"), Unsent("fou")])
        await pilot.press("escape", "escape")
        await until(pilot, lambda: noted(file) == [Unsent("third\nfou")])
        composer(pilot).put("")
        await until(pilot, lambda: noted(file) == [])
    history.close()


async def test_the_next_start_puts_it_back_into_the_field_and_sends_nothing(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    left_behind(file, Unsent("one", (Attachment("a.txt", "its text"),)), Unsent("two"))
    client, history = ScriptedClient(), History(file)
    async with ready(client, history=history) as pilot:
        await until(pilot, lambda: composer(pilot).text == "one\ntwo")
        await until(pilot, lambda: "a.txt" in screen_text(pilot) and "were queued when" in screen_text(pilot))
        await until(pilot, lambda: noted(file) == [Unsent("one\ntwo", (Attachment("a.txt", "its text"),))])
        assert client.asked == [] and history.take_over_unsent() == []
    history.close()


async def test_a_draft_waits_while_a_message_is_edited(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    client, history = ScriptedClient(), History(file)
    notes = Attachment("notes.md", "its text")
    async with ready(client, history=history) as pilot:
        await finish(pilot, client, await ask(pilot, client, "first"))
        composer(pilot).take_back("half a thought", (notes,))
        await until(pilot, lambda: noted(file) == [Unsent("half a thought", (notes,))])
        await pilot.press("ctrl+up", "up", "e")
        await until(pilot, lambda: composer(pilot).text == "first" and "notes.md" not in screen_text(pilot))
        await pilot.press("escape", "ctrl+up", "up", "e", "ctrl+up", "up", "e")  # in the middle of it too
        await write(pilot, "ly")
        await until(pilot, lambda: noted(file) == [Unsent("firstly"), Unsent("half a thought", (notes,))])
        await pilot.press("escape")
        await until(pilot, lambda: "notes.md" in screen_text(pilot))
        assert composer(pilot).text == "half a thought"
        await pilot.press("ctrl+up", "up", "e")
        await until(pilot, lambda: composer(pilot).text == "first" and "notes.md" not in screen_text(pilot))
        await write(pilot, "ly")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.asked[1][0].text == "firstly"
        await until(pilot, lambda: composer(pilot).text == "half a thought" and "notes.md" in screen_text(pilot))
        await finish(pilot, client, 2)
        for changed, kept in (("", "half a thought"), ("!", "firstly!\nhalf a thought")):
            await pilot.press("ctrl+up", "up", "e")
            await until(pilot, lambda: composer(pilot).text == "firstly")
            await write(pilot, changed)
            await pilot.press("ctrl+n")
            await until(pilot, lambda kept=kept: composer(pilot).text == kept and "notes.md" in screen_text(pilot))
            await pilot.app._chat.controller.chats.open_last()  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    history.close()


def test_what_another_one_that_runs_has_not_sent_is_left_alone(tmp_path: Path) -> None:
    first, second = History(tmp_path / "history.db"), History(tmp_path / "history.db")
    first.keep_unsent([Unsent("mine")])
    assert first.settle() and second.take_over_unsent() == []
    first.close()
    second.close()


async def test_a_quality_set_by_hand_belongs_to_its_chat(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await finish(pilot, client, await ask(pilot, client, "at my quality"))
        pilot.app._chat.controller.model.set_quality(BY_HAND)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        client.say(PresetChanged("Custom"))
        await until(pilot, lambda: status(pilot).preset == "Custom")
        await pilot.press("ctrl+n", "f3")
        client.say(PresetChanged("Exact"))
        await until(pilot, lambda: status(pilot).preset == "Exact")
        await finish(pilot, client, await ask(pilot, client, "at a preset"))
    history.close()
    assert client.dialled == [BY_HAND]

    client, history = ScriptedClient(), History(tmp_path / "history.db")
    older = history.conversations()[-1].id
    assert [history.conversation(one.id).setup.quality for one in history.conversations()] == [None, BY_HAND]
    async with ready(client, history=history) as pilot:
        await pilot.app._chat.controller.chats.open(older)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
        assert client.dialled == [BY_HAND]
        client.say(PresetChanged("Custom"))
        await write(pilot, "/last")
        await until(pilot, lambda: status(pilot).preset == "Custom")
        await pilot.press("f3")
        assert client.wanted and history.settle()
        assert history.conversation(older).setup.quality is None
    history.close()


# Messages that are edited, answered again, continued, deleted and forked, by keys


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


@pytest.mark.thorough
async def test_an_answer_stopped_before_its_first_word_gives_way_to_the_one_before() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: len(client.asked) == 2 and texts(pilot) == ["one", ""])
        await pilot.press("escape")
        await finish(pilot, client, 2, "cancelled")
        await until(pilot, lambda: "The answer was empty; the one before it is shown again" in screen_text(pilot))
        assert texts(pilot) == ["one", "first"]
        await ask(pilot, client, "lost")
        await pilot.press("escape")
        await finish(pilot, client, 3, "cancelled")
        await until(pilot, lambda: "so the model will not see this question again" in all_of_it(pilot))
        await ask(pilot, client, "next")
        assert [turn.text for turn in client.asked[3]] == ["one", "first", "next"]


@pytest.mark.thorough
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
        await until(pilot, lambda: "delete d" in all_of_it(pilot))
        assert "code" not in all_of_it(pilot)
        await pilot.press("escape", "ctrl+t")
        await answered(pilot, client, 2, "Look:\n\n```\nx = 1\n```\n\n" + "and more words\n\n" * 9)
        await pilot.press("ctrl+up")
        for words in ("‹ 2/2 ›", "copy c", "code y", "edit e", "again r", "more m", "fork f", "delete d"):
            await until(pilot, lambda words=words: words in all_of_it(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: "delete d" not in all_of_it(pilot))
        await pilot.hover(pilot.app.query(Tail).last())
        await until(pilot, lambda: "delete" in all_of_it(pilot))
        assert pilot.app.query(Tail).last().size.height == 1
