"""One model at some widths on a machine: its place, its needs, its speed, and how good a choice it is (`worth`).

Memory is divided by memory_plan.py, layers among several cards by several/division.py; the speed comes from
speed_estimate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...models.catalog import CatalogEntry
from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.packing.pack import PackSpec
from .. import quality_presets
from ..context import CONTEXT
from ..offload.mix import ExpertsPlace, Mix
from . import memory_plan, mix_choice, worth
from .footprint import Footprint, divisible, kv_bytes
from .machine import Machine
from .measured_figures import figures
from .memory_plan import DeviceShares, Needs
from .mix_choice import Costs, Placed
from .running import DeviceLayers, Running
from .several.division import CardRoom, Divided
from .speed_estimate import Held, Token, TokenWork

DEFAULT = PackSpec()
# The most exact first.
WIDTHS = (
    PackSpec(4, 4, 4, 8),
    DEFAULT,
    PackSpec(3, 3, 3, 4),
    PackSpec(2, 3, 3, 4),
    PackSpec(2, 2, 2, 4),
)
DISK_FREE = 1 << 30  # bytes of the disk that stay free
USABLE = 0.5  # tokens/s; slower plans do not count

# Beside the rule of worth.py:
FROM_DISK = 1.0  # extra cost of reading from the disk, in doublings of speed, since it slows down the whole machine
_DISK_SHARE = 0.05  # share of a token's reads from which all of that counts
_ROUTES_ALIKE = ((0.0, 0.0), (1.0, 1.0))  # the pool's hit rate is only its share
_LUCK = 1.15  # times as many rows found, at best


@dataclass(frozen=True, slots=True)
class SpeedRange:
    """Tokens per second: what is expected, and its bounds."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, slots=True)
class OnCard:
    """One of several cards: its name, the first of its layers with experts and their number, their mix, and bytes of
    its memory by use.
    """

    name: str
    first: int
    layers: int
    mix: Mix | None
    vram: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Option:
    """A model at some widths on the machine, in its fastest place.

    Attributes:
        spec: bits. kl: quality loss of these widths, see `rounding`, and of what the weights were rounded to before.
        place: "gpu" for all of it there, "pool" for the dense part and some of the experts, or "cpu".
        vram, ram, disk: bytes by use, with what stays "free"; of RAM also the "pages" of the pack that are in it, and
            those that are "lacking"; of the disk the "pack", and the "peak" while packing.
        mix: layers of each kind; None by the CPU alone. static: tokens per second of the best static placement, see
            `mix_choice`; None without a GPU. pool_rows, pool_share: rows in the pool, and share of its layers' rows.
        ram_share: share of what is read from RAM while answering that fits there; the rest comes from the disk.
        missing: bytes by "ram" or "disk" without which it does not work; empty where it does.
        token: one token's seconds by part. decode, prefill: tokens per second. kv_bits: of keys and values. full:
            tokens per second at the end of the longest chat that memory is reserved for, and of the model's longest.
        context: tokens whose keys and values have memory reserved: as many as were asked for, or as fit.
        cards: what each of several cards has; vram is their sum, and mix counts the layers of all.
    """

    spec: PackSpec
    kl: float
    place: ExpertsPlace
    mix: Mix | None
    static: float | None
    vram: Mapping[str, int]
    ram: Mapping[str, int]
    disk: Mapping[str, int]
    pool_rows: int
    pool_share: float
    ram_share: float
    missing: Mapping[str, int]
    token: Token
    decode: SpeedRange
    prefill: SpeedRange
    kv_bits: int
    full: tuple[float, float]
    context: int
    cards: tuple[OnCard, ...] = ()

    @property
    def works(self) -> bool:
        """Whether it fits, and answers fast enough to be useful."""
        return not self.missing and self.decode.mid >= USABLE

    @property
    def in_memory(self) -> bool:
        """Whether it works without reading from the disk while it answers."""
        return self.works and self.ram_share >= 1

    @property
    def worth(self) -> float:
        """How good a choice it is, in doublings of speed: the option with the most is recommended.

        See worth.py; `WORTH` nats of quality loss count -1. All of it is continuous, so that a little more memory or a
        rate measured a little lower rarely changes the choice.
        """
        from_disk = FROM_DISK * min(1.0, (1 - self.ram_share) / _DISK_SHARE)
        return worth.of_speed(self.decode.mid) - self.kl / worth.WORTH - from_disk


