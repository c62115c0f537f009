"""`floe-chat setup` with a ready pack: what it says it is, and whether to take it or to pack the model here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from ....models.errors import AccessError, FloeError, UsageError
from ...progress import note
from ...setup.ready_words import claims, in_short, is_remote, takes
from ...setup.wish import Wish, of_ready

if TYPE_CHECKING:
    from ....engine.planning.machine import Machine
    from ....engine.planning.plan import Plan
    from ....models.catalog_entry import CatalogEntry

LookUp = Callable[[Wish], "tuple[CatalogEntry, str | None]"]


def offered(
    machine: Machine, wanted: Wish, entry: CatalogEntry, look_up: LookUp, *, ask: bool
) -> tuple[Wish, str | None] | None:
    """The setup of the ready pack of `entry`, and the token that it needs, once the user has agreed to it.

    None: the model is to be packed here. look_up: what is at the place of a `Wish`, and the token if one was asked for.

    Raises:
        FloeError: it cannot be used or does not fit this machine, and there is no checkpoint to pack instead.
    """
    from ....engine.planning.plan import make

    token: str | None = None
    ready = entry.ready
    assert ready is not None
    alone = entry.only_pack is not None
    if not ready.digest:
        try:
            found, token = look_up(of_ready(wanted, ready))
            if found.ready is None:
                raise UsageError(f"{ready.place} is no pack", "It holds a checkpoint.")
        except AccessError:
            raise
        except FloeError as error:
            note(f"The ready pack cannot be used: {error.title}. {error.cause} It will be packed here.")
            return None
        ready = found.ready
    packed = entry.as_pack
    assert packed is not None
    plan = make(machine, packed)
    if plan.chosen is None and not alone:
        note(f"The ready pack {ready.place} does not fit this machine. {' '.join(plan.why)}")
        return None
    for line in _lines(plan, wanted, alone=alone):
        note(line)
    if plan.chosen is None:
        raise FloeError(f"{wanted.name} does not fit this machine", " ".join(plan.why), plan.instead)
    if ask and not _agreed(alone=alone):
        return None
    return of_ready(wanted, ready), token


def _lines(plan: Plan, wanted: Wish, *, alone: bool) -> list[str]:
    from ....engine.planning.reasons import describe

    ready = plan.entry.ready
    assert ready is not None
    lines = [f"{wanted.name}: {ready.place} into {wanted.place} ({in_short(ready)})", *claims(ready)]
    if (one := plan.chosen) is not None:
        speed = f"about {one.decode.mid:.2g} tokens/s ({one.decode.low:.2g} to {one.decode.high:.2g}) on this machine."
        lines.append(f"{describe(one.spec)}: {speed}")
    lines.append(takes(ready))
    if alone and not is_remote(ready):
        lines.append(f"Without a copy: floe-chat --model {ready.place}")
    return lines


def _agreed(*, alone: bool) -> bool:
    """Whether to take it; False: pack the model here instead.

    Raises:
        UsageError: nobody can be asked. click.Abort: neither.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "The setup needs a confirmation", "Standard input is not a terminal.", "Add --yes to start without one."
        )
    if alone:
        if not click.confirm("Take it?", default=True, err=True):
            raise click.Abort
        return True
    choice = click.Choice(["y", "n", "p"], case_sensitive=False)
    answer = click.prompt(
        "Take it? (y: yes, n: no, p: pack it here instead)", default="y", type=choice, show_choices=False, err=True
    )
    if answer == "n":
        raise click.Abort
    return answer == "y"
