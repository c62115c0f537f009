"""`floe-chat tune`: quality against bytes, measured, and the presets that follow.

First every dial alone, at all its levels; then combinations. The cost of a combination is predicted as the sum of its
dials' costs, which is good enough to select the few that may be on the frontier; those are measured, and only measured
points are used. Quality is the mean KL divergence of the next-token distribution from the source's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
from torch import Tensor

from ...kernels.activation import Projection
from ...kernels.codes import group_size
from ...kernels.layouts import VectorLayout
from ...kernels.rule import Rule
from ...models.checkpoint import Checkpoint
from ..quality_presets import LEVELS
from . import candidates
from .candidates import WEIGHED, Candidate, Outcome, Taken
from .divergence import Divergence, score, summarize
from .pack_source import PackSource

WIDTHS = (2, 3, 4, 8)
SKIPS = (  # sparsity by the signal, then of what enters down
    *((0.0, share) for share in (0.5, 0.7, 0.8)),
    *((0.3, share) for share in (0.0, 0.5)),
    *((0.4, share) for share in (0.0, 0.6, 0.7)),
    *((0.5, share) for share in (0.0, 0.7, 0.8)),
    *((0.6, share) for share in (0.0, 0.7, 0.8)),
    *((0.7, share) for share in (0.0, 0.8, 0.9)),
    *((0.8, share) for share in (0.0, 0.9)),
    (0.9, 0.0),
)
DROPS = (  # both thresholds alike (1T-drop), then apart (2T-drop)
    *((limit, limit) for limit in (0.2, 0.4, 0.6)),
    *((0.0, 0.4), (0.2, 0.4), (0.2, 0.6), (0.4, 0.6), (0.4, 0.8), (0.6, 1.0)),
)
ALPHAS = (0.2, 0.5, 0.8)
SLOPES = (-0.4, -0.2, 0.2, 0.4)  # by how much more than the mean the last layer skips, and less the first
PROBES = {  # always measured, to compare with; as all settings, by the pack's signals
    Candidate(up=2, rule=Rule(0.8)): "FloE 80 %",
    Candidate(up=2, rule=Rule(0.9)): "FloE 90 %",
    Candidate(2, 4, 4, rule=Rule(0.6)): "4-bit rows, 60 %",
    Candidate(2, 4, 4, rule=Rule(0.6, weighed=True)): "60 %, weighed",
    Candidate(4, 4, 4): "4 bit throughout",
    Candidate(8, 8, 8): "8 bit throughout",
}
_TOGETHER = 32  # combinations to measure at the pack's own widths, and as many at any
_MEMORY_SHARE = 0.4  # share of free memory, for the settings of one pass


@dataclass(frozen=True, slots=True)
class Point:
    """A setting and its measurements.

    Attributes:
        read: bytes of experts' weights per token. missed: those of experts that were not resident, see candidates.py.
        bits: `read` over the number of weights that a token's experts have, so that models compare.
    """

    setting: Candidate
    divergence: Divergence
    read: float
    missed: float
    bits: float
    taken: Taken

    @property
    def kl(self) -> float:
        """Mean KL divergence, nats."""
        return self.divergence.kl_mean


@dataclass(frozen=True, slots=True)
class Frontier:
    """All measured points, each setting once. `own` has the widths of the pack and skips nothing."""

    own: Candidate
    points: tuple[Point, ...]

    def pareto(self, *, own: bool) -> list[Point]:
        """The points that no other point beats in both bytes read and KL, fewest bytes first; `own`: of the pack's
        widths.
        """
        found: list[Point] = []
        usable = [p for p in self.points if not p.setting.rule.alpha and (not own or has_widths(p.setting, self.own))]
        for point in sorted(usable, key=lambda point: (point.read, point.kl)):
            if not found or point.kl < found[-1].kl:
                found.append(point)
        return found

    def presets(self) -> dict[str, Point]:
        """For each level, the cheapest point of the pack's widths whose skipping adds no more KL than that."""
        base = next(point for point in self.points if point.setting == self.own).kl
        usable = self.pareto(own=True)
        within = {name: [p for p in usable if p.kl <= base + budget] for name, budget in LEVELS.items()}
        return {name: min(points, key=lambda point: point.read) for name, points in within.items()}


def has_widths(setting: Candidate, own: Candidate) -> bool:
    """Whether a pack of the widths of `own` can run `setting`."""
    return (setting.up, setting.gate, setting.down, setting.rank) == (own.up, own.gate, own.down, own.rank)


