"""All processes of a grid in one: the same held layers choose, and one layer computes what each has chosen."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ...kernels.types import Calls, Work
from ..experts.moe_layer import Choice, MoELayer
from ..loader import LoadedModel
from ..parallel.holding import Grid, Holding
from ..parallel.spread_layer import HeldLayer


class Loads:
    """What each process of a grid had to do, in halves of experts.

    Attributes:
        given: (layers, R) before anything was left out; done: after.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.done: list[Tensor] = []

    @property
    def dropped(self) -> float:
        """The share that was left out."""
        return 1 - float(sum(each.sum() for each in self.done) / sum(each.sum() for each in self.given))

    @property
    def imbalance(self) -> float:
        """The largest load of a layer over the mean, on average."""
        return sum(float(each.max() / each.mean()) for each in self.done) / len(self.done)

    @property
    def imbalance_given(self) -> float:
        """The same before anything was left out."""
        return sum(float(each.max() / each.mean()) for each in self.given) / len(self.given)

    @property
    def gain(self) -> float:
        """How much less the most loaded process has to do: the speedup of experts if nothing else takes time."""
        return float(sum(each.max() for each in self.given) / sum(each.max() for each in self.done))


def parted(layer: MoELayer, grid: Grid, index: Tensor, weights: Tensor, *, balanced: bool, loads: Loads) -> Choice:
    """The calls of all processes for a router's choice (B, K)."""
    ruled, experts = layer.in_force(), layer.packed.rows.experts
    works: list[Work] = []
    given, done = torch.zeros(grid.size), torch.zeros(grid.size)
    for rank in range(grid.size):
        holding = Holding(grid, rank, experts, balanced)
        held = HeldLayer(layer.packed, ruled.preset, layer.index, holding)
        work, own = held.work(index, weights), holding.own
        calls = Calls(work.calls.tokens, work.calls.experts + own.start * ruled.rule.parts, work.calls.weights)
        works.append(Work(calls, work.thresholds, work.products))
        given[rank] = 2 * ((index >= own.start) & (index < own.stop)).sum()
        done[rank] = ruled.halves(len(work.thresholds))
    loads.given.append(given)
    loads.done.append(done)
    return Choice(ruled, index, weights, _joined(works))


def _joined(works: Sequence[Work]) -> Work:
    tokens, experts, weights = (
        torch.cat([getattr(work.calls, name) for work in works]) for name in ("tokens", "experts", "weights")
    )
    products = [work.products for work in works if work.products is not None]
    calls = Calls(tokens, experts, weights)
    return Work(calls, torch.cat([work.thresholds for work in works]), torch.cat(products) if products else None)


@contextmanager
def over(loaded: LoadedModel, grid: Grid, *, balanced: bool) -> Generator[Loads]:
    """Inside, prompts are computed as by the processes of a grid; yields what each had to do."""
    layers, loads = [each for each in loaded.model.modules() if isinstance(each, MoELayer)], Loads()

    def choosing(layer: MoELayer) -> None:
        def choose(hidden: Tensor, index: Tensor, weights: Tensor) -> Choice:
            assert len(hidden) == len(index)
            return parted(layer, grid, index, weights, balanced=balanced, loads=loads)

        layer.choose = choose

    for layer in layers:
        choosing(layer)
    try:
        yield loads
    finally:
        for layer in layers:
            del layer.choose
