"""What routers choose and what neurons give, on one text: the pack's own, or its 16-bit source's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...models.checkpoint import Checkpoint
from ..quality.pack_source import PackSource, model_of
from .papers import Cells, Grid, Made
from .study import Study

Neurons = Callable[[int, int, Tensor, Tensor], None]  # layer, expert, gate · x and up · x (T, F) of its tokens
Routes = Callable[[int, Tensor, Tensor, Tensor], None]  # layer, scores (B, E), index and weights (B, K)
BINS = 40
HEAT = 64  # columns of a map
RANKS = 12  # of experts by score, at the least
LIMITS = tuple(step / 10 for step in range(1, 11))


class _Watched(nn.Module):
    """A layer's experts, computed as they are, which shows what it sees."""

    def __init__(
        self,
        source: Checkpoint | PackSource,
        layer: int,
        router: nn.Module,
        neurons: Neurons | None,
        routes: Routes | None,
    ) -> None:
        super().__init__()
        self._source, self._layer, self._neurons, self._routes = source, layer, neurons, routes
        self._scores = torch.empty(0)
        self._heard = router.register_forward_hook(self._note)

    def _note(self, _router: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        sigmoid = self._source.family.routing.kind == "sigmoid"
        self._scores = output[0].float().sigmoid() if sigmoid else output[0].float().softmax(-1)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """hidden (B, H), index and weights (B, K) -> (B, H)."""
        self._heard.remove()
        if self._routes is not None:
            self._routes(self._layer, self._scores, index, weights.float())
        out = torch.zeros_like(hidden)
        for number in index.unique().tolist():
            token, slot = (index == number).nonzero(as_tuple=True)
            gate, up, down = (part.float() for part in self._source.expert(self._layer, number))
            g, u = F.linear(hidden[token], gate), F.linear(hidden[token], up)
            if self._neurons is not None:
                self._neurons(self._layer, number, g, u)
            out.index_add_(0, token, F.linear(F.silu(g) * u, down) * weights[token, slot, None])
        return out


def watch(study: Study, neurons: Neurons | None = None, routes: Routes | None = None) -> None:
    """Read the text once, and show what each layer sees."""
    study.need_silu()
    source, (windows, _) = study.origin, study.windows
    model = model_of(source, study.told.step, lambda layer, router: _Watched(source, layer, router, neurons, routes))
    model.states(windows)


def here(study: Study) -> str:
    """What was measured on, in words."""
    windows, _ = study.windows
    whose = "the pack's rounded weights" if study.source is None else f"its 16-bit source {study.source.name}"
    return f"{study.name} reading {windows.numel()} tokens of {study.called}, with {whose}"


def spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks; equal values share their mean rank."""
    ranks = [(x[:, None] > x).double().sum(-1) + (x[:, None] == x).double().sum(-1) / 2 for x in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def _histogram(values: Tensor, low: float, high: float) -> list[tuple[float, float]]:
    counts = torch.histc(values, BINS, low, high) / values.numel()
    width = (high - low) / BINS
    return [(low + (at + 0.5) * width, float(share)) for at, share in enumerate(counts)]


def _three(study: Study) -> dict[tuple[int, int], str]:
    """A shallow, a middle and a deep layer's expert, which are the most used there."""
    used = torch.zeros(study.layers, study.experts)

    def count(layer: int, _scores: Tensor, index: Tensor, _weights: Tensor) -> None:
        used[layer] = index.flatten().bincount(minlength=study.experts)

    watch(study, routes=count)
    layers = sorted({0, study.layers // 2, study.layers - 1})
    return {(layer, int(used[layer].argmax())): f"layer {layer + 1}" for layer in layers}


def floe_f2(study: Study) -> Made:
    """How close to zero values are, in three experts, and the histogram of those of the middle one."""
    places, found = _three(study), dict[str, Tensor]()

    def keep(layer: int, expert: int, gate: Tensor, up: Tensor) -> None:
        if name := places.get((layer, expert)):
            after = F.silu(gate)
            found.update({f"gate, {name}": after, f"up, {name}": up, f"into down, {name}": after * up})

    watch(study, keep)
    scales = (0.1, 0.25, 0.5, 1.0, 2.0)
    rows: dict[str, Cells] = {
        name: tuple(100 * float((values.abs() < scale * values.std()).float().mean()) for scale in scales)
        for name, values in found.items()
    }
    normal = NormalDist()
    rows["a normal distribution"] = tuple(100 * (2 * normal.cdf(scale) - 1) for scale in scales)
    middle = list(places.values())[len(places) // 2]
    plot = {name: _histogram(values / values.std(), -3, 3) for name, values in found.items() if name.endswith(middle)}
    title = "% of values below so many standard deviations"
    return Made(
        here(study),
        (Grid(title, tuple(f"{scale:g}" for scale in scales), rows),),
        plot,
        ("standard deviations", f"share of the values, {middle}"),
    )


def floe_f11(study: Study) -> Made:
    """The gate before and after SiLU in a middle and the last layer."""
    wanted = {study.layers // 2: f"layer {study.layers // 2 + 1}", study.layers - 1: f"layer {study.layers}"}
    found: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

    def keep(layer: int, _expert: int, gate: Tensor, _up: Tensor) -> None:
        if layer in found:
            found[layer].append(gate.flatten())

    watch(study, keep)
    before = {name: torch.cat(found[layer]) for layer, name in wanted.items()}
    rows: dict[str, Cells] = {}
    for name, values in before.items():
        after = F.silu(values)
        close = 100 * float(((after + 0.2785).abs() < 0.02).float().mean())
        rows[name] = (float(values.mean()), float(values.std()), float(after.mean()), float(after.std()), close)
    columns = ("mean before", "deviation", "mean after", "deviation after", "% within 0.02 of -0.2785")
    plot = {
        f"{which}, {name}": _histogram(values if which == "before" else F.silu(values), -3, 3)
        for name, values in before.items()
        for which in ("before", "after")
    }
    return Made(here(study), (Grid("", columns, rows),), plot, ("value", "share of the values"))


def _below(study: Study, thresholds: Sequence[float]) -> Tensor:
    """(L, thresholds) share of |silu(gate · x)| below each."""
    counts, total = torch.zeros(study.layers, len(thresholds)), torch.zeros(study.layers, 1)

    def count(layer: int, _expert: int, gate: Tensor, _up: Tensor) -> None:
        values = F.silu(gate).abs()
        counts[layer] += torch.stack([(values < threshold).sum() for threshold in thresholds])
        total[layer] += values.numel()

    watch(study, count)
    return counts / total


def _by_layer(values: Tensor, *, mean: bool = True) -> dict[str, Cells]:
    rows = {f"layer {layer + 1}": tuple(row) for layer, row in enumerate(values.tolist())}
    return rows | ({"all layers": tuple(values.mean(0).tolist())} if mean else {})


def fiddler_t2(study: Study) -> Made:
    """How small values are after SiLU."""
    thresholds = (0.001, 0.01, 0.1, 1.0)
    rows = _by_layer(100 * _below(study, thresholds), mean=False)
    columns = tuple(f"<{threshold}" for threshold in thresholds)
    return Made(here(study), (Grid("% of |silu(gate · x)| below a threshold", columns, rows),))


def corm_f2(study: Study) -> Made:
    """Active neurons by threshold."""
    thetas = (0.1, 0.15, 0.175, 0.2, 0.225, 0.25, 0.275, 0.3)
    rows = _by_layer(100 - 100 * _below(study, thetas))
    return Made(here(study), (Grid("active neurons, %", tuple(f"{theta:g}" for theta in thetas), rows),))


def fiddler_f4(study: Study) -> Made:
    """How popular experts are, and the hit rates that follow if a share of them is on the card."""
    used = torch.zeros(study.layers, study.experts)

    def count(layer: int, _scores: Tensor, index: Tensor, _weights: Tensor) -> None:
        used[layer] = index.flatten().bincount(minlength=study.experts)

    watch(study, routes=count)
    popular = used / used.max()
    low, high = (float(popular.quantile(share)) for share in (0.25, 0.75))
    figures = (float(popular.mean()), float(popular.std()), low, high, float(popular.min()))
    grids = [
        Grid(
            "popularity, of the most popular expert",
            ("mean", "standard deviation", "25 %", "75 %", "least"),
            {study.name: figures},
        )
    ]
    share, ranked = used.flatten() / used.sum(), used.numel()
    best = share.sort(descending=True).values.cumsum(0)
    worst = share.sort().values.cumsum(0)
    rows: dict[str, Cells] = {}
    for there in (56 / 256, 0.5):
        kept = max(1, round(there * ranked))
        name = f"{study.name}, {kept} of {ranked} experts on the card"
        rows[name] = (100 * float(best[kept - 1]), 100 * kept / ranked, 100 * float(worst[kept - 1]))
    grids.append(Grid("expected hit rate, %", ("best", "random", "worst"), rows))
    heat = {f"layer {layer + 1}": row for layer, row in enumerate(popular.tolist())}
    return Made(here(study), tuple(grids), heat=heat)


def dualsparse_f1(study: Study) -> Made:
    """A map of one layer's neurons by what they give, all tokens together."""
    place, sums = study.layers // 2, torch.zeros(study.experts, study.neurons)

    def add(layer: int, expert: int, gate: Tensor, up: Tensor) -> None:
        if layer == place:
            sums[expert] += (F.silu(gate) * up).abs().sum(0)

    watch(study, add)
    ordered = sums.sort(1, descending=True).values
    experts = sums.sum(1).sort(descending=True).values
    columns = ("most used 10 %", "25 %", "50 %")
    shares = (0.1, 0.25, 0.5)

    def of(values: Tensor, share: float) -> float:
        kept = max(1, round(share * values.shape[-1]))
        return 100 * float(values[..., :kept].sum() / values.sum())

    rows: dict[str, Cells] = {
        "experts": tuple(of(experts, share) for share in shares),
        "neurons of each expert": tuple(of(ordered, share) for share in shares),
    }
    width = min(HEAT, study.neurons)
    binned = torch.stack([part.mean(1) for part in sums.tensor_split(width, 1)], 1)
    binned = (binned / binned.max().clamp_min(1e-12)).sqrt()
    heat = {f"expert {expert}": row for expert, row in enumerate(binned.tolist())}
    note = (
        f"The map is of layer {place + 1}, the root of the share of the largest; a pack stores neurons by importance."
    )
    grid = Grid("% of all |silu(gate · x) up · x|", columns, rows)
    return Made(here(study), (grid,), heat=heat, notes=(note,))


def _routed(study: Study) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each layer scores (B, E), index and weights (B, K)."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(_layer: int, scores: Tensor, index: Tensor, weights: Tensor) -> None:
        found.append((scores, index, weights))

    watch(study, routes=add)
    return found


def dualsparse_f6(study: Study) -> Made:
    """Choices, scores, and scores of the chosen divided by their sum."""
    routed = _routed(study)
    chosen = torch.stack([index.flatten().bincount(minlength=study.experts) for _, index, _ in routed]).float()
    share = 100 * chosen.sum(0) / chosen.sum()
    scores = torch.cat([scores.gather(1, index) for scores, index, _ in routed]).flatten()
    normal = torch.cat([(own := scores.gather(1, index)) / own.sum(1, keepdim=True) for scores, index, _ in routed])
    edges = [step / 20 for step in range(21)]
    columns = tuple(f"{edge:g}" for edge in edges[:-1])
    rows: dict[str, Cells] = {}
    for name, values in (("scores", scores), ("normalized", normal.flatten())):
        rows[name] = tuple((100 * torch.histc(values, 20, 0, 1) / values.numel()).tolist())
    grids = (
        Grid("% of chosen experts with a score from here on", columns, rows),
        Grid("% of choices", ("all layers",), {f"expert {at}": (one,) for at, one in enumerate(share.tolist())}),
    )
    return Made(here(study), grids)


def dualsparse_f12(study: Study) -> Made:
    """The share of expert calls below a threshold, by layer."""
    rows: list[Tensor] = []
    for _, _, weights in _routed(study):
        relative = weights / weights.mean(-1, keepdim=True)
        rows.append(torch.stack([(relative < limit).float().mean() for limit in LIMITS]))
    grid = Grid("dropped, %", tuple(f"{limit:g}" for limit in LIMITS), _by_layer(100 * torch.stack(rows)))
    note = "Thresholds are of the score over the mean of a token's experts."
    return Made(here(study), (grid,), notes=(note,))


METHODS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum of gate": lambda gate, _up: gate,
    "sum of |gate|": lambda gate, _up: gate.abs(),
    "sum of gate · up": lambda gate, up: gate * up,
    "sum of |gate · up|": lambda gate, up: (gate * up).abs(),
}


def dualsparse_f13(study: Study) -> Made:
    """Sums over an expert's tokens by four methods, of a high-load and a low-load expert, and in all of them."""
    loads = torch.zeros(study.layers, study.experts)
    sums = {name: torch.zeros(study.layers, study.experts, study.neurons) for name in METHODS}

    def add(layer: int, expert: int, gate: Tensor, up: Tensor) -> None:
        loads[layer, expert] += len(gate)
        for name, method in METHODS.items():
            sums[name][layer, expert] += method(F.silu(gate), up).sum(0)

    watch(study, add)
    place = min(study.layers - 1, round(20 / 27 * study.layers))
    order = loads[place].argsort()
    high, low = int(order[-1]), int(next(expert for expert in order if loads[place, expert] > 0))
    rows: dict[str, Cells] = {}
    plot: dict[str, list[tuple[float, float]]] = {}
    for name, own in sums.items():
        negative = 100 * (own < 0).float().mean(-1)
        used = loads > 0
        within = [
            spearman(loads[at][used[at]], negative[at][used[at]]) for at in range(study.layers) if used[at].sum() > 1
        ]
        correlation = sum(within) / len(within) if "|" not in name and within else None
        rows[name] = (float(negative[place, high]), float(negative[place, low]), correlation)
        each = (own[place, high] / loads[place, high]).abs().sort(descending=True).values
        step = max(1, len(each) // BINS)
        plot[name] = [(float(at), float(value)) for at, value in enumerate(each.tolist()) if at % step == 0]
    columns = ("% below 0, high load", "% below 0, low load", "rank correlation with load")
    note = (
        f"Experts {high} ({loads[place, high]:.0f} tokens) and {low} ({loads[place, low]:.0f}) of layer {place + 1}; "
        "the correlation is all layers' mean. Halves are rebuilt by floe-chat's own importance alone."
    )
    axes = ("neurons, largest first", f"|mean| of expert {high}")
    return Made(here(study), (Grid("", columns, rows),), plot, axes, notes=(note,))


def importance_f4(study: Study) -> Made:
    """The mean score by rank, and that of the chosen."""
    ranked = torch.stack([scores.sort(1, descending=True).values.mean(0) for scores, _, _ in _routed(study)])
    ranked = ranked[:, : max(RANKS, 2 * study.top_k)]
    columns = tuple(str(rank + 1) for rank in range(ranked.shape[1]))
    note = f"The first {study.top_k} are chosen, unless the router corrects scores for the choice."
    return Made(here(study), (Grid("mean score by rank", columns, _by_layer(ranked)),), notes=(note,))


def importance_f11(study: Study) -> Made:
    """The chance that the next token chooses an expert, by the rank of its score for this one."""
    windows, _ = study.windows
    chances: list[Tensor] = []
    for scores, index, _ in _routed(study):
        ranks = scores.argsort(1, descending=True).view(*windows.shape, -1)
        chosen = torch.zeros_like(scores).scatter(1, index, 1.0).view(*windows.shape, -1)
        chances.append(chosen[:, 1:].gather(2, ranks[:, :-1]).mean((0, 1))[: max(RANKS, 2 * study.top_k)])
    columns = tuple(str(rank + 1) for rank in range(len(chances[0])))
    return Made(
        here(study), (Grid("% used by the next token, by rank", columns, _by_layer(100 * torch.stack(chances))),)
    )


MAKERS: dict[str, Callable[[Study], Made]] = {
    "floe-f2": floe_f2,
    "floe-f11": floe_f11,
    "fiddler-t2": fiddler_t2,
    "fiddler-f4": fiddler_f4,
    "corm-f2": corm_f2,
    "dualsparse-f1": dualsparse_f1,
    "dualsparse-f6": dualsparse_f6,
    "dualsparse-f12": dualsparse_f12,
    "dualsparse-f13": dualsparse_f13,
    "importance-f4": importance_f4,
    "importance-f11": importance_f11,
}
