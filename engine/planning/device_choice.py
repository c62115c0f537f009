"""Which device a pack is opened on, and why: the CPU, a GPU that holds all of it, or one that holds the dense part and
as much of the experts as makes it fastest (`mix_choice.py`).

Test devices stand in where there is no GPU, and are named as such: "throttled:8gb" has a link of 8 GB/s, "sim:NAME"
counts virtual time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.cpu.binding import NativeUnavailableError, library
from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from ...models.quantities import memory as size
from .. import context, quality_presets
from ..machine import hardware
from ..offload import cards
from ..offload.device import Device
from ..offload.lane_rates import Rates, rates_file
from ..offload.links import pinning
from ..offload.links.compiled_link import CompiledLink, throttled_link
from ..offload.links.cuda_link import CudaLink
from ..offload.links.pinning import Pinned
from ..offload.links.transfer import Kind, TransferMode
from ..offload.links.tuned_link import LinkEnds, open_link
from ..offload.mix import Mix
from ..offload.offload import Offload, Parts
from ..offload.virtual.virtual_device import VirtualDevice
from ..quality_presets import Preset
from . import machine, memory_plan, mix_choice, speed_estimate
from . import rates as measured
from .footprint import Footprint, kv_element
from .machine import Machine
from .memory_plan import DeviceShares, Needs
from .rates import measured_rates
from .speed_estimate import Held, TokenWork

THROTTLED = "throttled:"
# Defaults for what cannot be measured at the start: PCIe 3.0 x16, two channels of DDR4, a GPU of 2018. Corrected while
# running.
GUESS = Rates(
    link_bytes_s=10e9,
    link_latency_s=1e-5,
    cpu_bytes_s=8e9,
    cpu_batch_bytes_s=2e10,
    cpu_latency_s=5e-5,
    gpu_bytes_s=2e11,
    launch_s=1e-5,
)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where to open a pack.

    Attributes:
        place: torch's name of the device. why: in words. shares: the division of the device's memory.
        make: the device of a pool of rows; None where there is no pool.
        budget: bytes of device memory that weights, keys and values may take; None if the CPU computes in RAM.
        cap: bytes that torch may take of a GPU, see `enforce`; None where there is no GPU.
    """

    place: str
    why: str
    shares: DeviceShares
    make: Callable[[TransferMode], Device] | None = None
    budget: int | None = None
    cap: int | None = None

    def enforce(self) -> None:
        """Make torch refuse allocations beyond the memory that may be used; the driver's own 0.3 to 0.5 GB are not
        included.

        Called before anything is put on the GPU. Without it the limit would apply only to the pool.
        """
        if self.cap is not None:
            share = min(1.0, self.cap / torch.cuda.mem_get_info(self.place)[1])
            torch.cuda.set_per_process_memory_fraction(share, self.place)


def choose(
    wanted: str,
    manifest: Manifest,
    layers: Sequence[PackedLayer],
    config: Any,
    vram: int | None = None,
    preset: Preset | None = None,
    mix: Mix | None = None,
) -> DeviceChoice:
    """The device for a pack.

    Args:
        wanted: "auto", "cpu", "cuda", "cuda:N", or a test device. vram: the most of its memory to use, in bytes.
        preset: that the pack is opened with; None: the default one. mix: where each layer's experts are; None: as
            planned.

    Raises:
        UsageError: a device that does not exist here, or has too little memory.
    """
    virtual, throttled = wanted.startswith(cards.PREFIX), wanted.startswith(THROTTLED)
    pack = _Pack(
        manifest, layers, config, kv_element(manifest.widths.dense) if virtual or throttled else 2, preset, mix
    )
    if virtual:
        return _virtual(wanted, pack, vram)
    if throttled:
        return _throttled(wanted, pack, vram)
    try:
        place, why = hardware.choose_device(wanted)
    except ValueError as error:
        why = str(error)
        cause = f"{why[:1].upper()}{why[1:].rstrip('.')}."
        raise UsageError(f"The device {wanted!r} cannot be used", cause, "Use --device cpu.") from error
    if place == "cpu":
        return DeviceChoice(place, why, DeviceShares.none(pack.window))
    return _on_gpu(place, why, pack, vram, may_decline=wanted == "auto")


class _Pack:
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

    def shares(self, machine: Machine, budget: int) -> DeviceShares:
        """The division of so much memory of the machine's GPU: as asked, or the fastest.

        Raises:
            UsageError: it is not enough.
        """
        if self.mix is not None:
            return self.needs.share_out(self.mix, budget, self.window)
        found = mix_choice.choose(self.takes, self.work, machine.speeds, self.needs, budget, machine.ram)
        if found is None:
            return self.needs.share_out(self.needs.every("cpu"), budget, self.window)
        return self.needs.share_out(found[0].mix, budget, self.window, found[0].rows)

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


