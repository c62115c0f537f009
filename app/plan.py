"""`floe-chat plan`: whether a model runs on this machine or another, how, and how fast, before anything is fetched."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import textwrap
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from ..models.errors import UsageError
from . import progress
from .arguments import memory_size
from .bench_table import measuring
from .widgets import units
from .widgets.plain import printable

if TYPE_CHECKING:
    from ..engine.machine import Described, Machine
    from ..engine.options import Option, Range
    from ..engine.plan import Plan

_NAME, _WIDTH = 10, 100
_SLOWEST, _FASTEST = 1e-3, 1e6  # of a rate that is given, in its unit
_PLACES = {"gpu": "GPU, all of it", "pool": "GPU and a pool", "cpu": "CPU"}


@click.command()
@click.argument("model", metavar="MODEL")
@click.option("--vram", metavar="SIZE", help="GPU memory, such as 12GiB.")
@click.option("--ram", metavar="SIZE", help="Memory of the machine.")
@click.option("--cpu-gbs", type=float, metavar="GB/S", help="What the CPU reads memory at.")
@click.option("--link-gbs", type=float, metavar="GB/S", help="What copies to the GPU reach.")
@click.option("--pcie", metavar="GxL", help="Generation and lanes of the link instead, such as 4x16.")
@click.option("--disk-gbs", type=float, metavar="GB/S", help="What the disk reads at.")
@click.option("--disk-free", metavar="SIZE", help="Free space on the disk.")
@click.option(
    "--card", metavar="NAME", help="A GPU and its machine from the list of virtual cards: rtx3060-12gb; none: no GPU."
)
@click.option("--context", type=click.IntRange(1), help="Tokens of a conversation to provide for.  [default: 4096]")
@click.option("--keep-source", is_flag=True, help="Keep the downloaded checkpoint beside the pack.")
@click.option("--net-mbs", type=float, metavar="MB/S", help="What a download reaches.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    ctx: click.Context,
    model: str,
    vram: str | None,
    ram: str | None,
    disk_free: str | None,
    pcie: str | None,
    card: str | None,
    context: int | None,
    keep_source: bool,
    as_json: bool,
    **rates: float | None,
) -> None:
    """Tell whether MODEL runs on this machine, how, and how fast, before anything is downloaded.

    MODEL is a listed name (mixtral-8x7b-instruct, mixtral-8x7b, mixtral-8x22b-instruct, demo), or a folder with a
    config.json. Options describe a machine that is not at hand; what they leave out is taken from this one. The first
    time, this machine is measured for a few seconds. Exits with 1 where nothing fits.

    Example: floe-chat plan mixtral-8x7b-instruct --vram 12GiB --ram 32GiB --pcie 4x16
    """
    if pcie is not None and rates["link_gbs"] is not None:
        raise click.UsageError("--pcie and --link-gbs both say how fast the link is: give one of them.")
    positive = {name: _positive(name, rate) for name, rate in rates.items()}
    lanes = _lanes(pcie)
    sizes = [memory_size(text) for text in (vram, ram, disk_free)]
    from ..engine.machine import Described
    from ..engine.opening import CONTEXT
    from ..engine.plan import make
    from ..models.catalog import described

    cpu, link, disk = (_times(positive[name], 1e9) for name in ("cpu_gbs", "link_gbs", "disk_gbs"))
    said = Described(card, sizes[0], sizes[1], cpu, link, lanes, disk, sizes[2])
    entry = described(model)
    if context is not None and context > entry.sizes.window:
        progress.note(f"{entry.name} takes at most {entry.sizes.window:,} tokens: the plan is for these.")
    found = make(
        _machine(said),
        entry,
        context=context or CONTEXT,
        keep_source=keep_source,
        net_bytes_s=_times(positive["net_mbs"], 1e6),
    )
    click.echo(json.dumps(as_fields(found), indent=2) if as_json else printable(text_of(found)))
    ctx.exit(0 if found.chosen else 1)


def as_fields(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes, seconds, tokens per second."""
    fields = dataclasses.asdict(plan)
    fields["entry"] |= {
        "folder": str(plan.entry.folder) if plan.entry.folder else None,
        "checkpoint_bytes": plan.entry.checkpoint_bytes,
        "parameters": plan.entry.sizes.parameters,
    }
    return {"version": version("floe-chat"), "fits": plan.chosen is not None, **fields}


