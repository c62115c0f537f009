"""The engine with its layers placed one by one, as the planner places them for a whole model, and the static placement
that it is compared with. A trace has few layers, so the model's mix is played in proportion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from ...context import CONTEXT
from ...offload.cards import Card
from ...offload.mix import Mix
from ...offload.offload import Parts
from ...planning import machine, mix_choice, speed_estimate
from ...planning.memory_plan import Needs
from ...planning.mix_choice import Costs, Placed
from ...planning.speed_estimate import Speeds, TokenWork
from ...quality_presets import PRESETS, Preset
from .replay import Played, Stage, layers_held, play, run
from .trace import Trace
from .width import Width

_RAM = 1 << 40  # bytes: it is not what is compared


def balanced() -> Preset:
    """The preset of all comparisons."""
    return next(preset for preset in PRESETS if preset.name == "Balanced")


def speeds(card: Card, *, host: bool) -> Speeds:
    """A card's, as the planner has them; host: with the time that our own code takes."""
    found = machine.speeds_of(card, disk=1e9)
    free = {} if host else dict.fromkeys(("host_gpu", "host_pool", "host_behind", "host_ram"), 0.0)
    return dataclasses.replace(found, **free)


def cpu_reached(card: Card) -> float:
    """Of a linear read's rate, what our kernels reach on 4-bit rows by the card's CPU, as the planner has it."""
    found = speeds(card, host=False)
    return found.of_cpu("rows", 4) / found.read


def planned(card: Card, width: Width, *, host: bool) -> Placed | None:
    """The planner's choice for the whole model; None if nothing fits."""
    takes, work = width.footprint, TokenWork.of(balanced())
    needs = Needs.of_footprint(takes, CONTEXT)
    found = mix_choice.choose(Costs(takes, work, speeds(card, host=host)), needs, card.vram_bytes, _RAM)
    return None if found is None else found[0]


def estimated(card: Card, width: Width, *, host: bool) -> float | None:
    """Seconds of a token by the planner's choice, as `floe-chat plan` counts them, at the beginning of a text."""
    if (chosen := planned(card, width, host=host)) is None:
        return None
    work, own = TokenWork.of(balanced()), speeds(card, host=host)
    return speed_estimate.decode(width.footprint, work, own, chosen.held, context=0).seconds


def placed(
    card: Card,
    width: Width,
    trace: Trace,
    warm: int,
    *,
    host: bool,
    together: int = 1,
    ahead: bool = False,
    also: Sequence[Trace] = (),
) -> Played | None:
    """The planner's mix for the whole model, in the trace's proportion. together: see `play`. ahead: looking ahead
    where that pays, by the trace's predictor or those of `also`.
    """
    chosen = planned(card, width, host=host)
    if chosen is None:
        return None

    def one(mix: Mix) -> list[Played]:
        given, share = (card, width, trace, balanced(), Parts(mix=mix)), cpu_reached(card)
        pool = round(chosen.share * mix.pool * width.sizes.experts * width.neurons)
        stage = Stage(*given, ahead=ahead, where_it_pays=ahead, also=also, cpu_share=share, pool=pool, host=host)
        return [run(stage, warm, together)]

    return between(in_proportion(chosen.mix, trace.index.shape[1]), one)[0]


def static(card: Card, width: Width, trace: Trace, warm: int, *, host: bool) -> Played:
    """The dense part and all experts of as many layers as fit on the card, the other layers' experts by the CPU, as
    llama.cpp's --n-cpu-moe places them, with this engine's widths and kernels.
    """

    def one(mix: Mix) -> list[Played]:
        parts = Parts(predictor="none", mix=mix)
        return [
            play(card, width, trace, balanced(), parts, ahead=False, cpu_share=cpu_reached(card), warm=warm, host=host)
        ]

    held, layers = layers_held(card, width, trace), trace.index.shape[1]
    return between([(Mix(gpu, 0, layers - gpu), part) for gpu, part in _around(held)], one)[0]


def in_proportion(mix: Mix, layers: int) -> list[tuple[Mix, float]]:
    """The mixes of fewer layers that together are like this one, and the share of each."""
    share = layers / mix.layers
    found: list[tuple[Mix, float]] = []
    for gpu, part in _around(mix.gpu * share):
        cpu = max(0, min(round(mix.cpu * share), layers - gpu - 1)) if mix.pool else layers - gpu
        found.append((Mix(gpu, layers - gpu - cpu, cpu), part))
    return found


def between(mixes: Sequence[tuple[Mix, float]], played: Callable[[Mix], Sequence[Played]]) -> list[Played]:
    """What mixes cost together, each by its share."""
    found: list[tuple[Sequence[Played], float]] = []
    for mix, part in mixes:
        try:
            found.append((played(mix), part))
        except ValueError:
            if not found:
                raise
            return list(found[0][0])  # with one more layer there is no room for a pool
    return [_sum(found, at) for at in range(len(found[0][0]))]


def _sum(parts: Sequence[tuple[Sequence[Played], float]], at: int) -> Played:
    names = ("seconds", "moved", "waited", "busy", "host", "unused")
    total = {name: sum(share * getattr(played[at], name) for played, share in parts) for name in names}
    return dataclasses.replace(parts[0][0][at], **total)


def _around(held: float) -> Iterator[tuple[int, float]]:
    """Both whole numbers next to one, with the share of each."""
    part = held - int(held)
    yield int(held), 1 - part
    if part:
        yield int(held) + 1, part
