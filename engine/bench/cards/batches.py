"""Texts that go through the engine together on a virtual card, against one: importance-driven scheduling, section 5.

Algorithm 2 divides a step's absent rows between link and CPU; with more tokens there are more of them, of which several
texts may need the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ...answers import MOST
from ...offload.cards import Card
from ...offload.offload import Parts
from ..measure import MeasureReport, Section, Timed, summarise
from . import mixes
from .replay import Played, Stage, run
from .trace import Trace
from .width import Width

NOTE = (
    "Texts together: tok/s counts those of all texts. apart is the share of a step's time for which link or CPU goes "
    "on after the other, where both have work; both read RAM, which is what ends last where copied rows are packed."
)


def sections(card: Card, width: Width, trace: Trace, warm: int, report: MeasureReport) -> list[Section]:
    """With the planner's placement of layers, and with a pool for all of them, also if RAM had no limit."""

    def pooled(together: int, *, limited: bool = True) -> Played:
        given = card, width, trace, mixes.balanced(), Parts()
        stage = Stage(*given, ahead=False, cpu_share=mixes.cpu_reached(card), host=True)
        if not limited:
            stage.device.rates.ram_bytes_s = math.inf
        return run(stage, warm, together)

    def placed(together: int) -> Played | None:
        return mixes.placed(card, width, trace, warm, host=True, together=together)

    ways: dict[str, Callable[[int], Played | None]] = {
        "the planner's mix": placed,
        "a pool for all layers": pooled,
        "a pool, were RAM no limit": lambda together: pooled(together, limited=False),
    }
    rows: list[Timed] = []
    for name, way in ways.items():
        for count in range(1, MOST + 1):
            report(f"{card.name}: {count} texts together, {name}", count, MOST)
            try:
                played = way(count)
            except ValueError:
                played = None
            if played is not None:
                rows.append(_timed(name, count, played))
    return [Section(f"{card.name}: texts together, Balanced, our host time counted", summarise(rows))]


def _timed(name: str, count: int, played: Played) -> Timed:
    note = f"{played.moved / 1e6:,.0f} MB" + ("" if played.apart is None else f", {played.apart:.0%} apart")
    peer = None if count == 1 else _title(name, 1)
    return Timed(_title(name, count), [played.seconds], [0.0], peer=peer, tokens=1, note=note)


def _title(name: str, count: int) -> str:
    return f"{count} text{'s' if count > 1 else ''}, {name}"
