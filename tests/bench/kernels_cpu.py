"""The CPU kernels on full-width Mixtral experts, beside what this machine's memory delivers in the same run.

Run: .venv/bin/python tests/bench/kernels_cpu.py [--runs N] [--threads N] [--quick]. Needs about 4 GB of memory. The
experts are used in turn, so that none is in a cache when its turn comes. Everything is measured again and again, one
run of each after the other; figures are medians of these runs, and shares of a floor are medians of the shares
within a run, so that a neighbour's load counts for both. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from floe_chat.kernels.cpu import native
from floe_chat.kernels.layouts import ExpertRows, RowLayout, UpLayout, UpWeights, VectorLayout
from floe_chat.kernels.types import Active, Calls
from torch import Tensor

H, F, GROUP = 4096, 14336, 64
EXPERTS = 8
GB = 1e9


@dataclass
class Figure:
    """One measured thing: its bytes, the floor it is compared with, and what each run took in seconds."""

    name: str
    work: Callable[[int], int]
    floor: str | None = None
    seconds: list[float] = field(default_factory=list)
    gb: list[float] = field(default_factory=list)

    def run(self, turn: int, inner: int) -> None:
        nbytes = 0
        start = time.perf_counter()
        for i in range(inner):
            nbytes += self.work(turn * inner + i)
        self.seconds.append((time.perf_counter() - start) / inner)
        self.gb.append(nbytes / inner / self.seconds[-1] / GB)


def big(*shape: int, hugepages: bool) -> Tensor:
    """Random bytes; with `hugepages`, asked for before they are first touched."""
    data = torch.empty(shape, dtype=torch.uint8)
    if hugepages:
        native.advise_hugepages(data)
    seed = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    flat = data.view(-1)
    for start in range(0, flat.numel(), seed.numel()):
        part = flat[start : start + seed.numel()]
        part.copy_(seed[: part.numel()])
    return data


def make_up(bits: int, hugepages: bool) -> UpWeights:
    layout = UpLayout(VectorLayout(H, bits, GROUP), torch.bfloat16)
    groups = layout.vector.groups
    scale = (0.01 + 0.01 * torch.rand(EXPERTS, F, groups)).half()
    zero = ((1 << bits) - 1) * (0.4 + 0.2 * torch.rand(EXPERTS, F, groups)).half()
    return UpWeights(layout, big(EXPERTS, F, layout.row_bytes, hugepages=hugepages), scale, zero)


def make_rows(bits: int, hugepages: bool) -> ExpertRows:
    layout = RowLayout(VectorLayout(H, bits, GROUP), VectorLayout(H, bits, GROUP), torch.bfloat16)
    data = big(EXPERTS, F, layout.nbytes, hugepages=hugepages)
    if bits < 16:
        for start in (0, layout.gate.nbytes):
            head = data[:, :, start : start + 4 * layout.gate.groups].view(torch.float16)
            head[:, :, : layout.gate.groups] = 0.01
            head[:, :, layout.gate.groups :] = (1 << bits) / 2
    return ExpertRows(layout, data)


def choose_active(share: float, calls: int) -> list[Active]:
    """One ascending random choice per expert pair."""
    found: list[Active] = []
    for seed in range(EXPERTS // 2):
        g = torch.Generator().manual_seed(seed)
        lists = [torch.randperm(F, generator=g)[: round(share * F)].sort().values for _ in range(calls)]
        offsets = torch.tensor([0, *(n.numel() for n in lists)]).cumsum(0)
        found.append(Active(offsets, torch.cat(lists), torch.randn(int(offsets[-1]), generator=g)))
    return found


def two_experts(turn: int) -> Calls:
    first = 2 * turn % EXPERTS
    return Calls(torch.tensor([0, 0]), torch.tensor([first, first + 1]), torch.tensor([0.6, 0.4]))


def up_figures(bits: int, x: Tensor, hugepages: bool) -> list[Figure]:
    up = make_up(bits, hugepages)
    nothing = torch.full((2,), 1e9)
    kind = str(x.dtype).removeprefix("torch.")

    def work(turn: int) -> int:
        native.up_gemv(x, up, two_experts(turn), nothing)
        return 2 * up.bytes_per_expert()

    return [Figure(f"up_gemv {bits} bit, {kind} x", work, "read")]


def row_figures(bits: int, share: float, x: Tensor, hugepages: bool, rows: ExpertRows) -> list[Figure]:
    chosen = choose_active(share, 2)
    nbytes = rows.layout.nbytes
    flat = rows.data.view(-1, nbytes)
    pages = "huge pages" if hugepages else "4K pages"
    name = f"{bits}-bit rows, {share:.0%} active, {pages}"

    def read(turn: int) -> int:
        active, first = chosen[turn % len(chosen)], 2 * turn % EXPERTS
        split = int(active.offsets[1])
        index = torch.cat([active.neurons[:split] + first * F, active.neurons[split:] + (first + 1) * F])
        native.read_rows(flat, index)
        return index.numel() * nbytes

    def work(turn: int) -> int:
        active = chosen[turn % len(chosen)]
        native.sparse_swiglu(x, rows, two_experts(turn), active)
        return active.neurons.numel() * nbytes

    kind = str(x.dtype).removeprefix("torch.")
    return [Figure(f"gather {name}", read), Figure(f"sparse_swiglu {name}, {kind} x", work, f"gather {name}")]


def dense_int4(x: Tensor) -> Callable[[int], int]:
    """Two dense experts through torch's own 4-bit kernel (group 128)."""
    matrices: list[tuple[Tensor, Tensor]] = []
    for i in range(3 * EXPERTS):
        n, k = (H, F) if i % 3 == 2 else (F, H)
        codes = torch.randint(0, 16, (n, k), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        matrices.append((packed, torch.rand(k // 128, n, 2, dtype=torch.bfloat16) * 0.01))
    x16 = x.to(torch.bfloat16)

    def multiply(v: Tensor, which: int) -> Tensor:
        packed, scales = matrices[which]
        return torch.ops.aten._weight_int4pack_mm_for_cpu(v, packed, 128, scales)

    def work(turn: int) -> int:
        for expert in (2 * turn % EXPERTS, 2 * turn % EXPERTS + 1):
            gate, up = multiply(x16, 3 * expert), multiply(x16, 3 * expert + 1)
            multiply(torch.nn.functional.silu(gate) * up, 3 * expert + 2)
        return 2 * 3 * (H * F // 2 + H * F // 128 * 4)

    return work


def step_figures(x: Tensor, hugepages: bool, rows: ExpertRows) -> list[Figure]:
    """The whole MoE step of a layer: two experts, 2-bit up, 4-bit rows; thresholds cut at the wanted sparsity."""
    up = make_up(2, hugepages)
    figures: list[Figure] = [Figure("dense int4 (torch), 2 experts", dense_int4(x))]
    for sparsity in (0.6, 0.8):
        limits: list[Tensor] = []
        for turn in range(EXPERTS // 2):
            v = native.up_gemv(x, up, two_experts(turn), torch.zeros(2)).values.view(2, F)
            limits.append(v.abs().float().quantile(sparsity, dim=1))

        def work(turn: int, limits: list[Tensor] = limits) -> int:
            calls = two_experts(turn)
            active = native.up_gemv(x, up, calls, limits[turn % len(limits)])
            native.sparse_swiglu(x, rows, calls, active)
            return 2 * up.bytes_per_expert() + active.neurons.numel() * rows.layout.nbytes

        figures.append(Figure(f"MoE step, {sparsity:.0%} sparse", work, "dense int4 (torch), 2 experts"))
    return figures


def main() -> None:
    """Print the table, then the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--inner", type=int, default=4, help="calls in one timed run; 4 go once round the experts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="2-bit up, 4-bit rows on 4K pages only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    x32 = torch.randn(1, H)
    x16 = x32.to(torch.bfloat16)

    linear = big(EXPERTS * F, 1280, hugepages=False)
    figures = [Figure("read", lambda turn: (native.read(linear), linear.nbytes)[1])]
    for bits in (2,) if options.quick else (2, 3, 4, 8):
        figures += up_figures(bits, x32, hugepages=False) + up_figures(bits, x16, hugepages=False)
    for hugepages in (False,) if options.quick else (False, True):
        for bits in (4,) if options.quick else (4, 8):
            rows = make_rows(bits, hugepages)
            for share in (0.2, 0.4):
                figures += row_figures(bits, share, x32, hugepages, rows)
                if not hugepages:
                    figures += row_figures(bits, share, x16, hugepages, rows)[1:]
            if bits == 4 and not hugepages:
                figures += step_figures(x16, hugepages, rows)
    for figure in figures:
        figure.run(0, options.inner)
        figure.seconds.clear()
        figure.gb.clear()
    for run in range(options.runs):
        for figure in figures:
            figure.run(run + 1, options.inner)

    named = {figure.name: figure for figure in figures}
    isa = native.isa()
    table: list[dict[str, Any]] = []
    print(f"{isa.name} ({isa.reason}), {options.threads} threads, {options.runs} runs")
    for figure in figures:
        row: dict[str, Any] = {"name": figure.name, "ms": median(figure.seconds) * 1e3, "gb_s": median(figure.gb)}
        line = f"{figure.name:56s} {row['ms']:8.3f} ms {row['gb_s']:6.1f} GB/s"
        if figure.floor:
            floor = named[figure.floor]
            if figure.floor.startswith("dense"):
                row["of_dense"] = median(a / b for a, b in zip(figure.seconds, floor.seconds, strict=True))
                line += f"  {row['of_dense']:.2f} of its time"
            else:
                row["of_floor"] = median(a / b for a, b in zip(figure.gb, floor.gb, strict=True))
                line += f"  {row['of_floor']:.0%} of {figure.floor.split()[0]}"
        table.append(row)
        print(line)
    print(json.dumps({"bench": "kernels_cpu", "isa": isa.name, "threads": options.threads, "figures": table}))


if __name__ == "__main__":
    main()
