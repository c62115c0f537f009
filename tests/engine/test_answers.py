"""Answers that are computed at the same time, with the session's thread: each is what it is alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.answers import MOST, Answers, Step
from floe_chat.engine.decoder.fused_pass import FusedDecoder
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.decoder.kv_shelf import LEAST
from floe_chat.engine.events import (
    Cancel,
    Chance,
    Extras,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    NewTokens,
    PresetChanged,
    Rule,
    Sampling,
    SetPreset,
    SetQuality,
    Unload,
    Unloaded,
)
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK
from floe_chat.engine.generate import Answer, Progress
from floe_chat.engine.machine import gpus
from floe_chat.engine.pace import Pace
from floe_chat.engine.quality_presets import Preset
from torch import Tensor

from .driver import GREEDY, Engine, a_preset
from .margins import prompt_of

WARM = Sampling(temperature=1.0, seed=5)
ONE, OTHER = a_preset("one", 0.0), a_preset("other", 0.3)


def asking(request: int, prompt: Sequence[int], *, tokens: int = 40, sampling: Sampling = GREEDY) -> Generate:
    return Generate(request, tuple(prompt), sampling, tokens, ())


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each pass has had, whatever is faster: together wherever there are several."""
    seen: list[int] = []
    together = FusedDecoder.together

    def counted(self: FusedDecoder, tokens: Sequence[int], kvs: Sequence[KVCache]) -> Tensor | None:
        seen.append(len(tokens))
        return together(self, tokens, kvs)

    def always(_self: Pace, _preset: Any, together: int) -> bool:
        return together > 1

    monkeypatch.setattr(FusedDecoder, "together", counted)
    monkeypatch.setattr(Pace, "joins", always)
    return seen


@pytest.fixture(
    params=[
        "cpu",
        *(pytest.param(place, marks=pytest.mark.thorough) for place in ("throttled:4gb", "sim:rtx3060-12gb")),
    ]
)
def engine(request: pytest.FixtureRequest, tiny_pack: Path) -> Iterator[Engine]:
    """With a rule that skips nothing, by which a last bit of noise decides nothing."""
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, request.param, None if request.param == "cpu" else 1 << 30))
        engine.until(Loaded)
        engine.send(SetQuality(Rule()))
        engine.until(PresetChanged)
        yield engine


def alone(engine: Engine, number: int, command: Generate) -> list[int]:
    """The same answer by itself."""
    engine.send(replace(command, request=number))
    assert isinstance(engine.end_of(number), Finished)
    return engine.tokens_of(number)


@pytest.mark.parametrize(
    "engine",
    ["cpu", "sim:rtx3060-12gb", pytest.param("throttled:4gb", marks=pytest.mark.thorough)],
    indirect=True,
)
def test_four_together_are_each_alone(engine: Engine, widths: list[int]) -> None:
    samplings = [GREEDY, WARM, Sampling(temperature=0.7, seed=3, repetition_penalty=1.2), GREEDY]
    lengths = [30, 7, 12, 25]
    asked = [
        asking(number, prompt_of(number, 5 + 9 * number), tokens=tokens, sampling=sampling)
        for number, (tokens, sampling) in enumerate(zip(lengths, samplings, strict=True), 1)
    ]
    apart = [alone(engine, 10 + one.request, one) for one in asked]
    assert not widths
    engine.send(*asked)
    ends = [finished(engine, one.request) for one in asked]
    for one, wanted, end, length in zip(asked, apart, ends, lengths, strict=True):
        assert engine.tokens_of(one.request) == wanted and len(wanted) == length
        assert end.reason == "length" and end.stats.new_tokens == length and end.stats.request == one.request
        assert end.stats.prompt_tokens == len(one.prompt) and end.stats.decode_tps_mean
        assert 1 <= end.stats.together <= MOST
    assert max(widths) == MOST and widths == [*sorted(widths[: widths.index(4)]), *widths[widths.index(4) :]]
    assert alone(engine, 20, asked[0]) == apart[0]  # nothing is left behind


@pytest.mark.usefixtures("widths")
def test_a_card_that_fails_ends_each_of_them_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedDecoder, "together", Mock(side_effect=RuntimeError("CUDA error: unknown error")))
    monkeypatch.setattr(gpus, "lost", Mock(return_value=True))
    engine.send(*(asking(number, prompt_of(number, 5)) for number in (1, 2, 3)))
    ended = [engine.until((Failed, Finished)) for _ in range(3)]
    assert {event.request for event in ended if isinstance(event, Failed)} == {1, 2, 3}
    engine.send(SetPreset("Fast"))  # nothing else ends before it
    refused = engine.until((Failed, Finished, PresetChanged))
    assert isinstance(refused, Failed) and refused.request is None
    titles = {event.title for event in (*ended, refused) if isinstance(event, Failed)}
    assert titles == {"The graphics card no longer answers floe-chat"}


def several(engine: Engine, request: int, tokens: int) -> None:
    """Until so many tokens of an answer have come."""
    while len(engine.tokens_of(request)) < tokens:
        engine.until(NewTokens)