def text_of(plan: Plan) -> str:
    """The plan for people."""
    entry = plan.entry
    about = [entry.repo or str(entry.folder or ""), f"{entry.sizes.parameters / 1e9:.3g} B parameters", entry.licence]
    lines = [f"{entry.name}: {', '.join(part for part in about if part)}"]
    if entry.gated:
        lines.append("  Its publisher asks to accept terms on the hub first, with an account.")
    if entry.chat is None:
        lines.append("  It is a base model: it continues text and knows no turns, so floe-chat cannot chat with it.")
    lines += ["", f"Machine: {plan.machine.name}", *map(_wrapped, plan.machine.told.values()), ""]
    if plan.chosen is None:
        lines += ["It does not fit", *map(_wrapped, (*plan.why, plan.instead)), ""]
    else:
        lines += ["Plan", *_lines(plan, plan.chosen), "", "Why", *map(_wrapped, plan.why), ""]
    note = "Speeds are estimates by the Balanced preset; rounding costs what it costs the 22 M-parameter demo model."
    return "\n".join([*lines, "Widths side by side", *_table(plan), "", _wrapped(note).strip()])


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, _WIDTH, initial_indent="  ", subsequent_indent="    ")


def _lines(plan: Plan, chosen: Option) -> list[str]:
    from ..engine.reasons import describe
    from ..models.quantities import memory as size

    def uses(held: dict[str, int]) -> str:
        return ", ".join(f"{use} {size(count)}" for use, count in held.items() if count)

    told = [
        ("widths", describe(chosen.spec)),
        ("where", _PLACES[chosen.place]),
        ("GPU", uses(dict(chosen.vram))),
        ("RAM", uses(dict(chosen.ram))),
        ("disk", _disk(chosen, plan)),
        ("context", f"{plan.context:,} tokens"),
        ("answer", f"{_range(chosen.decode)} tokens/s"),
        ("prompt", f"{_range(chosen.prefill)} tokens/s"),
        ("download", _duration(plan.download_s, units.size(plan.entry.checkpoint_bytes))),
        ("packing", _duration(plan.pack_s, f"{plan.machine.cores} cores")),
    ]
    return [f"  {name:<{_NAME}}{text}" for name, text in told if text]


def _disk(chosen: Option, plan: Plan) -> str:
    if not chosen.disk["pack"]:
        return ""
    free = "" if plan.machine.disk_free is None else f" of {units.size(plan.machine.disk_free)} free"
    return f"{units.size(chosen.disk['pack'])}, while packing up to {units.size(chosen.disk['peak'])}{free}"


def _table(plan: Plan) -> list[str]:
    from ..engine.reasons import describe

    head = f"  {'':<32}{'rounding, nats':>15}  {'where':<16}{'tokens/s':>22}{'pack':>10}"
    rows = [head]
    for one in plan.options:
        speed = "lacks " + ", ".join(one.missing) if one.missing else _range(one.decode)
        mark = "*" if one is plan.chosen else " "
        taken = units.size(one.disk["pack"]) if one.disk["pack"] else "there"
        where = _PLACES[one.place] + ("" if one.ram_share >= 1 else ", disk")
        rows.append(f"{mark} {describe(one.spec):<32}{one.kl:>15.2g}  {where:<16}{speed:>22}{taken:>10}")
    return rows


def _range(of: Range) -> str:
    return f"{_digits(of.mid)} ({_digits(of.low)} to {_digits(of.high)})"


def _digits(rate: float) -> str:
    """Two significant digits: an estimate has no more."""
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float | None, what: str) -> str:
    if seconds is None:
        return ""
    minutes = seconds / 60
    told = f"{minutes / 60:.1f} hours" if minutes >= 100 else f"{math.ceil(minutes)} minutes"
    return f"about {told} ({what})"


def here() -> Machine:
    """This machine; the first time it is measured, which takes a few seconds."""
    from ..engine import hardware, machine, rates
    from ..models.catalog import models_folder

    folder = models_folder()
    kept = rates.Measured.load(rates.kept_file())
    if kept is None:
        with measuring() as report:
            kept = rates.measure(folder, lambda name: report(f"Measuring this machine: {name}", 0, 1))
    return machine.here(hardware.probe(folder), kept)


def _machine(said: Described) -> Machine:
    """The machine that is meant. Of this one, a card that brings its own rates needs no more than memory and disk."""
    from ..engine import hardware, machine, rates
    from ..models.catalog import models_folder

    if said.empty:
        return here()
    if said.card in (None, machine.NO_CARD):
        return machine.described(said, here())
    base = machine.here(hardware.probe(models_folder()), rates.Measured.load(rates.kept_file()))
    return machine.described(said, base)


def _positive(name: str, rate: float | None) -> float | None:
    if rate is not None and not _SLOWEST <= rate <= _FASTEST:
        option = "--" + name.replace("_", "-")
        hint = f"Give a number from {_SLOWEST:g} to {_FASTEST:,.0f}, such as {option} 30."
        raise UsageError(f"{option} cannot be {rate}", "It is a rate.", hint)
    return rate


def _times(rate: float | None, unit: float) -> float | None:
    return None if rate is None else rate * unit


def _lanes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-6])(?:\.0)?\s*x\s*(1|2|4|8|16)", text.strip().lower())
    if not match:
        hint = "Give generation (1 to 6) and lanes (1, 2, 4, 8 or 16), such as --pcie 4x16."
        raise UsageError(f"{text!r} is no PCIe link", "", hint)
    return int(match[1]), int(match[2])
