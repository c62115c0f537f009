"""Cancelling: seen within one layer, wherever the answer is, and nothing of it stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.engine.events import Cancel, Finished, PrefillProgress
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK, MoELayer
from torch import Tensor

from .driver import Engine, asking, layer_by_layer

PROMPT = [5, 6, 7, 8]
LAYERS = 2


@pytest.fixture
def engine(tiny_pack: Path) -> Iterator[Engine]:
    with Engine() as engine:
        engine.load(tiny_pack)
        yield engine


class Watch:
    """Counts MoE layers that began and that were computed; cancels a request when the n-th has been computed."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = self.computed = 0
        self.cancel_after: int | None = None
        self.request = 1
        original = MoELayer.forward

        def forward(layer: MoELayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            self.begun += 1
            out = original(layer, hidden, top_k_index, top_k_weights)
            self.computed += 1
            if self.computed == self.cancel_after:
                engine.send(Cancel(self.request))
            return out

        monkeypatch.setattr(MoELayer, "forward", forward)
        layer_by_layer(monkeypatch)


@pytest.fixture
def watch(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(engine, monkeypatch)


def cancelled(engine: Engine, request: int = 1) -> Finished:
    end = engine.end_of(request)
    assert isinstance(end, Finished) and end.reason == "cancelled", end
    return end


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_cancel_in_prefill_is_seen_within_one_layer(engine: Engine, watch: Watch, after: int) -> None:
    watch.cancel_after = after
    engine.send(asking(1, [5, 6, 7] * 150))
    finished = cancelled(engine)
    assert watch.computed == after and watch.begun <= after + 1
    assert engine.tokens_of(1) == [] and finished.stats.new_tokens == 0
    done = [event.done for event in engine.seen if isinstance(event, PrefillProgress)]
    assert done == ([PREFILL_CHUNK] if after > LAYERS else [])


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("layer", [1, 2])
def test_a_cancel_in_decode_is_seen_within_one_layer(engine: Engine, watch: Watch, steps: int, layer: int) -> None:
    watch.cancel_after = after = LAYERS * steps + layer
    engine.send(asking(1, PROMPT, tokens=400))
    finished = cancelled(engine)
    assert watch.computed == after and watch.begun <= after + 1
    assert len(engine.tokens_of(1)) == steps
    assert finished.stats.new_tokens == steps + (1 if layer == LAYERS else 0)  # drawn, but after the cancel


def test_a_cancel_before_its_question_holds(engine: Engine, watch: Watch) -> None:
    engine.send(Cancel(1), asking(1, PROMPT))
    cancelled(engine)
    assert watch.computed == 0 and engine.tokens_of(1) == []


def test_a_question_in_the_queue_is_cancelled_and_the_one_before_is_not(engine: Engine, watch: Watch) -> None:
    watch.cancel_after, watch.request = 6, 2
    engine.send(asking(1, PROMPT), asking(2, PROMPT), asking(3, PROMPT))
    cancelled(engine, 2)  # at once: it does not wait for its turn
    first, third = engine.end_of(1), engine.end_of(3)
    assert isinstance(first, Finished) and first.reason == "length"
    assert isinstance(third, Finished) and third.reason == "length"
    assert engine.tokens_of(3) == engine.tokens_of(1)


@pytest.mark.parametrize(("after", "kept"), [(1, 0), (3, PREFILL_CHUNK), (4, 450), (5, 450), (6, 451), (7, 451)])
def test_what_a_cancelled_answer_computed_is_not_computed_again(
    engine: Engine, watch: Watch, after: int, kept: int
) -> None:
    prompt = [5, 6, 7] * 150
    watch.cancel_after = after
    engine.send(asking(1, prompt))
    cancelled(engine)
    prompt += [*engine.tokens_of(1), 9]
    engine.send(asking(2, prompt))
    end = engine.end_of(2)
    assert isinstance(end, Finished) and end.stats.reused_tokens == kept


def test_a_cancel_that_comes_too_late_harms_nobody(engine: Engine) -> None:
    engine.send(asking(1, PROMPT, tokens=2))
    engine.end_of(1)
    engine.send(Cancel(1), Cancel(1), Cancel(99), asking(2, PROMPT, tokens=2))
    end = engine.end_of(2)
    assert isinstance(end, Finished) and end.reason == "length"
