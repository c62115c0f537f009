"""What several processes compute is what one computes, and their messages are as many and as long as they should be.

What the patterns of DualSparse-MoE figure 5 send for a routing, counted in tokens' states: R = G · T processes, G
groups of experts with T slices each. A token is at home in one process, whose group is g. Its experts lie in some
groups; in each of these groups, all T processes need its state, and each of them has a part of the group's result.
Assumed are states that are sent once per process, whatever number of its experts a token chose, and results that are
added up before they are sent.

- EP and S-ETP: to and from T processes of each of those groups, without the home itself:
  sum over groups of (T - [group is g]) each way.
- ETP: the all-to-all brings the state to one process of each other group, and the all-gather to the T - 1 others of
  each: sum over groups of ([group is not g] + T - 1) each way, which is the same number.

What differs between them is the number of steps: 2 a layer for EP and S-ETP, 4 for ETP; and of messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.paper.quality import Loads, over, parted
from floe_chat.engine.parallel.holding import Grid, Holding
from torch import Tensor

from ...helpers import explained, relative_rms, run_cli
from .conftest import NEW, Alone, prompt_of
from .leader import preset_of
from .processes import Processes

LIMIT = 1e-5
# The demo model's experts in each process, and neurons of each.
HELD = {"s-etp": [4, 192], "tp": [8, 96], "ep": [2, 384], "etp": [4, 192], "s-etp:4": [8, 96]}
DROPPING = {"drop": 0.7, "major": 1.0}


@pytest.fixture(scope="module", params=HELD)
def pattern(request: pytest.FixtureRequest) -> str:
    """Of a module, so that tests of one pattern run one after the other and open a model once."""
    return request.param


def same(found: tuple[dict[str, Any], list[Tensor]], expected: tuple[list[int], list[Tensor]]) -> None:
    assert found[0]["tokens"] == expected[0]
    assert len(found[1]) == len(expected[1])
    for mine, theirs in zip(found[1], expected[1], strict=True):
        assert relative_rms(mine, theirs) < LIMIT


@pytest.mark.some(3)
@pytest.mark.parametrize(("family", "length"), [("gpt_oss", 41), ("deepseek_v2", 41), ("gpt_oss", 300)])  # two chunks
def test_logits_are_those_of_one_process(
    four: Processes, alone: dict[str, Alone], packs: dict[str, Path], family: str, length: int, pattern: str
):
    four.open(packs[family], pattern)
    same(four.answer(prompt_of(length), NEW), alone[family].answer(prompt_of(length)))


def test_what_cannot_be(four: Processes, packs: dict[str, Path]):
    assert "There are no other processes" in explained(run_cli("ask", "--parallel", "tp", "Hello"), 2)
    four.send("open", pack=str(packs["demo"]), pattern="s-etp:3")
    refused = four.reply()
    assert refused["kind"] == "UsageError" and "4 processes cannot hold 3 slices" in refused["error"]
    four.open(packs["demo"], "ep")
    assert all("4 processes cannot hold 3 slices" in four.stderr(rank) for rank in (1, 2, 3))


@pytest.mark.some(3)
def test_each_holds_its_part_and_the_same_calls_are_left_out(
    four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str
):
    opened = four.open(packs["demo"], pattern)
    assert opened["held"] == [HELD[pattern]] * 2
    assert opened["reason"].count(f"experts over 4 processes ({pattern.partition(':')[0]})") == 1
    found, logits = four.answer(prompt_of(), NEW, rule=DROPPING)
    one = alone["demo"]
    same((found, logits), one.answer(prompt_of(), DROPPING))
    counted = [
        [each.dropped, each.neurons, each.active, each.bytes, each.calls] for each in one.loaded.telemetry.layers
    ]
    assert found["counted"] == counted
    assert sum(each.dropped for each in one.loaded.telemetry.layers) > 0


@pytest.mark.some(1)
@pytest.mark.parametrize("pattern", ["ep", "s-etp"], indirect=True)
def test_a_process_without_tokens(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    """Of a prompt of equal tokens, all go to the same experts."""
    four.open(packs["demo"], pattern)
    prompt = [5] * 9
    busy = [{expert // 4 for expert in choices.flatten().tolist()} for choices in alone["demo"].routing(prompt)]
    assert min(map(len, busy)) == 1  # in some layer a half of the experts has nothing to do
    same(four.answer(prompt, NEW), alone["demo"].answer(prompt))


@pytest.mark.some(1)
@pytest.mark.parametrize("pattern", ["tp", "ep"], indirect=True)
def test_a_conversation_of_several_turns(
    four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str
):
    four.open(packs["demo"], pattern)
    first, _ = four.answer(prompt_of(), NEW)
    longer = [*prompt_of(), *first["tokens"], *prompt_of(20)]
    second, logits = four.answer(longer, NEW, fresh=False)
    expected = alone["demo"].answer(longer)
    assert second["tokens"] == expected[0] and second["passes"] == NEW
    assert relative_rms(logits[-1], expected[1][-1]) < LIMIT
    branch = [*prompt_of()[:30], *prompt_of(12)]  # the others drop what was behind it too
    third, logits = four.answer(branch, NEW, fresh=False)
    expected = alone["demo"].answer(branch)
    assert third["tokens"] == expected[0]
    assert relative_rms(logits[-1], expected[1][-1]) < LIMIT


def test_a_stop_leaves_all_usable(four: Processes, alone: dict[str, Alone], packs: dict[str, Path]):
    four.open(packs["demo"], "ep")
    stopped, _ = four.answer(prompt_of(600), 2, stop_after=1)
    assert stopped["reason"] == "cancelled" and stopped["kept"] < 600
    same(four.answer(prompt_of(), NEW, fresh=False), alone["demo"].answer(prompt_of()))


FOUR = Grid("ep", 4, 1)
RULE = {"drop": 0.6, "major": 0.9}


@pytest.mark.parametrize(
    ("index", "eases"),
    [
        ([[0, 1]] * 6, [1, 0, 0, 0]),
        ([[0, 2]] * 6, [1, 1, 0, 0]),
        ([[0, 7]] * 6, [1, 0, 0, 1]),
        ([[0, 1]] * 6 + [[2, 3], [4, 6]], [1, 0.5, 0.25, 0.25]),  # 12, 2, 1 and 1 calls; the mean is 4
    ],
)
def test_factors_of_a_processs_load(index: list[list[int]], eases: list[float]):
    chosen = torch.tensor(index)
    assert [Holding(FOUR, rank, 8, True).ease(chosen, len(chosen)) for rank in range(4)] == eases
    assert Holding(FOUR, 3, 8).ease(chosen, len(chosen)) == 1  # unless it is asked for


def skewed(layer: MoELayer, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, and choices that prefer the first experts."""
    drawn = torch.Generator().manual_seed(7)
    likely = 1.0 / torch.arange(1, 9)
    index = torch.multinomial(likely.expand(tokens, 8), 2, generator=drawn)
    weights = torch.rand(tokens, 2, generator=drawn) + 0.05
    return torch.randn(tokens, 256, generator=drawn), index, weights / weights.sum(1, keepdim=True)


