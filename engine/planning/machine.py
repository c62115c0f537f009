"""The machine that a plan is made for: this one, one that was described, or a graphics card from the list.

Memory counts as installed, less a reserve for the system and other programs: memory that happens to be free now is no
basis for a lasting choice. Everything not given or measured is assumed, and every assumption is listed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...kernels.backend import BFLOAT16_FROM, TRITON_FROM
from ...models.catalog import asset
from ...models.errors import UsageError
from ...models.quantities import memory, rate, trimmed
from ..machine.gpus import Gpu
from ..machine.hardware import HALF_PINNED, Hardware
from ..offload import cards
from ..offload.cards import CHUNK_BYTES, LANE_BYTES_S, LINK_REACHED, Card
from ..offload.lane_rates import TOUCHED
from . import rates
from .measured_figures import figures
from .rates import GPU_REACHED, Measured
from .speed_estimate import Speeds

MEASURED_DOUBT, ASSUMED_DOUBT = 0.15, 0.35  # share by which rates may be off
PACKED = 1 / TOUCHED["staged"]  # share of a linear read at which the CPU packs rows (assets/devices.json, pack_bytes_s)
NO_CARD = "none"
FREE = 0.8  # share of the memory counted on; if less is free now, the plan says so
AGAIN = "floe-chat doctor --measure"
# An estimate: 50 to 100 us for each of the three starts of work that such a layer takes.
WINDOWS = (
    "Windows' driver starts work on a card more slowly than Linux's: where a layer's rows are in a pool, an estimated "
    "0.15 to 0.3 ms more for each layer and token, not counted here."
)
_TRITON = ".".join(map(str, TRITON_FROM))
_OF_GPU = (rates.GPU, rates.FLOPS, rates.PINNED, rates.PAGEABLE, *rates.COUNTED)

# Assumptions, where neither a measurement nor an option gives a value.
CPU_BYTES_S = 30e9  # two channels of DDR4
GPU_BYTES_S = 272e9 * GPU_REACHED  # RTX 4060, the slowest of the common cards in assets/devices.json
GPU_FLOPS = 25.5e12 * GPU_REACHED  # RTX 3060, likewise
LINK_BYTES_S = LANE_BYTES_S[4] * 8 * LINK_REACHED  # PCIe 4.0 x8
DISK_BYTES_S = 5e8  # an SSD on SATA
SYSTEM_SHARE, SYSTEM_MOST = 0.15, 3 << 30  # of a machine's RAM, for the system, the desktop and other programs


@dataclass(frozen=True, slots=True)
class Machine:
    """The figures of a machine that a plan needs, in bytes and bytes per second.

    Attributes:
        name: in words. ram: installed less `reserve`, for our files in the page cache too. vram: of the GPU, 0 without
            one. disk_free: None if it does not matter. cores: physical. doubt: share by which its rates may be off.
            told: by subject, the sources of its figures and the assumptions, in sentences. others: the same machine
            with each further card that shares the work, instead of this one.
    """

    name: str
    ram: int
    vram: int
    disk_free: int | None
    cores: int
    speeds: Speeds
    doubt: float
    told: Mapping[str, str] = field(default_factory=dict[str, str])
    others: tuple[Machine, ...] = ()

    @property
    def called(self) -> str:
        """All of its cards, in words."""
        names = [one.name for one in self.each]
        if len({*names}) == 1 < len(names):
            return f"{len(names)} x {self.name}"
        return " and ".join(names)

    @property
    def each(self) -> tuple[Machine, ...]:
        """With each card that shares the work."""
        return (dataclasses.replace(self, others=()), *self.others)


@dataclass(frozen=True, slots=True)
class Described:
    """A machine described by options; None for what they leave out.

    Attributes:
        card: a name that `cards.named` knows, or NO_CARD. vram, ram: installed bytes; vram of each card. pcie:
            generation and lanes of each. others: further cards that share the work.
    """

    card: str | None = None
    vram: int | None = None
    ram: int | None = None
    cpu_bytes_s: float | None = None
    link_bytes_s: float | None = None
    pcie: tuple[int, int] | None = None
    disk_bytes_s: float | None = None
    disk_free: int | None = None
    others: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether nothing is described, so that this machine is meant."""
        return self == Described()


def reserve(ram: int) -> int:
    """Bytes of a machine's RAM left to the system, the desktop and other programs."""
    return min(int(ram * SYSTEM_SHARE), SYSTEM_MOST)


