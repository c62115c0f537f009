"""Presets that a pack gets by itself: how far the dial is turned, and which layers skip more."""

from __future__ import annotations

import pytest
from floe_chat.engine.quality.own_presets import MOST, along, search
from floe_chat.engine.quality_presets import LEVELS
from floe_chat.kernels.rule import NOTHING, Rule


class Model:
    """A model of `costs` by layer: what skipping adds rises with a power of each layer's share."""

    def __init__(self, costs: list[float], power: float = 2.5) -> None:
        self.costs, self.power, self.asked = costs, power, list[Rule]()

    def adds(self, rule: Rule) -> float:
        self.asked.append(rule)
        return sum(cost * rule.at(layer).sparsity ** self.power for layer, cost in enumerate(self.costs))

    def reads(self, rule: Rule) -> float:
        return sum(1 - rule.at(layer).sparsity for layer in range(len(self.costs)))


@pytest.mark.parametrize("power", [1.2, 2.5, 4.0])
@pytest.mark.parametrize("cost", [0.02, 0.3, 3.0])
def test_each_level_is_used_and_kept(cost: float, power: float) -> None:
    model = Model([cost / 6] * 6, power)
    found = search(model.adds, model.reads, 6)
    assert list(found) == list(LEVELS)
    for name, (rule, adds) in found.items():
        assert adds == model.adds(rule) <= LEVELS[name] and not rule.wrong
        farther = along(min(MOST, 1.25 * rule.sparsity + 0.05), rule.layers)
        assert rule.sparsity == MOST or model.adds(farther) > LEVELS[name]
    assert len(model.asked) <= 35


def test_layers_that_cost_more_skip_less() -> None:
    model = Model([1.0, 1.0, 0.05, 0.05, 0.05, 0.05, 0.05, 0.05])
    found = search(model.adds, model.reads, 8)
    for rule, _ in found.values():
        assert len(rule.layers) == 8 and sum(rule.layers) == pytest.approx(8, abs=0.01)
        assert max(rule.layers[:2]) < min(rule.layers[2:])
    flat = search(Model([2.3 / 8] * 8).adds, model.reads, 8)
    assert model.reads(found["Balanced"][0]) < model.reads(flat["Balanced"][0])


def test_many_layers_are_told_apart_in_a_few_parts() -> None:
    model = Model([0.1] * 20 + [0.001] * 20)
    rule, _ = search(model.adds, model.reads, 40)["Balanced"]
    assert len(rule.layers) == 40 and rule.layers[0] < rule.layers[39] and len(set(rule.layers)) <= 8
    assert len(model.asked) <= 35


def test_where_nothing_may_be_left_out_nothing_is() -> None:
    found = search(lambda rule: 1.0 if rule.sparsity else 0.0, lambda _rule: 1.0, 4)
    assert set(found.values()) == {(NOTHING, 0.0)}


def test_where_all_may_be_left_out_the_dial_ends() -> None:
    for rule, adds in search(lambda _rule: 0.0, lambda _rule: 1.0, 4).values():
        assert rule.sparsity == MOST and adds == 0 and not rule.wrong


@pytest.mark.parametrize("dial", [0.0, 0.01, 0.2, 0.4, 0.55, MOST, 1.0])
def test_all_shares_rise_with_the_dial(dial: float) -> None:
    rule, before = along(dial), along(max(0.0, dial - 0.01))
    assert not rule.wrong and rule.weighed and rule.parts == 1
    for share in ("sparsity", "product", "drop"):
        assert getattr(before, share) <= getattr(rule, share)
