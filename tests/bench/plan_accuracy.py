"""How well `floe-chat plan` estimates: beside what the engine really takes, the virtual cards, and the papers.

(a) Full-width layers of random weights on this CPU, decoded by the engine, one layer by the difference of layer counts,
and the whole model from it; next to them the plan's estimate from rates measured in the same rounds. Measure on a quiet
machine.
(b) Virtual cards: the plan's cost model beside `floe-chat bench offload`, whose engine decides row by row. The pool is
the same for both; Python counts for neither.
(c) The papers' settings by the same cost model, with each paper's widths, sparsity and policy.

Run: .venv/bin/python tests/bench/plan_accuracy.py [layers] [cards] [papers] [--models NAME ...]. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from floe_chat.engine import quality_presets
from floe_chat.engine.bench import layers, synthetic
from floe_chat.engine.bench.cards import mixes, offload, replay
from floe_chat.engine.bench.cards.trace import record
from floe_chat.engine.bench.cards.width import Width
from floe_chat.engine.machine.conditions import computing
from floe_chat.engine.machine.load import Others
from floe_chat.engine.machine.random_weights import MIXTRAL
from floe_chat.engine.machine.read_floor import READ
from floe_chat.engine.offload import cards
from floe_chat.engine.offload.offload import Parts
from floe_chat.engine.planning import machine, rates, speed_estimate
from floe_chat.engine.planning.footprint import Footprint
from floe_chat.engine.planning.measured_figures import Curve, figures
from floe_chat.engine.planning.memory_plan import KEPT_FREE, Needs, budget
from floe_chat.engine.planning.speed_estimate import Held, Speeds, TokenWork
from floe_chat.models.catalog import asset, described, find
from floe_chat.models.packing.calibration import read_tokens
from floe_chat.models.packing.pack import PackSpec

MODEL = described("mixtral-8x7b-instruct").sizes
WARM, ROUNDS = 2, 5
PRESETS = ("Balanced", "Fast")  # those that read x as the rates were measured
PROMPT = 8
MOST = 6 << 30  # bytes of a measured model
TOKENS = 96
PAPER_VRAM = (12, 14, 16, 18, 20, 22, 24)


def measured_layers(name: str, rounds: int) -> dict[str, Any]:
    """(a): of one model, milliseconds of a layer and tokens per second by preset, measured and estimated."""
    spec = _spec(name)
    subject = synthetic.make(spec, "cpu", lambda _step: None)
    prompt, few = subject.prompt(PROMPT), subject.fewest
    presets = [next(p for p in quality_presets.PRESETS if p.name == preset) for preset in PRESETS]
    found: dict[str, list[tuple[float, float, float]]] = {preset: [] for preset in PRESETS}
    own, works = list[dict[str, float]](), _works(spec)
    with computing(None, MIXTRAL.hidden, MIXTRAL.neurons) as threads:
        others = Others()
        for turn in range(WARM + rounds):
            own.append(_rates(works))
            for preset in presets:
                subject.control.preset = preset
                seen = layers.answered(preset.name, subject, prompt, prefill=False)
                less, more = (seen[layers.RoundKey(preset.name, n, "seconds")] for n in (few, spec.layers))
                active = seen[layers.RoundKey(preset.name, spec.layers, "active")]
                if turn >= WARM:
                    found[preset.name].append((less, (more - less) / (spec.layers - few), active))
        busy = others.cores()
    speeds = _speeds(own[WARM:])
    result: dict[str, Any] = {"threads": threads, "busy_cores": round(busy, 2), "rates": dict(speeds.cpu)}
    print(f"{name}, other programs kept {busy:.1f} cores busy")
    for preset in presets:
        less, took, active = (median(values) for values in zip(*found[preset.name], strict=True))
        whole = less + (spec.published_layers - few) * took
        work = TokenWork.of(preset)
        work = dataclasses.replace(work, active=min(1.0, active / work.calls))  # measured: of all chosen experts
        tokens = [_estimate(spec, work, speeds, count) for count in (few, spec.layers, spec.published_layers)]
        guess, total = (tokens[1].seconds - tokens[0].seconds) / (spec.layers - few), tokens[2].seconds
        print(
            f"  {preset.name:<8} a layer {1e3 * took:6.2f} ms measured, {1e3 * guess:6.2f} estimated, "
            f"{guess / took:.2f}; {1 / whole:6.2f} tokens/s measured, {1 / total:6.2f} planned: {whole / total:.2f}"
        )
        parts = {part: 1e3 * getattr(tokens[2], part) for part in ("dense", "up", "rows", "host")}
        result[preset.name] = {"ms": 1e3 * took, "estimated_ms": 1e3 * guess, "ratio": guess / took, "active": active}
        result[preset.name] |= {"tokens_s": 1 / whole, "planned_tokens_s": 1 / total, "planned_ms": parts}
    return result


def _spec(name: str) -> synthetic.Spec:
    """So many layers that they outweigh the head, whose noise is theirs otherwise, as far as memory goes."""
    spec, period = synthetic.Spec(name, synthetic.usual_layers(name)), synthetic.period_of(name)
    while spec.layers + period <= spec.published_layers:
        more = dataclasses.replace(spec, layers=spec.layers + period)
        if synthetic.nbytes(more) > MOST:
            break
        spec = more
    return spec


def _works(spec: synthetic.Spec) -> dict[str, rates.Work]:
    """What the rates are measured by, made once."""
    return {
        f"up {spec.up} bit": rates.up_work(MIXTRAL, spec.up),
        f"rows {spec.rows} bit": rates.row_work(MIXTRAL.row_layout(spec.rows), MIXTRAL.neurons),
        **{f"dense {bits} bit": rates.dense_work(MIXTRAL, bits) for bits in {spec.dense, 8}},
        rates.STATES: rates.state_work(),
    }


def _rates(works: Mapping[str, rates.Work]) -> dict[str, float]:
    (read,) = (part() for part in layers.floor_parts("cpu"))
    seconds, nbytes = (read[layers.RoundKey(READ, 0, what)] for what in ("seconds", "read"))
    return {READ: nbytes / seconds, **{name: rates.best_rate(work) for name, work in works.items()}}


def _speeds(found: Sequence[dict[str, float]]) -> Speeds:
    middle = {name: median(one[name] for one in found) for name in found[0]}
    return Speeds(read=middle.pop(READ), states=middle.pop(rates.STATES), cpu=middle)


def _estimate(spec: synthetic.Spec, work: TokenWork, speeds: Speeds, count: int) -> speed_estimate.Token:
    """The plan's token of a model of so many layers."""
    sizes = synthetic.MODELS[spec.name]
    if count != spec.published_layers:
        share = count / spec.published_layers
        kept = sizes.recurrent and dataclasses.replace(sizes.recurrent, layers=round(share * sizes.recurrent.layers))
        wide = sizes.wide and dataclasses.replace(sizes.wide, layers=round(share * sizes.wide.layers))
        few = {"recurrent": kept, "wide": wide, "windowed": round(share * sizes.windowed)}
        sizes = dataclasses.replace(sizes, layers=count, dense_layers=0, **few)
    takes = Footprint.of(sizes, PackSpec(spec.up, spec.rows, spec.rows, spec.dense))
    return speed_estimate.decode(takes, work, speeds, Held(gpu=False), context=2 * PROMPT)


