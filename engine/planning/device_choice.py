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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...kernels import operations as kernels
from ...models.errors import FloeError, UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer, PackedModel
from ...models.quantities import memory as size
from ..machine import hardware, torch_build
from ..offload import cards
from ..offload.cards import Card
from ..offload.device import Device
from ..offload.lane_rates import TOUCHED, Rates, rates_file
from ..offload.links import pinning
from ..offload.links.cuda_link import open_cuda_link
from ..offload.links.link import Link, throttled_link
from ..offload.links.pinning import Pinned
from ..offload.links.transfer import Kind, TransferMode
from ..offload.links.tuned_link import LinkEnds, open_link
from ..offload.looking import Looking
from ..offload.offload import Offload, Parts
from ..offload.virtual.virtual_device import Turns, VirtualDevice
from ..quality_presets import Preset
from . import disk_tier, machine
from .footprint import kv_element, sizes_of
from .memory_plan import DeviceShares
from .opened_pack import Asked, OpenedPack, UsableGpu
from .rates import measured_rates, memory_rate
from .speed_estimate import Speeds, host_times

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


def unheard(_step: str) -> None:
    """Nobody is shown what takes a while."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where to open a pack.

    Attributes:
        place: torch's name of the device. why: in words. shares: the division of the device's memory.
        make: the device of a pool of rows, given what shows the steps of that; None where there is no pool.
        budget: bytes of device memory that weights, keys and values may take; None if the CPU computes in RAM.
        cap: bytes that torch may take of a GPU, see `enforce`; None where there is no GPU.
        remedy: how to make torch compute on a GPU that would have been chosen, see torch_build.py; or "".
        pools: the fewest and the most bytes of a pool of rows on this device, or on the one that was not chosen.
    """

    place: str
    why: str
    shares: DeviceShares
    make: Callable[[TransferMode, Callable[[str], None]], Device] | None = None
    budget: int | None = None
    cap: int | None = None
    remedy: str = ""
    pools: tuple[int, int] | None = None

    def enforce(self) -> None:
        """Make torch refuse allocations beyond the memory that may be used; the driver's own 0.3 to 0.5 GB are not
        included.

        Called before anything is put on the GPU. Without it the limit would apply only to the pool.
        """
        if self.cap is not None:
            card = torch.get_device_module(self.place)
            there = self.cap + card.memory_allocated(self.place)
            share = min(1.0, there / card.mem_get_info(self.place)[1])
            card.set_per_process_memory_fraction(share, self.place)


