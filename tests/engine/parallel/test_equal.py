"""What several processes compute is what one computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from torch import Tensor

from ...helpers import relative_rms
from .alone import NEW, PROMPT, Alone, prompt_of
from .leader import preset_of
from .processes import Processes

# The demo model keeps keys and values in 16 bits: which way one is rounded changes as much in one process, see
# `test_how_much_chunks_change`. It depends on the processor: 1.2e-4 by the portable kernels after a turn before. A part
# that is missing shows from 2e-3 on.
LIMITS = {"demo": 3e-4}
LIMIT = 1e-5
PATTERNS = ("tp", "ep", "etp", "s-etp")
DROPPING = {"drop": 0.7, "major": 1.0}


def same(
    found: tuple[dict[str, Any], list[Tensor]], expected: tuple[list[int], list[Tensor]], family: str = "demo"
) -> None:
    assert found[0]["tokens"] == expected[0]
    assert len(found[1]) == len(expected[1])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert relative_rms(mine, theirs) < LIMITS.get(family, LIMIT)


def test_how_much_chunks_change(alone: dict[str, Alone]):
    """In one process, a prompt in two chunks gives logits that differ from those of one chunk by as much."""
    loaded, logits = alone["demo"].loaded, list[Tensor]()
    loaded.control.preset = preset_of({})
    for chunk in (PROMPT, PROMPT // 2):
        kv, last = KVCache(), torch.empty(0)
        for start in range(0, PROMPT, chunk):
            some = prompt_of()[start : start + chunk]
            last = loaded.decoder.forward(some, kv)
            kv.computed(some, loaded.control.preset)
        logits.append(last)
    assert 0 < relative_rms(logits[1], logits[0]) < LIMITS["demo"]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_logits_are_those_of_one_process(
    four: Processes, alone: dict[str, Alone], packs: dict[str, Path], family: str, pattern: str
):
    four.do("open", pack=str(packs[family]), pattern=pattern)
    same(four.answer(prompt_of(), NEW), alone[family].answer(prompt_of()), family)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_same_calls_are_left_out(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    four.do("open", pack=str(packs["demo"]), pattern=pattern)
    found, logits = four.answer(prompt_of(), NEW, rule=DROPPING)
    one = alone["demo"]
    same((found, logits), one.answer(prompt_of(), DROPPING))
    counted = [
        [each.dropped, each.neurons, each.active, each.bytes, each.calls] for each in one.loaded.telemetry.layers
    ]
    assert found["counted"] == counted
    assert sum(each.dropped for each in one.loaded.telemetry.layers) > 0


@pytest.mark.parametrize("pattern", ["ep", "s-etp"])
def test_a_process_without_tokens(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    """Of a prompt of equal tokens, all go to the same experts."""
    four.do("open", pack=str(packs["demo"]), pattern=pattern)
    prompt = [5] * 9
    busy = [{expert // 4 for expert in choices.flatten().tolist()} for choices in alone["demo"].routing(prompt)]
    assert min(map(len, busy)) == 1  # in some layer a half of the experts has nothing to do
    same(four.answer(prompt, NEW), alone["demo"].answer(prompt))


def test_each_holds_its_part(four: Processes, packs: dict[str, Path]):
    for pattern, held in {"tp": [8, 96], "ep": [2, 384], "s-etp": [4, 192], "s-etp:4": [8, 96]}.items():
        opened = four.do("open", pack=str(packs["demo"]), pattern=pattern)
        assert opened["held"] == [held, held]
        assert opened["reason"].count(f"experts over 4 processes ({pattern.partition(':')[0]})") == 1


def test_a_prompt_of_several_chunks(four: Processes, alone: dict[str, Alone], packs: dict[str, Path]):
    four.do("open", pack=str(packs["gpt_oss"]), pattern="s-etp")
    same(four.answer(prompt_of(300), NEW), alone["gpt_oss"].answer(prompt_of(300)), "gpt_oss")


@pytest.mark.parametrize("pattern", ["tp", "ep"])
def test_a_conversation_of_several_turns(
    four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str
):
    four.do("open", pack=str(packs["demo"]), pattern=pattern)
    first, _ = four.answer(prompt_of(), NEW)
    longer = [*prompt_of(), *first["tokens"], *prompt_of(20)]
    second, logits = four.answer(longer, NEW, fresh=False)
    expected = alone["demo"].answer(longer)
    assert second["tokens"] == expected[0] and second["passes"] == NEW
    assert relative_rms(logits[-1], expected[1][-1]) < LIMITS["demo"]
    branch = [*prompt_of()[:30], *prompt_of(12)]  # the others drop what was behind it too
    third, logits = four.answer(branch, NEW, fresh=False)
    expected = alone["demo"].answer(branch)
    assert third["tokens"] == expected[0]
    assert relative_rms(logits[-1], expected[1][-1]) < LIMITS["demo"]


def test_a_stop_leaves_all_usable(four: Processes, alone: dict[str, Alone], packs: dict[str, Path]):
    four.do("open", pack=str(packs["demo"]), pattern="ep")
    stopped, _ = four.answer(prompt_of(700), 2, stop_after=1)
    assert stopped["reason"] == "cancelled" and stopped["kept"] < 700
    same(four.answer(prompt_of(), NEW, fresh=False), alone["demo"].answer(prompt_of()))
