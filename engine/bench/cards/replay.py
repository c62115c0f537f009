"""Recorded tokens on a virtual card: the engine's own decisions at a published model's width, without its weights.

All decisions are made by the engine's own code: pool, predictor's guesses, placement, the link's queue. Nothing is
computed or copied: what is active comes from a trace, and a neuron of the small model stands for as many of the large
one as it takes. Time is the virtual device's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.codes import group_size
from ....kernels.layouts import RowLayout, UpLayout, VectorLayout
from ....kernels.types import Active, Calls, Work
from ....kernels.weights import ExpertRows, UpWeights
from ....models.pack.packed_model import PackedLayer
from ...experts.moe_layer import Control, MoELayer
from ...experts.offloaded_layer import Neighbours, OffloadedLayer
from ...experts.whole_layers import RamLayer, ResidentLayer
from ...offload.cards import Card
from ...offload.device import Partial
from ...offload.mix import Mix
from ...offload.offload import Offload, Parts
from ...offload.virtual.virtual_device import VirtualDevice
from ...quality_presets import Preset
from ...telemetry import LayerCounts, Telemetry
from .trace import Trace


@dataclass(frozen=True, slots=True)
class Width:
    """The sizes of the replayed model, and its bits per weight.

    Attributes:
        layers: of the whole model; budgets are scaled to those of the trace. dense_weights: of one layer's attention.
            head_weights: of embedding's counterpart, read once a token.
    """

    hidden: int = 4096
    neurons: int = 14336
    layers: int = 32
    up: int = 3
    rows: int = 4
    dense: int = 4
    dense_weights: int = 2 * 4096 * (4096 + 1024)
    head_weights: int = 32000 * 4096

    @property
    def dense_bytes(self) -> int:
        """Of one layer's attention: codes, and scale and zero of every 64."""
        return round(self.dense_weights * (self.dense / 8 + (0 if self.dense == 16 else 4 / 64)))

    @property
    def head_bytes(self) -> int:
        """Of the output head, at 8 bits or more."""
        bits = max(8, self.dense)
        return round(self.head_weights * (bits / 8 + (0 if bits == 16 else 4 / 64)))

    def layer(self, thresholds: Tensor) -> PackedLayer:
        """A layer of these sizes, without memory."""
        experts = len(thresholds)
        vectors = [VectorLayout(self.hidden, bits, group_size(self.hidden)) for bits in (self.up, self.rows)]
        layout = RowLayout(vectors[1], vectors[1], torch.bfloat16)
        up = UpLayout(vectors[0], torch.bfloat16)

        def nothing(width: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(1, dtype=dtype).expand(experts, self.neurons, width)

        groups = vectors[0].groups
        weights = UpWeights(
            up, nothing(up.row_bytes, torch.uint8), nothing(groups, torch.float16), nothing(groups, torch.float16)
        )
        # A link takes only contiguous rows. These are never touched, so that no page is allocated.
        rows = torch.empty(experts, self.neurons, layout.nbytes, dtype=torch.uint8)
        return PackedLayer(weights, ExpertRows(layout, rows), thresholds, thresholds)

    def expert_bytes(self) -> int:
        """One whole expert: its up projection and its rows."""
        one = self.layer(torch.zeros(1, 2))
        return one.up.bytes_per_expert() + one.rows.data.shape[1] * one.rows.data.shape[2]


class ReplayDevice(VirtualDevice):
    """A virtual device whose activations are read from a trace. `token` and `layer` say where in it."""

    def __init__(
        self,
        card: Card,
        width: Width,
        trace: Trace,
        preset: Preset,
        row_bytes: int,
        cpu_share: float,
        *,
        host: bool,
    ) -> None:
        super().__init__(card, row_bytes, width.hidden, width.dense_bytes, cpu_share, host=host, content=False)
        self._trace, self._width = trace, width
        # Of active neurons, how many reach the second threshold: what the preset means on text like the calibration's.
        rule = preset.rule
        self._kept = min(1.0, (1 - rule.product) / (1 - rule.sparsity)) if rule.product else 1.0
        self._own = np.arange(width.neurons) * trace.values.shape[3] // width.neurons
        self.token = self.layer = 0
        self.asked = False

    def _find(self, x: Tensor, up: UpWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> Active:
        """The first question of a layer is about itself, the second about the next one."""
        values = (
            self._trace.ahead[self.token, self.layer + 1] if self.asked else self._trace.values[self.token, self.layer]
        )
        self.asked = True
        neurons = up.q.shape[1]
        parts = self._width.neurons // neurons
        found: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        strengths: list[NDArray[np.float16]] = []
        for expert, threshold in zip(calls.experts.tolist(), thresholds.tolist(), strict=True):
            first = expert % parts * neurons
            small = values[expert // parts][self._own[first : first + neurons]]
            found.append(np.flatnonzero(small >= threshold))
            strengths.append(small[found[-1]])
        ends = np.cumsum([0, *(len(one) for one in found)])
        active = torch.from_numpy(np.concatenate(found))
        return Active(torch.from_numpy(ends), active, torch.from_numpy(np.concatenate(strengths)).float())

    def _sum(
        self, x: Tensor, rows: ExpertRows, calls: Calls, active: Active, limits: Tensor | None, x_bits: int
    ) -> Partial:
        return torch.zeros_like(x), (active.offsets.diff() * self._kept).long()

    def _experts(self, x: Tensor, up: UpWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        active = self._find(x, up, work.calls, work.thresholds, x_bits).offsets.diff()
        return torch.zeros_like(x), torch.stack([active, (active * self._kept).long()], 1)


class _Guesses:
    """The trace's predictor."""

    name, attends = "recorded", False

    def __init__(self, device: ReplayDevice, trace: Trace) -> None:
        self._device, self._trace = device, trace

    def guess(self, layer: int, hidden: Tensor, output: Tensor | None) -> Tensor:
        """Nothing: the device has what would follow from it."""
        return hidden

    def experts(self, layer: int, hidden: Tensor, chosen: Tensor, guess: Tensor) -> Tensor:
        """(1, E) scores of layer + 1."""
        return torch.from_numpy(self._trace.scores[self._device.token, layer + 1][None])


@dataclass(frozen=True, slots=True)
class Played:
    """What a policy cost, per token, in virtual time.

    Attributes:
        seconds: of one token, all layers of the whole model. moved: bytes over the link, likewise.
        waited: seconds in which the GPU did nothing but wait for the link. busy: seconds in which the link was busy.
        counts: of the engine's own layers; empty for baselines. host: seconds of our own code on the host, as measured;
            0 where they were not counted.
    """

    seconds: float
    moved: float
    waited: float
    busy: float
    counts: tuple[LayerCounts, ...] = ()
    host: float = 0.0

    @property
    def hidden(self) -> float | None:
        """Share of the link's time during which nobody waited; None if nothing was moved."""
        return 1 - min(1.0, self.waited / self.busy) if self.busy else None


def play(
    card: Card,
    width: Width,
    trace: Trace,
    preset: Preset,
    parts: Parts,
    *,
    ahead: bool = True,
    cpu_share: float = 1.0,
    warm: int = 32,
    pool: int | None = None,
    host: bool = False,
) -> Played:
    """The engine on a card.

    Args:
        ahead: whether the next layer's rows are fetched ahead. warm: tokens before the clock is read.
        pool: rows; None for what the card's memory leaves. host: whether our own code's time on this host counts too.
            Of the trace's layers those that `parts.mix` names share the pool; without a mix all do.

    Raises:
        ValueError: the card has no room for a pool.
    """
    tokens, layers, _ = trace.index.shape
    packed = [width.layer(table) for table in trace.thresholds]
    row_bytes = packed[0].rows.layout.nbytes
    share = layers / width.layers
    device = ReplayDevice(card, width, trace, preset, row_bytes, cpu_share, host=host)
    mix = parts.mix or Mix(pool=layers)
    rows = room(card, width, trace, mix) if pool is None and mix.pool else pool or 0
    shared = Offload(device, parts, packed, rows, mix=mix)
    if ahead:
        shared.predictor = _Guesses(device, trace)
    control, telemetry = Control(preset), Telemetry(layers, trace.scores.shape[2])
    made: list[MoELayer] = []
    for index, (layer, place) in enumerate(zip(packed, mix.places, strict=True)):
        if place == "gpu":
            made.append(ResidentLayer(index, layer, shared, control, telemetry))
        else:
            kind = OffloadedLayer if place == "pool" else RamLayer
            made.append(kind(index, layer, layer, shared, control, telemetry))
    for before, after in itertools.pairwise(made):
        if isinstance(before, OffloadedLayer) and isinstance(after, OffloadedLayer):
            before.neighbours = Neighbours(following=after)
    x = torch.zeros(1, 1)
    started = moved = waited = busy = own = 0.0
    for token in range(tokens):
        if token == warm:
            started, moved, busy = device.now(), float(device.link.bytes_moved), device.link.busy_s
            own = device.clock.busy("host")
            control.counting = True
        for index, layer in enumerate(made):
            device.token, device.layer, device.asked = token, index, False
            chosen, weights = trace.index[token, index][None], trace.weights[token, index][None]
            layer(x, torch.from_numpy(chosen), torch.from_numpy(weights))
        device.clock.run("gpu", share * card.gpu_s(width.head_bytes, 0.0, 2))
        device.finish()
    waited = sum(counts.waited for counts in telemetry.layers)
    each = (tokens - warm) * share
    return Played(
        (device.now() - started) / each,
        (device.link.bytes_moved - moved) / each,
        waited / each,
        (device.link.busy_s - busy) / each,
        tuple(telemetry.layers),
        (device.clock.busy("host") - own) / each,
    )


CONTEXT = 4096  # tokens whose keys and values take memory
KV_BYTES = 2 * 1024 * 2  # of one token in one layer of Mixtral, 16 bit


def layers_held(card: Card, width: Width, trace: Trace) -> float:
    """How many of the trace's layers the card's memory holds with all their experts, besides everything else."""
    one = width.layer(trace.thresholds[0])
    each = one.up.q.shape[0] * one.up.bytes_per_expert() + one.rows.data.nbytes
    return max(0.0, min(trace.index.shape[1], _free(card, width, trace) / each))


def _free(card: Card, width: Width, trace: Trace) -> float:
    """Bytes of the card for experts, scaled from the whole model to the trace's layers."""
    fixed = width.layers * (width.dense_bytes + CONTEXT * KV_BYTES) + 2 * width.head_bytes
    return (card.vram_bytes - fixed) * trace.index.shape[1] / width.layers


def room(card: Card, width: Width, trace: Trace, mix: Mix | None = None) -> int:
    """Rows of a pool that the card's memory holds besides everything else. mix: of the trace's layers; None: all in it.

    Raises:
        ValueError: none.
    """
    mix = mix or Mix(pool=trace.index.shape[1])
    one = width.layer(trace.thresholds[0])
    experts, neurons, nbytes = one.rows.data.shape
    ups = experts * one.up.bytes_per_expert()
    free = _free(card, width, trace) - (mix.gpu + mix.pool) * ups - mix.gpu * one.rows.data.nbytes
    rows = int(free) // nbytes
    if rows < 1:
        raise ValueError(f"{card.name} has {card.vram_bytes / 1e9:.1f} GB, which leaves {free / 1e9:.1f} GB for rows")
    return min(rows, mix.pool * experts * neurons)
