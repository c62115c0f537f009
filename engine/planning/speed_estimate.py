"""How fast a model would answer: the one cost model of plans.

A token's bytes on each lane are divided by that lane's rate, and lanes overlap as in the engine. The expected number of
absent rows is split as in the engine (`sharing.cpu_rows`). Expectations come from benchmarks (`measured_figures.py`).
Beside a GPU each layer has the time of its kind (`LayerTime`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...kernels.offload.sharing import cpu_rows, split_end
from ...kernels.rule import Rule
from ...models.catalog_entry import Sizes
from ...models.families import FAMILIES
from ...models.pack.manifest import Manifest
from ..decoder.state_store import EVERY
from ..machine.random_weights import MIXTRAL
from ..offload.cards import (
    ASKED_LAUNCHES,
    DENSE_LAUNCHES,
    FIND_LAUNCHES,
    GATE_LAUNCHES,
    LATENT_LAUNCHES,
    LAUNCHES,
    SANDWICH_LAUNCHES,
    SHARED_LAUNCHES,
    SUM_LAUNCHES,
)
from ..offload.lane_rates import Rates
from ..offload.links.disk_files import READ_THROUGH
from ..offload.mix import ExpertsPlace, Mix
from ..offload.virtual.virtual_device import HostTimes
from ..quality_presets import Preset
from .footprint import Footprint, kv_bytes, kv_element, state_bytes
from .measured_figures import Curve, figures

# Of a disk's rate of large reads, what rows reach of which a token needs about half, each with what lies between it and
# the next one if that is little: on a virtual disk of 0.85 GB/s (tests/bench/LOG.md).
SCATTERED = 0.6
ISSUED = 0.8  # share of the clocks in which a multiprocessor issues what it could: an estimate
LEAST_READ = 2e-4  # seconds of a disk's answer, to one request or to dozens: an estimate, of an SSD
COPIED = 4e9  # bytes a second from a device to memory that is not pinned: an estimate
PROMPT = 512  # tokens of the prompt whose speed is estimated, and of the context of a decoded token
ANSWER = 256  # tokens answered for each such prompt: the work by which placements are compared


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
            down halves are read. layers: of each layer, where they differ; the others are their means.
    """

    calls: float = 1.0
    active: float = 1.0
    reached: float = 1.0
    layers: tuple[TokenWork, ...] = ()

    @classmethod
    def of(cls, preset: Preset, manifest: Manifest | None = None, *, gated: bool = True) -> TokenWork:
        """By a preset's rule. manifest: of a pack, some of whose layers may skip nothing. gated: whether experts have a
        gate.
        """
        rule, whole = preset.rule, () if manifest is None else manifest.whole
        each = len(rule.layers) if manifest is None else manifest.architecture.layers
        rules = [rule.at(layer) for layer in range(each)] if rule.layers or whole else [rule]
        rules = [one.of_whole_neurons() if at in whole else one for at, one in enumerate(rules)]
        layers = tuple(cls._of(one if gated else one.ungated()) for one in rules)
        if not rule.layers and not whole:
            return layers[0]
        return dataclasses.replace(_mean(layers), layers=layers)

    @classmethod
    def _of(cls, rule: Rule) -> TokenWork:
        # Below the first score an expert is left out, between the two only half of it.
        dropped = figures().dropped
        left_out = (at(dropped, rule.drop) + at(dropped, max(rule.drop, rule.major))) / 2
        calls = 1 - left_out
        active = 1 - rule.sparsity
        reached = min(1.0, (1 - rule.product) / active) if rule.product and active else 1.0
        # With weighed thresholds, low-score experts, which are left out first, have hardly any active neurons.
        return cls(calls, min(1.0, active / calls) if rule.weighed else active, reached)

    @property
    def read(self) -> float:
        """Share of a row's bytes that computing it reads."""
        return (1 + self.reached) / 2

    @property
    def order(self) -> tuple[int, ...]:
        """The layers, those with the least work first; empty where they are alike."""
        rows = [one.calls * one.active * one.read for one in self.layers]
        return tuple(sorted(range(len(rows)), key=rows.__getitem__))

    def over(self, layers: Sequence[int]) -> TokenWork:
        """The mean of some layers."""
        return _mean([self.layers[layer] for layer in layers]) if self.layers and layers else self


