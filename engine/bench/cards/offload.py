"""Compares the engine with others, for a model larger than the card's memory, on virtual cards.

A trace of a real small model drives all of them at a published model's width (trace.py, width.py); the engine's own
code decides for the engine (replay.py), the others' published policies for them (baselines.py). Each part of the engine
is added in turn.

Each card has two sections. In the first one our own code takes the host time that plans count, and of the others
mixtral-offloading and Fiddler what their published speeds leave. In the second one no host time is counted for any
engine: it shows what the schedule alone is worth. First tokens of prompts follow (prompts.py), and texts that are
computed together (batches.py). Several cards of one machine are compared with the first of them (several.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ....kernels.rule import LATE, Rule
from ....models.errors import UsageError
from ....models.pack.manifest import Manifest
from ....models.packing.calibration import read_tokens
from ...offload.cards import Card, named
from ...offload.offload import Parts
from ...planning.device_choice import need_compiled
from ...quality_presets import PRESETS, Preset, get
from ..measure import MeasureReport, ResultTable, Section, Timed, summarise
from ..synthetic import sizes_of
from . import baselines, batches, mixes, prompts, several
from .replay import Played, play
from .trace import Trace, record
from .width import Width

CARDS = ("sim:rtx3090-24gb@12gb", "sim:rtx3060-12gb", "sim:rtx4060-8gb")
OTHERS = "FloE, 90 %"  # the baseline of all comparisons
PLACED = "Balanced, as the program runs it", "Balanced, static placement"
COUNTED, FREE = "our host time counted as plans count it", "no host time counted, for any engine"
_FLOE = Parts(eviction="lru", cpu=False)


def run(
    pack: Path,
    name: str,
    text: str,
    cards: Sequence[str],
    *,
    tokens: int,
    skew: float | None,
    synthetic: str,
    presets: Sequence[str] = (),
    report: MeasureReport,
) -> ResultTable:
    """Play the trace of a pack on cards.

    Args:
        name: the pack's. text: what it reads. cards: names; several with commas between them share one machine.
        tokens: of the text, of which the first third warms up.
        skew: routing drawn with that skew instead of the trace's own; None for its own.
        synthetic: at which model's width. presets: more to play, by name.

    Raises:
        UsageError: no such card or model, too little text, a pack of more experts than the model has, or no compiled
            library.
    """
    machines = [[named(one, study=True) for one in card.split(",")] for card in cards]
    width = Width(sizes_of(synthetic))
    more = named_presets(presets, Manifest.read(pack), width)
    for card in cards:
        need_compiled(card)
    report("Recording", 0, 1)
    ids = read_tokens(pack, text).flatten().tolist()[:tokens]
    if len(ids) < tokens:
        raise UsageError(f"The text has {len(ids)} tokens", f"{tokens} are needed.", "Give fewer with --tokens.")
    traces = {guesses: record(pack, ids, name, guesses) for guesses in ("auto", "partial")}
    traces = {guesses: trace.widened(width.sizes.experts, width.sizes.top_k) for guesses, trace in traces.items()}
    if skew is not None:
        traces = {guesses: trace.skewed(skew) for guesses, trace in traces.items()}
    trace = traces["auto"]
    traces["known"] = trace.known()
    sections = list[Section]()
    for card, *others in machines:
        if others:
            sections += several.sections([card, *others], width, trace, tokens // 3, report)
            continue
        sections += _sections(card, width, traces, tokens // 3, more, report)
        sections += prompts.sections(card, width, trace, tokens // 3, report)
        sections += batches.sections(card, width, trace, tokens // 3, report)
    facts: dict[str, str | int] = {
        "model": f"the width of {synthetic}, {trace.index.shape[1]} of {width.layers} layers, memory scaled to them",
        "routing": trace.source,
        "time": "virtual, by the cards' profiles; none of the cards is here",
        "prompt": tokens,
    }
    return ResultTable("offload", "virtual cards", facts, tuple(sections), _NOTES)


_NOTES = (
    "tok/s counts all layers and the head. MB is what crosses the link for one token; hidden is the share of the "
    "link's time for which the GPU does not wait and in which it moves what is needed. host is the time of our own "
    "code for one layer, by graphs and compiled steps as plans count it (assets/figures.json); a prompt's is measured "
    "here.",
    "The pools start with what the first third of the text used, as at the program's next start. Of other engines, "
    "mixtral-offloading and Fiddler have what their published speeds leave for their own code: 3 tokens/s on an RTX "
    "3060 and on a Quadro RTX 6000. Nothing is known of the others', FloE's included, and none is counted.",
    "llama.cpp's expert cache is --moe-cache-mib by its source (src/llama-moe-cache.cpp, October 2026): whole experts "
    "of all layers share what the card has left, those used last stay, absent ones are copied before they are used.",
    "Others are played by their published policies: whole experts in 16 bit, or in 3 bit for mixtral-offloading; FloE "
    "with 2-bit up and 16-bit rows. The CPU computes quantized rows at the share of its memory's rate that plans count "
    "with, and 16-bit experts (Fiddler) at all of it.",
    "As the program runs it: the planner's mix for the whole model, in the proportion of the trace's layers, rows read "
    "in place, looking ahead in the layers where the first tokens show that it pays. Static "
    "placement: all experts of as many layers as fit on the card, those of the others by the CPU, as with "
    "llama.cpp's --n-cpu-moe, at this engine's widths and with its kernels.",
    "The CPU's rows and copies share the memory: rows are divided so that both together need no more than it gives. "
    "Rows read in place are not packed.",
    prompts.NOTE,
    batches.NOTE,
)


def named_presets(names: Sequence[str], manifest: Manifest, width: Width) -> list[Preset]:
    """Presets and published rules for a model of that width.

    Raises:
        UsageError: one that does not exist, or that a replay cannot follow.
    """
    a = replace(manifest.architecture, experts=width.sizes.experts, top_k=width.sizes.top_k)
    found = [get(name, replace(manifest, architecture=a)) for name in names]
    for preset in found:
        if preset.rule.theta or preset.rule.alpha:
            cause = "It compares values that a trace does not have: the signal itself, or all experts' scores."
            raise UsageError(f"{preset.name} cannot be replayed", cause, "Use floe-chat eval or ask with it.")
    return found


def _sections(
    card: Card,
    width: Width,
    traces: Mapping[str, Trace],
    warm: int,
    presets: Sequence[Preset],
    report: MeasureReport,
) -> list[Section]:
    """With our host time, and without. traces: by what guesses. presets: more to play."""
    trace = traces["auto"]
    found: dict[bool, list[Timed]] = {True: [], False: []}
    missing: list[str] = []

    def add(name: str, what: Callable[[bool], Played | None], *, ours: bool = False) -> None:
        report(f"{card.name}: {name}", 0, 1)
        free = what(False)
        if free is None:
            missing.append(name)
            return
        for counted, played in ((True, what(True) if ours else free), (False, free)):
            if played is not None:
                found[counted].append(_timed(name, played, width.layers))

    add("whole experts, 16 bit, on demand", lambda _host: baselines.naive(card, width, trace, warm))
    add("mixtral-offloading", lambda host: baselines.mixtral_offloading(card, width, trace, warm, host=host), ours=True)
    add("Fiddler", lambda host: baselines.fiddler(card, width, trace, warm, host=host), ours=True)
    add("llama.cpp's expert cache, 4 bit", lambda _host: baselines.llama_cache(card, width, trace, warm))
    add("all of it on the GPU, 2 bit", lambda _host: baselines.gpu_int2(card, width, trace, warm))
    for step in (*steps(width), *((f"{one.name}, by this engine", width, one, Parts(), "", True) for one in presets)):
        ours = step[1].spec.gate < 16
        add(step[0], lambda host: _played(card, step, traces, warm, host=host), ours=ours)  # noqa: B023
    in_place = replace(card, pack_bytes_s=math.inf)
    also = [traces["partial"]]
    add(PLACED[0], lambda host: mixes.placed(in_place, width, trace, warm, host=host, ahead=True, also=also), ours=True)
    add(PLACED[1], lambda host: mixes.static(card, width, trace, warm, host=host), ours=True)
    title = f"{card.name}: {card.vram_bytes / 2**30:.3g} GB"
    title += f"; does not fit: {', '.join(missing)}" if missing else ""
    return [
        Section(f"{title}; {words}", summarise(found[counted])) for counted, words in ((True, COUNTED), (False, FREE))
    ]


def _timed(name: str, played: Played, layers: int) -> Timed:
    note = f"{played.moved / 1e6:,.0f} MB"
    note += "" if played.hidden is None else f", {played.hidden:.0%} hidden"
    note += f", host {played.host / layers * 1e3:.2f} ms" if played.host else ""
    return Timed(name, [played.seconds], [0.0], peer=None if name == OTHERS else OTHERS, tokens=1, note=note)


def _played(card: Card, step: Variant, traces: Mapping[str, Trace], warm: int, *, host: bool) -> Played | None:
    _, width, preset, parts, guesses, in_place = step
    own = replace(card, pack_bytes_s=math.inf) if in_place else card
    share = mixes.cpu_reached(card) if parts.cpu else 1.0
    try:
        given = (own, width, traces[guesses or "auto"], preset, parts)
        return play(*given, ahead=bool(guesses), cpu_share=share, warm=warm, host=host)
    except ValueError:
        return None  # it does not fit even without rows


Variant = tuple[str, Width, Preset, Parts, str, bool]


def steps(own: Width) -> list[Variant]:
    """FloE as in the paper, then this engine with one more part each time: name, widths, what is skipped, parts,
    by what it guesses what to prefetch, if it does, whether rows are read in place.
    """
    floe = own.at(2, 16, 16)
    sparse = Preset("60 %", Rule(0.6))
    weighed = Preset("weighed", Rule(0.6, 0.8, drop=0.4, major=0.4, weighed=True))
    presets = {preset.name: preset for preset in PRESETS}
    balanced, fast = presets["Balanced"], presets["Fast"]
    return [
        ("FloE, 80 %", floe, Preset("80 %", Rule(0.8)), _FLOE, "auto", False),
        (OTHERS, floe, Preset("90 %", Rule(0.9)), _FLOE, "auto", False),
        ("3-bit up, 4-bit rows, 60 %", own, sparse, _FLOE, "", False),
        ("likewise, prefetching", own, sparse, _FLOE, "auto", False),
        ("+ eviction by score", own, sparse, Parts(cpu=False), "", False),
        ("+ the CPU's share", own, sparse, Parts(), "", False),
        ("+ Balanced instead of 60 %", own, balanced, Parts(), "", False),
        ("+ rows read in place", own, balanced, Parts(), "", True),
        ("Balanced likewise, looking ahead", own, balanced, Parts(), "auto", True),
        ("likewise, ahead through attention", own, balanced, Parts(), "partial", True),
        ("likewise, if guesses were right", own, balanced, Parts(), "known", True),
        ("Balanced likewise, 3-bit rows", own.at(3, 3, 4), balanced, Parts(), "", True),
        ("Fast likewise", own, fast, Parts(), "", True),
        ("60 % and 80 %, weighed, likewise", own, weighed, Parts(), "", True),
        (
            "Balanced, weak rows left out",
            own,
            Preset(balanced.name, replace(balanced.rule, late=LATE), balanced.x_bits),
            Parts(),
            "",
            True,
        ),
    ]
