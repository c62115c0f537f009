"""How fast a model would answer: the one cost model of plans.

A token's bytes on each lane are divided by that lane's rate, and lanes overlap as in the engine. The expected number of
absent rows is split as in the engine (`placing.cpu_rows`, `missing_rows.prefill`). Expectations come from benchmarks
(`measured_figures.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...kernels.offload.placing import cpu_rows
from ..offload import missing_rows
from ..offload.cards import DENSE_LAUNCHES
from ..offload.lane_rates import Rates
from ..offload.missing_rows import Lane
from ..quality_presets import Preset
from .footprint import Footprint, kv_element
from .measured_figures import Curve, figures

PROMPT = 512  # tokens of the prompt whose speed is estimated, and of the context of a decoded token


def at(curve: Curve, x: float) -> float:
    """The value of a curve, linear between its points and constant beyond its ends."""
    for (x0, y0), (x1, y1) in itertools.pairwise(curve):
        if x <= x1:
            return y0 + (y1 - y0) * max(0.0, x - x0) / (x1 - x0)
    return curve[-1][1]


@dataclass(frozen=True, slots=True)
class TokenWork:
    """A token's work in the experts that its router chose.

    Attributes:
        calls: share of expert work that is not dropped by score. active: of their neurons. reached: of those, whose
            down halves are read.
    """

    calls: float = 1.0
    active: float = 1.0
    reached: float = 1.0

    @classmethod
    def of(cls, preset: Preset) -> TokenWork:
        """By a preset's rule."""
        rule = preset.rule
        # Below the first score an expert is left out, between the two only half of it.
        dropped = figures().dropped
        left_out = (at(dropped, rule.drop) + at(dropped, max(rule.drop, rule.major))) / 2
        calls = 1 - left_out
        active = at(figures().active, rule.sparsity) if rule.weighed else 1 - rule.sparsity
        reached = min(1.0, (1 - rule.product) / active) if rule.product and active else 1.0
        # With weighed thresholds, low-score experts, which are left out first, have hardly any active neurons.
        return cls(calls, min(1.0, active / calls) if rule.weighed else active, reached)

    @property
    def read(self) -> float:
        """Share of a row's bytes that computing it reads."""
        return (1 + self.reached) / 2