def _mean(works: Sequence[TokenWork]) -> TokenWork:
    calls, active, reached = (
        sum(getattr(work, name) for work in works) / len(works) for name in ("calls", "active", "reached")
    )
    return TokenWork(calls, active, reached)


@dataclass(frozen=True, slots=True)
class Speeds:
    """A machine's speeds, in bytes and operations per second, and in seconds.

    Attributes:
        read: a linear read of RAM. cpu: our kernels by name and bits ("rows 4 bit"); missing ones follow from `read`
            and `cores`, counted as ones like those measured; 0 if it is not known how many there are.
        disk: large reads. states: of gated delta rules, that the CPU brings a token further.
        link, link_latency: copies of rows to the GPU, 0 without one. gpu: what its kernels read where its memory is the
            limit. clocks: of all its multiprocessors; 0 if they are not known. gpu_flops: what its products reach.
            launch: one kernel. node: between two of a CUDA graph. grouped: see `Card`. host and the like: see
            `measured_figures.Figures`.
    """

    read: float
    cores: float = 0.0
    cpu: Mapping[str, float] = field(default_factory=dict[str, float])
    disk: float = 5e8
    states: float = field(default_factory=lambda: figures().state_bytes_s)
    link: float = 0.0
    link_latency: float = 5e-6
    gpu: float = 0.0
    clocks: float = 0.0
    gpu_flops: float = 2e13
    launch: float = 5e-6
    node: float = 1.5e-6
    grouped: bool = True
    host: float = field(default_factory=lambda: figures().host_s)
    host_gpu: float = field(default_factory=lambda: figures().host_gpu_s)
    host_pool: float = field(default_factory=lambda: figures().host_pool_s)
    host_behind: float = field(default_factory=lambda: figures().host_behind_s)
    host_ram: float = field(default_factory=lambda: figures().host_ram_s)

    def of_cpu(self, what: str, bits: int, hidden: int = MIXTRAL.hidden) -> float:
        """The CPU's rate with vectors of so many values: measured, or what such kernels reach elsewhere, on as many
        cores and with such a memory.
        """
        # A vector costs something however short it is: rates are of Mixtral's.
        shorter = 1 + figures().vector_cost.get(what, 0.0) * (MIXTRAL.hidden / hidden - 1)
        return self._of_mixtral(what, bits) / shorter

    def _of_mixtral(self, what: str, bits: int) -> float:
        measured = self.cpu.get(f"{what} {bits} bit")
        if measured:
            return measured
        # If this machine was measured at other widths, its own kernels predict better than other machines'.
        known = ((other, self.cpu.get(f"{what} {other} bit")) for other in figures().kernels[what])
        own = [rate / self._expected(what, other) for other, rate in known if rate]
        return self._expected(what, bits) * (sum(own) / len(own) if own else 1.0)

    def _expected(self, what: str, bits: int) -> float:
        shares, alone = figures().kernels[what], figures().core_bytes_s.get(what)
        nearest = min(shares, key=lambda known: abs(known - bits))
        if alone is None or not self.cores:
            return shares[nearest] * self.read
        # Cores add up until memory is the limit, as it is for codes of 8 bits, with the least arithmetic per byte, on
        # two cores already. From there all widths read alike: of rows, plain loads reach the same.
        return min(self.cores * alone[nearest], shares[max(shares)] * self.read)

    def times(self, factor: float) -> Speeds:
        """All rates times a factor; latencies and the host's own time divided by it."""
        cpu = {name: rate * factor for name, rate in self.cpu.items()}
        rates = {
            name: getattr(self, name) * factor
            for name in ("read", "cores", "disk", "states", "link", "gpu", "clocks", "gpu_flops")
        }
        hosts = "host", "host_gpu", "host_pool", "host_behind", "host_ram"
        slower = ("link_latency", "launch", "node", *hosts)
        waits = {name: getattr(self, name) / factor for name in slower}
        return dataclasses.replace(self, cpu=cpu, **rates, **waits)

    def of_gpu(self, what: str, bits: int) -> float:
        """What a kernel of the GPU reads: what its memory gives or, if that is less, what its instructions allow."""
        able = figures().card_bytes[what]
        if not self.clocks or bits > max(able):
            return self.gpu
        return min(self.gpu, ISSUED * self.clocks * able[min(able, key=lambda known: abs(known - bits))])

    def of_rows(self, takes: Footprint, work: TokenWork) -> float:
        """The same of rows of which so much is read: of both halves, one kernel after the other."""
        product, down = self.of_gpu("product", takes.spec.gate), self.of_gpu("down", takes.spec.down)
        return (1 + work.reached) / (1 / product + work.reached / down)

    def up_s(self, takes: Footprint) -> float:
        """Seconds of the CPU for one call's up projection."""
        return takes.up / self.of_cpu("up", takes.spec.up, takes.sizes.expert_hidden)

    def row_s(self, takes: Footprint) -> float:
        """Likewise for one of its rows, both halves."""
        return takes.row / self.of_cpu("rows", min(takes.spec.gate, takes.spec.down), takes.sizes.expert_hidden)

    def rates(self, takes: Footprint, work: TokenWork) -> Rates:
        """The rates for the engine's placement, which counts whole rows."""
        return Rates(
            link_bytes_s=self.link,
            link_latency_s=self.link_latency,
            cpu_bytes_s=takes.row / self.row_s(takes) / work.read,
            cpu_batch_bytes_s=self.of_cpu("prompt", 4),
            cpu_latency_s=2 * self.link_latency,
            gpu_bytes_s=self.of_rows(takes, work) / work.read,
            launch_s=self.launch,
            ram_bytes_s=self.read,
        )


