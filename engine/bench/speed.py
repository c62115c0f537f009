"""How fast a model answers: decode and prefill, whole and per layer, compared with the floor and with llama.cpp.

The time of one layer is the difference between all layers and the first ones (`Subject.fewest`), shared out; so
embedding, head and a step's fixed costs cancel out, here and for the peer. All take turns within each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...kernels.rule import Rule
from ...models.pack.manifest import Manifest
from ..machine.conditions import backend, computing, facts
from ..machine.load import Others, own_seconds
from ..machine.random_weights import last_level_cache
from ..machine.read_floor import READ
from ..quality.evaluate import choose_presets
from ..quality_presets import DEFAULT, Preset, notes
from .layers import ANSWER, Found, Part, RoundKey, active_note, answered, floor_figures, floor_parts, slope, told_apart
from .measure import MeasureReport, ResultTable, Section, Timed, in_turn, summarise
from .subject import Subject

WARM = 3
_CACHED = "All weights of this model take {weights:.0f} MB, which the caches of {cache:.0f} MB may hold."
_ALONE = "llama.cpp was not compared: --peer names a Python that has llama-cpp-python and gguf."
_NO_DIFFERENCE = "This model has too few layers to time one of them by the difference of layer counts."
_NO_FLOOR = "Without the compiled kernels there is no figure for what the memory delivers, so no share of it."


class Peer(Protocol):
    """Another program that runs a model of the same widths; `layers` are the two sizes that it is run with."""

    @property
    def name(self) -> str: ...

    @property
    def layers(self) -> tuple[int, int]: ...

    @property
    def version(self) -> str: ...

    def answer(self, prompt: int, tokens: int, layers: int) -> tuple[float, float]:
        """Seconds of the prompt, and of a token after it."""
        ...

    def read_bytes(self, layers: int, *, all_experts: bool) -> int:
        """Bytes of weights that a step reads."""
        ...

    def cpu_seconds(self) -> float:
        """CPU time that its process has used."""
        ...


@dataclass(frozen=True, slots=True)
class SpeedRun:
    """What to measure.

    Attributes:
        bench: "decode" or "prefill". presets: names; none takes all that the model can run, `quick` the default alone.
        tokens: the prompt's. threads: None takes as many as the engine would. published_layers: of the model that a
            synthetic one stands for, None for a pack, which is whole. rule: set by hand, see `choose_presets`.
    """

    bench: str
    presets: tuple[str, ...]
    tokens: int
    threads: int | None
    runs: int
    quick: bool
    published_layers: int | None = None
    rule: Rule | None = None

    def chosen(self, manifest: Manifest) -> list[Preset]:
        """The presets to measure.

        Raises:
            UsageError: see `choose_presets`.
        """
        names = self.presets or ((DEFAULT,) if self.quick and self.rule is None else ())
        return choose_presets(names, manifest, self.rule)


def run(subject: Subject, plan: SpeedRun, peers: Sequence[Peer], report: MeasureReport) -> ResultTable:
    """Measure.

    Raises:
        UsageError: a preset that the model cannot run, more threads than cores, or a prompt too long for the window.
    """
    presets, a = plan.chosen(subject.manifest), subject.manifest.architecture
    title = f"{plan.bench} of {subject.name}"
    chosen = backend(subject.device)
    with computing(plan.threads, a.hidden, a.intermediate) as threads:
        parts = _parts(subject, plan, presets, peers)
        others = Others(own=lambda: own_seconds() + sum(peer.cpu_seconds() for peer in peers))
        found = in_turn(parts, warm=WARM, runs=plan.runs, report=lambda done, total: report(title, done, total))
        cores = others.cores()
    results = _Results(subject, plan, presets, peers, found, cores)
    told = {"model": subject.describe(), **facts(chosen, threads=threads, prompt=f"{plan.tokens} tokens")}
    told |= {"runs": plan.runs, "warm_up": WARM} | ({"peer": peers[0].version} if peers else {})
    return ResultTable(
        plan.bench, chosen.device, told, results.sections(), (*results.notes(), *notes(presets, subject.manifest))
    )


def _parts(subject: Subject, plan: SpeedRun, presets: Sequence[Preset], peers: Sequence[Peer]) -> list[Part]:
    """The parts that take turns in a round."""
    prompt, prefill = subject.prompt(plan.tokens), plan.bench == "prefill"

    def ours(preset: Preset) -> dict[RoundKey, float]:
        subject.control.preset = preset
        return answered(preset.name, subject, prompt, prefill=prefill)

    def theirs(peer: Peer) -> dict[RoundKey, float]:
        found: dict[RoundKey, float] = {}
        for layers in peer.layers:
            seconds = peer.answer(len(prompt), 0 if prefill else ANSWER, layers)
            found[RoundKey(peer.name, layers, "seconds")] = seconds[0 if prefill else 1]
            found[RoundKey(peer.name, layers, "read")] = peer.read_bytes(layers, all_experts=prefill)
        return found

    parts = floor_parts(subject.device)
    parts += [lambda preset=preset: ours(preset) for preset in presets]
    return parts + [lambda peer=peer: theirs(peer) for peer in peers]


class _Results:
    """The values of all rounds as sections."""

    def __init__(
        self,
        subject: Subject,
        plan: SpeedRun,
        presets: Sequence[Preset],
        peers: Sequence[Peer],
        found: Found,
        cores: float,
    ) -> None:
        self._subject, self._plan, self._found, self._cores = subject, plan, found, cores
        self._presets = [preset.name for preset in presets]
        self._counts = dict.fromkeys(self._presets, (subject.fewest, subject.layers)) | {
            p.name: p.layers for p in peers
        }
        # The peer that others are compared with: the last one, which is the better of llama.cpp's kinds.
        self._reference = peers[-1].name if peers else None
        self._floor = floor_figures(found)
        self._clear, self._noise = told_apart(found, self._counts)

    def sections(self) -> tuple[Section, ...]:
        plan, layers = self._plan, self._subject.layers
        prefill = plan.bench == "prefill"
        what, tokens = (f"A prompt of {plan.tokens} tokens", plan.tokens) if prefill else ("One token", 1)
        title = f"{what}, {layers} layers with embedding and head"
        told = [self._section(title, self._presets, self._whole, tokens)]
        if self._clear:
            title = f"{what}, one layer by the difference of layer counts"
            told.append(self._section(title, self._clear, self._one, 0))
        if self._clear and plan.published_layers:
            title = f"{what}, all {plan.published_layers} layers with embedding and head, calculated"
            told.append(self._section(title, self._clear, self._published, tokens))
        first = [Timed(name, self._found[RoundKey(name, layers, "first")], [0.0] * plan.runs) for name in self._presets]
        title = f"First token after {plan.tokens} tokens, {layers} layers"
        return *told, Section(title, summarise(first), self._cores)

    def notes(self) -> tuple[str, ...]:
        held, cache = self._subject.weight_bytes(self._subject.layers, experts=1.0), last_level_cache()
        cached = (_CACHED.format(weights=held / 1e6, cache=cache / 1e6),) if held <= cache else ()
        alone = (_ALONE,) if self._plan.published_layers and not self._reference else ()
        whole = () if self._subject.fewest < self._subject.layers else (_NO_DIFFERENCE,)
        return (*self._noise, *whole, *cached, *alone, *(() if self._floor else (_NO_FLOOR,)))

    def _section(
        self, title: str, names: Sequence[str], values: Callable[[str, str], Sequence[float]], tokens: int
    ) -> Section:
        rows = [
            Timed(
                name,
                values(name, "seconds"),
                values(name, "read"),
                floor=READ if self._floor else None,
                peer=self._reference if self._reference in names and name != self._reference else None,
                tokens=tokens,
                note=active_note(self._found, name, self._subject.layers),
            )
            for name in names
        ]
        return Section(title, summarise([*self._floor, *rows]), self._cores)

    def _whole(self, name: str, what: str) -> Sequence[float]:
        return self._found[RoundKey(name, self._subject.layers, what)]

    def _one(self, name: str, what: str) -> list[float]:
        return slope(self._found, name, self._counts[name], what)

    def _published(self, name: str, what: str) -> list[float]:
        """The time of the published number of layers, run by run."""
        few, total = self._counts[name][0], self._plan.published_layers or 0
        pairs = zip(self._found[RoundKey(name, few, what)], self._one(name, what), strict=True)
        return [less + (total - few) * each for less, each in pairs]
