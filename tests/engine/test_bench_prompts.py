"""First tokens of prompts on virtual cards, beside others' policies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from floe_chat.engine.bench.cards import prompts
from floe_chat.engine.bench.cards.replay import Played
from floe_chat.engine.bench.cards.trace import Trace
from floe_chat.engine.offload.cards import Card
from floe_chat.engine.offload.cards import named as card
from floe_chat.engine.offload.mix import Mix

from .replaying import MIXTRAL, SMALL, WARM, WIDTH, recorded


@pytest.fixture(scope="module")
def trace(tiny_pack: Path) -> Trace:
    return recorded(tiny_pack)


LENGTHS = (8, 64)


def prompts_on(card: Card, trace: Trace, mix: Mix, *, host: bool = False) -> list[Played]:
    """With room for half of a layer's rows besides both layers' up projections."""
    one = WIDTH.layer(trace.thresholds[0])
    vram = WIDTH.fixed + 8 * one.signal.bytes_per_expert() + one.rows.data.nbytes // 2
    card = dataclasses.replace(card, vram_bytes=vram)
    return prompts.played(card, WIDTH, trace, mix, WARM, host=host, lengths=LENGTHS)


def test_a_prompts_experts_cross_the_link_once_or_not_at_all(trace: Trace) -> None:
    one = WIDTH.layer(trace.thresholds[0])
    rows, ups = one.rows.data.nbytes, 4 * one.signal.bytes_per_expert()
    slow = dataclasses.replace(SMALL, cpu_flops=1e6)  # so that none is computed by the CPU
    for played in prompts_on(slow, trace, Mix(gpu=2)):
        assert played.moved == 0 and played.hidden is None and played.seconds > 0
    long = prompts_on(slow, trace, Mix(cpu=2))[1]
    assert 0 < long.moved <= 2 * rows and not long.moved % (rows // 8)  # in halves, but for those of few tokens
    assert 0 < long.waited < long.busy
    assert 0 < prompts_on(slow, trace, Mix(pool=1, cpu=1))[1].moved < long.moved
    layerwise = prompts.layerwise(dataclasses.replace(slow, vram_bytes=1), WIDTH, trace, LENGTHS)[1]
    used = sum(len(np.unique(trace.index[:, layer])) for layer in range(2))
    assert layerwise.moved == used * (rows + ups) // 4 and layerwise.hidden == pytest.approx(0, abs=1e-9)


def test_first_tokens_are_compared_by_size_of_memory(trace: Trace) -> None:
    told: list[str] = []
    rtx = dataclasses.replace(card("sim:rtx3060-12gb"), vram_bytes=8 * 2**30)
    found = prompts.sections(rtx, MIXTRAL, trace, WARM, lambda text, _done, _of: told.append(text))
    assert [section.title.split(":")[0] for section in found] == ["rtx3060-12gb, 6 GB", "rtx3060-12gb, 8 GB"] and told
    for section in found:
        assert len(section.rows) == 4 * len(prompts.LENGTHS)
        assert all((row.speedup is None) == (prompts.LAYERWISE in row.name) for row in section.rows)
