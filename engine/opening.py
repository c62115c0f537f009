"""A pack that is about to be loaded: its files are checked, and it is decided where its layers go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..models import configuration
from ..models.errors import damaged
from ..models.families import family_of
from ..models.pack.manifest import Architecture
from ..models.pack.packed_model import PackedLayer, PackedModel
from . import quality_presets
from .parallel.spread import Spread
from .planning.opened_pack import Asked
from .planning.several import placement
from .planning.several.placement import Placement
from .quality_presets import Preset


@dataclass(frozen=True, slots=True)
class Opened:
    """A pack whose files were checked, before anything of it is on a device.

    Attributes:
        preset: what a token may skip. config: as config.json has it. layers: all experts, in RAM.
        placement: where to.
    """

    packed: PackedModel
    preset: Preset
    config: Any
    layers: Sequence[PackedLayer]
    placement: Placement

    @property
    def architecture(self) -> Architecture:
        return self.packed.manifest.architecture


def opened(
    folder: Path,
    preset: str | None,
    device: str,
    vram: int | None,
    asked: Asked,
    spread: Spread | None,
    report: Callable[[str], None],
) -> Opened:
    """Check the pack, and choose preset and device. report: is given steps that take a while, in words."""
    packed = PackedModel.open(folder)
    manifest = packed.manifest
    chosen = quality_presets.get(quality_presets.DEFAULT if preset is None else preset, manifest)
    config: Any = configuration.read(folder)
    _compare(folder, config, manifest.architecture)
    layers = [packed.layer(index) for index in range(manifest.architecture.layers)]
    if spread is not None:
        spread.begin(manifest)
        layers, manifest = [spread.held(layer) for layer in layers], spread.holding.of_manifest(manifest)
    where = placement.choose(device, manifest, layers, config, vram, chosen, asked, packed, report)
    if spread is not None:
        spread.check([part.choice for part in where.parts])
    return Opened(packed, chosen, config, layers, where)


def _compare(folder: Path, config: Any, a: Architecture) -> None:
    family = family_of(config.model_type)
    for name, configured, packed in (
        ("model type", config.model_type, a.model_type),
        ("number of layers with experts", len(family.expert_layers(config)), a.layers),
        ("number of experts", family.experts(config), a.experts),
        ("experts per token", family.top_k(config), a.top_k),
        ("hidden size", family.expert_hidden(config), a.hidden),
        ("number of neurons per expert", family.neurons(config), a.intermediate),
    ):
        if configured != packed:
            raise damaged(folder, f"Its {name} is {packed} in the manifest and {configured} in config.json.")
