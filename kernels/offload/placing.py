"""Where a step's absent rows are computed and which slots they get: the definition of the compiled decisions.

`cpu/native_pool.py` has the compiled calls, which leave the same tables. Neurons are counted in the means only after
all is placed, so that what delays a transfer is short.

Shapes: B tokens, K experts of each, P calls, N active neurons, E experts, F neurons of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import index, indices
from ..types import Active
from .located import Keys, Located, Part, Slots, check_offsets, require
from .pool import BROUGHT, FILLING, FINDS, LAYER, READY, REMEMBERED, RowTable, low

Narrow = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Found:
    """What a step found active in a layer; all on the CPU.

    Attributes:
        width: neurons of one of the calls' experts, F or less where they are parts of the layer's.
        active: of P calls; its neurons and values may have room for more than offsets name. experts, weights: (P,) of
            each. chosen, scores: (B, K) whole experts, the router's scores.
        late: (P,) what |values| must reach for rows that are absent; None where every row is waited for.
        heard: (B, E) the router's scores of all experts; None: those of the chosen ones count, as 0 for the others.
        native: what `cpu/native_pool.py` made of it.
    """

    layer: int
    width: int
    active: Active
    experts: Tensor
    weights: Tensor
    chosen: Tensor
    scores: Tensor
    late: Tensor | None = None
    heard: Tensor | None = None
    native: Any = field(init=False, repr=False, compare=False, default=None)


class Lanes(NamedTuple):
    """Seconds until a lane has its first row, and for each: CPU and link. `cpu_row` is infinite where the CPU may not
    take a share.

    Both lanes read the same RAM. memory_cpu, memory_copy: seconds that it takes for a row on each; 0 if its rate is not
    known or no limit.
    """

    cpu_start: float
    cpu_row: float
    copy_start: float
    copy_row: float
    memory_cpu: float = 0.0
    memory_copy: float = 0.0


@dataclass(frozen=True, slots=True)
class Way:
    """How a layer's rows get into the pool: what compiled calls need to send for them by themselves.

    Attributes:
        link: handle of a compiled link. rows, capacity: of source and target. source, target: (rows, nbytes) uint8 in
            RAM and (capacity, nbytes) on the device; None if bytes have no content.
        piece, pieces: rows that a piece of a prefetch has at least, and pieces of a call's at most.
        pooled: whether the compiled steps (`cpu/native_steps.py`) note what becomes of the rows.
        native: what `cpu/native_pool.py` made of it.
    """

    link: int
    source: Tensor | None
    target: Tensor | None
    rows: int
    capacity: int
    piece: int
    pieces: int
    pooled: bool = False
    native: Any = field(init=False, repr=False, compare=False, default=None)


@dataclass(frozen=True, slots=True)
class Placed:
    """The parts of a step's active neurons. Valid until the next step is placed, but for keys and slots.

    Attributes:
        parts: ready and coming are there, and on their way; copied and beside absent, for the link and for the CPU;
            what is absent, or on its way, and done without is in none. sizes: neurons of each.
        keys: (M,) int32 of the copied rows, each once. slots: int32, of the first of them: the last visitors.
        looked, hit: calls with active neurons, and those of which half the rows are present.
        transfer: number of the transfer that brings the rows, if one was sent.
    """

    parts: Sequence[Part]
    sizes: Sequence[int]
    keys: Narrow
    slots: Slots
    looked: int
    hit: int
    transfer: int = 0

    ready = property(lambda self: self.parts[0])
    coming = property(lambda self: self.parts[1])
    copied = property(lambda self: self.parts[2])
    beside = property(lambda self: self.parts[3])


@dataclass(frozen=True, slots=True)
class Ahead:
    """What to fetch for a guess.

    Attributes:
        guessed: (N,) int32 keys of all of its neurons. keys, slots: (M,) int32 of the absent ones that got a slot.
        runs: calls in the order of `keys`, and how many of them are each one's; the last ones may have got no slot.
        sent: numbers of the transfers that bring the rows, if they were sent, and how many keys end with each.
    """

    guessed: Narrow
    keys: Narrow
    slots: Slots
    runs: list[tuple[int, int]]
    sent: list[tuple[int, int]] = field(default_factory=list)


class StepTable(RowTable):
    """`RowTable` with what a step decides about its rows."""

    def locate(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Located:
        """Where a step's active neurons are; no row of their experts is evicted until `release`.

        Args:
            experts: (P,). offsets, neurons: (P + 1,) and (N,) as in `Active`; several calls may name the same neuron.
            width: neurons of one of these experts: F, or less where they are parts of the layer's.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        keys = self.keys_of(layer, experts, offsets, neurons, width)
        slots = self.slots[layer * self.width + keys]
        states = self.states[slots]
        self.busy[layer * self.experts + experts[np.diff(offsets) > 0] * width // self.neurons] = 1
        self.counters[FINDS] += 1
        self.counters[LAYER] = layer
        if self.rule.marks_use:
            self.marks[slots] = low(self.counters[FINDS] + self.counters[BROUGHT])
        slots = slots.astype(np.int64)
        return Located(
            _part(offsets, states == READY, slots),
            _part(offsets, states == FILLING, slots),
            _part(offsets, slots < 0, keys),
        )

    def hears(self, found: Found) -> bool:
        """Whether the scores of all experts, if given, have the right shape."""
        return found.heard is None or found.heard.shape == (len(found.chosen), self.experts)

    def hear(self, layer: int, scores: NDArray[np.float64]) -> None:
        """The router's scores (E,) of one step; ignored if one is not finite, since means would never recover."""
        if np.isfinite(scores.sum()):
            for means, rate in ((self.means.recent, self.rule.score_rate), (self.means.habit, self.rule.habit_rate)):
                means[layer] += rate * (scores - means[layer])

    def count(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> None:
        """Record the use of a step's active neurons, given as to `locate`.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        keys = self.keys_of(layer, experts, offsets, neurons, width)
        expert, rate = keys // self.neurons, self.rule.use_rate
        raw, growth = self.means.raw[layer], self.means.growth[layer]
        growth[np.bincount(expert, minlength=self.experts) > 0] /= 1 - rate
        raw[keys] += (rate * growth).astype(np.float32)[expert]
        slots = self.slots[layer * self.width + keys]
        self.remember(slots[slots >= 0][self.counters[FINDS] // self.layers % REMEMBERED :: REMEMBERED])
        for large in np.flatnonzero(growth > self.rule.largest_growth):
            raw.reshape(self.experts, -1)[large] /= np.float32(growth[large])
            growth[large] = 1.0
            slots = self.slots.reshape(self.layers, self.experts, -1)[layer, large]
            self.remember(slots[slots >= 0])

    def keys_of(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Keys:
        """The keys (N,) of a step's active neurons; raises ValueError."""
        _check(self, layer, experts, offsets, neurons, width)
        return np.repeat(experts * width, np.diff(offsets)) + neurons

    def place(self, found: Found, lanes: Lanes, way: Way | None = None) -> Placed:
        """Place a step's rows. Those that are present stay until `release`; those that are copied are visitors.

        Args:
            way: to send for the copied rows at once; not here: compiled.

        Raises:
            ValueError: an index out of range. Nothing has changed then. RuntimeError: the link's failure.
        """
        self.check(found)
        experts, offsets, neurons = _numbers(found)
        located = self.locate(found.layer, experts, offsets, neurons, found.width)
        self.hear(found.layer, _heard(found, self.experts))
        copied, coming = _needed(located.absent, found), _needed(located.coming, found)
        sizes = np.diff(copied.offsets)
        copied, beside = cut(copied, sizes - np.array(share(sizes.tolist(), found.weights.tolist(), lanes), np.int64))
        keys = copied.places if _once(found, experts, offsets, neurons) else np.unique(copied.places)
        slots = self.visit(keys.size)
        active, missing = np.diff(offsets), np.diff(located.absent.offsets)
        parts = [_narrow(part) for part in (located.ready, coming, copied, beside)]
        return Placed(
            parts,
            [part.at.size for part in parts],
            keys.astype(np.int32),
            slots,
            int((active > 0).sum()),
            int(((active > 0) & (2 * (active - missing) >= active)).sum()),
        )

    def check(self, found: Found) -> None:
        """Refuse what cannot be placed: raises ValueError."""
        indices("expert", found.chosen.flatten(), self.experts)
        if not self.hears(found):
            raise ValueError("heard must be the scores of all experts for each token")
        self.keys_of(found.layer, *_numbers(found), found.width)

    def note(self, found: Found) -> None:
        """Count the use of a step's neurons.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        self.count(found.layer, *_numbers(found), found.width)

    def ahead(self, guess: Found, way: Way | None = None) -> Ahead:
        """Slots for the absent neurons of a guess, those of the calls that weigh most first.

        Args:
            way: as for `place`.

        Raises:
            ValueError: an index out of range, or a weight that is no number. Nothing has changed then. RuntimeError:
                the link's failure.
        """
        if guess.weights.isnan().any():
            raise ValueError("a call's weight must be a number")
        experts, offsets, neurons = _numbers(guess)
        guessed = self.keys_of(guess.layer, experts, offsets, neurons, guess.width)
        slots = self.slots[guess.layer * self.width :]
        wanted: dict[int, None] = {}
        runs: list[tuple[int, int]] = []
        for call in _lightest(-guess.weights.float().numpy()):
            before = len(wanted)
            keys = guessed[offsets[call] : offsets[call + 1]]
            wanted.update(dict.fromkeys(keys[slots[keys] < 0].tolist()))
            runs.append((call, len(wanted) - before))
        keys = np.array([*wanted], np.int64)
        taken = self.reserve(guess.layer, keys, urgent=False) if keys.size else np.zeros(0, np.int32)
        return Ahead(guessed.astype(np.int32), keys[: taken.size].astype(np.int32), taken, runs)

    def right(self, found: Found, guessed: Narrow) -> int:
        """How many of a step's active neurons are among the guessed keys.

        Raises:
            ValueError: an index out of range.
        """
        indices("guess", torch.from_numpy(guessed), self.width)
        return int(np.isin(self.keys_of(found.layer, *_numbers(found), found.width), guessed).sum())


def share(missing: Sequence[int], weights: Sequence[float], lanes: Lanes) -> list[int]:
    """Split a step's absent rows between the link and the CPU so that both end together (Fiddler).

    With c of M rows on the CPU, it ends at cpu_start + c · cpu_row, the link (and the device behind it) at copy_start +
    (M - c) · copy_row; a lane without rows ends at 0. RAM ends at c · memory_cpu + (M - c) · memory_copy. The
    best split is none, all, or next to a crossing of two of the lines. Of equally quick splits the one that copies more
    is taken, and the CPU gets the rows of the calls with the lowest router weights: copied rows stay in the pool, and
    experts with high scores are needed again soonest.

    Args:
        missing: absent rows of each call. weights: the router's weight of each call.

    Returns:
        Rows of each call that the CPU computes.
    """
    rows = cpu_rows(lanes, sum(missing))
    taken = [0] * len(missing)
    for call in _lightest(np.array(weights, np.float64)):
        taken[call] = min(rows, missing[call])
        rows -= taken[call]
    return taken


def cpu_rows(lanes: Lanes, total: int) -> int:
    """How many of so many rows the CPU computes."""
    if lanes.cpu_row == np.inf or not total:
        return 0
    splits = [0, total]
    if total > 1:
        for crossing in _crossings(lanes, total):
            below = int(min(max(crossing, 1.0), total - 1))
            splits += below, min(below + 1, total - 1)
    return min(splits, key=lambda rows: (split_end(lanes, rows, total), rows))


def split_end(lanes: Lanes, rows: int, total: int) -> float:
    """When all of so many rows are done if the CPU computes `rows` of them."""
    cpu = lanes.cpu_start + lanes.cpu_row * rows if rows else 0.0
    copy = lanes.copy_start + lanes.copy_row * (total - rows) if rows < total else 0.0
    return max(cpu, copy, lanes.memory_copy * total - (lanes.memory_copy - lanes.memory_cpu) * rows)


def _crossings(lanes: Lanes, total: int) -> Iterator[float]:
    """How many rows the CPU computes where its line crosses the link's, and where it crosses memory's."""
    ahead = lanes.copy_start - lanes.cpu_start + lanes.copy_row * total
    yield ahead / (lanes.copy_row + lanes.cpu_row)
    if not (lanes.memory_cpu or lanes.memory_copy):
        return
    saved = lanes.memory_copy - lanes.memory_cpu  # by a row on the CPU
    if lanes.cpu_row + saved > 0:
        yield (lanes.memory_copy * total - lanes.cpu_start) / (lanes.cpu_row + saved)
    if saved <= 0:  # memory ends no sooner then: the link's line crosses its line at a best split too
        yield (lanes.copy_start + (lanes.copy_row - lanes.memory_copy) * total) / (lanes.copy_row - saved)


def cut(part: Part, first: Keys) -> tuple[Part, Part]:
    """The first so many (P,) neurons of each call, and the rest: neurons are sorted by falling importance, and what is
    copied stays in the pool.
    """
    ahead = np.arange(part.at.size) < np.repeat(part.offsets[:-1] + first, np.diff(part.offsets))
    return some(part, ahead), some(part, ~ahead)


def some(part: Part, which: NDArray[np.bool_]) -> Part:
    """The neurons `which` (M,) of a part."""
    return Part(np.concatenate(([0], np.cumsum(which)))[part.offsets], part.at[which], part.places[which])


def _needed(part: Part, found: Found) -> Part:
    """All but what is done without. The row of a NaN value is awaited, so that the NaN reaches the result."""
    if found.late is None:
        return part
    limits = np.repeat(found.late.float().numpy(), np.diff(part.offsets))
    return some(part, ~(np.abs(found.active.values.float().numpy()[part.at]) < limits))


def _heard(found: Found, experts: int) -> NDArray[np.float64]:
    """The router's scores (E,), the mean over the tokens."""
    heard = np.zeros(experts)
    if found.heard is not None:
        for token in found.heard.double().numpy():
            heard += token / len(found.heard)
        return heard
    for expert, score in zip(found.chosen.flatten().tolist(), found.scores.flatten().tolist(), strict=True):
        heard[expert] += score / len(found.chosen)
    return heard


def _once(found: Found, experts: Keys, offsets: Keys, neurons: Keys) -> bool:
    """Whether no neuron can be named twice: one token, each expert called once, ascending neurons."""
    bounds = [(start, end) for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)]
    called = [expert for expert, (start, end) in zip(experts.tolist(), bounds, strict=True) if end > start]
    rising = all((np.diff(neurons[start:end]) > 0).all() for start, end in bounds)
    return len(found.chosen) == 1 and len({*called}) == len(called) and rising


def _numbers(found: Found) -> tuple[Keys, Keys, Keys]:
    active = found.active
    offsets, neurons = active.offsets.numpy(), active.neurons.numpy().astype(np.int64)
    return found.experts.numpy(), offsets, neurons[: max(int(offsets.flat[-1]), 0)] if offsets.size else neurons


def _lightest(weights: NDArray[np.floating]) -> list[int]:
    """Calls by weight, those that weigh nothing that is a number last."""
    return np.argsort(np.where(np.isnan(weights), np.inf, weights), kind="stable").tolist()


def _narrow(part: Part) -> Part:
    return Part(part.offsets, part.at.astype(np.int32), part.places.astype(np.int32))


def _check(table: RowTable, layer: int, experts: NDArray[np.int64], offsets: Keys, neurons: Keys, width: int) -> None:
    index("layer", layer, table.layers)
    require("experts", experts, np.int64, (experts.size,))
    require("offsets", offsets, np.int64, (experts.size + 1,))
    require("neurons", neurons, np.int64, (neurons.size,))
    if width < 1 or table.neurons % width:
        raise ValueError(f"experts of {width} neurons are not parts of {table.neurons}")
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < table.width // width:
        raise ValueError(f"an expert is out of range 0..{table.width // width - 1}")
    if neurons.size and not 0 <= int(neurons.min()) <= int(neurons.max()) < width:
        raise ValueError(f"a neuron is out of range 0..{width - 1}")
    check_offsets(offsets, neurons.size)


def _part(offsets: NDArray[np.int64], mask: NDArray[np.bool_], places: NDArray[np.int64]) -> Part:
    at = np.flatnonzero(mask)
    return Part(np.concatenate(([0], np.cumsum(mask)))[offsets], at, places[at])
