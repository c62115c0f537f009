"""FloE's Table 1 on this GPU: one expert at 0 and 50 to 90 % sparsity, compared with its memory's speed.

80 warm-up and 200 timed runs each, CUDA events, medians (the paper does not say what it reports). Experts are used in
turn and the L2 cache is overwritten before each run. "graph" replays a CUDA graph and so leaves out the cost of
launching from Python; "eager" does not. Floor: a large copy within the device, measured in the same session. Nothing is
timed before its result has been compared with the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels import reference
from ....kernels.weights import ExpertRows
from ....models.errors import FloeError
from ...decoder import graphs
from ...machine import gpus
from ...machine.random_weights import MIXTRAL, Shapes
from ...planning.rates import UNREACHED
from ..measure import MeasureReport, ResultTable, Section, Timed, summarise
from .gpu_expert import FLUSH, RUNS, SPARSITIES, WARM_UP, Expert, Stopwatch, Watch, make_expert, one_call

SLOW_RUNS = 10
_COPY = 1 << 30  # long enough that launching it does not matter
_DENSE = "dense 16 bit"
_TOLERANCE = 1e-4  # relative RMS to the reference in float32
# Milliseconds by sparsity, from the paper; 16-bit weights throughout.
PAPER = {
    "H100": (0.169, 0.134, 0.123, 0.114, 0.106, 0.103),
    "A100": (0.253, 0.195, 0.188, 0.176, 0.166, 0.155),
    "A6000": (0.524, 0.365, 0.337, 0.305, 0.277, 0.263),
    "RTX 3090": (0.542, 0.379, 0.354, 0.316, 0.302, 0.283),
}


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all sections share. `graphs`: whether steps can be captured; the reference asks the host in between."""

    shapes: Shapes
    device: str
    watch: Watch
    graphs: bool
    report: MeasureReport
    copy: Timed

    def timed(
        self, name: str, work: Callable[[int], object], nbytes: float, *, peer: bool = True, runs: int = RUNS
    ) -> Timed:
        """One row's figures; work is called with 0..experts-1 in turn."""
        self.report(name, 0, 1)
        warm_up = WARM_UP if runs == RUNS else 2
        seconds = self.watch.seconds(lambda run: work(run % self.shapes.experts), runs, warm_up)
        return Timed(name, seconds, [nbytes] * len(seconds), self.copy.name, _DENSE if peer else None)

    def replayed(self, work: Callable[[int], Any]) -> Callable[[int], object]:
        """`work` of every expert as a CUDA graph."""
        place = torch.device(self.device)
        made = [graphs.capture(lambda at=at: (work(at),), place) for at in range(self.shapes.experts)]
        return lambda expert: made[expert].replay()


def run(
    *,
    quick: bool = False,
    shapes: Shapes | None = None,
    dtype: torch.dtype = torch.float16,
    device: str = "cuda",
    watch: Watch | None = None,
    report: MeasureReport = lambda _what, _done, _total: None,
) -> ResultTable:
    """Measure; `quick` leaves out 16-bit weights. Without `watch`, `device` has to be a CUDA device.

    Raises:
        FloeError: too little device memory, or kernels whose results differ from the reference's.
    """
    shapes = shapes or MIXTRAL
    backend = kernels.choose(device)
    widths = ((2, 4),) if quick else ((16, 16), (2, 4))
    if device == "cuda":
        _check_memory(shapes, widths)
    watch = watch or Stopwatch()
    report("copy within the device", 0, 1)
    bench = _Bench(shapes, device, watch, backend.name == "triton", report, _copy(device, watch))
    known = [bench.copy, _dense(bench, dtype)]
    sections = [Section("What a copy and the library reach", summarise(known))]
    for up, rows in widths:
        expert = make_expert(shapes, up, rows, dtype, device)
        _check_result(expert, up, rows)
        measured = summarise([*known, *_steps(bench, expert)])
        sections.append(Section(f"1 expert, 1 token, up {up} bit, rows {rows} bit", measured[len(known) :]))
        if device == "cuda" and bench.graphs and rows == 4:
            sections.append(_zero_copy(bench, expert))
        del expert
        if device == "cuda":
            torch.accelerator.empty_cache()
    facts: dict[str, str | int] = {
        "kernels": backend.name,
        "reason": backend.reason,
        "gpu": gpus.of_torch()[0][0].name if device == "cuda" else device,
        "sizes": shapes.describe(),
        "values": str(dtype).removeprefix("torch."),
        "runs": RUNS,
        "warm_up": WARM_UP,
    }
    return ResultTable("kernels", "cuda", facts, tuple(sections), _paper())


def _check_memory(shapes: Shapes, widths: tuple[tuple[int, int], ...]) -> None:
    matrix = shapes.hidden * shapes.neurons
    weights = max(shapes.experts * (shapes.up_bytes(up) + shapes.rows_bytes(rows)) for up, rows in widths)
    dense = 3 * 2 * matrix * shapes.experts
    wanted = FLUSH + max(2 * _COPY, dense, weights + 6 * 4 * matrix)  # the reference works in float32
    free = gpus.free("cuda")
    if free < wanted:
        raise FloeError(
            f"This benchmark needs {wanted / 1e9:.1f} GB of free GPU memory",
            f"{free / 1e9:.1f} GB are free.",
            "Close other programs that use the GPU, try --quick, which needs less, or use --device cpu.",
        )


