"""From end to end on cards that are simulated: each engine's policy on the pack's own routing, at a published width.

As in `floe-chat bench offload`, the pack reads a text, what its routers and neurons want is spread over a published
model's experts, and every engine is played on a virtual card by its figures. No time of any engine's own code counts
unless a row says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...kernels.rule import Rule
from ...models.catalog import described
from ...models.errors import UsageError
from ..bench.cards import baselines, mixes, prompts
from ..bench.cards.baselines import Baseline
from ..bench.cards.replay import Played, Stage, play, played_since
from ..bench.cards.trace import Trace, record
from ..bench.cards.width import Width
from ..bench.synthetic import need_memory, sizes_of
from ..experts.substitution import substitute
from ..offload.cards import DENSE_LAUNCHES, Card, named
from ..offload.offload import Parts
from ..planning.footprint import sizes_of as own_sizes
from ..quality.candidates import Candidate
from ..quality_presets import Preset
from .papers import Cells, Grid, Made
from .study import Ask, Study

TOKENS = 64  # of the text that are played, the first third of which warms up
MIXTRAL = "mixtral-8x7b"
_FLOE = Parts(eviction="lru", cpu=False)
_CORM = Parts(eviction="lru", cpu=False, predictor="gate")
ALPHA = 0.3
_ROUNDS = 8  # tokens whose scores say which expert is evicted
_SEEN: dict[tuple[str, int, str], Trace] = {}


@dataclass(frozen=True, slots=True)
class Scene:
    """A card, a model's width, and the routing: of the tokens of an answer, and of a prompt from its beginning on."""

    model: str
    card: Card
    width: Width
    trace: Trace
    prompt: Trace

    @property
    def warm(self) -> int:
        """Tokens before the clock is read."""
        return len(self.trace.index) // 3

    def with_memory(self, gib: float) -> Scene:
        """The same with another size of the card's memory."""
        return dataclasses.replace(self, card=dataclasses.replace(self.card, vram_bytes=int(gib * 2**30)))


def scene(study: Study, model: str, card: str, guesses: str = "auto", prompt: int = TOKENS) -> Scene:
    """What the paper had, unless the person names a model or a card; a pack of more experts has its own width.

    Args:
        prompt: tokens of the text for prompts; longer ones repeat them.

    Raises:
        UsageError: no such card or model, or a pack of more experts than the model that was named has.
    """
    sizes = sizes_of(study.synthetic) if study.synthetic else described(model).sizes
    trace = _trace(study, guesses, max(TOKENS, prompt))
    called = study.synthetic or model
    if not study.synthetic and (study.experts > sizes.experts or study.top_k > sizes.top_k):
        sizes, called = own_sizes(study.loaded.packed.manifest, study.loaded.model.config), study.name
    width, own = Width(sizes), named(study.card or card, study=True)
    trace = trace.widened(sizes.experts, sizes.top_k)
    return Scene(called, own, width, trace.first(TOKENS), trace)


def _trace(study: Study, guesses: str, tokens: int) -> Trace:
    ids = list(study.ids[: min(tokens, study.tokens)])
    if len(ids) < TOKENS // 4:
        raise UsageError(f"The text has {len(ids)} tokens", f"{TOKENS // 4} are needed.", "Give a longer one.")
    key = str(study.pack), hash(tuple(ids)), guesses
    if key not in _SEEN:
        hidden = study.loaded.packed.manifest.architecture.hidden
        values = study.layers * study.experts * study.neurons
        need_memory(4 * values * (hidden + len(ids)), "Its routing", "Give a smaller pack, such as the demo.")
        study.told.step("Recording what each token wants")
        _SEEN.clear()
        try:
            _SEEN[key] = record(study.pack, ids, study.name, guesses)
        except UsageError:  # in this family attention is not looked ahead through
            _SEEN[key] = record(study.pack, ids, study.name)
    return _SEEN[key]


def _here(own: Scene, how: str = "") -> str:
    limit = f" of {own.card.vram_bytes / 2**30:.3g} GB"
    return f"simulated {own.card.title}{limit}, {own.trace.source}, at the width of {own.model}{how}"


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds until a prompt's first token, by its length, and of each further token."""

    first: Mapping[int, float]
    token: float

    def speed(self, prompt: int, answer: int) -> float:
        """Tokens of an answer per second, the prompt's time included."""
        return answer / (self.first[prompt] + (answer - 1) * self.token)


