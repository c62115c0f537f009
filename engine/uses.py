"""How much each expert and each neuron is used: moving means, kept up to date while a model answers."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import numpy as np

from ..kernels.pool import Means
from ..models.heat import Heat

# Tuned on the demo model (tests/bench/eviction.py). Shares that a new observation has in a moving mean:
SCORE_RATE = 0.3  # of the router's scores, what eviction goes by
HABIT_RATE = 0.01  # likewise, what a new start goes by
USE_RATE = 0.02  # of a neuron's activity, per call of its expert
LARGEST_GROWTH = 1e20
_RATES = np.array([[SCORE_RATE], [HABIT_RATE]])


class Uses:
    """Moving means of the router's scores and of each neuron's activity.

    Attributes:
        means: what eviction goes by; the pool's tables count activity there.
    """

    def __init__(self, layers: int, experts: int, neurons: int) -> None:
        self._shape = (layers, experts, neurons)
        self._scores = np.full((2, layers, experts), 1 / experts)  # recent, and long-run
        self._habit = self._scores[1]
        self.means = Means(
            self._scores[0], np.zeros((layers, experts * neurons), np.float32), np.ones((layers, experts))
        )

    def heard(self, layer: int, scores: Sequence[float]) -> None:
        """Scores (E,) of one step; ignored if one is not finite, since means would never recover from it."""
        if isfinite(sum(scores)):
            means = self._scores[:, layer]
            means += _RATES * (np.array(scores) - means)

    def heat(self) -> Heat:
        """The means so far, experts by their long-run score."""
        uses = self.means.raw.reshape(self._shape) / self.means.growth[..., None].astype(np.float32)
        return Heat(self._habit.astype(np.float32), np.minimum(uses, 1.0, out=uses))

    def start(self, heat: Heat) -> None:
        """Go on from saved means.

        Raises:
            ValueError: they are of another model's shape.
        """
        if heat.scores.shape != self._shape[:2] or heat.uses.shape != self._shape:
            raise ValueError(f"heat of {heat.uses.shape} for {self._shape} neurons")
        self.means.recent[:] = self._habit[:] = heat.scores
        self.means.raw[:] = heat.uses.reshape(self.means.raw.shape)
        self.means.growth[:] = 1.0
