"""What a card's tokens did in layers whose rows are in a pool: noted layer by layer, counted once a token for all of
them, and added to the telemetry when somebody reads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ....kernels.cpu.binding import codes
from ...experts.offloaded_layer import OffloadedLayer
from ...experts.ruled_layer import RuledLayer
from ...telemetry import LayerCounts
from .card_lists import Form

_SEEN = "chosen", "routed", "thresholds", "reached"


class Counted(Protocol):
    """A layer: under the preset that its tokens were computed by, `floe_placed` of the last one, and `floe_guess` if
    the layer before looks ahead.
    """

    layer: OffloadedLayer
    ruled: RuledLayer
    form: Form
    placed: Any
    guess: Any


class Noted:
    """What is noted of the steps of layers that share a form.

    Attributes:
        places: numbers of the layers. seen: of each, the record's first bytes. sizes, kept: of each part and call, with
            the number of active neurons behind the parts.
    """

    def __init__(self, form: Form, places: list[int]) -> None:
        self.form, self.places, count = form, np.array(places), len(places)
        where = form.record.places
        self._where = {name: where[name] for name in _SEEN}
        nbytes = max(part.stop for part in self._where.values())
        self.source: NDArray[np.uint8] = form.record.packed[:nbytes]
        self.ends: NDArray[np.int64] = form.lists.offsets.numpy()[:, -1]
        self.reached: NDArray[np.int64] = form.lists.kept.numpy()
        self.seen = np.zeros((count, -(-nbytes // 8) * 8), np.uint8)
        self.sizes = np.zeros((count, codes.PARTS + 1), np.int64)
        self.kept = np.zeros((count, self.reached.size), np.int64)

    def row(self, row: int) -> tuple[NDArray[Any], ...]:
        """Where a layer's steps are noted, and what: each place before its source."""
        return self.seen[row, : self.source.size], self.source, self.sizes[row], self.ends, self.kept[row], self.reached

    def field(self, name: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        """A part of the first `count` layers' records."""
        return self.seen[:count, self._where[name]].view(dtype)


class CardCounts:
    """Counts tokens; nothing here waits for the card but `drain`.

    Attributes:
        noted: of each layer, see `Noted.row`.
    """

    def __init__(self, layers: Sequence[Counted], reached: Tensor) -> None:
        """`reached`: on the device, neurons of the last step that reached the second threshold."""
        self._layers, self._reached, count = layers, reached, len(layers)
        forms = {id(one.form): one.form for one in layers}
        members = {key: [i for i, one in enumerate(layers) if id(one.form) == key] for key in forms}
        self._groups = [Noted(form, members[key]) for key, form in forms.items()]
        rows = {int(place): (group, row) for group in self._groups for row, place in enumerate(group.places)}
        self.noted = [rows[place][0].row(rows[place][1]) for place in range(count)]
        self._calls = np.zeros((count, layers[0].layer.packed.rows.data.shape[0]), np.int64)
        self._computed, self._kept, self._replaced = np.zeros((3, count), np.int64)
        self._parts = np.zeros((count, codes.PARTS + 1), np.int64)
        self._looked = [(0, 0, 0.0)] * count  # calls, hits, seconds waited
        self._owed = 0  # layers of the last token, whose last one's `reached` is on the device
        self._asked = False

    def add(self, count: int) -> None:
        """Count a token that went through the first `count` layers, which have noted their steps."""
        before = np.zeros(count, np.int64)  # of the layer before, or the last one of the token before
        for group in self._groups:
            places = group.places[group.places < count]
            n = len(places)
            chosen = group.field("chosen", n, np.int64)
            np.add.at(self._calls, (places[:, None], chosen), 1)
            self._computed[places] += np.isfinite(group.field("thresholds", n, np.float32)).sum(1)
            before[places] = group.field("reached", n, np.int64)[:, 0]
            sizes = group.sizes[:n]
            self._parts[places] += sizes
            self._kept[places] += np.where(sizes[:, codes.PART_BESIDE] > 0, group.kept[:n].sum(1), 0)
            if group.form.residents is not None:
                routed = group.field("routed", n, np.int64)
                self._replaced[places] += (chosen[:, :, None] != routed[:, None]).all(-1).sum(1)
        if self._owed:
            self._kept[self._owed - 1] += before[0]
        self._kept[: count - 1] += before[1:]
        self._owed = count
        self._looked[:count] = [
            (looked + placed.looked, hit + placed.hit, waited + placed.waited)
            for (looked, hit, waited), placed in zip(self._looked, [one.placed for one in self._layers], strict=False)
        ][:count]
        if not self._asked:
            self._asked = True
            self._layers[0].layer.telemetry.later(self.drain)

    def leave_out(self) -> None:
        """A token is not counted, nor what the last one left on the device if it has not been read."""
        self._owed = 0

    def drain(self) -> None:
        """Add everything to the telemetry, between two tokens."""
        self._asked = False
        if self._owed:
            self._kept[self._owed - 1] += int(self._reached)
            self._owed = 0
        for place, one in enumerate(self._layers):
            ready, coming, copied, beside, _arrived, active = self._parts[place].tolist()
            counts, left_out = one.layer.telemetry.layers[one.layer.index], active - ready - coming - copied - beside
            if one.guess is not None:
                _guessed(counts, one.guess, one.layer)
            calls, kept = self._calls[place].tolist(), int(self._kept[place])
            if not any(calls):
                continue
            one.layer.add_totals(one.ruled, calls, int(self._computed[place]), active, kept)
            counts.ready += ready
            counts.coming += coming
            counts.copied += copied
            counts.on_cpu += beside
            counts.left_out += left_out
            counts.bytes -= left_out * one.ruled.costs[1]  # `add_totals` counts them as read
            counts.substituted += int(self._replaced[place])
            looked, hit, waited = self._looked[place]
            counts.looked, counts.hit, counts.waited = counts.looked + looked, counts.hit + hit, counts.waited + waited
        for table in (self._calls, self._computed, self._kept, self._replaced, self._parts):
            table.fill(0)
        self._looked = [(0, 0, 0.0)] * len(self._layers)


def _guessed(counts: LayerCounts, guess: Any, layer: OffloadedLayer) -> None:
    """Add what a `floe_guess` has counted up, and let it begin again."""
    counts.guessed += guess.predicted
    counts.needed += guess.needed
    counts.right += guess.right
    counts.unused += guess.unused * layer.shared.memory.row_bytes
    counts.experts_guessed += guess.guesses * guess.experts
    counts.experts_needed += guess.guesses * guess.experts
    counts.experts_right += guess.experts_right
    for name in ("guesses", "predicted", "needed", "right", "unused", "experts_right"):
        setattr(guess, name, 0)
