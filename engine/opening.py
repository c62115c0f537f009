"""Which device a pack is opened on, how its memory is shared out, and why: the CPU, a GPU that holds all of it, or one
that holds the dense part and the up projections, with a pool of rows in the rest.

Test devices stand in where there is no GPU, and are named as such: "throttled:8gb" has a link of 8 GB/s, "sim:NAME"
counts virtual time.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.errors import UsageError
from ..models.manifest import Manifest
from ..models.packed import PackedLayer
from ..models.quantities import memory as size
from . import cards, context, hardware, pinning
from .cuda_link import CudaLink
from .device import Device
from .footprint import kv_element
from .kv import GROUP
from .lane_rates import Rates, rates_file
from .offload import Offload, Parts
from .pinning import Pinned
from .rates import measured_rates
from .throttled_link import ThrottledLink
from .transfer import Kind, Wanted
from .tuned_link import Ends, open_link
from .virtual_device import VirtualDevice

THROTTLED = "throttled:"
KEPT_FREE = 0.08  # of the GPU memory that may be used, for a step's own tensors and for the desktop
CONTEXT = 4096  # tokens whose keys and values are reserved, at the most
# What cannot be measured at the start: PCIe 3.0 x16, two channels of DDR4, a GPU of 2018. Corrected while running.
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
class Needs:
    """What a model takes of device memory, in bytes.

    Attributes:
        dense: attention, norms, embeddings, head. up: the up projections of all layers. row: a neuron's, the longest.
        rows: of all neurons.
        kv: keys and values of one token. context: tokens whose keys and values are reserved.
    """

    dense: int
    up: int
    row: int
    rows: int
    kv: int
    layers: int
    experts: int
    neurons: int
    top_k: int
    hidden: int
    context: int

    @classmethod
    def of(cls, manifest: Manifest, layers: Sequence[PackedLayer], config: Any, element: int) -> Needs:
        """`element`: bytes of a key's or a value's number on the device."""
        a = manifest.architecture
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            dense=manifest.files["dense.safetensors"].size,
            up=sum(layer.up.nbytes for layer in layers),
            row=manifest.row_layout.nbytes,
            rows=sum(layer.rows.data.nbytes for layer in layers),
            kv=2 * a.layers * heads * size * element,
            layers=a.layers,
            experts=a.experts,
            neurons=a.intermediate,
            top_k=a.top_k,
            hidden=a.hidden,
            context=min(CONTEXT, context.window(config)),
        )

    def least(self) -> int:
        """The fewest bytes that work: all that is fixed, and the rows that one token can need in one layer."""
        return self._fixed() + self._working()

    def whole(self) -> int:
        """Bytes with which all rows fit the device."""
        return self._weights() + self.context * self._kv_as_it_grows()

    def longest(self, budget: int, window: int) -> int:
        """Tokens of the longest chat where all rows are on the device, which can give none of their memory away."""
        return min(window, (budget - self._weights()) // self._kv_as_it_grows())

    def pool(self, budget: int) -> int:
        """Rows that fit the budget, at most all there are.

        Raises:
            UsageError: not even one layer's working set fits.
        """
        if budget < self.least():
            raise UsageError(
                f"{size(budget)} of device memory is too little for this model",
                f"It needs at least {size(self.least())}: {size(self.dense)} for the dense part, {size(self.up)} for "
                f"the up projections, the rest for one token's rows and {self.context:,} tokens of context.",
                "Allow that much with --vram, pack with fewer bits (--up 2), or use --device cpu.",
            )
        return min((budget - self._fixed()) // self.row, self.layers * self.experts * self.neurons)

    def beside(self, budget: int, window: int) -> tuple[int, int]:
        """How keys and values share the budget with the rows of `pool`: the bytes reserved for them, and the tokens of
        the longest chat, at most `window`. A long chat takes memory from the rows too, all but what one token can need
        in one layer.
        """
        rows = self.pool(budget) * self.row
        own = min(budget - self._fixed() - rows + self.context * self.kv, window * self.kv)
        return own, min(window, (own + rows - self._working()) // self.kv)

    def _weights(self) -> int:
        return self.dense + self.up + self.rows

    def _kv_as_it_grows(self) -> int:
        """Bytes of a token's keys and values where they grow by copying: one group of layers is there twice then."""
        return self.kv + self.kv * min(GROUP, self.layers) // self.layers

    def _working(self) -> int:
        """The rows that one token can need in one layer."""
        return self.top_k * self.neurons * self.row

    def _fixed(self) -> int:
        buffers = 2 * self.neurons * self.row  # see Offload
        return self.dense + self.up + buffers + self.context * self.kv


