"""What is kept over restarts besides messages: what was not sent yet, and the quality that a chat was given."""

from __future__ import annotations

from pathlib import Path

from floe_chat.app.history import Attachment, ChatSetup, History, Unsent, as_json, open_history, parse
from floe_chat.engine.events import PresetChanged, Rule

from .scripted import ScriptedClient, ask, composer, finish, ready, screen_text, status, until, write

BY_HAND = Rule(0.4, product=0.6, late=0.25)


def left_behind(file: Path, *questions: Unsent) -> None:
    """What a floe-chat that was killed had noted."""
    import platform

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


async def test_what_was_not_sent_is_noted_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "history.db"
    client, history = ScriptedClient(), History(file)
    async with ready(client, history=history) as pilot:
        request = await ask(pilot, client, "first")
        for waiting in ("second", "third"):
            await write(pilot, waiting)
            await pilot.press("enter")
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


def test_a_quality_set_by_hand_is_exported_and_imported() -> None:
    history = History(None)
    number = history.begin(ChatSetup("demo", quality=BY_HAND))
    history.ask(number, None, "hi")
    assert history.settle()
    (tree,) = parse(as_json([history.tree(number)]), "a file", print)
    assert tree.conversation.setup.quality == BY_HAND
    history.close()
