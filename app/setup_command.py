"""`floe-chat setup`: plan, download, pack and check one model without a screen."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from ..models import catalog
from ..models.errors import AccessError, FloeError, UsageError
from .packing import time_left
from .progress import clear, note, step
from .setup_flow import Setup, SetupProgress
from .setup_wish import Wish, forget, unfinished, wish
from .setups import look_up
from .widgets import units
from .widgets.plain import printable

if TYPE_CHECKING:
    from ..engine.plan import Plan
    from ..models.published import Entry

_LOOK_S = 0.2


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--name", help="What the model is called here.  [default: its listed name]")
@click.option("--up", type=int, help="Bits of the up projection: 2, 3, 4, 8 or 16.  [default: what the plan chooses]")
@click.option("--rows", type=int, help="Bits of gate and down: 2, 3, 4, 8 or 16.  [default: likewise]")
@click.option("--dense", type=int, help="Bits of attention: 4, 8 or 16.  [default: likewise]")
@click.option("--yes", "-y", is_flag=True, help="Do not ask before starting.")
@click.option("--forget", "forgetting", is_flag=True, help="Delete what an earlier setup of MODEL left unfinished.")
@click.pass_context
def setup(ctx: click.Context, model: str | None, name: str | None, yes: bool, forgetting: bool, **bits: Any) -> None:
    """Download MODEL, pack it for this machine, and check it; then it can be chatted with.

    MODEL is a listed name (mixtral-8x7b-instruct, mixtral-8x7b, mixtral-8x22b-instruct), a hub id (owner/name), or the
    folder of a downloaded checkpoint. What it takes and how fast it will be is told first, see `floe-chat plan`.

    It can be stopped at any time; the same command, or `floe-chat setup` alone, goes on where it was. A token for a
    model with terms to accept comes from HF_TOKEN or the hub's own login, or is asked for and not kept.

    \b
    floe-chat setup mixtral-8x7b-instruct
    floe-chat setup ~/Downloads/Mixtral-8x7B-Instruct-v0.1 --name mixtral --up 4
    """
    begun = unfinished()
    wanted = _begun(begun, model, name)
    if forgetting:
        if wanted is None:
            raise UsageError("There is nothing unfinished of that name", _names(begun), "Name the model.")
        forget(wanted)
        note(f"What was left of {wanted.name} is deleted.")
        return
    given = {part: count for part, count in bits.items() if count is not None}
    if wanted is not None and given:
        raise UsageError(
            f"{wanted.name} was begun with other settings" if _differs(wanted, given) else f"{wanted.name} was begun",
            "An unfinished setup goes on as it began.",
            "Leave the widths out, or delete what is there with --forget first.",
        )
    token: str | None = None
    if wanted is None:
        wanted, token = _planned(_needed(model, begun), name, given, ask=not yes)
    else:
        note(f"Going on with {wanted.name}.")
    ctx.exit(_run(wanted, token))


def _begun(begun: list[Wish], model: str | None, name: str | None) -> Wish | None:
    """The unfinished setup that is meant, if one is."""
    if model is None and name is None:
        return begun[0] if len(begun) == 1 else None
    meant = {model, name, wish_name(model)}
    return next((one for one in begun if one.name in meant or one.model == model), None)


def wish_name(model: str | None) -> str | None:
    """What a model would be called; None if it means nothing."""
    try:
        return wish(model).name if model else None
    except UsageError:
        return None


def _differs(wanted: Wish, given: dict[str, int]) -> bool:
    now = {"up": wanted.up, "rows": wanted.gate, "dense": wanted.dense}
    return any(now[part] != count for part, count in given.items())


def _needed(model: str | None, begun: list[Wish]) -> str:
    if model is not None:
        return model
    listed = ", ".join(entry.name for entry in catalog.PUBLISHED)
    raise UsageError(
        "Which model?",
        f"{_names(begun)} Listed are {listed}.",
        "Name one: floe-chat setup mixtral-8x7b-instruct. `floe-chat plan MODEL` tells what it takes.",
    )


def _names(begun: list[Wish]) -> str:
    return f"Unfinished are {', '.join(one.name for one in begun)}." if begun else "Nothing is unfinished."


def _planned(model: str, name: str | None, given: dict[str, int], *, ask: bool) -> tuple[Wish, str | None]:
    """What to set up, and the token that was asked for; the plan is told and agreed to."""
    from ..engine.plan import make
    from .plan import here

    wanted = wish(model, name)
    entry, token = _entry(wanted)
    plan = make(here(), entry)
    if plan.chosen is None and not given:
        raise FloeError(
            f"{entry.name} does not fit this machine",
            " ".join((*plan.why, plan.instead)),
            "Name the widths (--up, --rows, --dense) to pack it all the same, for another machine.",
        )
    spec = plan.chosen.spec if plan.chosen else None
    rows = given.get("rows")
    bits = {
        "up": given.get("up", spec.up if spec else 3),
        "gate": rows or (spec.gate if spec else 4),
        "down": rows or (spec.down if spec else 4),
        "dense": given.get("dense", spec.dense if spec else 4),
    }
    wanted = wish(model, name, bits)
    wanted.spec()
    for line in _told(plan, wanted):
        note(line)
    if ask:
        if not sys.stdin.isatty():
            raise UsageError(
                "Nobody can be asked here", "Standard input is no terminal.", "Add --yes to start at once."
            )
        if not click.confirm("Start?", default=True, err=True):
            raise click.Abort
    return wanted, token


def _entry(wanted: Wish) -> tuple[Entry, str | None]:
    """What is to be set up, and the token that had to be asked for."""
    if (known := catalog.published(wanted.model)) is not None:
        return known, None
    try:
        return look_up(wanted), None
    except AccessError as error:
        token = _asked(error)
        return look_up(wanted, token), token


def _told(plan: Plan, wanted: Wish) -> list[str]:
    """The plan in a few lines; `floe-chat plan` has the rest."""
    from ..engine.reasons import describe

    lines = [f"{wanted.name}: {wanted.model} into {wanted.folder}"]
    if (chosen := plan.chosen) is not None:
        lines.append(
            f"{describe(chosen.spec)}: about {chosen.decode.mid:.2g} tokens/s "
            f"({chosen.decode.low:.2g} to {chosen.decode.high:.2g}) on this machine."
        )
        if wanted.local is None:
            peak, fetched = units.size(chosen.disk["peak"]), units.size(plan.entry.checkpoint_bytes)
            lines.append(f"It fetches {fetched} and takes up to {peak} of the disk meanwhile.")
    if plan.pack_s is not None:
        lines.append(f"Packing takes {time_left(plan.pack_s).removesuffix(' left')} of computing.")
    return lines


def _asked(error: AccessError) -> str:
    """A token, asked for once."""
    if not sys.stdin.isatty():
        raise error
    note(" ".join(part for part in (error.title + ".", error.cause, error.hint) if part))
    return click.prompt("Token", hide_input=True, err=True)


def _run(wanted: Wish, token: str | None) -> int:
    while True:
        try:
            _follow(wanted, token)
        except AccessError as error:
            if token is not None:
                raise
            token = _asked(error)
        else:
            break
    note(f"{wanted.name} is ready. Chat with it: floe-chat --model {wanted.name}")
    click.echo(printable(str(wanted.folder)))
    return 0


def _follow(wanted: Wish, token: str | None) -> None:
    told = 0
    with Setup(wanted, token) as running:
        running.start()
        try:
            while not running.wait(_LOOK_S):
                now = running.progress()
                for notice in now.notices[told:]:
                    note(notice)
                told = len(now.notices)
                step(line(now))
        except KeyboardInterrupt:
            running.cancel()
            note("Everything done so far is kept; `floe-chat setup` goes on.")
            raise
        finally:
            clear()
        if running.error is not None:
            raise running.error


def line(now: SetupProgress) -> str:
    """What goes on, in one line."""
    parts = [f"{now.step}, {now.share:.0%}" if now.share else now.step]
    if (download := now.download) is not None and download.state not in ("done", "waiting"):
        rate = f" at {units.size(download.rate)}/s" if download.rate else ""
        parts.append(download.note or f"fetched {units.size(download.done)} of {units.size(download.total)}{rate}")
    if now.left is not None:
        parts.append(time_left(now.left))
    return " · ".join(parts)
