"""Replaces absent experts with resident ones of about the same score. Off unless a rule asks for it."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch
from torch import Tensor


class Resident(Protocol):
    """Which of a layer's experts are in fast memory."""

    def __contains__(self, expert: int) -> bool: ...

    def use(self, expert: int) -> bool:
        """Record a use; returns whether the expert was resident."""
        ...


class Residency:
    """A model of residency: the last `capacity` different experts used in a layer count as in fast memory."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, OrderedDict[int, None]()

    def __contains__(self, expert: int) -> bool:
        return expert in self._used

    def use(self, expert: int) -> bool:
        """Record a use; returns whether the expert was resident."""
        there = expert in self._used
        self._used[expert] = None
        self._used.move_to_end(expert)
        if len(self._used) > self._capacity:
            self._used.popitem(last=False)
        return there


def substitute(scores: list[float], chosen: list[int], resident: Resident, alpha: float) -> list[int]:
    """The experts for one token if resident ones may replace absent ones of about the same score.

    The expert-cache router (importance-driven scheduling, section 5.1 and algorithm 1): with β the best score that was
    not chosen, an absent expert scoring at most (1 + α) β gives way to the best resident one of at least (1 - α) β.

    Args:
        scores: of all experts, after softmax. chosen: the top-k, best first.

    Returns:
        As many experts as were chosen, best first.
    """
    rest = sorted(set(range(len(scores))) - set(chosen), key=lambda expert: -scores[expert])
    if not rest:
        return chosen
    beta = scores[rest[0]]
    stand_ins = [expert for expert in rest if scores[expert] >= (1 - alpha) * beta and expert in resident]
    absent = [expert for expert in chosen if scores[expert] <= (1 + alpha) * beta and expert not in resident]
    # The lowest absent ones are replaced first, by the best resident ones.
    swapped = dict(zip(reversed(absent), stand_ins, strict=False))
    return sorted((swapped.get(expert, expert) for expert in chosen), key=lambda expert: -scores[expert])


def substitute_all(
    probabilities: Tensor, index: Tensor, weights: Tensor, resident: Resident, alpha: float, *, normalized: bool
) -> tuple[Tensor, Tensor]:
    """`substitute` token by token; each finds resident what earlier tokens used.

    Args:
        probabilities: (B, E) the router's. index, weights: (B, K) what it chose. normalized: whether the
            weights of a token add up to a constant, or are the probabilities as they are.

    Returns:
        index and weights, (B, K); unchanged for tokens without a substitution.
    """
    rows: list[list[int]] = []
    for scores, chosen in zip(probabilities.tolist(), index.tolist(), strict=True):
        row = substitute(scores, chosen, resident, alpha)
        for expert in row:
            resident.use(expert)
        rows.append(row)
    taken = torch.tensor(rows, device=index.device)
    swapped = (taken[:, :, None] != index[:, None]).all(-1).any(1, keepdim=True)
    return _reweighed(probabilities, index, weights, taken, swapped, normalized=normalized)


def substitute_there(
    probabilities: Tensor, index: Tensor, weights: Tensor, resident: Tensor, alpha: float, *, normalized: bool
) -> tuple[Tensor, Tensor]:
    """`substitute_all` on the device of the tensors; all tokens find the same experts resident, (E,) bool."""
    among = index.shape[1]
    chosen = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, index, True)
    beta = probabilities.masked_fill(chosen, -torch.inf).amax(1, keepdim=True)
    stands_in = ~chosen & resident & (probabilities >= (1 - alpha) * beta)
    goes = chosen & ~resident & (probabilities <= (1 + alpha) * beta)
    best = probabilities.masked_fill(~stands_in, -torch.inf).topk(among)
    least = probabilities.masked_fill(~goes, torch.inf).topk(among, largest=False)
    swapped = best.values.isfinite() & least.values.isfinite()
    kept = chosen.scatter(1, least.indices, chosen.gather(1, least.indices) & ~swapped)
    kept = kept.scatter(1, best.indices, kept.gather(1, best.indices) | swapped)
    taken = probabilities.masked_fill(~kept, -torch.inf).topk(among).indices
    any_swapped = swapped.any(1, keepdim=True)
    return _reweighed(probabilities, index, weights, taken, any_swapped, normalized=normalized)


def _reweighed(
    probabilities: Tensor, index: Tensor, weights: Tensor, taken: Tensor, swapped: Tensor, *, normalized: bool
) -> tuple[Tensor, Tensor]:
    """Experts (B, K) and their weights; of tokens (B, 1) that were not swapped the router's own index and weights."""
    found = probabilities.gather(1, taken)
    if normalized:
        found = found / found.sum(-1, keepdim=True) * weights.to(found.dtype).sum(-1, keepdim=True)
    return torch.where(swapped, taken, index), torch.where(swapped, found.to(weights.dtype), weights)
