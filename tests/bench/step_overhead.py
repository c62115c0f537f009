"""What the engine itself takes of one token in one layer at Mixtral's width.

Where rows lie in RAM and a pool: nothing is computed and nothing is moved. The device hands out random active neurons
(each neuron as likely as its rank makes it, so that a pool has something to keep) and zeros, the link is done at once.
What is left is finding, placing, evicting, counting. How much of it lies between the list of active neurons and asking
for absent rows is told too: that delays them, while the rest runs beside their way. A pool of 100 % holds all rows from
the start. With a predictor the next layer's experts are drawn as its router would choose them, and their neurons are
fetched ahead.

Through graphs: the same on a GPU with the fused decoder, where the host only waits, starts graphs and calls compiled
code (engine/decoder/card/card_experts.py). Here no graph does anything: what launches cost the driver is not in it.
Looking ahead takes a graph more, and sends for the guess while the next layer's graph runs.

Where rows are read in place, on the CPU: a layer's whole step, counted as in an answer, against `kernels.moe_step`
alone, in turns. The floor is 1.

Prints milliseconds per layer and token, then the same as one JSON line. Times of the thread alone ("cpu") are told
beside those of the clock, which on a busy machine are mostly others'.

    python tests/bench/step_overhead.py [--tokens 60] [--predictor none|drawn|both]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from floe_chat.engine.decoder.card import card_lists
from floe_chat.engine.decoder.card.card_experts import CardExperts
from floe_chat.engine.experts.moe_layer import Control, MoELayer
from floe_chat.engine.experts.offloaded_layer import Neighbours, OffloadedLayer
from floe_chat.engine.experts.whole_layers import RamLayer
from floe_chat.engine.machine.random_weights import MIXTRAL, make_rows, make_up, next_calls
from floe_chat.engine.offload.device import Device, Joined, Partial
from floe_chat.engine.offload.lane_rates import RateName, Rates
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.offload import Offload, Parts
from floe_chat.engine.offload.scheduler import Scheduler
from floe_chat.engine.quality_presets import PRESETS, Preset
from floe_chat.engine.telemetry import Telemetry
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu.offload_steps import Beside
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.listed import Total
from floe_chat.kernels.offload.placing import Found, Placed
from floe_chat.kernels.offload.pool import ASKED, MOST
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Active, Calls, Work
from floe_chat.kernels.weights import ExpertRows, SignalWeights
from floe_chat.models.pack.packed_model import PackedLayer

LAYERS, EXPERTS, NEURONS, TOP_K = 32, 8, 14336, 2
NBYTES = 64  # of a row
POPULAR = np.linspace(2, 1, EXPERTS) / np.linspace(2, 1, EXPERTS).sum()  # how likely each expert is chosen
ACTIVE = 0.49  # of the neurons, as at Balanced
IN_PLACE = 4  # experts that are read in place, more than any cache holds
WARM = 12  # tokens
ARRIVES = 1800  # rows that a guess asks for: what a link of 25 GB/s brings in 0.3 ms of Mixtral's


class _Given(Rates):
    """Stay as they are: rows as small as these would teach the CPU's to be slow, and fewer would be its share."""

    def observed(self, what: RateName, nbytes: float, seconds: float, cap: float = 1.0) -> None:
        """Nothing is learned."""


