"""Adding many conversations at once, while other processes use the same history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from .database.store import HistoryStore
from .database.trouble import SQLITE_ERRORS
from .records import Tree, new_id

_TURN_SECONDS = 0.5  # how long a lock is held: others hardly notice
_PAUSE_SECONDS = 0.15  # a process that waits for a lock looks every tenth of a second


def add_all(store: HistoryStore, trees: Sequence[Tree]) -> list[int]:
    """Add copies of all `trees`, or none, and return their ids; other writers get their turns meanwhile.

    They are hidden until all are there. A killed process's remains are wiped like deleted conversations.

    Raises:
        One of `trouble.SQLITE_ERRORS`: the file cannot be written.
    """
    ids = [new_id() for _ in trees]
    waiting = list(zip(ids, trees, strict=True))[::-1]
    try:
        while waiting:
            began = time.monotonic()
            with store.transaction():
                while waiting and time.monotonic() - began < _TURN_SECONDS:
                    store.add_hidden(*waiting.pop())
            if waiting:
                time.sleep(_PAUSE_SECONDS)
        with store.transaction():
            for identity in ids:
                store.reveal(identity)
    except BaseException:
        with suppress(*SQLITE_ERRORS), store.transaction():
            for identity in ids:
                store.wipe(identity)
        raise
    return ids