def choose(
    wanted: str,
    manifest: Manifest,
    layers: Sequence[PackedLayer],
    config: Any,
    vram: int | None = None,
    preset: Preset | None = None,
    asked: Asked | None = None,
    packed: PackedModel | None = None,
    report: Callable[[str], None] = unheard,
) -> DeviceChoice:
    """The device for a pack.

    Args:
        wanted: "auto", "cpu", "cuda", "cuda:N", or a test device. vram: the most of its memory to use, in bytes.
        preset: that the pack is opened with; None: the default one. packed: the pack itself; without it the system
            reads what RAM does not hold. report: is given steps that take a while, in words.

    Raises:
        UsageError: a device that does not exist here, or has too little memory. FloeError: one that cannot compute, or
            has no link.
    """
    asked = asked or Asked()
    virtual, throttled = wanted.startswith(cards.PREFIX), wanted.startswith(THROTTLED)
    element = kv_element(manifest.widths.dense, sizes_of(manifest, config)) if virtual or throttled else 2
    pack = OpenedPack(manifest, layers, config, element, preset, asked)
    if virtual:
        need_compiled(wanted)
        choice = _virtual(wanted, pack, vram)
        return dataclasses.replace(choice, pools=pack.pools(choice.budget or 0))
    if throttled:
        return dataclasses.replace(_throttled(wanted, pack, vram), pools=pack.pools(vram or 0))
    place, why = real_place(wanted)
    if place == "cpu":
        remedy = torch_build.remedy() if wanted.lower() == "auto" else ""
        return dataclasses.replace(_in_ram(why, pack, packed), remedy=remedy)
    found = hardware.probe(Path())
    if wanted != "auto":
        slow = kernels_on(place, report).name == "reference"  # what it loads there is not free any more
        choice = _on_gpu(UsableGpu.of(place, found), why, pack, vram)
        return dataclasses.replace(choice, remedy=torch_build.remedy()) if slow else choice
    # The kernels run on cards of a certain age; plain torch on others is not worth it.
    able = [gpu.index for gpu in found.gpus if gpu.index is not None]
    able = [index for index in able if kernels.foreseen(index)[0] != "reference"] or able[:1]
    gpus = [UsableGpu.of(f"cuda:{index}", found, used=False) for index in able]
    if lacking := hardware.uncompiled():
        whole = [gpu for gpu in gpus if pack.shares(gpu.machine, gpu.budget(vram)).place == "gpu"]
        if not whole:
            words = f"a part of it on a GPU needs compiled code, and {lacking}. {hardware.compiled_by()}"
            return _in_ram(words, pack, packed)
        gpus = whole
    wished, pack = pack, pack.granted(max(gpu.budget(vram) for gpu in gpus))
    fitting = [gpu for gpu in gpus if pack.fits(gpu.budget(vram))]
    if not fitting:
        least = size(pack.least())
        return _in_ram(f"{why} with {size(gpus[0].budget(vram))} to use, and {least} is needed", pack, packed)
    speeds = {gpu: pack.tokens_s(gpu.machine, pack.shares(gpu.machine, gpu.budget(vram))) for gpu in fitting}
    best = max(fitting, key=speeds.__getitem__)
    cpu = pack.tokens_s(best.machine, pack.in_ram())
    if cpu > speeds[best] and asked.mix is None and asked.wanted.kind == "auto":
        estimate = f"{cpu:.3g} tokens/s against {speeds[best]:.3g}"
        why = f"{why}, and the CPU is faster for this model by our estimate: {estimate}"
        return dataclasses.replace(_in_ram(why, pack, packed), pools=pack.pools(best.budget(vram)))
    if (backend := kernels_on(best.place, report)).name == "reference":
        return dataclasses.replace(_in_ram(f"{why}: {backend.reason}", pack, packed), remedy=torch_build.remedy())
    if len(gpus) > 1:
        why = f"it is the fastest of {len(gpus)} GPUs for this model by our estimate"
    return _on_gpu(UsableGpu.of(best.place, found), why, wished, vram)


def kernels_on(place: str, report: Callable[[str], None]) -> kernels.Backend:
    """The kernels of a GPU, of which the first is compiled now."""
    report(f"Compiling a first kernel for {place}")
    return kernels.choose(place)


def real_place(wanted: str) -> tuple[str, str]:
    """torch's name of a device of this machine, and why it is that.

    Raises:
        UsageError: there is none. FloeError: there is, and it cannot compute.
    """
    try:
        return hardware.choose_device(wanted)
    except ValueError as error:
        why = str(error)
        cause = f"{why[:1].upper()}{why[1:].rstrip('.')}."
        hint = torch_build.remedy() or "Use --device cpu."
        kind = FloeError if wanted.lower().startswith("cuda") and hardware.all_idle() else UsageError
        raise kind(f"The device {wanted!r} cannot be used", cause, hint) from error


def _on_gpu(gpu: UsableGpu, why: str, pack: OpenedPack, vram: int | None) -> DeviceChoice:
    budget = gpu.budget(vram)
    pack = pack.granted(budget)
    shares = pack.shares(gpu.machine, budget)
    if shares.place != "gpu":
        need_compiled(gpu.place)
    if shares.place == "gpu":
        choice = gpu_with(gpu, f"{why}, and the whole pack fits{pack.lacking}", shares, (), vram)
        return dataclasses.replace(choice, pools=None if hardware.uncompiled() else pack.pools(budget))
    if vram is not None and vram > gpu.free:
        why += f" of which {size(gpu.free)} is free"
    why += f"; with {size(budget)} of its memory, {shares.words}, because all weights need {size(pack.needs.whole())}"
    why += pack.against_pool(gpu.machine, shares, budget) + pack.lacking
    return dataclasses.replace(gpu_with(gpu, why, shares, pack.streamed(shares), vram), pools=pack.pools(budget))