def _on_gpu(place: str, why: str, pack: _Pack, vram: int | None, *, may_decline: bool) -> DeviceChoice:
    """With `may_decline`, the CPU where the GPU has too little memory or would be slower."""
    needs, here = pack.needs, machine.here(hardware.probe(Path()), measured.Measured.load(measured.kept_file()))
    free = torch.cuda.mem_get_info(place)[0]
    cap = min(free, vram or free)
    budget = memory_plan.budget(cap)
    alone = DeviceShares.none(pack.window)
    least = min(needs.least(needs.every(kind)) for kind in ("gpu", "cpu"))
    if may_decline and budget < least:
        return DeviceChoice("cpu", f"{why} with {size(budget)} to use, and {size(least)} is needed", alone)
    shares = pack.shares(here, budget)
    if may_decline and pack.mix is None:
        beside, cpu = pack.tokens_s(here, shares), pack.tokens_s(here, alone)
        if cpu > beside:
            why += f", and the CPU is faster for this model by our estimate: {cpu:.3g} against {beside:.3g} tokens/s"
            return DeviceChoice("cpu", why, alone)
    if shares.place == "gpu":
        return DeviceChoice(place, f"{why}, and the whole pack fits", shares, budget=budget, cap=cap)
    if vram is not None and vram > free:
        why += f" of which {size(free)} is free"
    why += f"; with {size(budget)} of its memory, {_words(shares)}, because all weights need {size(needs.whole())}"

    def make(wanted: TransferMode) -> Device:
        def link(kind: Kind, chunk: int, pinned: Pinned | None) -> CudaLink:
            return CudaLink(torch.device(place), needs.row, chunk=chunk, zero_copy=kind == "in place", pinned=pinned)

        layers = pack.streamed(shares)
        nbytes = sum(layer.rows.data.nbytes for layer in layers)
        return _measured(LinkEnds(place, place, link, pinning.why_not(place, nbytes)), wanted, layers)

    return DeviceChoice(place, why, shares, make, budget, cap)


def _words(shares: DeviceShares) -> str:
    assert shares.mix is not None
    return shares.mix.describe()


def _virtual(wanted: str, pack: _Pack, vram: int | None) -> DeviceChoice:
    card = cards.named(wanted, study=True)
    if vram is not None and vram > card.vram_bytes:
        has = f"{cards.PREFIX}{card.name} has {size(card.vram_bytes)}."
        raise UsageError(f"{wanted} cannot give {size(vram)}", has, "Leave out --vram, or give a smaller size.")
    needs, budget = pack.needs, vram or card.vram_bytes
    there = machine.of_card(card, machine.here(hardware.probe(Path()), None))
    shares = pack.shares(there, budget)
    why = f"{wanted} is a virtual device: the CPU computes, and times come from the card's profile; {_words(shares)}"

    def make(wanted: TransferMode) -> Device:
        # Rows read in place are not packed. The papers' cards use staging, so that is what "auto" means here.
        own = dataclasses.replace(card, pack_bytes_s=math.inf) if wanted == "in place" else card
        device = VirtualDevice(own, needs.row, needs.hidden, needs.dense // needs.layers)
        device.moves = f"rows are counted as {'read in place' if wanted == 'in place' else 'staged'}"
        return device

    return DeviceChoice("cpu", why, shares, make, budget)


def _throttled(wanted: str, pack: _Pack, vram: int | None) -> DeviceChoice:
    """All layers share a pool unless told otherwise: this device is there to test that."""
    rate = wanted.removeprefix(THROTTLED)
    if not re.fullmatch(r"\d+(\.\d+)?gb", rate, re.ASCII) or float(rate[:-2]) <= 0:
        raise UsageError(
            f"The device {wanted!r} cannot be used", "", f'Give the rate of its link, as in "{THROTTLED}8gb".'
        )
    if vram is None:
        raise UsageError(
            f"{wanted} has no memory of its own",
            "",
            "Give the amount of RAM that stands in for it, such as --vram 1gb.",
        )
    speed, needs = float(rate[:-2]) * 1e9, pack.needs
    try:
        library()
    except NativeUnavailableError as error:
        cause = f"Its link is compiled, and {error}."
        raise UsageError(f"The device {wanted!r} cannot be used", cause, "Use --device cpu.") from error
    shares = needs.share_out(pack.mix or needs.every("pool"), vram, pack.window)

    def make(transfer: TransferMode) -> Device:
        def link(_kind: Kind, chunk: int, _pinned: Pinned | None) -> CompiledLink:
            return throttled_link(needs.row, rate=speed, chunk=chunk)

        return _measured(LinkEnds(wanted, "cpu", link, "a test device has no GPU that could"), transfer, pack.layers)

    why = f"{wanted} is a test device: RAM stands in for its memory, and its link is slowed down; {_words(shares)}"
    return DeviceChoice("cpu", why, shares, make, vram)


def _measured(ends: LinkEnds, wanted: TransferMode, layers: Sequence[PackedLayer]) -> Device:
    """A device with the best transfer for its link here, and with the rates saved last time."""
    rows = layers[0].rows
    kept = rates_file(hardware.machine_id(), ends.device, rows.layout.nbytes)
    rates = Rates.load(kept) or measured_rates(rows.layout, rows.data.shape[1], GUESS, ends.place)
    link, rates.link_bytes_s, how = open_link(ends, wanted, [layer.rows.data for layer in layers])
    device = Device(ends.device, ends.place, link, rates, kept=kept)
    device.moves = how
    return device


def offload(choice: DeviceChoice, layers: Sequence[PackedLayer], parts: Parts) -> Offload | None:
    """The pool and the device of a choice; None where there is no pool."""
    if choice.make is None:
        return None
    shares, device = choice.shares, choice.make(parts.transfer)
    try:
        return Offload(device, parts, layers, shares.rows, shares.uses, shares.keys, shares.mix)
    except Exception:  # any error: it is raised again, once the device and its pinned memory are released
        device.close()
        raise
