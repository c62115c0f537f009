"""What kernels/cpu/offload does, in numpy: the work on a pool's tables, and what a step decides about its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from floe_chat.kernels.checks import index, indices
from floe_chat.kernels.cpu.pool_table import PoolTable, found_record
from floe_chat.kernels.offload.located import Keys, Part, Slots, check_landing, require
from floe_chat.kernels.offload.placing import Ahead, Found, Narrow, Placed, Way
from floe_chat.kernels.offload.pool import (
    ASKED,
    BROUGHT,
    COMING,
    EVICTED,
    FILLING,
    FINDS,
    FREE,
    FREE_COUNT,
    HAND,
    LAYER,
    MOST,
    READY,
    SPARE,
    VISITING,
    RowTable,
)
from floe_chat.kernels.offload.sharing import Lanes, cpu_rows
from numpy.typing import NDArray

# So many of the rows that a step copies are examined, whether they are worth keeping; the next ones in each step. What
# is needed often is soon copied again.
EXAMINED = 2048
REMEMBERED = 8  # each of so many times that a row is used, its mean is copied into its cell
BAR_SLOTS = 1024  # of a window, whose rows set the bar
FEWER = 512  # as many slots are kept free as the last steps needed at most, less this small part for each step since


@dataclass(frozen=True, slots=True)
class Located:
    """The active neurons of a step by where their rows are: there, on their way, or absent."""

    ready: Part
    coming: Part
    absent: Part


class StepTable(RowTable):
    """The definition."""

    @property
    def holds_all(self) -> bool:
        """Whether there is a slot for every row, so that none gives way."""
        return self.capacity >= self.slots.size

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
        _readable(found, self.experts)
        if found.heard is not None and found.heard.shape != (len(found.chosen), self.experts):
            raise ValueError("heard must be the scores of all experts for each token")
        self.keys_of(found.layer, *_numbers(found), found.width)

    def note(self, found: Found) -> None:
        """Count the use of a step's neurons.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        _readable(found, self.experts)
        self.count(found.layer, *_numbers(found), found.width)

    def ahead(self, guess: Found, way: Way | None = None) -> Ahead:
        """Slots for the absent neurons of a guess, those of the calls that weigh most first, for MOST of them at most.

        Args:
            way: as for `place`.

        Raises:
            ValueError: an index out of range, or a weight that is no number. Nothing has changed then. RuntimeError:
                the link's failure.
        """
        _readable(guess, self.experts)
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
            new = [key for key in dict.fromkeys(keys[slots[keys] < 0].tolist()) if key not in wanted]
            wanted.update(dict.fromkeys(new[: int(self.counters[MOST]) - before]))
            runs.append((call, len(wanted) - before))
        keys = np.array([*wanted], np.int64)
        taken = self.reserve(guess.layer, keys, urgent=False) if keys.size else np.zeros(0, np.int32)
        self.counters[ASKED] = taken.size
        return Ahead(guessed.astype(np.int32), keys[: taken.size].astype(np.int32), taken, runs)

    def right(self, found: Found, guessed: Narrow) -> int:
        """How many of a step's active neurons are among the guessed keys.

        Raises:
            ValueError: an index out of range.
        """
        _readable(found, self.experts)
        indices("guess", torch.from_numpy(guessed), self.width)
        return int(np.isin(self.keys_of(found.layer, *_numbers(found), found.width), guessed).sum())

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """Slots for the first M of these absent neurons (N,), free ones first; the rows that were in them are evicted.
        `urgent` and the policy: see `engine/offload/row_pool.py`.

        Raises:
            ValueError: a key out of range, present or named twice. Nothing has changed then.
        """
        index("layer", layer, self.layers)
        require("keys", keys, np.int64, (keys.size,))
        table = self.slots[layer * self.width : (layer + 1) * self.width]
        # A negative key read without its sign is larger than any.
        if keys.size and int(keys.view(np.uint64).max()) >= self.width:
            raise ValueError(f"a key is out of range 0..{self.width - 1}")
        if (table[keys] != -1).any():
            raise ValueError("a neuron to be loaded already has a slot")
        order = np.arange(keys.size, dtype=np.int32)
        table[keys] = order
        twice = (table[keys] != order).any()
        table[keys] = -1
        if twice:
            raise ValueError("a neuron is to be loaded twice")
        taken = self._taken(keys.size, urgent)
        keys = keys[: taken.size]
        self._book(layer, keys, taken, urgent)
        return taken

    def visit(self, wanted: int) -> Slots:
        """Slots for visitors, free ones first; rows are evicted if there are too few. Maybe fewer than wanted.

        Raises:
            ValueError: fewer than none.
        """
        if wanted < 0:
            raise ValueError(f"{wanted} rows cannot visit")
        wanted = min(wanted, self.capacity)
        taken, start = self._taken(wanted, urgent=True), self.counters[VISITING]
        self.visitors[start : start + taken.size] = taken
        self.counters[VISITING] += taken.size
        return taken

    def keep(self, layer: int, keys: Keys, slots: Slots, spared: int) -> Slots:
        """Give a place to those of the last visitors that are worth it, and evict as many rows as are missing then.

        Args:
            keys, slots: (N,) of all rows of the last `visit`, each once. spared: by score slots are kept free for the
                next step's visitors, this small part of the pool at most; free ones beyond are filled in any case.

        Returns:
            (M,) the slots of the rows that stay; they are filling.

        Raises:
            ValueError: other slots than the last visitors', or a key out of range or present. Nothing has changed then.
        """
        index("layer", layer, self.layers)
        require("keys", keys, np.int64, (keys.size,))
        require("slots", slots, np.int32, (keys.size,))
        first = int(self.counters[VISITING]) - keys.size
        if first < 0 or not np.array_equal(self.visitors[first : first + keys.size], slots):
            raise ValueError("rows to be kept must be the last visitors")
        if keys.size and not 0 <= int(keys.min()) <= int(keys.max()) < self.width:
            raise ValueError(f"a key is out of range 0..{self.width - 1}")
        if (self.slots[layer * self.width + keys] != -1).any() or np.unique(keys).size != keys.size:
            raise ValueError("a visitor has a slot already")
        if spared < 1:
            raise ValueError(f"a pool cannot keep 1 / {spared} of itself free")
        spare = int(self.counters[SPARE])
        spare = min(max(keys.size, spare - spare // FEWER), self.capacity // spared)
        spare = self.counters[SPARE] = 0 if self.holds_all or not self.rule.by_score else spare
        surplus = max(0, int(self.counters[FREE_COUNT] + self.counters[VISITING]) - spare)
        stays = self._worthy(layer, keys, surplus)
        kept = slots[stays]
        for at in stays[::-1]:  # the last visitor moves to the place of one that stays
            self.counters[VISITING] -= 1
            self.visitors[first + at] = self.visitors[self.counters[VISITING]]
        self._book(layer, keys[stays], kept, urgent=True)
        if keys.size and not self.holds_all:
            missing = spare - int(self.counters[FREE_COUNT] + self.counters[VISITING])
            self._put_free(self._evict(max(0, missing), urgent=True))
        return kept

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """These filling rows have arrived, or never will: then they are absent and their slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        require("slots", slots, np.int32, (slots.size,))
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.capacity:
            raise ValueError(f"a slot is out of range 0..{self.capacity - 1}")
        if (self.states[slots] != FILLING).any() or np.unique(slots).size != slots.size:
            raise ValueError("a slot is not filling, or named twice")
        self.counters[COMING] -= slots.size
        if arrived:
            self.states[slots] = READY
            self.residents += self._per_expert(self.keys[slots])
        else:
            self.states[slots] = FREE
            self.slots[self.keys[slots]] = -1
            self._put_free(slots)

    def remember(self, slots: Slots) -> None:
        """Copy the means of the rows in these slots."""
        if not self.holds_all:
            self.kept[slots] = self.means.raw.reshape(-1)[self.keys[slots]]

    def _taken(self, wanted: int, urgent: bool) -> Slots:
        """Free slots, and those of evicted rows if these are too few."""
        end, spare = int(self.counters[FREE_COUNT]), 0 if urgent else int(self.counters[SPARE])
        start = max(0, end - wanted, min(end, spare - int(self.counters[VISITING])))
        self.counters[FREE_COUNT] = start
        taken = self.free[start:end][::-1].copy()
        if taken.size == wanted:
            return taken
        return np.concatenate([taken, self._evict(wanted - taken.size, urgent)])

    def _worthy(self, layer: int, keys: Keys, surplus: int) -> Keys:
        """Which of the last visitors stay: the first ones, as many as there is room for in any case, and of some others
        those that are worth more than the bar.
        """
        if not self.rule.by_score or surplus >= keys.size:
            return np.arange(keys.size)
        rest = keys.size - surplus
        looked = surplus + (self.counters[BROUGHT] * EXAMINED + np.arange(min(EXAMINED, rest))) % rest
        some = keys[np.sort(looked)]
        worth = self.means.raw[layer][some] * self._factors()[layer * self.experts + some // self.neurons]
        return np.concatenate([np.arange(surplus), np.sort(looked)[worth > self.bar[0]]])

    def _book(self, layer: int, keys: Keys, slots: Slots, urgent: bool) -> None:
        """These rows are on their way into their slots from now on."""
        mark = self.counters[FINDS]
        self.counters[BROUGHT] += 1
        self.counters[COMING] += slots.size
        self.slots[layer * self.width + keys] = slots
        self.states[slots] = FILLING
        self.keys[slots] = keys + layer * self.width
        self.kept[slots] = self.means.raw[layer][keys]
        if not self.rule.by_score:
            mark += self.counters[BROUGHT]
        elif not urgent:
            mark += 1 + (layer - self.counters[LAYER] - 1) % self.layers
        self.marks[slots] = low(mark)
        if urgent:
            self.busy[layer * self.experts + keys // self.neurons] = 1

    def _evict(self, wanted: int, urgent: bool) -> Slots:
        """Evict up to `wanted` rows that are ready and not in use; returns their slots. Sets the bar anew."""
        target, count = max(self.rule.sample * wanted, self.rule.smallest_window), 0
        enough, left = max(target // 2, wanted), self.capacity if wanted else min(target, self.capacity)
        first = hand = int(self.counters[HAND])
        worths = [np.zeros(0, np.float32)]
        # If much is in use, a window has too few to choose from, and the hand continues, at most once round.
        while left and count < enough:
            end = min(hand + min(target, left), self.capacity)
            ready = (self.states[hand:end] == READY) & (self.busy[self.keys[hand:end] // self.neurons] == 0)
            worth = self._worth(slice(hand, end), urgent)
            np.copyto(worth, np.inf, where=~ready)
            worths.append(worth)
            count += np.count_nonzero(ready)
            left -= end - hand
            hand = end % self.capacity
        self.counters[HAND] = hand
        worth = np.concatenate(worths)
        some = worth[:BAR_SLOTS]
        if urgent and self.rule.by_score and (loose := np.sort(some[some < np.inf])).size:
            self.bar[0] = loose[int(self.rule.bar * loose.size)]
        best = np.argpartition(worth, wanted)[:wanted] if wanted < worth.size else np.arange(worth.size)
        best = best[worth[best] < np.inf]
        evicted = (first + best) % self.capacity if best.size else best
        self._drop(evicted)
        self.counters[EVICTED] += evicted.size
        return evicted.astype(np.int32)

    def _factors(self) -> NDArray[np.float32]:
        """(L · E,) what the stored means are multiplied by: score, turn, growth."""
        means = self.means
        away = (np.arange(self.layers) - self.counters[LAYER] - 1) % self.layers
        turns = 1 - self.rule.turn * away / self.layers
        return np.fmax((means.recent * turns[:, None] / means.growth).astype(np.float32), 0).reshape(-1)

    def _worth(self, window: slice, urgent: bool) -> NDArray[np.floating[Any]]:
        """The worth of the rows in a window of slots by the rule; infinite if more than a prefetch may replace."""
        counters, keys = self.counters, self.keys[window]
        if not self.rule.by_score:
            return -(low(counters[FINDS] + counters[BROUGHT]) - self.marks[window]).view(np.uint32).astype(np.float64)
        worth = self.kept[window] * self._factors()[keys // self.neurons]
        promised, least = self.marks[window] - low(counters[FINDS]) > 0, np.float32(self.rule.prefetch_worth)
        np.maximum(worth, promised * least, out=worth)
        if not urgent:
            np.copyto(worth, np.inf, where=worth >= least)
        return worth


def definition(table: RowTable) -> StepTable:
    """The definition's calls on another table's memory."""
    one = object.__new__(StepTable)
    one.__dict__ = table.__dict__
    return one


class CompiledTable(PoolTable, StepTable):
    """The compiled table, with the definition's `locate` and `count`, which no compiled call does alone."""


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


def _readable(found: Found, experts: int) -> None:
    if found_record(found) is None:
        raise ValueError("tensors that no compiled call reads")
    indices("expert", found.chosen.flatten(), experts)


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


def low(count: int | np.int64) -> np.int32:
    """The lower 32 bits: of two such, what lies between is exact as long as it is less than 2**31."""
    return np.int64(count).astype(np.int32)


def landing(source: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> NDArray[np.int64]:
    """The slots (N,) of a transfer as int64, after checking that nothing in it is out of range.

    Args:
        source: (N,) which of `rows` rows. slots: (N,) int32, which of `capacity` slots each goes to.

    Raises:
        ValueError: a row or slot out of range, or a slot named twice; not as many rows as slots.
    """
    check_landing(source, slots, rows, capacity)
    if source.size:
        ordered = np.sort(slots)
        if source.min() < 0 or source.max() >= rows:
            raise ValueError(f"row out of range 0..{rows - 1}")
        if ordered[0] < 0 or ordered[-1] >= capacity:
            raise ValueError(f"slot out of range 0..{capacity - 1}")
        if (ordered[1:] == ordered[:-1]).any():
            raise ValueError("a slot is named twice")
    return slots.astype(np.int64)


def check_offsets(offsets: NDArray[np.int64], count: int) -> None:
    if offsets[0] or (np.diff(offsets) < 0).any() or offsets[-1] != count:
        raise ValueError(f"offsets must rise from 0 to the number of neurons, {count}")


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
    for call in lightest(np.array(weights, np.float64)):
        taken[call] = min(rows, missing[call])
        rows -= taken[call]
    return taken


def lightest(weights: NDArray[np.floating]) -> list[int]:
    """Calls by weight, those that weigh nothing that is a number last."""
    return np.argsort(np.where(np.isnan(weights), np.inf, weights), kind="stable").tolist()
