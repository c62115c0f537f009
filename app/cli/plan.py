"""`floe-chat plan`: whether a model runs on this machine or another, how, and how fast, before any download."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from ...models.errors import FloeError, UsageError
from ...models.quantities import memory_size
from .. import progress
from ..text.plain_text import printable
from .bench.table import measuring
from .printing.plan_page import cards_text, text_of, text_of_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...engine.planning.machine import Described, Machine
    from ...engine.planning.plan import Plan

_SLOWEST, _FASTEST = 1e-3, 1e6  # of a rate that is given, in its unit
_LIST = "list"


@click.command(short_help="Show whether a model runs here, how, and how fast.")
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--vram", metavar="SIZE", help="GPU memory in GB, such as 12.")
@click.option("--ram", metavar="SIZE", help="Installed RAM in GB, such as 32.")
@click.option("--cpu-gbs", type=float, metavar="GB/S", help="How fast the CPU reads memory.")
@click.option("--link-gbs", type=float, metavar="GB/S", help="How fast data is copied to the GPU.")
@click.option("--pcie", metavar="GxL", help="PCIe generation and lanes instead of --link-gbs, such as 4x16.")
@click.option("--disk-gbs", type=float, metavar="GB/S", help="How fast the disk reads.")
@click.option("--disk-free", metavar="SIZE", help="Free disk space in GB.")
@click.option(
    "--card",
    "cards",
    multiple=True,
    metavar="NAME",
    help="A graphics card in a typical machine, such as 3090; none plans without a GPU, list prints all cards. Give it "
    "twice for a machine with two cards that share the work.",
)
@click.option("--devices", metavar="NAME,NAME", help="This machine's cards that would share the model: cuda:0,cuda:1.")
@click.option("--context", type=click.IntRange(1), help="Context to reserve, in tokens.  [default: 4096]")
@click.option(
    "--kv-bits",
    type=click.Choice(["16", "8"]),
    help="Bits of the chat's keys and values.  [default: 16, or 8 where that is clearly worth it]",
)
@click.option("--keep-source", is_flag=True, help="Keep the downloaded checkpoint beside the pack.")
@click.option("--draft", "drafter", metavar="NAME|FOLDER", help="With a smaller model in RAM that guesses tokens.")
@click.option("--no-draft", is_flag=True, help="Without the head that guesses further tokens.")
@click.option("--net-mbs", type=float, metavar="MB/S", help="How fast the download is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def plan(
    ctx: click.Context,
    model: str | None,
    vram: str | None,
    ram: str | None,
    disk_free: str | None,
    pcie: str | None,
    cards: tuple[str, ...],
    devices: str | None,
    context: int | None,
    kv_bits: str | None,
    keep_source: bool,
    drafter: str | None,
    no_draft: bool,
    as_json: bool,
    **rates: float | None,
) -> None:
    """Show whether MODEL runs on this machine, how, and how fast, before anything is downloaded.

    MODEL is a listed name or a part of one (olmoe, mixtral, demo), a hub id or the address of its page, or a folder
    with a config.json. Without MODEL, all listed models are compared, the recommended one first.

    The options describe another machine; what they leave out is taken from this one, which is measured for a few
    seconds the first time. Exits with 1 if nothing fits.

    \b
    floe-chat plan
    floe-chat plan mixtral --card 3060 --ram 32
    floe-chat plan mixtral --card 3060 --card 3060 --ram 32
    floe-chat plan olmoe --vram 8 --ram 16
    """
    if _LIST in [card.strip().lower() for card in cards]:
        click.echo(cards_text())
        return
    if pcie is not None and rates["link_gbs"] is not None:
        raise click.UsageError("--pcie and --link-gbs both set the speed of the link. Give one of them.")
    if drafter and (no_draft or model is None):
        with_which = "Leave out --no-draft." if no_draft else "Name the model that it guesses for too."
        raise click.UsageError(f"--draft names what guesses tokens for a model. {with_which}")
    positive = {name: _positive(name, rate) for name, rate in rates.items()}
    lanes = _lanes(pcie)
    sizes = [memory_size(text) for text in (vram, ram, disk_free)]
    from ...engine.context import CONTEXT
    from ...engine.planning.drafter import with_drafter
    from ...engine.planning.machine import Described
    from ...engine.planning.plan import make, offers
    from ...models.catalog import described

    cpu, link, disk = (_times(positive[name], 1e9) for name in ("cpu_gbs", "link_gbs", "disk_gbs"))
    card, others = (cards[0], cards[1:]) if cards else (None, ())
    among = [] if devices is None else devices.split(",")
    said = Described(card, sizes[0], sizes[1], cpu, link, lanes, disk, sizes[2], others)
    wanted: dict[str, Any] = {
        "context": context or CONTEXT,
        "keep_source": keep_source,
        "net_bytes_s": _times(positive["net_mbs"], 1e6),
        "kv_bits": None if kv_bits is None else int(kv_bits),
    }
    if model is None:
        ctx.exit(_all(offers(_machine(said, among), **wanted), as_json=as_json))
    entry = described(model)
    if context is not None and context > entry.sizes.window:
        progress.note(f"{entry.name} has a context of {entry.sizes.window:,} tokens: the plan is for that.")
    machine = _machine(said, among)
    if drafter is not None:
        found = with_drafter(machine, entry, described(drafter), **wanted)
    else:
        found = make(machine, entry.headless if no_draft else entry, **wanted)
    click.echo(json.dumps(as_fields(found), indent=2) if as_json else printable(text_of(found)))
    ctx.exit(0 if found.chosen else 1)


def _all(plans: Sequence[Plan], *, as_json: bool) -> int:
    """Print a plan of every listed model; the exit code."""
    from ...engine.planning.plan import recommended

    first = recommended(plans)
    fields = {
        "version": version("floe-chat"),
        "recommended": first.entry.name if first else None,
        "plans": [as_fields(one) for one in plans],
    }
    click.echo(json.dumps(fields, indent=2) if as_json else printable(text_of_all(plans)))
    return 0 if any(one.chosen for one in plans) else 1


def as_fields(plan: Plan) -> dict[str, Any]:
    """The plan for programs: bytes, seconds, tokens per second."""
    fields: dict[str, Any] = {**dataclasses.asdict(plan), "instead": plan.instead}
    fields["entry"] |= {
        "folder": str(plan.entry.folder) if plan.entry.folder else None,
        "checkpoint_bytes": plan.entry.checkpoint_bytes,
        "parameters": plan.entry.sizes.parameters,
    }
    return {"version": version("floe-chat"), "fits": plan.chosen is not None, **fields}


def here() -> Machine:
    """This machine, measured the first time and again if other programs disturbed that; takes some seconds. With the
    cards of the settings, where these name several.
    """
    from ...engine.machine import hardware
    from ...engine.planning import machine, rates
    from ...models.catalog import models_folder
    from ..settings.file import read, settings_file

    folder = models_folder()
    measured = rates.reliable()
    if measured is None:
        with measuring() as report:
            measured = rates.measure(folder, lambda name: report(f"Measuring this machine: {name}", 0, 1))
    here = machine.here(hardware.probe(folder), measured)
    device = read(settings_file()).settings.device
    with suppress(FloeError):  # cards that are no longer there, or cannot compute
        return _with_cards(here, device.split(",")) if device.startswith("cuda") and "," in device else here
    return here


def _machine(said: Described, among: Sequence[str]) -> Machine:
    """The machine to plan for. With a named card, this machine only adds RAM and disk, so it is not measured."""
    from ...engine.machine import hardware
    from ...engine.planning import machine, rates
    from ...models.catalog import models_folder

    if among:
        if not said.empty:
            raise click.UsageError("--devices is about this machine. Leave out what describes another one.")
        return _with_cards(here(), among)
    if said.empty:
        return here()
    if said.card in (None, machine.NO_CARD):
        return machine.described(said, here())
    base = machine.here(hardware.probe(models_folder()), rates.Measured.load(rates.kept_file()))
    return machine.described(said, base)


def _with_cards(machine: Machine, names: Sequence[str]) -> Machine:
    """This machine with the cards of these names.

    Raises:
        UsageError: there is no such card, or it is named twice.
    """
    from ...engine.machine import hardware
    from ...engine.planning import device_choice, rates
    from ...engine.planning.machine import here_with
    from ...models.catalog import models_folder

    places = [device_choice.real_place(name.strip())[0] for name in names]
    if "cpu" in places or len({*places}) < len(places):
        raise UsageError("--devices names different cards of this machine", "", "Such as --devices cuda:0,cuda:1.")
    indices = [int(place.partition(":")[2]) for place in places]
    made = here_with(hardware.probe(models_folder()), rates.Measured.load(rates.kept_file()), indices)
    return made if len(indices) > 1 else machine


def _positive(name: str, rate: float | None) -> float | None:
    if rate is not None and not _SLOWEST <= rate <= _FASTEST:
        option = "--" + name.replace("_", "-")
        hint = f"Give a number from {_SLOWEST:g} to {_FASTEST:,.0f}, such as {option} 30."
        raise UsageError(f"{option} cannot be {rate}", "", hint)
    return rate


def _times(rate: float | None, unit: float) -> float | None:
    return None if rate is None else rate * unit


def _lanes(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"([1-6])(?:\.0)?\s*x\s*(1|2|4|8|16)", text.strip().lower())
    if not match:
        hint = "Give generation (1 to 6) and lanes (1, 2, 4, 8 or 16), such as --pcie 4x16."
        raise UsageError(f"{text!r} is not a PCIe link", "", hint)
    return int(match[1]), int(match[2])