@dataclass(frozen=True, slots=True)
class Held:
    """Where a model's rows are stored.

    Attributes:
        gpu: whether the dense part is on a GPU. pool: share of the rows of a pool's layers that are in it; with 1 and
            no mix all are on the GPU. part: share of the model's layers that this is about, where several devices have
            some each (`running.py`); then `mix` is of these alone.
        ram: share of the other bytes that is in RAM; the rest is read from the disk. cpu: whether the CPU computes
            a share of absent rows. mix: layers of each kind; None: all alike. kv_bits: of keys and values. keys: bytes
            of the device that these can have, the others are read over the link; None: all.
    """

    gpu: bool
    pool: float = 0.0
    ram: float = 1.0
    cpu: bool = True
    mix: Mix | None = None
    kv_bits: int = 16
    keys: int | None = None
    part: float = 1.0

    def kinds(self, takes: Footprint, work: TokenWork) -> list[tuple[ExpertsPlace, int, TokenWork]]:
        """How many layers there are of each kind beside a GPU, and a token's work in them."""
        layers = takes.sizes.layers
        mix = self.mix or (Mix(pool=layers) if self.pool < 1 else Mix(gpu=layers))
        counts: tuple[tuple[ExpertsPlace, int], ...] = (("gpu", mix.gpu), ("pool", mix.pool), ("cpu", mix.cpu))
        return [(kind, count, work.over(mix.of(kind)) if work.layers else work) for kind, count in counts if count]


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
        kv = kv_bytes(takes.sizes, held.kv_bits)
        there, seen = held.part * kv.of(context), held.part * kv.seen(context)
        far = 0 if held.keys is None or not there else seen * max(0.0, 1 - held.keys / there)
        # The device reads what is in RAM where it is.
        attending = (seen - far) / speeds.gpu + (far / speeds.link if far else 0.0)
        # A state is read and written, and now and then copied to RAM, for which the device waits.
        attending += held.part * state_bytes(takes.sizes) * (2 / speeds.gpu + 1 / EVERY / COPIED)
        token = _on_gpu(takes, work, speeds, held, curve or figures().hits, attending)
        more = held.part * _library(takes.sizes)
        return dataclasses.replace(token, host=token.host + more, disk=token.disk + table_reads(takes, speeds))
    seen = kv_bytes(takes.sizes, held.kv_bits, kv_element(takes.spec.dense, takes.sizes)).seen(context)
    token = _on_cpu(takes, work, speeds, held, seen)
    more = state_bytes(takes.sizes) / speeds.states + _library(takes.sizes)
    more *= held.part
    return dataclasses.replace(token, host=token.host + more, disk=token.disk + table_reads(takes, speeds))


def table_reads(takes: Footprint, speeds: Speeds) -> float:
    """Seconds in which a token's rows of tables are read, as if none was in RAM. A row that the disk looks for takes
    about as long as `READ_THROUGH` bytes of a large read.
    """
    looked = sum(count for *_, count in takes.sizes.tables)
    return len(takes.sizes.tables) * LEAST_READ + looked * READ_THROUGH / speeds.disk