def gpu_with(
    gpu: UsableGpu, why: str, shares: DeviceShares, layers: Sequence[PackedLayer], vram: int | None
) -> DeviceChoice:
    """The choice of a GPU whose memory is divided so. layers: of which rows cross the link; none: all is there."""
    place, cap, budget = gpu.place, gpu.cap(vram), gpu.budget(vram)
    if not layers:
        return DeviceChoice(place, why, shares, budget=budget, cap=cap)
    row = layers[0].rows.layout.nbytes

    def make(wanted: TransferMode, report: Callable[[str], None]) -> Device:
        def link(kind: Kind, chunk: int, pinned: Pinned | None) -> Link:
            in_place = kind == "in place"
            return open_cuda_link(torch.device(place), row, chunk=chunk, zero_copy=in_place, pinned=pinned)

        nbytes = sum(layer.rows.data.nbytes for layer in layers)
        device = _measured(LinkEnds(place, place, link, pinning.why_not(place, nbytes), report=report), wanted, layers)
        device.looks_ahead = False
        return device

    return DeviceChoice(place, why, shares, make, budget, cap)


def _in_ram(why: str, pack: OpenedPack, packed: PackedModel | None) -> DeviceChoice:
    """The CPU computes; where RAM does not hold all rows, the others are read from the disk."""
    tier = "" if packed is None else disk_tier.wanted(packed, pack.needs)
    if packed is None or isinstance(tier, str):
        return DeviceChoice("cpu", f"{why}; {tier}" if tier else why, pack.in_ram())

    def make(_wanted: TransferMode, _report: Callable[[str], None]) -> Device:
        return _measured(disk_tier.ends(packed, pack.layers), "staged", pack.layers, 0.0)

    shares = tier.needs.share_out(tier.needs.every("pool"), tier.budget, pack.window)
    # There is no other memory for what a longer chat needs.
    longest = tier.needs.kv.tokens(shares.most or 0, pack.window)
    shares = dataclasses.replace(shares, window=longest, most=None)
    return DeviceChoice("cpu", f"{why}; {tier.why}", shares, make, tier.budget)


def _virtual(wanted: str, pack: OpenedPack, vram: int | None) -> DeviceChoice:
    card = cards.named(wanted, study=True)
    budget = virtual_budget(card, wanted, vram)
    there, pack = machine.of_card(card, machine.here(hardware.probe(Path()), None)), pack.granted(budget)
    shares = pack.shares(there, budget)
    why = f"{wanted} is a virtual device: the CPU computes, and times come from the card's profile; {shares.words}"
    why += pack.against_pool(there, shares, budget) + pack.lacking
    return virtual_with(card, why, shares, budget, pack)


def virtual_budget(card: Card, wanted: str, vram: int | None) -> int:
    """The bytes to use of a virtual card.

    Raises:
        UsageError: it has less than `vram`.
    """
    if vram is not None and vram > card.vram_bytes:
        has = f"{cards.PREFIX}{card.name} has {size(card.vram_bytes)}."
        raise UsageError(f"{wanted} cannot give {size(vram)}", has, "Leave out --vram, or give a smaller size.")
    return vram or card.vram_bytes


def virtual_with(
    card: Card, why: str, shares: DeviceShares, budget: int, pack: OpenedPack, turns: Turns | None = None
) -> DeviceChoice:
    """The choice of a virtual card whose memory is divided so. turns: with other cards."""

    def make(wanted: TransferMode, _report: Callable[[str], None]) -> Device:
        # Rows read in place are not packed. The papers' cards use staging, so that is what "auto" means here.
        own = dataclasses.replace(card, pack_bytes_s=math.inf) if wanted == "in place" else card
        needs = pack.needs
        given = own, needs.row, needs.hidden, needs.dense // needs.layers
        device = VirtualDevice(*given, host=host_times(Speeds(1.0)), turns=turns)
        device.alone = turns is None and shares.mix is not None and shares.mix.gpu == needs.layers
        device.moves = f"rows are counted as {'read in place' if wanted == 'in place' else 'staged'}"
        return device

    return DeviceChoice("cpu", why, shares, make, budget)


