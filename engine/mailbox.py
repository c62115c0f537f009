"""A queue between threads that wakes its reader."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Takes items from any thread. Its reader need not poll: `heard` is called after each item, on the thread that put
    it there.
    """

    def __init__(self) -> None:
        self.heard: Callable[[], None] = _ignore
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Add an item at the end; never waits."""
        self._items.put(item)
        self.heard()

    def take(self, timeout: float | None = 0.0) -> list[Item]:
        """All items since the last call, in order; waits at most `timeout` seconds for the first, or (None) until it
        comes.
        """
        items: list[Item] = []
        try:
            if timeout is None or timeout > 0:
                items.append(self._items.get(timeout=timeout))
            while True:
                items.append(self._items.get_nowait())
        except queue.Empty:
            return items


def _ignore() -> None:
    pass