def here(found: Hardware, measured: Measured | None, index: int | None = None) -> Machine:
    """This machine, its rates measured or assumed.

    Args:
        index: torch's number of the GPU to plan for; None: the first one. Only the first one is ever measured.
    """
    known = measured.rates if measured else {}
    told: dict[str, str] = {}
    if measured:
        told["rates"] = f"Its speed was measured on {measured.date[:10]}."
    if measured and measured.disturbed:
        told["rates"] += (
            f" Other programs kept {trimmed(measured.busy, 2)} cores busy meanwhile, so it may be faster. To measure "
            f"again: {AGAIN}"
        )
    told |= {
        subject: f"{what} at {rate(speed)}: assumed, not measured."
        for subject, name, what, speed in (
            ("cpu", rates.READ, "The CPU reads memory", CPU_BYTES_S),
            ("disk", rates.DISK, "The disk reads", DISK_BYTES_S),
        )
        if name not in known
    }
    cores = min(found.cores_physical or found.cores_usable, found.cores_usable)
    prompt = {"prompt 4 bit": cores * figures().core_prompt_bytes_s}
    speeds = Speeds(
        read=known.get(rates.READ, CPU_BYTES_S),
        cores=cores,
        cpu=prompt | {name: rate for name, rate in known.items() if name.endswith(" bit")},
        disk=known.get(rates.DISK, DISK_BYTES_S),
        states=known.get(rates.STATES, figures().state_bytes_s),
    )
    usable = [gpu for gpu in found.gpus if gpu.index is not None and not _older(gpu, TRITON_FROM)]
    if others := [gpu for gpu in usable[1:] if gpu.index == index]:
        usable, known = others, {name: rate for name, rate in known.items() if name not in _OF_GPU}
    vram, name = 0, found.cpu
    if usable:
        vram, name = usable[0].vram_total, f"{usable[0].name} and {found.cpu}"
        old, amds = _older(usable[0], BFLOAT16_FROM), usable[0].capability.startswith("gfx")
        speeds = _with_gpu(speeds, known, told, usable[0].name)
        speeds = dataclasses.replace(speeds, grouped=not old and not amds)
        if measured and usable is not others and (refused := measured.reasons.get(rates.NODES)):
            speeds = dataclasses.replace(speeds, node=speeds.launch)
            told["graphs"] = f"Its kernels are launched one by one, since they could not be captured: {refused}."
        if (free := usable[0].vram_free) is not None and free < FREE * vram:
            told["vram"] = f"Of its {memory(vram)} of GPU memory, {memory(free)} are free now."
        if found.system.startswith("Windows"):
            told["windows"] = WINDOWS
        if found.pinnable is not None and found.sources.get("pinnable") == HALF_PINNED:
            told["pinned"] = (
                f"{HALF_PINNED}, here {memory(found.pinnable)}: a GPU cannot read more rows than that in RAM."
            )
        if old:
            told["old"] = f"The {usable[0].name} computes in float16, since it multiplies bfloat16 slowly."
    else:
        old = [
            f"the kernels need compute capability {_TRITON} and the {gpu.name} has {gpu.capability}"
            for gpu in found.gpus
            if _older(gpu, TRITON_FROM)
        ]
        told["gpu"] = f"It has no usable GPU: {(*old, found.gpu_reason)[0]}."
    if index is None and len(usable) > 1:
        told["gpus"] = f"It has {len(usable)} GPUs: {sharing(found)}."
    if found.remedy:
        told["remedy"] = found.remedy
    told["ram"] = _of_ram(found.ram_total)
    ram = found.ram_total - reserve(found.ram_total)
    if found.ram_available < FREE * ram:
        told["ram"] += f" At the moment {memory(found.ram_available)} are free."
    if found.wsl:
        told["wsl"] = "Linux inside Windows (WSL) has only the memory that .wslconfig gives it."
    if found.ram_limit is not None and found.ram_limit <= found.ram_total:
        told["container"] = f"Its container may use {memory(found.ram_limit)} of memory."
    doubt = MEASURED_DOUBT if measured and not measured.disturbed else ASSUMED_DOUBT
    return Machine(name, ram, vram, found.disk_free, cores, speeds, doubt, told)


def here_with(found: Hardware, measured: Measured | None, indices: Sequence[int]) -> Machine:
    """This machine, with several of its GPUs; see `here`."""
    first, *others = (here(found, measured, index) for index in indices)
    return dataclasses.replace(first, others=tuple(others))


