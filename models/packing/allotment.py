"""How many of its neurons each expert of a layer leaves out where the layer leaves out a given share.

What a token loses by the same share differs from expert to expert (tests/bench/LOG.md). So the tables of a
layer's experts are read at different shares, with the mean that was asked for: from wherever the next neurons cost
least (the greedy allocation of TEAL, arXiv 2408.14690, by experts instead of matrices).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .calibration import QUANTILES, quantile_table

STEPS = 20  # equal shares of an expert's neurons that are compared
LEAST = 16  # tokens of an expert that say something
_MOST = 256  # tokens that are measured
_DIRECTIONS = 64  # of the output, in which errors are measured
_AT_ONCE = 1 << 18  # values that are compared at the same time


class LayerTables:
    """The tables of a layer's experts, `threshold` for the signal and `product` for what enters down.

    Attributes:
        own: (E, Q) each, of each expert by itself.
    """

    def __init__(self, experts: int) -> None:
        self.own = {name: torch.zeros(experts, QUANTILES) for name in ("threshold", "product")}
        self._lost = {name: torch.zeros(experts, STEPS + 1, dtype=torch.float64) for name in self.own}
        self._tokens, self._energy = (torch.zeros(experts, dtype=torch.float64) for _ in range(2))

    def measure(self, expert: int, v: Tensor, h: Tensor, down: Tensor, worth: Tensor, weight: Tensor | None) -> None:
        """Take in an expert.

        Args:
            v, h: (T, F) its signal and hidden values. down: (F, H). worth: (T, 1) each token's, as thresholds see it.
                weight: (T, 1) the router's; None if no token chose it.
        """
        some = spread(len(v))
        seen = None if weight is None else directions(down)
        if weight is not None and seen is not None:
            self._tokens[expert] = len(v)
            output = (h[some] * weight[some]).to(seen.dtype) @ seen
            self._energy[expert] = output.float().square().sum().double() * len(v) / len(output)
        for name, values in zip(self.own, (v, h), strict=True):
            self.own[name][expert] = table = quantile_table(values, worth)
            if weight is not None and seen is not None:
                self._lost[name][expert] = lost_below(values[some] * worth[some], table, h[some] * weight[some], seen)

    def lost(self, sparsity: float, product: float) -> tuple[Tensor, Tensor]:
        """The energy (E,) that each expert's output loses at these shares, and on how many tokens (E,)."""
        places = (round(share * STEPS) for share in (sparsity, product))
        each = sum(lost[:, place] for lost, place in zip(self._lost.values(), places, strict=True))
        return each * self._tokens, self._tokens

    @property
    def energy(self) -> Tensor:
        """Of each expert's output (E,), on all its tokens."""
        return self._energy

    def shares(self, exempt: Sequence[int] = ()) -> dict[str, Tensor]:
        """What each expert leaves out (E, Q), 0..1, where the layer leaves out 0 to 100 %.

        Exempt experts, and those that fewer than LEAST tokens chose, leave out as much and do not count.
        """
        heard = self._tokens >= LEAST
        heard[list(exempt)] = False
        found = torch.linspace(0, 1, QUANTILES, dtype=torch.float64).repeat(len(heard), 1)
        return {
            name: _with(found, heard, shares_of(lost[heard], self._tokens[heard])) for name, lost in self._lost.items()
        }

    def allotted(self, exempt: Sequence[int] = ()) -> dict[str, Tensor]:
        """The tables read at these shares."""
        return {name: read_at(self.own[name], shares) for name, shares in self.shares(exempt).items()}


def lost_below(values: Tensor, table: Tensor, h: Tensor, along: Tensor) -> Tensor:
    """What an expert's output loses on T tokens where its weakest neurons are left out.

    Args:
        values: (T, F) what thresholds are compared with. table: (Q,) the quantiles of their magnitudes. h: (T, F) the
            hidden values, times the router's weight. along: (F, m) as `directions` gives it.

    Returns:
        (STEPS + 1,) float64, energy by token, where 0, 1 ... STEPS of STEPS equal shares of the neurons are left out.
    """
    limits = table[torch.linspace(0, len(table) - 1, STEPS + 1).round().long()]
    place = torch.bucketize(values.abs().to(table.dtype), limits, right=True, out_int32=True).to(torch.uint8)
    h, wrong, found = h.to(along.dtype), torch.zeros(1, len(h), along.shape[1]), [torch.zeros(1, dtype=torch.float64)]
    steps = torch.arange(1, STEPS + 1, dtype=torch.uint8)[:, None, None]
    for some in steps.split(max(1, _AT_ONCE // max(1, h.numel()))):
        parts = (torch.where(place == some, h, 0) @ along).float()
        parts[0] += wrong[-1]
        wrong = parts.cumsum(0)
        found.append(wrong.square().sum((1, 2)).double() / max(1, len(h)))
    return torch.cat(found)


def spread(tokens: int) -> slice:
    """Those of an expert's tokens that are measured: of every part of the text."""
    return slice(None, None, max(1, -(-tokens // _MOST)))


def directions(down: Tensor) -> Tensor:
    """Down columns (F, H) as seen from a few random directions, (F, m): lengths of sums stay as they are, nearly
    (Johnson and Lindenstrauss), and take a fraction of the time.
    """
    width = down.shape[1]
    return down if width <= _DIRECTIONS else down @ _random(width).to(down.dtype)


@cache
def _random(width: int) -> Tensor:
    same = torch.Generator().manual_seed(0)
    return torch.randn(width, _DIRECTIONS, generator=same) / math.sqrt(_DIRECTIONS)


def shares_of(lost: Tensor, tokens: Tensor) -> Tensor:
    """The shares (E, Q) of each expert that make up a layer's even ones, from none to all, and lose least.

    Args:
        lost: (E, STEPS + 1) as `lost_below` gives it. tokens: (E,) on how many.
    """
    weight = tokens.double()
    # What each further share costs by token: it rises, but for chance.
    slopes = lost.diff(dim=1).cummax(1).values
    order = slopes.flatten().argsort(stable=True)
    expert = order // STEPS
    amounts = weight[expert] / STEPS
    before = amounts.cumsum(0) - amounts
    shares = torch.zeros(len(lost), QUANTILES, dtype=torch.float64)
    for place, target in enumerate(torch.linspace(0, 1, QUANTILES, dtype=torch.float64) * weight.sum()):
        shares[:, place].index_add_(0, expert, (target - before).clamp(min=0).minimum(amounts))
    return (shares / weight[:, None]).clamp(max=1)


def read_at(tables: Tensor, shares: Tensor) -> Tensor:
    """Tables (E, Q) whose entries stand at other shares (E, any), 0..1."""
    last = tables.shape[1] - 1
    low = (shares * last).long().clamp(max=last - 1)
    return torch.lerp(tables.gather(1, low), tables.gather(1, low + 1), (shares * last - low).to(tables.dtype))


def _with(rows: Tensor, which: Tensor, found: Tensor) -> Tensor:
    return rows.clone().masked_scatter_(which[:, None], found)
