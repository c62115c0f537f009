"""Settings side by side in one pass over the source: against transformers and against real packs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.quality.candidates import WEIGHED, Candidate, Outcome, Taken, compute
from floe_chat.kernels.activation import Projection
from floe_chat.kernels.layouts import VectorLayout
from floe_chat.models.checkpoint import Checkpoint
from floe_chat.models.packing import pack_experts
from floe_chat.models.packing.pack import PackSpec
from torch import Tensor

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


@pytest.mark.parametrize("signal", ["up", "gate"])
@pytest.mark.parametrize("widths", [(2, 4, 4), (3, 8, 2), (16, 3, 16)])
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
