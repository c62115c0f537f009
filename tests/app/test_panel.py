"""The panel on a screen, when a model's rows do not all fit the device."""

from __future__ import annotations

import dataclasses

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.panel.panel import PerformancePanel
from floe_chat.engine.events import Rows
from textual.pilot import Pilot
from textual.widgets import Digits

from .scripted import (
    ROWS,
    UNCOUNTED,
    ScriptedClient,
    ask,
    composer,
    finish,
    ready,
    screen_text,
    stats,
    until,
    write,
)

VIRTUAL = dataclasses.replace(ROWS, virtual=True)


def panel(pilot: Pilot[int]) -> PerformancePanel:
    return pilot.app.screen_stack[0].query_one(PerformancePanel)


def shown(pilot: Pilot[int], name: str) -> bool:
    widget = panel(pilot).query_one(f"#{name}")
    return widget.display and widget.size.height > 0


async def show(pilot: Pilot[int], client: ScriptedClient, rows: Rows | None, request: int, words: str) -> None:
    client.say(stats(request, rows=rows, reused_tokens=15))
    await until(pilot, lambda: words in screen_text(pilot))


async def test_rows_come_and_go_with_the_model() -> None:
    client = ScriptedClient()
    async with ready(client, size=(120, 60)) as pilot:
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "15 of 20")
        await until(pilot, lambda: "no GPU" in screen_text(pilot))
        assert not shown(pilot, "origins") and not shown(pilot, "link")
        await show(pilot, client, UNCOUNTED, request, "Link")
        assert "hit rate 62 %" not in screen_text(pilot)
        await show(pilot, client, VIRTUAL, request, "hit rate 62 %")
        for figure in ("virtual time", "· left out  2 %", "0.420 ms", "2.79 of 12.1 GB/s", "3.20 of 4.00 GB", "Why: "):
            await until(pilot, lambda figure=figure: figure in screen_text(pilot))
        assert "no GPU" not in screen_text(pilot)
        await show(pilot, client, None, request, "no GPU")
        await until(pilot, lambda: not shown(pilot, "origins") and not shown(pilot, "link"))
        await until(pilot, lambda: "virtual" not in screen_text(pilot))


async def test_all_sections_are_in_view_at_36_rows() -> None:
    client = ScriptedClient()
    async with ready(client, size=(120, 36)) as pilot:
        for rows in (None, ROWS, VIRTUAL, UNCOUNTED):
            request = await ask(pilot, client)
            client.say(stats(request, rows=rows, experts=16, layers=32, reused_tokens=15))
            await until(pilot, lambda rows=rows: shown(pilot, "link") == (rows is not None))
            await until(pilot, lambda: panel(pilot).max_scroll_y == 0 and "test" in screen_text(pilot))
            await finish(pilot, client, request)
        await pilot.resize_terminal(120, 60)
        await until(pilot, lambda: shown(pilot, "experts"))


async def test_the_context_is_the_same_everywhere() -> None:
    client = ScriptedClient()
    async with ready(client, size=(120, 50)) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"))
        await finish(pilot, client, request)
        await until(pilot, lambda: "context 62/1000 (6 %)" in screen_text(pilot))
        assert "   6 %" in screen_text(pilot)
        await pilot.press("ctrl+n")
        await until(pilot, lambda: "context 0/1000 (0 %)" in screen_text(pilot))
        await until(pilot, lambda: "   0 %" in screen_text(pilot) and "   6 %" not in screen_text(pilot))


async def test_an_answer_has_one_speed() -> None:
    client = ScriptedClient()
    async with ready(client, size=(120, 50)) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), dataclasses.replace(stats(request), decode_tps=99.7))
        await finish(pilot, client, request)
        await until(pilot, lambda: "58.9 tokens/s" in screen_text(pilot))
        assert str(panel(pilot).query_one(Digits).value) == "58.9" and "99.7" not in screen_text(pilot)
        await pilot.press("f4")
        await until(pilot, lambda: "Now  58.9 tokens/s" in screen_text(pilot))
        await pilot.press("escape")
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: screen_text(pilot).count("58.9 tokens/s") == 2)


async def test_keys_reach_the_end_of_the_column() -> None:
    client = ScriptedClient()
    async with ready(client, size=(100, 24)) as pilot:
        request = await ask(pilot, client)
        await show(pilot, client, ROWS, request, "hit rate 62 %")
        assert panel(pilot).max_scroll_y > 0 and "Why: " not in screen_text(pilot)
        await pilot.press("tab", "end")
        await until(pilot, lambda: "Why: " in screen_text(pilot))
        await pilot.press("escape")
        await write(pilot, "on")
        assert composer(pilot).text == "on"


async def test_a_hidden_panel_gives_the_keys_back() -> None:
    client = ScriptedClient()
    async with ready(client, size=(120, 36)) as pilot:
        await pilot.press("tab")
        assert pilot.app.focused is panel(pilot)
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(pilot.app.focused, Composer))
        await pilot.press("f2", "f2", "tab")
        assert pilot.app.focused is panel(pilot)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: isinstance(pilot.app.focused, Composer))
        await pilot.click(Composer)
        await pilot.resize_terminal(120, 36)
        await until(pilot, lambda: panel(pilot).display)
        await pilot.click(PerformancePanel)
        assert isinstance(pilot.app.focused, Composer)


async def test_the_map_of_experts_follows_the_terminal() -> None:
    client = ScriptedClient()
    async with ready(client, size=(80, 24)) as pilot:
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "58.9")
        await pilot.resize_terminal(120, 50)  # no newer figures come
        await until(pilot, lambda: screen_text(pilot).count("▀" * 16) == 4)
        await pilot.press("tab", "down", "down")
        await until(pilot, lambda: "Which experts the router called" in screen_text(pilot))
