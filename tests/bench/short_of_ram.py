"""A pack of twice the memory: tokens per second from the system's page cache, and from the engine's own tier.

Makes a pack of Mixtral-8x7B's width and depth with random weights (25 GB, of 4 layers in turn, each in a file of its
own), then answers in a process of its own under a memory limit of that share of the pack, everything included (a memory
cgroup: Linux, root). A first answer fills
the memory and does not count. Of each answer: tokens per second, bytes read from the disk for each token, page faults
that waited for the disk, and what `plan` says for such a machine.

Run: .venv/bin/python -P tests/bench/short_of_ram.py FOLDER [--layers 32] [--share 0.5] [--tokens 24] [--ways tier]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

TESTS = Path(__file__).resolve().parent.parent
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


def main() -> None:
    """Make the pack, and answer in each way."""
    given = _arguments()
    if given.child:
        print(json.dumps(answer(given)))
        return
    pack = _pack(given.folder, given.layers)
    nbytes = sum(path.stat().st_size for path in pack.iterdir())
    limit = int(given.share * nbytes)
    print(f"{given.layers} layers, {nbytes / 1e9:.1f} GB, limit {limit / 1e9:.2f} GB", file=sys.stderr)
    for way in given.ways:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
        command = [sys.executable, "-P", __file__, *sys.argv[1:], "--child", way]
        with _limited(limit) as join:
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=join)
        print(ran.stdout.strip())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--share", type=float, default=0.5, help="of the pack's bytes that memory has; default 0.5")
    parser.add_argument("--preset", help="default: the pack's")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ways", nargs="+", default=["cache", "tier"], choices=["cache", "tier"])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


@contextmanager
def _limited(nbytes: int) -> Generator[Any]:
    """A function that puts the calling process under a memory limit, without swap."""
    first = _V1 if (_V1 / "memory.limit_in_bytes").exists() else _V2
    group = first / f"floe-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if first == _V1 else "memory.max")).write_text(str(nbytes), encoding="ascii")
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
    finally:
        group.rmdir()


def _pack(folder: Path, layers: int) -> Path:
    tests = types.ModuleType("tests")
    tests.__path__ = [str(TESTS)]
    sys.modules["tests"] = tests
    wide: Any = importlib.import_module("tests.card.wide_pack")
    base, whole = wide.made_in(folder / "base", "mixtral-8x7b", 4), folder / f"layers-{layers}"
    if not (whole / "manifest.json").exists():
        shutil.rmtree(whole, ignore_errors=True)
        deepen: Any = importlib.import_module("tests.bench.wide").deepen
        deepen(base, whole, layers, copies=True)
    return whole


def answer(given: argparse.Namespace) -> dict[str, Any]:
    """Load the pack, answer twice, and measure the second answer."""
    import torch
    from floe_chat.engine.events import Sampling
    from floe_chat.engine.generate import KVCache, generate
    from floe_chat.engine.loader import load
    from floe_chat.engine.planning import disk_tier

    began = time.perf_counter()
    pack = _pack(given.folder, given.layers)
    with patch.object(disk_tier, "wanted", return_value="") if given.child == "cache" else nullcontext():
        loaded, told = load(pack, given.preset, "cpu", lambda _step, _share: None)
    opened = time.perf_counter() - began
    times: list[float] = []
    first, disk, faults = 0.0, 0, 0
    for turn in range(2):
        prompt = torch.randint(3, 500, (16,), generator=torch.Generator().manual_seed(turn)).tolist()
        kv, drawn, asked = KVCache(), list[float](), time.perf_counter()
        for step in generate(
            loaded.decoder, kv, prompt, Sampling(temperature=0), max_new_tokens=given.tokens, stop_ids=(),
            window=loaded.window, control=loaded.control, telemetry=loaded.telemetry,
        ):  # fmt: skip
            if step.token is not None:
                if not drawn:
                    disk, faults = _read_bytes(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
                drawn.append(time.perf_counter())
        first, times = drawn[0] - asked, [b - a for a, b in pairwise(drawn)]
        disk, faults = _read_bytes() - disk, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults
    found = {
        "way": given.child,
        "tokens_s": len(times) / sum(times),
        "median_ms": 1e3 * median(times),
        "first_token_s": first,
        "MB_a_token_from_disk": disk / len(times) / 1e6,
        "faults_a_token": faults / len(times),
        "load_s": opened,
        "pool_GB": 0 if loaded.offload is None else loaded.offload.memory.nbytes / 1e9,
        "most_RSS_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
        "told": told.reason,
    }
    loaded.close()
    return found


def _read_bytes() -> int:
    """Bytes that this process has had read from disks."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


if __name__ == "__main__":
    main()
