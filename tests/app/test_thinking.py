"""What a model thinks is folded, shown or switched off, and never taken for its answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from floe_chat.app.client.interface import PromptTurn, TextDelta, ThoughtDelta
from floe_chat.app.history import History
from floe_chat.app.settings.file import read
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.engine.events import Failed
from textual.pilot import Pilot

from .scripted import LOADED, ScriptedClient, ask, chatting, click, composer, finish, order, ready, screen_text, until

WORDS = "They ask about ice.\n\x1b[31mSo: frozen."


def last(pilot: Pilot[int]) -> AnswerTurn:
    return list(pilot.app.screen_stack[0].query(AnswerTurn))[-1]


async def see(pilot: Pilot[int], *words: str, absent: str = "") -> None:
    def seen() -> bool:
        text = screen_text(pilot)
        return all(word in text for word in words) and (not absent or absent not in text)

    await until(pilot, seen)


async def answer(pilot: Pilot[int], client: ScriptedClient, thought: str = WORDS, text: str = "Frozen water.") -> None:
    request = await ask(pilot, client)
    client.say(ThoughtDelta(request, thought[:9], 3), ThoughtDelta(request, thought[9:], 1231))
    if text:
        client.say(TextDelta(request, text))
    await finish(pilot, client, request)


async def test_thinking_is_one_line_that_opens() -> None:
    async with chatting((80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(ThoughtDelta(request, "They ", 1))
        await see(pilot, "Thinking, 1 token ▸", "● thinking", absent="They")
        client.say(ThoughtDelta(request, "ask about ice.\n\x1b[31mSo: frozen.", 1233))
        await see(pilot, "Thinking, 1,234 tokens ▸")
        client.say(TextDelta(request, "Frozen water."))
        await see(pilot, "● writing", "Frozen water.")
        await finish(pilot, client, request)
        await see(pilot, "Thought for 1,234 tokens ▸", "Frozen water.", absent="They ask")
        await click(pilot, last(pilot).query_one(".thought-line"))
        await see(pilot, "Thought for 1,234 tokens ▾", "They ask about ice.", "�[31mSo: frozen.")
        await order(pilot, "/thinking")
        await see(pilot, "tokens ▸", absent="They ask")
        await pilot.press("ctrl+up", "t")
        await see(pilot, "tokens ▾", "They ask")
        await pilot.press("t")
        await see(pilot, "tokens ▸", absent="They ask")


async def test_an_answer_without_thinking_has_no_line() -> None:
    async with chatting() as (client, pilot):
        await answer(pilot, client, "")
        assert "Thought" not in screen_text(pilot)
        await order(pilot, "/thinking")
        await see(pilot, "No answer here has thinking")
        await pilot.press("ctrl+up")
        await pilot.pause()
        assert "show_thinking" not in last(pilot).actions


@pytest.mark.parametrize("end", ["cancelled", "length", "failed"])
async def test_an_answer_that_ends_inside_its_thinking_is_kept_and_goes_on(end: str, tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, (80, 24), history=history) as pilot:
        request = await ask(pilot, client)
        client.say(ThoughtDelta(request, "They ask", 2))
        await see(pilot, "Thinking, 2 tokens ▸")
        if end == "cancelled":
            await pilot.press("escape")
            assert client.cancelled == 1
        if end == "failed":
            client.say(Failed("The device is gone", "", "", request))
            await see(pilot, "The device is gone", "Thought ▸", "stopped by an error")
        else:
            await finish(pilot, client, request, end)
            await see(pilot, "Thought for 2 tokens ▸", "stopped by you" if end == "cancelled" else "length limit")
            await see(pilot, "/more lets the model think on")
        await order(pilot, "/more")
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.thoughts == ["", "They ask"] and client.begun == ["", ""]
        client.say(ThoughtDelta(2, " about ice.", 3), TextDelta(2, "Frozen."))
        await finish(pilot, client, 2)
        tokens = 3 if end == "failed" else 5
        await see(pilot, f"Thought for {tokens} tokens ▸", "Frozen.")
        assert last(pilot).text == "Frozen." and last(pilot).thought.text == "They ask about ice."
        assert (await ask(pilot, client, "on")) == 3
        assert client.asked[2] == (
            *(PromptTurn("user", "hi"), PromptTurn("assistant", "Frozen.", "They ask about ice.")),
            PromptTurn("user", "on"),
        )
    history.close()


async def test_the_choice_is_applied_at_once_and_saved(tmp_path: Path) -> None:
    client, file = ScriptedClient(), tmp_path / "settings.toml"
    client.kind = "optional"
    async with ready(client, settings=file) as pilot:
        await pilot.press("escape")
        await answer(pilot, client)
        await order(pilot, "/thinking show")
        await see(pilot, "Thinking is shown", "They ask about ice.", "▾")
        assert read(file).settings.thinking == "show" and client.think
        await answer(pilot, client, "Again, ice.")
        await see(pilot, "Again, ice.")
        await order(pilot, "/thinking off")
        await see(pilot, "Answers come without thinking", absent="Again, ice.")
        assert read(file).settings.thinking == "off" and not client.think
        await order(pilot, "/thinking loud")
        await see(pilot, "Thinking cannot be 'loud'", "fold, show, off")
        await order(pilot, "/thinking fold")
        await see(pilot, "Thinking is folded")
        assert client.think


@pytest.mark.parametrize(
    ("kind", "told"),
    [("less", "cannot answer without thinking"), ("optional", "")],
)
async def test_a_model_that_cannot_do_without_says_so(kind: str, told: str, tmp_path: Path) -> None:
    client, file = ScriptedClient(), tmp_path / "settings.toml"
    client.kind = kind
    file.write_text('[chat]\nthinking = "off"\n')
    async with ready(client, settings=file) as pilot:
        if told:
            await see(pilot, told)
        assert not client.think
        client.say(LOADED)
        await order(pilot, "/thinking off")
        await see(pilot, told or "Answers come without thinking")


async def test_copies_and_edits_are_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr("floe_chat.app.screens.chat.copying.copy", lambda _app, text: copied.append(text))  # pyright: ignore[reportUnknownLambdaType,reportUnknownArgumentType]
    async with chatting() as (client, pilot):
        await answer(pilot, client)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: copied == ["Frozen water."])
        await pilot.press("ctrl+up", "e")
        await until(pilot, lambda: composer(pilot).text == "Frozen water.")


async def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await answer(pilot, client)
    history.close()
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await order(pilot, "/last")
        await see(pilot, "Thought for 1,234 tokens ▸", "Frozen water.")
        await order(pilot, "/thinking")
        await see(pilot, "They ask about ice.")
        await order(pilot, f"/export {tmp_path / 'chat.md'}")
        await see(pilot, "Exported")
    assert "> *Thought for 1,234 tokens*\n>\n> They ask" in (tmp_path / "chat.md").read_text()
    history.close()
