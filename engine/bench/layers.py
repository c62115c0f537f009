"""A round's values, and the time of one layer: the difference between two layer counts, divided by their difference.

So embedding, head and a step's fixed costs cancel out, for the engine and for its peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from ..machine.read_floor import READ, reader
from .measure import Timed
from .subject import Subject

ANSWER = 8  # tokens decoded in one run after the first one; a run's value is their median
_NEXT_TO_NOTHING = 1e-9
_READS = 4
_DROWNED = "The time of one layer was lost in noise: {names}. Use more layers or a quieter machine."


class RoundKey(NamedTuple):
    """The key of a value: contestant (a preset, a peer, the floor), number of layers, and kind."""

    who: str
    layers: int
    what: str


Part = Callable[[], Mapping[RoundKey, float]]
Found = Mapping[RoundKey, Sequence[float]]


def floor_parts(device: str) -> list[Part]:
    """The parts that measure the floor in a round; empty if it cannot be measured.

    The floor is the fastest of a few reads, since nothing may beat it and the previous peer's threads may still be
    spinning.
    """
    read = reader(device)
    if read is None:
        return []

    def part() -> dict[RoundKey, float]:
        seconds, nbytes = min(read() for _ in range(_READS))
        return {RoundKey(READ, 0, "seconds"): seconds, RoundKey(READ, 0, "read"): nbytes}

    return [part]


def floor_figures(found: Found) -> list[Timed]:
    """The floor as a figure, if there is one."""
    seconds = found.get(RoundKey(READ, 0, "seconds"))
    return [Timed(READ, seconds, found[RoundKey(READ, 0, "read")])] if seconds else []


def answered(who: str, subject: Subject, prompt: Sequence[int], *, prefill: bool) -> dict[RoundKey, float]:
    """One answer with all layers and one with the fewest that stand for them: seconds of a token, or with `prefill` of
    the prompt."""
    found: dict[RoundKey, float] = {}
    for layers in {subject.fewest, subject.layers}:
        with subject.first_layers(layers):
            answer = subject.answer(prompt, 0 if prefill else ANSWER)
        read = subject.weight_bytes(layers, experts=1.0) if prefill else answer.read
        found[RoundKey(who, layers, "seconds")] = answer.prefill if prefill else answer.token
        found[RoundKey(who, layers, "read")] = read
        found[RoundKey(who, layers, "first")] = answer.first
        if answer.active is not None:
            found[RoundKey(who, layers, "active")] = answer.active
    return found


def slope(found: Found, who: str, counts: tuple[int, int], what: str) -> list[float]:
    """What one layer adds, run by run: negative in a noisy run, but never zero."""
    few, many = counts
    pairs = zip(found[RoundKey(who, few, what)], found[RoundKey(who, many, what)], strict=True)
    return [(more - less) / (many - few) or _NEXT_TO_NOTHING for less, more in pairs]


def told_apart(found: Found, counts: Mapping[str, tuple[int, int]]) -> tuple[list[str], tuple[str, ...]]:
    """The contestants whose layer time stands out from noise, and a note about the others. A single layer has no
    difference.
    """
    several = [who for who, (few, many) in counts.items() if few < many]
    clear = [who for who in several if median(slope(found, who, counts[who], "seconds")) > 0]
    drowned = [who for who in several if who not in clear]
    return clear, (_DROWNED.format(names=", ".join(drowned)),) if drowned else ()


def active_note(found: Found, who: str, layers: int) -> str:
    """A note with the share of neurons that were active."""
    shares: Iterable[float] = found.get(RoundKey(who, layers, "active"), ())
    active = list(shares)
    return f"{100 * sum(active) / len(active):.0f} % active" if active else ""
