"""Which part of each layer's experts a process holds.

Processes form a grid of G groups by T slices: number g · T + t holds the g-th part of the experts, and of each of them
every T-th neuron, from t on. Neurons lie by importance, so each slice has its share of the important ones, and is in
order itself: its first half is its part of the expert's major half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.weights import ExpertRows
from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from .world import PATTERNS


@dataclass(frozen=True, slots=True)
class Grid:
    """How `groups` · `slices` processes divide experts by a pattern.

    Attributes:
        pattern: "ep": whole experts, E / R in each process. "tp": a slice of every expert in each. "etp" and "s-etp":
            experts over groups, and slices over the processes of a group; they differ in how tokens reach those.
    """

    pattern: str
    groups: int
    slices: int

    @classmethod
    def of(cls, wanted: str, size: int, experts: int, neurons: int) -> Grid:
        """By what a person wants: "" or a pattern, with the number of slices behind a colon ("s-etp:4").

        Without a pattern, slices of every expert: each token then keeps all processes equally busy, and a step of few
        tokens sends the same as by the other patterns. Where neurons cannot be divided so, whole experts.

        Raises:
            UsageError: there is no such pattern, or it does not suit the model or the number of processes.
        """
        name, _, slices = wanted.partition(":")
        if not name:
            name = "tp" if neurons % (2 * size) == 0 else "ep"
        if name not in PATTERNS or (slices and not (name in ("etp", "s-etp") and slices.isdecimal())):
            raise UsageError(f"There is no pattern {wanted!r}", "", f"Choose one of {', '.join(PATTERNS)}.")
        match name:
            case "ep":
                parts = 1
            case "tp":
                parts = size
            case _:
                parts = int(slices or (2 if size % 2 == 0 else size))
        if not parts or size % parts:
            raise UsageError(
                f"{size} processes cannot hold {parts} slices of each expert",
                "",
                f"Choose a number that divides {size}, as in {name}:{size}.",
            )
        grid = cls(name, size // parts, parts)
        if parts > 1 and neurons % (2 * parts):
            raise UsageError(
                f"Experts of {neurons} neurons have no {parts} slices with halves", "", "Choose --parallel ep."
            )
        if grid.groups > experts:
            raise UsageError(f"{experts} experts are too few for {grid.groups} processes", "", "Choose --parallel tp.")
        return grid

    @property
    def size(self) -> int:
        return self.groups * self.slices

    def firsts(self, experts: int) -> list[int]:
        """The first expert of each group, and the number of all behind them."""
        return [group * experts // self.groups for group in range(self.groups + 1)]

    def group_of(self, experts: int) -> Tensor:
        """(E,) which group holds each expert."""
        firsts = torch.tensor(self.firsts(experts))
        return torch.repeat_interleave(torch.arange(self.groups), firsts.diff())

    def words(self) -> str:
        """As a person reads it."""
        return f"experts over {self.size} processes ({self.pattern})"


@dataclass(frozen=True, slots=True)
class Holding:
    """What the process with number `rank` of a grid holds of `experts` experts.

    Attributes:
        balanced: whether processes with less to do than the mean leave out less (DualSparse-MoE section 4.3).
    """

    grid: Grid
    rank: int
    experts: int
    balanced: bool = False

    @property
    def group(self) -> int:
        return self.rank // self.grid.slices

    @property
    def slice(self) -> int:
        return self.rank % self.grid.slices

    @property
    def own(self) -> range:
        """The experts of which this process has all neurons, or a slice."""
        firsts = self.grid.firsts(self.experts)
        return range(firsts[self.group], firsts[self.group + 1])

    def ease(self, index: Tensor, tokens: int) -> float:
        """The factor of limits by which this process leaves out experts: its load over the mean, at most 1.

        Loads are the (token, expert) calls of the step that the router chose, before anything is left out, so a
        process computes the factor from its own calls and the number of tokens alone.

        Args:
            index: (B, K) choices, with all of this process's calls among them. tokens: of the step in all processes.
        """
        if not self.balanced:
            return 1.0
        load = int(((index >= self.own.start) & (index < self.own.stop)).sum())
        return min(1.0, load * self.grid.groups / max(1, tokens * index.shape[1]))

    def of_layer(self, layer: PackedLayer) -> PackedLayer:
        """The held part of a layer: signal and rows (E', F', ...), and tables of all E experts, by which all processes
        choose alike.
        """
        own, slices = self.own, self.grid.slices

        def part(whole: Tensor) -> Tensor:
            held = whole[own.start : own.stop]
            return held if slices == 1 else held[:, self.slice :: slices].contiguous()

        rows = ExpertRows(layer.rows.layout, part(layer.rows.data))
        return replace(layer, signal=layer.signal.mapped(part), rows=rows)

    def of_manifest(self, manifest: Manifest) -> Manifest:
        """The sizes of what is held, for planning."""
        a = manifest.architecture
        neurons = a.intermediate // self.grid.slices
        return replace(manifest, architecture=replace(a, experts=len(self.own), intermediate=neurons))
