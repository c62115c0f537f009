"""Eviction: the rule by which rows of the pool give way, and the moving means that it uses.

Eviction looks only at the next slots of a clock hand, not at the whole pool, and takes the rows worth least there.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ...kernels.offload.pool import EvictionRule, Means
from ...models.pack.usage_file import Heat

Policy = Literal["score", "lru", "fifo"]

SAMPLE, SMALLEST_WINDOW = 6, 256  # slots examined for each one wanted, and at least
# What a prefetched row is worth: as much as one that is active at each call of an expert with this many times the mean
# score. For Mixtral about one use in two steps.
PREFETCH_WORTH = 2.0
# A row that was copied stays if it is worth more than this share of the others. From 0.08 to 0.3 the hit rates are
# alike; the highest evicts least.
BAR = 0.3
# Rows of the layer that has just run count this much less: all others are needed before them.
TURN = 0.5

# Tuned on the demo model (tests/bench/eviction.py). Shares that a new observation has in a moving mean:
SCORE_RATE = 0.3  # of the router's scores, what eviction goes by
HABIT_RATE = 0.01  # likewise, what the next start goes by
USE_RATE = 0.02  # of a neuron's activity, per call of its expert
LARGEST_GROWTH = 1e20


def rule(policy: Policy, experts: int) -> EvictionRule:
    """Which rows of E experts give way first.

    Policies:
        score: a row is worth the moving mean of its expert's router score (importance-driven scheduling, section 5.3)
            times the share of the expert's recent calls in which the neuron was active; less the longer its layer's
            turn is away. Absent neurons are counted too, so that a returning one has a history.
        lru: the least recently used row goes first. fifo: the one fetched longest ago.

    Raises:
        ValueError: there is no such policy.
    """
    if policy not in ("score", "lru", "fifo"):
        raise ValueError(f"there is no policy {policy!r}: choose score, lru or fifo")
    return EvictionRule(
        by_score=policy == "score",
        marks_use=policy == "lru",
        sample=SAMPLE,
        smallest_window=SMALLEST_WINDOW,
        bar=BAR,
        prefetch_worth=PREFETCH_WORTH / experts,
        turn=TURN,
        use_rate=USE_RATE,
        largest_growth=LARGEST_GROWTH,
        score_rate=SCORE_RATE,
        habit_rate=HABIT_RATE,
    )


class Uses:
    """Moving means of the router's scores and of each neuron's activity.

    Attributes:
        means: what eviction goes by; the pool's tables count there.
    """

    def __init__(self, layers: int, experts: int, neurons: int) -> None:
        self._shape = (layers, experts, neurons)
        recent, habit = np.full((2, layers, experts), 1 / experts)
        raw = np.zeros((layers, experts * neurons), np.float32)
        self.means = Means(recent, habit, raw, np.ones((layers, experts)))

    def heat(self) -> Heat:
        """The means so far, with the experts' long-run scores."""
        uses = self.means.raw.reshape(self._shape) / self.means.growth[..., None].astype(np.float32)
        return Heat(self.means.habit.astype(np.float32), np.minimum(uses, 1.0, out=uses))

    def start(self, heat: Heat) -> None:
        """Continue from saved means.

        Raises:
            ValueError: they are of another model's shape.
        """
        if heat.scores.shape != self._shape[:2] or heat.uses.shape != self._shape:
            raise ValueError(f"heat of {heat.uses.shape} for {self._shape} neurons")
        self.means.recent[:] = self.means.habit[:] = heat.scores
        self.means.raw[:] = heat.uses.reshape(self.means.raw.shape)
        self.means.growth[:] = 1.0
