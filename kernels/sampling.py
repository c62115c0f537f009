"""Drawing a token from a model's logits. `draw` defines it; `cpu/native_ends.py` has the compiled version.

What changes the distribution before are transformers' logits processors of the same names. Each takes ids (1, T) int64
so far, the prompt included, and scores (1, V) floating point, and gives the new scores; a token that may not be drawn
has the score -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import BYTES, FLOATS, require

Warper = Callable[[Tensor, Tensor], Tensor]


class NotNumbersError(ValueError):
    """Logits without a largest one: NaN or infinity among them, or nothing but -infinity.

    A model's weights or activations are then not finite.
    """

    def __init__(self) -> None:
        super().__init__("the logits are not numbers that a token could be drawn from")


class LogitsProcessorList(list[Warper]):
    """One after the other."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self:
            scores = warper(ids, scores)
        return scores


class RepetitionPenaltyLogitsProcessor:
    """Scores of tokens in the text so far are divided by `penalty`, or multiplied if negative (CTRL)."""

    def __init__(self, penalty: float) -> None:
        self._penalty = penalty

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        there = scores.gather(1, ids)
        return scores.scatter(1, ids, torch.where(there < 0, there * self._penalty, there / self._penalty))


class TemperatureLogitsWarper:
    """Scores divided by `temperature`: below 1 the likely become likelier."""

    def __init__(self, temperature: float) -> None:
        self._temperature = temperature

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        return scores / self._temperature


class TopKLogitsWarper:
    """The `top_k` likeliest stay, and those as likely as the last of them."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        least = scores.topk(min(self._top_k, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf)


class TopPLogitsWarper:
    """The likeliest that together reach `top_p` stay; at least one. Of equally likely ones those with higher ids."""

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        rising, order = scores.sort(stable=True)
        gone = rising.softmax(-1).cumsum(-1) <= 1 - self._top_p
        gone[..., -1] = False
        return scores.masked_fill(gone.scatter(1, order, gone), -torch.inf)


class MinPLogitsWarper:
    """Tokens at least `min_p` times as likely as the likeliest stay."""

    def __init__(self, min_p: float) -> None:
        self._min_p = min_p

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        shares = scores.softmax(-1)
        return scores.masked_fill(shares < self._min_p * shares.amax(-1, keepdim=True), -torch.inf)


class Filters(NamedTuple):
    """How a token is drawn, see `engine.events.Sampling`; the defaults of all fields but the first change nothing.

    Attributes:
        temperature: 0 takes the likeliest token. penalty: of tokens that are there already.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0

    def check(self) -> None:
        """Refuse values that no distribution has.

        Raises:
            ValueError: names the field and its range.
        """
        # Written so that NaN fits nowhere.
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 or from 1e-6 to 1e6, not {self.temperature}")
        if not 0 <= self.top_k < 1 << 63:
            raise ValueError(f"top_k must be from 0 to 2^63 - 1, not {self.top_k}")
        if not (0 < self.top_p <= 1 and 0 <= self.min_p <= 1):
            raise ValueError(f"top_p must be above 0 up to 1 and min_p from 0 to 1, not {self.top_p} and {self.min_p}")
        if not 1e-6 <= self.penalty <= 1e6:
            raise ValueError(f"penalty must be from 1e-6 to 1e6, not {self.penalty}")

    def warpers(self) -> LogitsProcessorList:
        """The processors that the fields ask for, in order."""
        found = LogitsProcessorList()
        if self.penalty != 1:
            found.append(RepetitionPenaltyLogitsProcessor(self.penalty))
        if self.temperature == 0:
            return found
        found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1:
            found.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0:
            found.append(MinPLogitsWarper(self.min_p))
        return found


def draw(logits: Tensor, filters: Filters, uniform: float, seen: Tensor | None = None) -> int:
    """A token chosen by a number from [0, 1): the first whose cumulative probability exceeds it.

    Args:
        logits: (V,) floating point; computed in float64. seen: (V,) uint8, not 0 for tokens that are there already.

    Raises:
        NotNumbersError: logits that nothing can be drawn from, at any temperature. ValueError: filters or a number
            outside their ranges, tensors that do not fit.
    """
    filters.check()
    check_draw(logits, uniform, seen)
    ids = torch.empty(1, 0, dtype=torch.int64) if seen is None else seen.nonzero().T
    scores = filters.warpers()(ids, logits[None].double())
    if not scores.max().isfinite():  # NaN is larger than any number
        raise NotNumbersError
    if filters.temperature == 0:
        return int(scores.argmax())
    shares = scores[0].softmax(-1)
    reached = shares.cumsum(-1)
    first = int(torch.searchsorted(reached, reached[-1] * uniform, right=True))
    return min(first, int(shares.nonzero()[-1]))  # rounding may leave the number above all of them


def check_draw(logits: Tensor, uniform: float, seen: Tensor | None) -> None:
    """Refuse arguments of `draw` that do not fit.

    Raises:
        ValueError: what it must be and what it is.
    """
    count = logits.numel()
    if not count:
        raise ValueError("there are no logits to draw from")
    require("logits", logits, FLOATS, (count,), logits.device, whole=False)
    if seen is not None:
        require("seen", seen, BYTES, (count,), logits.device, whole=False)
    if not 0 <= uniform < 1:
        raise ValueError(f"a token is drawn by a number from 0 up to 1, not {uniform}")
