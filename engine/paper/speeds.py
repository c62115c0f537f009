"""Times of single parts: measured where this machine has the part, simulated where a card is needed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...kernels import operations as kernels
from ...kernels.rule import NOTHING, Rule
from ...models.catalog import described
from ..bench import transfer
from ..bench.cards.baselines import EXPERT_LAUNCHES
from ..bench.kernels.gpu_expert import SPARSITIES, Expert, Stopwatch, make_expert, one_call
from ..bench.measure import Figure, measure
from ..bench.synthetic import need_memory, shapes_of
from ..machine import gpus
from ..machine.conditions import cpu
from ..machine.load import BUSY, Others
from ..machine.random_weights import Shapes
from ..offload.cards import Card, named
from ..quality.references import NO_SPARSITY, use
from ..quality_presets import Preset
from . import exchange
from .papers import Cells, Grid, Made
from .study import Study

_WARM, _RUNS = 1, 5
TOKENS = (1, 2, 4, 8, 16, 32, 64)


def shapes(study: Study) -> Shapes:
    """The widths at which kernels are measured."""
    return study.shapes or shapes_of(_wide(study))


def _wide(study: Study) -> str:
    return study.synthetic or "mixtral-8x7b"


def _cards(study: Study, *papers: str) -> list[Card]:
    return [named(name, study=True) for name in ((study.card,) if study.card else papers)]


class _Timer:
    """Times work, and says whether other programs disturbed it."""

    def __init__(self) -> None:
        self._others = Others()

    def seconds(self, works: dict[str, Callable[[int], object]]) -> dict[str, float]:
        """The median of each, all in turn."""

        def figure(name: str, work: Callable[[int], object]) -> Figure:
            def once(turn: int) -> int:
                work(turn)
                return 0

            return Figure(name, once, inner=2)

        rows = measure([figure(*one) for one in works.items()], warm=_WARM, runs=_RUNS)
        return {row.name: row.ms / 1e3 for row in rows}

    def notes(self) -> tuple[str, ...]:
        """A warning, where one is due."""
        busy = self._others.cores()
        return (
            () if busy <= BUSY else (f"Other programs kept {busy:.1f} cores busy meanwhile: do not trust the times.",)
        )


def _step(expert: Expert, sparsity: float, device: str) -> Callable[[int], object]:
    call = one_call(0, torch.device(device))
    return lambda _turn: kernels.moe_step(expert.x, expert.up, expert.rows, call, expert.limits[sparsity][0])


def floe_t1(study: Study) -> Made:
    """One expert at a published model's width, in 16 bits as in the paper and in the pack's bits."""
    wide, timer = shapes(study), _Timer()
    there = gpus.of_torch()[0]
    device = "cuda" if there else "cpu"
    widths = study.loaded.packed.manifest.widths
    rows: dict[str, Cells] = {}
    for up, other in ((16, 16), (widths.up, max(widths.gate, widths.down))):
        need_memory(5 * 2 * wide.hidden * wide.neurons * 4, "An expert", "Close other programs.")
        own = Shapes(wide.hidden, wide.neurons, wide.group, experts=1, among=1)
        expert = make_expert(own, up, other, torch.bfloat16 if device == "cpu" else torch.float16, device)
        works = {f"{sparsity:.0%}": _step(expert, sparsity, device) for sparsity in SPARSITIES}
        study.told.step(f"Timing {up}-bit up, {other}-bit rows")
        if device == "cuda":
            watch = Stopwatch()
            found = {name: statistics.median(watch.seconds(one)) for name, one in works.items()}
        else:
            found = timer.seconds(works)
        rows[f"here, up {up} bits, rows {other}"] = tuple(1e3 * seconds for seconds in found.values())
    where = there[0].name if there else cpu()
    grid = Grid("ms of one expert", tuple(f"{sparsity:.0%}" for sparsity in SPARSITIES), rows)
    speedup = {name: tuple((row[0] or 0.0) / (cell or 1.0) for cell in row) for name, row in rows.items()}
    gains = Grid("times as fast as with nothing left out", grid.columns, speedup)
    return Made(f"random weights of {_wide(study)}'s width on {where}", (grid, gains), notes=timer.notes())


def floe_f7(study: Study) -> Made:
    """A fifth of an expert's 16-bit rows by chunk: packed, and on a machine with a GPU copied there."""
    wide, timer = shapes(study), _Timer()
    experts = 2
    need_memory(experts * wide.rows_bytes(16), "The rows", "Close other programs.")
    rows = transfer.rows_of(wide, 16, experts)
    moved = transfer.chosen_of(wide.neurons).numel()
    chunks = [*(chunk for chunk in transfer.CHUNKS if chunk < moved), moved]
    there = gpus.of_torch()[0]
    study.told.step("Moving rows")
    figures = transfer.copying(rows, chunks, "cuda") if there else transfer.packing(rows, chunks)
    found = measure(figures, warm=_WARM, runs=_RUNS)
    cells: dict[str, Cells] = {
        row.name: (row.ms, row.gb_s, None if row.of_floor is None else 100 * row.of_floor, row.speedup)
        for row in found
        if row.floor
    }
    grid = Grid("", ("ms", "GB/s", "% of the floor", "times torch's own"), cells)
    way = f"to {there[0].name}" if there else f"packing alone on {cpu()}, since there is no CUDA device"
    return Made(f"random rows of {_wide(study)}'s width, {way}", (grid,), notes=timer.notes())


