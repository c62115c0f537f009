"""`floe-chat setup` with a copy of the model that another program has downloaded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ...progress import note
from ...setup import elsewhere
from ...setup.wish import Wish
from ...text import units
from ...text.plain_text import printable

if TYPE_CHECKING:
    from ....models.catalog_entry import CatalogEntry


def found(wanted: Wish, entry: CatalogEntry, look: bool | None, *, ask: bool) -> elsewhere.Copy | None:
    """A copy of `entry` that the user wants to be packed instead of a download.

    look: whether its folders may be looked through; None: the user is asked, if there are such folders.
    """
    asking = ask and sys.stdin.isatty()
    if wanted.local is not None or entry.only_pack or look is False or (look is None and not asking):
        return None
    if not (said := elsewhere.programs()):
        if look:
            note("LM Studio, Ollama and llama.cpp have no folders here.")
        return None
    if look is None and not click.confirm(f"Look for a copy of {entry.name} in the folders of {said}?", True, err=True):
        return None
    copies = elsewhere.copies(entry)
    if not copies:
        note(f"There is no copy of {entry.name} in the folders of {said}.")
        return None
    for copy in copies:
        note(f"{printable(copy.called)} of {copy.program}: {describe(copy)}, {printable(str(copy.entry.folder))}")
    first = copies[0]
    question = f"Pack {printable(first.called)} instead of downloading {units.size(entry.download_bytes)}?"
    if asking and not click.confirm(question, default=not first.entry.coarse, err=True):
        return None
    return first


def describe(copy: elsewhere.Copy) -> str:
    """Its size, and what its weights were rounded to."""
    return f"{units.size(copy.bytes)}, {copy.entry.rounding or '16 bits'}"