@dataclass(frozen=True, slots=True)
class Choice:
    """Where to open a pack.

    Attributes:
        place: torch's name of the device. why: in words.
        rows: how many rows the pool on the device holds; None where all are on it, or none needs to be. make: that
            device. keys: bytes reserved for keys and values beside the pool. window: tokens of the longest chat.
        budget: bytes of device memory that weights, keys and values may take; None where the CPU computes in RAM.
        cap: bytes that torch may take of a GPU, see `enforce`; None where there is no GPU.
    """

    place: str
    why: str
    window: int
    rows: int | None = None
    make: Callable[[Wanted], Device] | None = None
    needs: Needs | None = None
    keys: int = 0
    budget: int | None = None
    cap: int | None = None

    def enforce(self) -> None:
        """Have torch refuse what goes beyond the memory that may be used; the driver's own (0.3 to 0.5 GB) is not its.

        Called before anything is put on the GPU. Without it a limit held for the pool alone.
        """
        if self.cap is not None:
            share = min(1.0, self.cap / torch.cuda.mem_get_info(self.place)[1])
            torch.cuda.set_per_process_memory_fraction(share, self.place)


def choose(
    wanted: str, manifest: Manifest, layers: Sequence[PackedLayer], config: Any, vram: int | None = None
) -> Choice:
    """The device for a pack.

    Args:
        wanted: "auto", "cpu", "cuda", "cuda:N", or a test device. vram: the most of its memory to use, in bytes.

    Raises:
        UsageError: a device that does not exist here, or has too little memory.
    """
    window = context.window(config)
    if wanted.startswith((cards.PREFIX, THROTTLED)):
        needs = Needs.of(manifest, layers, config, kv_element(manifest.widths.dense))
        if wanted.startswith(cards.PREFIX):
            return _virtual(wanted, needs, window, vram)
        return _throttled(wanted, needs, window, layers, vram)
    try:
        place, why = hardware.choose_device(wanted)
    except ValueError as error:
        why = str(error)
        cause = f"{why[:1].upper()}{why[1:].rstrip('.')}."
        raise UsageError(f"The device {wanted!r} cannot be used", cause, "Use --device cpu.") from error
    if place == "cpu":
        return Choice(place, why, window)
    needs = Needs.of(manifest, layers, config, 2)
    free = torch.cuda.mem_get_info(place)[0]
    cap = min(free, vram or free)
    budget = int(cap * (1 - KEPT_FREE))
    if needs.whole() <= budget:
        longest = needs.longest(budget, window)
        return Choice(place, f"{why}, and the whole pack fits", longest, budget=budget, cap=cap)
    if wanted == "auto" and budget < needs.least():
        return Choice("cpu", f"{why} with {size(budget)} to use, and {size(needs.least())} is needed", window)
    if vram is not None and vram > free:
        why += f" of which {size(free)} is free"
    why += (
        f"; with {size(budget)} of its memory it holds a pool of rows, because all weights need {size(needs.whole())}"
    )

    def make(wanted: Wanted) -> Device:
        def link(kind: Kind, chunk: int, pinned: Pinned | None) -> CudaLink:
            return CudaLink(torch.device(place), needs.row, chunk=chunk, zero_copy=kind == "in place", pinned=pinned)

        return _measured(Ends(place, place, link, pinning.why_not(place, needs.rows)), wanted, layers)

    return dataclasses.replace(_pooled(place, why, needs, window, budget, make), cap=cap)


