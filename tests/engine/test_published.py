"""The papers' rules as named presets: what each skips, and what is said of a pack that differs from the paper's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from floe_chat.engine.experts.ruled_layer import RuledLayer
from floe_chat.engine.quality_presets import PUBLISHED, differs, get, published
from floe_chat.kernels.reference import select
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import Limits
from floe_chat.models.errors import UsageError
from floe_chat.models.pack.manifest import Manifest
from floe_chat.models.pack.packed_model import PackedModel
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_pack


@pytest.mark.parametrize("name", ["FloE 80 %", "floe 80%", "FLOE80", "2t-drop", "corm", "fiddler"])
def test_names_are_found_as_people_type_them(tiny_pack: Path, name: str) -> None:
    assert get(name, Manifest.read(tiny_pack)).name in [rule.name for rule in PUBLISHED]


def test_an_unknown_name_lists_both_kinds(tiny_pack: Path) -> None:
    with pytest.raises(UsageError, match="no preset 'FloE 70 %'") as caught:
        get("FloE 70 %", Manifest.read(tiny_pack))
    assert "Balanced" in caught.value.hint and "as published: FloE 80 %, FloE 90 %, CORM" in caught.value.hint


@pytest.mark.parametrize("name", ["FloE 80 %", "FloE 90 %"])
def test_floe_skips_its_share_of_each_experts_values_alone(tiny_checkpoint: Path, tmp_path: Path, name: str) -> None:
    """Equation 6 on the calibration's values: the table of an expert is its own, whatever its router's weights."""
    manifest = make_pack(tiny_checkpoint, tmp_path / "p", PackSpec(up=2, gate=16, down=16, dense=16, signal="up"))
    preset = get(name, manifest)
    assert preset.rule == Rule({"FloE 80 %": 0.8, "FloE 90 %": 0.9}[name]) and preset.x_bits == 15
    layer = PackedModel.open(tmp_path / "p").layer(0)
    assert layer.plain is not None
    place = preset.rule.sparsity * (layer.plain.shape[1] - 1)
    expected = torch.lerp(layer.plain[:, int(place)], layer.plain[:, int(place) + 1], place - int(place))
    assert torch.equal(RuledLayer(layer, preset, 0).limits.signal, expected)
    weighed = RuledLayer(layer, replace(preset, rule=replace(preset.rule, weighed=True)), 0).limits.signal
    assert not torch.equal(weighed, expected)


def test_one_theta_holds_for_all_experts_of_a_gate_layer(tiny_checkpoint: Path, tmp_path: Path) -> None:
    for signal in ("gate", "up"):
        manifest = make_pack(tiny_checkpoint, tmp_path / signal, PackSpec(up=4, signal=signal))
        preset, layer = get("corm", manifest), PackedModel.open(tmp_path / signal).layer(1)
        limits = RuledLayer(layer, preset, 1).limits.signal
        by_share = RuledLayer(layer, replace(preset, rule=replace(preset.rule, theta=0.0)), 1).limits.signal
        assert torch.equal(limits, by_share) is (signal == "up")
        assert signal == "up" or limits.tolist() == [0.25] * len(limits)
        later = RuledLayer(layer, replace(preset, rule=replace(preset.rule, late=0.5), without_weak=True), 1).limits
        assert bool((later.signal >= limits).all()), "what may be late is never below what is skipped"


@pytest.mark.parametrize(("top_k", "threshold"), [(1, 0.64), (2, 0.30), (4, 0.15), (6, 0.12), (8, 0.08), (16, 0.04)])
def test_dualsparse_compares_scores_that_sum_to_one(tiny_pack: Path, top_k: int, threshold: float) -> None:
    """Section 4.1 by its own formula, on random scores, none of them at a threshold."""
    torch.manual_seed(top_k)
    manifest = Manifest.read(tiny_pack)
    manifest = replace(manifest, architecture=replace(manifest.architecture, top_k=top_k, experts=32))
    weights = torch.rand(500, top_k) ** 2 + 1e-4
    index = torch.stack([torch.randperm(32)[:top_k] for _ in range(500)])
    score = weights.double() / weights.double().sum(-1, keepdim=True)
    one, two = (get(name, manifest).rule for name in ("1T-Drop", "2T-Drop"))
    dropped = select(index, weights, Limits(torch.zeros(32)), one).thresholds.isinf().view(500, top_k)
    clear = ((score - threshold).abs() > 1e-6) & ((score - threshold).abs() - 0.01).abs().gt(1e-6)
    assert bool(((score < threshold) == dropped)[clear].all())
    halves = select(index, weights, Limits(torch.zeros(64)), two).thresholds.isinf().view(500, top_k, 2)
    for half, limit in enumerate((threshold - 0.01, min(threshold + 0.01, 1.0 / top_k if two.major == 1 else 1.0))):
        assert bool(((score < limit) == halves[..., half])[clear].all()), half


def test_experts_without_halves_have_one_threshold(tiny_pack: Path) -> None:
    manifest = Manifest.read(tiny_pack)
    odd = replace(manifest, architecture=replace(manifest.architecture, intermediate=97))
    assert all(preset.rule.parts == 1 for preset in published(odd))
    assert "no halves" in differs("2T-Drop", odd) and "no halves" not in differs("2T-Drop", manifest)


def test_what_a_pack_cannot_do_is_said_with_the_command_that_packs_so(tiny_checkpoint: Path, tmp_path: Path) -> None:
    manifest = make_pack(tiny_checkpoint, tmp_path / "p", PackSpec())
    said = differs("FloE 80 %", replace(manifest, signals=("up", "gate")))
    assert "its weights are up 2, gate and down 16" in said and "in 1 of 2 layers" in said
    assert "floe-chat pack SOURCE FOLDER --up 2 --rows 16 --dense 16 --signal up --rounding hqq" in said
    before = replace(manifest, calibration=replace(manifest.calibration, plain=False))
    assert "router's weight" in differs("FloE 80 %", before) and "router's weight" not in said
    assert differs("Balanced", manifest) == ""
