"""In which layers looking ahead pays: measured with the first tokens, since it hangs on the link, the CPU's lane and
the host's own time together, and kept for the next start.

A layer that looks ahead costs the host some time, and saves the next layer some waiting. In turns no layer looks ahead,
each second one, none, and each other one; what counts for a layer is the time from where its own active neurons are
known to where those of the second next one are, which holds both. Layers that gain more than chance explains are then
tried together against none, and are only kept if whole tokens gain too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..machine import saved_figures

SKIPPED, TRIED, CHECKED = 4, 128, 64  # tokens: not counted, in turns, and of the chosen layers against none
# Standard errors that a gain has to exceed, of a layer and of all that are chosen. What is chosen together by chance is
# tried again, what is kept is not.
_LIKELY, _SURE = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class Kept(saved_figures.Record):
    """Which of a pool's layers look ahead, in order."""

    layers: tuple[bool, ...]


class Looking:
    """Where a pool's layers look ahead.

    Attributes:
        settled: whether that is known.
    """

    def __init__(self, layers: int, file: Path | None = None) -> None:
        """`file`: where it is kept; one of another number of layers does not count."""
        self._layers, self._file = layers, file
        kept = None if file is None else Kept.load(file)
        self.settled = layers < 2
        self._on = self._none = [False] * layers
        self._chosen: list[bool] | None = None
        self._times: list[float] = []  # of this token, where each layer's active neurons were known
        self._tokens = -SKIPPED
        self._with: list[list[float]] = [[] for _ in range(layers)]
        self._without: list[list[float]] = [[] for _ in range(layers)]
        self._totals: tuple[list[float], list[float]] = [], []  # of tokens in which none looks ahead, or the chosen
        if kept is not None and len(kept.layers) == layers:
            self.settled, self._on = True, list(kept.layers)

    @property
    def any(self) -> bool:
        """Whether a layer looks ahead, or may yet."""
        return not self.settled or any(self._on)

    def does(self, layer: int) -> bool:
        """Whether this layer looks ahead in this token."""
        return self._on[layer]

    def found(self, layer: int, now: Callable[[], float]) -> None:
        """The active neurons of a token's layer are known."""
        if self.settled:
            return
        if not layer:
            self._next()
        # A token that does not pass all layers one after the other does not count.
        self._times = [*self._times, now()] if len(self._times) == layer else []

    def _next(self) -> None:
        """Note the token before, and decide what this one does."""
        if len(self._times) == self._layers:
            self._note(self._times)
        self._times = []
        if self.settled or self._tokens < 0:
            return
        turn, chosen = self._tokens % 4, self._chosen
        if chosen is not None:
            self._on = chosen if turn % 2 else self._none
        else:
            self._on = [turn % 2 == 1 and layer % 2 == turn // 2 for layer in range(self._layers)]

    def _note(self, times: Sequence[float]) -> None:
        self._tokens += 1
        if self._tokens <= 0:
            return
        if self._chosen is not None:
            self._totals[any(self._on)].append(times[-1] - times[0])
            if self._tokens == CHECKED:
                self._settle(self._chosen if _gains(*self._totals, _SURE) else self._none)
            return
        for layer in range(self._layers - 2):
            if self._on[layer] or not any(self._on):
                side = self._with if self._on[layer] else self._without
                side[layer].append(times[layer + 2] - times[layer])
        if self._tokens == TRIED:
            pays = [_gains(*both, _LIKELY) for both in zip(self._without[:-2], self._with[:-2], strict=True)]
            # The last but one has no layer two further on: it does as most others. The last has none to look at.
            self._chosen, self._tokens = [*pays, 2 * sum(pays) >= len(pays), False], 0
            if not any(self._chosen):
                self._settle(self._none)

    def _settle(self, layers: list[bool]) -> None:
        self.settled, self._on = True, layers
        if self._file is not None:
            Kept(tuple(layers)).save(self._file)


def _gains(without: Sequence[float], with_it: Sequence[float], errors: float) -> bool:
    """Whether times are shorter with it by more than so many standard errors: medians, and what the tokens' spread
    leaves uncertain.
    """
    error = 0.0
    for times in (without, with_it):
        middle = median(times)
        spread = 1.48 * median(abs(time - middle) for time in times)  # as a standard deviation
        error += (1.25 * spread) ** 2 / len(times)
    return median(without) - median(with_it) > errors * math.sqrt(error)
