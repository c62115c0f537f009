"""The time of ETP's and S-ETP's exchanges, as DualSparse-MoE's figure 9 compares them.

Real processes on this machine talk over its loopback (gloo); experts return what they are given, so that all else than
the exchange takes next to no time. Bandwidth is the size of a process's input over the time of a layer, as in section
5.2.2. More processes than cores wait for each other's turn: then only the order of the two means something.

    .venv/bin/python tests/bench/exchange.py --grids 2x2 2x4 4x2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
from floe_chat.engine.parallel.group import Group
from floe_chat.engine.parallel.holding import Grid, Holding
from floe_chat.engine.parallel.place import Place
from floe_chat.engine.parallel.routes import Routes
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.rule import NOTHING
from floe_chat.kernels.types import Limits, Work
from torch import Tensor

HIDDEN, EXPERTS, TOP_K = 4096, 8, 2  # Mixtral's
TOKENS = (1, 8, 64, 256)  # of each process
REPEATS = 15


class Echo:
    """Experts that return what they are given."""

    limits = Limits(torch.zeros(EXPERTS))

    def own(self, hidden: Tensor, index: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
        return hidden, []

    def all_work(self, index: Tensor, weights: Tensor) -> Work:
        return kernels.select(index, weights, self.limits, NOTHING)


def timed(group: Group, routes: Routes, tokens: int) -> float:
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


def measure(groups: int, slices: int) -> None:
    """In each process; number 0 prints."""
    place = Place.of()
    assert place is not None
    group = Group(place)
    routes = {
        name: Routes(group, Holding(Grid(name, groups, slices), place.rank, EXPERTS)) for name in ("etp", "s-etp")
    }
    for tokens in TOKENS:
        sent: dict[str, float] = {}
        for name, its in routes.items():
            group.traffic.clear()
            sent[name] = tokens * HIDDEN * 4 / timed(group, its, tokens)
        if place.rank == 0:
            gain = sent["s-etp"] / sent["etp"] - 1
            print(
                f"E{groups}T{slices}{tokens:>6} tokens{tokens * HIDDEN * 4 / 1e6:>8.2f} MB"
                f"{sent['etp'] / 1e6:>10.1f} MB/s ETP{sent['s-etp'] / 1e6:>10.1f} MB/s S-ETP{gain:>+8.1%}",
                flush=True,
            )
            print(json.dumps({"groups": groups, "slices": slices, "tokens": tokens, **sent}), flush=True)
    group.sum(torch.zeros(1))
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--grids", nargs="+", default=["2x2"], metavar="GROUPSxSLICES")
    options.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = options.parse_args()
    for grid in given.grids:
        groups, slices = map(int, grid.split("x"))
        if given.inside:
            torch.set_num_threads(1)
            measure(groups, slices)
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = str(found.getsockname()[1])
        shared = {"WORLD_SIZE": str(groups * slices), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, __file__, "--grids", grid, "--inside"]
        begun = [
            subprocess.Popen(command, env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"})
            for rank in range(groups * slices)
        ]
        for process in begun:
            process.wait()


if __name__ == "__main__":
    main()