def virtual_cards() -> dict[str, Any]:
    """(b): tokens per second by card, replayed and estimated."""
    pack = find("demo")
    ids = read_tokens(pack, asset("calibration.txt").read_text(encoding="utf-8")).flatten().tolist()[:TOKENS]
    trace = record(pack, ids, "demo")
    width, balanced = Width(MODEL), next(p for p in quality_presets.PRESETS if p.name == "Balanced")
    takes = width.footprint
    result: dict[str, Any] = {}
    for name in offload.CARDS:
        card = cards.named(name, study=True)
        played = replay.play(card, width, trace, balanced, Parts(), cpu_share=mixes.cpu_reached(card), warm=TOKENS // 3)
        rows = replay.room(card, width, trace)
        share = rows / (trace.index.shape[1] * MODEL.experts * MODEL.intermediate)
        speeds = _of_card(card)
        token = speed_estimate.decode(takes, TokenWork.of(balanced), speeds, Held(gpu=True, pool=share), context=0)
        replayed, guess = 1 / played.seconds, 1 / token.seconds
        hit = sum(c.ready + c.coming for c in played.counts) / max(1, sum(_wanted(c) for c in played.counts))
        print(f"{name:<24} {replayed:6.1f} tok/s replayed, {guess:6.1f} estimated: {guess / replayed:.2f}", end="")
        print(f"; hits {hit:.0%} and {token.hit:.0%}, MB {played.moved / 1e6:.0f} and {token.moved / 1e6:.0f}")
        result[name] = {"replayed": replayed, "estimated": guess, "ratio": guess / replayed, "pool": share}
    return result


def _wanted(counts: Any) -> int:
    return counts.ready + counts.coming + counts.copied + counts.on_cpu


def _of_card(card: cards.Card) -> Speeds:
    """A card without Python's time."""
    base = machine.Machine("", 0, 0, None, 1, Speeds(read=1.0), 0.0)
    speeds = machine.of_card(card, base).speeds
    cpu = {**speeds.cpu, "rows 4 bit": mixes.cpu_reached(card) * speeds.read, "rows 16 bit": speeds.read}
    return dataclasses.replace(speeds, cpu=cpu, host=0.0, host_gpu=0.0, host_pool=0.0, host_behind=0.0)


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a paper runs: widths, what is computed, who helps, and which rows it finds in its pool."""

    name: str
    spec: PackSpec
    work: TokenWork
    cpu: bool = False
    hits: Curve = figures().hits


_ALIKE: Curve = ((0.0, 0.0), (1.0, 1.0))
FLOE = PackSpec(2, 16, 16, 16)
FIGURE_8 = (
    Policy("Mixtral-GPU (2 bit, whole)", PackSpec(2, 2, 2, 4), TokenWork()),
    Policy("FloE, 90 %", FLOE, TokenWork(active=0.1)),
    Policy("FloE, 80 %", FLOE, TokenWork(active=0.2)),
    Policy(
        "Mixtral-Offloading (3 bit)", PackSpec(3, 3, 3, 4), TokenWork(), hits=((0.0, 0.0), (0.25, 0.45), (1.0, 1.0))
    ),
    Policy("Fiddler (16 bit)", PackSpec(16, 16, 16, 16), TokenWork(), cpu=True, hits=_ALIKE),
    Policy(
        "ours, Balanced",
        PackSpec(),
        TokenWork.of(next(p for p in quality_presets.PRESETS if p.name == "Balanced")),
        cpu=True,
    ),
)


def papers() -> dict[str, Any]:
    """(c): tokens per second by policy and memory, Python counting for nobody."""
    result: dict[str, Any] = {"figure 8": {}, "fiddler": {}}
    print(f"{'RTX 3090, GB':<28}" + "".join(f"{vram:>8}" for vram in PAPER_VRAM))
    speeds = _of_card(cards.named("rtx3090-24gb", study=True))
    for policy in FIGURE_8:
        row = [_played(policy, speeds, int(vram * 2**30 / (1 - KEPT_FREE))) for vram in PAPER_VRAM]
        print(f"{policy.name:<28}" + "".join(f"{rate:8.1f}" if rate else f"{'-':>8}" for rate in row))
        result["figure 8"][policy.name] = dict(zip(PAPER_VRAM, row, strict=True))
    for name, resident in (("quadrortx6000-24gb", 56), ("l4-24gb", 52)):
        speeds = _of_card(cards.named(name, study=True))
        fiddler, own = FIGURE_8[4], FIGURE_8[5]
        takes = Footprint.of(MODEL, fiddler.spec)
        held = Held(gpu=True, pool=resident / 256, cpu=True)
        # There, up projections are not resident: they count as part of an expert's rows.
        rate = 1 / speed_estimate.decode(_whole_experts(takes), fiddler.work, speeds, held, fiddler.hits).seconds
        ours = _played(own, speeds, cards.named(name, study=True).vram_bytes)
        print(f"{name:<28} Fiddler's policy {rate:.2f} tok/s (the paper: over 3), ours {ours or 0:.1f}")
        result["fiddler"][name] = {"policy": rate, "ours": ours}
    return result


def _played(policy: Policy, speeds: Speeds, vram: int) -> float | None:
    """None where not even its fixed part fits."""
    takes = Footprint.of(MODEL, policy.spec)
    if policy.work.active == 1.0:  # whole experts: nothing of them is always there
        takes = _whole_experts(takes)
    needs, usable = Needs.of_footprint(takes, 512), budget(vram)
    whole = needs.fits(needs.every("gpu"), usable)
    if not whole and ("whole" in policy.name or not needs.fits(needs.every("pool"), usable)):
        return None
    share = needs.share_out(needs.every("gpu" if whole else "pool"), usable, 512).rows / takes.row_count
    held = Held(gpu=True, pool=share, cpu=policy.cpu)
    return 1 / speed_estimate.decode(takes, policy.work, speeds, held, policy.hits).seconds


def _whole_experts(takes: Footprint) -> Footprint:
    """Each neuron's up row belongs to its record."""
    return dataclasses.replace(takes, up=0, row=takes.row + takes.up // takes.sizes.intermediate)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables, then the JSON line."""
    parts = {"cards": virtual_cards, "papers": papers}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["layers", *parts, []], default=[])
    parser.add_argument("--models", nargs="+", choices=synthetic.MODELS, default=list(synthetic.MODELS), metavar="NAME")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args(arguments)
    found: dict[str, Any] = {}
    with torch.inference_mode():
        for part in given.parts or ["layers", *parts]:
            if part == "layers":
                found[part] = {name: measured_layers(name, given.rounds) for name in given.models}
            else:
                found[part] = parts[part]()
    print(json.dumps({"bench": "plan_accuracy", **found}))


if __name__ == "__main__":
    main()
