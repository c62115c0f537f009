"""A model as it runs on one device, or divided among several: what all of them together take.

Cards that have some layers each work one after the other, and the stream of a token crosses from each to the next: down
to RAM and up again, since most cards of desktops cannot read each other's memory.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from . import prompt_estimate, speed_estimate
from .footprint import Footprint
from .measured_figures import Curve
from .speed_estimate import PROMPT, Held, Speeds, Token, TokenWork


@dataclass(frozen=True, slots=True)
class DeviceLayers:
    """One device's layers, of the model's with experts, and what it has of them."""

    layers: range
    speeds: Speeds
    held: Held

    def work(self, work: TokenWork) -> TokenWork:
        """A token's work in these layers."""
        return of_layers(work, self.layers)


@dataclass(frozen=True, slots=True)
class Running:
    """places: of all layers, in their order. The first one has the embedding and the head too."""

    takes: Footprint
    places: Sequence[DeviceLayers]

    @classmethod
    def alone(cls, takes: Footprint, speeds: Speeds, held: Held) -> Running:
        """On one device."""
        return cls(takes, (DeviceLayers(range(takes.sizes.layers), speeds, held),))

    def token(self, work: TokenWork, factor: float = 1.0, curve: Curve | None = None, context: int = PROMPT) -> Token:
        """See `speed_estimate.decode`; all rates times `factor`."""
        tokens: list[Token] = []
        for number, place in enumerate(self.places):
            takes = self.takes if not number else dataclasses.replace(self.takes, head=0)
            given = takes, place.work(work), place.speeds.times(factor), place.held
            tokens.append(speed_estimate.decode(*given, curve, context))
        names = [field.name for field in dataclasses.fields(Token)]
        total = Token(**{name: sum(getattr(token, name) for token in tokens) for name in names})
        return dataclasses.replace(total, host=total.host + self.crossings_s() / factor)

    def prefill(self, work: TokenWork, factor: float = 1.0) -> float:
        """See `prompt_estimate.prefill`."""
        rates = [
            prompt_estimate.prefill(self.takes, place.work(work), place.speeds.times(factor), place.held)
            for place in self.places
        ]
        return 1 / sum(1 / rate for rate in rates)

    def crossings_s(self) -> float:
        """A token's way from card to card and back to the first one."""
        if len(self.places) == 1:
            return 0.0
        ring = [*self.places, self.places[0]]
        nbytes = 2 * self.takes.sizes.hidden
        return sum(crossing_s(nbytes, one.speeds, other.speeds) for one, other in itertools.pairwise(ring))


def crossing_s(nbytes: int, down: Speeds, up: Speeds) -> float:
    """So many bytes from one card to another. `decode` counts two launches behind the last layer of each card: of the
    head, or of these copies.
    """
    return sum(speeds.link_latency + nbytes / speeds.link for speeds in (down, up))


def of_layers(work: TokenWork, layers: range) -> TokenWork:
    """A token's work in some layers."""
    if not work.layers:
        return work
    return dataclasses.replace(work.over(layers), layers=work.layers[layers.start : layers.stop])