Engine = Callable[[Scene, Sequence[int]], Pace]


def _engine(own: Scene, preset: Preset, parts: Parts, lengths: Sequence[int], *, ahead: bool) -> Pace:
    """This program's engine with these parts: decode, then prompts with what decode left on the card."""
    given = own.card, own.width, own.trace, preset, parts
    token = play(*given, ahead=ahead, warm=own.warm, host=False).seconds
    stage = Stage(own.card, own.width, own.prompt, preset, parts, ahead=False)
    for at in range(own.warm):
        stage.step([at])
    first: dict[int, float] = {}
    for length in lengths:
        before = stage.spent()
        stage.step([at % len(own.prompt.index) for at in range(length)])
        first[length] = played_since(stage, before, 1).seconds
    return Pace(first, token)


def _others(own: Scene, decode: Played, prompt: Sequence[Played], lengths: Sequence[int]) -> Pace:
    return Pace(dict(zip(lengths, (one.seconds for one in prompt), strict=True)), decode.seconds)


def _at(own: Scene, *widths: int) -> Scene:
    return dataclasses.replace(own, width=own.width.at(*widths))


def floe(share: float) -> Engine:
    """FloE: 2-bit up on the card, 16-bit rows fetched and predicted, the last used kept."""
    return lambda own, lengths: _engine(_at(own, 2, 16, 16), Preset("", Rule(share)), _FLOE, lengths, ahead=True)


def _naive(bits: int) -> Engine:
    def pace(own: Scene, lengths: Sequence[int]) -> Pace:
        decode = baselines.naive(own.card, own.width, own.trace, own.warm, bits)
        width = own.width.at(bits, bits, bits)
        return _others(own, decode, prompts.layerwise(own.card, width, own.prompt, lengths), lengths)

    return pace


def _mixtral_offloading(bits: int, dense: int) -> Engine:
    def pace(own: Scene, lengths: Sequence[int]) -> Pace:
        decode = baselines.mixtral_offloading(own.card, own.width, own.trace, own.warm, bits=bits, dense=dense)
        width = own.width.at(bits, bits, dense)
        return _others(own, decode, prompts.layerwise(own.card, width, own.prompt, lengths), lengths)

    return pace


def _fiddler(own: Scene, lengths: Sequence[int]) -> Pace:
    decode = baselines.fiddler(own.card, own.width, own.trace, own.warm)
    width = own.width.at(16, 16, 16)
    return _others(own, decode, prompts.fiddler(own.card, width, own.prompt, lengths), lengths)


def _mixtral_gpu(own: Scene, lengths: Sequence[int]) -> Pace:
    """All of it in 2 bits on a card that holds it, however small the limit of the others is."""
    large = own.with_memory(1024)
    decode = baselines.gpu_int2(large.card, own.width, own.trace, own.warm)
    assert decode is not None
    width = own.width.at(2, 2, 4)
    return _others(own, decode, prompts.layerwise(large.card, width, own.prompt, lengths), lengths)


def _ours(own: Scene, lengths: Sequence[int]) -> Pace:
    """This program as it plans for the card, at Balanced, the time of its own code here counted."""
    given = own.card, own.width, own.trace
    decode = mixes.placed(*given, own.warm, host=True)
    chosen = mixes.planned(own.card, own.width, host=True)
    if decode is None or chosen is None:
        raise UsageError("Nothing fits the card", f"{own.card.title} is too small for the model.", "")
    layers = own.trace.index.shape[1]
    prompt = mixes.between(
        mixes.in_proportion(chosen.mix, layers),
        lambda mix: prompts.played(own.card, own.width, own.prompt, mix, own.warm, host=True, lengths=lengths),
    )
    return _others(own, decode, prompt, lengths)


