"""A simulated card: decisions, bytes and results are real; time is calculated from the card's profile.

It shows, and tests, what a schedule would cost on a card (`cards.py`), on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from ....kernels import operations as kernels
from ....kernels.types import Active, Calls, Work
from ....kernels.weights import ExpertRows, SignalWeights
from ...host_copies import Copy
from ..asked import Asked
from ..cards import (
    CHUNK_BYTES,
    DENSE_LAUNCHES,
    FIND_LAUNCHES,
    GROUPED_LAUNCHES,
    LAUNCHES,
    PREFIX,
    SUM_LAUNCHES,
    Card,
    expert_launches,
)
from ..device import Brought, Device, Mark, Partial
from ..lane_rates import RateName
from ..links.link import Link
from ..mix import ExpertsPlace
from .virtual_clock import Clock


class Turns:
    """The one host beside several virtual cards, which work one after the other: whose turn it is."""

    def __init__(self) -> None:
        self._now: VirtualDevice | None = None

    def take(self, device: VirtualDevice) -> None:
        """The host turns to this card; the stream comes from the one before."""
        before, self._now = self._now, device
        if before is not None and before is not device:
            device.follow(before)

    def aside(self, device: VirtualDevice) -> AbstractContextManager[None]:
        """Inside, the thread simulates this card while another has the turn."""
        now = self._now
        return nullcontext() if now is None or now is device else now.clock.aside()


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of the engine's own code for one layer and token with a real card, where graphs and compiled steps run,
    as plans count them (`measured_figures.Figures`).

    Attributes:
        gpu, ram: of a layer whose experts are all on the card, and what one in RAM adds. pool, behind: of one with a
            pool, until absent rows are asked for, and the rest. ahead, fetch: what looking ahead adds there, and
            sending for what was predicted.
    """

    gpu: float
    ram: float
    pool: float
    behind: float
    ahead: float
    fetch: float