def _throttled(wanted: str, pack: OpenedPack, vram: int | None) -> DeviceChoice:
    """All layers share a pool unless told otherwise: this device is there to test that."""
    throttled_rate(wanted, vram)
    mix = pack.mix or pack.needs.every("pool" if pack.wanted.kind == "auto" else pack.wanted.least)
    needs = next((one for one in pack.forms if one.fits(mix, vram or 0)), pack.needs)
    found = None if pack.mix or pack.wanted.kind == "auto" else pack.wanted_of(needs, vram or 0)
    shares = found or needs.share_out(mix, vram or 0, pack.window)
    why = f"{wanted} is a test device: RAM stands in for its memory, and its link is slowed down; {shares.words}"
    return throttled_with(wanted, why, shares, vram or 0, pack.layers)


def throttled_rate(wanted: str, vram: int | None) -> float:
    """Bytes per second of a throttled device.

    Raises:
        UsageError: it is none, or no `vram` is given.
    """
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
    need_compiled(wanted)
    return float(rate[:-2]) * 1e9


def need_compiled(wanted: str) -> None:
    """Refuse a device whose rows cross a link where the compiled kernels are missing; raises FloeError."""
    if why := hardware.uncompiled():
        cause, cure = f"Rows of experts are moved by compiled code, and {why}.", hardware.compiled_by()
        raise FloeError(f"The device {wanted!r} cannot be used for a part of a model", cause, cure)


def throttled_with(
    wanted: str, why: str, shares: DeviceShares, vram: int, layers: Sequence[PackedLayer]
) -> DeviceChoice:
    """The choice of a throttled device whose memory is divided so; layers: of the pack."""
    speed, row = throttled_rate(wanted, vram), layers[0].rows.layout.nbytes

    def make(transfer: TransferMode, _report: Callable[[str], None]) -> Device:
        def link(_kind: Kind, chunk: int, _pinned: Pinned | None) -> Link:
            return throttled_link(row, rate=speed, chunk=chunk)

        return _measured(LinkEnds(wanted, "cpu", link, "a test device has no GPU that could"), transfer, layers)

    return DeviceChoice("cpu", why, shares, make, vram)


def _measured(ends: LinkEnds, wanted: TransferMode, layers: Sequence[PackedLayer], cpu_share: float = 1.0) -> Device:
    """A device with the best transfer for its link here, and with the rates saved last time."""
    rows = layers[0].rows
    kept = rates_file(hardware.machine_id(), ends.device, rows.layout.nbytes)
    rates = Rates.load(kept) or measured_rates(rows.layout, rows.data.shape[1], GUESS, ends.place)
    link, kind, rates.link_bytes_s, how = open_link(ends, wanted, [layer.rows.data for layer in layers])
    rates.touched = TOUCHED[kind]
    if ends.place != "cpu":  # a test device's link is slowed down, and RAM feeds it easily
        rates.ram_bytes_s = memory_rate()
    device = Device(ends.device, ends.place, link, rates, cpu_share, kept)
    device.moves = how
    return device


def offload(
    choice: DeviceChoice,
    layers: Sequence[PackedLayer],
    parts: Parts,
    first: int = 0,
    report: Callable[[str], None] = unheard,
) -> Offload | None:
    """The pool and the device of a choice; None where there is no pool.

    Args:
        first: the first of its layers. report: is given steps that take a while, in words.
    """
    if choice.make is None:
        return None
    shares, device = choice.shares, choice.make(parts.transfer, report)
    if not device.cpu_share:  # nothing is in RAM that the CPU could compute instead
        parts = dataclasses.replace(parts, cpu=False)
    try:
        made = Offload(device, parts, layers, shares.rows, shares.uses, shares.keys, shares.mix, first)
        if parts.predictor == "auto" and not device.looks_ahead:
            kept = rates_file(hardware.machine_id(), device.name, layers[0].rows.layout.nbytes) if device.real else None
            made.tried = partial(Looking, len(made.pooled), file=kept and kept.with_suffix(".ahead.json"))
        return made
    except Exception:  # any error: it is raised again, once the device and its pinned memory are released
        device.close()
        raise
