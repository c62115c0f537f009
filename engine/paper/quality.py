"""Quality by what is left out and by bits per weight: all settings on one text, in one pass for each signal."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ...kernels.rule import Rule
from ...kernels.types import Calls, Work
from ...models.checkpoint import Checkpoint
from ...models.errors import UsageError
from ...models.finer.transform import transform
from ..experts.moe_layer import Choice, MoELayer
from ..loader import LoadedModel
from ..parallel.holding import Grid as ProcessGrid
from ..parallel.holding import Holding
from ..parallel.spread_layer import HeldLayer
from ..quality.candidates import Candidate
from ..quality.divergence import Divergence, score, summarize
from ..quality.frontier import Measure, Point
from ..quality.references import NO_SPARSITY, pack_logits, use
from ..quality_presets import Preset
from .papers import Cells, Grid, Made
from .study import Ask, Study


class Loads:
    """What each process of a grid had to do, in halves of experts.

    Attributes:
        given: (layers, R) before anything was left out; done: after.
    """

    def __init__(self) -> None:
        self.given: list[Tensor] = []
        self.done: list[Tensor] = []

    @property
    def dropped(self) -> float:
        """The share that was left out."""
        return 1 - float(sum(each.sum() for each in self.done) / sum(each.sum() for each in self.given))

    @property
    def imbalance(self) -> float:
        """The largest load of a layer over the mean, on average."""
        return sum(float(each.max() / each.mean()) for each in self.done) / len(self.done)

    @property
    def imbalance_given(self) -> float:
        """The same before anything was left out."""
        return sum(float(each.max() / each.mean()) for each in self.given) / len(self.given)

    @property
    def gain(self) -> float:
        """How much less the most loaded process has to do: the speedup of experts if nothing else takes time."""
        return float(sum(each.max() for each in self.given) / sum(each.max() for each in self.done))


def parted(
    layer: MoELayer, grid: ProcessGrid, index: Tensor, weights: Tensor, *, balanced: bool, loads: Loads
) -> Choice:
    """The calls of all processes for a router's choice (B, K)."""
    ruled, experts = layer.in_force(), layer.packed.rows.experts
    works: list[Work] = []
    given, done = torch.zeros(grid.size), torch.zeros(grid.size)
    for rank in range(grid.size):
        holding = Holding(grid, rank, experts, balanced)
        held = HeldLayer(layer.packed, ruled.preset, layer.index, holding)
        work, own = held.work(index, weights), holding.own
        calls = Calls(work.calls.tokens, work.calls.experts + own.start * ruled.rule.parts, work.calls.weights)
        works.append(Work(calls, work.thresholds, work.products))
        given[rank] = 2 * ((index >= own.start) & (index < own.stop)).sum()
        done[rank] = ruled.halves(len(work.thresholds))
    loads.given.append(given)
    loads.done.append(done)
    return Choice(ruled, index, weights, _joined(works))


def _joined(works: Sequence[Work]) -> Work:
    tokens, experts, weights = (
        torch.cat([getattr(work.calls, name) for work in works]) for name in ("tokens", "experts", "weights")
    )
    products = [work.products for work in works if work.products is not None]
    calls = Calls(tokens, experts, weights)
    return Work(calls, torch.cat([work.thresholds for work in works]), torch.cat(products) if products else None)


@contextmanager
def over(loaded: LoadedModel, grid: ProcessGrid, *, balanced: bool) -> Generator[Loads]:
    """Inside, prompts are computed as by the processes of a grid; yields what each had to do."""
    layers, loads = [each for each in loaded.model.modules() if isinstance(each, MoELayer)], Loads()

    def choosing(layer: MoELayer) -> None:
        def choose(hidden: Tensor, index: Tensor, weights: Tensor) -> Choice:
            assert len(hidden) == len(index)
            return parted(layer, grid, index, weights, balanced=balanced, loads=loads)

        layer.choose = choose

    for layer in layers:
        choosing(layer)
    try:
        yield loads
    finally:
        for layer in layers:
            del layer.choose


FIGURES: dict[str, Callable[[Point], float]] = {
    "KL, nats": lambda point: point.kl,
    "perplexity": lambda point: point.divergence.perplexity,
    "same top token, %": lambda point: 100 * point.divergence.same_top,
    "bits read per weight": lambda point: point.bits,
}
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
WIDTHS = (8, 4, 3, 2)
ONE_BIT = "floe-chat has no 1-bit weights."
BY: dict[str, Callable[[float], Ask]] = {  # what is left out, judged as FloE section 3.2.1 does
    "gate": lambda share: (Candidate(rule=Rule(share)), "gate"),
    "down": lambda share: (Candidate(rule=Rule(product=share)), "up"),
    "up": lambda share: (Candidate(rule=Rule(share)), "up"),
}
OF: dict[str, Callable[[int], Ask]] = {  # which projection has few bits
    "gate": lambda bits: (Candidate(gate=bits), "up"),
    "down": lambda bits: (Candidate(down=bits), "up"),
    "up": lambda bits: (Candidate(up=bits), "up"),
}
_FIRST = ("perplexity", "KL, nats")


