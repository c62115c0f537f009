"""What one process sends to the others, counted where it is sent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Count:
    """Of one kind: operations that all processes take part in, messages, and bytes."""

    collectives: int = 0
    messages: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Traffic:
    """What this process sent since it was last cleared.

    Attributes:
        kinds: "told" (what to compute), "summed" (outputs that are added up), "headers" (how many rows follow), "rows"
            (tokens' states on their way to experts), "results" (the way back), "shared" (keys and values of a
            divided prompt; or outputs, where each process computes the dense part of all tokens).

    Sums count as a ring sends them: 2 (R - 1) messages of 1 / R of the bytes from each of R processes. All else is
    point to point and counted as it is; a message without content is none.
    """

    kinds: dict[str, Count] = field(default_factory=dict[str, Count])

    def add(self, kind: str, messages: int, nbytes: int) -> None:
        """One collective of this kind."""
        count = self.kinds.setdefault(kind, Count())
        count.collectives += 1
        count.messages += messages
        count.nbytes += nbytes

    def of(self, *kinds: str) -> Count:
        """These kinds together; all of them if none is named."""
        found = [count for kind, count in self.kinds.items() if not kinds or kind in kinds]
        return Count(
            sum(count.collectives for count in found),
            sum(count.messages for count in found),
            sum(count.nbytes for count in found),
        )

    def clear(self) -> None:
        """Count from zero."""
        self.kinds.clear()