def finished(engine: Engine, request: int) -> Finished:
    """How an answer ended, whenever that was."""
    while True:
        for event in engine.seen:
            if isinstance(event, Finished | Failed) and event.request == request:
                assert isinstance(event, Finished), event
                return event
        engine.until((Finished, Failed))


def test_a_fifth_waits_for_its_turn(engine: Engine, widths: list[int]) -> None:
    engine.send(*(asking(number, prompt_of(number), tokens=9) for number in range(1, 7)))
    for number in range(1, 7):
        assert finished(engine, number).reason == "length"
    assert max(widths) == MOST


def test_a_common_beginning_is_computed_once(engine: Engine, widths: list[int]) -> None:
    prompt = prompt_of(3, LEAST + 40)
    alone(engine, 8, asking(8, prompt, tokens=60))
    engine.send(*(asking(number, prompt, tokens=60) for number in (1, 2, 3)))
    for number in (1, 2, 3):
        stats = finished(engine, number).stats
        assert stats.reused_tokens == len(prompt)
        assert engine.tokens_of(number) == engine.tokens_of(8)
    assert max(widths) == 3


@pytest.mark.parametrize("parked", [0, pytest.param(1 << 30, marks=pytest.mark.thorough)])
def test_a_seed_repeats_whatever_was_computed_before(tiny_pack: Path, widths: list[int], parked: int) -> None:
    """To the last bit, by a rule that leaves out what is small."""
    first, said = prompt_of(4, PREFILL_CHUNK + 90), 40
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), "Balanced", "cpu", parked=parked))
        engine.until(Loaded)

        def ask(number: int, prompt: Sequence[int], sampling: Sampling = WARM) -> Generate:
            return replace(asking(number, prompt, sampling=sampling, tokens=said), extras=Extras(likeliest=3))

        def heard(number: int) -> list[tuple[int, Chance]]:
            news = [event for event in engine.seen if isinstance(event, NewTokens) and event.request == number]
            return [each for event in news for each in zip(event.ids, event.chances, strict=True)]

        alone(engine, 1, ask(1, first))
        second = [*first, *engine.tokens_of(1), 5, 6, 7]
        engine.send(Unload(), Load(str(tiny_pack), "Balanced", "cpu", parked=parked))
        engine.until(Loaded)
        alone(engine, 2, ask(2, second))
        assert len(heard(2)) == said
        # The first chunk of the prompt is there; then also tokens that were computed one by one; nothing; all of it.
        chunk = PREFILL_CHUNK
        for number, before, there in (
            (3, first, chunk),
            (4, second[:-1], chunk),
            (5, prompt_of(6), 0),
            (6, second, len(second)),
        ):
            alone(engine, 10 + number, ask(10 + number, before, GREEDY))
            alone(engine, number, ask(number, second))
            stats = finished(engine, number).stats
            assert stats.reused_tokens == (len(second) if parked else there) and heard(number) == heard(2), number
        engine.send(*(ask(number, second) for number in (7, 8, 9)))
        for number in (7, 8, 9):
            finished(engine, number)
            assert heard(number) == heard(2), number
    assert max(widths) == 3


def test_one_is_stopped_and_the_others_go_on(engine: Engine, widths: list[int]) -> None:
    asked = [asking(number, prompt_of(number), tokens=90) for number in (1, 2, 3)]
    engine.send(*asked)
    for one in asked:
        several(engine, one.request, 20)
    engine.send(Cancel(2))
    assert finished(engine, 2).reason == "cancelled"
    here = len(engine.tokens_of(2))
    engine.send(Cancel(1), Cancel(3))
    for number in (1, 3):
        assert finished(engine, number).reason == "cancelled" and len(engine.tokens_of(number)) >= here - 20
    assert 20 <= here < 90 and max(widths) == 3
    apart = alone(engine, 9, asking(9, prompt_of(2), tokens=here))
    assert engine.tokens_of(2) == apart