def option(
    machine: Machine,
    entry: CatalogEntry,
    spec: PackSpec,
    context: int,
    keep_source: bool = False,
    kv_bits: int | None = None,
) -> Option:
    """The model at the widths of `spec`, with the fastest of the mixes that fit the GPU, or by the CPU alone.

    Args:
        kv_bits: of keys and values; None: 16, or fewer where that is clearly worth it.
    """
    if machine.others and not divisible(entry.sizes.model_type):  # its layers cannot be divided
        each = [option(one, entry, spec, context, keep_source, kv_bits) for one in machine.each]
        return max(each, key=lambda one: (one.works, not one.missing, one.decode.mid))
    takes = Footprint.of(entry.sizes, spec)
    disk = _disk(entry, takes, keep_source)
    costs = Costs(takes, _work(entry), machine.speeds)
    best: Option | None = None
    forms = [Needs.of_footprint(takes, context, bits) for bits in (worth.KV_FORMS if kv_bits is None else (kv_bits,))]
    if not machine.others:
        forms = memory_plan.granted(forms, memory_plan.budget(machine.vram))
    for needs in forms:
        found = _in_form(machine, costs, context, disk, needs)
        if best is None or _is_clearly_better(found, best):
            best = found
    assert best is not None
    return dataclasses.replace(best, kl=best.kl + figures().gguf_kl.get(entry.rounding, 0.0))


def _is_clearly_better(coarse: Option, exact: Option) -> bool:
    """Whether fewer bits of keys and values are worth their loss."""
    if (now := (coarse.works, not coarse.missing)) != (before := (exact.works, not exact.missing)):
        return now > before
    return coarse.works and coarse.worth >= exact.worth + worth.CLEARLY


def _in_form(machine: Machine, costs: Costs, context: int, disk: Mapping[str, int], needs: Needs) -> Option:
    """With keys and values of so many bits."""
    takes = costs.takes
    alone = _made(machine, costs, context, disk, (), DeviceShares.none(takes.sizes.window, needs.kv_bits))
    if not machine.speeds.gpu:
        return alone
    found = _placed(machine, costs, needs)
    if not found:
        return alone
    best, static = ([_On.of(one, which, takes) for one in found] for which in ("best", "static"))
    beside = _made(machine, costs, context, disk, best, best[0].shares)
    token = Running(takes, [one.place for one in static]).token(costs.work)
    beside = dataclasses.replace(beside, static=1 / token.seconds, context=found[0].needs.context)
    return max(beside, alone, key=lambda one: (one.works, not one.missing, one.decode.mid))


@dataclass(frozen=True, slots=True)
class _Found:
    """A card's layers, and how they are placed best and without a pool. card: the machine with it."""

    card: Machine
    layers: range
    needs: Needs
    best: Placed
    static: Placed


@dataclass(frozen=True, slots=True)
class _On:
    """A card with its layers as they are placed; name, first: see `OnCard`."""

    name: str
    total: int
    placed: Placed
    shares: DeviceShares
    place: DeviceLayers

    @classmethod
    def of(cls, found: _Found, which: str, takes: Footprint) -> _On:
        """`which`: "best" or "static"."""
        placed: Placed = getattr(found, which)
        budget = memory_plan.budget(found.card.vram)
        shares = found.needs.share_out(placed.mix, budget, takes.sizes.window, placed.rows)
        part = len(found.layers) / takes.sizes.layers
        held = dataclasses.replace(placed.held, kv_bits=shares.kv_bits, keys=shares.most, part=part)
        return cls(
            found.card.name, found.card.vram, placed, shares, DeviceLayers(found.layers, found.card.speeds, held)
        )

    @property
    def vram(self) -> dict[str, int]:
        """Bytes by use, with what stays free."""
        used = {use: count for use, count in self.shares.uses.items() if count}
        return {**used, "free": self.total - sum(used.values())}

    def card(self) -> OnCard:
        """For people."""
        layers = self.place.layers
        return OnCard(self.name, layers.start, len(layers), self.shares.mix, self.vram)

    def behind(self, context: int, takes: Footprint) -> DeviceLayers:
        """The pool gives way to keys and values of so many tokens."""
        shares, held = self.shares, self.place.held
        if shares.rows and shares.mix is not None and shares.mix.pool:
            kept = round(held.part * kv_bytes(takes.sizes, shares.kv_bits).of(context))
            rows = max(0, shares.rows_beside(kept, takes.row))
            held = dataclasses.replace(held, pool=held.pool * rows / shares.rows)
        return dataclasses.replace(self.place, held=held)


