"""This machine's speeds, measured once and saved: memory, our CPU kernels, the link to the GPU, the disk.

Figures are bytes per second under names such as "rows 4 bit"; "gpu flops" are operations, and `COUNTED` kernels. If one
cannot be measured, a reason takes its place. Everything takes a few seconds at most.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch

from ...kernels import operations as kernels
from ...kernels.cpu.native_step import NativeStep, Place, placed
from ...kernels.layouts import RowLayout
from ...kernels.mixers.delta import Delta
from ...kernels.step import DenseLayer, Swiglu
from ...kernels.types import Calls
from ...kernels.weights import ExpertRows, Norm, Projection
from ...models.quantities import trimmed
from .. import quality_presets
from ..decoder import graphs
from ..machine import gpus, hardware, load, random_weights, read_floor, saved_figures
from ..machine.conditions import computing
from ..machine.disk import read_rate
from ..machine.random_weights import MIXTRAL, Shapes
from ..offload.lane_rates import Rates
from ..outcomes import brief

READ, STATES, DISK, PINNED, PAGEABLE, GPU, FLOPS, LAUNCHES, NODES = (
    "memory read",
    "states",
    "disk read",
    "link pinned",
    "link pageable",
    "gpu",
    "gpu flops",
    "gpu launches",
    "in a graph",
)
COUNTED = LAUNCHES, NODES
GPU_REACHED = 0.7  # share of a copy within the GPU that kernels on codes reach (see cards.REACHED)
# A threshold that no neuron of random weights reaches. It is finite: a call with an infinite one is left out whole.
UNREACHED = 1e9
UP_WIDTHS, ROW_WIDTHS, DENSE_WIDTHS = (2, 3, 4), (2, 3, 4), (4, 8)

Work = Callable[[int], int]  # turn -> bytes that count; other weights in each turn

WAITING = "waiting for a quiet moment"
_READING = "up", "rows", "dense"
_TAPS = 4
_TURNS = 5
_REPEATS = 2  # of what other programs disturbed
_PATIENCE, _LISTENING = 16, 0.5  # how often the load is looked at before each, and over how many seconds
_LEAST, _MOST = 64 << 20, 256 << 20  # bytes that CPU kernels work through: twice the last cache, within these
_BATCH_TOKENS, _BATCH_NEURONS = 32, 1024
_COPIED = 256 << 20
_SQUARE = 4096  # size of the matrices whose product measures the GPU's arithmetic
_CHAIN = 512  # kernels, each of which waits for the one before: about a token's


@dataclass(frozen=True, slots=True)
class Measured(saved_figures.Record):
    """Rates by name, reasons for missing ones, the time (ISO 8601), and how many cores other programs kept busy
    meanwhile.
    """

    rates: Mapping[str, saved_figures.Rate]
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])
    date: str = ""
    busy: float = 0.0

    @property
    def disturbed(self) -> bool:
        """Whether other programs made these rates too low."""
        return self.busy > load.BUSY


def kept_file() -> Path:
    """The file with this machine's rates."""
    return saved_figures.rates_folder() / f"{hardware.machine_id()}-machine.json"


def reliable() -> Measured | None:
    """The saved rates; None if there are none, or if other programs disturbed them, so that they are measured again."""
    saved = Measured.load(kept_file())
    return None if saved is None or saved.disturbed else saved


def measure(folder: Path, report: Callable[[str], None]) -> Measured:
    """Measure everything, on the first GPU and on the disk of `folder`, and save it. What other programs disturbed is
    measured again behind the rest, at a quiet moment if one comes soon; the better rate counts.
    """
    rates: dict[str, float] = {}
    reasons: dict[str, str] = {}
    with computing(None, MIXTRAL.hidden, MIXTRAL.neurons):
        left, busy = list(_probes(folder)), dict[str, float]()
        for turn in range(1 + _REPEATS):
            if turn and left:
                _await_quiet(report)
            for name, work in left:
                report(f"{name}, again: other programs were busy" if turn else name)
                others = load.Others()
                try:
                    rates |= {what: max(rate, rates.get(what, 0.0)) for what, rate in work().items()}
                # A failed probe becomes a line of the report, whatever it raised; drivers raise anything.
                except Exception as error:  # noqa: BLE001
                    reasons[name] = brief(error)
                busy[name] = others.cores()
            left = [(name, work) for name, work in left if busy[name] > load.BUSY and name not in reasons]
    # What a kernel reads, memory gives.
    if READ in rates:
        rates[READ] = max(rate for name, rate in rates.items() if name == READ or name.startswith(_READING))
    date = datetime.now(UTC).isoformat(timespec="seconds")
    measured = Measured(rates, reasons, date, max((busy[name] for name, _ in left), default=0.0))
    measured.save(kept_file())
    return measured


