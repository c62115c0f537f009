"""How much faster an answer comes where a pass computes several of its tokens: the next one, and guesses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from ...models.errors import UsageError
from ...models.quantities import share
from .. import quality_presets
from ..decoder.draft_model import DraftModel
from ..decoder.fused_pass import FusedDecoder
from ..decoder.kv_cache import KVCache
from ..events import MOST_TOGETHER, Sampling
from ..machine.conditions import backend, computing, facts
from ..machine.load import Others
from ..quality_presets import Preset, notes
from ..sampling import Sampler
from .layers import RoundKey
from .measure import MeasureReport, ResultTable, Section, Timed, in_turn, summarise
from .speed import WARM, SpeedRun
from .subject import Subject

# A trained model's logits are so far apart that few rows of the output layer are read in full; random ones are not.
_GUESS = RoundKey("a drafter", 1, "seconds")
_GREEDY = Sampling(temperature=0.0)
_ANSWER = 12  # tokens: whole passes of each size
_RIGHT = (0.7, 0.8, 0.88)  # how often each further token is; Qwen3.6's own head is reported to reach the last two
_CALCULATED = (
    "Calculated: a pass of 3 takes as long as was measured, and counts 1 + a + a² tokens where each guess is right "
    "with chance a. Making the guesses is not counted: looking up what a text repeats takes microseconds, "
    "a drafting head a share of a token's time."
)
_COUNTED = (
    "Calculated: a pass of 3 takes as long as was measured, with two guesses of {name} before it, one token each, and "
    "counts 1 + a + a² tokens where each guess is right with chance a. How often it is shows in an answer only."
)
_ONE = "{name} computes one token in a pass here, so that no guess can gain anything: {device}, {reason}."


def run(subject: Subject, plan: SpeedRun, report: MeasureReport, drafter: Subject | None = None) -> ResultTable:
    """Measure passes of one to `MOST_TOGETHER` tokens at each preset, in turns, and a drafter's guesses.

    Raises:
        UsageError: a preset that the model cannot run, more threads than cores, or a prompt too long for the window.
    """
    a, prompt, presets = subject.manifest.architecture, subject.prompt(plan.tokens), plan.chosen(subject.manifest)
    title, chosen = f"passes of {subject.name}", backend(subject.device)
    with computing(plan.threads, a.hidden, a.intermediate) as threads, torch.inference_mode():
        parts = [_part(subject, preset, prompt, count) for preset in presets for count in range(1, MOST_TOGETHER + 1)]
        if drafter is not None:
            parts.append(_guesses(drafter, prompt))
        others = Others()
        found = in_turn(parts, warm=WARM, runs=plan.runs, report=lambda done, total: report(title, done, total))
        cores = others.cores()
    name = None if drafter is None else drafter.name
    sections = [section for preset in presets for section in _sections(preset.name, found, cores, name)]
    several = RoundKey(presets[0].name, 2, "seconds") in found
    one = _ONE.format(name=subject.name, device=chosen.device, reason=subject.decoder.reason)
    known = {"model": subject.describe(), **facts(chosen, threads=threads, prompt=f"{plan.tokens} tokens")}
    known |= {"runs": plan.runs, "warm_up": WARM}
    calculated = _CALCULATED if name is None else _COUNTED.format(name=name)
    remarks = (calculated if several else one, *notes(presets, subject.manifest))
    return ResultTable("draft", chosen.device, known, tuple(sections), remarks)


def _part(
    subject: Subject, preset: Preset, prompt: Sequence[int], count: int
) -> Callable[[], Mapping[RoundKey, float]]:
    """Passes of `count` tokens of an answer."""
    answer = list[int]()

    def part() -> dict[RoundKey, float]:
        subject.control.preset = preset
        if not answer:
            passes(subject, prompt, 1, answer)
        if subject.device != "cpu":  # a card captures its graphs again at another preset
            passes(subject, prompt, count, answer)
        seconds = passes(subject, prompt, count, answer)
        return {} if seconds is None else {RoundKey(preset.name, count, "seconds"): seconds}

    return part


def _guesses(drafter: Subject, prompt: Sequence[int]) -> Callable[[], Mapping[RoundKey, float]]:
    """Guesses of a drafter behind a prompt, at preset Fast.

    Raises:
        UsageError: it computes them otherwise than a drafter does.
    """
    decoder = drafter.decoder
    if not isinstance(decoder, FusedDecoder) or decoder.way.most == 1:
        raise UsageError(f"{drafter.name} cannot guess tokens", f"Its own are computed otherwise: {decoder.reason}.")
    drafter.control.preset = quality_presets.get("Fast", drafter.manifest)

    model, kv = DraftModel(drafter.name, decoder, drafter.control, drafter.window, 1.0), KVCache()
    kv.computed(prompt[:-1], drafter.control.preset)
    while model.follow(prompt, 2 * len(prompt), len(prompt)):
        pass

    def part() -> dict[RoundKey, float]:
        began, made = time.perf_counter(), 0
        while made < _ANSWER:
            model.follow(prompt, 2 * len(prompt), len(prompt))
            made += len(model.guess(prompt[-1], kv, lambda _likely: True)[0])
        return {_GUESS: (time.perf_counter() - began) / made}

    return part


def passes(subject: Subject, prompt: Sequence[int], count: int, answer: list[int]) -> float | None:
    """Mean seconds of a pass of `count` tokens, whose guesses are all right.

    Args:
        answer: the tokens; it is filled if it is empty, one by one.

    Returns:
        None if the model computes one token in a pass.
    """
    decoder, kv, sampler, drawn = subject.decoder, KVCache(), Sampler(_GREEDY, prompt), list[int]()
    token = sampler.draw(decoder.forward(prompt, kv))
    kv.computed(prompt, subject.control.preset)
    began, done = time.perf_counter(), 0
    while (left := _ANSWER - len(drawn)) > 0:
        guessed = answer[len(drawn) : len(drawn) + count - 1]
        found = decoder.several(token, kv, sampler, left, (), guessed)
        tokens, _, checked = found or ([sampler.draw(decoder.forward([token], kv))], None, 0)
        if guessed and not checked:
            return None
        kv.computed([token, *tokens[:-1]], subject.control.preset)
        drawn += tokens
        assert not checked or (drawn == answer[: len(drawn)] and len(tokens) == 1 + checked), "a guess is wrong"
        done += 1 if checked else len(tokens)
        token = drawn[-1]
    seconds = time.perf_counter() - began
    answer[:] = answer or drawn
    return seconds / done


def _sections(name: str, found: Mapping[RoundKey, Sequence[float]], cores: float, drafter: str | None) -> list[Section]:
    """A preset's passes as they were measured, and what follows for guesses that are right less often."""
    rows, calculated = list[Timed](), list[Timed]()
    ones = found[RoundKey(name, 1, "seconds")]
    one = Timed("one", ones, nothing := [0.0] * len(ones), tokens=1)
    guesses = found.get(_GUESS, nothing)
    for count in range(2, MOST_TOGETHER + 1):
        if (took := found.get(RoundKey(name, count, "seconds"))) is None:
            continue
        gained = median(count * alone / each for alone, each in zip(ones, took, strict=True))
        note = f"{gained:.2f}x the tokens"
        rows.append(Timed(f"{count} in a pass, all right", took, nothing, tokens=count, note=note))
        for right in _RIGHT:
            counted = sum(right**i for i in range(count))
            each = [(all_ + (count - 1) * guess) / counted for all_, guess in zip(took, guesses, strict=True)]
            called = f"{count} in a pass, {share(right)} right"
            calculated.append(Timed(called, each, nothing, peer=one.name, tokens=1))
    if drafter is not None:
        share_ = median(guess / alone for alone, guess in zip(ones, guesses, strict=True))
        rows.append(Timed(f"a guess by {drafter}", guesses, nothing, tokens=1, note=f"{share_:.2f} of a token"))
    sections = [Section(f"{name}: a pass of one token, and of several", summarise([one, *rows]), cores)]
    if calculated:
        title = f"{name}: a token where not all guesses are right, calculated"
        sections.append(Section(title, summarise([one, *calculated])[1:]))
    return sections
