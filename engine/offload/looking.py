"""In which layers looking ahead pays, and by which predictor: measured with the first tokens, since it hangs on the
link, the CPU's lane and the host's own time together, and kept for the next start.

A layer that looks ahead costs the host and the device some time, and saves the next layer some waiting. In turns no
layer looks ahead, each second one by a predictor, and each other one; what counts for a layer is the time from where
its own active neurons are known to where those of the second next one are, which holds both. Each layer's best
predictor, if it gains more than chance explains, is then tried together with the other layers' against none, and they
are only kept if whole tokens gain too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..machine import saved_figures

SKIPPED, TRIED, CHECKED = 4, 144, 56  # tokens: not counted, in turns, and of the chosen layers against none
# Standard errors that a gain has to exceed, of a layer and of all that are chosen. What is chosen together by chance is
# tried again, what is kept is not.
_LIKELY, _SURE = 1.0, 2.0
_TURNS = 3  # of a predictor: without it, with it in each second layer, and in the others


@dataclass(frozen=True, slots=True)
class Kept(saved_figures.Record):
    """Which of a pool's layers look ahead, in order, by the predictor of that name; "" for none."""

    predictors: tuple[str, ...]


class Looking:
    """Where a pool's layers look ahead.

    Attributes:
        settled: whether that is known. turns: tokens after which what is tried repeats.
    """

    def __init__(self, layers: int, names: Sequence[str], file: Path | None = None) -> None:
        """`names`: of the predictors. `file`: where it is kept; one of another number of layers does not count, nor of
        other predictors.
        """
        self._layers, self._names, self._file = layers, names, file
        kept = None if file is None else Kept.load(file)
        self.settled, self.turns = layers < 2, _TURNS * len(names)
        # By layer 0 for none, or the place of a predictor among the names, from 1 on.
        self._on = self._none = [0] * layers
        self._chosen: list[int] | None = None
        self._times: list[float] = []  # of this token, where each layer's active neurons were known
        self._tokens = -SKIPPED
        self._seen: list[list[list[float]]] = [[[] for _ in range(len(names) + 1)] for _ in range(layers)]
        self._totals: tuple[list[float], list[float]] = [], []  # of tokens in which none looks ahead, or the chosen
        if kept is not None and len(kept.predictors) == layers and {*kept.predictors} <= {"", *names}:
            self.settled, self._on = True, [["", *names].index(name) for name in kept.predictors]

    @property
    def any(self) -> bool:
        """Whether a layer looks ahead, or may yet."""
        return not self.settled or any(self._on)

    def does(self, layer: int) -> int:
        """By which predictor this layer looks ahead in this token, from 1 on; 0 for none."""
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
        turn, chosen = self._tokens % self.turns, self._chosen
        if chosen is not None:
            self._on = chosen if self._tokens % 2 else self._none
        else:
            number, part = turn // _TURNS + 1, turn % _TURNS
            self._on = [number * (part == 1 + layer % 2) for layer in range(self._layers)]

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
                self._seen[layer][self._on[layer]].append(times[layer + 2] - times[layer])
        if self._tokens == TRIED:
            best = [_best(seen) for seen in self._seen[:-2]]
            # The last but one has no layer two further on: it does as most others. The last has none to look at.
            self._chosen, self._tokens = [*best, max(sorted({*best}), key=best.count, default=1), 0], 0
            if not any(self._chosen):
                self._settle(self._none)

    def _settle(self, layers: list[int]) -> None:
        self.settled, self._on = True, layers
        if self._file is not None:
            Kept(tuple(["", *self._names][at] for at in layers)).save(self._file)


def _best(seen: Sequence[Sequence[float]]) -> int:
    """Where the times are the shortest, of those that gain on the first ones; 0 if none does."""
    gaining = [at for at in range(1, len(seen)) if _gains(seen[0], seen[at], _LIKELY)]
    return min(gaining, key=lambda at: median(seen[at]), default=0)


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
