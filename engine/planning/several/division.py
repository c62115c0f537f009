"""Which layers each of several cards gets: neighbouring ones, so that a token crosses from card to card once.

Of the divisions that fit, the one with the least estimated time, each card's layers placed as if it were alone
(`mix_choice.py`). The search moves single layers between neighbours from a division in proportion to memory; its steps
become smaller. The first card has the embedding and the head besides its layers.

Dividing each layer's experts instead would have both cards and both links at work in every layer. But the two experts
of a token are on different cards in only four of seven cases (8 experts, 2 of them chosen), each layer would cross
twice, and the host would do the work of a layer on both. By the cost model, on two RTX 3060 that hold all of Mixtral a
token takes 15.0 ms by layers and 14.7 by experts: not worth a second way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....models.errors import UsageError
from ....models.quantities import memory as size
from .. import mix_choice
from ..footprint import Footprint
from ..memory_plan import Needs
from ..mix_choice import Costs, Placed
from ..running import of_layers
from ..speed_estimate import Speeds, TokenWork

_STEPS = (8, 4, 2, 1)  # layers that move at once
_LACKING = 1e6  # seconds that a division which does not fit counts, besides one for each byte that is missing


@dataclass(frozen=True, slots=True)
class CardRoom:
    """A card: the machine's speeds with it, and bytes for weights, keys and values. name: for people."""

    name: str
    speeds: Speeds
    budget: int


@dataclass(frozen=True, slots=True)
class Part:
    """A card's layers, of the model's with experts.

    Attributes:
        needs: of these layers. best, static: how they are placed best, and best with nothing in a pool.
    """

    layers: range
    needs: Needs
    best: Placed
    static: Placed