def sharing(found: Hardware) -> str:
    """How its GPUs share a model, in words; "" where there are not several."""
    usable = [f"cuda:{gpu.index}" for gpu in found.gpus if gpu.index is not None]
    return f"floe-chat --devices {','.join(usable)} shares a model among them" if len(usable) > 1 else ""


def _older(gpu: Gpu, than: tuple[int, int]) -> bool:
    """Whether an NVIDIA card of a known compute capability is older than this one."""
    return re.fullmatch(r"\d+\.\d+", gpu.capability) is not None and tuple(map(int, gpu.capability.split("."))) < than


def _of_ram(ram: int) -> str:
    return f"Of its {memory(ram)} of RAM, {memory(reserve(ram))} are reserved for the system and other programs."


def _with_gpu(speeds: Speeds, known: Mapping[str, float], told: dict[str, str], name: str = "") -> Speeds:
    """A GPU's measured rates, or the published ones of a card of that name, or those of a slow current card."""
    _tell_of_cards(told)
    listed = cards.of_gpu(name)
    nbytes = GPU_BYTES_S if listed is None else listed.gpu_bytes_s * GPU_REACHED
    flops = GPU_FLOPS if listed is None else listed.gpu_flops * GPU_REACHED
    if rates.GPU not in known:
        source = "assumed, as for a slow current card" if listed is None else "computed from published figures"
        told["gpu"] = f"The GPU reads its memory at {rate(nbytes)}: {source}."
    if rates.PINNED not in known:
        told["link"] = f"Copies to the GPU reach {rate(LINK_BYTES_S)}: assumed, as over PCIe 4.0 x8."
    return dataclasses.replace(
        speeds,
        link=min(known.get(rates.PINNED, LINK_BYTES_S), speeds.read * PACKED),
        gpu=known[rates.GPU] * GPU_REACHED if rates.GPU in known else nbytes,
        clocks=0.0 if listed is None else listed.clocks_s,
        gpu_flops=known[rates.FLOPS] * GPU_REACHED if rates.FLOPS in known else flops,
        launch=1 / known[rates.LAUNCHES] if rates.LAUNCHES in known else speeds.launch,
        node=1 / known[rates.NODES] if rates.NODES in known else speeds.node,
    )


def described(said: Described, base: Machine) -> Machine:
    """The machine that `said` describes; the rest is taken from `base`, or from the card's usual machine.

    Raises:
        UsageError: no such card, or memory or a link without a card.
    """
    if said.others:
        return _of_several(said, base)
    if said.card == NO_CARD:
        machine = _without_gpu(said, base)
    else:
        machine = base if said.card is None else of_card(cards.named(said.card), base)
    speeds, told = machine.speeds, dict(machine.told)
    if said.vram is not None:
        told.pop("remedy", None)
        machine = dataclasses.replace(machine, vram=said.vram)
        if not speeds.gpu:
            speeds = _with_gpu(speeds, {}, told)
    if said.ram is not None:
        machine = dataclasses.replace(machine, ram=said.ram - reserve(said.ram))
        told = {subject: text for subject, text in told.items() if subject not in ("wsl", "container")}
        told["ram"] = _of_ram(said.ram)
    if said.cpu_bytes_s is not None:
        told.pop("cpu", None)
        # Kernels reach about the same share of another memory's rate as here; prompts are bound by arithmetic.
        factor = said.cpu_bytes_s / speeds.read
        cpu = {name: rate * (1 if name.startswith("prompt") else factor) for name, rate in speeds.cpu.items()}
        speeds = dataclasses.replace(speeds, read=said.cpu_bytes_s, cpu=cpu)
    speeds = _linked(speeds, said, told)
    if said.disk_bytes_s is not None:
        told.pop("disk", None)
        speeds = dataclasses.replace(speeds, disk=said.disk_bytes_s)
    free = machine.disk_free if said.disk_free is None else said.disk_free
    name = machine.name if said.card not in (None, NO_CARD) else "as described; the rest is taken from this machine"
    return dataclasses.replace(machine, name=name, disk_free=free, speeds=speeds, doubt=ASSUMED_DOUBT, told=told)


