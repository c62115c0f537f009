"""Timing side by side: figures measured in turn, round by round, and the summary of each.

Other programs' load or a falling clock affects all figures of a round alike, so shares of a floor and ratios to a peer
are taken within each round, and the median over rounds is reported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import TypeVar

NOISY = 0.15  # a spread above this is marked: something else was running
NAMES = 36  # cells that a table has for a row's name

K = TypeVar("K", bound=Hashable)
MeasureReport = Callable[[str, int, int], None]  # the current figure, rounds done, rounds in all


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing to measure.

    Attributes:
        work: work(0), work(1), ... does it once and returns the bytes that it had to move, 0 if they do not matter; the
            number selects different data each time, so that none is cached.
        floor: the figure whose rate no other can exceed. peer: the figure whose time this one's is compared with.
        tokens: how many tokens one call computes, 0 if that does not matter.
        inner: calls in one timed run. once: so slow that a single call without warm-up has to do.
    """

    name: str
    work: Callable[[int], int]
    floor: str | None = None
    peer: str | None = None
    tokens: int = 0
    inner: int = 4
    once: bool = False


@dataclass(frozen=True, slots=True)
class Timed:
    """A figure's runs: seconds and bytes of one call, run by run, with a `note`."""

    name: str
    seconds: Sequence[float]
    moved: Sequence[float]
    floor: str | None = None
    peer: str | None = None
    tokens: int = 0
    note: str = ""

    def rates(self) -> list[float]:
        """Bytes per second, run by run."""
        return [moved / seconds for moved, seconds in zip(self.moved, self.seconds, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """The summary of a figure; None for what does not apply.

    Attributes:
        ms: median milliseconds of one call. runs: of how many runs.
        spread: the middle half of the runs, (p75 - p25) / median; `noisy` where it is above NOISY.
        gb_s: median rate in 1e9 bytes per second. of_floor: that rate over the floor's.
        speedup: the peer's time over this one's: 2 is twice as fast. tokens_s: tokens per second.
        note: what else to know about the figure, such as a goal.
    """

    name: str
    ms: float
    runs: int
    spread: float | None
    noisy: bool
    gb_s: float | None
    floor: str | None
    of_floor: float | None
    peer: str | None
    speedup: float | None
    tokens_s: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """Rows that were measured together.

    `other_cores` is how many CPU cores other programs used meanwhile, None where that does not matter.
    """

    title: str
    rows: tuple[Row, ...]
    other_cores: float | None = None


@dataclass(frozen=True, slots=True)
class ResultTable:
    """A benchmark's results.

    Attributes:
        facts: what ran on what, and how often. notes: how to read the rows, or why some are missing.
    """

    bench: str
    device: str
    facts: dict[str, str | int]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


def measure(
    figures: Sequence[Figure],
    *,
    warm: int = 3,
    runs: int = 5,
    report: Callable[[int, int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Row, ...]:
    """Time all figures in each of `warm` rounds that do not count and `runs` that do.

    Args:
        report: called with the rounds done and the rounds in all. clock: seconds.
    """
    seconds: dict[str, list[float]] = {figure.name: [] for figure in figures}
    moved: dict[str, list[float]] = {figure.name: [] for figure in figures}
    for done in range(-warm, runs):
        for figure in figures:
            if figure.once and done != 0:
                continue
            calls = 1 if figure.once else figure.inner
            first, nbytes, start = (done + warm) * calls, 0, clock()
            for turn in range(first, first + calls):
                nbytes += figure.work(turn)
            taken = clock() - start
            if done >= 0:
                seconds[figure.name].append(taken / calls)
                moved[figure.name].append(nbytes / calls)
        if report:
            report(done + warm + 1, warm + runs)
    return summarise(
        [Timed(f.name, seconds[f.name], moved[f.name], f.floor, f.peer, f.tokens) for f in figures],
    )


def in_turn(
    parts: Sequence[Callable[[], Mapping[K, float]]],
    *,
    warm: int = 3,
    runs: int = 5,
    report: Callable[[int, int], None] | None = None,
) -> dict[K, list[float]]:
    """Call all parts in each of `warm` rounds that do not count and `runs` that do.

    Args:
        parts: each returns values by name, such as seconds that it took itself. report: as in `measure`.

    Returns:
        Each name's values, round by round.
    """
    found: dict[K, list[float]] = {}
    for done in range(1, warm + runs + 1):
        for part in parts:
            values = part()
            for name, value in values.items() if done > warm else ():
                found.setdefault(name, []).append(value)
        if report:
            report(done, warm + runs)
    return found


def summarise(timed: Sequence[Timed]) -> tuple[Row, ...]:
    """One row per figure, in order; floors and peers are found by name among them."""
    named = {figure.name: figure for figure in timed}
    return tuple(_row(figure, named) for figure in timed)


def _row(figure: Timed, named: dict[str, Timed]) -> Row:
    floor = named[figure.floor] if figure.floor else None
    peer = named[figure.peer] if figure.peer else None
    seconds, rates = figure.seconds, figure.rates()
    middle, spread = median(seconds), None
    if len(seconds) > 1:
        low, _, high = quantiles(seconds, n=4, method="inclusive")
        spread = (high - low) / middle
    return Row(
        name=figure.name,
        ms=middle * 1e3,
        runs=len(seconds),
        spread=spread,
        noisy=spread is not None and spread > NOISY,
        gb_s=median(rates) / 1e9 if any(rates) else None,
        floor=figure.floor,
        of_floor=_over(rates, floor.rates()) if floor else None,
        peer=figure.peer,
        speedup=_over(peer.seconds, seconds) if peer else None,
        tokens_s=figure.tokens / middle if figure.tokens else None,
        note=figure.note,
    )


def _over(mine: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio round by round, or of the medians where one of them was measured once: a single round may be odd."""
    if len(mine) == len(theirs):
        return median(a / b for a, b in zip(mine, theirs, strict=True))
    return median(mine) / median(theirs)
