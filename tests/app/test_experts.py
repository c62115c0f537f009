"""The page of experts: their calls layer by layer, and how well neurons and experts were predicted."""

from __future__ import annotations

import dataclasses

from floe_chat.app.screens.experts import ExpertsScreen, HeatMap
from textual.pilot import Pilot

from .scripted import ROWS, UNCOUNTED, ScriptedClient, ask, ready, stats, until
from .wizardry import shown


def drawn(pilot: Pilot[int]) -> list[str]:
    """The lines of the map, as wide as the page lets them be."""
    heat = pilot.app.screen.query_one(HeatMap)
    return [line.plain for line in heat.render().split("\n")]


async def test_experts_are_predicted_beside_their_neurons() -> None:
    client = ScriptedClient()
    async with ready(client, size=(60, 20)) as pilot:
        request = await ask(pilot, client)
        client.say(stats(request, rows=ROWS, experts=64))
        await pilot.press("f9")
        await until(pilot, lambda: isinstance(pilot.app.screen, ExpertsScreen) and "88 %" in shown(pilot))
        heading, names, *layers, over_all, _blank, _words = drawn(pilot)
        assert heading.split()[-2:] == ["neurons", "experts"] and names.split().count("recall") == 2
        # A line each, none of them folded: the figures stand under their names.
        assert layers[0].endswith("—") and layers[0].count("—") == 4
        assert " ".join(layers[1].split()[2:]) == "30 % 74 % 50 % 90 % 86 %"
        assert " ".join(over_all.split()) == "all 38 % 81 % 57 % 92 % 88 %"
        width = pilot.app.screen.query_one(HeatMap).content_size.width
        assert {len(line) for line in (heading, names, *layers, over_all)} == {len(names)} and len(names) <= width
        assert "Recall: the share of active" in shown(pilot)


async def test_what_was_not_predicted_is_no_zero() -> None:
    client = ScriptedClient()
    async with ready(client, size=(80, 24)) as pilot:
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
