"""Thresholds that fall with a process's load (DualSparse-MoE section 4.3)."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from floe_chat.engine.decoder.kv_cache import KVCache
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.engine.paper.parted import Loads, over, parted
from floe_chat.engine.parallel.holding import Grid, Holding
from torch import Tensor

from ...helpers import relative_rms
from .alone import Alone, prompt_of
from .leader import preset_of
from .processes import Processes

FOUR = Grid("ep", 4, 1)
RULE = {"drop": 0.6, "major": 0.9}


@pytest.mark.parametrize(("chosen", "ease"), [((0, 1), [1, 0, 0, 0]), ((0, 2), [1, 1, 0, 0]), ((0, 7), [1, 0, 0, 1])])
def test_factors_of_tokens_alike(chosen: tuple[int, int], ease: list[float]):
    index = torch.tensor([chosen] * 6)
    assert [Holding(FOUR, rank, 8, True).ease(index, 6) for rank in range(4)] == ease
    assert Holding(FOUR, 3, 8).ease(index, 6) == 1  # unless it is asked for


def test_a_process_with_half_of_the_mean():
    index = torch.tensor([[0, 1]] * 6 + [[2, 3], [4, 6]])  # 12, 2, 1 and 1 calls; the mean is 4
    assert [Holding(FOUR, rank, 8, True).ease(index, 8) for rank in range(4)] == [1, 0.5, 0.25, 0.25]


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


@pytest.mark.parametrize("pattern", ["ep", "s-etp"])
def test_processes_do_the_same(four: Processes, alone: dict[str, Alone], packs: dict[str, Path], pattern: str):
    """Real processes leave out what the model of them leaves out."""
    loaded, prompt = alone["demo"].loaded, prompt_of(60)
    loaded.control.preset = preset_of(RULE)
    fixed = loaded.decoder.forward(prompt, KVCache())[0]
    grid = FOUR if pattern == "ep" else Grid("s-etp", 2, 1)  # slices of a group have the same load
    with over(loaded, grid, balanced=True):
        expected = loaded.decoder.forward(prompt, KVCache())[0]
    four.do("open", pack=str(packs["demo"]), pattern=pattern, balanced=True)
    found = four.answer(prompt, 1, rule=RULE)[1][0]
    assert relative_rms(found, expected) < 1e-5
    assert relative_rms(fixed, expected) > 2e-3
