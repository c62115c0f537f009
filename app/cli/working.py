"""What a process but the first does, when torchrun has started several: it serves process 0, without a screen."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from ...engine.parallel.world import World
from ...models import catalog
from ..text.plain_text import printable


def work(world: World) -> int:
    """Serve process 0 until that ends; returns the exit code.

    Raises:
        FloeError: the processes do not find each other, or one of them ends too early.
    """
    from ...engine.torch_import import import_torch

    import_torch()
    from ...engine.loader import LoadedModel, load_together
    from ...engine.parallel.leading import group
    from ...engine.parallel.members import GroupLost
    from ...engine.parallel.messages import Open
    from ...engine.parallel.spread import Spread
    from ...engine.parallel.worker import Worker

    joined = group()
    assert joined is not None

    def load(asked: Open) -> LoadedModel:
        def find() -> Path:
            return catalog.find(asked.model, saved=True)

        return load_together(find, asked, lambda _step, _share: None, Spread(joined, asked.spread))[0]

    def stuck(lost: GroupLost) -> None:
        _say(str(lost))
        os._exit(1)

    threading.Thread(target=joined.members.watch, args=(stuck,), name="floe-watch", daemon=True).start()
    _say(f"process {world.rank} of {world.size} serves process 0 on {joined.members.all[0].host}")
    Worker(joined, load, _say).run()
    return 0


def _say(text: str) -> None:
    sys.stderr.write(printable(f"floe-chat: {text}\n"))
    sys.stderr.flush()
