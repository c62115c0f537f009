"""The time of ETP's and S-ETP's exchanges between real processes on this machine (DualSparse-MoE figure 9).

They talk over its loopback (gloo); experts return what they are given, so that all else than the exchange takes next to
no time. Bandwidth is the size of a process's input over the time of a layer, as in section 5.2.2. More processes than
cores wait for each other's turn: then only the order of the two means something. Started as a module, this is one of
the processes; number 0 prints a JSON line.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.rule import NOTHING
from ...kernels.types import Limits, Work
from ...models.errors import FloeError
from ..parallel.group import Group
from ..parallel.holding import Grid, Holding
from ..parallel.routes import Routes
from ..parallel.world import World

HIDDEN, EXPERTS, TOP_K = 4096, 8, 2  # Mixtral's
REPEATS = 15
_PATIENCE_S = 120


class Echo:
    """Experts that return what they are given."""

    limits = Limits(torch.zeros(EXPERTS))

    def own(self, hidden: Tensor, index: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
        """See `Routes`."""
        return hidden, []

    def all_work(self, index: Tensor, weights: Tensor) -> Work:
        """See `Routes`."""
        return kernels.select(index, weights, self.limits, NOTHING)


def _timed(group: Group, routes: Routes, tokens: int) -> float:
    """Seconds of a layer's exchanges, the median."""
    drawn = torch.Generator().manual_seed(group.rank)
    hidden = torch.randn(tokens, HIDDEN, generator=drawn)
    index = torch.rand(tokens, EXPERTS, generator=drawn).topk(TOP_K).indices
    weights = torch.full((tokens, TOP_K), 1 / TOP_K)
    found: list[float] = []
    for _ in range(REPEATS):
        group.sum(torch.zeros(1))  # all begin together
        began = time.perf_counter()
        routes.routed(Echo(), hidden, index, weights, tokens * group.size, stop=False)
        group.sum(torch.zeros(1))
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _measure(groups: int, slices: int, sizes: Sequence[int]) -> None:
    """In each process."""
    world = World.of()
    assert world is not None
    group = Group(world)
    found: dict[str, list[float]] = {}
    for name in ("etp", "s-etp"):
        routes = Routes(group, Holding(Grid(name, groups, slices), world.rank, EXPERTS))
        found[name] = [tokens * HIDDEN * 4 / _timed(group, routes, tokens) for tokens in sizes]
    if world.rank == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    group.sum(torch.zeros(1))
    sys.stdout.flush()
    os._exit(0)


def bandwidths(groups: int, slices: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Bytes per second of a process's input, by pattern, for so many tokens of each process.

    Raises:
        FloeError: the processes do not find each other.
    """
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = os.environ | {"WORLD_SIZE": str(groups * slices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", __name__, str(groups), str(slices), *map(str, sizes)]
    begun = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        for rank in range(groups * slices)
    ]
    try:
        told = [process.communicate(timeout=_PATIENCE_S)[0] for process in begun]
        return json.loads(told[0].splitlines()[-1])
    except (subprocess.TimeoutExpired, IndexError, ValueError) as error:
        raise FloeError("The processes did not exchange anything", f"{error}.", "") from error
    finally:
        for process in begun:
            process.kill()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _measure(int(sys.argv[1]), int(sys.argv[2]), [int(size) for size in sys.argv[3:]])
