"""How fast a model would read a prompt; `speed_estimate.py` is about the tokens of its answer.

Beside a GPU a layer's experts are placed as in the engine (`missing_rows.prefill_alike`), and its lanes overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.mixers.delta import CHUNK
from ...models.catalog_entry import Recurrent
from ..offload import missing_rows
from ..offload.cards import DENSE_LAUNCHES, GROUPED_LAUNCHES, expert_launches
from ..offload.lane_rates import Rates
from ..offload.mix import ExpertsPlace
from .footprint import Footprint
from .speed_estimate import PROMPT, Held, Speeds, TokenWork

RULE_LAUNCHES, CHUNK_LAUNCHES = 38, 31  # of a gated delta rule for any number of tokens, and for each chunk of them


def prefill(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, tokens: int = PROMPT) -> float:
    """Tokens per second of a prompt, whose tokens share every expert that they use."""
    sizes = takes.sizes
    calls = tokens * sizes.top_k * work.calls
    ups, rows = takes.ups / sizes.layers, takes.rows / sizes.layers
    batch = speeds.of_cpu("prompt", 4)
    if not held.gpu:
        # The kernels' rate counts only rows, though it includes an expert's up projection: three matrices for two.
        dense = takes.attention * tokens / (1.5 * batch)
        compute = calls * sizes.intermediate * takes.row / batch
        layer = dense + max(compute, (rows + ups) / speeds.read) + (1 - held.ram) * rows / speeds.disk
        return tokens / (sizes.layers * layer)
    seconds = 0.0
    for place, count, own in held.kinds(takes, work):
        layer = prompt_layer(takes, own, speeds, place, held.pool, cpu=held.cpu, tokens=tokens)
        seconds += count * (layer.seconds + (1 - held.ram) * layer.away / speeds.disk)
    return tokens / seconds


@dataclass(frozen=True, slots=True)
class PromptTime:
    """A prompt in one layer beside a GPU: seconds without what is read from the disk, and bytes that would be if
    nothing was in RAM.
    """

    seconds: float
    away: float


def prompt_layer(
    takes: Footprint,
    work: TokenWork,
    speeds: Speeds,
    place: ExpertsPlace,
    pool: float = 0.0,
    *,
    cpu: bool = True,
    tokens: int = PROMPT,
    rates: Rates | None = None,
) -> PromptTime:
    """One layer of a kind, whose lanes overlap; pool, cpu: see `Held`. rates: `speeds.rates`, where they are known."""
    sizes, calls = takes.sizes, tokens * takes.sizes.top_k * work.calls
    ups, rows = takes.ups / sizes.layers, takes.rows / sizes.layers
    flops = 2.0 * sizes.attention * tokens + 2.0 * sizes.in_expert * calls
    reading = (takes.attention + ups + rows) / speeds.gpu
    launches = DENSE_LAUNCHES + sizes.experts * expert_launches(grouped=speeds.grouped)
    if place == "gpu" and speeds.grouped:
        launches = DENSE_LAUNCHES + GROUPED_LAUNCHES
    if isinstance(sizes.recurrent, Recurrent):
        launches += sizes.recurrent.layers / sizes.layers * (RULE_LAUNCHES + CHUNK_LAUNCHES * tokens / CHUNK)
    compute = max(flops / speeds.gpu_flops, reading) + launches * speeds.launch
    there = {"gpu": 1.0, "pool": pool, "cpu": 0.0}[place]
    away = (1 - there) * rows + (ups if place == "cpu" else 0)
    if place != "gpu":
        compute = max(compute, *_experts_end(takes, calls, rates or speeds.rates(takes, work), there, away, cpu))
    return PromptTime(compute + speeds.host_gpu, away)


def _experts_end(
    takes: Footprint, calls: float, rates: Rates, resident: float, absent: float, cpu: bool
) -> tuple[float, float]:
    """The end of the link's and the CPU's work on one layer's experts, for this many calls; absent: bytes of all."""
    if resident >= 1:
        return 0.0, 0.0
    experts = takes.sizes.experts
    count, each = max(1, round(calls / experts)), absent / experts
    on_cpu = missing_rows.prefill_alike(experts, count, resident, each / (1 - resident), rates) if cpu else 0
    copy = rates.link_latency_s + each * (1 / rates.link_bytes_s + 1 / rates.gpu_bytes_s)
    beside = rates.cpu_latency_s + each * max(1 / rates.cpu_bytes_s, count / rates.cpu_batch_bytes_s)
    return (experts - on_cpu) * copy, on_cpu * beside
