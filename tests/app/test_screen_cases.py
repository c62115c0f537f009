"""What the screen does in cases that a real engine does not produce on demand."""

from __future__ import annotations

import pytest
from floe_chat.app.client.interface import PromptTurn, TextDelta
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.blocks import ErrorBlock, Horizon, Welcome
from floe_chat.app.widgets.chat.transcript import Transcript
from floe_chat.app.widgets.chat.turns import UserTurn
from floe_chat.app.widgets.markdown.growing import Paragraph, TextList
from floe_chat.app.widgets.panel import status_line
from floe_chat.engine.events import Failed, Finished, Loading
from floe_chat.engine.session import NO_ROOM
from floe_chat.models.errors import FloeError
from textual import events
from textual.pilot import Pilot

from .scripted import (
    LOADED,
    ScriptedClient,
    app_for,
    ask,
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
    text_of,
    until,
    write,
)
from .test_idle import timers
from .wizardry import see, shown


def answer(pilot: Pilot[int]) -> AnswerTurn:
    return pilot.app.screen_stack[0].query(AnswerTurn).last()


async def test_keys_of_the_composer() -> None:
    async with chatting() as (client, pilot):
        await pilot.press("enter", "space", "enter", "backspace")
        assert client.asked == []
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert composer(pilot).text == "a\nb\nc"
        await pilot.press("enter", "d")
        await until(pilot, lambda: len(client.asked) == 1)
        assert client.asked[0] == (PromptTurn("user", "a\nb\nc"),)
        assert composer(pilot).text == "d"
        await pilot.press("up")
        assert composer(pilot).text == "d"
        await pilot.press("delete", "up")
        assert composer(pilot).text == "a\nb\nc"


async def test_a_question_that_waited_begins_also_behind_another_page() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        await write(pilot, "next")
        await pilot.press("enter", "f4")
        await until(pilot, lambda: len(pilot.app.screen_stack) > 1)
        assert (len(client.asked), client.began) == (1, 1)
        client.say(TextDelta(request, "done"), Finished(request, "stop", stats(request)))
        await until(pilot, lambda: client.began == 2)
        assert len(client.asked) == 2 and len(pilot.app.screen_stack) > 1


async def test_what_is_written_is_shown_literally() -> None:
    client = ScriptedClient()
    text = "[red]no[/red] <b>tag</b> **stars** [link](x)"
    async with ready(client) as pilot:
        composer(pilot).post_message(events.Paste(f"{text}\x1b[31m\x07\r\nnext\x9b"))
        await until(pilot, lambda: text in composer(pilot).text)
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 1)
        shown = f"{text}\ufffd[31m\ufffd\nnext\ufffd"
        assert client.asked[0][0].text == shown
        assert text_of(pilot.app.query_one(UserTurn).query_one(".said")) == shown
        assert text in screen_text(pilot)


async def test_questions_wait_for_their_turn() -> None:
    client = ScriptedClient()
    async with app_for(client).run_test(size=(120, 40)) as pilot:
        client.say(Loading("dense weights", 0.4))
        await until(pilot, lambda: "loading 40 %" in status(pilot).state)
        for text in ("one", "two", "three"):
            await order(pilot, text)
        await until(pilot, lambda: screen_text(pilot).count("queued until the model is loaded") == 3)
        await pilot.press("escape")
        await until(pilot, lambda: composer(pilot).text == "three" and len(pilot.app.query(UserTurn)) == 2)
        client.say(LOADED)
        await until(pilot, lambda: len(client.asked) == 1)
        client.say(TextDelta(1, "first"))
        await finish(pilot, client, 1, waiting=True)
        await until(pilot, lambda: len(client.asked) == 2)
        assert [message.text for message in client.asked[1]] == ["one", "first", "two"]
        await pilot.press("enter", "escape")
        assert client.cancelled == 1
        client.say(TextDelta(2, "second"))
        await finish(pilot, client, 2, "cancelled", waiting=True)
        await until(pilot, lambda: len(client.asked) == 3)
        assert client.asked[2][-2:] == (PromptTurn("assistant", "second"), PromptTurn("user", "three"))
        assert not [turn for turn in pilot.app.query(UserTurn) if turn.note]


