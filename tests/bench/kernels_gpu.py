"""FloE's Table 1 on this GPU: one Mixtral expert at 0 and 50 to 90 % sparsity, beside what its memory can deliver.

Run: .venv/bin/python tests/bench/kernels_gpu.py [--up 2] [--rows 4] [--dtype float16]. Needs about 5 GB of device
memory and 0.6 GB of pinned host memory. 80 warm-up and 200 timed runs each, CUDA events, medians (the paper does not
say what it reports). Experts are used in turn and the L2 cache is overwritten before each run. "graph" replays a CUDA
graph and so leaves out the cost of launching from Python; "eager" does not. Floor: the bytes that must be read over the
bandwidth of a large copy measured in this run. Nothing is timed before the result was compared with the reference. The
last line is one JSON object; without a CUDA device it says so and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

import torch
import torch.nn.functional as F
from floe_chat.kernels import reference
from floe_chat.kernels.layouts import ExpertRows, RowLayout, UpLayout, UpWeights, VectorLayout
from floe_chat.kernels.types import Calls
from torch import Tensor

H, NEURONS, GROUP, EXPERTS = 4096, 14336, 64, 8
SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
WARM_UP, RUNS, SLOW_RUNS = 80, 200, 10
# Milliseconds by sparsity, from the paper; 16-bit weights throughout.
PAPER = {
    "H100": (0.169, 0.134, 0.123, 0.114, 0.106, 0.103),
    "A100": (0.253, 0.195, 0.188, 0.176, 0.166, 0.155),
    "A6000": (0.524, 0.365, 0.337, 0.305, 0.277, 0.263),
    "RTX 3090": (0.542, 0.379, 0.354, 0.316, 0.302, 0.283),
}


@dataclass(frozen=True)
class Figure:
    """One row of the table: median milliseconds, and the bytes that were read with the time they take at least."""

    name: str
    sparsity: float
    ms: float
    gb: float
    floor_ms: float


@dataclass(frozen=True)
class Expert:
    """Everything one configuration is timed with."""

    up: UpWeights
    rows: ExpertRows
    x: Tensor
    limits: dict[float, list[Tensor]]
    active: dict[float, float]


def stored(count: int, layout: VectorLayout, float16: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes with float16 scales and zeros that make weights of about 0.02, or such weights in 16 bit."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if layout.bits == 16:
        values = torch.empty(count, layout.n, dtype=float16, device="cuda").normal_(0, 0.02, generator=generator)
        nothing = torch.empty(count, 0, dtype=torch.float16, device="cuda")
        return values.view(torch.uint8), nothing, nothing
    code_bytes = layout.nbytes - 4 * layout.groups
    codes = torch.randint(0, 256, (count, code_bytes), generator=generator, device="cuda", dtype=torch.uint8)
    shape, levels = (count, layout.groups), 1 << layout.bits
    scale = (0.04 + 0.04 * torch.rand(shape, generator=generator, device="cuda")) / levels
    zero = (levels - 1) * (0.4 + 0.2 * torch.rand(shape, generator=generator, device="cuda"))
    return codes, scale.half(), zero.half()


def make_expert(up_bits: int, row_bits: int, dtype: torch.dtype) -> Expert:
    """Eight experts, one token, and the thresholds that leave each sparsity."""
    up_vector, vector = VectorLayout(H, up_bits, GROUP), VectorLayout(H, row_bits, GROUP)
    up_layout, layout = UpLayout(up_vector, dtype), RowLayout(vector, vector, dtype)
    parts = [stored(NEURONS, up_vector, dtype, seed) for seed in range(EXPERTS)]
    up = UpWeights(up_layout, *(torch.stack([part[i] for part in parts]) for i in range(3)))
    data = torch.zeros(EXPERTS, NEURONS, layout.nbytes, dtype=torch.uint8, device="cuda")
    for expert in range(EXPERTS):
        for seed, start in ((100, 0), (200, vector.nbytes)):
            codes, scale, zero = stored(NEURONS, vector, dtype, seed + expert)
            whole = torch.cat([scale.view(torch.uint8), zero.view(torch.uint8), codes], dim=1)
            data[expert, :, start : start + vector.nbytes] = whole
    x = torch.randn(1, H, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(dtype)
    limits: dict[float, list[Tensor]] = {sparsity: [] for sparsity in SPARSITIES}
    active = dict.fromkeys(SPARSITIES, 0.0)
    for expert in range(EXPERTS):
        v = F.linear(x[0].float(), up.dense(expert, torch.float32)).abs().sort().values
        for sparsity in SPARSITIES:
            first = int(sparsity * NEURONS)
            # Between two neurons, so that rounding decides nothing.
            limit = (v[first - 1] + v[first]) / 2 if first else v.new_zeros(())
            limits[sparsity].append(limit[None])
            active[sparsity] += float((v >= limit).sum()) / EXPERTS
    return Expert(up, ExpertRows(layout, data), x, limits, active)


def one_call(expert: int) -> Calls:
    """The first token, one expert."""
    index = torch.tensor([0], device="cuda")
    return Calls(index, torch.tensor([expert], device="cuda"), torch.ones(1, device="cuda"))


class Stopwatch:
    """Times things on the device, each run with other weights and a cold L2."""

    def __init__(self) -> None:
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")  # more than any L2

    def ms(self, work: Callable[[int], object], runs: int = RUNS, warm_up: int = WARM_UP) -> float:
        """The median of `runs` calls work(0), work(1), ..."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for run in range(-warm_up, runs):
            self._flush.zero_()
            if run >= 0:
                events[run][0].record()
            work(run % EXPERTS)
            if run >= 0:
                events[run][1].record()
        torch.cuda.synchronize()
        return median(start.elapsed_time(end) for start, end in events)