@dataclass(frozen=True, slots=True)
class Speeds:
    """A machine's speeds, in bytes and operations per second, and in seconds.

    Attributes:
        read: a linear read of RAM. cpu: our kernels by name and bits ("rows 4 bit"); missing ones follow from `read`.
        disk: large reads. link, link_latency: copies of rows to the GPU, 0 without one. gpu: what its kernels read.
        gpu_flops: what its products reach. launch: one kernel. host, host_gpu, host_pool: see `figures.Figures`.
    """

    read: float
    cpu: Mapping[str, float] = field(default_factory=dict[str, float])
    disk: float = 5e8
    link: float = 0.0
    link_latency: float = 5e-6
    gpu: float = 0.0
    gpu_flops: float = 2e13
    launch: float = 5e-6
    host: float = field(default_factory=lambda: figures().host_s)
    host_gpu: float = field(default_factory=lambda: figures().host_gpu_s)
    host_pool: float = field(default_factory=lambda: figures().host_pool_s)

    def of_cpu(self, what: str, bits: int) -> float:
        """The CPU's rate: measured, or the share of a linear read that such kernels reach on other machines."""
        measured = self.cpu.get(f"{what} {bits} bit")
        if measured:
            return measured
        table = figures().kernels[what]
        nearest = min(table, key=lambda known: abs(known - bits))
        # If this machine was measured at other widths, its own kernels predict better than other machines'.
        own = [rate / table[known] for known in table if (rate := self.cpu.get(f"{what} {known} bit"))]
        return table[nearest] * (sum(own) / len(own) if own else self.read)

    def times(self, factor: float) -> Speeds:
        """All rates times a factor; latencies and the host's own time divided by it."""
        cpu = {name: rate * factor for name, rate in self.cpu.items()}
        rates = {name: getattr(self, name) * factor for name in ("read", "disk", "link", "gpu", "gpu_flops")}
        waits = {
            name: getattr(self, name) / factor for name in ("link_latency", "launch", "host", "host_gpu", "host_pool")
        }
        return dataclasses.replace(self, cpu=cpu, **rates, **waits)

    def up_s(self, takes: Footprint) -> float:
        """Seconds of the CPU for one call's up projection."""
        return takes.up / self.of_cpu("up", takes.spec.up)

    def row_s(self, takes: Footprint) -> float:
        """Likewise for one of its rows, both halves."""
        return takes.row / self.of_cpu("rows", min(takes.spec.gate, takes.spec.down))

    def rates(self, takes: Footprint, work: TokenWork) -> Rates:
        """The rates for the engine's placement, which counts whole rows."""
        return Rates(
            link_bytes_s=self.link,
            link_latency_s=self.link_latency,
            cpu_bytes_s=takes.row / self.row_s(takes) / work.read,
            cpu_batch_bytes_s=self.of_cpu("prompt", 4),
            cpu_latency_s=2 * self.link_latency,
            gpu_bytes_s=self.gpu / work.read,
            launch_s=self.launch,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Where a model's rows are stored.

    Attributes:
        gpu: whether the dense part and the up projections are on a GPU. pool: share of all rows that are there too.
        ram: share of the other bytes that is in RAM; the rest is read from the disk. cpu: whether the CPU computes
            a share of absent rows.
    """

    gpu: bool
    pool: float = 0.0
    ram: float = 1.0
    cpu: bool = True


@dataclass(frozen=True, slots=True)
class Token:
    """Seconds of one decoded token, by part.

    Attributes:
        dense: attention and head. up: finding active neurons. rows: computing them, and waiting for absent ones.
        disk: reading what is not in RAM. host: its own time. hit: share of the rows found in the pool.
        moved: bytes over the link.
    """

    dense: float
    up: float
    rows: float
    disk: float
    host: float
    hit: float
    moved: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.dense + self.up + self.rows + self.disk + self.host


def decode(
    takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, curve: Curve | None = None, context: int = PROMPT
) -> Token:
    """The time of one token after `context` others. `curve`: hit rate by pool share, None: as measured."""
    if held.gpu:
        return _on_gpu(takes, work, speeds, held, curve or figures().hits, 2 * takes.kv * context)
    return _on_cpu(takes, work, speeds, held, kv_element(takes.spec.dense) * takes.kv * context)


def _on_cpu(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, kv_bytes: int) -> Token:
    sizes, spec = takes.sizes, takes.spec
    calls = sizes.layers * sizes.top_k * work.calls
    dense = sizes.layers * takes.attention / speeds.of_cpu("dense", spec.dense)
    dense += takes.head / speeds.of_cpu("dense", max(8, spec.dense)) + kv_bytes / speeds.read
    # Disk reads bring neighbouring pages along: of a used expert nearly all is read.
    absent = (1 - held.ram) * calls * (takes.up + sizes.intermediate * takes.row)
    return Token(
        dense=dense,
        up=calls * speeds.up_s(takes),
        rows=calls * sizes.intermediate * work.active * work.read * speeds.row_s(takes),
        disk=absent / speeds.disk,
        host=sizes.layers * speeds.host,
        hit=0.0,
        moved=0.0,
    )


def _on_gpu(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, curve: Curve, kv_bytes: int) -> Token:
    """One layer as `OffloadedLayer` runs it: dense part, up projections and a wait; then the rows that are there and
    the next layer's guess on the GPU, beside the absent rows on the link and the CPU. Between two layers the link
    brings what was guessed."""
    sizes, row = takes.sizes, takes.row
    launches = 2 * speeds.launch
    pooled = held.pool < 1
    host = speeds.host_pool if pooled else speeds.host_gpu
    dense = takes.attention / speeds.gpu + DENSE_LAUNCHES * speeds.launch
    up = sizes.top_k * work.calls * takes.up / speeds.gpu + launches
    wanted = sizes.top_k * work.calls * sizes.intermediate * work.active
    hit = at(curve, held.pool)
    absent = wanted * (1 - hit)
    own = wanted * hit * row * work.read / speeds.gpu + launches
    ahead, end, copied = 0.0, 0.0, 0.0
    if pooled:
        rates = speeds.rates(takes, work)
        recall = figures().recall
        early = recall * min(absent, (dense + up + host) * speeds.link / row)
        end, copied = _absent_end(absent - early, row, rates, held.cpu)
        ahead, copied = up, copied + early / recall
    missing = (1 - held.ram) * (1 - hit) * sizes.top_k * work.calls * sizes.intermediate
    layers = sizes.layers
    return Token(
        dense=layers * dense + (takes.head + kv_bytes) / speeds.gpu + 2 * speeds.launch,
        up=layers * up,
        rows=layers * max(own + ahead, end),
        disk=layers * missing * row / speeds.disk if pooled else 0.0,
        # Without a pool the host never waits for the device: the slower of the two counts.
        host=layers * (host if pooled else max(0.0, host - dense - up - own)),
        hit=hit,
        moved=layers * copied * row,
    )


def _absent_end(rows: float, nbytes: float, rates: Rates, cpu: bool) -> tuple[float, float]:
    """The end of both lanes, and how many rows went over the link."""
    count = round(rows)
    if not count:
        return 0.0, 0.0
    on_cpu = cpu_rows(rates.lanes(nbytes, 0.0, 1.0 if cpu else 0.0), count)
    copied = count - on_cpu
    copy = rates.link_latency_s + rates.launch_s + copied * nbytes * (1 / rates.link_bytes_s + 1 / rates.gpu_bytes_s)
    beside = rates.cpu_latency_s + on_cpu * nbytes / rates.cpu_bytes_s
    return max(copy if copied else 0.0, beside if on_cpu else 0.0), float(copied)


def prefill(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, tokens: int = PROMPT) -> float:
    """Tokens per second of a prompt, whose tokens share every expert that they use."""
    sizes = takes.sizes
    calls = tokens * sizes.top_k * work.calls
    ups, rows = takes.ups / sizes.layers, takes.rows / sizes.layers
    away = (1 - held.ram) * (1 - held.pool if held.gpu else 1) * rows / speeds.disk
    batch = speeds.of_cpu("prompt", 4)
    if not held.gpu:
        # The kernels' rate counts only rows, though it includes an expert's up projection: three matrices for two.
        dense = takes.attention * tokens / (1.5 * batch)
        compute = calls * sizes.intermediate * takes.row / batch
        layer = dense + max(compute, (rows + ups) / speeds.read) + away
        return tokens / (sizes.layers * layer)
    flops = 2.0 * sizes.attention * tokens + 6.0 * sizes.hidden * sizes.intermediate * calls
    reading = (takes.attention + ups + rows) / speeds.gpu
    layer = max(flops / speeds.gpu_flops, reading) + (DENSE_LAUNCHES + 3 * sizes.experts) * speeds.launch
    if held.pool < 1:
        layer = max(layer, *_experts_end(takes, calls, speeds.rates(takes, work), held))
    return tokens / (sizes.layers * (layer + away + speeds.host_gpu))


def _experts_end(takes: Footprint, calls: float, rates: Rates, held: Held) -> tuple[float, float]:
    """The end of the link's and the CPU's work on one layer's experts, for this many calls."""
    experts = takes.sizes.experts
    counts = experts * [max(1, round(calls / experts))]
    nbytes = experts * [float(takes.sizes.intermediate * takes.row)]
    resident = [held.pool] * experts
    lanes = missing_rows.prefill(counts, resident, nbytes, rates, cap=1.0 if held.cpu else 0.0)
    copy = beside = 0.0
    for lane, count, each in zip(lanes, counts, nbytes, strict=True):
        absent = (1 - held.pool) * each
        if lane is Lane.CPU:
            beside += rates.cpu_latency_s + absent * max(1 / rates.cpu_bytes_s, count / rates.cpu_batch_bytes_s)
        else:
            copy += rates.link_latency_s + absent * (1 / rates.link_bytes_s + 1 / rates.gpu_bytes_s)
    return copy, beside