def percent(share: float) -> str:
    """As papers name columns."""
    return f"{share:.0%}"


def by_row(
    study: Study,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Ask | None]],
    figures: Sequence[str] = _FIRST,
) -> tuple[tuple[Grid, ...], str]:
    """A grid for each figure, with a setting in each cell; and the perplexity with nothing left out, as a note."""
    asked = list(dict.fromkeys(ask for row in rows.values() for ask in row if ask is not None))
    points = dict(zip(asked, study.points(asked), strict=True))

    def cells(row: Sequence[Ask | None], figure: str) -> Cells:
        return tuple(None if ask is None else FIGURES[figure](points[ask]) for ask in row)

    grids = [Grid(f, tuple(columns), {name: cells(row, f) for name, row in rows.items()}) for f in figures]
    whole = points[asked[0]].divergence.source_perplexity
    return tuple(grids), f"With nothing left out, perplexity is {whole:.4g}."


def methods(study: Study, rows: Mapping[str, Ask], figures: Sequence[str] = tuple(FIGURES)) -> Grid:
    """A row for each setting, a column for each figure."""
    points = study.points(list(rows.values()))
    cells = {name: tuple(FIGURES[f](point) for f in figures) for name, point in zip(rows, points, strict=True)}
    return Grid("", tuple(figures), cells)


def _sparsity(study: Study, shares: Sequence[float], figures: Sequence[str] = _FIRST) -> Made:
    rows: dict[str, list[Ask | None]] = {name: [at(share) for share in shares] for name, at in BY.items()}
    grids, note = by_row(study, [percent(share) for share in shares], rows, figures)
    return Made(study.here("thresholds by expert from floe-chat's calibration text"), grids, notes=(note,))


def _widths(study: Study) -> Made:
    rows: dict[str, list[Ask | None]] = {name: [*(at(bits) for bits in WIDTHS), None] for name, at in OF.items()}
    grids, note = by_row(study, [*(f"INT{bits}" for bits in WIDTHS), "INT1"], rows)
    return Made(study.here(), grids, notes=(note, ONE_BIT))


def floe_t3(study: Study) -> Made:
    """FloE and other methods."""
    rows: dict[str, Ask] = {"HQQ INT3": (Candidate(3, 3, 3), "up"), "HQQ INT2": (Candidate(2, 2, 2), "up")}
    for share in (0.8, 0.9):
        rows[f"CATS {share:.0%}"] = BY["gate"](share)
        rows[f"FloE-Wup {share:.0%}"] = BY["up"](share)
        rows[f"FloE {share:.0%}"] = (Candidate(up=2, rule=Rule(share)), "up")
    note = "INT3 and INT2 are floe-chat's rounding, in place of HQQ's. floe-chat has no CHESS (thresholds by channel)."
    tasks = study.accuracy({"base": Rule(), "80%": Rule(0.8), "90%": Rule(0.9)})
    return Made(study.here(_INSTEAD), (methods(study, rows), *tasks), notes=(note,))


_INSTEAD = "tasks by the pack's own bits and signals, where --tasks names some, and probabilities"


def floe_t5(study: Study) -> Made:
    """What is left out by gate, up or down, as the share of tokens that stay the likeliest."""
    made = _sparsity(study, (0.0, *SHARES), ("same top token, %", "KL, nats"))
    rules = {"base": Rule()} | {f"signal {share:.0%}": Rule(share) for share in SHARES}
    rules |= {f"down {share:.0%}": Rule(product=share) for share in SHARES}
    return replace(made, grids=(*made.grids, *study.accuracy(rules)))


def floe_t6(study: Study) -> Made:
    """What is left out by gate, down or up."""
    return _sparsity(study, SHARES)


def floe_t7(study: Study) -> Made:
    """The same at the shares of small experts."""
    return _sparsity(study, (0.3, 0.5, 0.7))


def floe_t8(study: Study) -> Made:
    """Which projection bears few bits."""
    return _widths(study)


def floe_f3(study: Study) -> Made:
    """Both sensitivities."""
    sparsity, widths = _sparsity(study, SHARES), _widths(study)
    return replace(widths, grids=(*sparsity.grids, *widths.grids))


