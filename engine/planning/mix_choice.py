"""Where to put each layer of a model: of all mixes that fit a device's memory, the one that answers in the least time,
counting a prompt of `PROMPT` tokens for `ANSWER` tokens of answer.

Layers take the same memory, so a mix is three counts (`offload/mix.py`), and all of them are tried by the cost model;
layers in which a preset skips more go to the CPU first. With nothing in a pool a mix is a static placement, as
llama.cpp's --n-cpu-moe makes one: no plan is slower than the best of these. What fits some memory fits more of it, so
more memory never makes a plan slower.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...models.errors import UsageError
from ...models.quantities import memory as size
from ..offload.lane_rates import Rates
from ..offload.mix import ExpertsPlace, Mix
from ..ranges import Wanted
from . import memory_plan
from .footprint import Footprint
from .memory_plan import DeviceShares, Needs
from .prompt_estimate import prompt_layer
from .speed_estimate import ANSWER, Held, Speeds, TokenWork, layer_time

STEPS = 100  # sizes of a pool that are compared: shares of the rows of its layers


@dataclass(frozen=True, slots=True)
class Placed:
    """A mix and its pool.

    Attributes:
        rows: of the pool. share: of the rows of the pool's layers, rounded down to a step: what is counted on.
        ram: share of what is read from RAM that fits there. seconds: of its layers, for a token of an answer and its
            part of the prompt.
    """

    mix: Mix
    rows: int
    share: float
    ram: float
    seconds: float = 0.0

    @property
    def held(self) -> Held:
        """As the cost model takes it."""
        return Held(gpu=True, pool=self.share, ram=self.ram, mix=self.mix)


@dataclass(frozen=True)
class Costs:
    """What layers cost by place and pool, whatever memory there is: keep it to compare several amounts."""

    takes: Footprint
    work: TokenWork
    speeds: Speeds

    @functools.cached_property
    def until(self) -> dict[ExpertsPlace, NDArray[np.float64]]:
        """(layers + 1, 2, STEPS + 1) by place, of the first layers: their seconds, and the bytes that they read from
        the disk if nothing is in RAM.

        Layers come with the least work first.
        """
        places: tuple[ExpertsPlace, ...] = ("gpu", "pool", "cpu")
        alike = self.takes.sizes.layers * [self.work]
        works = [self.work.layers[layer] for layer in self.work.order] or alike
        sums: dict[ExpertsPlace, NDArray[np.float64]] = {}
        for place in places:
            column = functools.cache(functools.partial(self._column, place))
            each = np.array([column(one) for one in works])
            sums[place] = np.concatenate((np.zeros_like(each[:1]), each.cumsum(0)))
        return sums

    def first(self, layers: int) -> Costs:
        """The same of so many layers, where all are alike."""
        few = dataclasses.replace(self.takes, sizes=dataclasses.replace(self.takes.sizes, layers=layers))
        part = Costs(few, self.work, self.speeds)
        part.__dict__["until"] = {place: sums[: layers + 1] for place, sums in self.until.items()}
        return part

    def _column(self, place: ExpertsPlace, work: TokenWork) -> NDArray[np.float64]:
        """(2, STEPS + 1)."""
        steps = range(STEPS + 1) if place == "pool" else range(1)
        rates = self.speeds.rates(self.takes, work)
        times = [_shared(self.takes, work, self.speeds, place, step / STEPS, rates) for step in steps]
        return np.broadcast_to(np.array(times).T, (2, STEPS + 1))


def choose(costs: Costs, needs: Needs, budget: int, ram: int) -> tuple[Placed, Placed] | None:
    """The best mix, and the best static one; None if the device has no room for any.

    Args:
        budget: bytes of the device for weights, keys and values. ram: bytes that programs may use.
    """
    return choose_in(costs, needs, budget, memory_plan.room(ram, costs.takes))


def choose_in(costs: Costs, needs: Needs, budget: int, room: int) -> tuple[Placed, Placed] | None:
    """`choose` with so many bytes of RAM for what is read of the pack while answering."""
    mixes = list(_fitting(needs, budget))
    if not mixes:
        return None
    rows = np.array([max(0, needs.most_rows(mix, budget)) for mix in mixes])
    seconds, share = _seconds(costs, mixes, rows, max(0, room))
    found: list[Placed] = []
    for chosen in (np.ones(len(mixes), np.bool_), np.array([mix.pool == 0 for mix in mixes])):
        at, step = np.unravel_index(np.where(chosen[:, None], seconds, np.inf).argmin(), seconds.shape)
        mix, most = mixes[int(at)], int(rows[at])
        full = mix.pool * needs.experts * needs.neurons
        used = most if (int(step) + 1) * full > STEPS * most else -(-int(step) * full // STEPS)
        mix = dataclasses.replace(mix, order=costs.work.order)
        time = float(seconds[at, step])
        found.append(Placed(mix, used, int(step) / STEPS, float(share[at, step]), time))
    return found[0], found[1]


def asked(needs: Needs, budget: int, wanted: Wanted, order: tuple[int, ...]) -> tuple[Mix, int | None] | None:
    """The mix of a kind that a person wants, and the rows of its pool (None: as many as fit); None if it does not fit.

    As many layers as fit, next to a pool of the wanted size, share it, or are whole on the device. The CPU has
    the others.

    Args:
        order: of the layers, see `Mix`.

    Raises:
        UsageError: there is a pool, and none of the wanted size.
    """
    if wanted.kind == "cpu":
        mixes = [needs.every("cpu")]
    elif wanted.kind == "static":
        mixes = [Mix(count, 0, needs.layers - count, order) for count in range(needs.layers, -1, -1)]
    else:
        mixes = _pooled(needs, order)
    fitting = [mix for mix in mixes if needs.fits(mix, budget)]
    if not fitting or wanted.pool is None:
        return (fitting[0], None) if fitting else None
    rows, every = wanted.pool // needs.row, needs.layers * needs.experts * needs.neurons
    least, most = pool_rows(needs, budget) or (0, 0)
    for mix in fitting:
        if least <= rows and min(rows, every) <= needs.most_rows(mix, budget):
            return mix, rows
    hint = f"Give {size(least * needs.row)} to {size(most * needs.row)}, or no size for as many layers as fit."
    raise UsageError(f"A pool of {size(wanted.pool)} does not suit this model and device", "", hint)


def pool_rows(needs: Needs, budget: int) -> tuple[int, int] | None:
    """The fewest and the most rows of a pool; None if the device has no room for one."""
    rows = [needs.most_rows(mix, budget) for mix in _pooled(needs, ()) if needs.fits(mix, budget)]
    return (needs.top_k * needs.neurons, max(rows)) if rows else None


def _pooled(needs: Needs, order: tuple[int, ...]) -> list[Mix]:
    """With as many layers in a pool as there are, or fewer; the CPU has the others."""
    return [Mix(0, count, needs.layers - count, order) for count in range(needs.layers, 0, -1)]


def share(needs: Needs, shares: DeviceShares) -> float:
    """The share of its layers' rows that a pool has, rounded down to a step; 1 where all rows are on the device."""
    if shares.mix is None or not (of := (shares.mix.pool or shares.mix.gpu) * needs.experts * needs.neurons):
        return 0.0
    return shares.rows * STEPS // of / STEPS


