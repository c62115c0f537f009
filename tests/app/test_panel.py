"""The panel and the page of experts on a screen, when a model's rows do not all fit the device."""

from __future__ import annotations

import dataclasses

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.screens.experts import ExpertsScreen, HeatMap
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
    chatting,
    composer,
    finish,
    ready,
    screen_text,
    stats,
    until,
    write,
)
from .wizardry import shown

VIRTUAL = dataclasses.replace(ROWS, virtual=True)


def panel(pilot: Pilot[int]) -> PerformancePanel:
    return pilot.app.screen_stack[0].query_one(PerformancePanel)


def is_shown(pilot: Pilot[int], name: str) -> bool:
    widget = panel(pilot).query_one(f"#{name}")
    return widget.display and widget.size.height > 0


async def show(pilot: Pilot[int], client: ScriptedClient, rows: Rows | None, request: int, words: str) -> None:
    client.say(stats(request, rows=rows, reused_tokens=15))
    await until(pilot, lambda: words in screen_text(pilot))


async def test_rows_come_and_go_with_the_model() -> None:
    async with chatting(size=(120, 60)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "15 of 20")
        await until(pilot, lambda: "no GPU" in screen_text(pilot))
        assert not is_shown(pilot, "origins") and not is_shown(pilot, "link")
        await show(pilot, client, UNCOUNTED, request, "Link")
        assert "hit rate 62 %" not in screen_text(pilot)
        await show(pilot, client, VIRTUAL, request, "hit rate 62 %")
        for figure in ("virtual time", "· left out  2 %", "0.420 ms", "2.79 of 12.1 GB/s", "3.20 of 4.00 GB", "Why: "):
            await until(pilot, lambda figure=figure: figure in screen_text(pilot))
        assert "no GPU" not in screen_text(pilot)
        await show(pilot, client, None, request, "no GPU")
        await until(pilot, lambda: not is_shown(pilot, "origins") and not is_shown(pilot, "link"))
        await until(pilot, lambda: "virtual" not in screen_text(pilot))


async def test_all_sections_are_in_view_at_36_rows() -> None:
    async with chatting(size=(120, 36)) as (client, pilot):
        for rows in (None, ROWS, VIRTUAL, UNCOUNTED):
            request = await ask(pilot, client)
            client.say(stats(request, rows=rows, experts=16, layers=32, reused_tokens=15))
            await until(pilot, lambda rows=rows: is_shown(pilot, "link") == (rows is not None))
            await until(pilot, lambda: panel(pilot).max_scroll_y == 0 and "test" in screen_text(pilot))
            await finish(pilot, client, request)
        await pilot.resize_terminal(120, 60)
        await until(pilot, lambda: is_shown(pilot, "experts"))


async def test_an_answer_has_one_speed() -> None:
    async with chatting(size=(120, 50)) as (client, pilot):
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
    async with chatting(size=(100, 24)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, ROWS, request, "hit rate 62 %")
        assert panel(pilot).max_scroll_y > 0 and "Why: " not in screen_text(pilot)
        await pilot.press("tab", "end")
        await until(pilot, lambda: "Why: " in screen_text(pilot))
        await pilot.press("escape")
        await write(pilot, "on")
        assert composer(pilot).text == "on"


async def test_a_hidden_panel_gives_the_keys_back() -> None:
    async with ready(ScriptedClient(), size=(120, 36)) as pilot:
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
    async with chatting(size=(80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        await show(pilot, client, None, request, "58.9")
        await pilot.resize_terminal(120, 50)  # no newer figures come
        await until(pilot, lambda: screen_text(pilot).count("▀" * 16) == 4)
        await pilot.press("tab", "down", "down")
        await until(pilot, lambda: "Which experts the router called" in screen_text(pilot))


# The page of experts: their calls layer by layer, and how well neurons and experts were predicted


def drawn(pilot: Pilot[int]) -> list[str]:
    """The lines of the map, as wide as the page lets them be."""
    heat = pilot.app.screen.query_one(HeatMap)
    return [line.plain for line in heat.render().split("\n")]


async def test_experts_are_predicted_beside_their_neurons() -> None:
    async with chatting(size=(60, 20)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request, rows=ROWS, experts=64))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(pilot.app.screen, ExpertsScreen) and "88 %" in shown(pilot))
        table = drawn(pilot)
        heading, names, *layers, over_all = table[: table.index("")]
        assert heading.split()[-2:] == ["neurons", "experts"] and names.split().count("recall") == 2
        # A line each, none of them folded: the figures stand under their names.
        assert layers[0].endswith("—") and layers[0].count("—") == 4
        assert " ".join(layers[1].split()[2:]) == "30 % 74 % 50 % 90 % 86 %"
        assert " ".join(over_all.split()) == "all 38 % 81 % 57 % 92 % 88 %"
        width = pilot.app.screen.query_one(HeatMap).content_size.width
        assert {len(line) for line in (heading, names, *layers, over_all)} == {len(names)} and len(names) <= width
        assert "Recall: the share of active" in shown(pilot)
        by_layer = table[next(at for at, line in enumerate(table) if "in pool" in line) + 1 :]
        assert [line.split()[1:] for line in by_layer[:2]] == [["not", "used", "yet"], ["whole", "on", "the", "GPU"]]
        assert " ".join(by_layer[2].split()) == "3 31 % 62 % 20 % 12 % 6 % 83 %" and len(by_layer[2]) <= width


async def test_what_was_not_predicted_is_no_zero() -> None:
    async with chatting(size=(80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request, rows=UNCOUNTED))
        await pilot.press("f9")
        await until(pilot, lambda: "all" in shown(pilot))
        assert " ".join(drawn(pilot)[-3].split()) == "all 38 % — — — —"
        client.say(stats(request, rows=dataclasses.replace(ROWS, expert_recall=0.0)))
        await until(pilot, lambda: "57 % 0 % 88 %" in shown(pilot))
        client.say(stats(request, rows=None))
        await until(pilot, lambda: "so nothing is" in shown(pilot))
        assert "recall" not in shown(pilot).lower()
