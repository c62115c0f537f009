"""Published models that floe-chat can set up, of all families."""

from __future__ import annotations

from .families import FAMILIES

_ALL = [entry for family in FAMILIES.values() for entry in family.published]
_ALL.sort(key=lambda entry: entry.released, reverse=True)
PUBLISHED = tuple(
    sorted(
        _ALL,
        key=lambda entry: (entry.chat is None, entry.sizes.parameters, bool(entry.made_for), entry.thinks),
    )
)
"""In the order in which they are listed if no machine is known (`engine.planning.plan.ranked` knows one): the smallest
that can chat first, base models last; of one size the newest that is made for everything and answers at once.
"""
