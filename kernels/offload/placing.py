"""What a step found, and where its absent rows are computed and which slots they get (`cpu/pool_table.py`).

Neurons are counted in the means only after
all is placed, so that what delays a transfer is short.

Shapes: B tokens, K experts of each, P calls, N active neurons, E experts, F neurons of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..types import Active
from .located import Part, Slots

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
        native: what `cpu/pool_table.py` made of it.
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
        pooled: whether the compiled steps (`cpu/offload_steps.py`) note what becomes of the rows.
        native: what `cpu/pool_table.py` made of it.
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