def _pooled(place: str, why: str, needs: Needs, window: int, budget: int, make: Callable[[Wanted], Device]) -> Choice:
    rows = needs.pool(budget)
    keys, window = needs.beside(budget, window)
    return Choice(place, why, window, rows, make, needs, keys, budget)


def _virtual(wanted: str, needs: Needs, window: int, vram: int | None) -> Choice:
    card = cards.named(wanted, study=True)
    if vram is not None and vram > card.vram_bytes:
        has = f"{cards.PREFIX}{card.name} has {size(card.vram_bytes)}."
        raise UsageError(f"{wanted} cannot give {size(vram)}", has, "Leave out --vram, or give a smaller size.")
    why = f"{wanted} is a virtual device: the CPU computes, and times come from the card's profile"

    def make(wanted: Wanted) -> Device:
        # What is read in place is not packed. The papers' cards stage, so that is what "auto" means here.
        own = dataclasses.replace(card, pack_bytes_s=math.inf) if wanted == "in place" else card
        device = VirtualDevice(own, needs.row, needs.hidden, needs.dense // needs.layers)
        device.moves = f"rows are counted as {'read in place' if wanted == 'in place' else 'staged'}"
        return device

    return _pooled("cpu", why, needs, window, vram or card.vram_bytes, make)


def _throttled(wanted: str, needs: Needs, window: int, layers: Sequence[PackedLayer], vram: int | None) -> Choice:
    rate = wanted.removeprefix(THROTTLED)
    if not re.fullmatch(r"\d+(\.\d+)?gb", rate, re.ASCII) or float(rate[:-2]) <= 0:
        raise UsageError(
            f"The device {wanted!r} cannot be used", "", f'Give the rate of its link, as in "{THROTTLED}8gb".'
        )
    if vram is None:
        raise UsageError(
            f"{wanted} has no memory of its own", "", "Give the amount of RAM that stands for it, such as --vram 1gb."
        )
    speed = float(rate[:-2]) * 1e9

    def make(transfer: Wanted) -> Device:
        def link(_kind: Kind, chunk: int, _pinned: Pinned | None) -> ThrottledLink:
            return ThrottledLink(needs.row, rate=speed, chunk=chunk)

        return _measured(Ends(wanted, "cpu", link, "a test device has no GPU that could"), transfer, layers)

    why = f"{wanted} is a test device: RAM stands in for its memory, and its link is slowed down"
    return _pooled("cpu", why, needs, window, vram, make)


def _measured(ends: Ends, wanted: Wanted, layers: Sequence[PackedLayer]) -> Device:
    """A device with the transfer that is best for its link here, and with the rates it had last time."""
    rows = layers[0].rows
    kept = rates_file(hardware.machine_id(), ends.device, rows.layout.nbytes)
    rates = Rates.load(kept) or measured_rates(rows.layout, rows.data.shape[1], GUESS, ends.place)
    link, rates.link_bytes_s, how = open_link(ends, wanted, [layer.rows.data for layer in layers])
    device = Device(ends.device, ends.place, link, rates, kept=kept)
    device.moves = how
    return device


def offload(choice: Choice, layers: Sequence[PackedLayer], parts: Parts) -> Offload | None:
    """The pool and the device of a choice; None where there is no pool."""
    if choice.rows is None or choice.make is None or choice.needs is None:
        return None
    fixed = {"up": choice.needs.up, "dense": choice.needs.dense}
    device = choice.make(parts.transfer)
    try:
        return Offload(device, parts, layers, choice.rows, fixed, choice.keys)
    except Exception:  # whatever it was: it is raised again, once the device and what it pins are let go
        device.close()
        raise
