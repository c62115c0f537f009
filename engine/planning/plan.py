"""Whether a model runs on a machine, how, and how fast: decided before the first byte is downloaded.

Widths are those that packing offers (`PackSpec`). The rule of the recommendation is in options.py; every choice has
its reasons in words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...models import catalog, quantities
from ...models.catalog import CatalogEntry
from ...models.catalog_entry import Sizes
from ...models.errors import UsageError
from ...models.pack.manifest import DRAFT, Manifest
from ...models.packing.pack import PackSpec
from ...models.published import PUBLISHED
from ..context import CONTEXT
from . import reasons
from .footprint import with_assistant
from .machine import Machine
from .measured_figures import figures
from .options import DEFAULT, WIDTHS, Option, option
from .worth import CLEARLY, ENOUGH, NEWER, READING, WORTH

_SINCE = 2023  # the first year of the models listed

Standing = Literal["reading", "slower", "base", "unfit"]
STANDINGS: tuple[Standing, ...] = ("reading", "slower", "base", "unfit")


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a model on a machine.

    Attributes:
        context: tokens whose keys and values have room. chosen: the recommended option, None if nothing works.
            options: all widths considered, most exact first. why: sentences. missing: bytes by "ram" or "disk" that the
            smallest lacks, if nothing works.
        download_s, pack_s: seconds, None if there is nothing to fetch or pack, or no rate is known.
    """

    entry: CatalogEntry
    machine: Machine
    context: int
    chosen: Option | None
    options: tuple[Option, ...]
    why: tuple[str, ...]
    missing: Mapping[str, int] = field(default_factory=dict[str, int])
    download_s: float | None = None
    pack_s: float | None = None

    @property
    def instead(self) -> str:
        """If nothing works: what would, in words. It takes as long as plans of all smaller models."""
        return "" if self.chosen is not None else _instead(self.machine, self.entry, self.context)


def make(
    machine: Machine,
    entry: CatalogEntry,
    *,
    context: int = CONTEXT,
    keep_source: bool = False,
    net_bytes_s: float | None = None,
    kv_bits: int | None = None,
) -> Plan:
    """Decide.

    Args:
        context: tokens to have room for, at most the model's window. keep_source: whether a downloaded checkpoint
            stays on the disk. net_bytes_s: of the download. kv_bits: of keys and values; None: as planned.

    Raises:
        UsageError: a context of no tokens. PackError: the entry's own pack cannot be read.
    """
    if context < 1:
        raise UsageError(f"A context cannot have {context} tokens", "", "Give --context 1 or more.")
    context = min(context, entry.sizes.window)
    packed = Manifest.read(entry.folder) if entry.packed and entry.folder is not None else None
    if packed is not None:
        entry = replace(entry, sizes=with_assistant(entry.sizes, packed))
    options = tuple(option(machine, entry, spec, context, keep_source, kv_bits) for spec in _widths(entry, packed))
    chosen = _choose(options)
    if chosen is None:
        nearest = min(options, key=lambda one: (sum(one.missing.values()), -one.decode.mid))
        missing = nearest.missing or {"ram": nearest.ram["lacking"]}
        why = (reasons.why_not(nearest, missing),)
        return Plan(entry, machine, context, None, options, why, missing)
    fetched = entry.download_bytes
    return Plan(
        entry,
        machine,
        context,
        chosen,
        options,
        (*reasons.why(machine, entry, chosen, options, context), *_unskipped(packed)),
        download_s=fetched / net_bytes_s if fetched and net_bytes_s else None,
        pack_s=None if entry.packed or entry.only_pack else _packing_s(entry.sizes) / max(1, machine.cores),
    )


def two_plans(machine: Machine, entry: CatalogEntry) -> tuple[Plan, Plan | None]:
    """From the form of its weights that is worth its download, and from the other one: as published, or GGUF files.

    Raises:
        FloeError: as `make`.
    """
    whole = make(machine, entry)
    if (copy := reasons.from_gguf(entry)) is None:
        return whole, None
    short = make(machine, copy)
    first = short.chosen is not None and (whole.chosen is None or reasons.prefers(entry, copy))
    return (short, whole) if first else (whole, short)


def standing(entry: CatalogEntry, chosen: Option | None) -> Standing:
    """How a model does on a machine with its recommended option; None: it does not fit.

    "reading": it answers at least as fast as people read. A model that thinks first needs more speed for that, and one
    that reads from the disk meanwhile twice as much. "slower": it works. "base": it works, but cannot chat.
    """
    if chosen is None:
        return "unfit"
    if entry.chat is None:
        return "base"
    needed = (ENOUGH if entry.thinks else READING) * (1 if chosen.in_memory else 2)
    return "reading" if chosen.decode.mid >= needed else "slower"


