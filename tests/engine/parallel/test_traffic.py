"""Bytes and messages of each pattern, as counted where they are sent, and by the formulas of `volume.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .alone import Alone, prompt_of
from .processes import Processes
from .volume import arriving, direct, in_steps

H, K, E, L = 256, 2, 8, 8  # of the demo model
ROW, RESULT = H * 4 + K * 8, H * 4  # bytes: a state in float32 and its choice; a result
ENTRY = 2 * 2 * 32 * 4  # bytes: keys and values of 2 heads of 32 numbers in float32
TOKENS = 120
GRIDS = {"ep": (4, 1), "etp": (2, 2), "s-etp": (2, 2), "s-etp:4": (1, 4)}
NONE = {"collectives": 0, "messages": 0, "nbytes": 0}


def kinds(group: Processes, rule: dict[str, Any] | None = None) -> dict[str, dict[str, int]]:
    """What process 0 sent for a prompt, and no token of an answer."""
    return group.answer(prompt_of(TOKENS), 0, rule=rule)[0]["kinds"]


@pytest.mark.parametrize("pattern", GRIDS)
def test_a_prompt(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    four.do("open", pack=str(packs["demo"]), pattern=pattern)
    found, (groups, slices) = kinds(four), GRIDS[pattern]
    counted = in_steps if pattern == "etp" else direct
    layers = [
        counted(arriving(each, groups, slices, E), slices, 0) for each in alone["demo"].routing(prompt_of(TOKENS))
    ]
    assert len(layers) == L
    steps = 2 if pattern == "etp" else 1
    assert found["rows"]["nbytes"] == sum(layer.rows for layer in layers) * ROW
    assert found["results"]["nbytes"] == sum(layer.results for layer in layers) * RESULT
    assert found["rows"]["messages"] + found["results"]["messages"] == sum(layer.messages for layer in layers)
    assert (
        found["rows"]["collectives"] == found["results"]["collectives"] == found["headers"]["collectives"] == steps * L
    )
    assert found["shared"]["nbytes"] == L * 3 * (TOKENS // 4) * ENTRY  # to each of the others, of a quarter
    assert found.get("summed", NONE) == NONE


def test_what_is_left_out_does_not_travel(four: Processes, packs: dict[str, Path]):
    four.do("open", pack=str(packs["demo"]), pattern="ep")
    every, some = kinds(four)["rows"]["nbytes"], kinds(four, {"drop": 0.7, "major": 0.9})["rows"]["nbytes"]
    assert 0 < some < every


def test_a_token_of_an_answer(four: Processes, packs: dict[str, Path]):
    """One sum a layer, whatever the pattern."""
    for pattern in ("tp", "ep"):
        four.do("open", pack=str(packs["demo"]), pattern=pattern)
        found = four.answer(prompt_of(5), 3)[0]["kinds"]  # the prompt is as short as a step
        passes = [5 * H + 4, H + 4, H + 4]
        assert found["summed"]["collectives"] == 3 * L
        assert found["summed"]["nbytes"] == L * sum(2 * 3 * values * 4 // 4 for values in passes)
        assert found["told"]["collectives"] == 3 and set(found) == {"summed", "told"}
