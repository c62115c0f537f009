"""Whether a model runs on a machine, how, and how fast: decided before the first byte of it is fetched.

Widths are those that packing offers (`PackSpec`). Every choice has its reason in words.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..models import catalog
from ..models.catalog import Entry
from ..models.errors import UsageError
from ..models.manifest import Manifest
from ..models.pack import PackSpec
from ..models.published import PUBLISHED, Sizes
from . import reasons
from .machine import Machine
from .opening import CONTEXT
from .options import DEFAULT, WIDTHS, Option, option, rounding

# Weights that one core packs per second: 40 s for one expert of Mixtral on two cores, most of them for quantizing.
PACKED_WEIGHTS_S = 3 * 14336 * 4096 / 40 / 2

MUCH_FASTER = 1.5  # times as fast: what smaller widths must gain where the default would do


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do with a model on a machine.

    Attributes:
        context: tokens whose keys and values are provided for. chosen: None where nothing works. options: all widths
            that were looked at, best quality first. why: sentences. missing: bytes by "ram" or "disk" that the
            smallest lacks, where nothing works. instead: what would work, in words.
        download_s, pack_s: seconds, None where there is nothing to fetch or pack, or no rate is known.
    """

    entry: Entry
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
    entry: Entry,
    *,
    context: int = CONTEXT,
    keep_source: bool = False,
    net_bytes_s: float | None = None,
) -> Plan:
    """Decide.

    Args:
        context: tokens to provide for, at most the model's window. keep_source: whether a downloaded checkpoint stays
            on the disk. net_bytes_s: of the download.

    Raises:
        UsageError: no room for a single token. PackError: the entry's own pack cannot be read.
    """
    if context < 1:
        raise UsageError(f"A context of {context} tokens holds nothing", "", "Give --context 1 or more.")
    context = min(context, entry.sizes.window)
    options = tuple(option(machine, entry, spec, context, keep_source) for spec in _widths(entry))
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
        pack_s=None if entry.packed else _expert_weights(entry.sizes) / (PACKED_WEIGHTS_S * max(1, machine.cores)),
    )


def in_order(plans: Iterable[Plan]) -> list[Plan]:
    """The order in which a person should see them: models that run here before others, those that can chat before base
    models, and the smaller first, since a person who is new wants an answer soon."""
    return sorted(
        plans,
        key=lambda plan: (plan.chosen is None, plan.entry.chat is None, plan.entry.sizes.parameters, plan.entry.name),
    )


def offers(machine: Machine, entries: Iterable[Entry] = PUBLISHED, *, context: int = CONTEXT) -> list[Plan]:
    """A plan of every published model on this machine, in the order to show them."""
    return in_order(make(machine, entry, context=context) for entry in entries)


def _choose(options: Sequence[Option]) -> Option | None:
    """Better than the default only where all of it fits the GPU; smaller only where the default would read from the
    disk, or where that brings the GPU in and is much faster; if all would read from the disk, the fastest."""
    first: Option | None = None
    for one in options:
        better = rounding(one.spec) < rounding(DEFAULT)
        if not one.in_memory or (better and one.place != "gpu"):
            continue
        if first is None and one.place != "cpu":
            return one
        if first is None:
            first = one
        elif one.place != "cpu" and one.decode.mid >= MUCH_FASTER * first.decode.mid:
            return one
    return first or max((one for one in options if one.works), key=lambda one: one.decode.mid, default=None)


def _widths(entry: Entry) -> tuple[PackSpec, ...]:
    """Those of the pack, if it is one already."""
    if not entry.packed or entry.folder is None:
        return WIDTHS
    widths = Manifest.read(entry.folder).widths
    return (PackSpec(widths.up, widths.gate, widths.down, widths.dense, widths.group, narrow=widths.narrow),)


def _expert_weights(sizes: Sizes) -> int:
    return 3 * sizes.layers * sizes.experts * sizes.intermediate * sizes.hidden


def _instead(machine: Machine, entry: Entry, context: int) -> str:
    """A smaller plan that works: another listed model, or the demo, which is always there."""
    for other in sorted(PUBLISHED, key=lambda known: known.sizes.parameters):
        smaller = other.sizes.parameters < entry.sizes.parameters and other.chat is not None
        if smaller and (best := _choose([option(machine, other, spec, context) for spec in WIDTHS])):
            return f"{other.name} with {reasons.describe(best.spec)} works, at about {best.decode.mid:.2g} tokens/s."
    return f"The built-in demo model always works: floe-chat plan {catalog.DEMO}."
