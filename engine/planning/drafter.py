"""Another pack of the same tokenizer that guesses tokens for a model: whether it can, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...models import catalog
from ...models.catalog_entry import CatalogEntry
from ...models.errors import UsageError
from ...models.quantities import digits, share
from ...models.quantities import memory as size
from ...models.tokenizer import spellings
from ..machine import hardware
from . import disk_tier, memory_plan
from .footprint import Footprint
from .machine import Machine
from .plan import Plan, make, widths
from .reasons import describe

_INSTEAD = "Name a smaller model of the same family with --draft (advanced.drafter), or leave it out."
_SLOWER = 0.98  # of what a model does alone


@dataclass(frozen=True, slots=True)
class Drafter:
    """name: for people. ram: bytes that it takes there, keys and values of `context` tokens among them. cost: of one of
    its tokens, in those of the model that it guesses for: what they read.
    """

    name: str
    ram: int
    cost: float

    @classmethod
    def of(cls, entry: CatalogEntry, model: CatalogEntry, context: int, ram: int) -> Drafter:
        """A model that is packed, or would be with the usual bits, for another one on a machine with so much RAM.

        Raises:
            UsageError: it has another vocabulary, or is the same one.
        """
        if (entry.folder, entry.name) == (model.folder, model.name):
            raise UsageError(f"{entry.name} cannot guess its own tokens", "A guess would take as long.", _INSTEAD)
        own, its = model.sizes, entry.sizes
        if own.vocab != its.vocab:
            cause = f"Its vocabulary has {its.vocab:,} tokens, that of {model.name} {own.vocab:,}."
            raise UsageError(f"{entry.name} cannot guess tokens for {model.name}", cause, _INSTEAD)
        takes = Footprint.of(entry.headless.sizes, widths(entry))
        needed = memory_plan.beside(ram, takes, min(context, its.window))
        return cls(entry.name, needed, its.active / max(1, own.active))


def of_packs(name: str, model: Path, context: int) -> tuple[Path, Drafter]:
    """The pack called `name` for the one in folder `model`; its folder first.

    Raises:
        UsageError: there is no such pack, or it cannot guess for this one. PackError: it is not finished, or damaged.
    """
    folder = catalog.find(name)
    entry, own = catalog.described(folder), catalog.described(model)
    found = Drafter.of(entry, own, context, hardware.ram()[0])
    if not spellings.alike(folder, model):
        cause = "They have different tokenizers: the same token stands for another text."
        raise UsageError(f"{entry.name} cannot guess tokens for {own.name}", cause, _INSTEAD)
    return folder, found


def with_drafter(machine: Machine, model: CatalogEntry, entry: CatalogEntry, **wanted: Any) -> Plan:
    """A plan of a model in the RAM that its drafter leaves. wanted: see `plan.make`.

    Raises:
        UsageError: it has another vocabulary. PackError: see `plan.make`.
    """
    drafter = Drafter.of(entry, model, wanted["context"], machine.ram)
    alone = make(machine, model.headless, **wanted)
    left = [replace(one, ram=max(0, one.ram - drafter.ram)) for one in machine.each]
    found = make(replace(left[0], others=tuple(left[1:])), model.headless, **wanted)
    why = [*found.why, f"{entry.name}, which guesses tokens, takes {size(drafter.ram)} of RAM."]
    if found.chosen is None:
        lacks = [f"Without it {model.name} fits."] if alone.chosen is not None else []
        return replace(found, machine=machine, why=(*why, *lacks))
    if (before := alone.chosen) is not None and before.spec != found.chosen.spec:
        why.append(f"Without it there is room for {describe(before.spec)} bits.")
    elif before is not None and found.chosen.decode.mid < _SLOWER * before.decode.mid:
        why.append(f"Without it there is room for {digits(before.decode.mid, 2)} tokens/s, before guesses count.")
    why.append(f"A token of it reads {share(drafter.cost)} of the weights that one of {model.name} reads.")
    chosen = replace(found.chosen, ram={"drafter": drafter.ram, **found.chosen.ram})
    return replace(found, machine=machine, chosen=chosen, why=tuple(why))


def need_room(drafter: Drafter, model: Footprint, in_ram: float, *, whole: bool) -> None:
    """Check that RAM has room for it now, next to a model that was just opened.

    Args:
        in_ram: share of the model's layers that have experts there. whole: whether the CPU computes all of it.

    Raises:
        UsageError: it has not.
    """
    own = round(in_ram * (model.ups + model.rows)) + (2 * model.dense if whole else 0)
    if (left := max(0, disk_tier.room() - own)) < drafter.ram:
        cause = f"{drafter.name} takes {size(drafter.ram)} of RAM, and next to the model {size(left)} are left."
        raise UsageError(f"RAM has no room for {drafter.name}", cause, _INSTEAD)