def _library(sizes: Sizes) -> float:
    """Seconds that transformers' own modules add to a token, of a model for which there is nothing else."""
    slow = sizes.counted is not None and sizes.counted.library
    return sizes.decoder_layers * figures().host_library_s if slow else 0.0


def host_times(speeds: Speeds) -> HostTimes:
    """What plans count for the engine's own code beside a GPU."""
    own = speeds.host_gpu, speeds.host_ram, speeds.host_pool, speeds.host_behind
    return HostTimes(*own, figures().host_ahead_s, figures().host_fetch_s)


def _on_cpu(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, seen: int) -> Token:
    sizes, spec = takes.sizes, takes.spec
    calls = sizes.layers * sizes.top_k * work.calls
    dense = sizes.layers * takes.attention / speeds.of_cpu("dense", spec.dense, sizes.hidden)
    # Our own pass reads little more of a coded head than its first plane.
    planes = 2 if spec.dense < 16 else 1
    dense += takes.head / planes / speeds.of_cpu("dense", max(8, spec.dense), sizes.hidden)
    # Routers, norms and the like are float32 on a CPU: in Qwen3-Next half as much as what a token reads of experts.
    dense += (4 * sizes.small + seen) / speeds.read
    disk, hit = disk_reads(takes, work, held.ram)
    return Token(
        dense=dense,
        up=calls * speeds.up_s(takes),
        rows=calls * sizes.intermediate * work.active * work.read * speeds.row_s(takes),
        disk=disk / speeds.disk,
        host=sizes.layers * (speeds.host_pool + speeds.host_behind if hit else speeds.host),
        hit=hit,
        moved=0.0,
    )