def corm_f9(study: Study) -> Made:
    """Packing an expert's active rows, measured, and copying them, simulated, by share."""
    wide, timer = shapes(study), _Timer()
    (card,) = _cards(study, "rtx3090ti-24gb")
    bits = study.loaded.packed.manifest.widths.gate
    rows = transfer.rows_of(wide, bits, 4)
    shares = tuple(step / 10 for step in range(1, 11))
    drawn = torch.Generator().manual_seed(0)
    order = torch.randperm(wide.neurons, generator=drawn)
    target = torch.empty_like(rows.data[0])

    def packed(share: float) -> Callable[[int], object]:
        wanted = order[: round(share * wide.neurons)].sort().values
        return lambda turn: kernels.gather_rows(rows, turn % 4, wanted, target[: len(wanted)])

    study.told.step("Packing rows")
    found = timer.seconds({f"{share:.0%}": packed(share) for share in shares})
    packing = tuple(1e3 * seconds for seconds in found.values())
    nbytes = rows.data[0].nbytes

    def loading(share: float) -> float:
        return 1e3 * (card.link_latency_s + share * nbytes / card.link_bytes_s)

    loads = tuple(loading(share) for share in shares)
    cells: dict[str, Cells] = {
        "packing": packing,
        "loading": loads,
        "both, one after the other": tuple(a + b for a, b in zip(packing, loads, strict=True)),
        "the whole expert": tuple(loading(1.0) for _ in shares),
    }
    grid = Grid(f"ms, {bits}-bit rows", tuple(f"{share:.0%}" for share in shares), cells)
    how = f"packing measured on {cpu()}, loading simulated by the figures of {card.title}"
    note = "floe-chat packs one chunk while the one before is copied, so that the longer of the two counts, not both."
    return Made(f"random rows of {_wide(study)}'s width; {how}", (grid,), notes=(note, *timer.notes()))


def _measured_cpu(study: Study, wide: Shapes, up: int, other: int, tokens: Sequence[int], timer: _Timer) -> Cells:
    """ms of one expert over so many tokens on this CPU."""
    own = Shapes(wide.hidden, wide.neurons, wide.group, experts=1, among=1)
    expert = make_expert(own, up, other, torch.bfloat16, "cpu")
    x = torch.randn(max(tokens), wide.hidden, generator=torch.Generator().manual_seed(1))
    nothing = torch.zeros(max(tokens))

    def work(count: int) -> Callable[[int], object]:
        return lambda _turn: kernels.expert_swiglu(x[:count], expert.up, expert.rows, 0, nothing[:count])

    study.told.step("Timing an expert on this CPU")
    found = timer.seconds({f"{count}": work(count) for count in tokens})
    return tuple(1e3 * seconds for seconds in found.values())