def _of_several(said: Described, base: Machine) -> Machine:
    """Several cards in one machine: that of the first one, in which the others have their own memory and rates."""
    if NO_CARD in (said.card, *said.others):
        raise UsageError("--card none is no card beside others", "", "Leave it out.")
    names = [name for name in (said.card, *said.others) if name is not None]
    first, *others = (described(dataclasses.replace(said, card=name, others=()), base) for name in names)
    around = {name: getattr(first.speeds, name) for name in ("read", "cores", "cpu", "disk")}
    told = dict(first.told)
    for other in others:
        told["card"] += f" Beside it {other.name} with {memory(other.vram)}."
    if said.pcie is None and said.link_bytes_s is None:
        told["links"] = (
            "Each card counts with all lanes that it has. Many desktop boards give two cards 8 each: --pcie 4x8."
        )
    shared = tuple(
        dataclasses.replace(other, speeds=_fed(dataclasses.replace(other.speeds, **around))) for other in others
    )
    return dataclasses.replace(first, told=told, others=shared)


def _fed(speeds: Speeds) -> Speeds:
    """With a link no faster than the CPU can gather rows for it."""
    return dataclasses.replace(speeds, link=min(speeds.link, speeds.read * PACKED))


def _without_gpu(said: Described, base: Machine) -> Machine:
    if said.vram is not None or said.pcie is not None or said.link_bytes_s is not None:
        raise UsageError("--card none has no memory and no link", "", "Leave out --vram, --pcie and --link-gbs.")
    of_gpu = {"link", "graphs", "windows", "pinned", "old", "remedy"}
    told = {what: said for what, said in base.told.items() if what not in of_gpu}
    told["gpu"] = "It has no GPU."
    speeds = dataclasses.replace(base.speeds, link=0.0, gpu=0.0)
    return dataclasses.replace(base, vram=0, speeds=speeds, told=told)


def _linked(speeds: Speeds, said: Described, told: dict[str, str]) -> Speeds:
    """With the link that `said` describes, but no faster than the CPU can gather rows for it."""
    link = speeds.link if said.link_bytes_s is None else said.link_bytes_s
    if said.link_bytes_s is not None:
        told.pop("link", None)
    elif said.pcie is not None:
        generation, lanes = said.pcie
        link = LANE_BYTES_S[generation] * lanes * LINK_REACHED
        told["link"] = (
            f"Copies over PCIe {generation}.0 x{lanes} reach {rate(link)}: assumed, {LINK_REACHED:.0%} of nominal."
        )
    packed = speeds.read * PACKED
    if link > packed:
        told["packing"] = f"Copies to the GPU reach {rate(packed)}: the CPU cannot gather rows faster."
    return dataclasses.replace(speeds, link=min(link, packed))


def of_card(card: Card, base: Machine) -> Machine:
    """A card and its usual machine; RAM and disk are taken from `base`, since a card's profile has none."""
    speeds = speeds_of(card, base.speeds.disk)
    told = {
        "card": f"{memory(card.vram_bytes)} of GPU memory, in a typical machine: {card.host}.",
        "figures": "Its speeds are computed from published figures, not measured.",
        "rest": "RAM and disk are taken from this machine unless options say otherwise.",
    }
    told |= {subject: text for subject, text in base.told.items() if subject == "ram"}
    _tell_of_cards(told)
    return Machine(card.title, base.ram, card.vram_bytes, base.disk_free, _cores(card), speeds, ASSUMED_DOUBT, told)


def _tell_of_cards(told: dict[str, str]) -> None:
    """That what kernels reach on a card is not measured, as long as it is not."""
    if not figures().cards:
        told["cards"] = "No card has been measured yet: what kernels reach there is estimated from their instructions."


@functools.cache
def _cores(card: Card) -> int:
    """Those of the machine around a card."""
    told: Any = json.loads(asset("devices.json").read_text(encoding="utf-8"))
    return next(host["cores"]["value"] for host in told["hosts"].values() if host["about"] == card.host)


def speeds_of(card: Card, disk: float) -> Speeds:
    """The speeds of a card's machine, whose disk reads so many bytes a second."""
    flops_per_byte = 1.5 * 4 * 4096 / 4608  # the work of three matrices, per byte of 4-bit rows
    return Speeds(
        read=card.cpu_bytes_s,
        cores=_cores(card),
        cpu={"prompt 4 bit": card.cpu_flops / flops_per_byte},
        disk=disk,
        link=CHUNK_BYTES / card.copy_s(CHUNK_BYTES),
        link_latency=card.link_latency_s,
        gpu=card.gpu_bytes_s * cards.REACHED,
        clocks=card.clocks_s,
        gpu_flops=card.gpu_flops * cards.REACHED,
        launch=card.launch_s,
        node=card.node_s,
        grouped=card.grouped,
    )