def graphs_of(work: Callable[[int], object]) -> Callable[[int], object]:
    """`work` of every expert as a CUDA graph."""
    graphs: list[torch.cuda.CUDAGraph] = []
    work(0)  # compiles, which a capture cannot
    torch.cuda.synchronize()
    for expert in range(EXPERTS):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work(expert)
        graphs.append(graph)
    return lambda expert: graphs[expert].replay()


def copy_gb_s(watch: Stopwatch) -> float:
    """What a large copy within the device reads and writes per second."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / watch.ms(lambda _: target.copy_(source), 20, 3) / 1e6


def compare(expert: Expert) -> float:
    """Relative RMS difference of our step from the reference's on every sparsity's first expert; the largest."""
    from floe_chat.kernels import triton as kernels

    worst = 0.0
    x, calls = expert.x.float(), one_call(0)
    for sparsity in SPARSITIES:
        limit = expert.limits[sparsity][0]
        y, _ = kernels.moe_step(x, expert.up, expert.rows, calls, limit)
        active = reference.up_gemv(x, expert.up, calls, limit)
        truth = reference.sparse_swiglu(x, expert.rows, calls, active).double()
        worst = max(worst, float((y.double() - truth).pow(2).mean().sqrt() / truth.pow(2).mean().sqrt()))
    return worst


def table(name: str, expert: Expert, watch: Stopwatch, bandwidth: float) -> list[Figure]:
    """Our step at every sparsity, from Python and as a graph; up alone; the reference."""
    from floe_chat.kernels import triton as kernels

    calls = [one_call(e) for e in range(EXPERTS)]
    figures: list[Figure] = []

    def add(what: str, sparsity: float, ms: float, nbytes: float) -> None:
        figures.append(Figure(f"{name} {what}", sparsity, ms, nbytes / 1e9, nbytes / bandwidth / 1e6))
        last = figures[-1]
        share = f"{last.floor_ms / ms:4.0%} of copy bandwidth"
        print(f"{last.name:34s} {sparsity:4.0%}  {ms:8.4f} ms  floor {last.floor_ms:7.4f} ms  {share}")

    up_bytes = expert.up.bytes_per_expert()
    nothing = torch.full((1,), torch.inf, device="cuda")

    def up_alone(e: int) -> object:
        return kernels.moe_step(expert.x, expert.up, expert.rows, calls[e], nothing)

    add("up alone, graph", 1.0, watch.ms(graphs_of(up_alone)), up_bytes)
    for sparsity in SPARSITIES:
        limits = expert.limits[sparsity]

        def step(e: int, limits: list[Tensor] = limits) -> object:
            return kernels.moe_step(expert.x, expert.up, expert.rows, calls[e], limits[e])

        def plain(e: int, limits: list[Tensor] = limits) -> object:
            active = reference.up_gemv(expert.x, expert.up, calls[e], limits[e])
            return reference.sparse_swiglu(expert.x, expert.rows, calls[e], active)

        nbytes = up_bytes + expert.active[sparsity] * expert.rows.layout.nbytes
        eager = watch.ms(step)
        add("graph", sparsity, watch.ms(graphs_of(step)), nbytes)
        add("eager", sparsity, eager, nbytes)
        add("reference (torch)", sparsity, watch.ms(plain, SLOW_RUNS, 2), nbytes)
    return figures


def dense(expert: Expert, watch: Stopwatch, bandwidth: float) -> Figure:
    """The same expert as three dense 16-bit products of the library."""
    dtype, experts = expert.x.dtype, range(EXPERTS)
    parts = [(expert.up.dense(e, dtype), *expert.rows.layout.read(expert.rows.data[e], dtype)) for e in experts]

    def work(e: int) -> object:
        up, gate, down = parts[e]
        return (F.silu(F.linear(expert.x, gate)) * F.linear(expert.x, up)) @ down

    nbytes = 3 * H * NEURONS * 2
    figure = Figure("dense 16 bit (cuBLAS)", 0.0, watch.ms(graphs_of(work)), nbytes / 1e9, nbytes / bandwidth / 1e6)
    print(f"{figure.name:34s}   0%  {figure.ms:8.4f} ms  floor {figure.floor_ms:7.4f} ms")
    return figure


def zero_copy(expert: Expert, watch: Stopwatch) -> dict[str, float]:
    """80 % sparsity with one expert's rows in pinned host memory, read in place, beside a plain copy over the link."""
    from floe_chat.kernels import triton as kernels

    host = ExpertRows(expert.rows.layout, expert.rows.data[:1].cpu().pin_memory())
    up = UpWeights(expert.up.layout, expert.up.q[:1], expert.up.scale[:1], expert.up.zero[:1])
    calls, limit, target = one_call(0), expert.limits[0.8][0], torch.empty_like(expert.rows.data[0])
    step = watch.ms(lambda _: kernels.moe_step(expert.x, up, host, calls, limit), 50, 5)
    copy = watch.ms(lambda _: target.copy_(host.data[0], non_blocking=True), 20, 3)
    nbytes = expert.active[0.8] * host.layout.nbytes
    link, reached = target.nbytes / copy / 1e6, nbytes / step / 1e6
    print(
        f"rows read from pinned host memory at 80 %: {step:.3f} ms, {reached:.1f} GB/s; the link copies {link:.1f} GB/s"
    )
    return {"ms": step, "gb_s": reached, "link_gb_s": link}


