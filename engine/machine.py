"""The machine that a plan is made for: this one, one that was described, or one of the virtual cards.

What nobody said or measured is assumed, and every assumption is told.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..models.errors import UsageError
from . import rates, virtual
from .estimate import Speeds
from .hardware import Hardware
from .rates import GPU_REACHED, Measured
from .virtual import CHUNK_BYTES, Card

MEASURED_DOUBT, ASSUMED_DOUBT = 0.15, 0.35  # by what share rates may be off
PACKED = 1 / 3  # of a linear read, what the CPU packs rows at (assets/devices.json, pack_bytes_s)
LANE_BYTES_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # PCIe, nominal, one way
LINK_REACHED = 0.8  # of that, what pinned copies usually reach

NO_CARD = "none"
AGAIN = "floe-chat doctor --measure"

# What is assumed where neither a measurement nor an option says it.
CPU_BYTES_S = 30e9  # two channels of DDR4
GPU_BYTES_S = 272e9 * GPU_REACHED  # RTX 4060, the slowest of the common cards in assets/devices.json
GPU_FLOPS = 25.5e12 * GPU_REACHED  # RTX 3060, likewise
LINK_BYTES_S = LANE_BYTES_S[4] * 8 * LINK_REACHED  # PCIe 4.0 x8
DISK_BYTES_S = 5e8  # an SSD on SATA
CORE_PROMPT_BYTES_S = 1.1e10  # rows times tokens of one core (BENCHMARKS.md, AVX2 kernels, 32 tokens of an expert)
SYSTEM_SHARE, SYSTEM_MOST = 0.15, 3 << 30  # what system and desktop take of a machine's RAM


@dataclass(frozen=True, slots=True)
class Machine:
    """What a plan needs to know, in bytes and bytes per second.

    Attributes:
        name: in words. ram: free for us, files that stay in the page cache included. vram: free device memory, 0
            without a GPU. disk_free: None where it does not matter. cores: physical. doubt: by what share its rates may
            be off. told: by subject, where its figures are from and what was assumed, in sentences.
    """

    name: str
    ram: int
    vram: int
    disk_free: int | None
    cores: int
    speeds: Speeds
    doubt: float
    told: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Described:
    """What was said of a machine; None is what was not.

    Attributes:
        card: a virtual one by name, or NO_CARD. vram, ram: all that there is, in bytes. pcie: generation and lanes.
    """

    card: str | None = None
    vram: int | None = None
    ram: int | None = None
    cpu_bytes_s: float | None = None
    link_bytes_s: float | None = None
    pcie: tuple[int, int] | None = None
    disk_bytes_s: float | None = None
    disk_free: int | None = None

    @property
    def empty(self) -> bool:
        """Whether nothing was said, so that this machine is meant."""
        return self == Described()


def here(found: Hardware, measured: Measured | None) -> Machine:
    """This machine, its rates measured or assumed."""
    known = measured.rates if measured else {}
    told: dict[str, str] = {}
    if measured:
        told["rates"] = f"Rates were measured on this machine on {measured.date[:10]}."
    if measured and measured.disturbed:
        told["rates"] += f" Other programs kept {measured.busy:.1f} cores busy meanwhile; measure anew: {AGAIN}."
    told |= {
        subject: f"{what} at an assumed {_gb(rate)}."
        for subject, name, what, rate in (
            ("cpu", rates.READ, "The CPU reads memory", CPU_BYTES_S),
            ("disk", rates.DISK, "The disk reads", DISK_BYTES_S),
        )
        if name not in known
    }
    cores = min(found.cores_physical or found.cores_usable, found.cores_usable)
    prompt = {"prompt 4 bit": cores * CORE_PROMPT_BYTES_S}
    speeds = Speeds(
        read=known.get(rates.READ, CPU_BYTES_S),
        cpu=prompt | {name: rate for name, rate in known.items() if name.endswith(" bit")},
        disk=known.get(rates.DISK, DISK_BYTES_S),
    )
    usable = [gpu for gpu in found.gpus if gpu.index is not None]
    vram, name = 0, found.cpu
    if usable:
        vram, name = usable[0].vram_free, f"{usable[0].name} and {found.cpu}"
        speeds = _with_gpu(speeds, known, told)
    else:
        told["gpu"] = f"There is no GPU to use: {found.gpu_reason}."
    if found.wsl:
        told["wsl"] = "Inside Windows (WSL), Linux has only the memory that .wslconfig gives it."
    if found.ram_limit is not None:
        told["container"] = f"The container may use {found.ram_limit / 2**30:.1f} GB of memory."
    doubt = MEASURED_DOUBT if measured and not measured.disturbed else ASSUMED_DOUBT
    return Machine(name, found.ram_available, vram, found.disk_free, cores, speeds, doubt, told)


def _with_gpu(speeds: Speeds, known: Mapping[str, float], told: dict[str, str]) -> Speeds:
    """A GPU's rates as they were measured, or those of a slow one of today."""
    if rates.GPU not in known:
        told["gpu"] = f"The GPU is taken for a slow one of today: {_gb(GPU_BYTES_S)} by its kernels."
    if rates.PINNED not in known:
        told["link"] = f"The link to the GPU is taken for PCIe 4.0 x8: {_gb(LINK_BYTES_S)}."
    return dataclasses.replace(
        speeds,
        link=min(known.get(rates.PINNED, LINK_BYTES_S), speeds.read * PACKED),
        gpu=known[rates.GPU] * GPU_REACHED if rates.GPU in known else GPU_BYTES_S,
        gpu_flops=known[rates.FLOPS] * GPU_REACHED if rates.FLOPS in known else GPU_FLOPS,
    )