class VirtualDevice(Device):
    """The CPU computes what a card would, and the card's profile says how long that would take.

    The engine's own code counts with the time that it takes with a real card; in a prompt, with its real time here.
    Around the layers the CPU computes attention instead of launching it, so only launches are counted.

    Attributes:
        alone: whether it has all of the model, so that a token is one CUDA graph.
    """

    real = False
    looks_ahead = False

    def __init__(
        self,
        card: Card,
        row_bytes: int,
        hidden: int,
        dense_bytes: int,
        cpu_share: float = 1.0,
        *,
        dense_weights: int | None = None,
        host: HostTimes | None = None,
        content: bool = True,
        turns: Turns | None = None,
    ) -> None:
        """`row_bytes`: of one neuron. `dense_bytes`: of the weights of one layer that are no experts'.

        `dense_weights`: how many those are; None: one a byte. `host`: the host's own time; without it times
        depend on the profile alone. `content`: whether rows have any. `turns`: with the other cards of the
        machine.
        """
        self._turns = turns or Turns()
        self._comes: tuple[float, Card] | None = None  # when another card has the stream, and that card
        self.clock, self.card, self._host, self.alone = Clock(), card, host, False
        self._due: list[float] = []  # of the host's time in this layer, what is to come
        self._together = False  # whether all of this layer's experts are computed at once
        self._dense_bytes, self._content = dense_bytes, content
        self._dense_weights, self._hidden = dense_weights or dense_bytes, hidden
        # A row is two vectors of `hidden` weights: a product and a sum for each.
        self._flops = 4.0 * hidden
        self._true = card.rates(self._flops / row_bytes)
        self._ends: dict[Future[Partial], float] = {}
        link = _link(card, self.clock, row_bytes, content=content)
        super().__init__(f"{PREFIX}{card.name}", "cpu", link, card.rates(self._flops / row_bytes), cpu_share)

    def now(self) -> float:
        """Virtual seconds."""
        return self.clock.now

    def host(self, place: ExpertsPlace, *, prompt: bool) -> AbstractContextManager[None]:
        """Inside, the host's own time is counted."""
        self._turns.take(self)
        self._together = prompt and place == "gpu" and self.card.grouped
        if self._host is None:
            return nullcontext()
        return self.clock.host() if prompt else self._step(place, self._host)

    @contextmanager
    def _step(self, place: ExpertsPlace, host: HostTimes) -> Generator[None]:
        """A step's times, each where it comes: when the dense part is under way; with a pool, once the active neurons
        are known, once the sum of the rows that are there is under way, and at last; in RAM, at last.
        """
        dense = 0.0 if place == "pool" else host.gpu
        rest: dict[ExpertsPlace, list[float]] = {
            "gpu": [],
            "cpu": [host.ram],
            "pool": [host.pool, host.behind / 2, host.behind / 2],
        }
        self._due = [dense, *rest[place]]
        yield
        while self._due:
            self._spend()

    def _spend(self) -> None:
        if self._due:
            self.clock.run("host", self._due.pop(0))

    def began(self) -> None:
        """The rest of the host's time comes while the device and the link work."""
        self._spend()

    def dense(self, tokens: int) -> None:
        """One layer's attention, norms and router; in a prompt each token attends to half of the others."""
        self.arrive(tokens)
        flops = 2.0 * self._dense_weights * tokens + 2.0 * self._hidden * tokens**2
        # Of a prompt, each kernel is launched by itself.
        self._gpu(self._dense_bytes, flops, DENSE_LAUNCHES, None if tokens > 1 else 0 if self.alone else 1)
        self._spend()

    def follow(self, other: VirtualDevice) -> None:
        """Go on where another card has got to; the next work waits for its stream, see `arrive`."""
        self.meet(other)
        self._comes = other.clock.end("gpu"), other.card

    def arrive(self, tokens: int) -> None:
        """What the GPU gets now waits for the stream of so many tokens, if that comes from another card."""
        if self._comes is not None:
            self.clock.wait("gpu", self._arrival(*self._comes, tokens))
            self._comes = None

    def meet(self, other: Device) -> None:
        """See `Device`."""
        assert isinstance(other, VirtualDevice), "virtual cards have virtual neighbours"
        self.clock.wait("host", other.clock.now)
        self.clock.wait("cpu", other.clock.end("cpu"))

    def _arrival(self, sent: float, other: Card, tokens: int) -> float:
        """By way of RAM: one copy down and one up, of 16-bit numbers."""
        nbytes = 2 * self._hidden * tokens
        ways = ((card.link_bytes_s, card.link_latency_s) for card in (other, self.card))
        return sent + sum(latency + nbytes / rate for rate, latency in ways)

    def looks(self) -> None:
        """The host looks one layer ahead."""
        if self._host is not None:
            self.clock.run("host", self._host.ahead)

    def fetches(self) -> None:
        """The host sends for rows."""
        if self._host is not None:
            self.clock.run("host", self._host.fetch)

    def ask(
        self, x: Tensor, up: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int, also: Sequence[Tensor] = ()
    ) -> Asked:
        """The up projections of the called experts, but for those that are left out."""
        with self.clock.aside(), self._turns.aside(self):
            asked = super().ask(x, up, calls, thresholds, x_bits, also)
            weights, made = up.q.shape[1] * up.layout.vector.n, int(thresholds.isfinite().sum())
            self._gpu(made * up.bytes_per_expert(), 2.0 * made * weights, FIND_LAUNCHES, 0 if len(x) == 1 else None)
            asked.copy.at = self.clock.end("gpu")
        return asked

    def there(self, copy: Copy) -> bool:
        """By the virtual clock."""
        return copy.at <= self.clock.now

    def arrived(self, copy: Copy) -> list[Tensor]:
        """The host waits until then."""
        self.clock.wait("host", copy.at)
        return copy.tensors

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
        """See `Device`; the host decides then."""
        found = super().up(x, up, calls, thresholds, x_bits, also, meanwhile)
        self._spend()
        return found

    def rows(
        self, x: Tensor, rows: ExpertRows, calls: Calls, active: Active, limits: Tensor | None, x_bits: int
    ) -> Partial:
        """Rows of the pool."""
        with self.clock.aside():
            found = super().rows(x, rows, calls, active, limits, x_bits)
            count = active.neurons.numel()
            nbytes = _read(count, rows.layout.nbytes, found)
            self._gpu(nbytes, self._flops * count, SUM_LAUNCHES, 1 if len(x) == 1 else None)
        return found

    def bring(self, up: SignalWeights) -> Brought:
        """One copy over the link."""
        nbytes = up.q.shape[0] * up.bytes_per_expert()
        ready = self.clock.run("link", self.card.copy_s(nbytes))
        return Brought(lambda: (up, ready))

    def use(self, brought: Brought) -> SignalWeights:
        """The GPU waits."""
        up, ready = brought.there()
        self.clock.wait("gpu", ready)
        return up

    def mark(self) -> Mark:
        """When the GPU will have done what it has been given."""
        return self.clock.end("gpu")

    def reached(self, mark: Mark) -> None:
        """The host waits."""
        self.clock.wait("host", mark or 0.0)

    def whole(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        """Experts of a layer that is all on the card; nothing waits."""
        with self.clock.aside():
            y, counts = self._experts(x, up, rows, work, x_bits)
            nbytes, flops = self._of_calls(up, rows, work, counts)
            launches = GROUPED_LAUNCHES if self._together else LAUNCHES["experts_step"]
            self._gpu(nbytes, flops, launches, 0 if self.alone and len(x) == 1 else None)
        return y, counts

    def whole_beside(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        """Host and GPU wait for the CPU, which begins once the GPU has got that far."""
        self.clock.sync("gpu")
        with self.clock.aside():
            y, counts = self._experts(x, up, rows, work, x_bits)
            nbytes, _ = self._of_calls(up, rows, work, counts)
            end = self.clock.run("cpu", self._true.cpu_latency_s + nbytes / (self._true.cpu_bytes_s * self.cpu_share))
        self.clock.wait("gpu", end)
        self.clock.wait("host", end)
        return y, counts

    def _experts(self, x: Tensor, up: SignalWeights, rows: ExpertRows, work: Work, x_bits: int) -> Partial:
        return kernels.moe_step(x, up, rows, work.calls, work.thresholds, work.products, x_bits=x_bits)

    def _of_calls(self, up: SignalWeights, rows: ExpertRows, work: Work, counts: Tensor) -> tuple[float, float]:
        """Bytes that these calls read, and their operations. counts: (P, 2) of active neurons and those that go on."""
        made, active = int(work.thresholds.isfinite().sum()), counts[work.thresholds.isfinite()]
        weights, neurons = up.q.shape[1] * up.layout.vector.n, int(active[:, 0].sum())
        nbytes = made * up.bytes_per_expert() + _read(neurons, rows.layout.nbytes, (active, active[:, 1]))
        return nbytes, 2.0 * made * weights + self._flops * neurons

    def expert(
        self, x: Tensor, up: SignalWeights, rows: ExpertRows, thresholds: Tensor, products: Tensor | None, x_bits: int
    ) -> Tensor:
        """A whole expert: three matrices, for all tokens."""
        neurons = rows.data.shape[1]
        nbytes = neurons * rows.layout.nbytes + up.bytes_per_expert()
        # At once with those of few tokens, which come first (`whole`)
        launches = 0 if self._together else expert_launches(grouped=self.card.grouped)
        with self.clock.aside():
            self._gpu(nbytes, 1.5 * self._flops * neurons * len(x), launches)
            return super().expert(x, up, rows, thresholds, products, x_bits)

    def gathered(self, rows: Tensor, slots: Tensor, target: Tensor, places: Tensor) -> None:
        """Read once and written once."""
        with self.clock.aside():
            self._gpu(2 * slots.numel() * rows.shape[1], 0.0, 1)
            if self._content:
                super().gathered(rows, slots, target, places)

    def joined(self, started: Future[Partial]) -> Partial:
        """The host waits for the CPU, and so does the GPU."""
        end = self._ends.pop(started)
        self.clock.wait("gpu", end)
        self.clock.wait("host", end)
        return started.result()

    def finish(self) -> None:
        """The host waits."""
        self.clock.sync("gpu")

    def _beside(self, work: Callable[[], Partial], what: RateName, count: int, nbytes: int) -> Future[Partial]:
        """Done at once; the CPU's lane is charged the time that it would take."""
        with self.clock.aside():
            found = work()
        rate, read = self._true.cpu_batch_bytes_s, float(count * nbytes)
        if what == "cpu":
            rate, read = self._true.cpu_bytes_s, _read(count, nbytes, found)
        seconds = self._true.cpu_latency_s + read / (rate * self.cpu_share)
        self.rates.observed(what, count * nbytes, seconds, self.cpu_share)
        done: Future[Partial] = Future()
        done.set_result(found)
        self._ends[done] = self.clock.run("cpu", seconds)
        return done

    def _gpu(self, nbytes: float, flops: float, kernels: int, graphs: int | None = None) -> None:
        """graphs: that these kernels begin, if they are in one; 0 for a part of one."""
        card = self.card
        seconds = card.gpu_s(nbytes, flops, kernels) if graphs is None else card.graph_s(nbytes, flops, kernels, graphs)
        self.clock.run("gpu", seconds)


def _read(rows: int, nbytes: int, found: Partial) -> float:
    """Bytes of so many rows, whose down halves are read only where the second threshold is reached."""
    return nbytes * (rows + int(found[1].sum())) / 2


def _link(card: Card, clock: Clock, nbytes: int, *, content: bool) -> Link:
    """The link of a card for rows of `nbytes`: bytes arrive at once, if `content` is moved at all; the clock counts the
    queue's time. Raises NativeUnavailableError: there is no compiled library.
    """
    return Link(
        *("virtual", PREFIX + card.name, nbytes),
        chunk=max(1, CHUNK_BYTES // nbytes),
        rate=min(card.link_bytes_s, card.pack_bytes_s),
        latency=card.link_latency_s,
        clock=clock.record,
        content=content,
    )
