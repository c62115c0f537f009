"""Published models that floe-chat can set up, of all families."""

from __future__ import annotations

from .families import FAMILIES

PUBLISHED = tuple(
    sorted(
        (entry for family in FAMILIES.values() for entry in family.published),
        key=lambda entry: (entry.chat is None, entry.sizes.parameters),
    )
)
"""In the order in which they are listed if no machine is known (`engine.plan.in_order` knows one): the smallest that
can chat first, base models last."""
