"""How memory is divided: a model's needs in device memory and RAM, and how many rows fit beside the rest.

`device_choice.py` asks when a pack is opened, `options.py` before anything is downloaded.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.types import SCRATCH
from ...models.catalog_entry import Sizes
from ...models.errors import UsageError
from ...models.families import family_of
from ...models.pack.manifest import DRAFT, Manifest
from ...models.pack.packed_model import PackedLayer
from ...models.quantities import memory as size
from .. import context
from ..context import CONTEXT
from ..decoder.kv_stores import GROUP
from ..decoder.mixers.attention import SCORES
from ..decoder.state_store import copies_of, room_for_copies
from ..events import MOST_TOGETHER
from ..experts.moe_layer import STREAMED_CHUNK, chunk_for
from ..offload.cards import DENSE_LAUNCHES, FIND_LAUNCHES, SUM_LAUNCHES
from ..offload.device_memory import RING
from ..offload.mix import ExpertsPlace, Mix
from ..offload.table_rows import cached
from .footprint import Footprint, KvBytes, kv_bytes, kv_element, prompt_bytes, sizes_of, state_bytes

# Of a card's memory, for a step's own tensors, modules that CUDA loads at their first use (0.15 to 0.3 GB), workspaces
# and the desktop: a share of it, and the least.
KEPT_FREE, KEPT_LEAST = 0.08, 900 << 20
# Of that, for a prompt; and what one takes whatever its length: scores or masks, and experts' products.
PROMPT_KEPT, PROMPT_LEAST = 300 << 20, SCORES + SCRATCH
# Bytes on the card of one captured launch, and how many one layer has: estimates, until `make card` measures them.
NODE_BYTES, LAUNCHES = 4096, DENSE_LAUNCHES + FIND_LAUNCHES + SUM_LAUNCHES
HEAD = "drafting head"  # among uses of memory
PROGRAM = 3 << 29  # bytes of RAM for Python, torch and activations
RAM_SHARE, RAM_LEAST = 0.05, 1 << 29  # share of usable RAM that stays free


def budget(vram: int) -> int:
    """The part of this much GPU memory that weights, keys and values may take."""
    return max(0, vram - max(int(vram * KEPT_FREE), KEPT_LEAST))


@dataclass(frozen=True, slots=True)
class DeviceShares:
    """The division of a device's memory.

    Attributes:
        mix: where each layer's experts are; None if the CPU computes all of the model in RAM.
        rows: of the pool, or all if they are on the device. keys: bytes reserved for keys and values beside them.
        window: tokens of the longest chat. reserved: of the longest chat that takes no memory from the pool, and has
            all keys and values on the device. most: bytes of the device that they can have; those of a longer chat are
            in RAM. None: RAM is where they are computed.
        uses: bytes by use. kv_bits: of keys and values.
    """

    mix: Mix | None
    rows: int
    keys: int
    window: int
    reserved: int
    uses: Mapping[str, int]
    kv_bits: int = 16
    most: int | None = None

    @classmethod
    def none(cls, window: int, kv_bits: int = 16) -> DeviceShares:
        """The shares if the CPU computes in RAM."""
        return cls(None, 0, 0, window, window, {}, kv_bits)

    def rows_beside(self, keys: int, row: int) -> int:
        """Rows that are left to the pool beside so many bytes of keys and values, in rows of `row` bytes."""
        return self.rows - max(0, -(-(min(keys, self.most or keys) - self.keys) // row))

    @property
    def words(self) -> str:
        """Where the layers' experts are."""
        return "all experts in RAM, by the CPU" if self.mix is None else self.mix.describe()

    @property
    def place(self) -> ExpertsPlace:
        """Of all layers: "pool" where they are not all on the device."""
        return "cpu" if self.mix is None else "gpu" if self.mix.gpu == self.mix.layers else "pool"


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's needs in device memory, in bytes.

    Attributes:
        dense: attention, norms, embeddings, head. up: the up projections of all layers. row: a neuron's, the longest.
        rows: of all neurons.
        kv: keys and values, of kv_bits. context: tokens whose keys and values are reserved.
        captured: what a token's graphs take, with rope's tables for these tokens. states: behind a token of a text.
        passing: a token of a prompt. draft: the drafting head, which is there with a whole model only, and if there is
            room for it.
    """

    dense: int
    up: int
    row: int
    rows: int
    kv: KvBytes
    layers: int
    experts: int
    neurons: int
    top_k: int
    hidden: int
    context: int
    kv_bits: int
    captured: int
    states: int
    passing: int
    draft: int

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        layers: Sequence[PackedLayer],
        config: Any,
        element: int,
        kv_bits: int = 16,
        reserved: int = CONTEXT,
    ) -> Needs:
        """`element`: bytes of a key's or a value's number on the device, where they are no codes of 8 bits."""
        a, sizes, window = manifest.architecture, sizes_of(manifest, config), context.window(config)
        return cls(
            dense=manifest.files["dense.safetensors"].size,
            up=sum(layer.signal.nbytes for layer in layers),
            row=manifest.row_layout().nbytes,
            rows=sum(layer.rows.data.nbytes for layer in layers),
            kv=kv_bytes(sizes, kv_bits, element),
            layers=a.layers,
            experts=a.experts,
            neurons=a.intermediate,
            top_k=a.top_k,
            hidden=a.hidden,
            context=min(reserved, window),
            kv_bits=kv_bits,
            captured=_captured(sizes, min(reserved, window)),
            states=state_bytes(sizes),
            passing=prompt_bytes(sizes),
            draft=manifest.beside[DRAFT].size if DRAFT in manifest.beside else 0,
        )

    @classmethod
    def of_footprint(cls, takes: Footprint, context: int, kv_bits: int = 16) -> Needs:
        """The needs of a model that is not packed yet, on a GPU."""
        sizes = takes.sizes
        return cls(
            dense=takes.dense,
            up=takes.ups,
            row=takes.row,
            rows=takes.rows,
            kv=kv_bytes(sizes, kv_bits),
            layers=sizes.layers,
            experts=sizes.experts,
            neurons=sizes.intermediate,
            top_k=sizes.top_k,
            hidden=sizes.expert_hidden,
            context=context,
            kv_bits=kv_bits,
            captured=_captured(sizes, context),
            states=state_bytes(sizes),
            passing=prompt_bytes(sizes),
            draft=takes.draft,
        )

    def every(self, place: ExpertsPlace) -> Mix:
        """All layers of one kind."""
        return {"gpu": Mix(gpu=self.layers), "pool": Mix(pool=self.layers), "cpu": Mix(cpu=self.layers)}[place]

    def least(self, mix: Mix | None = None) -> int:
        """The fewest bytes that work, for a mix or with a pool for all layers: all fixed parts, and the rows that one
        token can need in one layer.
        """
        mix = mix or self.every("pool")
        return self.whole() if mix.gpu == self.layers else self._fixed(mix) + self._working(mix)

    def whole(self) -> int:
        """The bytes for which all rows fit the device."""
        copied = -(-self._context() * min(GROUP, self.layers) // self.layers)
        return self._weights(self.every("gpu")) + self._context() + copied

    def most_rows(self, mix: Mix, budget: int) -> int:
        """Rows that a pool can have in this many bytes; negative if they are not enough for anything else."""
        return min((budget - self._fixed(mix)) // self.row, mix.pool * self.experts * self.neurons)

    def fits(self, mix: Mix, budget: int) -> bool:
        """Whether this many bytes of the device are enough; RAM is not considered."""
        return budget >= self.least(mix)

    def most_context(self, budget: int, mixes: Sequence[Mix]) -> int:
        """Tokens of context for which so many bytes are enough in one of these mixes: never more than are wanted, nor
        fewer than `CONTEXT` if more are.
        """

        def lacks(tokens: int) -> bool:
            needs = replace(self, context=tokens)
            return not any(needs.fits(mix, budget) for mix in mixes)

        if self.context <= CONTEXT or not lacks(self.context):
            return self.context
        return CONTEXT + bisect.bisect_left(range(CONTEXT + 1, self.context + 1), True, key=lacks)

    def share_out(self, mix: Mix, budget: int, window: int, rows: int | None = None) -> DeviceShares:
        """Divide a device's memory. A longer chat takes memory from the rows of a pool, all but what one token can need
        in one layer, and then RAM.

        Args:
            window: tokens of the model's own longest chat. rows: of the pool, at most; None: as many as fit.

        Raises:
            UsageError: not even one layer's working set fits.
        """
        up, whole = self._ups(mix), mix.gpu * (self.rows // self.layers)
        uses = {"dense": self.dense, "up": up, "rows": whole, "context": self._context(), "graphs": self.captured}
        uses |= {"states": self._states(mix)} if self.states else {}
        uses |= {"prompt": self._prompt(mix)} if self._prompt(mix) else {}
        if mix.gpu == self.layers:
            # As keys and values grow by copying, those of one group of layers exist twice.
            head = self.draft if self.draft <= budget - self.whole() else 0
            uses |= {HEAD: head} if head else {}
            there = max(0, budget - self._weights(mix) - head) * self.layers // (self.layers + min(GROUP, self.layers))
            reserved = self.kv.tokens(there, window)
            most = self.kv.of(reserved)
            return DeviceShares(mix, self._row_count(), 0, window, reserved, uses, self.kv_bits, most)
        if not self.fits(mix, budget):
            ups = f"{size(up)} for up projections, " if up else ""
            rows_of = "one token's rows" if mix.pool else f"{RING} experts of a prompt"
            raise UsageError(
                f"{size(budget)} of device memory is too little for this model",
                f"It needs at least {size(self.least(mix))}: {size(self.dense)} for the dense part, {ups}the rest for "
                f"{rows_of} and {self.context:,} tokens of context.",
                "Allow that much with --vram, or use --device cpu.",
            )
        most = self.most_rows(mix, budget)
        rows = most if rows is None else min(most, rows)
        pool = rows * self.row
        keys = min(budget - self._fixed(mix) - pool + self._context(), self.kv.of(window))
        uses |= {"pool": pool, "buffers": self._buffers(mix)}
        most = keys + pool - self._working(mix)
        return DeviceShares(mix, rows, keys, window, self.kv.tokens(keys, window), uses, self.kv_bits, most)

    def _weights(self, mix: Mix) -> int:
        fixed = self.dense + self.captured + self._states(mix) + self._prompt(mix)
        return fixed + self._ups(mix) + mix.gpu * (self.rows // self.layers)

    def _states(self, mix: Mix) -> int:
        """Of one text: where all layers are on the card, behind each of some tokens that are computed together."""
        return self.states * (1 + MOST_TOGETHER if mix.gpu == self.layers else 2)

    def _prompt(self, mix: Mix) -> int:
        """What a part of a prompt takes beyond what is kept free anyway."""
        tokens = chunk_for(self.experts, self.top_k) if mix.gpu == self.layers else STREAMED_CHUNK
        return max(0, tokens * self.passing + PROMPT_LEAST - PROMPT_KEPT)

    def _ups(self, mix: Mix) -> int:
        return (mix.gpu + mix.pool) * (self.up // self.layers)

    def _working(self, mix: Mix) -> int:
        """The rows that one token can need in one layer of the pool's."""
        return self.top_k * self.neurons * self.row if mix.pool else 0

    def _fixed(self, mix: Mix) -> int:
        return self._weights(mix) + self._buffers(mix) + self._context()

    def _context(self) -> int:
        return self.kv.of(self.context)

    def _buffers(self, mix: Mix) -> int:
        """Some experts' rows, see `DeviceMemory`; of layers in RAM also their up projections, see `Device.bring`."""
        one = self.up // (self.layers * self.experts) if mix.cpu else 0
        return RING * (self.neurons * self.row + one)

    def _row_count(self) -> int:
        return self.layers * self.experts * self.neurons


