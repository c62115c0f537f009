"""The sentences of a plan: why these widths, why there, what RAM and time go into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..models.catalog import Entry
from ..models.pack import PackSpec
from ..models.quantities import memory as size
from .footprint import Footprint
from .machine import Machine
from .opening import KEPT_FREE
from .options import DEFAULT, PRESETS_ADD, Option, needs, rounding


def describe(spec: PackSpec) -> str:
    """Widths in words."""
    rows = f"rows {spec.gate}" if spec.gate == spec.down else f"gate {spec.gate}, down {spec.down}"
    narrow = "" if spec.narrow is None else f"; {spec.narrow.describe()}"
    return f"up {spec.up}, {rows}, attention {spec.dense} bit{narrow}"


def yardstick(kl: float) -> str:
    """What a rounding costs beside what the presets leave out."""
    for name, adds in PRESETS_ADD.items():
        if kl <= adds:
            return f"less than what the preset {name} adds ({adds:.3f})"
    name, adds = list(PRESETS_ADD.items())[-1]
    return f"more than what the preset {name} adds ({adds:.3f})"


def why_not(nearest: Option, missing: Mapping[str, int]) -> str:
    lacks = " and ".join(
        f"{size(count)} of {what.upper() if what == 'ram' else what}" for what, count in missing.items()
    )
    if nearest.missing:
        return f"Even with {describe(nearest.spec)}, {lacks} are missing."
    slow = f"Even with {describe(nearest.spec)} it would answer at {nearest.decode.mid:.2g} tokens/s"
    if not nearest.ram["lacking"]:
        return f"{slow}."
    return (
        f"{slow}, {1 - nearest.ram_share:.0%} of what a token reads coming from the disk: {lacks} more would hold it."
    )


def why(machine: Machine, entry: Entry, chosen: Option, options: Sequence[Option], context: int) -> tuple[str, ...]:
    return tuple(
        sentence
        for sentence in (
            _why_widths(entry, chosen, options),
            _why_place(machine, entry, chosen, context),
            _why_ram(machine, chosen),
            _why_speed(chosen),
        )
        if sentence
    )


def _why_widths(entry: Entry, chosen: Option, options: Sequence[Option]) -> str:
    if entry.packed:
        return f"It is packed already: {describe(chosen.spec)}."
    cost = f"rounding costs about {chosen.kl:.2g} nats of KL divergence on the 22 M-parameter demo model, "
    cost += yardstick(chosen.kl)
    if chosen.spec == DEFAULT:
        return f"{describe(chosen.spec)}: what lost least for the bytes that a token reads; {cost}."
    if rounding(chosen.spec) < rounding(DEFAULT):
        return f"{describe(chosen.spec)}: memory is ample, all of it fits the GPU; {cost}."
    default = next(one for one in options if one.spec == DEFAULT)
    more = f"{cost}; by default it is {rounding(DEFAULT):.2g}."
    if default.missing:
        lacks = " and ".join(f"{size(count)} of {what}" for what, count in default.missing.items())
        return f"{describe(chosen.spec)}: the default widths lack {lacks}; {more}"
    if default.in_memory:
        times = chosen.decode.mid / default.decode.mid
        return f"{describe(chosen.spec)}: so the GPU can help, {times:.1f} times as fast as the default widths; {more}"
    return (
        f"{describe(chosen.spec)}: at the default widths {1 - default.ram_share:.0%} of what is read while answering "
        f"would come from the disk; {more}"
    )


def _why_place(machine: Machine, entry: Entry, chosen: Option, context: int) -> str:
    takes = Footprint.of(entry.sizes, chosen.spec)
    asked, budget = needs(takes, context), int(machine.vram * (1 - KEPT_FREE))
    kept = f"{KEPT_FREE:.0%} of its {size(machine.vram)} stays free"
    if chosen.place == "gpu":
        return f"All of it on the GPU: it takes {size(asked.whole())}, and {kept} for torch and the desktop."
    if chosen.place == "pool":
        return (
            f"GPU with a pool of rows: all would take {size(asked.whole())}; {kept}. Beside the dense part, the up "
            f"projections and {context:,} tokens of context, {chosen.pool_share:.0%} of the rows fit, which are about "
            f"{chosen.token.hit:.0%} of those wanted; the CPU and the link share the others."
        )
    if not machine.vram:
        return "On the CPU: there is no GPU to use."
    if asked.least() > budget:
        return f"On the CPU: the GPU would need {size(asked.least())}, and has {size(budget)} to use."
    return "On the CPU (--device cpu), which is faster here than a GPU with so small a pool."


def _why_ram(machine: Machine, chosen: Option) -> str:
    free = f"{size(chosen.ram['free'])} of {size(machine.ram)} free RAM stay free"
    if chosen.ram_share >= 1:
        return f"RAM holds all that is read while answering; {free}."
    return (
        f"RAM holds {chosen.ram_share:.0%} of what is read while answering, the disk serves the rest through the page "
        f"cache; {free}."
    )


def _why_speed(chosen: Option) -> str:
    parts = {name: getattr(chosen.token, name) for name in ("dense", "up", "rows", "disk", "host")}
    names = {
        "dense": "attention and head",
        "up": "the up projections",
        "rows": "the rows",
        "disk": "reading from the disk",
        "host": "Python",
    }
    most = max(parts, key=parts.__getitem__)
    return f"{parts[most] / chosen.token.seconds:.0%} of a token's time goes into {names[most]}."
