"""The inputs of the GPU benchmark: experts on the device, one token and its thresholds, a stopwatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ....kernels.layouts import RowLayout, SignalLayout, VectorLayout
from ....kernels.types import Calls
from ....kernels.weights import ExpertRows, SignalWeights
from ...machine import gpus
from ...machine.random_weights import Shapes

SPARSITIES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9)
WARM_UP, RUNS = 80, 200
FLUSH = 256 << 20  # more than any L2


class Watch(Protocol):
    """Times work on a device."""

    def seconds(self, work: Callable[[int], object], runs: int = RUNS, warm_up: int = WARM_UP) -> list[float]:
        """Seconds of each of the `runs` calls work(0), work(1), ..."""
        ...


class Stopwatch:
    """Times with CUDA events; the L2 cache is cold in each run."""

    def __init__(self) -> None:
        gpus.wake("cuda")
        self._flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def seconds(self, work: Callable[[int], object], runs: int = RUNS, warm_up: int = WARM_UP) -> list[float]:
        """Seconds of each of the `runs` calls work(0), work(1), ..."""
        events = [[torch.Event(enable_timing=True) for _ in range(2)] for _ in range(runs)]
        for run in range(-warm_up, runs):
            self._flush.zero_()
            if run >= 0:
                events[run][0].record()
            work(run + warm_up)
            if run >= 0:
                events[run][1].record()
        torch.accelerator.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]


@dataclass(frozen=True, slots=True)
class Expert:
    """Experts of one layer and one token.

    Attributes:
        x: (1, H). limits: by sparsity, a threshold (1,) of each expert. active: by sparsity, how many neurons are
            active on average.
    """

    up: SignalWeights
    rows: ExpertRows
    x: Tensor
    limits: dict[float, list[Tensor]]
    active: dict[float, float]


def one_call(expert: int, device: torch.device) -> Calls:
    """The first token, one expert."""
    index = torch.tensor([0, expert], device=device)
    return Calls(index[:1], index[1:], torch.ones(1, device=device))


def make_expert(shapes: Shapes, up_bits: int, row_bits: int, dtype: torch.dtype, device: str) -> Expert:
    """Random experts, and the thresholds that give each sparsity."""
    signal_layout = SignalLayout(shapes.vector(up_bits), dtype)
    vector = shapes.vector(row_bits)
    layout = RowLayout(vector, vector, dtype)
    parts = [_stored(shapes.neurons, signal_layout.vector, dtype, seed, device) for seed in range(shapes.experts)]
    up = SignalWeights(signal_layout, *(torch.stack([part[i] for part in parts]) for i in range(3)))
    data = torch.zeros(shapes.experts, shapes.neurons, layout.nbytes, dtype=torch.uint8, device=device)
    for expert in range(shapes.experts):
        for seed, start in ((100, 0), (200, vector.nbytes)):
            whole = vector.join_packed(*_stored(shapes.neurons, vector, dtype, seed + expert, device))
            data[expert, :, start : start + vector.nbytes] = whole
    generator = torch.Generator(device).manual_seed(7)
    x = torch.randn(1, shapes.hidden, generator=generator, device=device).to(dtype)
    limits: dict[float, list[Tensor]] = {sparsity: [] for sparsity in SPARSITIES}
    active = dict.fromkeys(SPARSITIES, 0.0)
    for expert in range(shapes.experts):
        v = F.linear(x[0].float(), up.dense(expert, torch.float32)).abs().sort().values
        for sparsity in SPARSITIES:
            first = int(sparsity * shapes.neurons)
            # Halfway between two neurons, so that rounding does not matter.
            limit = (v[first - 1] + v[first]) / 2 if first else v.new_zeros(())
            limits[sparsity].append(limit[None])
            active[sparsity] += float((v >= limit).sum()) / shapes.experts
    return Expert(up, ExpertRows(layout, data), x, limits, active)


def _stored(
    count: int, layout: VectorLayout, float16: torch.dtype, seed: int, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes with scales and zeros, as stored, that make weights of about 0.02, or such weights in 16 bit."""
    generator = torch.Generator(device).manual_seed(seed)
    if layout.bits == 16:
        values = torch.empty(count, layout.n, dtype=float16, device=device).normal_(0, 0.02, generator=generator)
        nothing = torch.empty(count, 0, dtype=torch.float16, device=device)
        return values.view(torch.uint8), nothing, nothing
    code_bytes = layout.nbytes - layout.head
    codes = torch.randint(0, 256, (count, code_bytes), generator=generator, device=device, dtype=torch.uint8)
    shape, levels = (count, layout.groups), 1 << layout.bits
    scale = (0.04 + 0.04 * torch.rand(shape, generator=generator, device=device)) / levels
    zero = (levels - 1) * (0.4 + 0.2 * torch.rand(shape, generator=generator, device=device))
    return codes, *layout.nearest(scale, zero)
