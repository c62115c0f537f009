"""Adding many conversations at once, with others at work on the same history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from .database.store import HistoryStore
from .database.trouble import SQLITE_ERRORS
from .records import Tree, new_id

_TURN_SECONDS = 0.5  # a lock that others hardly notice
_PAUSE_SECONDS = 0.15  # who waits for a lock looks every tenth of a second


def add_all(store: HistoryStore, trees: Sequence[Tree]) -> list[int]:
    """Add copies of all `trees`, or none, and return their ids; others have their turns meanwhile.

    They are hidden until all are there. What a killed process leaves of them is wiped as deleted conversations are.

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
