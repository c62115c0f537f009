"""Settings side by side in one pass over the source, against transformers and real packs; and the search among them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality import frontier
from floe_chat.engine.quality.candidates import WEIGHED, Candidate, Outcome, Taken, compute
from floe_chat.engine.quality.divergence import Divergence
from floe_chat.engine.quality.frontier import Frontier, Point, search
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.packing import pack_experts
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

from .. import families
from ..helpers import calibration_tokens, make_checkpoint, make_pack, reference_model, relative_rms
from .driver import a_preset, open_model

LAYERS, EXPERTS, TOP_K, HIDDEN, NEURONS = 2, 4, 2, 64, 96
WHOLE = Taken(halves=2 * TOP_K * LAYERS, active=TOP_K * LAYERS * NEURONS, kept=TOP_K * LAYERS * NEURONS)
PASSAGES = torch.randint(3, 250, (8, 40), generator=torch.Generator().manual_seed(3))
WINDOWS = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(4))
KEEP = 20
ROW = VectorLayout(HIDDEN, 16, 64, short=True)


def skipping(**fields: float) -> Candidate:
    return Candidate(rule=replace(WEIGHED, **fields))


def run(
    source: Path, *settings: Candidate, signals: tuple[Projection, ...] = (), passages: Tensor = PASSAGES
) -> list[Outcome]:
    with torch.inference_mode():
        return compute(
            Checkpoint(source), settings, passages, WINDOWS[:, : passages.shape[1]], KEEP, lambda _step: None, signals
        )


@pytest.mark.some(1)
@pytest.mark.parametrize("family", ["mixtral", "olmoe"])
def test_a_setting_that_leaves_all_as_it_is_gives_the_models_own_logits(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path / "source", family=family)
    # Substitution among experts that are all there changes nothing either.
    plain, other, sparse = run(source, Candidate(), Candidate(), skipping(sparsity=0.9))
    with torch.inference_mode():
        expected = reference_model(source)(input_ids=WINDOWS, use_cache=False).logits[:, -KEEP:]
    assert relative_rms(plain.logits(), expected) <= 1e-5
    assert relative_rms(other.logits(), expected) <= 1e-5, "the place in the batch does not matter"
    assert relative_rms(sparse.logits(), expected) > 1e-2
    assert plain.taken == other.taken == WHOLE


@pytest.mark.some(1)
@pytest.mark.parametrize("signal", ["up", "gate"])
@pytest.mark.parametrize("widths", [(2, 4, 4), (16, 3, 16)])
def test_widths_are_those_of_a_pack(
    tmp_path: Path, widths: tuple[int, int, int], signal: Projection, monkeypatch: pytest.MonkeyPatch
) -> None:
    def float32(_device: torch.device) -> torch.dtype:
        return torch.float32

    monkeypatch.setattr(pack_experts, "fast_type", float32)  # as candidates are computed
    # One layer: a second one would be rounded for what the first gives, which here is the source's.
    source = make_checkpoint(tmp_path / "source", layers=1)
    up, gate, down = widths
    make_pack(source, tmp_path / "p", PackSpec(up, gate, down, dense=16, signal=signal))
    loaded = open_model(tmp_path / "p")
    loaded.control.preset = a_preset("", 0.0, lossless=True)
    passages = calibration_tokens()
    plain, found = run(source, Candidate(), Candidate(up, gate, down), signals=(signal,), passages=passages)
    with torch.inference_mode():
        expected = loaded.model(input_ids=WINDOWS[:, : passages.shape[1]]).logits[:, -KEEP:]
    # A code on the border between two may differ, and then others after it, at 2 bits by much.
    lost = relative_rms(plain.logits(), expected)
    assert relative_rms(found.logits(), expected) <= 0.3 * lost and lost > 0.1
    layer = loaded.packed.layer(0)
    gate_bytes = layer.rows.layout.other.nbytes
    down_bytes = layer.rows.layout.down.nbytes
    stored = layer.signal.bytes_per_expert() + NEURONS * (gate_bytes + down_bytes)
    assert found.taken.nbytes(found.setting, ROW, NEURONS) == TOP_K * stored


def test_what_is_skipped_is_counted(tiny_checkpoint: Path) -> None:
    settings = (
        *(skipping(sparsity=0.6), skipping(product=0.7), skipping(sparsity=0.5, product=0.8)),
        *(skipping(drop=0.8, major=0.8), skipping(major=0.8), skipping(drop=2.0, major=2.0)),
    )
    sparse, product, both, dropped, halved, nothing = (outcome.taken for outcome in run(tiny_checkpoint, *settings))
    # Random text is calibrated on random text: shares are what was asked for, to a few per cent.
    assert sparse.halves == WHOLE.halves and sparse.active == pytest.approx(0.4 * WHOLE.active, rel=0.15)
    assert sparse.kept == sparse.active
    assert product.active == WHOLE.active and product.kept == pytest.approx(0.3 * WHOLE.active, rel=0.15)
    assert both.active == pytest.approx(0.5 * WHOLE.active, rel=0.15) and both.kept < both.active
    assert 0 < dropped.halves < WHOLE.halves and dropped.active == pytest.approx(dropped.halves * NEURONS / 2)
    # Half as much is saved where only a half is left out.
    assert WHOLE.halves - halved.halves == pytest.approx((WHOLE.halves - dropped.halves) / 2, rel=0.1)
    assert nothing == Taken()


def test_each_layer_skips_by_its_own_signal(tiny_checkpoint: Path) -> None:
    settings = Candidate(), skipping(sparsity=0.6)
    by_up = run(tiny_checkpoint, *settings)
    by_gate = run(tiny_checkpoint, *settings, signals=("gate", "gate"))
    mixed = run(tiny_checkpoint, *settings, signals=("gate", "up"))
    for plain, sparse in (by_gate, mixed):
        assert relative_rms(plain.logits(), by_up[0].logits()) <= 1e-5
        assert sparse.taken.active == pytest.approx(0.4 * WHOLE.active, rel=0.15)
    found = [pair[1].logits() for pair in (by_up, by_gate, mixed)]
    assert min(relative_rms(a, b) for a, b in itertools.combinations(found, 2)) > 1e-2


def test_a_compensator_of_full_rank_undoes_the_rounding(tiny_checkpoint: Path) -> None:
    plain, rounded, some, all_of_it = run(
        tiny_checkpoint, Candidate(), Candidate(up=2), Candidate(up=2, rank=24), Candidate(up=2, rank=HIDDEN)
    )
    loss = [relative_rms(outcome.logits(), plain.logits()) for outcome in (rounded, some, all_of_it)]
    assert loss[0] > 1.3 * loss[1] and loss[2] < 1e-3
    taken = [outcome.taken.nbytes(outcome.setting, ROW, NEURONS) for outcome in (rounded, some)]
    factors = TOP_K * LAYERS * 24 * (2 * HIDDEN + NEURONS) * (1 + 4 / 64)
    assert taken[1] - taken[0] == pytest.approx(factors)


def test_substitution_avoids_experts_that_are_not_there(tiny_checkpoint: Path) -> None:
    plain, little, much = run(tiny_checkpoint, Candidate(), skipping(alpha=0.2), skipping(alpha=0.9))

    def absent(outcome: Outcome) -> float:
        return outcome.missed.halves / outcome.taken.halves

    # Half of the experts are resident: with random routing about half of all calls miss.
    assert 0.25 < absent(plain) < 0.75 and absent(much) < absent(little) < absent(plain)
    assert relative_rms(much.logits(), plain.logits()) > relative_rms(little.logits(), plain.logits()) > 0
    assert much.taken == WHOLE, "as many experts are computed"


def test_values_that_are_not_numbers_are_not_hidden(tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Checkpoint.expert

    def broken(self: Checkpoint, layer: int, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, down = own(self, layer, expert)
        return gate, torch.full_like(up, float("nan")), down

    monkeypatch.setattr(Checkpoint, "expert", broken)
    (found,) = run(tiny_checkpoint, skipping(sparsity=0.5, product=0.5))
    assert bool(found.logits().isnan().any())


OWN = Candidate(4, 4, 4)


def ruled(**fields: float) -> Candidate:
    return replace(OWN, rule=replace(WEIGHED, **fields))


def point(setting: Candidate, read: float, kl: float) -> Point:
    figures = Divergence(10, 5.0, 5.0, kl, kl, kl, 1.0, 0.0)
    return Point(setting, figures, read, read / 2, read, Taken())


def test_the_frontier_is_what_nothing_beats() -> None:
    points = (
        *(
            point(OWN, 10, 0.001),
            point(ruled(sparsity=0.5), 6, 0.004),
            point(ruled(sparsity=0.9), 2, 0.3),
        ),
        *(
            point(ruled(drop=0.3), 6, 0.003),
            point(ruled(product=0.5), 8, 0.005),
        ),
        *(point(Candidate(3, 3, 3), 5, 0.002), point(ruled(alpha=0.5), 1, 0.0)),
    )
    found = Frontier(OWN, points)
    assert [(p.read, p.kl) for p in found.pareto(own=True)] == [(2, 0.3), (6, 0.003), (10, 0.001)]
    assert [(p.read, p.kl) for p in found.pareto(own=False)] == [(2, 0.3), (5, 0.002), (10, 0.001)]


def test_presets_are_the_cheapest_points_within_their_loss() -> None:
    base = 0.02  # of the widths alone, which no preset can undo
    kept = [point(ruled(sparsity=s), 10 * (1 - s), base + kl) for s, kl in ((0.2, 0.001), (0.5, 0.009), (0.6, 0.011))]
    found = Frontier(OWN, (point(OWN, 10, base), *kept)).presets()
    assert {name: p.setting.rule.sparsity for name, p in found.items()} == {"High": 0.2, "Balanced": 0.5, "Fast": 0.6}
    alone = Frontier(OWN, (point(OWN, 10, base),)).presets()
    assert {name: p.setting for name, p in alone.items()} == {"High": OWN, "Balanced": OWN, "Fast": OWN}


@pytest.mark.some(1)
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
