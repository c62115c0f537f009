"""Chats that are kept: the list, the search, thousands of messages, crashes, two at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.history import ChatSetup, Conversation, History, Message, Tree, new_id, open_history
from floe_chat.app.screens.history import HistoryScreen
from floe_chat.app.widgets.chat.blocks import Note, Welcome
from floe_chat.app.widgets.chat.transcript import Transcript
from floe_chat.app.widgets.chat.transcript_window import PAGE
from floe_chat.app.widgets.chat.turns import Turn, UserTurn
from textual.pilot import Pilot
from textual.widgets import OptionList

from .scripted import ScriptedClient, ask, composer, finish, ready, screen_text, text_of, until, write

NOON = 3_931_200_000  # 15 Feb 1970, everywhere but at the date line


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


async def exchange(pilot: Pilot[int], client: ScriptedClient, question: str, answer: str) -> None:
    request = await ask(pilot, client, question)
    client.say(TextDelta(request, answer))
    await finish(pilot, client, request)


async def test_chats_are_kept_found_renamed_and_deleted(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await exchange(pilot, client, "about ice", "floes drift")
        await write(pilot, "/rename Cold \x1bthings")
        await pilot.press("enter")
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
        composer(pilot).put(f"/export {tmp_path}/chat.md")
        await pilot.press("enter")
        await until(pilot, lambda: (tmp_path / "chat.md").exists())
        assert (tmp_path / "chat.md").stat().st_mode & 0o077 == 0 and "it rises too" in (
            tmp_path / "chat.md"
        ).read_text()
        composer(pilot).put("/export ~nobody-of-that-name/chat.md")
        await pilot.press("enter")
        await until(pilot, lambda: "~nobody-of-that-name/chat.md cannot be written" in screen_text(pilot))
        composer(pilot).put("/delete")
        await pilot.press("enter")
        await until(pilot, lambda: shown(pilot) == [] and bool(pilot.app.query(Welcome)))
        composer(pilot).put("/undo")
        await pilot.press("enter")
        await until(pilot, lambda: len(shown(pilot)) == 4)
    assert second.close()


async def test_pages_of_the_list_are_eight_chats() -> None:
    history = History(None)
    for number in range(20):
        history.add(replace(long_tree(2), conversation=Conversation(0, 0, f"Long {number}", 0, NOON, ChatSetup(), 2)))
    assert history.settle()
    async with ready(ScriptedClient(), history=history) as pilot:
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "Long 19" in screen_text(pilot))
        chats = pilot.app.screen.query_one(OptionList)
        for key, place in (("pagedown", 8), ("pagedown", 16), ("pagedown", 19), ("pageup", 11), ("up", 10)):
            await pilot.press(key)
            await until(pilot, lambda place=place: chats.highlighted == place)
    assert history.close()


@asynccontextmanager
async def at_the_end_of(client: ScriptedClient, count: int) -> AsyncGenerator[Pilot[int]]:
    """The screen with a chat of so many messages, taken up again."""
    history = History(None)
    history.add(long_tree(count))
    assert history.settle(60)
    async with ready(client, size=(80, 24), history=history) as pilot:
        composer(pilot).put("/last")
        await pilot.press("enter")
        await until(pilot, lambda: f"number {count - 1}" in screen_text(pilot))
        yield pilot


async def test_what_is_loaded_above_does_not_end_the_following() -> None:
    async with at_the_end_of(ScriptedClient(), 40) as pilot:
        await until(pilot, lambda: len(shown(pilot)) > PAGE)
        await transcript(pilot).note("\n".join(f"line {number}" for number in range(50)))
        await until(pilot, lambda: "line 49" in screen_text(pilot))


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
    import platform

    with store.transaction():
        store.reopen_answer(answer, "scripted", "Balanced", f"{platform.node()}:999999999:1")
    store.close()
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await until(pilot, lambda: any("cut off" in text_of(note) for note in pilot.app.query(Note)))
        composer(pilot).put("/last")
        await pilot.press("enter")
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