async def test_failed_load_gives_the_text_back() -> None:
    client = ScriptedClient()
    async with app_for(client).run_test(size=(120, 40)) as pilot:
        await order(pilot, "early")
        await until(pilot, lambda: bool(pilot.app.query(UserTurn)))
        client.say(Failed("The pack is damaged", "sha256 differs", "Pack it again", None, 3))
        await until(pilot, lambda: composer(pilot).text == "early")
        block = text_of(pilot.app.query_one(ErrorBlock))
        assert block == "The pack is damaged\nsha256 differs\nWhat to do: Pack it again"
        await pilot.press("enter")
        await until(pilot, lambda: "No model is loaded" in screen_text(pilot))
        await pilot.press("ctrl+n", "ctrl+q")
        await until(pilot, lambda: pilot.app.return_value == 3)


async def test_refused_question_comes_back() -> None:
    async with chatting(system_prompt="Be brief.") as (client, pilot):
        client.refuse = FloeError("It does not fit", "too long", "Shorten it")
        await order(pilot, "long")
        await until(pilot, lambda: bool(pilot.app.query(ErrorBlock)))
        assert composer(pilot).text == "long" and not pilot.app.query(UserTurn)
        await until(pilot, lambda: status(pilot).state == "ready")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.asked[1] == (PromptTurn("system", "Be brief."), PromptTurn("user", "long"))


async def test_error_in_an_answer_keeps_what_came() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, "half"), Failed("Out of memory", "layer 3", "Choose Fast", request))
        await until(pilot, lambda: status(pilot).state == "ready")
        await until(pilot, lambda: "stopped by an error" in screen_text(pilot))
        assert "Choose Fast" in screen_text(pilot)
        await ask(pilot, client, "again")
        assert client.asked[1][1] == PromptTurn("assistant", "half")


async def test_stop_before_the_first_token_leaves_no_empty_answer() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client, "lost")
        await pilot.press("escape")
        assert client.cancelled == 1 and status(pilot).state == "stopping"
        await finish(pilot, client, request, "cancelled")
        assert "The answer was empty" in screen_text(pilot)
        await ask(pilot, client, "next")
        assert client.asked[1] == (PromptTurn("user", "next"),)


async def test_a_chat_that_left_gpu_memory_is_said_to_be_slower() -> None:
    async with chatting(size=(80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(NO_ROOM, TextDelta(request, "still writing"))
        await see(pilot, "This chat no longer fits in GPU", "is now read from", "still writing")
        (toast,) = pilot.app.screen.query("Toast")
        assert not toast.region.overlaps(composer(pilot).region)


async def test_what_the_model_no_longer_sees_is_marked() -> None:
    async with chatting() as (client, pilot):
        for dropped in (0, 2, 2):
            client.dropped = dropped
            await exchange(pilot, client, "hi", "yes")
        turns = list(pilot.app.query_one(Transcript).children)
        assert [type(block) for block in turns[:4]] == [UserTurn, AnswerTurn, Horizon, UserTurn]
        assert "the model no longer sees the messages above" in screen_text(pilot)
        for dropped in (4, 6):  # nothing at all fits beside the next question
            await pilot.press("ctrl+n")
            await until(pilot, lambda: bool(pilot.app.query(Welcome)))
            client.dropped = dropped
            await order(pilot, "/last")
            await until(pilot, lambda: bool(pilot.app.query(Horizon)))
            kinds = [type(block) for block in pilot.app.query_one(Transcript).children]
            assert kinds.index(Horizon) == dropped and len(kinds) == 7


async def test_new_chat_ignores_the_old_answer() -> None:
    async with chatting() as (client, pilot):
        old = await ask(pilot, client, "old")
        client.say(TextDelta(old, "old text"))
        await until(pilot, lambda: answer(pilot).text == "old text")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: bool(pilot.app.query(Welcome)))
        await order(pilot, "new")
        await until(pilot, lambda: "queued until the last answer has stopped" in screen_text(pilot))
        client.say(TextDelta(old, "late"), Finished(old, "cancelled", stats(old)))
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.asked[1] == (PromptTurn("user", "new"),)
        client.say(TextDelta(2, "new "), TextDelta(old, "later"), TextDelta(2, "text"))
        await until(pilot, lambda: answer(pilot).text == "new text")
        await pilot.press("escape")
        await finish(pilot, client, 2, "cancelled")
        await until(pilot, lambda: status(pilot).state == "stopped")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: status(pilot).state == "ready")


