"""One model at some widths on a machine: its place, its needs, its speed, and how good a choice it is (`worth`).

Memory is divided by memory_plan.py; the speed comes from speed_estimate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from ...models.catalog import CatalogEntry
from ...models.catalog_entry import SHARD_BYTES
from ...models.packing.pack import PackSpec
from .. import quality_presets
from ..offload.mix import ExpertsPlace, Mix
from . import memory_plan, mix_choice, prompt_estimate, speed_estimate, worth
from .footprint import Footprint, kv_bytes
from .machine import Machine
from .measured_figures import Curve, figures
from .memory_plan import DeviceShares, Needs
from .mix_choice import Costs, Placed
from .speed_estimate import Held, Speeds, Token, TokenWork

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
class Option:
    """A model at some widths on the machine, in its fastest place.

    Attributes:
        spec: bits. kl: quality loss of these widths, see `rounding`. place: "gpu" for all of it there, "pool" for the
            dense part and some of the experts, or "cpu".
        vram, ram, disk: bytes by use, with what stays "free"; of RAM also the "pages" of the pack that are in it, and
            those that are "lacking"; of the disk the "pack", and the "peak" while packing.
        mix: layers of each kind; None by the CPU alone. static: tokens per second of the best static placement, see
            `mix_choice`; None without a GPU. pool_rows, pool_share: rows in the pool, and share of its layers' rows.
        ram_share: share of what is read from RAM while answering that fits there; the rest comes from the disk.
        missing: bytes by "ram" or "disk" without which it does not work; empty where it does.
        token: one token's seconds by part. decode, prefill: tokens per second. kv_bits: of keys and values. full:
            tokens per second at the end of the longest chat that memory is reserved for, and of the model's longest.
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
    takes = Footprint.of(entry.sizes, spec)
    disk = _disk(entry, takes, keep_source)
    costs = Costs(takes, TokenWork.of(_preset()), machine.speeds)
    best: Option | None = None
    for bits in worth.KV_FORMS if kv_bits is None else (kv_bits,):
        found = _in_form(machine, costs, context, disk, bits)
        if best is None or _is_clearly_better(found, best):
            best = found
    assert best is not None
    return best


def _is_clearly_better(coarse: Option, exact: Option) -> bool:
    """Whether fewer bits of keys and values are worth their loss."""
    if (now := (coarse.works, not coarse.missing)) != (before := (exact.works, not exact.missing)):
        return now > before
    return coarse.works and coarse.worth >= exact.worth + worth.CLEARLY


def _in_form(machine: Machine, costs: Costs, context: int, disk: Mapping[str, int], kv_bits: int) -> Option:
    """With keys and values of so many bits."""
    takes = costs.takes
    needs, budget = Needs.of_footprint(takes, context, kv_bits), memory_plan.budget(machine.vram)
    alone = _made(machine, takes, context, disk, None, DeviceShares.none(takes.sizes.window, kv_bits))
    if not machine.speeds.gpu:
        return alone
    found = mix_choice.choose(costs, needs, budget, machine.ram)
    if found is None:
        return alone
    best, static = found
    shares = needs.share_out(best.mix, budget, takes.sizes.window, best.rows)
    beside = _made(machine, takes, context, disk, best, shares)
    token = speed_estimate.decode(takes, costs.work, machine.speeds, static.held)
    beside = dataclasses.replace(beside, static=1 / token.seconds)
    return max(beside, alone, key=lambda one: (one.works, not one.missing, one.decode.mid))


def rounding(spec: PackSpec) -> float:
    """The quality loss of these widths, in nats of mean KL divergence from the 16-bit model, by the demo model."""
    loss = figures().quantization
    return loss["dense"][spec.dense] + sum(loss[part][getattr(spec, part)] for part in ("up", "gate", "down"))


def _made(
    machine: Machine,
    takes: Footprint,
    context: int,
    disk: Mapping[str, int],
    placed: Placed | None,
    device: DeviceShares,
) -> Option:
    """The option with its layers so placed, None by the CPU alone."""
    vram = {use: count for use, count in device.uses.items() if count}
    if vram:
        vram["free"] = machine.vram - sum(vram.values())
    share = 0.0 if placed is None else placed.share
    ram = memory_plan.share_ram(machine.ram, takes, device.mix, share, context, device.kv_bits)
    missing = {"ram": ram.missing} if ram.missing else {}
    if machine.disk_free is not None and (lacking := disk["peak"] + DISK_FREE - machine.disk_free) > 0 and disk["pack"]:
        missing["disk"] = lacking
    held = Held(gpu=False, ram=ram.share) if placed is None else placed.held
    held = dataclasses.replace(held, kv_bits=device.kv_bits, keys=device.most)
    work, speeds, doubt = TokenWork.of(_preset()), machine.speeds, machine.doubt
    token = speed_estimate.decode(takes, work, speeds, held)
    unlucky, lucky = dataclasses.replace(work, calls=1.0), tuple((x, min(1.0, y * _LUCK)) for x, y in figures().hits)
    slow, fast = speeds.times(1 - doubt), speeds.times(1 + doubt)

    def rate(work: TokenWork, speeds: Speeds, curve: Curve) -> float:
        return 1 / speed_estimate.decode(takes, work, speeds, held, curve).seconds

    def prompt(work: TokenWork, speeds: Speeds) -> float:
        return prompt_estimate.prefill(takes, work, speeds, held)

    return Option(
        spec=takes.spec,
        kl=rounding(takes.spec) + worth.kv_loss(device.kv_bits),
        place=device.place,
        mix=device.mix,
        static=None,
        vram=vram,
        ram=ram.uses,
        disk=disk,
        pool_rows=device.rows,
        pool_share=1.0 if device.place == "gpu" else share,
        ram_share=ram.share,
        missing=missing,
        token=token,
        decode=SpeedRange(rate(unlucky, slow, _ROUTES_ALIKE), 1 / token.seconds, rate(work, fast, lucky)),
        prefill=SpeedRange(prompt(unlucky, slow), prompt(work, speeds), prompt(work, fast)),
        kv_bits=device.kv_bits,
        full=(_full(takes, speeds, held, device, context), _full(takes, speeds, held, device, takes.sizes.window)),
    )


def _full(takes: Footprint, speeds: Speeds, held: Held, device: DeviceShares, context: int) -> float:
    """Tokens per second behind so many tokens, for whose keys and values the pool gives way, and then RAM is used."""
    if device.rows and device.mix is not None and device.mix.pool:
        rows = device.rows_beside(context * kv_bytes(takes.sizes, device.kv_bits), takes.row)
        held = dataclasses.replace(held, pool=held.pool * max(0, rows) / device.rows)
    return 1 / speed_estimate.decode(takes, TokenWork.of(_preset()), speeds, held, context=context).seconds


def _disk(entry: CatalogEntry, takes: Footprint, keep_source: bool) -> dict[str, int]:
    """Bytes on the disk afterwards, and the peak meanwhile."""
    if entry.packed:
        return {"pack": 0, "peak": 0}
    if entry.only_pack:
        return dict.fromkeys(("pack", "peak"), entry.only_pack.bytes)
    source = 0
    if entry.folder is None:
        source = entry.checkpoint_bytes if keep_source else min(2 * SHARD_BYTES, entry.checkpoint_bytes)
    return {"pack": takes.disk, "peak": takes.disk + source}


def _preset() -> quality_presets.Preset:
    return next(preset for preset in quality_presets.PRESETS if preset.name == quality_presets.DEFAULT)
