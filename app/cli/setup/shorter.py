"""`floe-chat setup` with a model's GGUF files, which are shorter to download than its original weights."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ...progress import note
from ...setup.wish import Wish
from ...text import units
from ...text.plain_text import printable

if TYPE_CHECKING:
    from ....models.catalog_entry import CatalogEntry


def shorter(wanted: Wish, entry: CatalogEntry, *, ask: bool) -> CatalogEntry | None:
    """The GGUF copy of a listed model, if there is one and the person wants it instead of the original weights."""
    from ....engine.planning.reasons import costs, from_gguf, prefers

    if not ask or not sys.stdin.isatty() or wanted.local is not None or entry.ready:
        return None
    if (copy := from_gguf(entry)) is None:
        return None
    sizes = units.size(copy.download_bytes), units.size(entry.download_bytes)
    question = f"Download it as {copy.rounding} from {entry.gguf}, about {sizes[0]} instead of {sizes[1]}?"
    note(costs(copy.rounding))
    return copy if click.confirm(question, default=prefers(entry, copy), err=True) else None


def described(entry: CatalogEntry, *, named: bool) -> list[str]:
    """Which of a repository's GGUF files is taken, and what the others are, in lines; `named`: as the person asked."""
    if not entry.others or not entry.repo:
        return []
    label = entry.repo.rpartition(":")[2]
    why = "" if named else ", the first of those that lose little for their size"
    others = ", ".join(f"{name} ({units.size(nbytes)})" for name, nbytes in entry.others)
    return [f"Of its GGUF files it takes {printable(label)}{why}; there are also {printable(others)}."]
