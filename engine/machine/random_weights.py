"""Random weights in a real model's layouts, enough of them that caches do not affect a measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from ...kernels.cpu import native
from ...kernels.layouts import RowLayout, SignalLayout, VectorLayout
from ...kernels.types import Active, Calls
from ...kernels.weights import ExpertRows, LinearWeights, SignalWeights

UNKNOWN_CACHE = 32 << 20
_ROTATION = 4  # weights used in turn are this many times larger than the last-level cache


@dataclass(frozen=True, slots=True)
class Shapes:
    """A model's sizes: H, F and the quantization group; experts used in turn, and tokens of a prefill chunk.

    `cache`: bytes that the weights must exceed; None asks the machine. `among`: experts that a token uses.
    """

    hidden: int
    neurons: int
    group: int = 64
    experts: int = 8
    tokens: int = 32
    cache: int | None = None
    among: int = 2

    def describe(self) -> str:
        """In words, for a table."""
        sizes = f"hidden {self.hidden}, {self.neurons} neurons per expert, groups of {self.group}"
        return f"{sizes}, {self.among} experts per token"

    def vector(self, bits: int) -> VectorLayout:
        """A row of H values."""
        return VectorLayout(self.hidden, bits, self.group, short=True)

    def up_bytes(self, bits: int) -> int:
        """Bytes of one expert's up projection."""
        return self.neurons * self.vector(bits).nbytes_apart

    def row_layout(self, bits: int) -> RowLayout:
        """A neuron's record, gate and down of `bits` each."""
        vector = self.vector(bits)
        return RowLayout(vector, vector, torch.bfloat16)

    def rows_bytes(self, bits: int) -> int:
        """Bytes of one expert's gate rows and down columns."""
        return self.neurons * self.row_layout(bits).nbytes


MIXTRAL = Shapes(4096, 14336)


def last_level_cache(root: Path = Path("/sys/devices/system/cpu")) -> int:
    """Bytes of all last-level caches of this machine; UNKNOWN_CACHE where the system does not tell."""
    found: dict[tuple[int, str], int] = {}
    try:
        for cache in root.glob("cpu[0-9]*/cache/index[0-9]*"):
            level, size, shared = ((cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            found[int(level), shared] = int(size.removesuffix("K")) << 10
    except (OSError, ValueError):
        return UNKNOWN_CACHE
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or UNKNOWN_CACHE


def needed(nbytes: int, cache: int, among: int = 2) -> int:
    """How many objects of `nbytes`, used `among` at a time, exceed the cache: a multiple of that."""
    return among * max(1, ceil(_ROTATION * cache / nbytes / among))


def files_in_hugepages(meminfo: Path = Path("/proc/meminfo")) -> bool:
    """Whether the system keeps files, as packs are, in huge pages: of the files that it has read, some are."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="ascii").splitlines())
        return int(lines["FileHugePages"].split()[0]) > 0
    except (OSError, ValueError, KeyError):
        return False


def filled(*shape: int, hugepages: bool = False) -> Tensor:
    """Random bytes (they repeat every MiB); with `hugepages`, asked for before they are first touched."""
    data = torch.empty(shape, dtype=torch.uint8)
    if hugepages:
        native.advise_hugepages(data)
    seed = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    for part in data.view(-1).split(seed.numel()):
        part.copy_(seed[: part.numel()])
    return data


def make_up(shapes: Shapes, bits: int, experts: int) -> SignalWeights:
    """The up projections of `experts` experts."""
    layout = SignalLayout(shapes.vector(bits), torch.bfloat16)
    heads = _heads(layout.vector, experts, shapes.neurons)
    return SignalWeights(layout, filled(experts, shapes.neurons, layout.row_bytes), *heads)


def make_rows(shapes: Shapes, bits: int, experts: int, *, hugepages: bool = False) -> ExpertRows:
    """The records of `experts` experts, gate and down of `bits` (below 16) each."""
    vector, layout = shapes.vector(bits), shapes.row_layout(bits)
    data = filled(experts, shapes.neurons, layout.nbytes, hugepages=hugepages)
    heads = vector.nearest(torch.full((vector.groups,), 0.01), torch.full((vector.groups,), (1 << bits) / 2))
    head = torch.cat([part.view(torch.uint8) for part in heads])
    for start in (0, vector.nbytes):
        data[:, :, start : start + len(head)] = head
    return ExpertRows(layout, data)


def make_linear(shapes: Shapes, bits: int) -> LinearWeights:
    """A square H × H matrix, as attention has them."""
    vector = replace(shapes.vector(bits), short=False)
    codes = filled(shapes.hidden, vector.nbytes - vector.head)
    return LinearWeights(vector, codes, *_heads(vector, shapes.hidden))


def _heads(vector: VectorLayout, *shape: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros, as stored, that make small weights around 0."""
    scale, zero = torch.rand(2, *shape, vector.groups)
    return vector.nearest(0.01 + 0.01 * scale, ((1 << vector.bits) - 1) * (0.4 + 0.2 * zero))


def next_calls(turn: int, experts: int, among: int = 2) -> Calls:
    """One token's experts: the next `among` in each turn, of a multiple of that."""
    return _calls(among * turn % experts, among)


@cache
def _calls(first: int, among: int) -> Calls:
    weights = torch.linspace(1.2, 0.8, among) / among
    return Calls(torch.zeros(among, dtype=torch.long), torch.arange(first, first + among), weights)


def random_active(share: float, neurons: int, seed: int, among: int = 2) -> Active:
    """An ascending random choice of `share` of the neurons for each expert of a token."""
    generator = torch.Generator().manual_seed(seed)
    lists = [torch.randperm(neurons, generator=generator)[: round(share * neurons)].sort().values for _ in range(among)]
    offsets = torch.tensor([0, *(chosen.numel() for chosen in lists)]).cumsum(0)
    return Active(offsets, torch.cat(lists), torch.randn(int(offsets[-1]), generator=generator))
