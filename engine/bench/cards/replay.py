"""Recorded tokens on a virtual card: the engine's own decisions at a published model's width, without its weights.

All decisions are made by the engine's own code: pool, predictor's guesses, placement, the link's queue. Nothing is
computed or copied: what is active comes from a trace, and a neuron of the small model stands for as many of the large
one as it takes. Time is the virtual device's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ....kernels.types import Active, Calls, Work
from ....kernels.weights import ExpertRows, SignalWeights
from ....models.pack.usage_file import Heat
from ...experts.moe_layer import Control, MoELayer
from ...experts.offloaded_layer import Neighbours, OffloadedLayer
from ...experts.whole_layers import RamLayer, ResidentLayer
from ...offload.cards import Card
from ...offload.device import Partial
from ...offload.links.transfer import Transfer
from ...offload.looking import Looking
from ...offload.mix import Mix
from ...offload.offload import Offload, Parts
from ...offload.virtual.virtual_device import HostTimes, Turns, VirtualDevice
from ...planning.speed_estimate import Speeds, host_times
from ...quality_presets import Preset
from ...telemetry import LayerCounts, Telemetry, hidden
from .trace import Trace
from .width import Width


class ReplayDevice(VirtualDevice):
    """A virtual device whose activations are read from a trace; `show` says where in it.

    Attributes:
        waited: seconds in which its GPU did nothing but wait for rows. guesses: `Trace.ahead` of the predictor in use.
    """

    def __init__(
        self,
        card: Card,
        width: Width,
        trace: Trace,
        preset: Preset,
        row_bytes: int,
        cpu_share: float,
        *,
        host: HostTimes | None,
        turns: Turns | None = None,
    ) -> None:
        given = (card, row_bytes, width.hidden, width.dense_bytes, cpu_share)
        super().__init__(*given, dense_weights=width.dense_weights, host=host, content=False, turns=turns)
        self._trace, self._width = trace, width
        # Of active neurons, how many reach the second threshold: what the preset means on text like the calibration's.
        rule = preset.rule
        self._kept = min(1.0, (1 - rule.product) / (1 - rule.sparsity)) if rule.product else 1.0
        self._own = np.arange(width.neurons) * trace.values.shape[3] // width.neurons
        self.waited, self.guesses = 0.0, trace.ahead
        self.show([0], 0)

    def show(self, tokens: Sequence[int], layer: int, *, asked: bool = False) -> None:
        """What is asked for next: this layer's step for these tokens of the trace; `asked`: only what it guesses."""
        self.tokens, self.layer, self.asked = tokens, layer, asked

    def wait(self, transfer: Transfer) -> float:
        """See `Device`."""
        waited = super().wait(transfer)
        self.waited += waited
        return waited

    def _find(self, x: Tensor, up: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> Active:
        """The first question of a layer is about itself, the second about the next one."""
        source, layer = (self.guesses, self.layer + 1) if self.asked else (self._trace.values, self.layer)
        self.asked = True
        neurons = up.q.shape[1]
        parts = self._width.neurons // neurons
        found, strengths = [np.zeros(0, np.int64)], [np.zeros(0, np.float16)]
        called = zip(calls.tokens.tolist(), calls.experts.tolist(), thresholds.tolist(), strict=True)
        for token, expert, threshold in called:
            first = expert % parts * neurons
            values = source[self.tokens[token], layer, expert // parts]
            small = values[self._own[first : first + neurons]]
            found.append(np.flatnonzero(small >= threshold))
            strengths.append(small[found[-1]])
        ends = np.cumsum([len(one) for one in found])
        active = torch.from_numpy(np.concatenate(found))
        return Active(torch.from_numpy(ends), active, torch.from_numpy(np.concatenate(strengths)).float())

    def _sum(
        self, x: Tensor, rows: ExpertRows, calls: Calls, active: Active, limits: Tensor | None, x_bits: int
    ) -> Partial:
        return torch.zeros_like(x), (active.offsets.diff() * self._kept).long()

    def _experts(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        active = self._find(x, up, work.calls, work.thresholds, x_bits).offsets.diff()
        return torch.zeros_like(x), torch.stack([active, (active * self._kept).long()], 1)

    def _one(
        self,
        x: Tensor,
        up: SignalWeights,
        rows: ExpertRows,
        expert: int,
        limits: tuple[Tensor, Tensor | None],
        x_bits: int,
    ) -> tuple[Tensor, int]:
        return torch.zeros_like(x), 0


class _Guesses:
    """A trace's predictor."""

    def __init__(self, device: ReplayDevice, trace: Trace) -> None:
        self._device, self._trace, self.attends = device, trace, trace.attends
        self.name = "partial" if trace.attends else "learned"

    def guess(self, layer: int, hidden: Tensor, output: Tensor | None) -> Tensor:
        """Nothing: the device has what would follow from it."""
        self._device.guesses = self._trace.ahead
        return hidden

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor, guess: Tensor) -> Tensor:
        """(1, E) scores of layer + 1."""
        return torch.from_numpy(self._trace.scores[self._device.tokens, layer + 1])


@dataclass(frozen=True, slots=True)
class Played:
    """What a policy cost, per token, in virtual time.

    Attributes:
        seconds: of one token, all layers of the whole model. moved: bytes over the link, likewise.
        waited: seconds in which the GPU did nothing but wait for the link. busy: seconds in which the link was busy.
        apart: of the time of a layer's step in which link and CPU both have work, the mean share for which one of them
            goes on after the other; None where there are no such steps.
        counts: of the engine's own layers; empty for baselines. host: seconds of our own code, as plans count them; 0
            where they were not counted. unused: bytes that were fetched ahead and not needed.
    """

    seconds: float
    moved: float
    waited: float
    busy: float
    counts: tuple[LayerCounts, ...] = ()
    host: float = 0.0
    unused: float = 0.0
    apart: float | None = None

    @property
    def hidden(self) -> float | None:
        """See `telemetry.hidden`."""
        return hidden(self.moved, self.busy, self.waited, self.unused)


class Stage:
    """The engine on a card, or on several that have some of the layers each, ready to play.

    Attributes:
        share: of the whole model's layers that are played.
    """

    def __init__(
        self,
        card: Card,
        width: Width,
        trace: Trace,
        preset: Preset,
        parts: Parts,
        *,
        ahead: bool = True,
        where_it_pays: bool = False,
        also: Sequence[Trace] = (),
        cpu_share: float = 1.0,
        pool: int | None = None,
        host: bool = False,
        others: Sequence[tuple[Card, Mix]] = (),
    ) -> None:
        """See `play`."""
        times = host_times(Speeds(1.0)) if host else None
        self.card, self.width, self.trace = card, width, trace
        layers, experts = trace.scores.shape[1:]
        packed = [width.layer(table) for table in (trace.thresholds if preset.rule.weighed else trace.plain)]
        self.share = layers / width.layers
        self.control, self.telemetry = Control(preset), Telemetry(layers, experts)
        self._turns, row_bytes = Turns(), packed[0].rows.layout.nbytes
        self._layers: list[MoELayer] = []
        self.apart: list[float] = []  # see `Played`, of each such step
        self.devices: list[ReplayDevice] = []
        self._pools: list[Offload] = []
        self._of: list[ReplayDevice] = []  # of each layer
        for one, mix in ((card, parts.mix or Mix(pool=layers)), *others):
            given = one, width, trace, preset, row_bytes, cpu_share
            device, first = ReplayDevice(*given, host=times, turns=self._turns), len(self._layers)
            part = mix if others else None
            rows = room(one, width, trace, mix, part, first=not first) if pool is None and mix.pool else pool or 0
            shared = Offload(device, parts, packed, rows, mix=mix, first=first)
            self._pools.append(shared)
            if ahead:
                shared.tried = partial(Looking, len(shared.pooled)) if where_it_pays else None
                shared.predict_by([_Guesses(device, one) for one in (trace, *also)])
            self.devices.append(device)
            self._of += mix.layers * [device]
            for index, place in enumerate(mix.places, first):
                layer = packed[index]
                if place == "gpu":
                    self._layers.append(ResidentLayer(index, layer, shared, self.control, self.telemetry))
                else:
                    kind = OffloadedLayer if place == "pool" else RamLayer
                    self._layers.append(kind(index, layer, layer, shared, self.control, self.telemetry))
        self.device = self.devices[0]
        self.device.alone = not others and all(isinstance(layer, ResidentLayer) for layer in self._layers)
        for before, after in itertools.pairwise(self._layers):
            if isinstance(before, OffloadedLayer) and isinstance(after, OffloadedLayer):
                before.neighbours = Neighbours(following=after)
        pooled = {at: layer for at, layer in enumerate(self._layers) if isinstance(layer, OffloadedLayer)}
        routers = torch.empty(experts, 1)
        self._heard = {} if trace.heard is None else {at: layer.hears(routers) for at, layer in pooled.items()}

    def step(self, tokens: Sequence[int]) -> None:
        """These tokens of the trace in one pass, and the output head."""
        at, x = list(tokens), torch.zeros(len(tokens), 1)
        for index, layer in enumerate(self._layers):
            self._of[index].show(at, index)
            if (following := self._of[min(index + 1, len(self._of) - 1)]) is not self._of[index]:
                following.show(at, index, asked=True)
            chosen, weights = self.trace.index[at, index], self.trace.weights[at, index]
            if self.trace.heard is not None and index in self._heard and len(at) <= len(self._heard[index]):
                self._heard[index][: len(at)] = torch.from_numpy(self.trace.heard[at, index])
            with self._lanes(self._of[index]):
                layer(x, torch.from_numpy(chosen), torch.from_numpy(weights))
        self._turns.take(self.device)
        self.device.arrive(len(at))
        self.device.clock.run("gpu", self.share * self.card.gpu_s(self.width.head_bytes, 0.0, 2))
        self.device.finish()

    @property
    def settled(self) -> bool:
        """Whether it is known where looking ahead pays."""
        return all(shared.looking is None or shared.looking.settled for shared in self._pools)

    def tried(self, tokens: int) -> int:
        """The most of so many tokens of which each comes in each turn of what is tried, if they repeat."""
        turns = math.lcm(2, *(shared.looking.turns for shared in self._pools if shared.looking is not None))
        return next((count for count in range(tokens, 1, -1) if math.gcd(count, turns) == 1), 1)

    def restart(self) -> None:
        """Fill the pools with what was used so far, as the program's next start does."""
        for shared in self._pools:
            layers, (_, experts, neurons) = len(self._layers), shared.pool.slots.shape
            nothing = Heat(np.zeros((layers, experts), np.float32), np.zeros((layers, experts, neurons), np.float32))
            heat, capacity = shared.heat(nothing), shared.pool.capacity
            shared.settle()
            shared.pool.resize(0)
            shared.pool.resize(capacity)
            shared.warm(heat)

    @contextmanager
    def _lanes(self, device: ReplayDevice) -> Generator[None]:
        """How far apart link and CPU end in a layer's step that is computed inside."""
        clock = device.clock
        began, link, cpu = clock.now, clock.busy("link"), clock.busy("cpu")
        yield
        if clock.busy("link") > link and clock.busy("cpu") > cpu:
            first, last = sorted((clock.end("link"), clock.end("cpu")))
            self.apart.append((last - first) / (last - began))

    def spent(self) -> tuple[float, float, float, float, float]:
        """Of all layers so far: seconds, bytes, seconds waited for rows, of the link, and of our own code."""
        each = self.devices
        moved, busy = sum(float(one.link.bytes_moved) for one in each), sum(one.link.busy_s for one in each)
        waited, host = sum(one.waited for one in each), sum(one.clock.busy("host") for one in each)
        return self.device.now(), moved, waited, busy, host


def play(
    card: Card,
    width: Width,
    trace: Trace,
    preset: Preset,
    parts: Parts,
    *,
    ahead: bool = True,
    where_it_pays: bool = False,
    also: Sequence[Trace] = (),
    cpu_share: float = 1.0,
    warm: int = 32,
    pool: int | None = None,
    host: bool = False,
    others: Sequence[tuple[Card, Mix]] = (),
    together: int = 1,
) -> Played:
    """The engine on a card, token by token, or a token of each of some texts at a time.

    Args:
        together: see `run`.
        ahead: whether the next layer's rows are fetched ahead; where_it_pays: only in layers where that is measured to
            pay, with the text's first tokens again and again, by this trace's predictor or those of `also`.
            warm: tokens before the clock is read.
        pool: rows; None for what the card's memory leaves. host: whether our own code's time counts too, as in plans.
            Of the trace's layers those that `parts.mix` names share the pool; without a mix all do. others: further
            cards, with the mixes of their layers; `parts.mix` is then of the first card's.

    Raises:
        ValueError: the card has no room for a pool.
    """
    given, when = (card, width, trace, preset, parts), {"ahead": ahead, "where_it_pays": where_it_pays}
    stage = Stage(*given, **when, also=also, cpu_share=cpu_share, pool=pool, host=host, others=others)
    return run(stage, warm, together)


def run(stage: Stage, warm: int, together: int = 1) -> Played:
    """Play a stage. warm: as in `play`.

    Args:
        together: how many texts, which are the trace from places far from each other on.
    """
    length = len(stage.trace.index)

    def step(token: int) -> None:
        stage.step([(token + text * length // together) % length for text in range(together)])

    for token in range(warm):
        step(token)
    stage.restart()
    for token in itertools.takewhile(lambda _token: not stage.settled, itertools.count()):
        step(token % stage.tried(warm))
    before, stage.control.counting = stage.spent(), True
    stage.apart.clear()
    for token in range(warm, length):
        step(token)
    return played_since(stage, before, (length - warm) * together)


def played_since(stage: Stage, before: Sequence[float], passes: int) -> Played:
    """What each of so many passes, or tokens of them, cost since `Stage.spent` was `before`."""
    seconds, moved, waited, busy, host = (
        (after - earlier) / (passes * stage.share) for after, earlier in zip(stage.spent(), before, strict=True)
    )
    counts, unused = tuple(stage.telemetry.layers), 0.0
    if stage.control.counting:  # a prompt's waits are known to the device alone, a token's to its layers
        waited = sum(layer.waited for layer in counts) / (passes * stage.share)
        unused = sum(layer.unused for layer in counts) / (passes * stage.share)
    apart = sum(stage.apart) / len(stage.apart) if stage.apart else None
    return Played(seconds, moved, waited, busy, counts, host, unused, apart)


def layers_held(card: Card, width: Width, trace: Trace) -> float:
    """How many of the trace's layers the card's memory holds with all their experts, besides everything else."""
    one = width.layer(trace.thresholds[0])
    each = one.signal.q.shape[0] * one.signal.bytes_per_expert() + one.rows.data.nbytes
    return max(0.0, min(trace.index.shape[1], _free(card, width, trace) / each))


def _free(card: Card, width: Width, trace: Trace, part: Mix | None = None, *, first: bool = True) -> float:
    """Bytes of the card for experts, scaled from the whole model to the trace's layers; part, first: see `room`."""
    layers = trace.index.shape[1]
    ends = width.footprint.head + 2 * width.sizes.embedding
    of_layers = (width.fixed - ends) * (1.0 if part is None else part.layers / layers)
    return (card.vram_bytes - of_layers - (ends if first else 0)) * layers / width.layers


def room(
    card: Card, width: Width, trace: Trace, mix: Mix | None = None, part: Mix | None = None, *, first: bool = True
) -> int:
    """Rows of a pool that the card's memory holds besides everything else. mix: of the trace's layers; None: all in it.

    Args:
        part: the mix again where the card has only these layers. first: whether it has the embedding and the head.

    Raises:
        ValueError: none.
    """
    mix = mix or Mix(pool=trace.index.shape[1])
    one = width.layer(trace.thresholds[0])
    experts, neurons, nbytes = one.rows.data.shape
    ups = experts * one.signal.bytes_per_expert()
    free = _free(card, width, trace, part, first=first) - (mix.gpu + mix.pool) * ups - mix.gpu * one.rows.data.nbytes
    rows = int(free) // nbytes
    if rows < 1:
        raise ValueError(f"{card.name} has {card.vram_bytes / 1e9:.1f} GB, which leaves {free / 1e9:.1f} GB for rows")
    return min(rows, mix.pool * experts * neurons)
