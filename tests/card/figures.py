"""Speeds of single parts: the program's own benches, and every operation beside the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from floe_chat.engine.bench import transfer
from floe_chat.engine.bench.kernels import gpu
from floe_chat.engine.bench.kernels.gpu_expert import Stopwatch, Watch, make_expert
from floe_chat.engine.bench.measure import ResultTable
from floe_chat.engine.machine.random_weights import MIXTRAL, Shapes, make_linear
from floe_chat.engine.planning.rates import UNREACHED
from floe_chat.kernels import operations
from floe_chat.kernels.types import Active, Calls
from torch import Tensor

from .stages import Context

_TINY = Shapes(128, 64, group=32, experts=2, cache=1 << 16)


class _Plain:
    """A stopwatch where nothing runs beside the host."""

    def seconds(self, work: Callable[[int], object], runs: int = 3, warm_up: int = 1) -> list[float]:
        """Seconds of each of the calls work(0), work(1), ..."""
        times: list[float] = []
        for run in range(min(runs, 3)):
            began = time.perf_counter()
            work(run)
            times.append(time.perf_counter() - began)
        return times * (runs // len(times)) + times[: runs % len(times)]


def experts(context: Context) -> None:
    """FloE table 1."""
    if context.real:
        _add(context, gpu.run(quick=False))
    else:
        _add(context, gpu.run(quick=True, shapes=_TINY, device="cpu", watch=_Plain()))


def link(context: Context) -> None:
    """FloE figure 7."""
    if context.real:
        _add(context, transfer.run(gpu="cuda"))
    else:
        _add(context, transfer.run(gpu=None, no_gpu="virtual", shapes=_TINY, quick=True, runs=1, threads=1))


def _add(context: Context, table: ResultTable) -> None:
    for section in table.sections:
        for row in section.rows:
            context.row(
                part=section.title, what=row.name, ms=row.ms, spread=row.spread, GB_s=row.gb_s,
                of_floor=row.of_floor, speedup=row.speedup,
            )  # fmt: skip
    context.notes += table.notes
    shares = {row.name: row.of_floor for section in table.sections for row in section.rows if row.of_floor is not None}
    if shares:
        best = max(shares, key=shares.__getitem__)
        context.showed = f"{len(context.rows)} figures; nearest to its floor, with {shares[best]:.0%}: {best}"


def bandwidth(context: Context) -> None:
    """Every operation of a token at Mixtral's width as a graph: its bytes of weights a second, and the share
    of what a copy within the device reads and writes.
    """
    device, watch = ("cuda", Stopwatch()) if context.real else ("cpu", _Plain())
    shapes = MIXTRAL if context.real else _TINY
    copied = _copied(1 << 30 if context.real else 1 << 16, device, watch)
    context.row(what="copy (floor)", widths="", us=None, GB_s=copied / 1e9, of_copy=1.0)
    for up, rows in ((3, 4), (2, 4), (16, 16)) if context.real else ((3, 4),):
        for name, work, nbytes in _operations(shapes, up, rows, device):
            seconds = median(watch.seconds(_in_turn(work, shapes.experts, graphs=context.real), 100, 20))
            rate = nbytes / seconds
            context.row(what=name, widths=f"{up}/{rows} bit", us=seconds * 1e6, GB_s=rate / 1e9, of_copy=rate / copied)
    _linears(context, shapes, device, watch, copied)
    shares = {f"{row['what']}, {row['widths']}": float(row["of copy"] or 0) for row in context.rows[1:]}
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    context.showed = (
        f"A copy moves {copied / 1e9:.0f} GB/s; operations reach {shares[least]:.0%} ({least}) to {shares[most]:.0%} "
        f"({most}) of it"
    )


def _copied(size: int, device: str, watch: Watch) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(watch.seconds(lambda _run: target.copy_(source), 50, 3))


def _operations(shapes: Shapes, up: int, rows: int, device: str) -> list[tuple[str, Callable[[int], object], float]]:
    """Name, work(expert) and bytes of weights: the signal projection, the rows at half of the neurons, gathering."""
    made = make_expert(shapes, up, rows, torch.float16, device)
    fast: Any = operations.choose(device)
    limits = made.limits[0.5]
    x = made.x.float()
    calls = [_call(expert, device) for expert in range(shapes.experts)]
    active: list[Active] = [operations.signal_gemv(x, made.up, calls[e], limits[e]) for e in range(shapes.experts)]
    listed = [_moved(each, device) for each in active]
    some = made.active[0.5]
    out = torch.empty(int(some), made.rows.layout.nbytes, dtype=torch.uint8, device=device)
    neurons = [each.neurons[: len(out)].contiguous() for each in listed]
    nothing = torch.full((1,), UNREACHED, device=device)

    def signal(expert: int) -> object:
        return fast.moe_step(x, made.up, made.rows, calls[expert], nothing)

    def step(expert: int) -> object:
        return fast.moe_step(x, made.up, made.rows, calls[expert], limits[expert])

    def gather(expert: int) -> object:
        return fast.gather_rows(made.rows, expert, neurons[expert], out)

    row = made.rows.layout.nbytes
    return [
        ("whole step, half of the neurons", step, made.up.bytes_per_expert() + some * row),
        ("signal projection", signal, float(made.up.bytes_per_expert())),
        ("gathering half of the rows (read and written)", gather, 2.0 * len(out) * row),
    ]


def _linears(context: Context, shapes: Shapes, device: str, watch: Watch, copied: float) -> None:
    fast: Any = operations.choose(device)
    for bits in (4, 8):
        made = [make_linear(shapes, bits) for _ in range(shapes.experts)]
        made = [replace(w, q=w.q.to(device), scale=w.scale.to(device), zero=w.zero.to(device)) for w in made]
        x = torch.randn(1, shapes.hidden, device=device)

        def work(turn: int, made: list[Any] = made, x: Tensor = x) -> object:
            return fast.linear(x, made[turn])

        seconds = median(watch.seconds(_in_turn(work, shapes.experts, graphs=context.real), 100, 20))
        rate = shapes.hidden * shapes.vector(bits).nbytes / seconds
        context.row(
            what="linear, H to H, 1 token",
            widths=f"{bits} bit",
            us=seconds * 1e6,
            GB_s=rate / 1e9,
            of_copy=rate / copied,
        )


def _call(expert: int, device: str) -> Calls:
    index = torch.tensor([0, expert], device=device)
    return Calls(index[:1], index[1:], torch.ones(1, device=device))


def _moved(active: Active, device: str) -> Active:
    return Active(active.offsets, active.neurons.to(device), active.values.to(device))


def _in_turn(work: Callable[[int], object], count: int, *, graphs: bool) -> Callable[[int], object]:
    """`work` of every expert in turn, each as a CUDA graph if `graphs`."""
    if not graphs:
        return lambda run: work(run % count)
    made: list[torch.cuda.CUDAGraph] = []
    work(0)  # compiles first, which is impossible during a capture
    torch.cuda.synchronize()
    for expert in range(count):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(expert)
        made.append(graph)
    return lambda run: made[run % count].replay()