def granted(forms: Sequence[Needs], budget: int, *mixes: Mix) -> list[Needs]:
    """The needs in each form; where none fits, with as much of the context as so many bytes have room for in one of
    these mixes: all on the device, or as little as there can be.
    """
    mixes = mixes or (forms[0].every("gpu"), forms[0].every("cpu"))
    most = [needs.most_context(budget, mixes) for needs in forms]
    if any(tokens == needs.context for tokens, needs in zip(most, forms, strict=True)):
        return [*forms]
    return [replace(needs, context=tokens) for tokens, needs in zip(most, forms, strict=True)]


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


def room(ram: int, takes: Footprint, context: int | None = None, kv_bits: int = 16) -> int:
    """Bytes of RAM for what is read of a pack while answering, negative if other parts lack room; `context` where the
    CPU computes all of the model, None beside a device.
    """
    return ram - _stays(ram) - sum(_used(ram, takes, context, kv_bits).values())


def beside(ram: int, takes: Footprint, context: int) -> int:
    """Bytes of so much RAM of a further model in this program, all of which the CPU computes."""
    uses = _used(ram, takes, context, 16)
    return sum(uses.values()) - uses["program"] + takes.ups + takes.rows


def _stays(ram: int) -> int:
    return max(int(ram * RAM_SHARE), RAM_LEAST)


