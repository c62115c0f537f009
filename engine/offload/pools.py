"""The pools of several cards of one machine, each with the rows, the link and the ring of its own layers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ...models.pack.usage_file import Heat
from ..events import CardRows, Notice
from .device import Device
from .offload import Offload


class Pools:
    """What the layers of a model share where several cards have some each. Only the engine thread uses it.

    Attributes:
        each: of the cards that share anything with their layers, in the layers' order. notices: of all of them.
    """

    def __init__(self, each: Sequence[Offload]) -> None:
        self.each = tuple(each)
        self.notices: list[Notice] = []
        for number, one in enumerate(self.each):
            one.notices = self.notices
            alike = [other.device.name for other in self.each].count(one.device.name) > 1
            one.called = f"{one.device.name} ({number + 1} of {len(self.each)})" if alike else one.device.name

    @property
    def device(self) -> Device:
        """The first card, for what is alike on all."""
        return self.each[0].device

    @property
    def name(self) -> str:
        """Of all of them, as `--devices` names them."""
        return ",".join(one.device.name for one in self.each)

    def now(self) -> float:
        """Seconds by the clock of the card that has got furthest: it has the turn."""
        return max(one.device.now() for one in self.each)

    def moved(self) -> tuple[int, float]:
        """Bytes that all links moved so far, and their busy seconds."""
        moved = [one.moved() for one in self.each]
        return sum(nbytes for nbytes, _ in moved), sum(busy for _, busy in moved)

    def sizes(self) -> dict[str, int]:
        """Bytes of all cards' memory, by use."""
        sizes = [one.sizes() for one in self.each]
        return {use: sum(each[use] for each in sizes) for use in sizes[0]}

    def resident(self) -> dict[int, float]:
        """See `Offload.resident`: of all cards' layers."""
        return {layer: share for one in self.each for layer, share in one.resident().items()}

    def evicted(self) -> int:
        """See `Offload.evicted`: of all cards."""
        return sum(one.evicted() for one in self.each)

    def link_peak(self) -> float:
        """Of one link: in decode they move one after the other."""
        return max(one.link_peak() for one in self.each)

    def cards(self) -> tuple[CardRows, ...]:
        """What each card has, and what its link moved so far."""
        return tuple(CardRows(one.called, *one.moved(), **one.sizes()) for one in self.each)

    def make_room(self, ran_out: str = "") -> bool:
        """See `Offload.make_room`, on the card that ran out by the driver's message; without one on all."""
        named = re.search(r"GPU (\d+)", ran_out)
        where = [one for one in self.each if named is not None and one.device.place == f"cuda:{named[1]}"]
        freed = [one.make_room() for one in where or self.each]
        return any(freed)

    def warm(self, heat: Heat) -> None:
        """See `Offload.warm`."""
        for one in self.each:
            one.warm(heat)

    def heat(self, before: Heat) -> Heat:
        """See `Offload.heat`: of all cards' layers."""
        for one in self.each:
            before = one.heat(before)
        return before

    def close(self) -> None:
        """Stop background work."""
        for one in self.each:
            one.close()
