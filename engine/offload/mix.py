"""Which of a model's layers have their experts on the device, share a pool of rows there, or leave them to the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertsPlace = Literal["gpu", "pool", "cpu"]  # all on the device, a pool of rows there, or all in RAM


@dataclass(frozen=True, slots=True)
class Mix:
    """How many layers are of each kind; the dense part of all of them is on the device.

    Attributes:
        gpu: layers with all experts on the device. pool: with the up projections there and rows in the pool.
        cpu: whose experts the CPU computes in RAM.
        order: all layers, those with the least work first, which the CPU gets; empty: the first ones.
    """

    gpu: int = 0
    pool: int = 0
    cpu: int = 0
    order: tuple[int, ...] = ()

    @property
    def layers(self) -> int:
        """Of all kinds."""
        return self.gpu + self.pool + self.cpu

    @property
    def places(self) -> tuple[ExpertsPlace, ...]:
        """By layer. Without an order the CPU has the first, as with llama.cpp's --n-cpu-moe, and pooled ones are
        neighbours, as they look ahead.
        """
        counts: tuple[tuple[ExpertsPlace, int], ...] = (("cpu", self.cpu), ("pool", self.pool), ("gpu", self.gpu))
        places: tuple[ExpertsPlace, ...] = tuple(place for place, count in counts for _ in range(count))
        if not self.order:
            return places
        found = dict(zip(self.order, places, strict=True))
        return tuple(found[layer] for layer in range(self.layers))

    def describe(self) -> str:
        """In words."""
        there = "there" if self.gpu else "on the GPU"
        words = ((self.gpu, "all on the GPU"), (self.pool, f"with a pool of rows {there}"), (self.cpu, "by the CPU"))
        (first, where), *rest = [(count, where) for count, where in words if count]
        return ", ".join(
            [f"{first} layer{'s' if first > 1 else ''} {where}", *(f"{more} {then}" for more, then in rest)]
        )

    @property
    def pooled(self) -> list[int]:
        """The layers whose rows are in the pool."""
        return self.of("pool")

    def of(self, wanted: ExpertsPlace) -> list[int]:
        """The layers of a kind."""
        return [layer for layer, place in enumerate(self.places) if place == wanted]