def _captured(sizes: Sizes, context: int) -> int:
    """What a token's graphs take on a card: an estimate; rope's tables for so many tokens in 16 bits are exact."""
    dims = sizes.head_dim + (sizes.wide.head_dim if sizes.wide else 0)
    return sizes.layers * LAUNCHES * NODE_BYTES + 4 * context * dims


def _used(ram: int, takes: Footprint, context: int | None, kv_bits: int) -> dict[str, int]:
    uses, states = {"program": PROGRAM}, state_bytes(takes.sizes)
    if takes.tables:
        uses["table rows"] = cached(takes.tables)
    if states:
        # The library's cache takes no copies, and tokens that are guessed are computed by our own pass alone.
        counted = takes.sizes.counted
        own = counted is None or not counted.library
        copies = copies_of(states, room_for_copies(ram)) if own else 0
        uses["states"] = copies * states + (0 if context is None else (1 + MOST_TOGETHER if own else 2) * states)
    if context is not None:
        # What a pack stores in 16 bits is computed in 32 bits.
        uses["dense"] = takes.sizes.layers * takes.attention + takes.head + 2 * takes.kept
        kv = kv_bytes(takes.sizes, kv_bits, kv_element(takes.spec.dense, takes.sizes))
        uses["context"] = kv.of(context) + kv.past(context, ram)
        if takes.draft:  # which attends, too; an assistant to the model's own keys and values
            own = 0 if family_of(takes.sizes.model_type).assistant else kv.of(context) // takes.sizes.attending
            uses[HEAD] = takes.draft + own
    return uses


def share_ram(ram: int, takes: Footprint, mix: Mix | None, pool: float, context: int, kv_bits: int = 16) -> RamShares:
    """Divide the RAM that programs may use, if a share `pool` of the rows of the mix's pooled layers is on the device;
    without a mix the CPU computes all of the model, with keys and values of kv_bits.
    """
    ups, rows = takes.ups // takes.sizes.layers, takes.rows // takes.sizes.layers
    beside = context if mix is None else None
    uses, read = _used(ram, takes, beside, kv_bits), takes.ups + takes.rows
    if mix is not None:
        read = mix.cpu * (ups + rows) + round(mix.pool * rows * (1 - pool))
    left = room(ram, takes, beside, kv_bits)
    if mix is not None and (past := kv_bytes(takes.sizes, kv_bits).past(context, ram)):
        uses, left = uses | {"context": past}, left - past
    if left < 0:
        return RamShares({**uses, "pages": 0, "lacking": read, "free": _stays(ram)}, 0.0, -left)
    pages = min(left, read)
    free = ram - sum(uses.values()) - pages
    share = pages / read if read else 1.0
    return RamShares({**uses, "pages": pages, "lacking": read - pages, "free": free}, share)