class _Nothing(Device):
    """Computes nothing."""

    def __init__(self, seed: int) -> None:
        rates = _Given(10e9, 1e-5, 8e9, 2e10, 5e-5, 2e11, 1e-5)
        link = Link("none", "no link", NBYTES, content=False)  # everything is there at once
        super().__init__("nothing", "cpu", link, rates)
        self.found_at: float | None = None  # the thread's time; None once absent rows were asked for
        self.asked: list[float] = []  # seconds from there on, of each step that asked
        self._draw = np.random.default_rng(seed)
        rank = np.arange(NEURONS) / NEURONS
        likely = np.clip(2 * ACTIVE * (1 - rank), 0.02, 1.0)
        self._likely = likely * ACTIVE / likely.mean()

    def _find(self, x: Any, up: Any, calls: Calls, thresholds: torch.Tensor, x_bits: int) -> Active:
        pieces = self._likely.reshape(-1, up.q.shape[1])  # an expert, or its halves
        likely = [pieces[expert % len(pieces)] for expert in calls.experts.tolist()]
        made = thresholds.isfinite().tolist()
        found = [
            np.flatnonzero(self._draw.random(part.size) < part * on) for part, on in zip(likely, made, strict=True)
        ]
        ends = torch.tensor([0, *np.cumsum([part.size for part in found])])
        neurons = np.concatenate(found).astype(np.int32)  # as a card lists them
        return Active(ends, torch.from_numpy(neurons), torch.ones(neurons.size))

    def _sum(self, x: torch.Tensor, rows: Any, calls: Calls, active: Active, limits: Any, x_bits: int) -> Partial:
        return torch.zeros_like(x), active.offsets.diff()

    def whole_beside(self, x: torch.Tensor, up: Any, rows: Any, work: Work, x_bits: int) -> Partial:
        return torch.zeros_like(x), torch.zeros(len(work.thresholds), 2, dtype=torch.int64)


def timed_asking(device: _Nothing, scheduler: Scheduler) -> None:
    """Note how long after the list of active neurons the call ends that asks for absent rows."""
    start = scheduler.start

    def timed(found: Found, beside: Beside, cpu_share: float) -> tuple[Placed, Joined | None]:
        placed = start(found, beside, cpu_share)
        if placed[0].keys.size and device.found_at is not None:
            device.asked.append(time.thread_time() - device.found_at)
        device.found_at = None
        return placed

    scheduler.start = timed


