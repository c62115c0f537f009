"""In which layers looking ahead pays, and by which predictor: measured with the first tokens, since it hangs on the
link, the CPU's lane and the host's own time together, and kept for the next start.

A layer that looks ahead costs the host and the device some time, and saves the next layer some waiting. In turns no
layer looks ahead, each second one by a predictor, and each other one; what counts for a layer is the time from where
its own active neurons are known to where those of the second next one are, which holds both. Tokens differ more than
any predictor gains, so a layer's own gain counts as far as layers differ more than by chance, and else their mean. Each
layer's best predictor, if it gains, is then tried together with the other layers' against none, and they are only kept
if whole tokens gain too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from ..machine import saved_figures

SKIPPED, TRIED, CHECKED = 4, 144, 56  # tokens: not counted, in turns, and of the chosen layers against none
# So often are the chosen ones tried, until their gain exceeds two standard errors; at last it has to exceed one.
_CHECKS, _SURE, _LIKELY = 3, 2.0, 1.0
_TURNS = 3  # of a predictor: without it, with it in each second layer, and in the others
_TRIMMED = 0.1  # of the times on either side, which do not count: something else took the time


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
            checks, rest = divmod(self._tokens, CHECKED)
            if not rest:
                gain, error = _gain(*self._totals)
                if gain > (_SURE if checks < _CHECKS else _LIKELY) * error:
                    self._settle(self._chosen)
                elif checks == _CHECKS or gain < -_SURE * error:
                    self._settle(self._none)
            return
        for layer in range(self._layers - 2):
            if self._on[layer] or not any(self._on):
                self._seen[layer][self._on[layer]].append(times[layer + 2] - times[layer])
        if self._tokens == TRIED:
            best = self._best()
            # The last but one has no layer two further on: it does as most others. The last has none to look at.
            self._chosen, self._tokens = [*best, max(sorted({*best}), key=best.count, default=1), 0], 0
            if not any(self._chosen):
                self._settle(self._none)

    def _best(self) -> list[int]:
        """By layer, but for the last two, the predictor that gains most; 0 if none does."""
        each = [
            _shrunk([_gain(seen[0], seen[at]) for seen in self._seen[:-2]]) for at in range(1, len(self._names) + 1)
        ]
        return [
            max(range(len(gains)), key=gains.__getitem__) for gains in zip([0.0] * len(each[0]), *each, strict=True)
        ]

    def _settle(self, layers: list[int]) -> None:
        self.settled, self._on = True, layers
        if self._file is not None:
            Kept(tuple(["", *self._names][at] for at in layers)).save(self._file)


def _gain(without: Sequence[float], with_it: Sequence[float]) -> tuple[float, float]:
    """How much shorter times are with it, and the standard error of that."""
    (before, error), (after, other) = (_middle(times) for times in (without, with_it))
    return before - after, math.hypot(error, other)


def _middle(times: Sequence[float]) -> tuple[float, float]:
    """The mean of all but the shortest and longest times, and its standard error, that of a winsorized mean (Tukey and
    McLaughlin 1963).
    """
    cut = int(_TRIMMED * len(times))
    inner = sorted(times)[cut : len(times) - cut]
    ends = [inner[0]] * cut + inner + [inner[-1]] * cut
    return fmean(inner), stdev(ends) / ((1 - 2 * _TRIMMED) * math.sqrt(len(times)))


def _shrunk(gains: Sequence[tuple[float, float]]) -> list[float]:
    """Gains of layers with their errors, drawn to their mean as far as they differ by chance (empirical Bayes)."""
    if not gains:
        return []
    chance, mean = fmean(error**2 for _, error in gains), fmean(gain for gain, _ in gains)
    own = max(0.0, fmean((gain - mean) ** 2 for gain, _ in gains) - chance)
    weight = own / (own + chance) if own else 0.0
    return [mean + weight * (gain - mean) for gain, _ in gains]
