"""The CPU kernels at a real model's width, beside what this machine's memory delivers in the same rounds.

Operations are called as the engine calls them. Every section makes its own weights, more than the caches hold, uses
them in turn, and frees them.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ....models.errors import FloeError
from ...machine import conditions, random_weights
from ...machine.load import Others
from ...machine.random_weights import MIXTRAL, Shapes
from ..measure import Figure, MeasureReport, ResultTable, Section, measure
from . import cpu_figures as figures_of

WARM = 3
_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OWN_USE = 300 << 20  # memory for measuring, besides the weights
_SHORT = "Memory is short: fewer experts were used in turn, but still more than the caches hold."
_NO_NATIVE = (
    "Without the compiled kernels, plain torch dequantizes whole matrices for every token: each of its figures is one "
    "run without warm-up, and rows and pages are not measured."
)


@dataclass(frozen=True, slots=True)
class PlannedSection:
    """A planned section: the memory it needs, and how its figures are made."""

    title: str
    nbytes: int
    build: Callable[[], list[Figure]]


def run(
    *,
    threads: int | None = None,
    runs: int = 5,
    quick: bool = False,
    shapes: Shapes | None = None,
    report: MeasureReport = lambda _what, _done, _total: None,
) -> ResultTable:
    """Measure; `threads` None takes as many as the engine would.

    Raises:
        UsageError: more threads than cores. FloeError: too little memory, or kernels that were forced and cannot run.
    """
    shapes = shapes or MIXTRAL
    with conditions.computing(threads, shapes.hidden, shapes.neurons) as threads:
        backend = conditions.backend("cpu")
        compiled = backend.name != "reference"
        plans, notes = _affordable(shapes, threads, quick=quick, compiled=compiled)
        sections = tuple(_section(plan, runs, report) for plan in plans)
    facts = conditions.facts(
        backend,
        threads=threads,
        sizes=shapes.describe(),
        pages=_pages_told(quick=quick) if compiled else _small_pages(),
        runs=runs,
        warm_up=WARM,
    )
    return ResultTable("kernels", "cpu", facts, sections, notes if compiled else (*notes, _NO_NATIVE))


def _section(plan: PlannedSection, runs: int, report: MeasureReport) -> Section:
    report(f"{plan.title}: preparing", 0, WARM + runs)
    torch.manual_seed(0)
    figures, others = plan.build(), Others()
    rows = measure(figures, warm=WARM, runs=runs, report=lambda done, total: report(plan.title, done, total))
    return Section(plan.title, rows, others.cores())


def _affordable(
    shapes: Shapes, threads: int, *, quick: bool, compiled: bool
) -> tuple[list[PlannedSection], tuple[str, ...]]:
    """The sections and a note, with fewer experts if memory is short, but never so few that a cache holds them."""
    available = psutil.virtual_memory().available
    cache = random_weights.last_level_cache() if shapes.cache is None else shapes.cache
    wanted = 0
    for most in (shapes.experts, shapes.among):
        plans = _plans(_Counts(shapes, most, cache), threads, quick=quick, compiled=compiled)
        wanted = max(plan.nbytes for plan in plans) + _OWN_USE
        if wanted <= available:
            return plans, () if most == shapes.experts else (_SHORT,)
    raise FloeError(
        f"This benchmark needs {wanted / 1e9:.1f} GB of free memory",
        f"{available / 1e9:.1f} GB are available, and with fewer weights the caches of {cache / 1e6:.0f} MB would be "
        "measured instead of the memory.",
        "Close other programs.",
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """How many experts are used in turn: at least `least`, and more than the cache holds."""

    shapes: Shapes
    least: int
    cache: int

    def up(self, bits: int) -> int:
        return max(self.least, random_weights.needed(self.shapes.up_bytes(bits), self.cache, self.shapes.among))

    def rows(self, bits: int) -> int:
        return max(self.least, random_weights.needed(self.shapes.rows_bytes(bits), self.cache, self.shapes.among))

    def whole(self) -> int:
        nbytes = self.shapes.up_bytes(2) + self.shapes.rows_bytes(4)
        return max(self.least, random_weights.needed(nbytes, self.cache, self.shapes.among))

    def floor_bytes(self) -> int:
        return self.up(2) * self.shapes.up_bytes(2)


def _plans(counts: _Counts, threads: int, *, quick: bool, compiled: bool) -> list[PlannedSection]:
    parts = _part_plans(counts, threads, quick=quick) if compiled else []
    return parts + _whole_plans(counts, quick=quick, compiled=compiled)


def _part_plans(counts: _Counts, threads: int, *, quick: bool) -> list[PlannedSection]:
    """The sections about one compiled operation each."""
    shapes, floor = counts.shapes, counts.floor_bytes()
    up_bits, row_bits = ((2,), (4,)) if quick else ((2, 3, 4, 8), (4, 8))
    by_width = {bits: counts.up(bits) for bits in up_bits}
    up_bytes = floor + sum(count * shapes.up_bytes(bits) for bits, count in by_width.items())
    up = PlannedSection(
        f"Signals of {shapes.among} experts, 1 token", up_bytes, lambda: figures_of.up(shapes, by_width, floor)
    )
    kinds = _page_kinds()[: 1 if quick else None]
    rows = [_rows_plan(shapes, bits, counts.rows(bits), hugepages=kind) for kind in kinds for bits in row_bits]
    if threads == 1:
        return [up, *rows]
    up_scaling = PlannedSection(
        f"Threads: signals of {shapes.among} experts, 2 bit",
        floor,
        lambda: figures_of.up_by_threads(shapes, counts.up(2), threads),
    )
    rows_scaling = PlannedSection(
        f"Threads: active neurons of {shapes.among} experts, 40 %, 4-bit rows",
        counts.rows(4) * shapes.rows_bytes(4),
        lambda: figures_of.rows_by_threads(shapes, counts.rows(4), threads),
    )
    return [up, up_scaling, *rows, rows_scaling]


def _whole_plans(counts: _Counts, *, quick: bool, compiled: bool) -> list[PlannedSection]:
    """The sections about whole layers, which any backend can run."""
    shapes, floor, experts = counts.shapes, counts.floor_bytes(), counts.whole()
    stored = experts * (shapes.up_bytes(2) + shapes.rows_bytes(4))
    matrix = shapes.hidden * shapes.neurons
    matrices = max(8, random_weights.needed(shapes.hidden * shapes.vector(8).nbytes, counts.cache))
    widths = "2-bit signal, 4-bit rows"
    return [
        PlannedSection(
            f"MoE step, {shapes.among} experts, 1 token, {widths} (dense int4: torch's own)",
            stored + 2 * matrix * experts,
            lambda: figures_of.step(shapes, experts, compiled=compiled),
        ),
        PlannedSection(
            f"Attention matrices {shapes.hidden} x {shapes.hidden}, 1 token",
            2 * matrices * shapes.hidden * shapes.hidden + floor,
            lambda: figures_of.linear(shapes, (8,) if quick else (8, 4), matrices, floor, compiled=compiled),
        ),
        PlannedSection(
            f"Prefill: {shapes.tokens} tokens through 1 expert, {widths}",
            # The reference holds the expert in float32, and one matrix twice while it is made.
            stored + 6 * 4 * matrix,
            lambda: figures_of.prefill(shapes, experts, compiled=compiled),
        ),
    ]


def _rows_plan(shapes: Shapes, bits: int, experts: int, *, hugepages: bool) -> PlannedSection:
    pages = "huge pages" if hugepages else _small_pages()
    return PlannedSection(
        f"Active neurons of {shapes.among} experts, {bits}-bit rows, {pages}",
        experts * shapes.rows_bytes(bits),
        lambda: figures_of.rows(shapes, bits, experts, hugepages=hugepages),
    )


def _small_pages() -> str:
    return f"{mmap.PAGESIZE >> 10}K pages"


def _page_kinds() -> tuple[bool, ...]:
    """The page sizes available for a large tensor: small, huge."""
    try:
        mode = _HUGE.read_text(encoding="utf-8")
    except OSError:
        return (False,)
    return (True,) if "[always]" in mode else (False, True) if "[madvise]" in mode else (False,)


def _pages_told(*, quick: bool) -> str:
    kinds = _page_kinds()
    if quick and kinds == (False, True):
        return _small_pages()
    if kinds == (True,):
        return "huge pages everywhere, since this system always gives them"
    return f"{_small_pages()}, {'huge pages where named' if True in kinds else 'this system gives no huge ones'}"