def _await_quiet(report: Callable[[str], None]) -> None:
    """Until other programs leave the CPU alone, or for as long as a person may wait."""
    for _ in range(_PATIENCE):
        others = load.Others()
        time.sleep(_LISTENING)
        if (busy := others.cores()) <= load.BUSY:
            return
        report(f"{WAITING}: other programs keep {trimmed(busy, 2)} cores busy")


def measured_rates(layout: RowLayout, neurons: int, guess: Rates, place: str = "cpu") -> Rates:
    """Initial rates for rows of this layout; those of the CPU and the GPU `place` are measured, in about 0.5 s and the
    second that wakes the GPU.

    Args:
        neurons: of one expert. guess: for what is not measured here, above all the link.
    """
    hidden = layout.other.n
    with computing(None, hidden, neurons):
        rows = row_rate(layout, min(neurons, MIXTRAL.neurons))
        batch = batch_rate(Shapes(hidden, min(neurons, _BATCH_NEURONS), layout.other.group), _code_bits(layout))
    rates = dataclasses.replace(guess, cpu_bytes_s=rows, cpu_batch_bytes_s=batch)
    if place != "cpu":
        rates.gpu_bytes_s = GPU_REACHED * gpu_rate(place)
    return rates


def memory_rate() -> float:
    """Bytes per second of a plain read of RAM: saved, or measured (about 0.5 s)."""
    saved = reliable()
    if saved is not None and READ in saved.rates:
        return saved.rates[READ]
    with computing(None, MIXTRAL.hidden, MIXTRAL.neurons):
        return _read()


def row_rate(layout: RowLayout, neurons: int, share: float = 0.5) -> float:
    """Bytes per second of rows that the CPU computes for one token, a random `share` of an expert active."""
    return best_rate(row_work(layout, neurons, share))