def _copy(device: str, watch: Watch) -> Timed:
    """What a large copy within the device reads and writes."""
    size = _COPY if device == "cuda" else 1 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Timed("copy (floor)", watch.seconds(lambda _run: target.copy_(source), RUNS, 3), [2 * size] * RUNS)


def _check_result(expert: Expert, up: int, rows: int) -> None:
    """Our step against the reference at every sparsity, of the first expert."""
    x, calls = expert.x.float(), one_call(0, expert.x.device)
    for sparsity in SPARSITIES:
        limit = expert.limits[sparsity][0]
        y, _ = kernels.moe_step(x, expert.up, expert.rows, calls, limit)
        truth, _ = reference.moe_step(x, expert.up, expert.rows, calls, limit)
        error = float((y - truth).double().pow(2).mean().sqrt() / truth.double().pow(2).mean().sqrt())
        if not error <= _TOLERANCE:
            raise FloeError(
                "The GPU kernels give wrong results, so nothing was timed",
                f"With up {up} bit and rows {rows} bit at {sparsity * 100:.0f} % sparsity the result differs "
                f"from the reference's by {error:.1e}.",
                "Please report it with the output of: floe-chat doctor",
            )


def _steps(bench: _Bench, expert: Expert) -> list[Timed]:
    """Up alone, then the step at every sparsity: as a graph, from Python, and by the reference."""
    calls = [one_call(e, expert.x.device) for e in range(bench.shapes.experts)]
    nothing = torch.full((1,), UNREACHED, device=expert.x.device)
    up_bytes = expert.up.bytes_per_expert()
    found: list[Timed] = []

    def up_alone(e: int) -> object:
        return kernels.moe_step(expert.x, expert.up, expert.rows, calls[e], nothing)

    if bench.graphs:
        found.append(bench.timed("up alone, graph", bench.replayed(up_alone), up_bytes, peer=False))
    for sparsity in SPARSITIES:
        limits = expert.limits[sparsity]

        def step(e: int, limits: list[Tensor] = limits) -> object:
            return kernels.moe_step(expert.x, expert.up, expert.rows, calls[e], limits[e])

        def plain(e: int, limits: list[Tensor] = limits) -> object:
            return reference.moe_step(expert.x, expert.up, expert.rows, calls[e], limits[e])

        name = f"{sparsity * 100:.0f} % sparse"
        nbytes = up_bytes + expert.active[sparsity] * expert.rows.layout.nbytes
        if bench.graphs:
            found.append(bench.timed(f"{name}, graph", bench.replayed(step), nbytes))
        found.append(bench.timed(f"{name}, eager", step, nbytes))
        found.append(bench.timed(f"{name}, plain torch", plain, nbytes, runs=SLOW_RUNS))
    return found


def _dense(bench: _Bench, dtype: torch.dtype) -> Timed:
    """An expert as three dense 16-bit products of the library."""
    shapes, device = bench.shapes, bench.device
    x = torch.randn(1, shapes.hidden, device=device).to(dtype)
    sizes = (3, shapes.neurons, shapes.hidden)
    experts = [torch.empty(sizes, dtype=dtype, device=device).normal_(0, 0.02) for _ in range(shapes.experts)]

    def work(e: int) -> object:
        up, gate, down = experts[e]
        return (F.silu(F.linear(x, gate)) * F.linear(x, up)) @ down

    replayed = bench.replayed(work) if device == "cuda" else work
    return bench.timed(_DENSE, replayed, experts[0].nbytes, peer=False)


def _zero_copy(bench: _Bench, expert: Expert) -> Section:
    """80 % sparsity with one expert's rows in pinned host memory, read in place, beside a plain copy over the link."""
    host = ExpertRows(expert.rows.layout, expert.rows.data[:1].cpu().pin_memory())
    up = expert.up.mapped(lambda part: part[:1])
    calls, limit, target = one_call(0, expert.x.device), expert.limits[0.8][0], torch.empty_like(expert.rows.data[0])

    def step(_run: int) -> object:
        return kernels.moe_step(expert.x, up, host, calls, limit)

    bench.report("rows in pinned host memory", 0, 1)
    copied = bench.watch.seconds(lambda _run: target.copy_(host.data[0], non_blocking=True), 50, 3)
    stepped = bench.watch.seconds(step, 50, 5)
    nbytes = expert.active[0.8] * host.layout.nbytes
    link = Timed("copy over the link (floor)", copied, [target.nbytes] * len(copied))
    return Section(
        "Rows in pinned host memory, up 2 bit, rows 4 bit",
        summarise([link, Timed("80 % sparse, read in place", stepped, [nbytes] * len(stepped), link.name)]),
    )


def _paper() -> tuple[str, ...]:
    return (
        "FloE's Table 1, ms with 16-bit weights: " + ", ".join(f"{s * 100:.0f} %" for s in SPARSITIES) + " sparse",
        *(f"  {name:<9} " + "  ".join(f"{ms:.3f}" for ms in times) for name, times in PAPER.items()),
    )
