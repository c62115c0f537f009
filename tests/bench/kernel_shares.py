"""What the CPU kernels reach, on one thread and on all of them, beside a linear read of memory.

All weights are made once. A round times the read and every operation in turn, on one thread, then on all, by the work
and the best of a few turns with which `floe-chat doctor --measure` measures a person's own machine; a share is taken
within its round. Rounds do not count and are repeated if other programs kept more than QUIET cores busy, or if reads at
the begin and the end of the round differ by more than STEADY, as where other virtual machines use the same memory.

Run: FLOE_CPU_ISA=avx2 .venv/bin/python tests/bench/kernel_shares.py. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch
from floe_chat.engine.machine import random_weights, read_floor
from floe_chat.engine.machine.conditions import computing
from floe_chat.engine.machine.load import Others
from floe_chat.engine.machine.random_weights import MIXTRAL, Shapes
from floe_chat.engine.planning import rates
from floe_chat.kernels.cpu import native

READ = "read"
WIDTHS, DENSE = (2, 3, 4, 8), (4, 8)
NARROW, NARROW_BITS = Shapes(MIXTRAL.hidden // 2, MIXTRAL.neurons), {"up": 3, "rows": 4, "dense": 4}
ROUNDS, QUIET, STEADY, PAUSE_S = 9, 0.1, 0.1, 0.5
_TURNS = 7
_BATCH = Shapes(MIXTRAL.hidden, 1024)


def works() -> dict[str, Callable[[], float]]:
    """Bytes per second of one measurement, by name."""
    reader = read_floor.reader("cpu")
    assert reader is not None

    def read() -> float:
        return max(nbytes / seconds for seconds, nbytes in (reader() for _ in range(_TURNS)))

    def timed(work: rates.Work, turns: int = _TURNS) -> Callable[[], float]:
        return lambda: rates.best_rate(work, turns)

    def of_kind(kind: str, bits: int, shapes: Shapes) -> Callable[[], float]:
        if kind == "rows":
            return timed(rates.row_work(shapes.row_layout(bits), shapes.neurons))
        return timed((rates.up_work if kind == "up" else rates.dense_work)(shapes, bits))

    found: dict[str, Callable[[], float]] = {READ: read}
    for kind, widths in (("up", WIDTHS), ("rows", WIDTHS), ("dense", DENSE)):
        found |= {f"{kind} {bits}": of_kind(kind, bits, MIXTRAL) for bits in widths}
    found |= {f"gather {bits}": timed(_gather(bits)) for bits in WIDTHS}
    found |= {f"narrow {kind}": of_kind(kind, bits, NARROW) for kind, bits in NARROW_BITS.items()}
    return found | {"prompt 4": timed(rates.batch_work(_BATCH, 4), 3)}


def _gather(bits: int) -> rates.Work:
    """Plain loads of half of two experts' rows: what `sparse_swiglu` reads, without its arithmetic."""
    layout, pairs = MIXTRAL.row_layout(bits), 2
    flat = random_weights.filled(2 * pairs * MIXTRAL.neurons, layout.nbytes)
    active = random_weights.random_active(0.5, MIXTRAL.neurons, 0)
    first = torch.tensor([0, 1]).repeat_interleave(active.offsets.diff()) * MIXTRAL.neurons

    def work(turn: int) -> int:
        native.read_rows(flat, active.neurons + first + 2 * (turn % pairs) * MIXTRAL.neurons)
        return active.neurons.numel() * layout.nbytes

    return work


def measured(patience_s: float) -> dict[str, Any]:
    """Rounds by threads, `alone` and `all`: rates in GB/s and shares of the read; waits for quiet ones so long."""
    with computing(None, MIXTRAL.hidden, MIXTRAL.neurons) as threads:
        each, begun = works(), time.monotonic()
        kept: dict[str, list[dict[str, float]]] = {"alone": [], "all": []}
        disturbed = 0
        while min(map(len, kept.values())) < ROUNDS and time.monotonic() - begun < patience_s:
            for which, count in (("alone", 1), ("all", threads)):
                torch.set_num_threads(count)
                if not _quiet():
                    continue
                others = Others()
                round_of = {name: work() for name, work in each.items()}
                first, last = round_of[READ], each[READ]()
                round_of[READ] = (first + last) / 2
                if others.cores() > QUIET or abs(first - last) > STEADY * round_of[READ]:
                    disturbed += 1
                else:
                    kept[which].append(round_of)
    found: dict[str, Any] = {"isa": native.isa().name, "threads": threads, "wanted": ROUNDS, "disturbed": disturbed}
    found["narrow"] = NARROW_BITS
    return found | {which: _summary(rounds, list(each)) for which, rounds in kept.items() if rounds}


def _quiet() -> bool:
    """Whether other programs rest now, so that a round is worth its time and does not disturb them."""
    others = Others()
    time.sleep(PAUSE_S)
    return others.cores() <= QUIET


def _summary(rounds: list[dict[str, float]], names: list[str]) -> dict[str, Any]:
    rows: dict[str, Any] = {"rounds": len(rounds)}
    for name in names:
        speeds, shares = [one[name] / 1e9 for one in rounds], [one[name] / one[READ] for one in rounds]
        low, _, high = quantiles(shares, n=4, method="inclusive") if len(shares) > 1 else 3 * shares
        rows[name] = {"gb_s": median(speeds), "share": median(shares), "spread": (high - low) / median(shares)}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait for quiet rounds")
    with torch.inference_mode():
        found = measured(parser.parse_args().patience)
    for which in ("alone", "all"):
        for name, row in found.get(which, {}).items():
            if name != "rounds":
                print(f"{which:<6}{name:<14}{row['gb_s']:6.1f} GB/s {row['share']:6.2f} of read, {row['spread']:.0%}")
    print(json.dumps({"bench": "kernel_shares", **found}))


if __name__ == "__main__":
    main()