DEEPSPEED, OFFLOADING, OURS = "DeepSpeed-MII", "mixtral-offloading", "floe-chat"
ENGINES: dict[str, Engine] = {
    "FloE 80%": floe(0.8),
    "FloE 90%": floe(0.9),
    "Mixtral-GPU": _mixtral_gpu,
    OFFLOADING: _mixtral_offloading(3, 4),
    "Fiddler": _fiddler,
    DEEPSPEED: _naive(16),
    OURS: _ours,
}
_OURS_NOTE = (
    "DeepSpeed-MII is played as whole experts in 16 bits, fetched when needed; Mixtral-GPU as all experts in 2 bits on "
    "a card that holds them. floe-chat is as planned, at Balanced, with the time of its code here; others have none."
)


def _paces(study: Study, own: Scene, engines: Mapping[str, Engine], lengths: Sequence[int]) -> dict[str, Pace | None]:
    found: dict[str, Pace | None] = {}
    for name, engine in engines.items():
        study.told.step(f"{own.card.name}: {name}")
        try:
            found[name] = engine(own, lengths)
        except ValueError:  # the card has no room for a pool
            found[name] = None
    return found


def _speeds(paces: Mapping[str, Pace | None], pairs: Sequence[tuple[int, int]]) -> dict[str, Cells]:
    def cells(prompt: int, answer: int) -> Cells:
        return tuple(None if pace is None else pace.speed(prompt, answer) for pace in paces.values())

    return {f"{prompt} in, {answer} out": cells(prompt, answer) for prompt, answer in pairs}


def _mean(rows: Mapping[str, Cells], at: int) -> float | None:
    column = [row[at] for row in rows.values()]
    known = [cell for cell in column if cell is not None]
    return sum(known) / len(known) if len(known) == len(column) else None


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def floe_f6(study: Study) -> Made:
    """A grid of lengths at 12 GB."""
    lengths = (16, 64, 256, 512)
    own = scene(study, MIXTRAL, "rtx3090-24gb@12gb", prompt=max(lengths))
    paces = _paces(study, own, ENGINES, lengths)
    rows = _speeds(paces, [(prompt, answer) for prompt in lengths for answer in (64, 256)])
    means = {name: _mean(rows, at) for at, name in enumerate(ENGINES)}
    others = (DEEPSPEED, OFFLOADING, "Fiddler", "Mixtral-GPU")
    gains: dict[str, Cells] = {
        name: tuple(_over(means[name], means[other]) for other in others) for name in ("FloE 80%", "FloE 90%", OURS)
    }
    grids = (Grid("tokens/s", tuple(ENGINES), rows), Grid("times as fast as, average", others, gains))
    how = f", {study.called} in place of ShareGPT"
    return Made(_here(own, how), grids, _by_prompt(paces, 256), _AXES, notes=(_OURS_NOTE,))


_AXES = ("tokens of the prompt", "tokens/s")


def _by_prompt(paces: Mapping[str, Pace | None], answer: int) -> dict[str, list[tuple[float, float]]]:
    known = {name: pace for name, pace in paces.items() if pace is not None}
    return {name: [(float(at), pace.speed(at, answer)) for at in pace.first] for name, pace in known.items()}


def floe_f8(study: Study) -> Made:
    """By the card's memory, at 64 tokens in and 256 out."""
    sizes = (12, 14, 16, 18, 20, 22, 24)
    own = scene(study, MIXTRAL, "rtx3090-24gb")
    cells: dict[str, list[float | None]] = {name: [] for name in ENGINES}
    for size in sizes:
        for name, pace in _paces(study, own.with_memory(size), ENGINES, (64,)).items():
            cells[name].append(None if pace is None else pace.speed(64, 256))
    rows: dict[str, Cells] = {name: tuple(row) for name, row in cells.items()}
    return Made(_here(own), (Grid("tokens/s by GB", tuple(map(str, sizes)), rows),), notes=(_OURS_NOTE,))


