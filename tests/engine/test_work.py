"""What a preset makes of a router's choice: calls and their thresholds, on the host and where nobody waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality import Preset
from floe_chat.engine.work import Plan, Work
from torch import Tensor

from .driver import open_model

PRESETS = {
    "nothing": Preset("", 0.0, lossless=True),
    "neurons": Preset("", 0.5, 0.7, lossless=True),
    "sparsity": Preset("", 0.5, lossless=True),
    "halves": Preset("", 0.5, 0.7, drop=0.3, major=0.9, lossless=True, weighed=True),
    "experts": Preset("", 0.5, 0.7, drop=0.7, major=0.7, lossless=True, weighed=True),
    "weighed": Preset("", 0.5, lossless=True, weighed=True),
}
every_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)


@pytest.fixture
def plan(tiny_pack: Path, preset: Preset) -> Plan:
    return Plan(open_model(tiny_pack).packed.layer(1), preset)


def routed(plan: Plan, tokens: int = 40) -> tuple[Tensor, Tensor]:
    """Some choice of two experts for each token, and weights of all sizes."""
    draw = torch.Generator().manual_seed(3)
    experts = len(plan.numbers)
    index = torch.stack([torch.randperm(experts, generator=draw)[:2] for _ in range(tokens)])
    return index, torch.rand(tokens, 2, generator=draw).softmax(-1) ** 3


@every_preset
def test_nobody_waits_for_the_same_work(plan: Plan) -> None:
    index, weights = routed(plan)
    work = plan.work(index, weights)
    there, left_out = plan.every(index, weights)
    if left_out is not None:
        assert bool(left_out.any())
        there = there.part(~left_out)
    assert torch.equal(work.calls.tokens, there.calls.tokens) and torch.equal(work.calls.experts, there.calls.experts)
    assert torch.equal(work.calls.weights, there.calls.weights)
    # To the last bit: a neuron on the threshold must not be active here and left out there.
    assert torch.equal(work.thresholds, there.thresholds)
    assert (work.products is None) == (there.products is None) == (not plan.preset.product)
    if work.products is not None and there.products is not None:
        assert torch.equal(work.products, there.products)


@every_preset
def test_thresholds_fall_as_the_routers_weight_grows_where_they_are_weighed(plan: Plan) -> None:
    index, weights = routed(plan)
    work: Work = plan.work(index, weights)
    score = work.calls.weights / weights.mean(1)[work.calls.tokens] if plan.preset.weighed else 1.0
    assert torch.allclose(work.thresholds * score, plan.thresholds[work.calls.experts])
    if plan.products is not None and work.products is not None:
        assert torch.allclose(work.products * score, plan.products[work.calls.experts])
    if not plan.preset.sparsity:
        assert not work.thresholds.any()
