"""A pack that is being opened, and the GPUs of this machine that it may be opened on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from ...models.quantities import digits
from .. import context, quality_presets
from ..context import CONTEXT
from ..events import Advanced
from ..machine import gpus
from ..machine.hardware import Hardware
from ..offload.mix import Mix
from ..quality_presets import Preset
from ..ranges import ANY_PLACE, KV_BITS, Wanted
from . import machine, memory_plan, mix_choice, rates, speed_estimate, worth
from .footprint import Footprint
from .machine import Machine
from .memory_plan import DeviceShares, Needs
from .mix_choice import Costs
from .speed_estimate import Held, TokenWork

CUDA_CONTEXT = 1 << 29  # bytes at the most that a card's context takes, with the modules that are loaded at first


@dataclass(frozen=True, slots=True)
class Asked:
    """What a person asked for when a pack is opened.

    Attributes:
        mix: where each layer's experts are; None: as planned. kv_bits: of keys and values; None: as planned. context:
            tokens whose keys and values have memory reserved. division: layers with experts of each of several cards;
            empty: as planned. wanted: which kind of mix, where none is given.
    """

    mix: Mix | None = None
    kv_bits: int | None = None
    context: int = CONTEXT
    division: tuple[int, ...] = ()
    wanted: Wanted = ANY_PLACE

    @classmethod
    def of(cls, advanced: Advanced, mix: Mix | None = None, division: tuple[int, ...] = ()) -> Asked:
        """By the user's settings.

        Raises:
            UsageError: there are no such bits, no tokens, or no such placement.
        """
        if advanced.kv_bits not in KV_BITS:
            hint = f"Set advanced.kv_bits to one of {', '.join(KV_BITS)}."
            raise UsageError(f"Keys and values cannot have {advanced.kv_bits!r} bits", "", hint)
        if advanced.context < 1:
            raise UsageError(
                f"A context cannot have {advanced.context} tokens", "", "Set advanced.context to 1 or more."
            )
        kv_bits = None if advanced.kv_bits == "auto" else int(advanced.kv_bits)
        return cls(mix, kv_bits, advanced.context, division, Wanted.of(advanced.placement))

    def forms(self) -> tuple[int, ...]:
        """The bits that keys and values may have, the most exact first."""
        return worth.KV_FORMS if self.kv_bits is None else (self.kv_bits,)


@dataclass(frozen=True, eq=False)
class UsableGpu:
    """A GPU of this machine: torch's name of it, free bytes, and the machine with it."""

    place: str
    free: int
    machine: Machine

    @classmethod
    def of(cls, place: str, found: Hardware, *, used: bool = True) -> UsableGpu:
        """With its free memory exactly; if it may not be `used`, without touching it where the driver's library says
        how much is free.
        """
        index = int(place.partition(":")[2] or 0)
        there = machine.here(found, rates.Measured.load(rates.kept_file()), index)
        known = next((gpu.vram_free for gpu in found.gpus if gpu.index == index), None)
        if used or known is None or torch.get_device_module(place).memory_reserved(place):
            return cls(place, gpus.free(place), there)
        return cls(place, max(0, known - CUDA_CONTEXT), there)

    def cap(self, vram: int | None) -> int:
        """Bytes that torch may take, of which `vram` is the most."""
        return min(self.free, vram or self.free)

    def budget(self, vram: int | None) -> int:
        """Bytes for weights, keys and values, at most `vram`. What is not torch's has room under a lower limit."""
        whole = memory_plan.budget(self.free)
        return whole if vram is None else min(whole, int(vram * (1 - memory_plan.KEPT_FREE)))