@dataclass(frozen=True)
class Divided:
    """A model that is to be divided, and RAM's bytes for what is read of it while answering."""

    takes: Footprint
    work: TokenWork
    needs: Needs
    cards: tuple[CardRoom, ...]
    room: int

    def parts(self) -> tuple[Part, ...]:
        """The fastest division.

        Raises:
            UsageError: more cards than layers, or a card has too little memory.
        """
        counts = self.in_proportion()
        for step in _STEPS:
            while (better := self._moved(counts, step)) != counts:
                counts = better
        parts = self._parts(counts)
        if parts is None:
            raise self._too_little(counts)
        return parts

    def given(self, counts: Sequence[int]) -> tuple[Part, ...]:
        """The division with so many layers for each card.

        Raises:
            UsageError: it is none of this model's, or a card has too little memory.
        """
        parts = self._parts(self.checked(counts))
        if parts is None:
            raise self._too_little(tuple(counts))
        return parts

    def checked(self, counts: Sequence[int]) -> tuple[int, ...]:
        """The counts, if they are a division of this model's layers among these cards.

        Raises:
            UsageError: they are none.
        """
        if len(counts) != len(self.cards) or min(counts) < 1 or sum(counts) != self.needs.layers:
            told = ", ".join(map(str, counts))
            raise UsageError(f"{self.needs.layers} layers cannot be divided into {told}", "", "")
        return tuple(counts)

    def in_proportion(self) -> tuple[int, ...]:
        """Layers of each card, in proportion to the cards' memory; at least one.

        Raises:
            UsageError: more cards than layers.
        """
        if len(self.cards) > self.needs.layers:
            cause = f"It has {self.needs.layers} layers with experts, and each card needs one."
            raise UsageError(f"A model cannot be divided among {len(self.cards)} cards", cause, "Name fewer cards.")
        layers, total = self.needs.layers, sum(card.budget for card in self.cards) or 1
        ends = [round(layers * sum(card.budget for card in self.cards[:n]) / total) for n in range(len(self.cards) + 1)]
        for n in range(1, len(ends)):
            ends[n] = min(max(ends[n], ends[n - 1] + 1), layers - (len(self.cards) - n))
        return tuple(after - before for before, after in itertools.pairwise(ends))

    def _moved(self, counts: tuple[int, ...], step: int) -> tuple[int, ...]:
        """The best of these counts and those with so many layers moved from one card to another."""
        found = [counts]
        for giving, taking in ((a, b) for a in range(len(counts)) for b in range(len(counts)) if a != b):
            if counts[giving] > step:
                moved = list(counts)
                moved[giving] -= step
                moved[taking] += step
                found.append(tuple(moved))
        return min(found, key=self._seconds)

    def _seconds(self, counts: tuple[int, ...]) -> float:
        total = 0.0
        for card, layers in enumerate(ranges(counts)):
            part = self._part(card, self._key(layers))
            if part is None:
                total += _LACKING + self._lacking(card, layers)
            else:
                total += part.best.seconds + (0.0 if card else self.takes.head / self.cards[0].speeds.gpu)
        return total

    def _parts(self, counts: tuple[int, ...]) -> tuple[Part, ...] | None:
        parts: list[Part] = []
        for card, layers in enumerate(ranges(counts)):
            part = self._part(card, self._key(layers))
            if part is None:
                return None
            parts.append(dataclasses.replace(part, layers=layers))
        return tuple(parts)

    def _key(self, layers: range) -> range:
        """Layers of as much work, the same for as many of them where all are alike."""
        return layers if self.work.layers else range(len(layers))

    @functools.cached_property
    def _costs(self) -> dict[int, Costs]:
        """Of all layers, by card."""
        found: dict[int, Costs] = {}
        for number, card in enumerate(self.cards):
            same = next((n for n in found if self.cards[n].speeds == card.speeds), None)
            found[number] = Costs(self.takes, self.work, card.speeds) if same is None else found[same]
        return found

    @functools.cached_property
    def _known(self) -> dict[tuple[int, int, bool, range], Part | None]:
        return {}

    def _part(self, card: int, layers: range) -> Part | None:
        """A card's layers as they are placed best; None if they do not fit."""
        costs, room = self._costs[card], self.cards[card]
        key = id(costs), room.budget, card == 0, layers
        if key not in self._known:
            needs = part_needs(self.needs, self.takes, len(layers), first=card == 0)
            if self.work.layers:
                sizes = dataclasses.replace(self.takes.sizes, layers=len(layers))
                few = dataclasses.replace(self.takes, sizes=sizes)
                costs = Costs(few, of_layers(self.work, layers), room.speeds)
            else:
                costs = costs.first(len(layers))
            ram = self.room * len(layers) // self.needs.layers
            found = mix_choice.choose_in(costs, needs, room.budget, ram)
            self._known[key] = None if found is None else Part(layers, needs, *found)
        return self._known[key]

    def _lacking(self, card: int, layers: range) -> int:
        """Bytes without which a card cannot have these layers even with their experts in RAM."""
        needs = part_needs(self.needs, self.takes, len(layers), first=card == 0)
        return max(0, needs.least(needs.every("cpu")) - self.cards[card].budget)

    def _too_little(self, counts: tuple[int, ...]) -> UsageError:
        told = [
            f"{self.cards[card].name} has {size(self.cards[card].budget)} to use and lacks {size(lacking)} for "
            f"{_count(len(layers))} with their experts in RAM"
            for card, layers in enumerate(ranges(counts))
            if (lacking := self._lacking(card, layers))
        ]
        cause = f"{'; '.join(told)}." if told else ""
        hint = "Allow more with --vram, or name fewer or other cards."
        return UsageError("The cards have too little memory for this model", cause, hint)


def part_needs(needs: Needs, takes: Footprint, layers: int, *, first: bool) -> Needs:
    """The needs of so many layers; the first card has the embedding and the head as well."""
    share = layers / needs.layers
    ends = min(needs.dense, takes.head + 2 * takes.sizes.embedding)
    return dataclasses.replace(
        needs,
        dense=math.ceil((needs.dense - ends) * share) + (ends if first else 0),
        up=needs.up // needs.layers * layers,
        rows=needs.rows // needs.layers * layers,
        kv=needs.kv.times(share),
        layers=layers,
        captured=math.ceil(needs.captured * share),
    )


def ranges(counts: Sequence[int]) -> list[range]:
    """Neighbouring ranges of so many layers."""
    ends = [sum(counts[:n]) for n in range(len(counts) + 1)]
    return [range(first, last) for first, last in itertools.pairwise(ends)]


def _count(layers: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''}"