def floe_f9(study: Study) -> Made:
    """(a) as table 5; (b) sparsity with fewer bits of up."""
    shares = (0.0, *SHARES)
    rows: dict[str, list[Ask | None]] = {
        f"up {bits} bits": [(Candidate(up=bits, rule=Rule(share)), "up") for share in shares] for bits in (16, *WIDTHS)
    }
    grids, note = by_row(study, [percent(share) for share in shares], rows)
    return Made(study.here(), (*grids, *floe_t5(study).grids[:1]), notes=(note,))


THETAS = (0.1, 0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3)


def corm_t2(study: Study) -> Made:
    """CORM's threshold and bits."""
    corm = Candidate(4, 4, 4, rule=Rule(theta=0.25))
    rows: dict[str, Ask] = {
        "4 bits": (Candidate(4, 4, 4, rule=Rule()), "gate"),
        "CORM, threshold 0.25": (corm, "gate"),
        "CORM, 55 % left out": (replace(corm, rule=Rule(0.55)), "gate"),
    }
    note = "Wrong predictions, with which CORM goes on, are not in it; thresholds are of silu(gate · x) as it is."
    tasks = study.accuracy({"base": Rule(), "55 % left out": Rule(0.55)})
    return Made(study.here(_INSTEAD), (methods(study, rows), *tasks), notes=(note,))


def corm_f10(study: Study) -> Made:
    """Quality and what is read, by threshold."""
    asked: list[Ask] = [(Candidate(rule=Rule(theta=theta)), "gate") for theta in (0.0, *THETAS)]
    points = study.points(asked)
    whole = points[0]
    rows: dict[str, Cells] = {
        "active neurons, %": tuple(100 * point.taken.active / whole.taken.active for point in points),
        "KL, nats": tuple(point.kl for point in points),
        "same top token, %": tuple(100 * point.divergence.same_top for point in points),
        "bytes read, % of all": tuple(100 * point.read / whole.read for point in points),
    }
    note = "Speed is given as bytes of experts that a token reads: over a link that is full, time follows them."
    columns = tuple(f"{theta:g}" for theta in (0.0, *THETAS))
    return Made(study.here(), (Grid("by threshold of |silu(gate · x)|", columns, rows),), notes=(note,))


def dropped(study: Study, point: Point) -> float:
    """Percent of the halves of chosen experts that were left out."""
    return 100 * (1 - point.taken.halves / (2 * study.top_k * study.layers))


def dualsparse_t2(study: Study) -> Made:
    """No drop, one threshold, two."""
    rules = {"no drop": Rule(), "1T": Rule(drop=0.64, major=0.64)}
    if study.neurons % 2 == 0:
        rules["2T, rebuilt"] = Rule(drop=0.56, major=0.72)
    points = study.points([(Candidate(rule=rule), None) for rule in rules.values()])
    rows = {
        name: (dropped(study, point), *(FIGURES[figure](point) for figure in tuple(FIGURES)[:3]))
        for name, point in zip(rules, points, strict=True)
    }
    note = (
        "Thresholds are of the score over the mean of a token's experts: 0.64 is the paper's 0.08 of 8 experts, and "
        "0.56 and 0.72 its 0.07 and 0.09. Halves are by importance; 2T of any halves is not made."
    )
    grids = (Grid("", ("dropped, %", *tuple(FIGURES)[:3]), rows), *study.accuracy(rules))
    return Made(study.here(_INSTEAD), grids, notes=(note,))


def dualsparse_f7(study: Study) -> Made:
    """One threshold, from 0 up."""
    limits = tuple(step / 10 for step in range(11))
    points = study.points([(Candidate(rule=Rule(drop=limit, major=limit)), None) for limit in limits])
    rows = {"dropped, %": tuple(dropped(study, point) for point in points)}
    rows |= {figure: tuple(FIGURES[figure](point) for point in points) for figure in tuple(FIGURES)[:3]}
    grid = Grid("by score over the mean of a token's experts", tuple(f"{limit:g}" for limit in limits), rows)
    return Made(study.here("probabilities instead of tasks"), (grid,))


def dualsparse_t1(study: Study) -> Made:
    """Experts cut into finer ones, without fine-tuning, with and without a threshold.

    Raises:
        UsageError: no source was given, or it cannot be cut.
    """
    if study.source is None:
        raise UsageError(
            "This table needs the 16-bit source",
            "A pack's experts are rounded, and are not cut again.",
            "Give the checkpoint that was packed: --source FOLDER.",
        )
    rows: dict[str, Cells] = {}
    with TemporaryDirectory() as folder:
        for parts in (1, 2, 4):
            finer = study.source
            if parts > 1:
                finer = Path(folder) / f"{parts}"
                transform(study.source, finer, parts, None, lambda step, _share: study.told.step(step))
            rows |= _cut(study, Checkpoint(finer), parts)
    note = "The checkpoint was not fine-tuned. Each is compared with itself with nothing dropped."
    return Made(
        study.here("not fine-tuned"), (Grid("", ("dropped, %", "perplexity", "KL, nats"), rows),), notes=(note,)
    )