def search(
    checkpoint: Checkpoint,
    own: Candidate,
    passages: Tensor,
    windows: Tensor,
    keep: int,
    report: Callable[[str], None],
    *,
    widths: bool = True,
    signals: Sequence[Projection] = (),
    short: bool = True,
    whole: Sequence[int] = (),
) -> Frontier:
    """Measure dials alone, then the most promising combinations.

    Then what the presets would be, and the next cheaper points, with shares that rise or fall from layer to layer.

    Args:
        own: the widths of the pack. passages: (C, T) for thresholds. windows: (N, T), the last `keep` tokens of each
            predicted. widths: whether other widths than the pack's are tried. signals: of the pack's layers;
            short: its kind of scales; whole: its layers that skip no neuron, see `candidates.compute`.
    """
    even = checkpoint.neurons % 2 == 0
    measure = Measure(checkpoint, passages, windows, keep, report, signals, short=short, whole=whole)
    alone = measure(_alone(checkpoint, even=even, widths=widths), "each dial alone")
    guess = _Guess(alone, measure)
    chosen = [own, *guess.best([own], even=even)]
    if widths:
        every = [Candidate(u, g, d, r) for (u, r), g, d in itertools.product(guess.ups(), WIDTHS, WIDTHS)]
        chosen += [*PROBES, *guess.best(every, even=even)]
    together = measure([s for s in dict.fromkeys(chosen) if s not in {p.setting for p in alone}], "combinations")
    found = Frontier(own, (*alone, *together))
    sloping = _sloping(found, len(checkpoint.layers))
    return Frontier(own, (*found.points, *measure(sloping, "shares by layer")))


def _sloping(found: Frontier, layers: int) -> list[Candidate]:
    usable = found.pareto(own=True)
    places = [usable.index(point) for point in found.presets().values()]
    settings = dict.fromkeys(usable[at].setting for place in places for at in (place - 1, place) if at >= 0)
    ramps = [tuple(1 + slope * (2 * at / (layers - 1) - 1) for at in range(layers)) for slope in SLOPES if layers > 1]
    rules = [(s, s.rule) for s in settings if s.rule.sparsity or s.rule.product or s.rule.drops]
    return [replace(setting, rule=replace(rule, layers=ramp)) for setting, rule in rules for ramp in ramps]


def _alone(checkpoint: Checkpoint, *, even: bool, widths: bool) -> list[Candidate]:
    rules = [WEIGHED, *(replace(WEIGHED, sparsity=s, product=p) for s, p in SKIPS)]
    rules += [replace(WEIGHED, drop=low, major=high) for low, high in _drops(even=even)]
    if checkpoint.family.routing.kind == "softmax":  # other routers' experts are not replaced
        rules += [replace(WEIGHED, alpha=alpha) for alpha in ALPHAS]
    found = [Candidate(rule=rule) for rule in rules]
    if widths:
        found += [replace(Candidate(), **{part: bits}) for part in ("up", "gate", "down") for bits in WIDTHS]
        hidden, neurons = checkpoint.config.hidden_size, checkpoint.neurons
        # Ranks whose factors take about 5 and 15 % of the bytes of a 2-bit signal.
        stored = hidden * neurons * 2.5 / 8 / (hidden + neurons)
        found += [Candidate(up=2, rank=max(1, round(share * stored))) for share in (0.05, 0.15)]
    return list(dict.fromkeys(found))


def _drops(*, even: bool) -> list[tuple[float, float]]:
    """An odd number of neurons has no halves."""
    return [(low, high) for low, high in DROPS if even or low == high]


