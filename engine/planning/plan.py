"""Whether a model runs on a machine, how, and how fast: decided before the first byte is downloaded.

Widths are those that packing offers (`PackSpec`). The rule of the recommendation is in options.py; every choice has
its reasons in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...models import catalog, quantities
from ...models.catalog import CatalogEntry
from ...models.catalog_entry import Sizes
from ...models.errors import UsageError
from ...models.pack.manifest import Manifest
from ...models.packing.pack import PackSpec
from ...models.published import PUBLISHED
from ..context import CONTEXT
from . import reasons
from .machine import Machine
from .measured_figures import figures
from .options import DEFAULT, WIDTHS, Option, option
from .worth import CLEARLY


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a model on a machine.

    Attributes:
        context: tokens whose keys and values have room. chosen: the recommended option, None if nothing works.
            options: all widths considered, most exact first. why: sentences. missing: bytes by "ram" or "disk" that the
            smallest lacks, if nothing works. instead: what would work, in words.
        download_s, pack_s: seconds, None if there is nothing to fetch or pack, or no rate is known.
    """

    entry: CatalogEntry
    machine: Machine
    context: int
    chosen: Option | None
    options: tuple[Option, ...]
    why: tuple[str, ...]
    missing: Mapping[str, int] = field(default_factory=dict[str, int])
    instead: str = ""
    download_s: float | None = None
    pack_s: float | None = None


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
    options = tuple(option(machine, entry, spec, context, keep_source, kv_bits) for spec in _widths(entry))
    chosen = _choose(options)
    if chosen is None:
        nearest = min(options, key=lambda one: (sum(one.missing.values()), -one.decode.mid))
        missing = nearest.missing or {"ram": nearest.ram["lacking"]}
        why = (reasons.why_not(nearest, missing),)
        return Plan(entry, machine, context, None, options, why, missing, _instead(machine, entry, context))
    fetched = entry.folder is None
    return Plan(
        entry,
        machine,
        context,
        chosen,
        options,
        reasons.why(machine, entry, chosen, options, context),
        download_s=entry.checkpoint_bytes / net_bytes_s if fetched and net_bytes_s else None,
        pack_s=None
        if entry.packed
        else _expert_weights(entry.sizes) / (figures().packed_weights_s * max(1, machine.cores)),
    )


def in_order(plans: Iterable[Plan]) -> list[Plan]:
    """The order in which to show them: models that run here before others, chat models before base models, and smaller
    ones first, since a new user wants an answer soon.
    """
    return sorted(
        plans,
        key=lambda plan: (plan.chosen is None, plan.entry.chat is None, plan.entry.sizes.parameters, plan.entry.name),
    )


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
    return in_order(
        make(machine, entry, context=context, keep_source=keep_source, net_bytes_s=net_bytes_s, kv_bits=kv_bits)
        for entry in entries
    )


def _choose(options: Sequence[Option]) -> Option | None:
    """The recommended option: the usual bits unless others are clearly better, then the most exact of the best."""
    working = sorted((one for one in options if one.works), key=lambda one: one.spec != DEFAULT)
    most = max((one.worth for one in working), default=0.0)
    return next((one for one in working if one.worth >= most - CLEARLY), None)


def _widths(entry: CatalogEntry) -> tuple[PackSpec, ...]:
    """The widths to consider; only the pack's own if the model is packed already."""
    if not entry.packed or entry.folder is None:
        return WIDTHS
    widths = Manifest.read(entry.folder).widths
    return (PackSpec(widths.up, widths.gate, widths.down, widths.dense, widths.group),)


def _expert_weights(sizes: Sizes) -> int:
    return 3 * sizes.layers * sizes.experts * sizes.intermediate * sizes.hidden


def _instead(machine: Machine, entry: CatalogEntry, context: int) -> str:
    """A smaller model that works: the largest that reads nothing from the disk, or the demo, which always works."""
    for other in sorted(PUBLISHED, key=lambda known: -known.sizes.parameters):
        if other.sizes.parameters < entry.sizes.parameters and other.chat is not None:
            best = _choose([option(machine, other, spec, context) for spec in WIDTHS])
            if best is not None and best.in_memory:
                speed = quantities.digits(best.decode.mid, 2)
                return f"{other.name} with {reasons.describe(best.spec)} bits works, at about {speed} tokens/s."
    return f"The built-in demo model always works: floe-chat plan {catalog.DEMO}"