def disk_reads(takes: Footprint, work: TokenWork, ram: float, pages: float | None = None) -> tuple[float, float]:
    """What a token reads from the disk, in bytes of a large read, if RAM has the share `ram` of the experts; and the
    share of rows found in RAM, 0 where the system's cache is used.

    Where RAM has room for the up projections, they and the rows used most may be kept there (`disk_tier.py`). Else the
    system reads what it dropped, with neighbouring pages: of a used expert nearly all. The lesser counts.

    Args:
        pages: what the system's cache has room for; None: the same share.
    """
    calls = takes.sizes.layers * takes.sizes.top_k * work.calls
    pages = min(1.0, ram if pages is None else pages)
    whole = (1 - pages) * calls * (takes.up + takes.sizes.intermediate * takes.row)
    pool = (ram * (takes.ups + takes.rows) - takes.ups) / takes.rows
    if pool <= 0:
        return whole, 0.0
    hit = at(figures().hits, min(1.0, pool))
    rows = (1 - hit) * calls * takes.sizes.intermediate * work.active * takes.row / SCATTERED
    return (rows, hit) if rows < whole else (whole, 0.0)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer beside a GPU, for one token.

    Attributes:
        dense, up, rows, host: seconds, as in `Token`. hit: share of its rows that are found on the GPU. moved: bytes
            over the link. away: bytes that would be read from the disk if nothing was in RAM.
    """

    dense: float
    up: float
    rows: float
    host: float
    hit: float = 1.0
    moved: float = 0.0
    away: float = 0.0

    @property
    def seconds(self) -> float:
        """Without what is read from the disk."""
        return self.dense + self.up + self.rows + self.host


def dense_launches(sizes: Sizes) -> int:
    """Kernels in the graph of one layer before its experts."""
    family, latent = FAMILIES.get(sizes.model_type), sizes.latent
    more = SHARED_LAUNCHES * bool(sizes.shared) + GATE_LAUNCHES * bool(sizes.shared_gate)
    if latent is not None:
        more += LATENT_LAUNCHES + ASKED_LAUNCHES * bool(latent.queries)
    if family is not None:
        more += SANDWICH_LAUNCHES * (family.sandwich is not None)
    return DENSE_LAUNCHES + more


def layer_time(
    takes: Footprint,
    work: TokenWork,
    speeds: Speeds,
    place: ExpertsPlace,
    pool: float = 0.0,
    *,
    cpu: bool = True,
    curve: Curve | None = None,
    rates: Rates | None = None,
    alone: bool = False,
) -> LayerTime:
    """One layer of a kind; pool, cpu: see `Held`. curve: see `decode`. rates: `speeds.rates`, where they are known.

    alone: whether all layers are on the GPU, so that a token is one graph. Else each layer is one, with its search for
    active neurons where its rows are in a pool; experts that are all on the GPU are launched one kernel after another.
    """
    dense = takes.attention / speeds.of_gpu("signal", takes.spec.dense)
    dense += (not alone) * speeds.launch + dense_launches(takes.sizes) * speeds.node
    if place == "cpu":
        return _by_cpu(takes, work, speeds, dense)
    wanted, row, reads = _wanted(takes, work), takes.row, speeds.of_rows(takes, work)
    up = takes.sizes.top_k * work.calls * takes.up / speeds.of_gpu("signal", takes.spec.up)
    if place == "gpu":
        own = wanted * row * work.read / reads + LAUNCHES["experts_step"] * (speeds.node if alone else speeds.launch)
        # The host never waits for the device: the slower of the two counts.
        return LayerTime(dense, up, own, max(0.0, speeds.host_gpu - dense - up - own))
    hit = at(curve or figures().hits, pool)
    absent, host = wanted * (1 - hit), speeds.host_pool
    up += FIND_LAUNCHES * speeds.node
    own = wanted * hit * row * work.read / reads + speeds.launch + SUM_LAUNCHES * speeds.node
    end, copied = _absent_end(absent, row, rates or speeds.rates(takes, work), cpu, work)
    away = (1 - hit) * takes.sizes.top_k * work.calls * takes.sizes.intermediate * row
    # The device and the link work behind half of the rest of the host's own time; the other half follows when their
    # rows are there. What is fetched ahead where that pays is not counted.
    later = speeds.host_behind / 2
    return LayerTime(dense, up, max(own, end, later), host + later, hit, copied * row, away)


def _by_cpu(takes: Footprint, work: TokenWork, speeds: Speeds, dense: float) -> LayerTime:
    """A `RamLayer`: the GPU computes up to the router, waits for the CPU, and gets its sum."""
    sizes, calls = takes.sizes, takes.sizes.top_k * work.calls
    compute = _wanted(takes, work) * work.read * speeds.row_s(takes)
    there_and_back = 2 * speeds.link_latency + 4 * speeds.launch
    host = max(0.0, speeds.host_gpu - dense) + speeds.host_ram
    # Disk reads bring neighbouring pages along: of a used expert nearly all is read.
    away = calls * (takes.up + sizes.intermediate * takes.row)
    return LayerTime(dense, calls * speeds.up_s(takes), compute + there_and_back, host, 0.0, 0.0, away)


def _wanted(takes: Footprint, work: TokenWork) -> float:
    """Active neurons of one layer and token."""
    return takes.sizes.top_k * work.calls * takes.sizes.intermediate * work.active


def _on_gpu(takes: Footprint, work: TokenWork, speeds: Speeds, held: Held, curve: Curve, attending: float) -> Token:
    """Layers as `MoELayer`, `OffloadedLayer` and `RamLayer` run them. In one with a pool: dense part, up projections
    and a wait; then the rows that are there on the GPU, beside the absent rows on the link and the CPU."""
    there = held.kinds(takes, work)
    alone = held.part == 1 and all(place == "gpu" for place, *_ in there)
    kinds = [
        (count, layer_time(takes, own, speeds, place, held.pool, cpu=held.cpu, curve=curve, alone=alone))
        for place, count, own in there
    ]

    def total(name: str) -> float:
        return sum(count * getattr(one, name) for count, one in kinds)

    head = takes.head / speeds.of_gpu("signal", max(8, takes.spec.dense))
    return Token(
        dense=total("dense") + head + attending + 2 * speeds.launch,
        up=total("up"),
        rows=total("rows"),
        disk=(1 - held.ram) * total("away") / speeds.disk,
        host=total("host"),
        hit=total("hit") / takes.sizes.layers,
        moved=total("moved"),
    )


def _absent_end(rows: float, nbytes: float, rates: Rates, cpu: bool, work: TokenWork) -> tuple[float, int]:
    """The end of both lanes and of RAM, which feeds both, and how many rows went over the link."""
    count = round(rows)
    if not count:
        return 0.0, 0
    lanes = rates.lanes(nbytes, 0.0, 1.0 if cpu else 0.0, work.read)
    on_cpu = cpu_rows(lanes, count)
    return split_end(lanes, on_cpu, count), count - on_cpu
