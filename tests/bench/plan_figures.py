"""The figures that `floe-chat plan` counts with where this machine was not measured: assets/figures.json, from the
benchmarks that measure them.

Dropped experts are read from the demo pack's frontier.json, which `floe-chat tune` wrote. The rest
is measured by the named parts: "widths" packs the demo by up and tunes that, and packs it twice more, all on the manual
that it was trained on, since on a text that it does not know this small model loses far more than large ones do on
theirs; "hits" runs the bench of eviction, "lenient" `floe-chat eval`, "host" `step_overhead.py`, "kernels"
`kernel_shares.py` by both instruction sets. "widths" and "lenient" need the demo's 16-bit source, which `make demo`
makes. Parts that are not named keep their figures. Others (packing, prompts, dense parts) are written into the file by
hand, with their command.

Run: .venv/bin/python tests/bench/plan_figures.py [widths hits lenient host kernels] [--machine B]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from floe_chat.assets.demo.make import source
from floe_chat.engine.quality.frontier import WIDTHS
from floe_chat.models.catalog import asset

_DROPS = (0.2, 0.4, 0.6)
_HALVES = ((0.4, 0.8), (0.6, 1.0))  # of drop and major: the second is known by what both together leave out
Points = Sequence[Mapping[str, Any]]
_ISAS, _PASSES, _TRIES = ("avx2", "avx512"), 3, 20
_SPREAD = 0.1  # the middle half of a kernel's rounds; a pass whose kernels have more in the median does not count
_KINDS = {"up": (2, 3, 4, 8), "rows": (2, 3, 4, 8), "dense": (4, 8), "prompt": (4,)}
_TEXT_TOKENS = 2048  # read; half of them are predicted, as tune's


def point(points: Points, **setting: float) -> Mapping[str, Any]:
    """The point of a setting."""
    return next(one for one in points if one["setting"] == setting)


def of_frontier(points: Points) -> dict[str, Any]:
    """What frontier.json says of dropped experts."""

    def left(low: float, high: float) -> float:
        return 1 - point(points, drop=low, major=high)["bits"] / 16

    dropped = {low: left(low, low) for low in _DROPS}
    for low, high in _HALVES:
        dropped[high] = 2 * left(low, high) - dropped[low]
    return {"dropped": [[0.0, 0.0], *([limit, round(part, 3)] for limit, part in sorted(dropped.items()))]}


def widths() -> dict[str, dict[str, float]]:
    """The quality loss of one part at fewer bits, everything else as published."""
    found: dict[str, float] = {}
    checkpoint = str(source())
    with tempfile.TemporaryDirectory() as folder:
        by_up = Path(folder) / "up"
        _floe("pack", checkpoint, str(by_up), "--signal", "up")
        _floe("tune", str(by_up), "--source", checkpoint, "--text", str(asset("demo", "manual.md")))
        points = json.loads((by_up / "frontier.json").read_text(encoding="utf-8"))["points"]
        for bits in (4, 8):
            pack = str(Path(folder) / str(bits))
            _floe("pack", checkpoint, pack, "--up", "16", "--rows", "16", "--dense", str(bits))
            arguments = ["--text", str(asset("demo", "manual.md")), "--tokens", str(_TEXT_TOKENS), "--json"]
            ran = _floe("eval", pack, "--source", checkpoint, "--preset", "No sparsity", *arguments)
            found[str(bits)] = round(json.loads(ran.splitlines()[-1])["presets"][0]["kl_mean"], 5)
    parts = ("up", "gate", "down")
    losses = {part: {str(b): round(point(points, **{part: b})["kl"], 5) for b in WIDTHS} for part in parts}
    coarse = json.loads(_bench("kv_bits.py"))["demo"]["kl_mean"]
    return {**losses, "dense": found, "kv": {"8": round(coarse, 5)}}


def hits() -> list[list[float]]:
    """Share of the rows in the pool -> share of the wanted rows found there, by the default policy, for three texts
    as layers of one model: a step needs as small a part of the pool as of a large model's.
    """
    ran = json.loads(_bench("eviction.py", "--tokens", "300"))
    rates = ran["hit_rates"]["stacked"]["score"]
    return [
        [0.0, 0.0],
        *([share, round(rate, 3)] for share, rate in zip(ran["shares"], rates, strict=True)),
        [1.0, 1.0],
    ]


def lenient() -> float:
    """What leaving out weak rows adds to the loss of Balanced if none of them is ever there."""
    arguments = ("eval", str(asset("demo", "packed")), "--source", str(source()), "--json")
    strict, late = (
        json.loads(_floe(*arguments, "--preset", "Balanced", *flags))["presets"][0]["kl_mean"]
        for flags in ((), ("--lenient",))
    )
    return round(late - strict, 4)


def host() -> dict[str, float]:
    """The host's own time for a layer with a pool and for one in RAM, milliseconds."""
    ran = json.loads(_bench("step_overhead.py"))
    graphs, ahead = (ran["through_graphs"][name] for name in ("10%", "10%, looking ahead"))
    found = {"host_pool_ms": graphs["cpu_until_asked_ms"], "host_behind_ms": graphs["cpu_behind_ms"]}
    found["host_fetch_ms"] = ahead["cpu_meanwhile_ms"]
    found["host_ahead_ms"] = ahead["cpu_median_ms"] - graphs["cpu_median_ms"] - found["host_fetch_ms"]
    return {name: round(ms, 3) for name, ms in (found | {"host_ram_ms": ran["in_ram"]["cpu_median_ms"]}).items()}