def _placed(machine: Machine, costs: Costs, needs: Needs) -> list[_Found]:
    """What each card has; nothing if a card has no room."""
    takes, every = costs.takes, range(costs.takes.sizes.layers)
    if not machine.others:
        found = mix_choice.choose(costs, needs, memory_plan.budget(machine.vram), machine.ram)
        return [] if found is None else [_Found(machine, every, needs, *found)]
    cards = tuple(CardRoom(one.name, one.speeds, memory_plan.budget(one.vram)) for one in machine.each)
    room = max(0, memory_plan.room(machine.ram, takes))
    try:
        parts = Divided(takes, costs.work, needs, cards, room).parts()
    except UsageError:
        if needs.context <= CONTEXT:
            return []
        return _placed(machine, costs, dataclasses.replace(needs, context=max(CONTEXT, needs.context // 2)))
    return [
        _Found(card, part.layers, part.needs, part.best, part.static)
        for card, part in zip(machine.each, parts, strict=True)
    ]


def rounding(spec: PackSpec) -> float:
    """The quality loss of these widths, in nats of mean KL divergence from the 16-bit model, by the demo model."""
    loss = figures().quantization
    return loss["dense"][spec.dense] + sum(loss[part][getattr(spec, part)] for part in ("up", "gate", "down"))


def _made(
    machine: Machine,
    costs: Costs,
    context: int,
    disk: Mapping[str, int],
    on: Sequence[_On],
    device: DeviceShares,
) -> Option:
    """The option with its layers so placed, nowhere by the CPU alone. device: the first card's."""
    takes = costs.takes
    vram: dict[str, int] = {}
    for one in on:
        for use, count in one.vram.items():
            vram[use] = vram.get(use, 0) + count
    mix, rows = (None if not on else _all(on)), sum(one.shares.rows for one in on)
    pooled = sum(one.placed.mix.pool for one in on)
    share = sum(one.placed.share * one.placed.mix.pool for one in on) / pooled if pooled else 0.0
    ram = memory_plan.share_ram(machine.ram, takes, mix, share, context, device.kv_bits)
    missing = {"ram": ram.missing} if ram.missing else {}
    if machine.disk_free is not None and (lacking := disk["peak"] + DISK_FREE - machine.disk_free) > 0 and disk["pack"]:
        missing["disk"] = lacking
    work, doubt = costs.work, machine.doubt
    held = Held(gpu=False, ram=ram.share, kv_bits=device.kv_bits, keys=device.most)
    running = Running(takes, [one.place for one in on]) if on else Running.alone(takes, machine.speeds, held)

    def full(context: int) -> float:
        places = [one.behind(context, takes) for one in on] or running.places
        return 1 / Running(takes, places).token(work, context=context).seconds

    token = running.token(work)
    unlucky, lucky = dataclasses.replace(work, calls=1.0), tuple((x, min(1.0, y * _LUCK)) for x, y in figures().hits)
    slow, fast = 1 - doubt, 1 + doubt
    whole = mix is not None and mix.gpu == mix.layers
    return Option(
        spec=takes.spec,
        kl=rounding(takes.spec) + worth.kv_loss(device.kv_bits),
        place="cpu" if mix is None else "gpu" if whole else "pool",
        mix=mix,
        static=None,
        vram=vram,
        ram=ram.uses,
        disk=disk,
        pool_rows=rows,
        pool_share=1.0 if whole else share,
        ram_share=ram.share,
        missing=missing,
        token=token,
        decode=SpeedRange(
            1 / running.token(unlucky, slow, _ROUTES_ALIKE).seconds,
            1 / token.seconds,
            1 / running.token(work, fast, lucky).seconds,
        ),
        prefill=SpeedRange(running.prefill(unlucky, slow), running.prefill(work), running.prefill(work, fast)),
        kv_bits=device.kv_bits,
        full=(full(context), full(takes.sizes.window)),
        context=context,
        cards=tuple(one.card() for one in on) if len(on) > 1 else (),
    )


def _all(on: Sequence[_On]) -> Mix:
    """The layers of all cards by kind."""
    if len(on) == 1:
        return on[0].placed.mix
    mixes = [one.placed.mix for one in on]
    return Mix(sum(mix.gpu for mix in mixes), sum(mix.pool for mix in mixes), sum(mix.cpu for mix in mixes))


def _disk(entry: CatalogEntry, takes: Footprint, keep_source: bool) -> dict[str, int]:
    """Bytes on the disk afterwards, the peak meanwhile, and what the drafting head has of that, if there is one."""
    draft = {"draft": takes.draft} if takes.draft else {}
    if entry.packed:
        return {"pack": 0, "peak": 0, **draft}
    if entry.only_pack:
        return {**dict.fromkeys(("pack", "peak"), entry.only_pack.bytes), **draft}
    source = 0
    if entry.folder is None:
        source = entry.checkpoint_bytes if keep_source else entry.most_unread
    return {"pack": takes.disk, "peak": takes.disk + source, **draft}


def _work(entry: CatalogEntry) -> TokenWork:
    preset = next(preset for preset in quality_presets.PRESETS if preset.name == quality_presets.DEFAULT)
    return TokenWork.of(
        preset,
        Manifest.read(entry.folder) if entry.packed and entry.folder else None,
        gated=entry.sizes.gated,
    )