def test_skewed_routing(alone: dict[str, Alone]):
    """The busiest process does as much as with fixed thresholds, the others leave out less, and the output is nearer
    to that with nothing left out.
    """
    loaded = alone["demo"].loaded
    layer = next(each for each in loaded.model.modules() if isinstance(each, MoELayer))
    hidden, *routed = skewed(layer, 200)
    loaded.control.preset = preset_of({})
    whole = layer(hidden, *routed)
    loaded.control.preset = preset_of(RULE)
    fixed, aware = Loads(), Loads()
    errors: list[float] = []
    for balanced, loads in ((False, fixed), (True, aware)):
        with pytest.MonkeyPatch.context() as patch:
            choice = parted(layer, FOUR, *routed, balanced=balanced, loads=loads)
            patch.setattr(layer, "choose", Mock(return_value=choice))
            errors.append(relative_rms(layer(hidden, *routed), whole))
    assert fixed.imbalance_given > 1.5
    assert aware.gain == fixed.gain > 1.2
    assert aware.imbalance < fixed.imbalance - 0.1
    assert 0 < aware.dropped < fixed.dropped - 0.02
    assert 0 < errors[1] < errors[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("pattern", ["ep", "s-etp"], indirect=True)
def test_processes_do_the_same(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    """Real processes leave out what the model of them leaves out."""
    loaded, prompt = alone["demo"].loaded, prompt_of(60)
    loaded.control.preset = preset_of(RULE)
    fixed = loaded.decoder.forward(prompt, KVCache())[0]
    grid = FOUR if pattern == "ep" else Grid("s-etp", 2, 1)  # slices of a group have the same load
    with over(loaded, grid, balanced=True):
        expected = loaded.decoder.forward(prompt, KVCache())[0]
    four.open(packs["demo"], pattern, balanced=True)
    found = four.answer(prompt, 1, rule=RULE)[1][0]
    assert relative_rms(found, expected) < 1e-5
    assert relative_rms(fixed, expected) > 2e-3


H, K, E, L = 256, 2, 8, 8  # of the demo model
ROW, RESULT = H * 4 + K * 8, H * 4  # bytes: a state in float32 and its choice; a result
ENTRY = 2 * 2 * 32 * 4  # bytes: keys and values of 2 heads of 32 numbers in float32
TOKENS = 120
GRIDS = {"ep": (4, 1), "etp": (2, 2), "s-etp": (2, 2), "s-etp:4": (1, 4)}
NONE = {"collectives": 0, "messages": 0, "nbytes": 0}


def kinds(group: Processes, rule: dict[str, Any] | None = None) -> dict[str, dict[str, int]]:
    """What process 0 sent for a prompt, and no token of an answer."""
    return group.answer(prompt_of(TOKENS), 0, rule=rule)[0]["kinds"]


@pytest.mark.some(2)
@pytest.mark.parametrize("pattern", GRIDS, indirect=True)
def test_a_prompt(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    four.open(packs["demo"], pattern)
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
    four.open(packs["demo"], "ep")
    every, some = kinds(four)["rows"]["nbytes"], kinds(four, {"drop": 0.7, "major": 0.9})["rows"]["nbytes"]
    assert 0 < some < every


@pytest.mark.some(1)
@pytest.mark.parametrize("pattern", ["tp", "ep"], indirect=True)
def test_a_token_of_an_answer(four: Processes, packs: dict[str, Path], pattern: str):
    """One sum a layer, whatever the pattern."""
    four.open(packs["demo"], pattern)
    found = four.answer(prompt_of(5), 3)[0]["kinds"]  # the prompt is as short as a step
    passes = [5 * H + 4, H + 4, H + 4]
    assert found["summed"]["collectives"] == 3 * L
    assert found["summed"]["nbytes"] == L * sum(2 * 3 * values * 4 // 4 for values in passes)
    assert found["told"]["collectives"] == 3 and set(found) == {"summed", "told"}


@dataclass(frozen=True)
class Sent:
    """What one process sends in a layer: states to experts, results back, and the messages of both ways."""

    rows: int
    results: int
    messages: int


def arriving(choices: Tensor, groups: int, slices: int, experts: int) -> Tensor:
    """(R, G) how many tokens of each home have experts in each group, for a routing (n, K)."""
    size, tokens = groups * slices, len(choices)
    firsts = torch.tensor([group * experts // groups for group in range(1, groups)], dtype=torch.long)
    group = torch.bucketize(choices, firsts, right=True)
    hit = torch.zeros(tokens, groups, dtype=torch.bool).scatter_(1, group, True)
    begins = [rank * tokens // size for rank in range(size + 1)]
    return torch.stack([hit[begins[r] : begins[r + 1]].sum(0) for r in range(size)])


def direct(come: Tensor, slices: int, rank: int) -> Sent:
    """EP, where slices is 1, and S-ETP."""
    size, own = len(come), rank // slices
    there = [int(come[rank, to // slices]) for to in range(size) if to != rank]
    back = [int(come[home, own]) for home in range(size) if home != rank]
    return Sent(sum(there), sum(back), sum(map(bool, there + back)))


def in_steps(come: Tensor, slices: int, rank: int) -> Sent:
    """ETP."""
    groups, (own, slice_) = come.shape[1], divmod(rank, slices)
    alike = [group * slices + slice_ for group in range(groups) if group != own]
    there = [int(come[rank, to // slices]) for to in alike]
    back = [int(come[home, own]) for home in alike]
    arrived = [int(sum(come[group * slices + t, own] for group in range(groups))) for t in range(slices)]
    gathered = [arrived[slice_]] * (slices - 1)
    scattered = [count for t, count in enumerate(arrived) if t != slice_]
    messages = sum(map(bool, there + back + gathered + scattered))
    return Sent(sum(there) + sum(gathered), sum(back) + sum(scattered), messages)