def _expert(wide: Shapes) -> tuple[float, float]:
    """Bytes of one expert in 16 bits, and operations of one token."""
    weights = 3 * wide.hidden * wide.neurons
    return 2.0 * weights, 2.0 * weights


def fiddler_f3(study: Study) -> Made:
    """Copying and computing one 16-bit expert."""
    wide, timer = shapes(study), _Timer()
    nbytes, flops = _expert(wide)
    grids: list[Grid] = []
    for card in _cards(study, "quadrortx6000-24gb", "l4-24gb"):
        rows: dict[str, Cells] = {
            "W copy": tuple(1e3 * (card.link_latency_s + nbytes / card.link_bytes_s) for _ in TOKENS),
            "A copy": tuple(
                1e3 * (card.link_latency_s + 2 * count * wide.hidden / card.link_bytes_s) for count in TOKENS
            ),
            "GPU": tuple(1e3 * card.gpu_s(nbytes, flops * count, EXPERT_LAUNCHES) for count in TOKENS),
            "CPU of its machine": tuple(1e3 * card.cpu_s(nbytes, flops * count) for count in TOKENS),
        }
        grids.append(Grid(f"ms, {card.title}, simulated", tuple(map(str, TOKENS)), rows))
    mine = _measured_cpu(study, wide, 16, 16, TOKENS, timer)
    grids.append(Grid(f"ms, {cpu()}, measured", tuple(map(str, TOKENS)), {"CPU": mine}))
    plot = {
        name: list(zip(map(float, TOKENS), map(float, filter(None, row)), strict=True))
        for name, row in {**grids[0].rows, "this CPU": mine}.items()
    }
    here = f"an expert of {_wide(study)} in 16 bits; the cards are simulated by their published figures"
    return Made(here, tuple(grids), plot, ("tokens", "ms"), notes=timer.notes())


_EDGE = {"deepseek-moe-16b-chat": "rtx3080ti-12gb", "qwen2-57b-a14b-instruct": "rtxa6000-48gb"}


def _edge(study: Study) -> dict[str, tuple[Shapes, Card]]:
    """Models of the paper with its cards, simulated, and the pack on the card of the one that is not listed here."""
    found: dict[str, tuple[Shapes, Card]] = {}
    for model, own in _EDGE.items():
        sizes = described(model).sizes
        (card,) = _cards(study, own)
        found[f"{model} on {card.title}"] = Shapes(sizes.hidden, sizes.intermediate), card
    (card,) = _cards(study, "rtx4060ti-16gb")
    architecture = study.loaded.packed.manifest.architecture
    found[f"{study.name} on {card.title}"] = Shapes(architecture.hidden, architecture.intermediate), card
    return found


def importance_f6(study: Study) -> Made:
    """One token's expert by CPU, GPU and link."""
    rows: dict[str, Cells] = {}
    for name, (wide, card) in _edge(study).items():
        nbytes, flops = _expert(wide)
        link = card.link_latency_s + nbytes / card.link_bytes_s
        rows[name] = (1e3 * link, 1e3 * card.cpu_s(nbytes, flops), 1e3 * card.gpu_s(nbytes, flops, EXPERT_LAUNCHES))
    note = "XVERSE-MoE is not among floe-chat's models; the pack stands on its card."
    return Made(_SIMULATED, (Grid("ms of one expert", ("link", "CPU", "GPU"), rows),), notes=(note,))


_SIMULATED = "experts in 16 bits, simulated by the cards' published figures"


