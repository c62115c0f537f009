"""The link of a virtual card: bytes arrive at once, and the queue's time is counted by a virtual clock."""

from __future__ import annotations

from ..cards import CHUNK_BYTES, PREFIX, Card
from ..links.link import Link
from .virtual_clock import Clock


def open_link(card: Card, clock: Clock, nbytes: int, *, content: bool = True) -> Link:
    """The link of a card for rows of `nbytes`.

    Args:
        content: whether bytes are moved at all; only times count if not.

    Raises:
        NativeUnavailableError: there is no compiled library.
    """
    chunk = max(1, CHUNK_BYTES // nbytes)
    return Link(
        *("virtual", PREFIX + card.name, nbytes),
        chunk=chunk,
        rate=min(card.link_bytes_s, card.pack_bytes_s),
        latency=card.link_latency_s,
        clock=clock.record,
        content=content,
    )