class _Drawn:
    """Predicts experts by how often they are chosen."""

    name, attends = "drawn", False

    def __init__(self) -> None:
        self._draw = np.random.default_rng(2)

    def guess(self, layer: int, hidden: torch.Tensor, output: torch.Tensor | None) -> torch.Tensor:
        """Nothing: the device draws what would follow from it."""
        return hidden

    def experts(self, layer: int, hidden: torch.Tensor, chosen: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
        """(1, E): the K largest are a draw without replacement."""
        return torch.from_numpy(np.log(POPULAR) + self._draw.gumbel(size=EXPERTS)).float()[None]


def layers(device: Device, share: float, parts: Parts) -> tuple[list[OffloadedLayer], Control]:
    """Layers of Mixtral's width without weights (the record of a row is made as small as it can be)."""
    vector = VectorLayout(64, 2, 64)
    rows = ExpertRows(
        RowLayout(vector, vector, torch.float16), torch.zeros(EXPERTS, NEURONS, NBYTES, dtype=torch.uint8)
    )
    signal_layout = SignalLayout(vector, torch.float16)
    up = SignalWeights(
        signal_layout,
        torch.zeros(EXPERTS, NEURONS, signal_layout.row_bytes, dtype=torch.uint8),
        torch.zeros(EXPERTS, NEURONS, 1, dtype=torch.float16),
        torch.zeros(EXPERTS, NEURONS, 1, dtype=torch.float16),
    )
    table = torch.linspace(0, 1, 101).repeat(EXPERTS, 1)
    packed = PackedLayer(signal=up, rows=rows, thresholds=table, products=table)
    control, telemetry = Control(PRESETS[2]), Telemetry(LAYERS, EXPERTS)
    shared = Offload(device, parts, [packed] * LAYERS, int(share * LAYERS * EXPERTS * NEURONS))
    if parts.predictor == "drawn":
        shared.predictors = (_Drawn(),)
    made = [OffloadedLayer(i, packed, packed, shared, control, telemetry) for i in range(LAYERS)]
    for layer, following in itertools.pairwise(made):
        layer.neighbours = Neighbours(following=following)
    return made, control


def measure(share: float, tokens: int, predictor: str) -> dict[str, float]:
    """Milliseconds per layer and token of the engine alone: without the time that drawing neurons takes."""
    device = _Nothing(0)
    made, control = layers(device, share, Parts(predictor=predictor))
    control.counting = True
    x, weights, draw = torch.zeros(1, 64), torch.tensor([[0.6, 0.4]]), np.random.default_rng(1)
    took: dict[str, list[float]] = {"clock": [], "cpu": []}
    drawn, drawn_cpu, own = 0.0, 0.0, False
    find = device._find  # pyright: ignore[reportPrivateUsage]

    def timed(*given: Any) -> Active:
        nonlocal drawn, drawn_cpu, own
        begun, begun_cpu = time.perf_counter(), time.thread_time()
        found = find(*given)
        drawn += time.perf_counter() - begun
        found_at = time.thread_time()
        drawn_cpu += found_at - begun_cpu
        if own:  # the layer's; what follows in the same step is a guess for the next one
            device.found_at, own = found_at, False
        return found

    device._find = timed  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    timed_asking(device, made[0].shared.scheduler)
    if share == 1.0:
        made[0].shared.warm(made[0].shared.pool.heat())
    with torch.inference_mode():
        for token in range(tokens + WARM):
            chosen = [torch.from_numpy(draw.choice(EXPERTS, TOP_K, replace=False, p=POPULAR))[None] for _ in made]
            begun, begun_cpu, drawn, drawn_cpu = time.perf_counter(), time.thread_time(), 0.0, 0.0
            for layer, index in zip(made, chosen, strict=True):
                own = True
                layer(x, index, weights)
                device.found_at = None
            if token + 1 == WARM:
                device.asked.clear()
            if token >= WARM:
                took["clock"].append((time.perf_counter() - begun - drawn) / LAYERS * 1e3)
                took["cpu"].append((time.thread_time() - begun_cpu - drawn_cpu) / LAYERS * 1e3)
    asked = statistics.median(device.asked) * 1e3 if device.asked else 0.0
    return {
        "median_ms": statistics.median(took["clock"]),
        "least_ms": min(took["clock"]),
        "cpu_median_ms": statistics.median(took["cpu"]),
        "cpu_least_ms": min(took["cpu"]),
        "cpu_until_asked_ms": asked,
        "cpu_behind_ms": statistics.median(took["cpu"]) - asked,
    }


class _Graph:
    """In place of a captured one: calls `then`, and what that takes is not counted."""

    outputs = ()

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self._then, self.took = then, 0.0
        self.meanwhile = 0.0  # the thread's time between its start and waiting for it
        self.ended: list[float] = []  # the thread's time when the host had waited, or had started it

    def replay(self) -> None:
        begun = time.thread_time()
        if self._then is not None:
            self._then()
        self.ended.append(time.thread_time())
        self.took += self.ended[-1] - begun

    def wait(self) -> None:
        self.meanwhile, self.ended[-1] = time.thread_time() - self.ended[-1], time.thread_time()


def through_graphs(share: float, tokens: int, predictor: str) -> dict[str, float]:
    """As `measure`, on a GPU's path; and how much lies between the start of a layer's graph and waiting for it."""
    device = _Nothing(0)
    made, control = layers(device, share, Parts(predictor=predictor))
    control.counting = True
    find, draw, weights = device._find, np.random.default_rng(1), torch.tensor([[0.6, 0.4]])  # pyright: ignore[reportPrivateUsage]
    captured, counters = list[_Graph](), made[0].shared.pool.table.counters

    def capture(_work: object, _device: torch.device) -> _Graph:
        captured.append(_Graph())
        return captured[-1]

    with torch.inference_mode():
        experts = CardExperts(made, TOP_K, Total(torch.zeros(1, 64), torch.zeros(1, dtype=torch.int64)))

    def drawn(one: Any, memory: Any, listing: Any) -> None:
        """What a layer's graph leaves for the host, or one that looks ahead."""
        here = memory.record.here
        chosen = torch.from_numpy(draw.choice(EXPERTS, TOP_K, replace=False, p=POPULAR))[None]
        work = one.ruled.work(chosen, weights)
        fields = {"chosen": chosen, "scores": weights, "experts": work.calls.experts, "weights": work.calls.weights}
        fields |= {"thresholds": work.thresholds, "named": chosen}
        for name in here.keys() & fields.keys():
            here[name].copy_(fields[name])
        limits = work.thresholds
        if "named" in here:
            limits = limits.masked_fill(work.calls.weights * TOP_K < 1, torch.inf)
            counters[MOST], counters[ASKED] = ARRIVES, 0
        active = find(None, one.ruled.layer.signal, work.calls, limits, 0)
        listing.offsets.copy_(active.offsets)
        listing.neurons[: active.neurons.numel()] = active.neurons
        listing.copies.fill_(1.0)

    served = experts._pooled  # pyright: ignore[reportPrivateUsage]
    graphs, aheads = [_Graph(partial(drawn, one, one.form, one.form.listing)) for one in served], list[_Graph]()
    for index, one in enumerate(served[1:]):
        for how in experts.looks(index):
            assert one.expects is not None
            aheads.append(_Graph(partial(drawn, one, one.expects, one.expects.listing)))
            experts.look(index, how, aheads[-1])
    with mock.patch.object(card_lists, "capture", capture), torch.inference_mode():
        experts.begin()
    if share == 1.0:
        made[0].shared.warm(made[0].shared.pool.heat())
    took, asked, fetched = list[float](), list[float](), list[float]()
    ready = captured[0]
    with torch.inference_mode():
        for token in range(tokens + WARM):
            for graph in (*captured, *graphs, *aheads):
                graph.took = 0.0
                graph.ended.clear()
            begun = time.thread_time()
            experts.run(range(LAYERS), graphs)
            experts.end(LAYERS)
            ended = time.thread_time()
            if token >= WARM:
                took.append((ended - begun - sum(graph.took for graph in (*graphs, *aheads))) / LAYERS * 1e3)
                fetched += [graph.meanwhile for graph in graphs[1:]]
                asked += [after - graph.ended[0] for graph, after in zip(graphs, ready.ended, strict=True)]
    until = statistics.median(asked) * 1e3
    median = statistics.median(took)
    return {
        "cpu_median_ms": median,
        "cpu_least_ms": min(took),
        "cpu_until_asked_ms": until,
        "cpu_behind_ms": median - until,
        "cpu_meanwhile_ms": statistics.median(fetched) * 1e3,
    }


def in_ram(tokens: int) -> dict[str, float]:
    """Milliseconds of the thread in a layer whose experts the CPU computes beside a device, but for computing them."""
    device = _Nothing(0)
    made, _ = layers(device, 0.1, Parts(predictor="none"))
    packed, control = made[0].packed, made[0].control
    control.counting = True
    layer = RamLayer(0, packed, packed, made[0].shared, control, Telemetry(LAYERS, EXPERTS))
    x, index, weights = torch.zeros(1, 64), torch.tensor([[1, 5]]), torch.tensor([[0.6, 0.4]])
    took: list[float] = []
    with torch.inference_mode():
        for token in range(LAYERS * (tokens + WARM)):
            begun = time.thread_time()
            layer(x, index, weights)
            if token >= LAYERS * WARM:
                took.append((time.thread_time() - begun) * 1e3)
    return {"cpu_median_ms": statistics.median(took), "cpu_least_ms": min(took)}


def resident(tokens: int) -> dict[str, float]:
    """Milliseconds of a layer whose rows are read in place, of its kernels alone, and the first over the second."""
    with torch.inference_mode():
        up = make_up(MIXTRAL, 2, IN_PLACE)
        rows = make_rows(MIXTRAL, 4, IN_PLACE)
        v = kernels.signal_gemv(x := torch.randn(1, MIXTRAL.hidden), up, next_calls(0, IN_PLACE), torch.zeros(2)).values
        # A threshold that half the neurons reach, and a second one that some of these miss.
        table = torch.quantile(v.abs()[: 1 << 14], torch.linspace(0, 1, 101)).repeat(IN_PLACE, 1)
        packed = PackedLayer(signal=up, rows=rows, thresholds=table, products=table * 1e-3)
        control = Control(Preset("Plain", Rule(ACTIVE, 0.5)))
        control.counting = True
        layer = MoELayer(0, packed, control, Telemetry(1, IN_PLACE))
        thresholds, products = layer.ruled.limits.signal, layer.ruled.limits.product
        took: dict[str, list[float]] = {"layer": [], "kernels": []}
        for token in range(tokens + WARM):
            calls = next_calls(token, IN_PLACE)
            index, weights = calls.experts[None], calls.weights[None]
            limits = thresholds[calls.experts], None if products is None else products[calls.experts]
            for name in ("layer", "kernels") if token % 2 else ("kernels", "layer"):
                begun = time.perf_counter()
                if name == "layer":
                    layer(x, index, weights)
                else:
                    kernels.moe_step(x, up, rows, calls, *limits, x_bits=control.preset.x_bits)
                if token >= WARM:
                    took[name].append(time.perf_counter() - begun)
    ratios = [whole / alone for whole, alone in zip(took["layer"], took["kernels"], strict=True)]
    return {
        "layer_ms": statistics.median(took["layer"]) * 1e3,
        "kernels_ms": statistics.median(took["kernels"]) * 1e3,
        "ratio": statistics.median(ratios),
        "least_ratio": min(took["layer"]) / min(took["kernels"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--predictor", choices=("none", "drawn", "both"), default="both")
    given = parser.parse_args()
    tokens, predictors = given.tokens, ("none", "drawn") if given.predictor == "both" else (given.predictor,)
    found = {
        f"{share:.0%}" + (", looking ahead" if predictor == "drawn" else ""): measure(share, tokens, predictor)
        for predictor in predictors
        for share in (0.1, 0.3, 1.0)
    }
    for name, ms in found.items():
        print(
            f"pool of {name}: {ms['median_ms']:.2f} ms (least {ms['least_ms']:.2f}), "
            f"the thread alone {ms['cpu_median_ms']:.2f} (least {ms['cpu_least_ms']:.2f}), of these "
            f"{ms['cpu_until_asked_ms']:.3f} from the active neurons to asking for absent rows, "
            f"{ms['cpu_behind_ms']:.3f} besides"
        )
    by_graphs = {
        f"{share:.0%}" + (", looking ahead" if predictor == "drawn" else ""): through_graphs(share, tokens, predictor)
        for share in (0.1, 0.3, 1.0)
        for predictor in predictors
    }
    for name, ms in by_graphs.items():
        print(
            f"through graphs, pool of {name}: the thread alone {ms['cpu_median_ms']:.2f} "
            f"(least {ms['cpu_least_ms']:.2f}), of these {ms['cpu_until_asked_ms']:.3f} until the rows are asked for "
            f"and the sum of the rows that are there is started, {ms['cpu_behind_ms']:.3f} besides, of these "
            f"{ms['cpu_meanwhile_ms']:.3f} while the next layer's graph runs"
        )
    beside = in_ram(tokens)
    print(f"experts in RAM beside a device: {beside['cpu_median_ms']:.2f} ms (least {beside['cpu_least_ms']:.2f})")
    in_place = resident(tokens)
    print(
        f"rows in place: {in_place['layer_ms']:.2f} ms, kernels alone {in_place['kernels_ms']:.2f}, "
        f"{in_place['ratio']:.3f} times as much (by the least times {in_place['least_ratio']:.3f})"
    )
    told = {"bench": "step overhead", "layers": LAYERS, "tokens": tokens}
    told |= {"pool": found, "through_graphs": by_graphs, "in_ram": beside, "in_place": in_place}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