def fiddler_f2(study: Study) -> Made:
    """24 pairs of lengths on both cards, all in 16 bits."""
    engines: dict[str, Engine] = {"Fiddler": _fiddler, OFFLOADING: _mixtral_offloading(16, 16), DEEPSPEED: _naive(16)}
    lengths, answers = (16, 32, 64, 128, 256, 512), (64, 128, 256, 512)
    grids: list[Grid] = []
    gains: dict[str, Cells] = {}
    scenes = [
        scene(study, MIXTRAL, card, prompt=max(lengths))
        for card in ((study.card,) if study.card else ("quadrortx6000-24gb", "l4-24gb"))
    ]
    plot: dict[str, list[tuple[float, float]]] = {}
    for own in scenes:
        paces = _paces(study, own, engines, lengths)
        rows = _speeds(paces, [(prompt, answer) for prompt in lengths for answer in answers])
        grids.append(Grid(f"tokens/s, {own.card.title}", tuple(engines), rows))
        mine, offloading, naive = (_mean(rows, at) for at in range(3))
        gains[own.card.title] = (_over(mine, naive), _over(mine, offloading))
        plot |= {f"{name}, {own.card.title}": points for name, points in _by_prompt(paces, answers[-1]).items()}
    columns = ("over DeepSpeed-MII", "over mixtral-offloading")
    grids.insert(0, Grid("speedup of Fiddler, average", columns, gains))
    note = "The paper's lengths of answers are not printed; these are four. DeepSpeed-MII is whole experts on demand."
    here = "; ".join(map(_here, scenes))
    return Made(here, tuple(grids), plot, _AXES, notes=(note,))


def corm(own: Scene, lengths: Sequence[int]) -> Pace:
    """CORM: 4-bit experts of which 45 % of the neurons are fetched, predicted by the next router and gate, LRU."""
    return _engine(_at(own, 4, 4, 4), Preset("", Rule(0.55)), _CORM, lengths, ahead=True)


def corm_f7(study: Study) -> Made:
    """Speedup by lengths."""
    own = scene(study, MIXTRAL, _TI)
    lengths, answers = (64, 128), (8, 16, 32, 64, 128, 256, 512)
    engines: dict[str, Engine] = {"CORM": corm, "offloading": _naive(4), OFFLOADING: _mixtral_offloading(4, 4)}
    paces = _paces(study, own, engines, lengths)
    rows: dict[str, Cells] = {}
    means: dict[str, Cells] = {}
    for prompt in lengths:
        speeds = _speeds(paces, [(prompt, answer) for answer in answers])
        for at, other in ((1, "over offloading"), (2, "over mixtral-offloading")):
            rows[f"{other}, prompt {prompt}"] = tuple(_over(row[0], row[at]) for row in speeds.values())
        each = [rows[f"{other}, prompt {prompt}"] for other in ("over offloading", "over mixtral-offloading")]
        means[f"{study.name}, prompt {prompt}"] = tuple(sum(cell or 0.0 for cell in row) / len(row) for row in each)
    grids = (
        Grid("speedup by tokens of the answer", tuple(map(str, answers)), rows),
        Grid("speedup, average", ("over offloading", "over mixtral-offloading"), means),
    )
    return Made(_here(own), grids, notes=(_CORM_NOTE,))


_TI = "rtx3090ti-24gb@16gb"  # its 24 GB hold all of Mixtral in floe-chat's 4 bits
_CORM_NOTE = (
    "CORM is played by floe-chat's engine: signals on the card, rows of 4 bits, 55 % left out, all experts in 4 bits; "
    "a missing row is fetched, where CORM goes on without it."
)


def corm_f8(study: Study) -> Made:
    """Part by part."""
    own = _at(scene(study, MIXTRAL, _TI), 4, 4, 4)
    least = own.width.sizes.top_k * own.width.neurons
    given = own.card, own.width, own.trace, Preset("", Rule(0.55)), _CORM
    seconds = [
        baselines.naive(own.card, own.width, own.trace, own.warm, 4).seconds,
        play(*given, ahead=False, warm=own.warm, pool=least).seconds,
        play(*given, ahead=True, warm=own.warm, pool=2 * least).seconds,
        play(*given, ahead=True, warm=own.warm).seconds,
    ]
    rows: dict[str, Cells] = {study.name: tuple(seconds[0] / one for one in seconds)}
    grid = Grid("speedup over offloading", ("B", "B+S", "B+S+P", "B+S+P+C"), rows)
    return Made(_here(own), (grid,), notes=(_CORM_NOTE,))


