"""How coarsely x may be read goes with the preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from floe_chat.engine import quality_presets
from floe_chat.kernels.rule import Rule
from floe_chat.kernels.types import X_BITS
from floe_chat.models.pack.manifest import Manifest, TunedPreset


def test_each_preset_says_how_x_is_read(exact_pack: Path) -> None:
    presets = quality_presets.of(Manifest.read(exact_pack))
    assert {preset.name: preset.x_bits for preset in presets} == {"Exact": 22, "High": 15, "Balanced": 8, "Fast": 8}
    assert all(preset.x_bits in X_BITS for preset in presets)


def test_measured_shares_do_not_change_how_x_is_read(exact_pack: Path) -> None:
    tuned = tuple(TunedPreset(name, Rule(0.1, 0.2), 0.01, 1e6) for name in ("High", "Balanced", "Fast"))
    manifest = replace(Manifest.read(exact_pack), tuned=tuned)
    found = {preset.name: preset for preset in quality_presets.of(manifest)}
    assert [found[name].x_bits for name in ("High", "Balanced", "Fast")] == [15, 8, 8]
    assert found["Balanced"].rule.sparsity == 0.1


@pytest.mark.parametrize(("sparsity", "x_bits"), [(0.0, 15), (0.59, 15), (0.6, 8), (0.9, 8)])
def test_ones_own_preset_is_as_coarse_as_one_that_skips_as_much(exact_pack: Path, sparsity: float, x_bits: int) -> None:
    assert quality_presets.custom(Manifest.read(exact_pack), Rule(sparsity)).x_bits == x_bits
