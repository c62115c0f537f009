"""What a quality set by hand is likely to lose, from what each of its dials was measured to add by itself."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass

from ...kernels.rule import Rule

Curve = tuple[tuple[float, float], ...]

POINTS = {
    "sparsity": (0.5, 0.7, 0.8, 0.9, 0.95, 1.0),
    "product": (0.5, 0.7, 0.9, 1.0),
    "drop": (0.3, 0.6, 1.0),
    "major": (0.5, 1.0),
}
"""The dials, and the shares at which each is measured alone."""

NOTICEABLE, BROKEN = 0.1, 1.0  # nats
_ERROR = 1.25  # factor: of 28 random settings of the demo, 27 lay in the range with it (tests/bench/LOG.md)
_LEAST = 1e-6  # nats: below that all is noise


@dataclass(frozen=True, slots=True)
class DialLoss:
    """What each dial adds by itself: (share, mean KL in nats) by rising share, from the pack with nothing left out.

    Attributes:
        text: what it was measured on. tokens: how many of it were predicted.
    """

    text: str
    tokens: int
    sparsity: Curve
    product: Curve
    drop: Curve
    major: Curve

    @property
    def sound(self) -> bool:
        """Whether it can be what was measured, whoever wrote it."""
        return all(
            all(0 < share <= 1 and 0 <= kl < math.inf for share, kl in curve)
            and all(low[0] < high[0] for low, high in itertools.pairwise(curve))
            for curve in map(self._curve, POINTS)
        )

    def estimate(self, rule: Rule) -> tuple[float, float] | None:
        """The least and the most nats (KL) that a rule is likely to add; None where a dial was not measured.

        Several dials leave out partly the same neurons, so together they add between the most of them and their sum.
        """
        shares = {name: getattr(rule, name) for name in POINTS if getattr(rule, name) > 0}
        if not shares:
            return 0.0, 0.0
        if any(not self._curve(name) for name in shares):
            return None
        adds = [_at(self._curve(name), share) for name, share in shares.items()]
        return max(adds) / _ERROR, sum(adds) * _ERROR

    def _curve(self, name: str) -> Curve:
        return getattr(self, name)


def _at(curve: Curve, share: float) -> float:
    """By powers of the share between measured points, rising; below the first, by its square."""
    shares = [point for point, _ in curve]
    most = 0.0
    rising = [most := max(most, kl, _LEAST) for _, kl in curve]
    place = bisect.bisect_left(shares, share)
    if place == len(shares):
        return rising[-1]
    if place == 0:
        return rising[0] * (share / shares[0]) ** 2
    power = math.log(share / shares[place - 1]) / math.log(shares[place] / shares[place - 1])
    return rising[place - 1] * (rising[place] / rising[place - 1]) ** power
