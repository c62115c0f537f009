"""Where a step's absent rows are computed and which slots they get: the definition of the compiled decisions.

`cpu/native_pool.py` has the compiled calls, which leave the same tables. Neurons are counted in the means only after
all is placed, so that what delays a transfer is short.

Shapes: B tokens, K experts of each, P calls, N active neurons, E experts, F neurons of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import index, indices
from ..types import Active
from .located import Keys, Located, Part, Slots, check_offsets, require
from .pool import BROUGHT, FILLING, FINDS, LAYER, READY, REMEMBERED, RowTable, low
from .sharing import Lanes, lightest, share

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
        for call in lightest(-guess.weights.float().numpy()):
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
