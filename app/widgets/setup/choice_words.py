"""One choice of a model and its bits, in columns and in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content

from ....models import catalog
from ....models.quantities import digits, fetching, forecast, size
from ...setup.ready_words import claims, takes
from ...text.plain_text import printable
from . import plan_words

if TYPE_CHECKING:
    from ....engine.planning.options import Option
    from ....engine.planning.plan import Plan

WIDE = 74  # columns from which all figures stand in the table
_WORDS = 0.75  # words per token, in English text


def quality(bits: str, kl: str) -> str:
    """The first two columns."""
    return f"{bits:<8}{kl:>11} "


def columns(bits: str, kl: str, speed: str, fetched: str, pack: str, peak: str, *, wide: bool) -> str:
    """A line of the table, or its head."""
    if wide:
        return f"{quality(bits, kl)}{speed:>15}{fetched:>9}{pack:>9}{peak:>12}"
    return f"{quality(bits, kl)}{speed:>10}{peak:>15}"


def disk(one: Option) -> tuple[int, int]:
    """Bytes of the pack, and at the peak."""
    return one.disk["pack"], one.disk["peak"]


def ready_details(plan: Plan, one: Option, *, also: bool) -> Content:
    """All about a ready pack, in sentences; `also`: it can be packed here instead."""
    ready, free = plan.entry.only_pack, plan.machine.disk_free
    assert ready is not None
    lines: list[Content | str] = []
    if lacks := plan_words.missing(one):
        lines.append(Content.styled(f"It {lacks}." if one.missing else f"It is {lacks}.", "$text-warning"))
    else:
        lines.append(f"Speed: {plan_words.rate(one.decode)} tokens/s, {plan_words.place(one)}.")
    lines += map(printable, claims(ready))
    left = "" if free is None else f" {size(free)} are free."
    lines.append(f"{takes(ready)}{left} {_place()}")
    if also:
        lines.append("The next line downloads the original weights instead and packs them here.")
    return Content("\n").join([line if isinstance(line, Content) else Content(line) for line in lines])


def details(plan: Plan, one: Option, *, first: bool, figures: bool) -> Content:
    """All about one choice, in sentences; `first`: it is the first of all; figures: with the KL."""
    from ....engine.planning.reasons import rounded_before, smaller

    pack, peak = map(size, disk(one))
    free = "" if plan.machine.disk_free is None else f"; {size(plan.machine.disk_free)} free"
    words = digits(one.decode.mid * _WORDS * 60, 2)
    lines: list[Content | str] = []
    if lacks := plan_words.missing(one):
        lines.append(Content.styled(f"It {lacks}." if one.missing else f"It is {lacks}.", "$text-warning"))
    else:
        lines.append(
            f"Speed: {plan_words.rate(one.decode)} tokens/s, about {words} words a minute, {plan_words.place(one)}."
        )
    lines.append(f"{plan_words.loss(one.kl, figures=figures)}: {plan_words.named(one.spec)}.")
    if twice := rounded_before(plan.entry, plan_words.widths(one.spec)):
        lines.append(twice)
    if plan.entry.gated:
        lines.append("Its publisher asks you to accept terms on the hub first; that needs an account.")
    packing = f"Packing takes {forecast(plan.pack_s)}." if plan.pack_s is not None and one is plan.chosen else ""
    if plan.entry.folder is None:
        fetched = f"{size(plan.entry.checkpoint_bytes)}, {fetching(plan.entry.checkpoint_bytes)}"
        there = f" of {plan.entry.gguf}" if plan.entry.file_bytes and plan.entry.gguf else ""
        lines.append(f"Download{there}: {fetched}. {packing}".strip())
        lines.append(f"Disk: pack {pack}, at most {peak} at once{free}. {_place()}")
        if plan.entry.others and plan.entry.repo:
            listed = ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in plan.entry.others)
            name = plan.entry.repo.rpartition(":")[0]
            lines.append(printable(f"Its repository has other files, too: {listed}. Type {name}:NAME for one."))
        lines += [shorter] if (shorter := smaller(plan.entry)) else []
    else:
        lines.append(f"Disk: pack {pack}{free}. {_place()}")
        lines += [packing] if packing else []
    if first and plan_words.at_reading_speed(plan):
        lines.append("First at reading speed, by size and age; answers are not measured.")
    return Content("\n").join([line if isinstance(line, Content) else Content(line) for line in lines])


def _place() -> str:
    return f"Files in {printable(str(catalog.models_folder()))}."