def corm_t1(study: Study) -> Made:
    """Latency, simulated, and quality."""
    own = scene(study, MIXTRAL, _TI)
    asked: dict[str, Ask] = {
        "quantization": (Candidate(2, 2, 2, rule=Rule()), "gate"),
        "offloading": (Candidate(4, 4, 4, rule=Rule()), "gate"),
        "CORM": (Candidate(4, 4, 4, rule=Rule(0.55)), "gate"),
    }
    engines: dict[str, Engine] = {"quantization": _mixtral_gpu, "offloading": _naive(4), "CORM": corm}
    paces, points = _paces(study, own, engines, ()), study.points(list(asked.values()))
    rows: dict[str, Cells] = {}
    for (name, pace), point in zip(paces.items(), points, strict=True):
        rows[name] = (None if pace is None else pace.token, point.kl, 100 * point.divergence.same_top)
    grid = Grid("", ("s/token", "KL, nats", "same top token, %"), rows)
    return Made(f"{_here(own)}; quality of {study.here()}", (grid,), notes=(_CORM_NOTE,))


def _breakdown(name: str, played: Played) -> dict[str, Cells]:
    computing = played.seconds - played.waited
    overlap = max(0.0, played.busy - played.waited)
    return {name: tuple(1e3 * part for part in (played.seconds, played.busy, computing, overlap))}


def corm_t3(study: Study) -> Made:
    """Where the time goes."""
    own = _at(scene(study, MIXTRAL, _TI), 4, 4, 4)
    rows = _breakdown("offloading", baselines.naive(own.card, own.width, own.trace, own.warm, 4))
    given = own.card, own.width, own.trace, Preset("", Rule(0.55)), _CORM
    rows |= _breakdown("CORM", play(*given, ahead=True, warm=own.warm))
    grid = Grid("ms of a token", ("token", "loading", "computing", "overlap"), rows)
    return Made(_here(own), (grid,), notes=(_CORM_NOTE,))


def corm_t4(study: Study) -> Made:
    """What the next router and the signals of the experts that it names take of the GPU."""
    own = _at(scene(study, MIXTRAL, _TI), 4, 4, 4)
    given = own.card, own.width, own.trace, Preset("", Rule(0.55)), _CORM
    token = play(*given, ahead=True, warm=own.warm).seconds
    sizes = own.width.sizes
    nbytes = sizes.top_k * own.width.footprint.up + 2 * sizes.experts * sizes.hidden
    one = own.card.gpu_s(nbytes, 2.0 * sizes.top_k * sizes.hidden * sizes.intermediate, 2)
    predictor = (own.width.layers - 1) * one
    rows: dict[str, Cells] = {study.name: (1e3 * token, 1e3 * predictor, 100 * predictor / token)}
    return Made(_here(own), (Grid("", ("token, ms", "predictor, ms", "share, %"), rows),), notes=(_CORM_NOTE,))


@dataclass(frozen=True, slots=True)
class Steps:
    """Which parts of importance-driven scheduling are on: eviction by score (+CE), the expert-cache router (+ER),
    prefetching of experts of high score (+Pre), and the balance of CPU and link (+BA).
    """

    evict: bool = False
    route: bool = False
    prefetch: bool = False
    balance: bool = False


STEPS: dict[str, Steps] = {
    "baseline": Steps(),
    "+CE": Steps(evict=True),
    "+ER": Steps(evict=True, route=True),
    "+Pre": Steps(evict=True, route=True, prefetch=True),
    "+BA": Steps(evict=True, route=True, prefetch=True, balance=True),
}