def importance_f8(study: Study) -> Made:
    """An expert by CPU and GPU, by tokens."""
    rows: dict[str, Cells] = {}
    for name, (wide, card) in _edge(study).items():
        nbytes, flops = _expert(wide)
        rows[f"CPU, {name}"] = tuple(1e3 * card.cpu_s(nbytes, flops * count) for count in TOKENS)
        rows[f"GPU, {name}"] = tuple(1e3 * card.gpu_s(nbytes, flops * count, EXPERT_LAUNCHES) for count in TOKENS)
    return Made(_SIMULATED, (Grid("ms by tokens", tuple(map(str, TOKENS)), rows),))


def dualsparse_f9(study: Study) -> Made:
    """Bandwidth of both patterns, between processes here."""
    sizes = (1, 8, 64, 256)
    grids: list[Grid] = []
    for groups, slices in ((2, 2),):
        study.told.step(f"EP {groups} x TP {slices}")
        found = exchange.bandwidths(groups, slices, sizes)
        rows: dict[str, Cells] = {
            name: tuple(1e-6 * rate for rate in found[key]) for name, key in (("ETP", "etp"), ("S-ETP", "s-etp"))
        }
        rows["gain, %"] = tuple(100 * (b / a - 1) for a, b in zip(found["etp"], found["s-etp"], strict=True))
        grids.append(Grid(f"MB/s by tokens, EP {groups} x TP {slices}", tuple(map(str, sizes)), rows))
    note = "Where there are fewer cores than processes, they wait for each other: then only the order means something."
    return Made("4 processes on this machine that talk over its loopback", tuple(grids), notes=(note,))


def dualsparse_f10(study: Study) -> Made:
    """The experts' time of a prompt with and without dropping, measured."""
    rules = {"no drop": NOTHING, "1T": Rule(drop=0.64, major=0.64)}
    if study.neurons % 2 == 0:
        rules["2T, rebuilt"] = Rule(drop=0.56, major=0.72)
    loaded, timer = study.loaded, _Timer()
    use(loaded, NO_SPARSITY)
    windows, _ = study.windows
    layers = [block.experts for block in loaded.packed.manifest.family.blocks(loaded.model)]
    given: list[tuple[Tensor, Tensor, Tensor]] = []

    def note(_layer: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
        given.append(inputs)

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    loaded.model.model(input_ids=windows[:1], use_cache=False)
    for hook in hooks:
        hook.remove()

    def work(rule: Rule) -> Callable[[int], object]:
        def run(_turn: int) -> None:
            loaded.control.preset = Preset("", rule)
            for layer, inputs in zip(layers, given, strict=True):
                layer(*inputs)

        return run

    study.told.step("Timing the experts")
    seconds = timer.seconds({name: work(rule) for name, rule in rules.items()})
    rows: dict[str, Cells] = {}
    for name, rule in rules.items():
        gone = [_dropped(rule, weights) for _, _, weights in given]
        rows[name] = (seconds["no drop"] / seconds[name], 1e3 * seconds[name], 100 * sum(gone) / len(gone))
    use(loaded, NO_SPARSITY)
    grid = Grid("", ("speedup", "ms of all experts", "dropped, %"), rows)
    note_ = "Thresholds are dualsparse-t2's. The time is of the experts alone, for one window of the text."
    return Made(f"{study.name}'s experts on {cpu()}", (grid,), notes=(note_, *timer.notes()))


def _dropped(rule: Rule, weights: Tensor) -> float:
    relative = weights / weights.mean(-1, keepdim=True)
    return sum(float((relative < least).float().mean()) for least in rule.least()) / rule.parts


MAKERS: dict[str, Callable[[Study], Made]] = {
    "floe-t1": floe_t1,
    "floe-f7": floe_f7,
    "corm-f9": corm_f9,
    "fiddler-f3": fiddler_f3,
    "importance-f6": importance_f6,
    "importance-f8": importance_f8,
    "dualsparse-f9": dualsparse_f9,
    "dualsparse-f10": dualsparse_f10,
}
