"""Recorded tokens on several virtual cards of one machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from floe_chat.engine.bench.cards.replay import Stage, play
from floe_chat.engine.bench.cards.several import ALONE, division, in_proportion, sections
from floe_chat.engine.bench.cards.trace import Trace
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.mix import Mix
from floe_chat.engine.offload.offload import Parts

from .replaying import HALF, MIXTRAL, WARM, WIDTH, recorded

CARD = card("sim:rtx3060-12gb")


@pytest.fixture(scope="module")
def trace(tiny_pack: Path) -> Trace:
    return recorded(tiny_pack)


def test_two_cards_that_hold_all_take_as_long_as_one_and_the_crossings(trace: Trace) -> None:
    one = play(CARD, WIDTH, trace, HALF, Parts(mix=Mix(gpu=2)), ahead=False, warm=WARM)
    two = play(CARD, WIDTH, trace, HALF, Parts(mix=Mix(gpu=1)), ahead=False, warm=WARM, others=[(CARD, Mix(gpu=1))])
    crossing = CARD.link_latency_s * 2 + 2 * 2 * WIDTH.hidden / CARD.link_bytes_s
    assert two.moved == one.moved == 0
    assert two.seconds == pytest.approx(one.seconds + 2 * crossing, rel=1e-9)


def test_the_hosts_time_counts_once_whichever_card_it_works_for(trace: Trace) -> None:
    stage = Stage(CARD, WIDTH, trace, HALF, Parts(mix=Mix(pool=1)), ahead=True, host=True, others=[(CARD, Mix(pool=1))])
    for token in range(4):
        stage.step([token])
    now, _, _, _, host = stage.spent()
    assert 0 < host < now and all(0 < one.clock.busy("host") < host for one in stage.devices)
    assert stage.devices[1].clock.now <= now


@pytest.mark.parametrize("layers", [2, 5, 8, 32])
def test_a_trace_is_divided_as_the_model_is(layers: int) -> None:
    for cards in ((CARD, CARD), (card("3090"), CARD), (card("4060"), card("4060"))):
        parts = division(cards, MIXTRAL)
        own = in_proportion(parts, layers)
        assert sum(mix.layers for mix in own) == layers and all(mix.layers for mix in own)
        for mix, part in zip(own, parts, strict=True):
            assert mix.gpu / mix.layers <= part.best.mix.gpu / len(part.layers) + 1e-9
        if layers == 32:
            assert [(mix.gpu, mix.pool, mix.cpu) for mix in own] == [
                (one.best.mix.gpu, one.best.mix.pool, one.best.mix.cpu) for one in parts
            ]


def test_the_table_compares_with_the_best_of_one_card(trace: Trace) -> None:
    def report(_step: str, _done: int, _all: int) -> None:
        pass

    small = dataclasses.replace(CARD, name="small", vram_bytes=1 << 26)
    counted, free = sections([small, small], WIDTH, trace, WARM, report)
    assert "counted as plans count it" in counted.title and "no host time" in free.title
    for section in (counted, free):
        best, *rows = section.rows
        alone = [row.ms for row in rows if row.name.startswith("one card")]
        assert best.name == ALONE and best.ms == min(alone) and any(row.name.startswith("2 cards") for row in rows)
        assert all(row.peer == ALONE for row in rows)