async def test_transcript_follows_its_end_unless_scrolled_away() -> None:
    async with chatting(size=(100, 24)) as (client, pilot):
        transcript = pilot.app.query_one(Transcript)
        request = await ask(pilot, client)
        client.say(TextDelta(request, "line\n\n" * 30))
        await until(pilot, lambda: transcript.max_scroll_y > 20 and transcript.is_vertical_scroll_end)
        await pilot.press("pageup")
        place = transcript.scroll_y
        assert place < transcript.max_scroll_y
        height = transcript.max_scroll_y
        client.say(TextDelta(request, "more\n\n" * 10))
        await until(pilot, lambda: transcript.max_scroll_y > height)
        await finish(pilot, client, request)
        await until(pilot, lambda: "end of turn" in text_of(answer(pilot).query(".footer").first()))
        assert transcript.scroll_y == place
        await pilot.press(*["pagedown"] * 6)
        await until(pilot, lambda: transcript.is_vertical_scroll_end)


async def test_a_remark_stays_its_time_and_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "_REMARK_SECONDS", 1000.0)
    monkeypatch.setattr(status_line, "_TOGETHER_SECONDS", 1000.0)
    async with ready(ScriptedClient()) as pilot:
        line = status(pilot)
        line.remark("once")
        await until(pilot, lambda: len(timers(pilot)) == 1)
        assert "once" in text_of(line)
        monkeypatch.setattr(status_line, "_REMARK_SECONDS", 0.01)
        line.remark("once")
        await until(pilot, lambda: "once" not in text_of(line))
        monkeypatch.setattr(status_line, "_REMARK_SECONDS", 1000.0)
        line.remark("about the new state")
        line.state = "stopped"
        assert "about the new state" in text_of(line)
        monkeypatch.setattr(status_line, "_TOGETHER_SECONDS", -1.0)  # some time later
        line.state = "ready"
        assert "about" not in text_of(line)
        long = f"latin1.txt cannot be attached: {'it is not text, ' * 6}and what comes last"
        line.remark(long)
        await until(pilot, lambda: "comes last" in screen_text(pilot))
        assert "latin1" not in text_of(line)


async def test_what_is_nested_deep_is_seen() -> None:
    text = (
        "\n".join(f"{'  ' * depth}- level{depth}" for depth in range(16)) + "\n\n" + "> - " * 20 + "level16\n\nlevel17"
    )
    async with chatting(size=(60, 70)) as (client, pilot):
        await exchange(pilot, client, "hi", text)
        await until(pilot, lambda: all(f"level{at}" in shown(pilot) for at in range(text.count("level"))))


async def test_a_link_is_copied_instead_of_opened() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "hi", "- see [here](https://a.example/%20x)\n\nor [there](https://b.example)")
        await until(pilot, lambda: "end of turn" in screen_text(pilot))  # the last that moves the answer's lines
        for kind, column, address in ((TextList, 7, "https://a.example/ x"), (Paragraph, 5, "https://b.example")):
            await click(pilot, answer(pilot).query_one(kind), offset=(column, 0))
            await until(pilot, lambda address=address: pilot.app.clipboard == address)