@dataclass
class Importance:
    """Importance-driven scheduling, expert by expert (sections 5.1 to 5.4), for one text.

    Attributes:
        found, needed: experts that were computed, and those of them on the card. absent: experts of high and of low
            score that were not, after substitution and prefetching. cpu: seconds of the CPU.
    """

    engine: Baseline
    steps: Steps
    warm: int
    found: int = 0
    needed: int = 0
    absent: list[int] = field(default_factory=lambda: [0, 0])
    tokens: int = 0
    cpu: float = 0.0

    def __post_init__(self) -> None:
        there = _popular(self.engine, self.warm)
        self._there = [set(np.flatnonzero(layer).tolist()) for layer in there]
        self._seen: list[deque[NDArray[np.float32]]] = [deque(maxlen=_ROUNDS) for _ in there]
        self._coming: dict[int, float] = {}

    def __call__(self, token: int, layer: int, chosen: list[int]) -> None:
        """One layer's step, once the router has chosen."""
        engine, trace, there = self.engine, self.engine.trace, self._there[layer]
        assert trace.heard is not None
        scores = trace.heard[token, layer]
        self._seen[layer].append(scores)
        coming, self._coming = self._coming, {}
        if self.steps.route:
            chosen = substitute(scores.tolist(), chosen, _Among(there), ALPHA)
        rest = [score for expert, score in enumerate(scores.tolist()) if expert not in chosen]
        limit = (1 + ALPHA) * max(rest, default=0.0)
        absent = [expert for expert in chosen if expert not in there]
        if token >= self.warm:
            for expert in absent:
                self.absent[int(scores[expert] <= limit)] += 1
            self.tokens += layer == 0
            self.needed += len(chosen)
            self.found += len(chosen) - len(absent)
        cpu = self._compute(layer, chosen, absent, coming)
        self.cpu += cpu if token >= self.warm else 0.0
        if self.steps.prefetch and layer + 1 < engine.layers:
            self._prefetch(token, layer + 1)

    def _compute(self, layer: int, chosen: list[int], absent: list[int], coming: Mapping[int, float]) -> float:
        """Returns the CPU's seconds."""
        engine = self.engine
        cpu_s = engine.card.cpu_s(engine.nbytes, engine.flops)
        copy_s = engine.card.link_latency_s + engine.nbytes / engine.card.link_bytes_s
        copied = len(absent) if self.steps.evict else 0
        if self.steps.balance:
            copied = min(range(len(absent) + 1), key=lambda n: max(n * copy_s, (len(absent) - n) * cpu_s))
        done = [engine.clock.run("cpu", cpu_s) for _ in absent[copied:]]
        ends = {expert: engine.copy() for expert in absent[:copied]}
        for expert in chosen:
            if expert not in absent:
                engine.on_gpu(coming.get(expert, 0.0))
        for expert, end in ends.items():
            engine.on_gpu(end)
            self._bring(layer, expert, chosen)
        for end in done:
            engine.clock.wait("gpu", end)
        return cpu_s * len(done)

    def _bring(self, layer: int, expert: int, kept: Sequence[int]) -> None:
        """An expert takes the place of the one of the lowest mean score, of the experts that this step does not use."""
        there, mean = self._there[layer], np.mean(list(self._seen[layer]) or [np.zeros(self.engine.experts)], axis=0)
        if gone := [other for other in there if other not in kept]:
            there.remove(min(gone, key=lambda other: mean[other]))
            there.add(expert)

    def _prefetch(self, token: int, layer: int) -> None:
        """Experts of high predicted score, as many as the link brings while the next layer's attention is computed."""
        engine = self.engine
        guess = engine.trace.scores[token, layer]
        chances = np.exp(guess - guess.max())
        chances /= chances.sum()
        order = np.argsort(-chances)
        top_k = engine.trace.index.shape[2]
        limit = (1 + ALPHA) * (chances[order[top_k]] if top_k < len(order) else 0.0)
        room = engine.card.gpu_s(engine.width.dense_bytes, 0.0, DENSE_LAUNCHES)
        copy_s = engine.card.link_latency_s + engine.nbytes / engine.card.link_bytes_s
        wanted = [int(expert) for expert in order[:top_k] if chances[expert] > limit]
        for expert in [one for one in wanted if one not in self._there[layer]][: max(1, int(room / copy_s))]:
            self._bring(layer, expert, wanted)
            if expert in self._there[layer]:
                self._coming[expert] = engine.copy()


def _popular(engine: Baseline, warm: int) -> NDArray[np.bool_]:
    """(layers, experts): as `Baseline.popular`, of the tokens that warm up alone: the others are not known yet."""
    return Baseline(
        engine.card, engine.width, dataclasses.replace(engine.trace, index=engine.trace.index[:warm])
    ).popular()


