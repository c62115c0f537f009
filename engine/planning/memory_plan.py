"""How memory is divided: a model's needs in device memory and RAM, and how many rows fit beside the rest.

`device_choice.py` asks when a pack is opened, `options.py` before anything is downloaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.pack.packed_model import PackedLayer
from ...models.quantities import memory as size
from .. import context
from ..decoder.kv_cache import GROUP
from .footprint import Footprint, kv_element

ExpertsPlace = Literal["gpu", "pool", "cpu"]  # all on the device, a pool of rows there, or all in RAM

KEPT_FREE = 0.08  # share of the usable GPU memory, for a step's own tensors and for the desktop
CONTEXT = 4096  # the most tokens whose keys and values are reserved
PROGRAM = 3 << 29  # bytes of RAM for Python, torch and activations
RAM_SHARE, RAM_LEAST = 0.05, 1 << 29  # share of usable RAM that stays free


def budget(vram: int) -> int:
    """The part of this much GPU memory that weights, keys and values may take."""
    return int(vram * (1 - KEPT_FREE))


@dataclass(frozen=True, slots=True)
class DeviceShares:
    """The division of a device's memory.

    Attributes:
        rows: those that are on the device. keys: bytes reserved for keys and values beside them.
        window: tokens of the longest chat, which may take memory from the rows. reserved: of the longest chat that does
            not.
        uses: bytes by use.
    """

    place: ExpertsPlace
    rows: int
    keys: int
    window: int
    reserved: int
    uses: Mapping[str, int]

    @classmethod
    def none(cls, window: int) -> DeviceShares:
        """The shares if the CPU computes in RAM."""
        return cls("cpu", 0, 0, window, window, {})


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's needs in device memory, in bytes.

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

    @classmethod
    def of_footprint(cls, takes: Footprint, context: int) -> Needs:
        """The needs of a model that is not packed yet, on a GPU."""
        sizes = takes.sizes
        return cls(
            dense=takes.dense,
            up=takes.ups,
            row=takes.row,
            rows=takes.rows,
            kv=2 * takes.kv,
            layers=sizes.layers,
            experts=sizes.experts,
            neurons=sizes.intermediate,
            top_k=sizes.top_k,
            hidden=sizes.hidden,
            context=context,
        )

    def least(self) -> int:
        """The fewest bytes that work: all fixed parts, and the rows that one token can need in one layer."""
        return self._fixed() + self._working()

    def whole(self) -> int:
        """The bytes for which all rows fit the device."""
        return self._weights() + self.context * self._kv_as_it_grows()

    def fits(self, place: ExpertsPlace, budget: int) -> bool:
        """Whether this many bytes are enough in this place; RAM is not considered."""
        return place == "cpu" or budget >= (self.whole() if place == "gpu" else self.least())

    def share_out(self, place: ExpertsPlace, budget: int, window: int) -> DeviceShares:
        """Divide a device's memory. A chat also takes memory from the rows of a pool, all but what one token can need
        in one layer; if all rows are on the device, they give none away.

        Args:
            window: tokens of the model's own longest chat.

        Raises:
            UsageError: a pool for which not even one layer's working set fits.
        """
        if place == "cpu":
            return DeviceShares.none(window)
        uses = {"dense": self.dense, "up": self.up}
        if place == "gpu":
            longest = min(window, (budget - self._weights()) // self._kv_as_it_grows())
            uses |= {"rows": self.rows, "context": self._context()}
            return DeviceShares(place, self._row_count(), 0, longest, longest, uses)
        if budget < self.least():
            raise UsageError(
                f"{size(budget)} of device memory is too little for this model",
                f"It needs at least {size(self.least())}: {size(self.dense)} for the dense part, {size(self.up)} for "
                f"the up projections, the rest for one token's rows and {self.context:,} tokens of context.",
                "Allow that much with --vram, pack with fewer bits (--up 2), or use --device cpu.",
            )
        rows = min((budget - self._fixed()) // self.row, self._row_count())
        pool = rows * self.row
        keys = min(budget - self._fixed() - pool + self._context(), window * self.kv)
        longest = min(window, (keys + pool - self._working()) // self.kv)
        uses |= {"pool": pool, "context": self._context(), "buffers": self._buffers()}
        return DeviceShares(place, rows, keys, longest, min(longest, keys // self.kv), uses)

    def _weights(self) -> int:
        return self.dense + self.up + self.rows

    def _kv_as_it_grows(self) -> int:
        """Bytes of a token's keys and values if they grow by copying: one group of layers then exists twice."""
        return self.kv + self.kv * min(GROUP, self.layers) // self.layers

    def _working(self) -> int:
        """The rows that one token can need in one layer."""
        return self.top_k * self.neurons * self.row

    def _fixed(self) -> int:
        return self.dense + self.up + self._buffers() + self._context()

    def _context(self) -> int:
        return self.context * self.kv

    def _buffers(self) -> int:
        """Two experts' rows, see `DeviceMemory`."""
        return 2 * self.neurons * self.row

    def _row_count(self) -> int:
        return self.layers * self.experts * self.neurons


@dataclass(frozen=True, slots=True)
class RamShares:
    """The division of RAM.

    Attributes:
        uses: bytes by use: the "pages" of the pack that are in it, those that are "lacking", and what stays "free".
        share: share of what is read from RAM while answering that fits there. missing: bytes without which it does not
            work.
    """

    uses: Mapping[str, int]
    share: float
    missing: int = 0


def share_ram(ram: int, takes: Footprint, place: ExpertsPlace, pool: float, context: int) -> RamShares:
    """Divide the RAM that programs may use, if a share `pool` of the rows is on the device."""
    stays = max(int(ram * RAM_SHARE), RAM_LEAST)
    uses, mapped = {"program": PROGRAM}, 0
    if place == "cpu":
        # What a pack stores in 16 bits is computed in 32 bits.
        uses["dense"] = takes.sizes.layers * takes.attention + takes.head + 2 * takes.kept
        uses["context"] = kv_element(takes.spec.dense) * takes.kv * context
        mapped = takes.ups + takes.rows
    elif place == "pool":
        mapped = round(takes.rows * (1 - pool))
    room = ram - stays - sum(uses.values())
    if room < 0:
        return RamShares({**uses, "pages": 0, "lacking": mapped, "free": stays}, 0.0, -room)
    pages = min(room, mapped)
    free = ram - sum(uses.values()) - pages
    share = pages / mapped if mapped else 1.0
    return RamShares({**uses, "pages": pages, "lacking": mapped - pages, "free": free}, share)
