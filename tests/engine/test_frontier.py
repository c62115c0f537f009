"""Pareto sets, presets and the search, on made-up figures and on a tiny source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality import frontier
from floe_chat.engine.quality.candidates import WEIGHED, Candidate, Taken
from floe_chat.engine.quality.divergence import Divergence
from floe_chat.engine.quality.frontier import Frontier, Point, search
from floe_chat.models.checkpoint import Checkpoint

from .. import families
from ..helpers import make_checkpoint

OWN = Candidate(4, 4, 4)


def with_rule(**fields: float) -> Candidate:
    return replace(OWN, rule=replace(WEIGHED, **fields))


def point(setting: Candidate, read: float, kl: float) -> Point:
    figures = Divergence(10, 5.0, 5.0, kl, kl, kl, 1.0, 0.0)
    return Point(setting, figures, read, read / 2, read, Taken())


def test_the_frontier_is_what_nothing_beats() -> None:
    points = (
        *(
            point(OWN, 10, 0.001),
            point(with_rule(sparsity=0.5), 6, 0.004),
            point(with_rule(sparsity=0.9), 2, 0.3),
        ),
        *(
            point(with_rule(drop=0.3), 6, 0.003),
            point(with_rule(product=0.5), 8, 0.005),
        ),
        *(point(Candidate(3, 3, 3), 5, 0.002), point(with_rule(alpha=0.5), 1, 0.0)),
    )
    found = Frontier(OWN, points)
    assert [(p.read, p.kl) for p in found.pareto(own=True)] == [(2, 0.3), (6, 0.003), (10, 0.001)]
    assert [(p.read, p.kl) for p in found.pareto(own=False)] == [(2, 0.3), (5, 0.002), (10, 0.001)]


def test_presets_are_the_cheapest_points_within_their_loss() -> None:
    base = 0.02  # of the widths alone, which no preset can undo
    kept = [
        point(with_rule(sparsity=s), 10 * (1 - s), base + kl) for s, kl in ((0.2, 0.001), (0.5, 0.009), (0.6, 0.011))
    ]
    found = Frontier(OWN, (point(OWN, 10, base), *kept)).presets()
    assert {name: p.setting.rule.sparsity for name, p in found.items()} == {"High": 0.2, "Balanced": 0.5, "Fast": 0.6}
    alone = Frontier(OWN, (point(OWN, 10, base),)).presets()
    assert {name: p.setting for name, p in alone.items()} == {"High": OWN, "Balanced": OWN, "Fast": OWN}


@pytest.mark.parametrize("intermediate", [96, 37])
@pytest.mark.parametrize("widths", [True, False])
def test_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, intermediate: int, widths: bool) -> None:
    monkeypatch.setattr(frontier, "_TOGETHER", 4)
    monkeypatch.setattr(frontier, "SKIPS", ((0.0, 0.7), (0.5, 0.0), (0.5, 0.7), (0.9, 0.0)))
    monkeypatch.setattr(frontier, "SLOPES", (-0.4, 0.2))
    source = make_checkpoint(tmp_path / "source", intermediate=intermediate, layers=2, experts=3)
    draw = torch.Generator().manual_seed(5)
    passages, windows = (torch.randint(3, 250, (3, length), generator=draw) for length in (23, 24))
    steps: list[str] = []
    own = Candidate(3, 4, 4)
    with torch.inference_mode():
        found = search(Checkpoint(source), own, passages, windows, 12, steps.append, widths=widths)
    settings = [p.setting for p in found.points]
    assert len(settings) == len(set(settings)), "each setting is measured once"
    measured = {p.setting: p for p in found.points}
    assert measured[Candidate()].kl < 1e-9 and measured[Candidate()].bits == pytest.approx(16)
    much, little = (measured[Candidate(rule=replace(WEIGHED, sparsity=share))].kl for share in (0.9, 0.5))
    assert much > little > 0
    assert all(p.kl >= 0 and 0 <= p.missed <= p.read for p in found.points)
    own_points = [p for p in found.points if frontier.has_widths(p.setting, own)]
    sloping = [p.setting.rule.layers for p in own_points if p.setting.rule.layers]
    assert sloping and set(sloping) == {(1.4, 0.6), (0.8, 1.2)}
    assert 2 <= len(own_points) - len(sloping) <= 9 and own in measured
    assert bool({Candidate(gate=2), *frontier.PROBES} <= set(settings)) is widths
    assert any(s.rank for s in settings) is widths
    assert any(s.rule.parts > 1 for s in settings) is (intermediate % 2 == 0)
    presets = found.presets()
    assert list(presets) == ["High", "Balanced", "Fast"]
    assert presets["High"].read >= presets["Balanced"].read >= presets["Fast"].read
    assert any("combinations" in step for step in steps) and any("layer 1 of 2" in step for step in steps)


def test_bits_and_slopes_count_the_layers_with_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "_TOGETHER", 2)
    monkeypatch.setattr(frontier, "SKIPS", ((0.5, 0.0),))
    source = Checkpoint(families.make("glm4_moe", tmp_path / "source"))
    windows = torch.randint(3, 200, (2, 17), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        found = search(
            source,
            Candidate(3, 4, 4),
            windows[:, :-1],
            windows,
            8,
            lambda _step: None,
            widths=False,
            signals=("gate",) * len(source.layers),
        )
    assert len(source.layers) < source.config.num_hidden_layers
    whole = next(p for p in found.points if p.setting == Candidate())
    assert whole.bits == pytest.approx(16)
    slopes = {len(p.setting.rule.layers) for p in found.points if p.setting.rule.layers}
    assert slopes == {len(source.layers)}
    assert not any(p.setting.rule.alpha for p in found.points), "its router's experts are never replaced"


def test_a_source_is_read_in_as_many_passes_as_memory_asks_for(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = torch.randint(3, 250, (1, 17), generator=torch.Generator().manual_seed(6))
    settings = [Candidate(rule=replace(WEIGHED, sparsity=share)) for share in (0.2, 0.4, 0.6, 0.8, 0.9)]

    def measure() -> tuple[list[Point], set[str]]:
        told: set[str] = set()
        with torch.inference_mode():
            run = frontier.Measure(Checkpoint(tiny_checkpoint), windows[:, :-1], windows, 8, told.add)
            return run(settings, "settings"), told

    at_once, told = measure()
    assert not any("pass" in step for step in told)
    monkeypatch.setattr(frontier, "_MEMORY_SHARE", 1e-9)
    singly, told = measure()
    assert any("pass 5 of 5" in step for step in told)
    assert [p.setting for p in singly] == settings
    for one, other in zip(singly, at_once, strict=True):
        assert one.kl == pytest.approx(other.kl, rel=1e-3) and one.read == other.read
