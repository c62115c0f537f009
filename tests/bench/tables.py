"""What an n-gram table on the disk costs a token: all its rows asked for at once, or mapped, and what plans count.

Writes a table of random bytes, rows as wide as Qwen3.8-Flash-Next's in a pack of 8 or 16 bits, and looks random rows
up: no row is in RAM before. Last line: one JSON object.

Run: .venv/bin/python -P tests/bench/tables.py FOLDER [--gb 12] [--columns 128] [--rows 16] [--bits 8]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from statistics import mean, median

import psutil
import torch
from floe_chat.engine.machine.disk import read_rate
from floe_chat.engine.offload.links.disk_files import READ_THROUGH
from floe_chat.engine.offload.table_rows import CACHE, TableRows
from floe_chat.engine.planning.speed_estimate import LEAST_READ
from floe_chat.models.pack.table import ROWS, Lookup, Table, vector
from floe_chat.models.pack.tensor_file import TensorFile

_BLOCK = 1 << 18  # rows written at once


def main() -> None:
    """Write, look up, remove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=12.0, help="of the table; default 12")
    parser.add_argument("--columns", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16, help="that a token looks up; default 16")
    parser.add_argument("--bits", type=int, default=8, choices=[8, 16])
    parser.add_argument("--tokens", type=int, default=1000)
    given = parser.parse_args()
    row = vector(given.columns, given.bits)
    table = Table("table", "floe-bench-table.safetensors", int(given.gb * 1e9 / row.nbytes), row, torch.bfloat16)
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.folder / table.file
    try:
        _write(table, given.folder)
        found = {"table_gb": round(table.nbytes / 1e9, 1), "row_bytes": row.nbytes, **_measured(table, given)}
        print(json.dumps(found))
    finally:
        path.unlink(missing_ok=True)


def _write(table: Table, folder: Path) -> None:
    with TensorFile(folder / table.file, table.plan) as file:
        for start in range(0, table.rows, _BLOCK):
            some = file[ROWS][start : start + _BLOCK]
            # Scales and zeros are small numbers, codes are random.
            some.copy_(torch.randint(0, 60, (1, 1), dtype=torch.uint8).expand_as(some))
            some[:, table.vector.head :].random_(0, 256)
            if start % (16 * _BLOCK) == 0:
                file.flush()


def _measured(table: Table, given: argparse.Namespace) -> dict[str, object]:
    rows, offset = table.opened(given.folder)
    path, generator = given.folder / table.file, torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, table.rows, (given.rows,), generator=generator) for _ in range(given.tokens)]
    prompt = torch.randint(0, table.rows, (512, given.rows), generator=generator)
    disk = read_rate(given.folder)
    ways: dict[str, object] = {
        "disk_gb_s": round(disk / 1e9, 2),
        "planned_ms": round(1e3 * (LEAST_READ + given.rows * READ_THROUGH / disk), 2),
    }
    cached = TableRows(rows, path, offset, CACHE)
    for name, read in (("at once", cached), ("mapped", rows.__getitem__)):
        _forget(path)
        lookup, before = Lookup(table, read, torch.float32), psutil.Process().memory_info()
        lookup(tokens[0])
        times, cpu = list[float](), time.process_time()
        for ids in tokens[1:]:
            begun = time.perf_counter()
            lookup(ids)
            times.append(1e3 * (time.perf_counter() - begun))
        cpu = time.process_time() - cpu
        begun = time.perf_counter()
        for ids in tokens[1:200]:
            lookup(ids)
        again = (time.perf_counter() - begun) / 199
        begun = time.perf_counter()
        lookup(prompt)
        whole = time.perf_counter() - begun
        after = psutil.Process().memory_info()
        ways[name] = {
            "ms_a_token": {"mean": round(mean(times), 3), "median": round(median(times), 3), "p99": _high(times)},
            "again_ms": round(1e3 * again, 3),
            "cpu_ms_a_token": round(1e3 * cpu / len(times), 3),
            "prompt_ms_a_token": round(1e3 * whole / len(prompt), 3),
            "ram_mb": round((after.rss - before.rss) / 1e6, 1),
        }
    ways["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    return ways


def _high(times: list[float]) -> float:
    return round(sorted(times)[int(0.99 * len(times))], 2)


def _forget(path: Path) -> None:
    """Take a file out of the system's cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
