"""What a token may skip, as one record: a pack's manifest stores it, a screen edits it, the kernels receive it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

MOST_MULTIPLE = 4.0
MOST_EASE = 1000.0  # largest factor of thresholds: none may become infinite, which means "left out"
_WIDEST, _NEAR = 100.0, 1e-12  # of logarithms of odds
LEAST = 1e-30  # the least limit of experts without a gate, about half of whose signals are 0 and add nothing
NEVER = -1.0  # the limit of an expert that no rule leaves out, whole or in part


@dataclass(frozen=True, slots=True)
class Rule:
    """What a token may skip. Shares are of an expert's neurons, on text like the calibration's.

    Attributes:
        sparsity: share that is skipped by the signal's magnitude, |up · x| (FloE eq. 6) or |silu(gate · x)|. product:
            share whose down half is skipped, by |silu(gate · x) up · x|.
        drop, major: the router's weight for an expert, relative to the mean of those it chose for the token, below
            which the expert is skipped, or only its major half computed (DualSparse-MoE section 4).
        weighed: whether thresholds rise as that weight falls. A neuron adds weight · silu(gate · x) (up · x) down to y,
            so its worth depends as much on the weight as on its own values: the same loss then takes fewer rows
            (tests/bench/LOG.md). Shares are then of the values times that weight.
        alpha: how far from the best rejected score an absent expert may be replaced, and a resident one may replace it
            (importance-driven scheduling section 5.1); 0 replaces none.
        layers: how much of these four shares each layer takes, since some tolerate more than others (DualSparse-MoE
            figure 12), see `shares_by_layer`; 0: none; empty: all take the same.
        late: share of the active neurons, the weakest, that may be skipped while their rows are not on the device
            (CORM); 0 waits for every row. So an answer is never worse than at `lateness`, however slow the link is.
        theta: the least |silu(gate · x)| that is not skipped, the same for all experts of the layers whose signal is
            gate (CORM); the other layers, and 0, go by `sparsity`.
    """

    sparsity: float = 0.0
    product: float = 0.0
    drop: float = 0.0
    major: float = 0.0
    weighed: bool = False
    alpha: float = 0.0
    late: float = 0.0
    layers: tuple[float, ...] = ()
    theta: float = 0.0

    def at(self, layer: int) -> Rule:
        """The rule of one layer."""
        if not self.layers:
            return self
        sparsity, product, drop, major = (
            shares_by_layer(share, self.layers)[layer] for share in (self.sparsity, self.product, self.drop, self.major)
        )
        return replace(self, sparsity=sparsity, product=product, drop=drop, major=major, layers=())

    def of_whole_neurons(self) -> Rule:
        """The rule of a layer whose neurons may not be skipped: experts may still be left out."""
        return replace(self, sparsity=0.0, product=0.0, major=self.drop, late=0.0, theta=0.0)

    def ungated(self) -> Rule:
        """For experts without a gate, where the signal is what enters down: either share is skipped by it."""
        return replace(self, sparsity=max(self.sparsity, self.product), product=0.0)

    @property
    def wrong(self) -> str:
        """The first field with an invalid value, whatever its type; "" if all are valid."""
        for field in fields(self):
            value = getattr(self, field.name)
            match field.name:
                case "weighed":
                    good = type(value) is bool
                case "layers":
                    good = type(value) is tuple and all(_within(one, MOST_MULTIPLE) for one in value)
                case _:
                    good = _within(value, 1)
            if not good:
                return field.name
        return ""

    @property
    def parts(self) -> int:
        """Into how many parts experts are divided: 2 if a token may use only the major half."""
        return 2 if self.major > self.drop else 1

    @property
    def drops(self) -> bool:
        """Whether experts, or halves of them, may be left out by the router's weight."""
        return self.drop > 0 or self.major > 0

    def least(self) -> list[float]:
        """The weights, relative to their mean, below which each part of an expert is left out."""
        return [self.drop, max(self.drop, self.major)][: self.parts]

    @property
    def lateness(self) -> float:
        """The share of neurons, by the signal, below which an absent row may be skipped."""
        return 1 - (1 - self.sparsity) * (1 - self.late)


@lru_cache(maxsize=1024)
def shares_by_layer(share: float, layers: tuple[float, ...]) -> tuple[float, ...]:
    """The share of each layer, so that their mean, over the layers with a factor, is `share`.

    A factor multiplies the odds share / (1 - share): of small shares that is the share itself, and no layer becomes
    empty before all are. Above half the factors fade with what is left, since what a layer tolerates was measured at
    smaller shares: with none of it the demo's loss is 12 times as high at 95 % as with it (tests/bench/LOG.md).
    """
    if not 0 < share < 1 or not any(layers):
        return tuple(share * (factor > 0) for factor in layers)
    faded = [factor ** min(1.0, 2 * (1 - share)) for factor in layers if factor > 0]
    low, high = -_WIDEST, _WIDEST
    while high - low > _NEAR:
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_share(middle, faded) < share else (low, middle)
    odds = math.exp(low)
    found = iter(faded)
    return tuple((of := next(found) * odds) / (1 + of) if factor > 0 else 0.0 for factor in layers)


def _mean_share(log_odds: float, factors: Sequence[float]) -> float:
    odds = [factor * math.exp(log_odds) for factor in factors]
    return sum(one / (1 + one) for one in odds) / len(odds)


def _within(value: object, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most  # pyright: ignore[reportOperatorIssue]


NOTHING = Rule()
"""Skips nothing."""

LATE = 0.25
"""The share of active neurons that a lenient rule may skip. Without a bound an active row that is absent is as likely
the strongest as the weakest, and 5 % of them cost 0.3 nats a token (tests/bench/LOG.md)."""
