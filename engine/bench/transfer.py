"""Moving rows: packing absent ones into a buffer, and on a GPU copying them there (FloE section 4.1, figure 7).

A random fifth of one expert's neurons is moved, `chunk` neurons at a time, from another expert each time so that none
is in a cache. For comparison, in the same rounds: a linear read of memory, or one large copy to the GPU.
To a GPU rows go staged, packed into a buffer that is copied, and in place, where its kernels read pinned RAM.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...kernels import operations as kernels
from ...kernels.weights import ExpertRows
from ..machine import gpus, random_weights
from ..machine.conditions import backend, computing, facts
from ..machine.load import Others
from ..machine.random_weights import MIXTRAL, Shapes
from ..machine.read_floor import READ, reader
from ..offload.links.pinning import PinError, Pinned, why_not
from .measure import Figure, MeasureReport, ResultTable, Section, measure
from .synthetic import need_memory

WARM = 3
SHARE = 0.2  # of an expert's neurons
CHUNKS = (1, 5, 10, 25, 50, 100, 500, 2000)
STREAMS = (1, 2, 4)
IN_PLACE_STREAMS = 2  # as the engine's link has
COPY = "memcpy"
LINK = "one large copy (floor)"
_QUICK = (5, 50, 500)
_TORCH = "torch index_select"
NAIVE = f"{_TORCH}, copied"
PAPER = (
    "FloE's figure 7 (RTX 3090, PCIe 4.0, 64 cores at 2.3 GHz, 20 % of an expert's 16-bit rows, DRAM to VRAM): up to "
    "88 % of the link's measured peak, 12.6x torch's own way, best at chunks of 50 neurons."
)


def run(
    *,
    threads: int | None = None,
    runs: int = 5,
    quick: bool = False,
    shapes: Shapes | None = None,
    gpu: str | None,
    no_gpu: str = "",
    report: MeasureReport = lambda _what, _done, _total: None,
) -> ResultTable:
    """Measure.

    Args:
        quick: 4-bit rows and three chunk sizes. gpu: a CUDA device, None where there is none; `no_gpu` says why.

    Raises:
        UsageError: more threads than cores. FloeError: too little memory.
    """
    shapes = shapes or MIXTRAL
    cache = random_weights.last_level_cache() if shapes.cache is None else shapes.cache
    widths = (4,) if quick else (4, 16)
    most = max(_experts(shapes, bits, cache) * shapes.rows_bytes(bits) for bits in widths)
    need_memory(most, "The rows", "Try --quick.")
    sections: list[Section] = []
    notes: list[str] = [] if gpu else [f"Copies to a GPU and reading in place were not measured: {no_gpu}."]
    with computing(threads, shapes.hidden, shapes.neurons) as threads:
        chosen = backend("cpu")
        for bits in widths:
            rows = rows_of(shapes, bits, _experts(shapes, bits, cache))
            moved = round(SHARE * shapes.neurons)
            chunks = [*(chunk for chunk in (_QUICK if quick else CHUNKS) if chunk < moved), moved]
            title = f"Packing 20 % of an expert, {bits}-bit rows, by neurons in a chunk"
            sections.append(_section(title, packing(rows, chunks), runs, report))
            if gpu:
                title = f"To the GPU, {bits}-bit rows, by neurons in a chunk and streams"
                with pinned(rows.data, gpu) as obstacle:
                    gpus.wake(gpu)
                    figures = copying(rows, chunks, gpu) + ([] if obstacle else in_place(rows, chunks, gpu))
                    sections.append(_section(title, figures, runs, report))
                if obstacle:
                    notes.append(f"Reading {bits}-bit rows in place was not measured: {obstacle}.")
            del rows
    told = facts(
        chosen,
        threads=threads,
        gpu=torch.get_device_module(gpu).get_device_name(gpu) if gpu else f"none: {no_gpu}",
        sizes=shapes.describe(),
        runs=runs,
        warm_up=WARM,
    )
    return ResultTable("transfer", "cuda" if gpu else "cpu", told, tuple(sections), (*notes, PAPER))


def packing(rows: ExpertRows, chunks: list[int]) -> list[Figure]:
    """`gather_rows` into a buffer by chunk, compared with a contiguous copy of as many bytes and torch's own way."""
    experts, neurons, nbytes = rows.data.shape
    chosen = chosen_of(neurons)
    target = torch.empty(chosen.numel(), nbytes, dtype=torch.uint8)

    def copied(turn: int) -> int:
        target.copy_(rows.data[turn % experts, : chosen.numel()])
        return target.nbytes

    def indexed(turn: int) -> int:
        torch.index_select(rows.data[turn % experts], 0, chosen, out=target)
        return target.nbytes

    def packed(turn: int, chunk: int) -> int:
        for wanted, place in zip(chosen.split(chunk), target.split(chunk), strict=True):
            kernels.gather_rows(rows, turn % experts, wanted, place)
        return target.nbytes

    floor = [Figure(READ, lambda _turn: read()[1], inner=1)] if (read := reader("cpu")) else []
    named = READ if floor else None
    known = [Figure(COPY, copied, named), Figure(_TORCH, indexed, named)]
    return [*floor, *known] + [
        Figure(_name(chunk, chosen), lambda turn, chunk=chunk: packed(turn, chunk), named, _TORCH) for chunk in chunks
    ]