Shares = dict[str, dict[str, float]]


def kernels() -> tuple[Shares, Shares, dict[str, float]]:
    """See `lower`; of passes of `kernel_shares.py`, in which the instruction sets take turns.

    Raises:
        ValueError: the machine was too busy.
    """
    found: dict[str, list[Any]] = {isa: [] for isa in _ISAS}
    for turn in range(_TRIES):
        isa = _ISAS[turn % 2]
        if len(found[isa]) < _PASSES:
            ran = json.loads(_bench("kernel_shares.py", FLOE_CPU_ISA=isa))
            calm = ran["isa"] == isa and all(_calm(ran.get(which), ran["wanted"]) for which in ("alone", "all"))
            found[isa] += [ran] if calm else []
            print(json.dumps({"counts": calm} | ran), flush=True)
    if min(map(len, found.values())) < _PASSES:
        raise ValueError("The machine was too busy")
    return lower(list(found.values()))


def lower(found: Sequence[Sequence[Any]]) -> tuple[Shares, Shares, dict[str, float]]:
    """By kind and bits, the share of a linear read that the CPU kernels reach on all cores, and the GB/s of one core;
    by kind, what vectors of half as many values take longer.

    Of the medians of each instruction set's passes it is the lower one.
    """

    def least(which: str, name: str, value: str) -> float:
        return min(median(ran[which][name][value] for ran in passes) for passes in found)

    # No more than all of the read: what is above that is the reads' own noise. Prompts count rows times tokens.
    shares = {
        kind: {
            str(bits): round(min(1.0 if kind != "prompt" else math.inf, least("all", f"{kind} {bits}", "share")), 2)
            for bits in widths
        }
        for kind, widths in _KINDS.items()
    }
    alone = {
        kind: {str(bits): round(least("alone", f"{kind} {bits}", "gb_s"), 1) for bits in widths}
        for kind, widths in _KINDS.items()
        if kind != "prompt"
    }
    costs = {
        kind: round(least("all", f"{kind} {bits}", "gb_s") / least("all", f"narrow {kind}", "gb_s") - 1, 2)
        for kind, bits in found[0][0]["narrow"].items()
    }
    return shares, alone, costs


def _calm(rounds: Any, wanted: int) -> bool:
    """Whether a pass had its rounds, and they agree."""
    if rounds is None or rounds["rounds"] < wanted:
        return False
    return median(row["spread"] for name, row in rounds.items() if name not in ("rounds", "read")) <= _SPREAD


def _floe(*arguments: str) -> str:
    program = str(Path(sys.executable).with_name("floe-chat"))
    return subprocess.run([program, *arguments], check=True, capture_output=True, text=True).stdout


def _bench(script: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(script)), *arguments]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | environment)
    return ran.stdout.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=["widths", "hits", "lenient", "host", "kernels", []])
    parser.add_argument("--machine", default="B", help="this one's letter in BENCHMARKS.md")
    options = parser.parse_args()
    file = asset("figures.json")
    figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))

    def put(name: str, values: Any) -> None:
        figures[name] |= {"values": values, "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": options.machine}

    points = json.loads(asset("demo", "packed", "frontier.json").read_text(encoding="utf-8"))["points"]
    for name, values in of_frontier(points).items():
        if values != figures[name]["values"]:
            put(name, values)
    if "widths" in options.parts:
        put("quantization", widths())
    if "hits" in options.parts:
        put("hits", hits())
    if "lenient" in options.parts:
        put("lenient_kl", lenient())
    for name, ms in host().items() if "host" in options.parts else ():
        put(name, ms)
    if "kernels" in options.parts:
        shares, alone, costs = kernels()
        put("kernels", shares)
        put("core_bytes_s", alone)
        put("vector_cost", costs)
    file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
