"""Time to first token on virtual cards: the engine beside loading layer by layer without overlap, and beside Fiddler's
placement, at the engine's own widths and by size of memory.

A prompt's routing is the trace's, repeated. Others are granted copies at the link's full rate, and none of our host
time. What the engine has on the card is what its planner puts there, after the trace's tokens were decoded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ...offload.cards import DENSE_LAUNCHES, Card
from ...offload.mix import Mix
from ...offload.offload import Parts
from ..measure import MeasureReport, Section, Timed, summarise
from . import mixes
from .baselines import EXPERT_LAUNCHES, Baseline
from .replay import Played, Stage, played_since
from .trace import Trace
from .width import Width

LENGTHS = (128, 512, 2048)
SIZES = (6, 8, 10, 12, 16, 20, 24)  # GiB of the card's memory
LAYERWISE = "layer by layer"  # the baseline of all comparisons
NOTE = (
    "First tokens: seconds until the first token of a prompt, all layers. Layer by layer: experts of as many layers "
    "as fit are on the card, those of the others are copied before each layer, without overlap. Fiddler's placement: "
    "the most used experts are there, each of the others is computed by the CPU or copied, whichever is faster for its "
    "tokens, and copies overlap. Both at this engine's widths. hidden is the share of the link's time for which the "
    "GPU does not wait; estimates of virtual cards, none of which is here."
)


def sections(card: Card, width: Width, trace: Trace, warm: int, report: MeasureReport) -> list[Section]:
    """By size of the card's memory, with our host time."""
    sizes = [size for size in SIZES if size * 2**30 <= card.vram_bytes]
    return [_section(dataclasses.replace(card, vram_bytes=size * 2**30), width, trace, warm, report) for size in sizes]


def _section(card: Card, width: Width, trace: Trace, warm: int, report: MeasureReport) -> Section:
    size = f"{card.vram_bytes / 2**30:.3g} GB"
    report(f"{card.name}, {size}: first tokens", 0, 1)
    in_place = dataclasses.replace(card, pack_bytes_s=math.inf)
    ways: dict[str, Sequence[Played]] = {
        LAYERWISE: layerwise(card, width, trace),
        "Fiddler's placement": fiddler(card, width, trace),
    }
    for name, own in (("Balanced", card), ("Balanced, rows read in place", in_place)):
        if (played := first_tokens(own, width, trace, warm, host=True)) is not None:
            ways[name] = played
    rows = [
        _timed(
            f"{length:,} tokens, {name}",
            played[at],
            None if name == LAYERWISE else f"{length:,} tokens, {LAYERWISE}",
            width.layers,
        )
        for at, length in enumerate(LENGTHS)
        for name, played in ways.items()
    ]
    return Section(f"{card.name}, {size}: first tokens, our host time counted", summarise(rows))


def _timed(name: str, played: Played, peer: str | None, layers: int) -> Timed:
    note = f"{played.moved / 1e9:.1f} GB"
    note += "" if played.hidden is None else f", {played.hidden:.0%} hidden"
    note += f", host {played.host / layers * 1e3:.1f} ms a layer" if played.host else ""
    return Timed(name, [played.seconds], [0.0], peer=peer, note=note)


def first_tokens(card: Card, width: Width, trace: Trace, warm: int, *, host: bool) -> list[Played] | None:
    """The planner's mix, prompt by prompt; None if nothing fits."""
    chosen = mixes.planned(card, width, host=host)
    if chosen is None:
        return None
    return mixes.between(
        mixes.in_proportion(chosen.mix, trace.index.shape[1]),
        lambda mix: played(card, width, trace, mix, warm, host=host),
    )


def played(
    card: Card,
    width: Width,
    trace: Trace,
    mix: Mix,
    warm: int,
    *,
    host: bool,
    lengths: Sequence[int] = LENGTHS,
) -> list[Played]:
    """Prompts on one mix, each after the trace's first `warm` tokens.

    Raises:
        ValueError: the card has no room for a pool.
    """
    given = (card, width, trace, mixes.balanced(), Parts(mix=mix))
    stage = Stage(*given, ahead=False, cpu_share=mixes.cpu_reached(card), host=host)
    for token in range(warm):
        stage.step([token])
    found: list[Played] = []
    for length in lengths:
        before = stage.spent()
        stage.step(_repeated(trace, length))
        found.append(played_since(stage, before, 1))
    return found


def _repeated(trace: Trace, length: int) -> list[int]:
    return [token % len(trace.index) for token in range(length)]


def layerwise(card: Card, width: Width, trace: Trace, lengths: Sequence[int] = LENGTHS) -> list[Played]:
    """All experts of as many layers as fit on the card; those of each other layer are copied before it is computed."""
    engine = Baseline(card, width, trace)
    there = engine.room // engine.experts

    def layer(index: int, counts: dict[int, int]) -> None:
        copies = [engine.copy() for _ in counts] if index >= there else []
        _on_gpu(engine, counts.values(), copies[-1] if copies else 0.0)
        engine.clock.sync("gpu")

    return [_prompt(engine, length, layer) for length in lengths]


def fiddler(card: Card, width: Width, trace: Trace, lengths: Sequence[int] = LENGTHS) -> list[Played]:
    """The most used experts are on the card; each of the others is where its tokens take less time (section 3.2)."""
    engine = Baseline(card, width, trace)
    resident = engine.popular()
    copy_s = card.link_latency_s + engine.nbytes / card.link_bytes_s

    def layer(index: int, counts: dict[int, int]) -> None:
        by_cpu: list[float] = []
        for expert, tokens in counts.items():
            cpu_s = card.cpu_s(engine.nbytes, engine.flops * tokens)
            if resident[index, expert]:
                _on_gpu(engine, [tokens], 0.0)
            elif cpu_s <= copy_s + card.gpu_s(engine.nbytes, engine.flops * tokens, EXPERT_LAUNCHES):
                by_cpu.append(engine.clock.run("cpu", cpu_s))
            else:
                _on_gpu(engine, [tokens], engine.copy())
        for end in by_cpu:
            engine.clock.wait("gpu", end)

    return [_prompt(engine, length, layer) for length in lengths]


def _on_gpu(engine: Baseline, counts: Iterable[int], after: float) -> None:
    engine.waited += engine.clock.wait("gpu", after)
    for tokens in counts:
        engine.clock.run("gpu", engine.card.gpu_s(engine.nbytes, engine.flops * tokens, EXPERT_LAUNCHES))


def _prompt(engine: Baseline, length: int, layer: Callable[[int, dict[int, int]], None]) -> Played:
    """A prompt through all layers of the trace, by a policy: layer(index, tokens by expert)."""
    trace, width, card = engine.trace, engine.width, engine.card
    tokens = _repeated(trace, length)
    before = engine.spent()
    for index in range(engine.layers):
        flops = 2.0 * width.dense_weights * length + 2.0 * width.hidden * length**2
        engine.clock.run("gpu", card.gpu_s(width.dense_bytes, flops, DENSE_LAUNCHES))
        engine.clock.sync("gpu")
        counts = np.bincount(trace.index[tokens, index].reshape(-1), minlength=engine.experts)
        layer(index, {expert: int(count) for expert, count in enumerate(counts.tolist()) if count})
    share = engine.layers / width.layers
    engine.clock.run("gpu", share * card.gpu_s(width.head_bytes, 0.0, 2))
    engine.clock.sync("gpu")
    return Played(*((now - earlier) / share for now, earlier in zip(engine.spent(), before, strict=True)))