def row_work(layout: RowLayout, neurons: int, share: float = 0.5) -> Work:
    """The work of `row_rate`."""
    neurons = max(1, min(neurons, _MOST // 4 // layout.nbytes))  # wide rows are slow to make
    rows = ExpertRows(layout, _records(layout, _pairs(neurons * layout.nbytes), neurons))
    active = random_weights.random_active(share, neurons, 0)
    x = torch.randn(1, layout.other.n)

    def work(turn: int) -> int:
        kernels.sparse_swiglu(x, rows, random_weights.next_calls(turn, len(rows.data)), active, x_bits=_x_bits())
        return active.neurons.numel() * layout.nbytes

    return work


def up_rate(shapes: Shapes, bits: int) -> float:
    """Bytes per second of up projections, for one token."""
    return best_rate(up_work(shapes, bits))


def up_work(shapes: Shapes, bits: int) -> Work:
    """The work of `up_rate`."""
    up = random_weights.make_up(shapes, bits, _pairs(shapes.up_bytes(bits)))
    x, limits = torch.randn(1, shapes.hidden), torch.full((2,), UNREACHED)

    def work(turn: int) -> int:
        kernels.signal_gemv(x, up, random_weights.next_calls(turn, len(up.q)), limits, x_bits=_x_bits())
        return 2 * up.bytes_per_expert()

    return work


def dense_rate(shapes: Shapes, bits: int) -> float:
    """Bytes per second of attention projections, for one token."""
    return best_rate(dense_work(shapes, bits))


def dense_work(shapes: Shapes, bits: int) -> Work:
    """The work of `dense_rate`."""
    count = _pairs(shapes.hidden * shapes.vector(bits).nbytes)
    layers = [random_weights.make_linear(shapes, bits) for _ in range(count)]
    x = torch.randn(1, shapes.hidden)

    def work(turn: int) -> int:
        kernels.linear(x, layers[turn % count], x_bits=_x_bits())
        return shapes.hidden * shapes.vector(bits).nbytes

    return work


def batch_rate(shapes: Shapes, bits: int) -> float:
    """Bytes of rows times tokens per second, where tokens share an expert half of whose neurons are active."""
    return best_rate(batch_work(shapes, bits), turns=3)


def batch_work(shapes: Shapes, bits: int) -> Work:
    """The work of `batch_rate`."""
    up, rows = random_weights.make_up(shapes, min(bits, 8), 1), random_weights.make_rows(shapes, min(bits, 8), 1)
    x = torch.randn(_BATCH_TOKENS, shapes.hidden)
    one = Calls(torch.tensor([0]), torch.tensor([0]), torch.tensor([1.0]))
    limit = float(kernels.signal_gemv(x[:1], up, one, torch.tensor([0.0])).values.abs().median())

    def work(_turn: int) -> int:
        kernels.expert_swiglu(x, up, rows, 0, x.new_full(x.shape[:1], limit), x_bits=_x_bits())
        return rows.data.nbytes * len(x)

    return work


def gpu_rate(place: str) -> float:
    """Bytes per second of a copy within device memory, both sides counted."""
    gpus.wake(place)
    source = torch.empty(_COPIED, dtype=torch.uint8, device=place)
    target = torch.empty_like(source)

    def work(_turn: int) -> int:
        target.copy_(source)
        _finish(place)
        return 2 * _COPIED

    return best_rate(work)


def link_rate(place: str, *, pinned: bool) -> float:
    """Bytes per second of one large copy from RAM to the device."""
    gpus.wake(place)
    source = torch.ones(_COPIED, dtype=torch.uint8)
    source = source.pin_memory() if pinned and place != "cpu" else source  # a test has no GPU
    target = torch.empty(_COPIED, dtype=torch.uint8, device=place)

    def work(_turn: int) -> int:
        target.copy_(source, non_blocking=True)
        _finish(place)
        return _COPIED

    return best_rate(work)


def gpu_flops(place: str) -> float:
    """Operations per second of a large 16-bit product."""
    one = torch.randn(_SQUARE, _SQUARE, device=place, dtype=torch.float16)

    def work(_turn: int) -> int:
        torch.mm(one, one)
        _finish(place)
        return 2 * _SQUARE**3

    return best_rate(work)


def launch_rate(place: str, *, graph: bool) -> float:
    """Kernels per second that do next to nothing, launched one by one or as one CUDA graph.

    Raises:
        RuntimeError, and others: the driver does not capture; see `graphs.capture`.
    """
    one = torch.zeros(64, device=place)

    def chain() -> tuple[torch.Tensor, ...]:
        for _ in range(_CHAIN):
            one.add_(1)
        return (one,)

    started = graphs.capture(chain, one.device).replay if graph else chain

    def work(_turn: int) -> int:
        started()
        _finish(place)
        return _CHAIN

    return best_rate(work)


def _probes(folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    yield READ, lambda: {READ: _read()}
    for bits in UP_WIDTHS:
        yield f"up {bits} bit", lambda bits=bits: {f"up {bits} bit": up_rate(MIXTRAL, bits)}
    for bits in ROW_WIDTHS:
        layout = MIXTRAL.row_layout(bits)
        yield (
            f"rows {bits} bit",
            lambda bits=bits, layout=layout: {f"rows {bits} bit": row_rate(layout, MIXTRAL.neurons)},
        )
    for bits in DENSE_WIDTHS:
        yield f"dense {bits} bit", lambda bits=bits: {f"dense {bits} bit": dense_rate(MIXTRAL, bits)}
    yield STATES, lambda: {STATES: best_rate(state_work())}
    shapes = Shapes(MIXTRAL.hidden, _BATCH_NEURONS)
    yield "prompt 4 bit", lambda: {"prompt 4 bit": batch_rate(shapes, 4)}
    if gpus.of_torch()[0]:
        place = "cuda:0"
        yield PINNED, lambda: {PINNED: link_rate(place, pinned=True)}
        yield PAGEABLE, lambda: {PAGEABLE: link_rate(place, pinned=False)}
        yield GPU, lambda: {GPU: gpu_rate(place)}
        yield FLOPS, lambda: {FLOPS: gpu_flops(place)}
        yield LAUNCHES, lambda: {LAUNCHES: launch_rate(place, graph=False)}
        yield NODES, lambda: {NODES: launch_rate(place, graph=True)}
    yield DISK, lambda: {DISK: read_rate(folder)}


def state_work() -> Work:
    """The work of states that gated delta rules bring a token further, with all that such a layer does besides its
    projections: at Qwen3.6's sizes, and with a narrow stream, so that projections cost next to nothing. Layers take
    turns, so that no state is in a cache.
    """
    heads, shared, width, hidden = 32, 16, 128, 16
    channels = (2 * shared + heads) * width
    small = Projection(torch.randn(2 * heads, hidden))
    each = torch.rand(heads), torch.randn(heads), torch.ones(width), 1e-6, small
    mixer = Delta(heads, shared, width, width, torch.randn(_TAPS, channels), *each)
    into, out, gate_up, down = (
        Projection(torch.randn(rows, columns))
        for rows, columns in ((channels + heads * width, hidden), (hidden, heads * width), (2, hidden), (hidden, 1))
    )
    norm = Norm(torch.ones(hidden))
    layer = DenseLayer(norm, norm, 1e-6, mixer, into, out, None, Swiglu(gate_up, down))
    states = [torch.zeros(2, mixer.state) for _ in range(_pairs(8 * mixer.state))]
    steps, rope, x = [NativeStep(layer) for _ in states], torch.zeros(2, width), torch.randn(1, hidden)

    def work(turn: int) -> int:
        where = placed(steps, [Place(rope, states, turn)])
        for number, step in enumerate(steps):
            step.together(number, x, None, where)
        return 4 * mixer.state * len(states)

    return work


def _read() -> float:
    reader = read_floor.reader("cpu")
    if reader is None:
        data = random_weights.filled(read_floor.LEAST)
        return best_rate(lambda _turn: int(data.view(torch.int64).sum() * 0) + data.nbytes)
    return max(nbytes / seconds for seconds, nbytes in (reader() for _ in range(_TURNS)))


def best_rate(work: Work, turns: int = _TURNS) -> float:
    """The best of several runs after a warm-up: disturbances say nothing about the machine."""
    work(0)
    rates: list[float] = []
    for turn in range(1, turns + 1):
        begun = time.perf_counter()
        nbytes = work(turn)
        rates.append(nbytes / (time.perf_counter() - begun))
    return max(rates)


def _records(layout: RowLayout, experts: int, neurons: int) -> torch.Tensor:
    data = random_weights.filled(experts, neurons, layout.nbytes)
    for start, vector in ((0, layout.other), (layout.down_at, layout.down)):
        part = data[:, :, start : start + vector.nbytes]
        if not vector.bits:
            continue
        if vector.bits == 16:
            part.view(layout.float16).copy_(torch.randn(vector.n).to(layout.float16))
        else:
            heads = vector.nearest(*torch.full((2, vector.groups), 0.01))
            head = torch.cat([one.view(torch.uint8) for one in heads])
            part[:, :, : len(head)] = head
    return data


def _pairs(nbytes: int) -> int:
    """How many objects of `nbytes` to work through, an even number: more than the last cache holds."""
    wanted = min(max(2 * random_weights.last_level_cache(), _LEAST), _MOST)
    return max(2, 2 * math.ceil(wanted / nbytes / 2))


def _code_bits(layout: RowLayout) -> int:
    return min(layout.other.bits or layout.down.bits, layout.down.bits)


def _x_bits() -> int:
    return next(preset.x_bits for preset in quality_presets.PRESETS if preset.name == quality_presets.DEFAULT)


def _finish(place: str) -> None:
    torch.get_device_module(place).synchronize(place)
