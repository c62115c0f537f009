"""What the presets and dials of a pack cost, as measured on it, and how it runs rules as published."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ...engine import quality_presets
from ...models.catalog import asset
from ...models.errors import FloeError
from ...models.pack.manifest import SOURCE, Manifest
from .interface import Cost, Costs


def costs_of(pack: Path) -> Costs:
    """What the presets and dials of a pack were measured to cost.

    Raises:
        FloeError: the pack cannot be read .
    """
    manifest = Manifest.read(pack)
    measured = {tuned.name: tuned for tuned in manifest.tuned}
    costs: list[Cost] = []
    for preset in quality_presets.of(manifest):
        known = measured.get(preset.name)
        if known is None:
            costs.append(Cost(preset, None, None))
        else:
            on = known.text, known.tokens, known.against == SOURCE
            costs.append(Cost(preset, known.kl, known.bytes_per_token, *on))
    demo = None if manifest.dials else Manifest.read(asset("demo", "packed")).dials
    return Costs(tuple(costs), manifest.dials, demo, manifest.unskipped)


def published_note(name: str, pack: Path) -> str:
    """How a pack runs a published rule; "" for other presets, and where the pack cannot be read."""
    if name not in [rule.name for rule in quality_presets.PUBLISHED]:
        return ""
    with suppress(FloeError):
        return f"{name}: {quality_presets.differs(name, Manifest.read(pack))}"
    return ""