@pytest.mark.parametrize("moment", ["queued", "reading", "first token", "batch"])
def test_after_a_cancel_only_the_end_comes(
    engine: Engine, widths: list[int], monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Cancelled when a step of it is computed and not reported; all have one prompt, which is read once."""
    compute, before, cancelled = Answers.step, list[int](), list[str]()

    def step(answers: Answers) -> list[Step]:
        found = compute(answers)
        of_second = next((one for one in found if one.running.request == 2), None)
        reached = {
            "queued": len(answers.running) == 1,
            "reading": of_second is not None and of_second.progress[0].token is None,
            "first token": of_second is not None and of_second.progress[0].token is not None,
            "batch": of_second is not None and len(found) == 3,
        }
        if not cancelled and reached[moment]:
            engine.send(Cancel(2))
            cancelled.append(moment)
        elif not cancelled and of_second is not None:
            before.extend(one.token for one in of_second.progress if one.token is not None)
        return found

    monkeypatch.setattr(Answers, "step", step)
    engine.send(*(asking(number, prompt_of(3), sampling=WARM) for number in (1, 2, 3)))
    assert finished(engine, 2).reason == "cancelled"
    for number in (1, 3):
        assert finished(engine, number).reason == "length" and len(engine.tokens_of(number)) == 40
    assert engine.tokens_of(2) == before and bool(before) == (moment == "batch")
    assert sorted(end.request for end in engine.seen if isinstance(end, Finished)) == [1, 2, 3]
    assert moment != "batch" or max(widths) == 3


def test_one_fails_and_the_others_go_on(engine: Engine, widths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    take = Answer.take

    def broken(self: Answer, logits: Tensor, began: float, preset: Preset) -> list[Progress]:
        return take(self, torch.full_like(logits, torch.nan) if len(self.kv.tokens) == 45 else logits, began, preset)

    asked = [asking(1, prompt_of(1, 40), tokens=30), asking(2, prompt_of(2, 20), tokens=20)]
    apart = alone(engine, 9, asked[1])
    monkeypatch.setattr(Answer, "take", broken)
    engine.send(*asked)
    failed = engine.until(Failed, request=1)
    assert failed.request == 1 and "not numbers" in failed.title
    assert finished(engine, 2).reason == "length" and engine.tokens_of(2) == apart and 2 in widths
    monkeypatch.setattr(Answer, "take", take)
    assert alone(engine, 10, asked[1]) == apart


def test_a_preset_changes_for_all_and_a_model_waits_for_all(engine: Engine, widths: list[int]) -> None:
    engine.send(*(asking(number, prompt_of(number), tokens=100) for number in (1, 2)))
    several(engine, 2, 30)
    engine.send(SetPreset("Fast"), Unload(), asking(3, prompt_of(3)))
    engine.until(PresetChanged, preset="Fast")
    engine.until(Unloaded)
    assert len(engine.tokens_of(1)) == len(engine.tokens_of(2)) == 100 and 2 in widths
    failed = engine.until(Failed, request=3)  # it was for the model that would have come
    assert failed.title == "No model is loaded"


def test_what_only_one_may_have_is_only_its_own(engine: Engine, widths: list[int]) -> None:
    """Extras and constraints stay with their answer."""
    only = bytearray(40)
    only[1] = 0b0010_0000  # token 13
    engine.session.constrain(2, lambda _last: bytes(only))
    engine.send(
        replace(asking(1, prompt_of(1), tokens=8), extras=Extras(likeliest=2)),
        asking(2, prompt_of(2), tokens=8),
    )
    assert finished(engine, 1).reason == finished(engine, 2).reason == "length"
    chances = [event.chances for event in engine.seen if isinstance(event, NewTokens) and event.request == 1]
    assert all(len(each[0].likeliest) == 2 for each in chances)
    assert engine.tokens_of(2) == [13] * 8 != engine.tokens_of(1) and 2 in widths


def measured(**seconds: float) -> Pace:
    pace = Pace()
    for name, each in seconds.items():
        pace.observed(ONE, int(name[1:]), 20 * each, 20)
    return pace


def test_which_is_faster_by_what_was_measured() -> None:
    pace = Pace()  # one alone is measured first
    assert not pace.joins(ONE, 2) and pace.may_join(ONE, 2)
    pace.observed(ONE, 1, 1.0, 15)
    assert not pace.joins(ONE, 2) and pace.may_join(ONE, 2)
    pace.observed(ONE, 1, 1.0, 1)
    assert pace.joins(ONE, 2) and pace.may_join(ONE, 2)
    assert not pace.joins(OTHER, 2) and pace.may_join(OTHER, 2)  # another preset has other speeds
    pace = measured(n1=1.0, n2=0.8, n3=1.1)
    assert pace.joins(ONE, 2) and not pace.joins(ONE, 3) and not pace.may_join(ONE, 3)
    assert pace.joins(ONE, 4)  # not tried yet
    pace.observed(ONE, 1, 500.0, 500)
    assert pace.joins(ONE, 3)  # tried again after a while
    pace = measured(n1=1.0, n2=0.5)
    pace.observed(ONE, 2, 250.0, 500)
    assert not pace.joins(ONE, 2) and pace.may_join(ONE, 2)  # one alone may be faster now
    pace = measured(n1=1.0)
    pace.refused(ONE, 2)
    assert not pace.may_join(ONE, 2) and pace.may_join(ONE, 3)
    pace.observed(ONE, 1, 500.0, 500)
    pace.observed(ONE, 2, 8.0, 16)  # there is memory again
    assert pace.joins(ONE, 2)


def test_it_is_measured_what_is_faster(tiny_pack: Path) -> None:
    """Nothing is forced here: one answer alone has to be measured before another joins."""
    with Engine() as engine:
        engine.load(tiny_pack)
        engine.send(asking(1, prompt_of(1), tokens=200), asking(2, prompt_of(2), tokens=200))
        for number in (1, 2):
            assert finished(engine, number).reason == "length" and len(engine.tokens_of(number)) == 200