class _Among:
    """Experts on the card, as `substitute` asks for them."""

    def __init__(self, there: set[int]) -> None:
        self._there = there

    def __contains__(self, expert: int) -> bool:
        return expert in self._there

    def use(self, expert: int) -> bool:
        """See `substitution.Resident`."""
        return expert in self._there


def importance(own: Scene, steps: Steps) -> tuple[Played, Importance]:
    """Play it, in 16 bits."""
    policy = Importance(Baseline(own.card, own.width.at(16, 16, 16), own.trace), steps, own.warm)
    return policy.engine.play(policy, own.warm), policy


SETTINGS = {"S1": ("deepseek-moe-16b-chat", "rtx3080ti-12gb"), "S3": ("qwen2-57b-a14b-instruct", "rtxa6000-48gb")}
_TWO = (
    "S1 is DeepSeekMoE-16B on an RTX 3080 Ti, S3 Qwen2-57B-A14B on an RTX A6000; S2's XVERSE-MoE is not among "
    "floe-chat's models. One text at a time. Experts have 16 bits."
)


def _settings(study: Study) -> dict[str, Scene]:
    if study.card or study.synthetic:
        return {"yours": scene(study, "deepseek-moe-16b-chat", "rtx3080ti-12gb", "partial")}
    return {name: scene(study, model, card, "partial") for name, (model, card) in SETTINGS.items()}


def _edge(scenes: Mapping[str, Scene], grids: Sequence[Grid], *notes: str) -> Made:
    source = next(iter(scenes.values())).trace.source
    named_ = ", ".join(f"{one.card.title}" for one in scenes.values())
    return Made(
        f"simulated {named_}; {source}",
        tuple(grids),
        notes=(*notes, *((_TWO,) if scenes.keys() == SETTINGS.keys() else ())),
    )


def importance_f12(study: Study) -> Made:
    """Time per token of the engines that are played here."""
    scenes = _settings(study)
    names = (
        "DeepSpeed, on demand",
        "MoE-Infinity, as LRU and prefetch",
        "llama.cpp, static split",
        "HybriMoE, as Fiddler",
    )
    rows: dict[str, list[float]] = {name: [] for name in (*names, "importance-driven", OURS)}
    for own in scenes.values():
        given = own.card, own.width, own.trace, own.warm
        wide = own.width.at(16, 16, 16)
        ours = mixes.placed(*given, host=True)
        played = (
            baselines.naive(*given),
            baselines.mixtral_offloading(*given, bits=16, dense=16),
            mixes.static(own.card, wide, own.trace, own.warm, host=False),
            baselines.fiddler(*given),
            importance(own, STEPS["+BA"])[0],
        )
        for row, one in zip(rows.values(), (*played, ours), strict=True):
            row.append(math.nan if one is None else 1e3 * one.seconds)
    cells: dict[str, Cells] = {
        name: tuple(None if math.isnan(cell) else cell for cell in row) for name, row in rows.items()
    }
    note = (
        "MoE-Infinity and HybriMoE are stood in for by the policies named. floe-chat's row has its own bits and skips "
        "as Balanced does, the time of its code counted; the others compute exactly in 16 bits."
    )
    return _edge(scenes, [Grid("ms per token", tuple(scenes), cells)], note)


