"""How much each expert and each neuron is used: moving means, kept up to date while a model answers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..models.heat import Heat

# Tuned on the demo model (tests/bench/eviction.py). Shares that a new observation has in a moving mean:
SCORE_RATE = 0.3  # of the router's scores, what eviction goes by
HABIT_RATE = 0.01  # likewise, what a new start goes by
USE_RATE = 0.02  # of a neuron's activity, per call of its expert
_LARGEST_GROWTH = 1e20


class Uses:
    """Moving means of the router's scores and of each neuron's activity.

    A neuron's mean is over the calls of its expert: m = (1 - r) m + r, or without the r where it was not active. Only
    active ones are touched: what is stored is m · g with g = (1 - r)^-calls, so that a call multiplies the expert's g
    and adds r · g to the active ones.
    """

    def __init__(self, layers: int, experts: int, neurons: int) -> None:
        self._experts = experts
        self._neurons = neurons
        self._recent = np.full((layers, experts), 1 / experts)
        self._habit = self._recent.copy()
        self._raw = np.zeros((layers, experts * neurons), np.float32)
        self._growth = np.ones((layers, experts))

    def heard(self, layer: int, scores: NDArray[np.floating[Any]]) -> None:
        """Scores (E,) of one step; ignored if one is not finite, since means would never recover from it."""
        if np.isfinite(scores).all():
            self._recent[layer] += SCORE_RATE * (scores - self._recent[layer])
            self._habit[layer] += HABIT_RATE * (scores - self._habit[layer])

    def note(self, layer: int, keys: NDArray[np.int64]) -> None:
        """The active neurons (N,) of one step."""
        expert = keys // self._neurons
        growth = self._growth[layer]
        growth[np.bincount(expert, minlength=self._experts) > 0] /= 1 - USE_RATE
        self._raw[layer][keys] += (USE_RATE * growth).astype(np.float32)[expert]
        for large in np.flatnonzero(growth > _LARGEST_GROWTH):
            self._raw[layer].reshape(self._experts, -1)[large] /= growth[large]
            growth[large] = 1.0

    def worth(
        self, keys: NDArray[np.int64], experts: NDArray[np.int64], turns: NDArray[np.float64]
    ) -> NDArray[np.float32]:
        """(N,): recent score of the expert · mean activity of the neuron · the factor of its layer.

        Args:
            keys: (N,) flat in (L, E, F). experts: (N,) their experts, flat in (L, E). turns: (L,) factors.
        """
        factors = (self._recent * turns[:, None] / self._growth).astype(np.float32)
        return self._raw.reshape(-1)[keys] * factors.reshape(-1)[experts]

    def heat(self) -> Heat:
        """The means so far, experts by their long-run score."""
        raw = self._raw.reshape(*self._growth.shape, self._neurons)
        uses = raw / self._growth[..., None].astype(np.float32)
        return Heat(self._habit.astype(np.float32), np.minimum(uses, 1.0, out=uses))

    def start(self, heat: Heat) -> None:
        """Go on from saved means.

        Raises:
            ValueError: they are of another model's shape.
        """
        if heat.scores.shape != self._habit.shape or heat.uses.shape != (*self._habit.shape, self._neurons):
            raise ValueError(f"heat of {heat.uses.shape} for {(*self._habit.shape, self._neurons)} neurons")
        self._recent[:] = self._habit[:] = heat.scores
        self._raw[:] = heat.uses.reshape(self._raw.shape)
        self._growth[:] = 1.0
