"""A pack that is being opened, and the GPUs of this machine that it may be opened on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from .. import context, quality_presets
from ..machine.hardware import Hardware
from ..offload.mix import Mix
from ..quality_presets import Preset
from . import machine, memory_plan, mix_choice, rates, speed_estimate
from .footprint import Footprint
from .machine import Machine
from .memory_plan import DeviceShares, Needs
from .speed_estimate import Held, TokenWork

LONGER = 0.05  # share of its speed, at most, that a model gives for chats longer than those that plans have room for


@dataclass(frozen=True, eq=False)
class UsableGpu:
    """A GPU of this machine: torch's name of it, free bytes, and the machine with it."""

    place: str
    free: int
    machine: Machine

    @classmethod
    def of(cls, place: str, found: Hardware) -> UsableGpu:
        index = int(place.partition(":")[2] or 0)
        known = rates.Measured.load(rates.kept_file())
        return cls(place, torch.cuda.mem_get_info(place)[0], machine.here(found, known, index))

    def cap(self, vram: int | None) -> int:
        """Bytes that torch may take, of which `vram` is the most."""
        return min(self.free, vram or self.free)

    def budget(self, vram: int | None) -> int:
        """Bytes for weights, keys and values, likewise."""
        return memory_plan.budget(self.cap(vram))


class OpenedPack:
    """A pack that is being opened, and what it needs on a device whose keys and values have `element` bytes each."""

    def __init__(
        self,
        manifest: Manifest,
        layers: Sequence[PackedLayer],
        config: Any,
        element: int,
        preset: Preset | None,
        mix: Mix | None,
    ) -> None:
        self.layers, self.mix = layers, mix
        self.window = context.window(config)
        self.needs = Needs.of(manifest, layers, config, element)
        self.takes = Footprint.of_pack(manifest, config)
        self.work = TokenWork.of(preset or quality_presets.get(quality_presets.DEFAULT, manifest))

    def least(self) -> int:
        """The fewest bytes of a device that work."""
        return min(self.needs.least(mix) for mix in (self.needs.every("gpu"), self.mix or self.needs.every("cpu")))

    def fits(self, budget: int) -> bool:
        """Whether so much of a device's memory is of any use."""
        return budget >= self.least()

    def shares(self, machine: Machine, budget: int) -> DeviceShares:
        """The division of so much memory of the machine's GPU: as asked, or the fastest, with room for longer chats
        where that costs little.

        Raises:
            UsageError: it is not enough.
        """
        if self.mix is not None:
            return self.needs.share_out(self.mix, budget, self.window)
        found = self._fastest(machine, self.needs, budget)
        if found is None:
            return self.needs.share_out(self.needs.every("cpu"), budget, self.window)
        least, reserved = (1 - LONGER) * self.tokens_s(machine, found), self.needs.context
        while found.window < self.window:
            reserved = min(2 * reserved, self.window)
            longer = self._fastest(machine, dataclasses.replace(self.needs, context=reserved), budget)
            if longer is None or self.tokens_s(machine, longer) < least:
                break
            found = longer
        return found

    def _fastest(self, machine: Machine, needs: Needs, budget: int) -> DeviceShares | None:
        found = mix_choice.choose(self.takes, self.work, machine.speeds, needs, budget, machine.ram)
        return None if found is None else needs.share_out(found[0].mix, budget, self.window, found[0].rows)

    def tokens_s(self, machine: Machine, shares: DeviceShares) -> float:
        """Tokens per second, by the cost model."""
        pool = mix_choice.share(self.needs, shares)
        ram = memory_plan.share_ram(machine.ram, self.takes, shares.mix, pool, self.needs.context).share
        held = Held(gpu=shares.mix is not None, pool=pool, ram=ram, mix=shares.mix)
        return 1 / speed_estimate.decode(self.takes, self.work, machine.speeds, held).seconds

    def streamed(self, shares: DeviceShares) -> list[PackedLayer]:
        """The layers of which rows cross the link."""
        places = () if shares.mix is None else shares.mix.places
        return [layer for layer, place in zip(self.layers, places, strict=True) if place != "gpu"]