def _cut(study: Study, finer: Checkpoint, parts: int) -> dict[str, Cells]:
    windows, keep = study.windows
    limits = {"": Rule(), ", 1T": Rule(drop=0.6, major=0.6)}
    measure = Measure(finer, windows[:, :-1], windows, keep, study.told.step)
    points = measure([Candidate(rule=rule) for rule in limits.values()], f"{parts} parts")
    whole = 2 * parts * study.top_k * study.layers
    name = f"{parts * study.top_k}/{parts * study.experts}"
    return {
        name + words: (100 * (1 - point.taken.halves / whole), point.divergence.perplexity, point.kl)
        for words, point in zip(limits, points, strict=True)
    }


def importance_t3(study: Study) -> Made:
    """Substitution by alpha.

    Raises:
        UsageError: routers that choose by other scores than the chances of a softmax.
    """
    if study.loaded.packed.manifest.family.routing.kind != "softmax":
        raise UsageError("Experts of this family cannot be substituted", "Its routers give no probabilities.", "")
    alphas = tuple(step / 20 for step in range(13))
    points = study.points([(Candidate(rule=Rule(alpha=alpha)), None) for alpha in alphas])
    rows = {figure: tuple(FIGURES[figure](point) for point in points) for figure in tuple(FIGURES)[:3]}
    rows["absent bytes, %"] = tuple(100 * point.missed / point.read for point in points)
    columns = tuple("0.0" if not alpha else f"{alpha:g}" for alpha in alphas)
    note = "Half of each layer's experts, those used last, count as on the card."
    return Made(study.here("probabilities instead of tasks"), (Grid("by alpha", columns, rows),), notes=(note,))


APART, HALVINGS = 0.1, 6  # of 2T's thresholds from their mean; of the range in which they are looked for
_METHODS = {"1T": (0.0, False), "2T": (APART, False), "2T, load-aware": (APART, True)}


def dualsparse_f11(study: Study) -> Made:
    """One and two thresholds and load-aware ones where a quarter is left out, as processes in groups would.

    Raises:
        UsageError: fewer experts than groups, or an odd number of neurons, which has no halves.
    """
    groups = min(4, study.experts)
    if groups < 2 or study.neurons % 2:
        raise UsageError("Load-aware thresholds need two experts and halves of them", "This model has none.", "")
    windows, keep = study.windows
    use(study.loaded, NO_SPARSITY)
    exact = [pack_logits(study.loaded, NO_SPARSITY, row[None, :-1], keep) for row in windows]

    def measured(method: str, middle: float) -> tuple[Loads, Divergence]:
        apart, balanced = _METHODS[method]
        rule = Rule(drop=middle - apart, major=middle + apart if apart else 0.0)
        with over(study.loaded, ProcessGrid("ep", groups, 1), balanced=balanced) as loads:
            logits = [pack_logits(study.loaded, Preset("", rule, 22), row[None, :-1], keep) for row in windows]
        each = zip(logits, exact, windows, strict=True)
        return loads, summarize([score(own, whole, row[-keep:]) for own, whole, row in each])

    rows: dict[str, Cells] = {}
    for method in _METHODS:
        study.told.step(f"{method}: looking for thresholds")
        low, high = APART, 1 - APART
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if measured(method, middle)[0].dropped < 0.25 else (low, middle)
        loads, lost = measured(method, (low + high) / 2)
        figures = (loads.gain, 100 * loads.dropped, loads.imbalance, lost.kl_mean, 100 * lost.same_top)
        rows[method] = figures
    columns = ("speedup of the busiest", "dropped, %", "busiest over mean", "KL, nats", "same top token, %")
    note = (
        f"Experts lie in {groups} groups, one a process; all are computed here. The speedup is how much less the group "
        "with the most to do does, as if nothing else took time."
    )
    here = (
        f"{study.name} as it runs against itself with nothing left out, {len(windows) * keep} tokens of {study.called}"
    )
    return Made(here, (Grid("", columns, rows),), notes=(note,))


MAKERS: dict[str, Callable[[Study], Made]] = {
    "floe-t3": floe_t3,
    "floe-f10": floe_t3,
    "floe-t5": floe_t5,
    "floe-t6": floe_t6,
    "floe-t7": floe_t7,
    "floe-t8": floe_t8,
    "floe-f3": floe_f3,
    "floe-f9": floe_f9,
    "corm-t2": corm_t2,
    "corm-f10": corm_f10,
    "dualsparse-t1": dualsparse_t1,
    "dualsparse-t2": dualsparse_t2,
    "dualsparse-f7": dualsparse_f7,
    "dualsparse-f11": dualsparse_f11,
    "importance-t3": importance_t3,
}