class OpenedPack:
    """A pack that is being opened.

    Attributes:
        forms: needs on a device, by the bits that keys and values may have; needs: the first of them.
        lacking: in words that follow others, how much of the context has no room; "" where all has.
    """

    def __init__(
        self,
        manifest: Manifest,
        layers: Sequence[PackedLayer],
        config: Any,
        element: int,
        preset: Preset | None,
        asked: Asked,
    ) -> None:
        """`element`: bytes of a key's or a value's number on the device, where it has 16 bits."""
        self.layers, self.mix, self.division, self.wanted = layers, asked.mix, asked.division, asked.wanted
        self.window = context.window(config)
        self.forms = [Needs.of(manifest, layers, config, element, bits, asked.context) for bits in asked.forms()]
        self.needs, self.lacking = self.forms[0], ""
        self._wished = self.needs.context
        self.takes = Footprint.of_pack(manifest, config)
        preset = preset or quality_presets.get(quality_presets.DEFAULT, manifest)
        self.work = TokenWork.of(preset, manifest, gated=self.takes.sizes.gated)

    def granted(self, budget: int) -> OpenedPack:
        """With as much context reserved as so many bytes have room for, where what was asked for does not fit."""
        mixes = self.needs.every("gpu"), self.mix or self.needs.every(self.wanted.least)
        forms = memory_plan.granted(self.forms, budget, *mixes)
        return self if forms == self.forms else self.with_forms(forms)

    def with_forms(self, forms: Sequence[Needs]) -> OpenedPack:
        """With less context reserved than was asked for, which is said."""
        pack = copy.copy(self)
        pack.forms, pack.needs = list(forms), forms[0]
        most = max(needs.context for needs in forms)
        pack.lacking = f"; of {self._wished:,} tokens of context, {most:,} have room there"
        return pack

    def least(self) -> int:
        """The fewest bytes of a device that work."""
        return min(
            needs.least(mix) for needs in self.forms for mix in (needs.every("gpu"), self.mix or needs.every("cpu"))
        )

    def in_ram(self) -> DeviceShares:
        """The shares if the CPU computes."""
        return DeviceShares.none(self.window, self.needs.kv_bits)

    def fits(self, budget: int) -> bool:
        """Whether so much of a device's memory is of any use."""
        return budget >= self.least()

    def shares(self, machine: Machine, budget: int) -> DeviceShares:
        """The division of so much memory of the machine's GPU: as asked, or the fastest.

        Raises:
            UsageError: it is not enough.
        """
        costs = Costs(self.takes, self.work, machine.speeds)
        best: DeviceShares | None = None
        for needs in self.forms:
            found = self._in_form(costs, needs, budget, machine.ram)
            if found is not None and (best is None or self._pays(machine, best, found)):
                best = found
        return best or self.forms[-1].share_out(self.mix or self.needs.every(self.wanted.least), budget, self.window)

    def _pays(self, machine: Machine, exact: DeviceShares, coarse: DeviceShares) -> bool:
        """Whether fewer bits of keys and values make it faster by more than their loss outweighs."""
        gain = worth.of_speed(self.tokens_s(machine, coarse)) - worth.of_speed(self.tokens_s(machine, exact))
        return worth.pays(gain, worth.kv_loss(coarse.kv_bits) - worth.kv_loss(exact.kv_bits))

    def _in_form(self, costs: Costs, needs: Needs, budget: int, ram: int) -> DeviceShares | None:
        """None if it does not fit."""
        if self.mix is not None:
            return needs.share_out(self.mix, budget, self.window) if needs.fits(self.mix, budget) else None
        if self.wanted.kind != "auto":
            return self.wanted_of(needs, budget)
        found = mix_choice.choose(costs, needs, budget, ram)
        return None if found is None else needs.share_out(found[0].mix, budget, self.window, found[0].rows)

    def wanted_of(self, needs: Needs, budget: int) -> DeviceShares | None:
        """The division for the kind of mix that is wanted; None if it does not fit."""
        wanted = mix_choice.asked(needs, budget, self.wanted, self.work.order)
        return None if wanted is None else needs.share_out(wanted[0], budget, self.window, wanted[1])

    def pools(self, budget: int) -> tuple[int, int] | None:
        """The fewest and the most bytes of a pool that so much of a device's memory has room for; None: no room."""
        found = (mix_choice.pool_rows(needs, budget) for needs in self.forms)
        rows = next((each for each in found if each is not None), None)
        return None if rows is None else (rows[0] * self.needs.row, rows[1] * self.needs.row)

    def tokens_s(self, machine: Machine, shares: DeviceShares) -> float:
        """Tokens per second, by the cost model."""
        held = self.held(self.needs, shares, machine.ram)
        return 1 / speed_estimate.decode(self.takes, self.work, machine.speeds, held).seconds

    def against_pool(self, machine: Machine, shares: DeviceShares, budget: int) -> str:
        """Why the planner's choice has no pool, where one would fit: the estimates; "" for other choices."""
        if shares.mix is None or shares.mix.pool or self.mix is not None or self.wanted.kind != "auto":
            return ""
        if (wanted := mix_choice.asked(self.needs, budget, Wanted("pool"), self.work.order)) is None:
            return ""
        pooled = self.needs.share_out(wanted[0], budget, self.window, wanted[1])
        slower, chosen = (digits(self.tokens_s(machine, one)) for one in (pooled, shares))
        return f", by our estimate {chosen} tokens/s against {slower} with a pool of rows"

    def held(self, needs: Needs, shares: DeviceShares, ram: int) -> Held:
        """As the cost model takes it. needs: of the layers that the shares are about."""
        pool = mix_choice.share(needs, shares)
        of = ram, self.takes, shares.mix, pool, self.needs.context, shares.kv_bits
        share = memory_plan.share_ram(*of).share
        return Held(shares.mix is not None, pool, share, mix=shares.mix, kv_bits=shares.kv_bits, keys=shares.most)

    def streamed(self, shares: DeviceShares) -> list[PackedLayer]:
        """The layers of which rows cross the link."""
        places = () if shares.mix is None else shares.mix.places
        return [layer for layer, place in zip(self.layers, places, strict=True) if place != "gpu"]
