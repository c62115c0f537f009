"""How a program becomes one of several processes: the first leads, the others serve it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

from ...models.catalog import reference
from ...models.errors import UsageError
from ..events import Load, SpreadBy
from .group import Group
from .messages import Open
from .spread import Spread
from .world import World


@cache
def group() -> Group | None:
    """The processes that this one was started with; None if it is alone. Joins them once.

    Raises:
        FloeError: the others do not come.
    """
    world = World.of()
    return None if world is None else Group(world)


def lead(command: Load, report: Callable[[str, float], None]) -> Spread | None:
    """In process 0: have the others open a model too; None if there are no others.

    Raises:
        UsageError: a pattern without other processes. FloeError: the others do not come, or have gone.
    """
    if World.of() is None:
        if command.spread != SpreadBy():
            raise UsageError(
                "There are no other processes",
                "--parallel and --balance say how several processes divide the experts; this one is alone.",
                "Start several: torchrun --nproc-per-node 2 -m floe_chat.app ask ...",
            )
        return None
    report("Waiting for the other processes", 0.0)
    joined = group()
    assert joined is not None
    name = reference(Path(command.pack))
    joined.tell(Open(name, command.preset, command.device, command.vram, command.advanced, command.spread))
    return Spread(joined, command.spread)