def size_rule(entry: CatalogEntry, loss: float = 0.0) -> float:
    """A model's expected answer quality in doublings of size, in steps of a half: a rule of thumb, since no answers are
    measured here.

    The geometric mean of all and of active parameters stands for the size of a mixture of experts. A model that is half
    a year newer counts as twice as large: a cautious half of what is found for open models (Xiao et al. 2024, "Densing
    Law of LLMs", doubling in 3.3 months). A quality `loss` of `WORTH` nats counts as half the size, as it outweighs
    twice the speed where bits are chosen.
    """
    size = math.log2(math.sqrt(entry.sizes.parameters * max(1, entry.sizes.active)) / 1e9)
    year, _, month = entry.released.partition("-")
    age = (int(year) - _SINCE) + (int(month) - 1) / 12 if year.isdecimal() and month.isdecimal() else 0.0
    return round(2 * (size + age / NEWER - loss / WORTH)) / 2


def ranked(plans: Iterable[Plan]) -> list[Plan]:
    """The order in which to show plans of one machine; the first is recommended (see `recommended`).

    Models that answer at reading speed come first, by `size_rule`; of equals those made for everything, that answer
    without thinking first, that need no accepted terms, the newest, and the fastest. Then slower ones, the fastest
    first, base models, and what does not fit, the smallest first. Among each of these, models of families without a
    record whose dense part runs in the library come last.
    """

    def key(plan: Plan) -> tuple[object, ...]:
        entry, chosen = plan.entry, plan.chosen
        stands = standing(entry, chosen)
        if chosen is None:
            return STANDINGS.index(stands), entry.chat is None, entry.sizes.parameters, entry.name
        newest = tuple(-int(part) for part in entry.released.split("-") if part)
        ties = (bool(entry.made_for), entry.thinks, bool(entry.gated), newest, -chosen.decode.mid, entry.name)
        slow = bool(entry.sizes.counted and entry.sizes.counted.library)
        first = -chosen.decode.mid if stands == "slower" else -size_rule(entry, chosen.kl)
        return STANDINGS.index(stands), slow, first, *ties

    return sorted(plans, key=key)


def recommended(plans: Sequence[Plan]) -> Plan | None:
    """Of plans in the order of `ranked`, the one to recommend; None if no model that can chat works."""
    first = next(iter(plans), None)
    return first if first is not None and standing(first.entry, first.chosen) in ("reading", "slower") else None


def offers(
    machine: Machine,
    entries: Iterable[CatalogEntry] = PUBLISHED,
    *,
    context: int = CONTEXT,
    keep_source: bool = False,
    net_bytes_s: float | None = None,
    kv_bits: int | None = None,
) -> list[Plan]:
    """A plan of every published model on this machine, in the order in which to show them; see `make`."""
    return ranked(
        make(machine, entry, context=context, keep_source=keep_source, net_bytes_s=net_bytes_s, kv_bits=kv_bits)
        for entry in entries
    )


def _choose(options: Sequence[Option]) -> Option | None:
    """The recommended option: the usual bits unless others are clearly better, then the most exact of the best."""
    working = sorted((one for one in options if one.works), key=lambda one: one.spec != DEFAULT)
    most = max((one.worth for one in working), default=0.0)
    return next((one for one in working if one.worth >= most - CLEARLY), None)


def _unskipped(packed: Manifest | None) -> list[str]:
    """That some layers are read whole, whatever the preset."""
    said = "" if packed is None else packed.unskipped
    return [f"As packing measured, {said}, whatever the preset."] if said else []


def widths(entry: CatalogEntry) -> PackSpec:
    """A pack's own widths, or the ones it would have unless others are clearly better.

    Raises:
        PackError: the entry's own pack cannot be read.
    """
    packed = Manifest.read(entry.folder) if entry.packed and entry.folder is not None else None
    found = _widths(entry, packed)
    return DEFAULT if DEFAULT in found else found[0]


def _widths(entry: CatalogEntry, packed: Manifest | None) -> tuple[PackSpec, ...]:
    """The widths to consider; only the pack's own if the model is packed already."""
    none = not entry.sizes.draft  # then it may be packed or not
    if (ready := entry.only_pack) is not None:
        given = ready.up, ready.gate, ready.down, ready.dense, ready.group
        return (PackSpec(*given, short=ready.short, draft=ready.draft or none),)
    if packed is None:
        return WIDTHS
    widths = packed.widths
    given = widths.up, widths.gate, widths.down, widths.dense, widths.group
    return (PackSpec(*given, short=widths.short, draft=DRAFT in packed.beside or none),)


def _packing_s(sizes: Sizes) -> float:
    """Seconds of one core."""
    return sizes.in_experts / figures().packed_weights_s


def _instead(machine: Machine, entry: CatalogEntry, context: int) -> str:
    """A smaller model that works, as `ranked` orders them, or the demo, which always works."""
    smaller = [
        Plan(other, machine, context, _choose([option(machine, other, spec, context) for spec in WIDTHS]), (), ())
        for other in PUBLISHED
        if other.sizes.parameters < entry.sizes.parameters
    ]
    best = recommended(ranked(smaller))
    if best is not None and best.chosen is not None:
        speed = quantities.digits(best.chosen.decode.mid, 2)
        return f"{best.entry.name} with {reasons.describe(best.chosen.spec)} bits works, at about {speed} tokens/s."
    return f"The built-in demo model always works: floe-chat plan {catalog.DEMO}"