def main() -> None:
    """Print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--up", type=int, default=2, choices=(2, 3, 4, 8, 16))
    parser.add_argument("--rows", type=int, default=4, choices=(2, 3, 4, 8, 16))
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark times GPU kernels and can say nothing here", file=sys.stderr)
        raise SystemExit(1)
    dtype = getattr(torch, options.dtype)
    watch = Stopwatch()
    bandwidth = copy_gb_s(watch)
    device = torch.cuda.get_device_name()
    print(f"{device}, {torch.cuda.get_device_capability()}, copy {bandwidth:.0f} GB/s")
    figures: list[Figure] = []
    host: dict[str, float] = {}
    for up, rows in dict.fromkeys([(16, 16), (options.up, options.rows)]):
        expert = make_expert(up, rows, dtype)
        if (error := compare(expert)) > 1e-4:
            print(
                f"up {up} bit, rows {rows} bit: result is {error:.1e} off the reference; nothing timed", file=sys.stderr
            )
            raise SystemExit(2)
        if (up, rows) == (16, 16):
            figures.append(dense(expert, watch, bandwidth))
        else:
            host = zero_copy(expert, watch)
        figures += table(f"up {up}, rows {rows}", expert, watch, bandwidth)
        del expert
        torch.cuda.empty_cache()
    for name, times in PAPER.items():
        print(
            f"FloE Table 1, {name:9s}" + "".join(f"  {s:.0%} {ms:.3f}" for s, ms in zip(SPARSITIES, times, strict=True))
        )
    result = {"bench": "kernels_gpu", "device": device, "copy_gb_s": bandwidth, "zero_copy": host}
    print(json.dumps({**result, "figures": [asdict(figure) for figure in figures]}))


if __name__ == "__main__":
    main()
