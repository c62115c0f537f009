"""The engine on several virtual cards of one machine, against the best of its placements on the first of them alone.

All are played in turn, again and again, since our own host time is measured on a machine that does other things too.
The planner divides the whole model, our host time counted; the trace's layers are divided likewise, and what is between
two numbers of layers goes to the pool, which is slower.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from ...context import CONTEXT
from ...offload.cards import Card
from ...offload.mix import Mix
from ...offload.offload import Parts
from ...planning import memory_plan
from ...planning.memory_plan import Needs
from ...planning.several.division import CardRoom, Divided
from ...planning.several.division import Part as Share
from ...planning.speed_estimate import TokenWork
from ..measure import MeasureReport, Section, Timed, summarise
from . import mixes
from .replay import Played, play
from .trace import Trace
from .width import Width

ALONE = "the fastest of these on one card"
_RAM = 1 << 40  # bytes: it is not what is compared

Way = Callable[[bool], Played | None]


def sections(cards: Sequence[Card], width: Width, trace: Trace, warm: int, report: MeasureReport) -> list[Section]:
    """With our host time, and without."""
    names = " and ".join(card.name for card in cards)
    alone = _alone(cards[0], width, trace, warm)
    ways = alone | _divided(cards, width, trace, warm)
    found: list[Section] = []
    for host in (True, False):
        report(f"{names}, {'host time counted' if host else 'no host time'}", 0, 1)
        times = {name: played for name, way in ways.items() if (played := way(host)) is not None}
        best = min((one for name, one in times.items() if name in alone), key=lambda one: one.seconds)
        rows = [_timed(ALONE, best, width.layers, None)]
        rows += [_timed(name, one, width.layers, ALONE) for name, one in times.items()]
        words = "our host time counted as plans count it" if host else "no host time counted"
        found.append(Section(f"{names}: {words}", summarise(rows)))
    return found


def _timed(name: str, played: Played, layers: int, peer: str | None) -> Timed:
    note = f"{played.moved / 1e6:,.0f} MB" + (f", host {played.host / layers * 1e3:.2f} ms" if played.host else "")
    return Timed(name, [played.seconds], [0.0], peer=peer, tokens=1, note=note)


def _in_place(card: Card) -> Card:
    return dataclasses.replace(card, pack_bytes_s=math.inf)


def _alone(card: Card, width: Width, trace: Trace, warm: int) -> dict[str, Way]:
    """The placements of one card that are compared elsewhere too (`offload.py`)."""
    own = _in_place(card)

    def pooled(host: bool) -> Played | None:
        given = own, width, trace, mixes.balanced(), Parts()
        return play(*given, ahead=False, cpu_share=mixes.cpu_reached(card), warm=warm, host=host)

    return {
        "one card, a pool for all layers": pooled,
        "one card, the planner's mix": lambda host: mixes.placed(own, width, trace, warm, host=host),
        "one card, static placement": lambda host: mixes.static(own, width, trace, warm, host=host),
    }


def _divided(cards: Sequence[Card], width: Width, trace: Trace, warm: int) -> dict[str, Way]:
    layers = trace.index.shape[1]
    whole, less = (in_proportion(division(cards, width, kept_free=kept), layers) for kept in (False, True))
    pools = [Mix(pool=mix.layers) for mix in whole]

    def way(own: Sequence[Mix]) -> Way:
        return lambda host: _played(cards, width, trace, own, warm, host=host)

    return {
        f"{len(cards)} cards, divided by the planner": way(whole),
        f"{len(cards)} cards, less what plans keep free": way(less),
        f"{len(cards)} cards, a pool for all layers": way(pools),
    }


def division(cards: Sequence[Card], width: Width, *, kept_free: bool = False) -> tuple[Share, ...]:
    """The planner's, for the whole model. kept_free: with the share of memory that is left to the desktop.

    Raises:
        UsageError: the cards have too little memory.
    """
    takes, work = width.footprint, TokenWork.of(mixes.balanced())
    budgets = [memory_plan.budget(card.vram_bytes) if kept_free else card.vram_bytes for card in cards]
    rooms = [
        CardRoom(card.name, mixes.speeds(card, host=True), budget) for card, budget in zip(cards, budgets, strict=True)
    ]
    return Divided(takes, work, Needs.of_footprint(takes, CONTEXT), tuple(rooms), _RAM).parts()


def in_proportion(parts: Sequence[Share], layers: int) -> list[Mix]:
    """The mixes of fewer layers that are like these; between two numbers, the fewer are all on the card."""
    total = sum(len(part.layers) for part in parts)
    ends = [round(layers * part.layers.stop / total) for part in parts]
    for n, end in enumerate(ends):
        ends[n] = min(max(end, n + 1), layers - (len(ends) - 1 - n))
    found: list[Mix] = []
    for part, first, last in zip(parts, [0, *ends], ends, strict=False):
        mix, count = part.best.mix, last - first
        gpu = mix.gpu * count // len(part.layers)
        cpu = round(mix.cpu * count / len(part.layers)) if mix.pool else count - gpu
        found.append(Mix(gpu, count - gpu - cpu, cpu))
    return found


def _played(
    cards: Sequence[Card], width: Width, trace: Trace, own: Sequence[Mix], warm: int, *, host: bool
) -> Played | None:
    """None where there is no room."""
    first, *others = zip(map(_in_place, cards), own, strict=True)
    parts = Parts(mix=first[1])
    given = first[0], width, trace, mixes.balanced(), parts
    try:
        return play(*given, ahead=False, cpu_share=mixes.cpu_reached(cards[0]), warm=warm, host=host, others=others)
    except ValueError:
        return None