def _lru_hits(own: Scene) -> float:
    """Share of experts found by the last-used cache of each layer."""
    engine = Baseline(own.card, own.width.at(16, 16, 16), own.trace)
    each = max(1, engine.room // engine.layers)
    hits = total = 0
    for layer in range(engine.layers):
        kept: list[int] = []
        for token, chosen in enumerate(own.trace.index[:, layer].tolist()):
            for expert in chosen:
                if token >= own.warm:
                    hits, total = hits + (expert in kept), total + 1
                kept = [*(one for one in kept if one != expert), expert][-each:]
    return hits / total


def importance_f13(study: Study) -> Made:
    """Experts found on the card."""
    scenes = _settings(study)
    rows: dict[str, Cells] = {
        "static, the most popular": tuple(_hits(importance(own, STEPS["baseline"])[1]) for own in scenes.values()),
        "the last used": tuple(100 * _lru_hits(own) for own in scenes.values()),
        "importance-driven": tuple(_hits(importance(own, STEPS["+BA"])[1]) for own in scenes.values()),
    }
    return _edge(scenes, [Grid("% found on the card", tuple(scenes), rows)])


def _hits(policy: Importance) -> float:
    return 100 * policy.found / policy.needed


def importance_f14(study: Study) -> Made:
    """Time to the first token of a prompt of 512."""
    scenes, length = _settings(study), 512
    rows: dict[str, Cells] = {}
    for name, engine in (("layer by layer", _naive(16)), ("Fiddler's", _fiddler), (OURS, _ours)):
        rows[name] = tuple(1e3 * engine(own, (length,)).first[length] for own in scenes.values())
    note = (
        "floe-chat's row has its own bits, and its experts stream while those before are computed, as the paper's do."
    )
    return _edge(scenes, [Grid(f"ms, prompt of {length}", tuple(scenes), rows)], note)


def importance_f15(study: Study) -> Made:
    """Experts of high and of low score that were not on the card, per token."""
    scenes = _settings(study)
    grids: list[Grid] = []
    for name, own in scenes.items():
        rows: dict[str, Cells] = {}
        for step in ("baseline", "+CE", "+ER", "+Pre"):
            policy = importance(own, STEPS[step])[1]
            whole = own.width.layers / policy.engine.layers
            rows[step] = tuple(whole * count / policy.tokens for count in policy.absent)
        grids.append(Grid(f"absent per token, {name}", ("high score", "low score"), rows))
    return _edge(scenes, grids)


def importance_f16(study: Study) -> Made:
    """Time per token and hits, part by part."""
    scenes = _settings(study)
    times, hits = dict[str, Cells](), dict[str, Cells]()
    for name, steps in STEPS.items():
        played = [importance(own, steps) for own in scenes.values()]
        times[name] = tuple(1e3 * one.seconds for one, _ in played)
        hits[name] = tuple(_hits(policy) for _, policy in played)
    grids = [Grid("ms per token", tuple(scenes), times), Grid("% found on the card", tuple(scenes), hits)]
    return _edge(scenes, grids, "The baseline computes absent experts on the CPU, the steps up to +Pre load them.")


def importance_f17(study: Study) -> Made:
    """The link's and the token's time, without and with prefetching."""
    scenes = _settings(study)
    rows: dict[str, Cells] = {}
    for name in ("+ER", "+Pre"):
        played = [importance(own, STEPS[name])[0] for own in scenes.values()]
        rows[f"{name}, link"] = tuple(1e3 * one.busy for one in played)
        rows[f"{name}, token"] = tuple(1e3 * one.seconds for one in played)
    return _edge(scenes, [Grid("ms per token", tuple(scenes), rows)])


def importance_f19(study: Study) -> Made:
    """The CPU's and the link's time with the balancer, and without it."""
    scenes = _settings(study)
    rows: dict[str, Cells] = {}
    for name in ("+Pre", "+BA"):
        played = [(own, *importance(own, STEPS[name])) for own in scenes.values()]
        rows[f"{name}, link"] = tuple(1e3 * one.busy for _, one, _ in played)
        rows[f"{name}, CPU"] = tuple(
            1e3 * policy.cpu / policy.tokens * own.width.layers / policy.engine.layers for own, _, policy in played
        )
    return _edge(scenes, [Grid("ms per token", tuple(scenes), rows)])


MAKERS: dict[str, Callable[[Study], Made]] = {
    "floe-f6": floe_f6,
    "floe-f8": floe_f8,
    "fiddler-f2": fiddler_f2,
    "corm-f7": corm_f7,
    "corm-f8": corm_f8,
    "corm-t1": corm_t1,
    "corm-t3": corm_t3,
    "corm-t4": corm_t4,
    "importance-f12": importance_f12,
    "importance-f13": importance_f13,
    "importance-f14": importance_f14,
    "importance-f15": importance_f15,
    "importance-f16": importance_f16,
    "importance-f17": importance_f17,
    "importance-f19": importance_f19,
}