def described(said: Described, base: Machine) -> Machine:
    """The machine that was described; what was not said is `base`'s, or the card's own machine's.

    Raises:
        UsageError: no such card, or the memory or link of none.
    """
    if said.card == NO_CARD:
        machine = _without_gpu(said, base)
    else:
        machine = base if said.card is None else of_card(virtual.card(said.card), base)
    speeds, told = machine.speeds, dict(machine.told)
    if said.vram is not None:
        machine = dataclasses.replace(machine, vram=said.vram)
        if not speeds.gpu:
            speeds = _with_gpu(speeds, {}, told)
    if said.ram is not None:
        takes = min(int(said.ram * SYSTEM_SHARE), SYSTEM_MOST)
        machine = dataclasses.replace(machine, ram=said.ram - takes)
        told = {subject: text for subject, text in told.items() if subject not in ("wsl", "container")}
        told["ram"] = f"Of its {said.ram / 2**30:.4g} GB of RAM, {takes / 2**30:.1f} GB are left to system and desktop."
    if said.cpu_bytes_s is not None:
        told.pop("cpu", None)
        # Kernels measured here reach about the same share of another memory's rate; prompts are bound by arithmetic.
        factor = said.cpu_bytes_s / speeds.read
        cpu = {name: rate * (1 if name.startswith("prompt") else factor) for name, rate in speeds.cpu.items()}
        speeds = dataclasses.replace(speeds, read=said.cpu_bytes_s, cpu=cpu)
    speeds = _linked(speeds, said, told)
    if said.disk_bytes_s is not None:
        told.pop("disk", None)
        speeds = dataclasses.replace(speeds, disk=said.disk_bytes_s)
    free = machine.disk_free if said.disk_free is None else said.disk_free
    name = machine.name if said.card not in (None, NO_CARD) else "as described, the rest as this one"
    return dataclasses.replace(machine, name=name, disk_free=free, speeds=speeds, doubt=ASSUMED_DOUBT, told=told)


def _without_gpu(said: Described, base: Machine) -> Machine:
    if said.vram is not None or said.pcie is not None or said.link_bytes_s is not None:
        raise UsageError("No GPU has neither memory nor a link", "", "Leave out --vram, --pcie and --link-gbs.")
    told = {**base.told, "gpu": "It has no GPU."}
    told.pop("link", None)
    speeds = dataclasses.replace(base.speeds, link=0.0, gpu=0.0)
    return dataclasses.replace(base, vram=0, speeds=speeds, told=told)


def _linked(speeds: Speeds, said: Described, told: dict[str, str]) -> Speeds:
    """With the link that was said, and no faster than rows can be packed for it."""
    link = speeds.link if said.link_bytes_s is None else said.link_bytes_s
    if said.link_bytes_s is not None:
        told.pop("link", None)
    elif said.pcie is not None:
        generation, lanes = said.pcie
        link = LANE_BYTES_S[generation] * lanes * LINK_REACHED
        told["link"] = f"Pinned copies over PCIe {generation}.0 x{lanes} are taken to reach {_gb(link)}."
    packed = speeds.read * PACKED
    if link > packed:
        told["packing"] = f"Rows cross the link no faster than the CPU packs them: {_gb(packed)} is assumed."
    return dataclasses.replace(speeds, link=min(link, packed))


def of_card(card: Card, base: Machine) -> Machine:
    """A virtual card and the machine around it; RAM and disk are `base`'s, which its profile does not name."""
    flops_per_byte = 1.5 * 4 * 4096 / 4608  # three matrices' work, counted by the bytes of 4-bit rows
    speeds = Speeds(
        read=card.cpu_bytes_s,
        cpu={"prompt 4 bit": card.cpu_flops / flops_per_byte},
        disk=base.speeds.disk,
        link=CHUNK_BYTES / card.copy_s(CHUNK_BYTES),
        link_latency=card.link_latency_s,
        gpu=card.gpu_bytes_s * virtual.REACHED,
        gpu_flops=card.gpu_flops * virtual.REACHED,
        launch=card.launch_s,
    )
    told = {
        "card": f"{card.name} and its machine are as assets/devices.json has them: published figures, not measured.",
        "rest": "Its RAM, disk and number of cores are taken from this machine, unless options say otherwise.",
    }
    return Machine(card.name, base.ram, card.vram_bytes, base.disk_free, base.cores, speeds, ASSUMED_DOUBT, told)


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
