"""The panel, the layouts and the pages over the chat."""

from __future__ import annotations

import dataclasses

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.panel.panel import PanelStrip, PerformancePanel
from floe_chat.engine.events import PrefillProgress, PresetChanged

from .scripted import (
    ROWS,
    ask,
    chatting,
    composer,
    finish,
    screen_text,
    stats,
    status,
    until,
    write,
)
from .test_idle import timers
from .wizardry import lines, shown

_WORDS = ("Look here:", "pass_me_by")


async def test_panel_invents_nothing() -> None:
    async with chatting() as (client, pilot):
        shown = screen_text(pilot)
        assert "not measured yet" in shown and "no GPU" not in shown and " 0 " not in shown.split("Memory")[1]
        request = await ask(pilot, client)
        client.say(PrefillProgress(request, 5, 20), stats(request, measured=False))
        await until(pilot, lambda: "reading prompt 5/20" in status(pilot).state and "no GPU" in screen_text(pilot))
        assert "— not yet" in screen_text(pilot)
        client.say(TextDelta(request, "text"), stats(request))
        await until(pilot, lambda: "58.9 tokens/s" in screen_text(pilot) or "512" in screen_text(pilot))
        for figure in ("this answer", "512", "120 ms", "38 %", "3.20 MB", "1.31 GB", "450 kB", "23.4 MB"):
            assert figure in screen_text(pilot)
        await finish(pilot, client, request)
        await until(pilot, lambda: "42 tokens · 58.9 tokens/s · first token 120 ms · end of turn" in screen_text(pilot))


async def test_layouts_and_the_panel_key() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        panel, strip = pilot.app.query_one(PerformancePanel), pilot.app.query_one(PanelStrip)
        for width, height in ((120, 36), (100, 24), (99, 24), (60, 20)):
            await pilot.resize_terminal(width, height)
            await until(pilot, lambda w=width: (panel.display, strip.display) == (w >= 100, w < 100))
            await until(pilot, lambda h=height: composer(pilot).region.bottom < h)
            await until(pilot, lambda w=width: "Backend" in screen_text(pilot) or w < 100)
            if width >= 100:
                await pilot.press("f2")
                assert not panel.display and strip.display
            await pilot.press("f2")
            assert not panel.display and not strip.display
            client.say(stats(request), PresetChanged(f"at {width}"))
            await until(pilot, lambda w=width: status(pilot).preset == f"at {w}")
            await pilot.press("f2")
            await until(pilot, lambda: "1.31 GB" in screen_text(pilot))
            assert panel.display or strip.display


async def test_a_held_panel_shows_nothing_newer() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request))
        await until(pilot, lambda: "58.9" in screen_text(pilot) or "3.20 MB" in screen_text(pilot))
        await pilot.press("f8")
        client.say(dataclasses.replace(stats(request), bytes_per_token=9.99e6), PresetChanged("later"))
        await until(pilot, lambda: status(pilot).preset == "later" and "paused" in screen_text(pilot))
        await until(pilot, lambda: len(timers(pilot)) == 1)  # the remark's: no later painting is due
        assert "3.20 MB" in screen_text(pilot)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "paused · " in shown(pilot) and "F8 resumes them" in shown(pilot))
        await pilot.resize_terminal(120, 36)
        await pilot.press("f8")
        await until(pilot, lambda: "9.99 MB" in screen_text(pilot))


async def test_the_panel_explains_its_words() -> None:
    async with chatting(size=(120, 60)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request, rows=ROWS))
        await until(pilot, lambda: "hit rate 62 %" in screen_text(pilot))
        await pilot.press("tab")
        await until(pilot, lambda: "Tokens per second: how fast" in screen_text(pilot))
        await pilot.press("down")
        await until(pilot, lambda: "Rows are the weights of" in screen_text(pilot))
        assert "Tokens per second: how fast" not in screen_text(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: "Experts by layer" in screen_text(pilot) and "precision" in screen_text(pilot))
        for figure in ("83 %", "58 %", "30 %", "8 experts"):
            assert figure in screen_text(pilot)
        await pilot.press("escape", "escape")
        await until(pilot, lambda: composer(pilot).has_focus and "Rows are the weights" not in screen_text(pilot))


async def test_the_palette_finds_commands_by_their_words() -> None:
    async with chatting() as (client, pilot):
        await pilot.press("ctrl+p")
        await write(pilot, "export")
        await until(pilot, lambda: "/export [FILE] · Write this chat to a .md or .json file" in screen_text(pilot))
        await pilot.press("ctrl+u")
        await write(pilot, "models")
        await until(pilot, lambda: "F6 · /models · Switch, check or remove models" in screen_text(pilot))
        await pilot.press("ctrl+u")
        await write(pilot, "preset exact")
        await until(pilot, lambda: "Preset: Exact" in screen_text(pilot))
        await pilot.press("enter")
        await until(pilot, lambda: client.wanted == ["Exact"])


async def test_code_stays_where_it_is_when_its_fence_closes() -> None:
    def places() -> tuple[int, int, int] | None:
        """The column of the code, the rows from the text before it, and that text's column.

        None while blocks change: what is in the middle of that is not painted on a terminal.
        """
        found = [(y, row.index(words)) for words in _WORDS for y, row in enumerate(lines(pilot)) if words in row]
        if len(found) < len(_WORDS):
            return None
        said, code = found
        return code[1], code[0] - said[0], said[1]

    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, f"{_WORDS[0]}\n\n```python\n{_WORDS[1]}\n"))
        await until(pilot, lambda: places() is not None)
        streaming = places()
        client.say(TextDelta(request, "```\n"))
        await until(pilot, lambda: "copy" in screen_text(pilot) and places() is not None)
        assert places() == streaming
        await finish(pilot, client, request)
        turn = pilot.app.query_one(AnswerTurn)
        await pilot.app.workers.wait_for_complete([worker for worker in pilot.app.workers if worker.node is turn])
        await until(pilot, lambda: "42 tokens" in screen_text(pilot) and places() is not None)
        assert places() == streaming


async def test_prose_stays_narrow_where_code_may_be_wide() -> None:
    async with chatting(size=(200, 50)) as (client, pilot):
        chat = pilot.app.screen_stack[0]
        chat.dashboard.show_panel("hidden")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        request = await ask(pilot, client, "word " * 60)
        words, code = "word " * 60, "x = " + "1 + " * 30 + "1"
        client.say(TextDelta(request, f"# {words}\n\n{words}\n\n- {words}\n\n> {words}\n\n```python\n{code}\n```\n"))
        await finish(pilot, client, request)
        await until(pilot, lambda: "end of turn" in screen_text(pilot))
        await until(pilot, lambda: any(code in line for line in lines(pilot)))  # on one line
        prose = [line[: line.rindex("word") + 4].lstrip(" ▌▊•▍") for line in lines(pilot) if line.count("word") > 5]
        assert len(prose) > 12 and max(map(len, prose)) <= 100
