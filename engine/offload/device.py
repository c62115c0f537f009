"""A device that computes while rows arrive over a link: a GPU, or its stand-in if there is none.

The engine asks every device for the same few operations: the up projections, rows in its memory, rows in RAM, and the
time. The throttled device is a test device: the CPU computes and RAM is its memory, but threads, bytes and the link's
slowness are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.cpu.offload_steps import Beside
from ...kernels.types import Active, Calls, Work
from ...kernels.weights import ExpertRows, SignalWeights
from ..host_copies import Copy, moved, to_host
from .asked import Asked, Listed
from .lane_rates import RateName, Rates
from .links.link import Link
from .links.transfer import Transfer
from .mix import ExpertsPlace

Numbers = NDArray[np.integer[Any]]
Partial = tuple[Tensor, Tensor]  # y (B, H), and how many neurons of each call reached the second threshold
Joined = Callable[[], Partial]  # waits for work that was started
Mark = Any  # a point in a device's work: an event, virtual seconds, or None if there is nothing to wait for


@dataclass(frozen=True, slots=True)
class Brought:
    """Up projections on their way to the device.

    Attributes:
        there: them, once their copies are under way, and the point in the work there from which they may be used.
    """

    there: Callable[[], tuple[SignalWeights, Mark]]


class Device:
    """Device memory behind a link, a processor beside it, and the CPU that shares the work.

    Attributes:
        name: for people. place: torch's name of where its tensors are. link: the way into its memory.
        rates: the lanes' speeds. cpu_share: of the CPU's threads that may work on rows, 0 to 1.
        real: whether `now` is real time. moves: how rows cross the link and why, in words.
        looks_ahead: whether the predictor "auto" fetches rows ahead in all layers, or where that was measured to pay.
    """

    real = True
    looks_ahead = True
    moves = ""

    def __init__(
        self,
        name: str,
        place: str,
        link: Link,
        rates: Rates,
        cpu_share: float = 1.0,
        kept: Path | None = None,
    ) -> None:
        """`kept`: the file in which the rates, corrected by observations, are saved for the next start."""
        self._kept = kept
        self.name, self.place, self.link, self.rates, self.cpu_share = name, place, link, rates, cpu_share
        self._cpu = ThreadPoolExecutor(1, thread_name_prefix="floe-cpu-lane")
        self._side: Any = None  # the stream of `bring`, whose thread copies to pinned memory first
        self._bringing = ThreadPoolExecutor(1, thread_name_prefix="floe-bring")

    def now(self) -> float:
        """Seconds, from no particular start."""
        return time.perf_counter()

    def host(self, place: ExpertsPlace, *, prompt: bool) -> AbstractContextManager[None]:
        """A context around the engine's own work on a layer of that place: a virtual clock counts its time."""
        return nullcontext()

    def began(self) -> None:
        """A step has asked for its absent rows, and for the sum of the rows that are there; see `host`."""

    def looks(self) -> None:
        """The engine looks one layer ahead; see `host`."""

    def fetches(self) -> None:
        """The engine sends for what was predicted; see `host`."""

    def meet(self, other: Device) -> None:
        """The host turns to this card for a moment while it works on a layer of another's: a virtual clock is set to
        that.
        """

    def dense(self, tokens: int) -> None:
        """The dense part of one layer was started for `tokens`; a virtual clock advances by that."""

    def up(
        self,
        x: Tensor,
        up: SignalWeights,
        calls: Calls,
        thresholds: Tensor,
        x_bits: int,
        also: Sequence[Tensor] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Active, Tensor, list[Tensor]]:
        """The active neurons; the host waits for the device here.

        Args:
            thresholds: (P,), infinite for calls that are left out. meanwhile: what the host does before it waits.

        Returns:
            them and their values on the host, the values on the device, and copies of `also` on the host.
        """
        asked = self.ask(x, up, calls, thresholds, x_bits, also)
        if meanwhile is not None:
            meanwhile()
        self.arrived(asked.copy)
        return asked.answer()

    def ask(
        self, x: Tensor, up: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int, also: Sequence[Tensor] = ()
    ) -> Asked:
        """`up` without waiting: its answer holds once `there` says so."""
        listed = self._list(x, up, calls, thresholds, x_bits)
        return Asked(listed[2], to_host([*listed, *also]))

    def there(self, copy: Copy) -> bool:
        """Whether a copy is on the host, without waiting."""
        return copy.event is None or copy.event.query()

    def arrived(self, copy: Copy) -> list[Tensor]:
        """A copy on the host: the only place where a decode step waits for the device."""
        return copy.arrived()

    def fetched(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on the host, by one copy that it waits for."""
        return self.arrived(to_host(tensors))

    def sent(self, *tensors: Tensor) -> list[Tensor]:
        """The tensors on the device, by one copy that nothing waits for."""
        if self.place == "cpu":
            return list(tensors)
        return moved(tensors, lambda tensor: tensor.is_cpu, self._to_device)

    def part(self, values: Tensor, offsets: Numbers, at: Numbers, places: Numbers) -> Active:
        """Some active neurons of P calls, on the device.

        Args:
            values: (N,) on the device, of all. offsets: (P + 1,) theirs.
            at, places: (M,) their positions among all, and where their rows are.
        """
        if values.is_cpu:
            return Active(torch.from_numpy(offsets), torch.from_numpy(places), taken(values, at))
        offsets_there, places_there, at_there = self.sent(*map(torch.from_numpy, (offsets, places, at)))
        return Active(offsets_there, places_there, values.index_select(0, at_there))

    def rows(
        self, x: Tensor, rows: ExpertRows, calls: Calls, active: Active, limits: Tensor | None, x_bits: int
    ) -> Partial:
        """The contribution of rows in device memory to y; they belong to one expert, and active.neurons are positions
        among them.
        """
        one = Calls(calls.tokens, torch.zeros_like(calls.experts), calls.weights)
        return self._sum(x, rows, one, active, limits, x_bits)

    def bring(self, up: SignalWeights) -> Brought:
        """Start copying up projections in RAM to the device, while it and the host compute."""
        if self.place == "cpu":
            return Brought(lambda: (up, None))
        if self._side is None:
            self._side = self._card.Stream(self.place)

        def sent() -> tuple[SignalWeights, Mark]:
            with torch.inference_mode(), self._card.stream(self._side):
                return up.mapped(self._to_device), self.mark()

        return Brought(self._bringing.submit(sent).result)

    def use(self, brought: Brought) -> SignalWeights:
        """The up projections: what computes next waits for them."""
        up, ready = brought.there()
        if ready is not None:
            stream = self._card.current_stream(self.place)
            stream.wait_event(ready)
            for part in up.parts().values():
                part.record_stream(stream)
        return up

    def mark(self) -> Mark:
        """This point in the device's work, for `reached`."""
        if self.place == "cpu":
            return None
        event = self._card.Event()
        event.record(self._card.current_stream(self.place))
        return event

    def reached(self, mark: Mark) -> None:
        """The host waits until the device has come this far."""
        if mark is not None:
            mark.synchronize()

    def expert(
        self, x: Tensor, up: SignalWeights, rows: ExpertRows, thresholds: Tensor, products: Tensor | None, x_bits: int
    ) -> Tensor:
        """One whole expert, the only one of `up` and `rows` in device memory, over many tokens; not weighted."""
        backend = kernels.choose(x.device)
        if backend.expert_at_once is not None:
            return backend.expert_at_once(x, up, rows, thresholds, products, x_bits)
        return self._one(x, up, rows, 0, (thresholds, products), x_bits)[0]

    def gathered(self, rows: Tensor, slots: Tensor, target: Tensor, places: Tensor) -> None:
        """Copy rows[slots] to target[places], both in device memory."""
        kernels.pool_scatter(target, places, rows.index_select(0, slots.to(rows.device)))

    def rows_beside(self, given: Beside, active: Active) -> Joined:
        """Start computing what rows in RAM add to y, on the CPU; `active` is there too. Returns what waits for it."""
        x, rows = given.hidden if given.hidden.is_cpu else self.fetched(given.hidden)[0], given.rows

        def work() -> Partial:
            return self._sum(x, rows, given.calls, active, given.limits, given.x_bits)

        started = self._beside(work, "cpu", active.neurons.numel(), rows.layout.nbytes)
        return lambda: self.joined(started)

    def expert_beside(
        self,
        x: Tensor,
        up: SignalWeights,
        rows: ExpertRows,
        expert: int,
        limits: tuple[Tensor, Tensor | None],
        x_bits: int,
    ) -> Future[Partial]:
        """Start one expert over many tokens on the CPU; y is not weighted."""

        def work() -> Partial:
            y, kept = self._one(x, up, rows, expert, limits, x_bits)
            return y, torch.tensor([kept])

        return self._beside(work, "cpu_batch", len(x), rows.data[0].nbytes)

    def whole(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        """A few tokens in experts that are all on the device: y (B, H), and counts (P, 2) as `kernels.moe_step`'s."""
        return kernels.moe_step(x, up, rows, work.calls, work.thresholds, work.products, x_bits=x_bits)

    def whole_beside(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        """The same by the CPU, which has the experts in RAM, at once; all tensors are on the CPU, y too."""
        return kernels.moe_step(x, up, rows, work.calls, work.thresholds, work.products, x_bits=x_bits)

    def joined(self, started: Future[Partial]) -> Partial:
        """The result of work started on the CPU, on the device, once it is there."""
        y, reached = self.sent(*started.result())
        return y, reached

    def finish(self) -> None:
        """The host waits until the device has finished all its work."""
        self._card.synchronize(self.place)

    def wait(self, transfer: Transfer) -> float:
        """Wait until the rows are there for the next computation; returns the seconds waited."""
        return self.link.wait(transfer)

    def close(self) -> None:
        """End the link and the CPU's thread."""
        self.link.close()
        self._cpu.shutdown()
        self._bringing.shutdown()
        if self._kept is not None:
            self.rates.save(self._kept)

    @property
    def _card(self) -> Any:
        """Torch's module of devices of this kind. `torch.Event`, and waits of `torch.accelerator`, would make a context
        on torch's current card too.
        """
        return torch.get_device_module(self.place)

    def _to_device(self, packed: Tensor) -> Tensor:
        return packed.pin_memory().to(self.place, non_blocking=True)

    # On a GPU the kernels are called without argument checks, which would copy values to the host: calls come from the
    # model's own router, and active neurons from the pool.

    def _list(self, x: Tensor, up: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> Listed:
        listed = None if x.is_cpu else kernels.choose(x.device).up_list
        if listed is not None:
            return listed(x, up, calls, thresholds, x_bits)
        found = self._find(x, up, calls, thresholds, x_bits)
        return found.offsets[1:], found.neurons, found.values

    def _find(self, x: Tensor, up: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> Active:
        if x.is_cpu:
            return kernels.signal_gemv(x, up, calls, thresholds, x_bits=x_bits)
        return kernels.choose(x.device).signal_gemv(x, up, calls, thresholds, x_bits)

    def _one(
        self,
        x: Tensor,
        up: SignalWeights,
        rows: ExpertRows,
        expert: int,
        limits: tuple[Tensor, Tensor | None],
        x_bits: int,
    ) -> tuple[Tensor, int]:
        y, _, kept = kernels.expert_swiglu(x, up, rows, expert, *limits, x_bits=x_bits)
        return y, kept

    def _sum(
        self, x: Tensor, rows: ExpertRows, calls: Calls, active: Active, limits: Tensor | None, x_bits: int
    ) -> Partial:
        if x.is_cpu:
            return kernels.sparse_swiglu(x, rows, calls, active, limits, x_bits=x_bits)
        return kernels.choose(x.device).sparse_swiglu(x, rows, calls, active, limits, x_bits)

    def _beside(self, work: Callable[[], Partial], what: RateName, count: int, nbytes: int) -> Future[Partial]:
        """Start work on `count` times `nbytes` bytes."""

        def timed() -> Partial:
            begun = time.perf_counter()
            with torch.inference_mode():
                found = work()
            self.rates.observed(what, count * nbytes, time.perf_counter() - begun, self.cpu_share)
            return found

        return self._cpu.submit(timed)


def taken(values: Tensor, at: Numbers) -> Tensor:
    """values[at] on the host, for ascending positions. By numpy: torch would call its threads."""
    if at.size == values.numel():
        return values
    words = values if values.element_size() == 4 else values.view(torch.int16)
    return torch.from_numpy(np.take(words.numpy(), at)).view(values.dtype)