class Measure:
    """Runs settings in as many passes over the source as memory requires."""

    def __init__(
        self,
        checkpoint: Checkpoint | PackSource,
        passages: Tensor,
        windows: Tensor,
        keep: int,
        report: Callable[[str], None],
        signals: Sequence[Projection] = (),
        *,
        short: bool = True,
        whole: Sequence[int] = (),
    ) -> None:
        self._checkpoint, self._passages, self._windows, self._keep = checkpoint, passages, windows, keep
        self._report, self._signals = report, signals
        self._short, self._whole = short, whole
        config = checkpoint.config
        hidden, neurons = config.hidden_size, checkpoint.neurons
        self.shape = VectorLayout(hidden, 16, group_size(hidden), short), neurons
        self._weights = len(checkpoint.layers) * checkpoint.family.top_k(config) * 3 * hidden * neurons

    def __call__(self, settings: Sequence[Candidate], what: str) -> list[Point]:
        room = _MEMORY_SHARE * psutil.virtual_memory().available
        each = candidates.bytes_per_setting(self._checkpoint, self._windows.numel())
        size = max(1, int(room // each) - 1)
        passes = [settings[start : start + size] for start in range(0, len(settings), size)]
        points: list[Point] = []
        for index, part in enumerate(passes):
            note = f"{what}, {len(settings)} settings" + (f", pass {index + 1} of {len(passes)}" if passes[1:] else "")
            points += self._pass(part, lambda step, note=note: self._report(f"{note}. {step}"))
        return points

    def _pass(self, settings: Sequence[Candidate], report: Callable[[str], None]) -> list[Point]:
        # The source itself is in every pass: all are compared with it as computed beside them.
        source, *rest = candidates.compute(
            self._checkpoint,
            [Candidate(), *settings],
            self._passages,
            self._windows[:, :-1],
            self._keep,
            report,
            self._signals,
            short=self._short,
            whole=self._whole,
        )
        expected = source.logits()
        return [self._point(outcome, expected) for outcome in rest]

    def _point(self, outcome: Outcome, expected: Tensor) -> Point:
        logits = outcome.logits()
        following = self._windows[:, -self._keep :]
        parts = [score(a, b, c) for a, b, c in zip(logits, expected, following, strict=True)]
        read, missed = (part.nbytes(outcome.setting, *self.shape) for part in (outcome.taken, outcome.missed))
        return Point(outcome.setting, summarize(parts), read, missed, self.bits(read), outcome.taken)

    def bits(self, nbytes: float) -> float:
        """Bytes per token as bits per weight that a token's experts have."""
        return 8 * nbytes / self._weights


class _Guess:
    """Predicts the costs of combinations from the costs of their dials."""

    def __init__(self, alone: Iterable[Point], measure: Measure) -> None:
        self._known = {point.setting: point for point in alone}
        self._whole, self._shape = self._known[Candidate()].taken, measure.shape

    def ups(self) -> list[tuple[int, int]]:
        """Width and rank of signals that were measured."""
        return [(s.up, s.rank) for s in self._known if s == Candidate(up=s.up, rank=s.rank) and s.up < 16]

    def best(self, widths: Sequence[Candidate], *, even: bool) -> list[Candidate]:
        """The likely frontier of all dials over `widths`, thinned out evenly to _TOGETHER settings."""
        guessed: list[tuple[float, float, Candidate]] = []
        for stored, skip, drop in itertools.product(widths, ((0.0, 0.0), *SKIPS), ((0.0, 0.0), *_drops(even=even))):
            rule = replace(WEIGHED, sparsity=skip[0], product=skip[1], drop=drop[0], major=drop[1])
            setting = replace(stored, rule=rule)
            guessed.append((*self._cost(setting), setting))
        frontier: list[Candidate] = []
        lowest = float("inf")
        for _, kl, setting in sorted(guessed, key=lambda item: item[:2]):
            if kl < lowest:
                frontier.append(setting)
                lowest = kl
        step = max(1.0, len(frontier) / _TOGETHER)
        return [frontier[int(place * step)] for place in range(min(_TOGETHER, len(frontier)))]

    def _cost(self, setting: Candidate) -> tuple[float, float]:
        """Bytes read per token, and KL."""
        s = setting
        dials = (
            *(Candidate(up=s.up, rank=s.rank), Candidate(gate=s.gate), Candidate(down=s.down)),
            Candidate(rule=replace(s.rule, drop=0.0, major=0.0)),
            Candidate(rule=replace(s.rule, sparsity=0.0, product=0.0)),
        )
        kl = sum(self._known[dial].kl for dial in dials if dial in self._known)
        skipped, dropped = (self._known[dial].taken for dial in dials[3:5])
        share = dropped.halves / self._whole.halves
        # Thresholds weighed by the router leave next to no neurons of the experts that are left out by score.
        active, kept = min(skipped.active, share * self._whole.active), min(skipped.kept, share * self._whole.kept)
        return Taken(dropped.halves, active, kept).nbytes(setting, *self._shape), kl


def described(setting: Candidate) -> dict[str, Any]:
    """A setting's values that are not defaults, by name."""
    default = asdict(Candidate())
    widths, rule = asdict(setting), asdict(setting.rule)
    found = {name: value for name, value in widths.items() if name != "rule" and value != default[name]}
    return found | {name: value for name, value in rule.items() if value != default["rule"][name]}
