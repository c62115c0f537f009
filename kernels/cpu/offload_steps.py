"""Steps of layers over a compiled link: what `engine/offload/scheduler.py` defines, in a call at each end of a step.

What is on its way to the pool is known to the link alone; Python names no transfer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checks import index
from ..listed import Portion
from ..offload.located import Keys, Part
from ..offload.placing import Found, Placed, Way
from ..types import Calls, digits_of
from ..weights import ExpertRows
from .binding import check, codes, library, records
from .native import float32
from .pool_table import KINDS, Lists, PoolTable, found_record, way_record
from .weights import rows_record

_DTYPES = {kind: dtype for dtype, kind in KINDS.items()}


@dataclass(frozen=True, slots=True)
class Beside:
    """What the CPU computes a step's share from.

    Attributes:
        rows: in RAM. hidden: (B, H) on the CPU. limits: (P,) the second thresholds. All as for `kernels.sparse_swiglu`.
    """

    rows: ExpertRows
    hidden: Tensor
    calls: Calls
    limits: Tensor | None
    x_bits: int


class Share:
    """A step's share. y, kept: (B, H) float32 and (P,), filled once it is joined."""

    def __init__(self, beside: Beside) -> None:
        self.beside, self.record = beside, None
        self.y, self.kept = torch.empty(beside.hidden.shape), torch.empty(beside.calls.experts.shape, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class StepLists:
    """Memory for one token's steps, of P calls and `room` neurons, at addresses that a device may read as well.

    Attributes:
        offsets: (parts, P + 1) int64. at, places: (parts, room) int32. keys, slots: (room,) int32. All as in
            `floe_places`. y: (1, H) float32 and kept: (P,) int64, the CPU's share.
    """

    offsets: Tensor
    at: Tensor
    places: Tensor
    keys: Tensor
    slots: Tensor
    y: Tensor
    kept: Tensor

    def portion(self, part: int) -> Portion:
        """One of the lists, as a device adds it up."""
        return Portion(self.offsets[part], self.at[part], self.places[part])


class OffloadSteps:
    """A pool's steps.

    Raises:
        NativeUnavailableError: there is no compiled library.
    """

    def __init__(self, table: PoolTable, link: int, *, row_bytes: int, spared: int, rates: Any) -> None:
        """`rates`: `floe_rates`, corrected in place. The others: see `floe_offload`."""
        self._functions, self._table, self._lists = library(), table, Lists()
        self._offload: Any = records.offload(
            pool=table.native,
            rates=rates,
            link=link,
            row_bytes=row_bytes,
            spared=spared,
            visit=0,
            cpu_share=0.0,
            moved=0,
            busy=0.0,
        )
        self._share: int = self._functions.share_open()
        check(self._share)
        self._seconds = np.zeros(1)
        self._end = weakref.finalize(self, self._functions.share_free, self._share)
        self._found: Any = None  # of the step that was placed last

    def start(self, found: Found, way: Way, cpu_share: float, share: Share | None) -> Placed:
        """Begin a layer's turn: note what has arrived, place the step and send for what is copied.

        Args:
            cpu_share: of the threads, that the CPU's rows may use. share: to start at once where the CPU gets rows;
                None: it is not started.

        Raises:
            ValueError: an index out of range. RuntimeError: the link's failure.
        """
        record, over = self._table.record(found), way_record(way)
        self._offload.cpu_share, self._found = cpu_share, record
        lists, beside = self._lists.of(record), None if share is None else self._beside(share)
        code = self._functions.offload_start(self._of_now(), record, over, beside, lists.places, lists.placed)
        self.failed(code, way)
        return lists.filled()

    def finish(self, way: Way, computed: Callable[[], None]) -> Iterator[tuple[Part, float]]:
        """End the step: what has arrived, and the seconds waited for it; several times in a pool that is too small for
        all at once, with `computed`, which waits for the device, in between.

        Raises:
            RuntimeError: the link's failure.
        """
        record, over, lists, code = self._found, way_record(way), self._lists, codes.MORE
        while code == codes.MORE:
            lists.placed.waited = 0.0
            given = self._of_now(), record, over, self._table.flags, None, lists.places, lists.placed
            code = self._functions.offload_finish(*given)
            self.failed(code, way)
            yield lists.arrived(), lists.placed.waited
            if code == codes.MORE:
                computed()

    def lasting(self, found: Found, way: Way, beside: Beside, lists: StepLists) -> tuple[Any, Any]:
        """`floe_step` and `floe_placed` of one token's steps: over these lists, and what `found` has at any time.

        Args:
            found: with room for all neurons, of which those before the last offset count.

        Raises:
            ValueError: tensors of other types or shapes.
        """
        record = found_record(found)
        if record is None or not self._table.hears(found) or KINDS.get(beside.hidden.dtype) != record.kind:
            raise ValueError("the compiled kernels cannot take this step")
        room, parts = found.active.neurons.numel(), codes.PARTS
        for name, given, shape in (
            ("offsets", lists.offsets, (parts, found.experts.numel() + 1)),
            ("at", lists.at, (parts, room)),
            ("places", lists.places, (parts, room)),
            ("keys", lists.keys, (room,)),
            ("slots", lists.slots, (room,)),
            ("y", lists.y, tuple(beside.hidden.shape)),
            ("kept", lists.kept, tuple(found.experts.shape)),
        ):
            if given.shape != shape or not given.is_contiguous():
                raise ValueError(f"{name} must be contiguous and of shape {shape}, not {tuple(given.shape)}")
        share, self._found = Share(beside), record
        share.y, share.kept = lists.y, lists.kept
        placed = records.placed(wanted=0, reserved=0, looked=0, hit=0, transfer=0, done=-1, waited=0.0)
        places = records.places(
            room=room, offsets=lists.offsets, at=lists.at, places=lists.places, keys=lists.keys, slots=lists.slots
        )
        step = records.step(
            found=record,
            way=way_record(way),
            beside=self._beside(share),
            places=places,
            placed=placed,
            marks=self._table.flags,
            hidden=lists.y.numel(),
            late=0,
        )
        return step, placed

    def guessing(self, guess: Found, way: Way, named: Tensor) -> Any:
        """`floe_guess` of what a layer will probably need, over what `guess` has at any time.

        Args:
            guess: with room for all neurons. named: (experts,) int64, expected in that layer.

        Raises:
            ValueError: tensors of other types or shapes.
        """
        record = found_record(guess)
        if record is None or named.dtype is not torch.int64 or not named.is_contiguous():
            raise ValueError("the compiled kernels cannot take this guess")
        guessed, keys, slots = np.empty((3, record.room), np.int32)
        counted = dict.fromkeys(("guesses", "predicted", "needed", "right", "experts_right", "unused"), 0)
        return records.guess(
            found=record,
            way=way_record(way),
            named=named,
            guessed=guessed,
            keys=keys,
            slots=slots,
            runs=np.empty((record.calls, 2), np.int64),
            sent=np.empty((record.calls * way.pieces, 2), np.int64),
            experts=named.numel(),
            asked=-1,
            taken=0,
            **counted,
        )

    def of_now(self, cpu_share: float) -> Any:
        """`floe_offload` for a token's steps."""
        self._offload.cpu_share = cpu_share
        return self._of_now()

    def failed(self, code: int, way: Way) -> None:
        """Raise what an error of a step means."""
        if code == codes.LINK_FAILED:
            raise RuntimeError(self._functions.link_failure(way.link).decode())
        check(code)

    def begin_share(self, share: Share) -> None:
        """Start the CPU's share of the step that was placed last."""
        check(self._functions.share_start(self._beside(share), self._found, self._lists.places))

    def join_share(self, share: Share) -> float:
        """Fill the share that was started, once it is computed; returns the seconds since its start."""
        check(self._functions.share_join(share.record, self._seconds))
        return float(self._seconds[0])

    def fetch(self, layer: int, way: Way, keys: Keys, *, urgent: bool, score: float) -> None:
        """Request the rows of these absent keys, as many as get a slot.

        Raises:
            ValueError: a key out of range, present or named twice. RuntimeError: the link's failure.
        """
        index("layer", layer, self._table.layers)
        given = self._of_now(), layer, way_record(way), keys.size, keys, urgent, score
        taken = self._functions.offload_fetch(*given)
        self.failed(taken, way)

    def collect(self, others: bool) -> None:
        """Note what has arrived. others: whether transfers elsewhere have ended."""
        check(self._functions.offload_collect(self._of_now(), others))

    def forget(self, layer: int | None) -> None:
        """Give up what was fetched ahead for a layer (None: for all) and has not begun."""
        check(self._functions.offload_forget(self._of_now(), -1 if layer is None else layer))

    def await_all(self) -> None:
        """Wait until everything on its way to the pool has arrived."""
        check(self._functions.offload_await(self._of_now()))

    def _of_now(self) -> Any:
        if self._offload.pool != (now := self._table.address):
            self._offload.pool = now
        return self._offload

    def _beside(self, share: Share) -> Any:
        given = share.beside
        hidden, kind = given.hidden.contiguous(), self._found.kind
        if KINDS.get(hidden.dtype) != kind:
            hidden = hidden.to(_DTYPES[kind])
        share.record = records.beside(
            share=self._share,
            rows=rows_record(given.rows),
            hidden=hidden,
            tokens=given.calls.tokens.contiguous(),
            products=None if given.limits is None else float32(given.limits),
            y=share.y,
            kept=share.kept,
            digits=digits_of(given.hidden, given.x_bits),
            threads=torch.get_num_threads(),
        )
        return share.record