def _fitting(needs: Needs, budget: int) -> Iterator[Mix]:
    """All mixes that fit, those with the fewest layers in a pool first, then those with the most on the device."""
    for pool in range(needs.layers + 1):
        rest = needs.layers - pool

        def fits(cpu: int, pool: int = pool, rest: int = rest) -> bool:
            return needs.fits(Mix(rest - cpu, pool, cpu), budget)

        # The first layer of the CPU's takes a buffer on the device; each further one only leaves room there.
        first = bisect.bisect_left(range(1, rest + 1), True, key=fits) + 1
        for cpu in (*((0,) if fits(0) else ()), *range(first, rest + 1)):
            yield Mix(rest - cpu, pool, cpu)


def _seconds(
    costs: Costs, mixes: list[Mix], rows: NDArray[np.int64], room: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of all layers for a token of an answer and its part of a prompt, (mixes, STEPS + 1), by the pool's share,
    infinite where memory is short; and how much of what is read from RAM fits there, likewise."""
    counts = np.array([(mix.gpu, mix.pool, mix.cpu) for mix in mixes])
    _, pool, cpu = (counts[:, kind, None].astype(np.float64) for kind in range(3))
    shares = np.arange(STEPS + 1) / STEPS
    takes, layers = costs.takes, costs.takes.sizes.layers
    each, ups = takes.rows // layers, takes.ups // layers
    read = cpu * (each + ups) + pool * each * (1 - shares)
    ram = np.minimum(1.0, room / np.maximum(read, 1.0))
    seconds, away = _of_kinds(costs.until, counts)
    seconds = seconds + (1 - ram) * away / costs.speeds.disk
    fits = shares * STEPS * pool * takes.sizes.experts * takes.sizes.intermediate <= STEPS * rows[:, None]
    # Without a pool its size means nothing.
    fits &= (pool > 0) | (np.arange(STEPS + 1) == 0)
    return np.where(fits, seconds, np.inf), ram


def _of_kinds(
    until: dict[ExpertsPlace, NDArray[np.float64]], counts: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds, and bytes read from the disk if nothing is in RAM, (mixes, STEPS + 1). counts: (mixes, 3).

    The first layers, with the least work, are the CPU's, the last on the device.
    """
    gpu, pool, cpu = until["gpu"], until["pool"], until["cpu"]
    last = len(gpu) - 1
    first = last - counts[:, 0]
    total = cpu[counts[:, 2]] + pool[first] - pool[counts[:, 2]] + gpu[last] - gpu[first]
    return total[:, 0], total[:, 1]


def _shared(
    takes: Footprint, work: TokenWork, speeds: Speeds, place: ExpertsPlace, pool: float, rates: Rates
) -> tuple[float, float]:
    """One layer's seconds for a token of an answer and its part of the prompt, and their bytes from the disk."""
    token = layer_time(takes, work, speeds, place, pool, rates=rates)
    prompt = prompt_layer(takes, work, speeds, place, pool, rates=rates)
    return token.seconds + prompt.seconds / ANSWER, token.away + prompt.away / ANSWER