def copying(rows: ExpertRows, chunks: list[int], gpu: str) -> list[Figure]:
    """Staged: packing into pinned memory and copying from there, chunk after chunk on one to several streams."""
    experts, neurons, nbytes = rows.data.shape
    chosen = chosen_of(neurons)
    cuda = gpu != "cpu"  # a test has no GPU
    buffer = torch.empty(chosen.numel(), nbytes, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(chosen.numel(), nbytes, dtype=torch.uint8, device=gpu)
    large = torch.empty(rows.data[0].shape, dtype=torch.uint8, pin_memory=cuda)
    landing = torch.empty(large.shape, dtype=torch.uint8, device=gpu)
    card = torch.get_device_module(gpu)
    streams: list[Any] = [card.Stream(gpu) for _ in range(max(STREAMS))]

    def at_once(_turn: int) -> int:
        landing.copy_(large, non_blocking=True)
        card.synchronize(gpu)
        return large.nbytes

    def from_torch(turn: int) -> int:
        target.copy_(rows.data[turn % experts].index_select(0, chosen))
        card.synchronize(gpu)
        return target.nbytes

    def in_chunks(turn: int, chunk: int, count: int) -> int:
        parts = zip(chosen.split(chunk), buffer.split(chunk), target.split(chunk), strict=True)
        for index, (wanted, packed, place) in enumerate(parts):
            kernels.gather_rows(rows, turn % experts, wanted, packed)
            with card.stream(streams[index % count]):
                place.copy_(packed, non_blocking=True)
        card.synchronize(gpu)
        return target.nbytes

    figures = [Figure(LINK, at_once), Figure(NAIVE, from_torch, LINK)]
    for chunk in chunks:
        for count in STREAMS:
            streams_told = "1 stream" if count == 1 else f"{count} streams"

            def work(turn: int, chunk: int = chunk, count: int = count) -> int:
                return in_chunks(turn, chunk, count)

            figures.append(Figure(f"{_name(chunk, chosen)}, {streams_told}", work, LINK, NAIVE))
    return figures


def in_place(rows: ExpertRows, chunks: list[int], gpu: str) -> list[Figure]:
    """The GPU's kernels read pinned rows in place, chunk after chunk; measured in the same rounds as `copying`."""
    experts, neurons, nbytes = rows.data.shape
    chosen = chosen_of(neurons)
    target = torch.empty(chosen.numel(), nbytes, dtype=torch.uint8, device=gpu)
    wanted, card = chosen.to(gpu), torch.get_device_module(gpu)
    streams: list[Any] = [card.Stream(gpu) for _ in range(IN_PLACE_STREAMS)]
    # Without argument checks, which would wait for the GPU to read values.
    gather = kernels.choose(gpu).gather_rows

    def read(turn: int, chunk: int) -> int:
        for index, (those, place) in enumerate(zip(wanted.split(chunk), target.split(chunk), strict=True)):
            with card.stream(streams[index % len(streams)]):
                gather(rows, turn % experts, those, place)
        card.synchronize(gpu)
        return target.nbytes

    return [
        Figure(f"{_name(chunk, chosen)}, in place", lambda turn, chunk=chunk: read(turn, chunk), LINK, NAIVE)
        for chunk in chunks
    ]


@contextmanager
def pinned(rows: Tensor, gpu: str) -> Generator[str]:
    """Inside, the GPU may read these rows; yields why it cannot, or ""."""
    obstacle, held = why_not(gpu, rows.nbytes), None
    if not obstacle:
        try:
            held = Pinned([rows], torch.device(gpu))
        except PinError as error:
            obstacle = str(error)
    try:
        yield obstacle
    finally:
        if held is not None:
            held.release()


def _section(title: str, figures: list[Figure], runs: int, report: MeasureReport) -> Section:
    others = Others()
    rows = measure(figures, warm=WARM, runs=runs, report=lambda done, total: report(title, done, total))
    return Section(title, rows, others.cores())


def _name(chunk: int, chosen: Tensor) -> str:
    return "all at once" if chunk >= chosen.numel() else f"{chunk} neurons" if chunk > 1 else "1 neuron"


def _experts(shapes: Shapes, bits: int, cache: int) -> int:
    """Enough that the rows moved from all of them exceed the caches."""
    return random_weights.needed(round(SHARE * shapes.rows_bytes(bits)), cache)


def rows_of(shapes: Shapes, bits: int, experts: int) -> ExpertRows:
    """Rows as they are in a pack; their content does not matter for a copy."""
    layout = shapes.row_layout(bits)
    return ExpertRows(layout, random_weights.filled(experts, shapes.neurons, layout.nbytes))


def chosen_of(neurons: int) -> Tensor:
    """The neurons to move, ascending."""
    return random_weights.random_active(SHARE, neurons, 0).neurons[: round(SHARE * neurons)]
