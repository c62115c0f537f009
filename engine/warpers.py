"""What changes a distribution before a token is drawn from it: transformers' logits processors of the same names.

Each takes ids (1, T) int64 so far, the prompt included, and scores (1, V) float32, and gives the new scores; a token
that may not be drawn has the score -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Warper = Callable[[Tensor, Tensor], Tensor]


class LogitsProcessorList(list[Warper]):
    """One after the other."""

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        for warper in self:
            scores = warper(ids, scores)
        return scores


class RepetitionPenaltyLogitsProcessor:
    """Scores of tokens that are there already are divided by `penalty`, or multiplied where negative (CTRL)."""

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
    """The `top_k` likeliest stay, and what is as likely as the last of them."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        least = scores.topk(min(self._top_k, scores.shape[-1])).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf)


class TopPLogitsWarper:
    """The likeliest stay that together reach `top_p`; at least one."""

    def __init__(self, top_p: float) -> None:
        self._top_p = top_p

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        rising, order = scores.sort(descending=False)
        gone = rising.softmax(-1).cumsum(-1) <= 1 - self._top_p
        gone[..., -1] = False
        return scores.masked_fill(gone.scatter(1, order, gone), -torch.inf)


class MinPLogitsWarper:
    """Those stay that are at least `min_p` times as likely as the likeliest."""

    def __init__(self, min_p: float) -> None:
        self._min_p = min_p

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        shares = scores.softmax(-1)
        return scores.masked_fill(shares < self._min_p * shares.amax(-1, keepdim=True), -torch.inf)
