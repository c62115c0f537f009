"""Quality presets: how much of each expert a token may skip."""

from __future__ import annotations

from dataclasses import dataclass

from ..models.errors import UsageError
from ..models.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Preset:
    """`sparsity` is the share of an expert's neurons that is skipped on text like the calibration's (FloE eq. 6)."""

    name: str
    sparsity: float
    lossless: bool = False


PRESETS = (
    Preset("Exact", 0.0, lossless=True),
    Preset("High", 0.4),
    Preset("Balanced", 0.6),
    Preset("Fast", 0.8),
)
DEFAULT = "Balanced"


def available(manifest: Manifest) -> tuple[str, ...]:
    """The presets that a pack can run: Exact only where all weights are the source's own 16-bit weights."""
    return tuple(preset.name for preset in PRESETS if manifest.lossless or not preset.lossless)


def get(name: str, manifest: Manifest) -> Preset:
    """The preset `name`, in any case of letters.

    Raises:
        UsageError: there is no such preset, or this pack cannot run it.
    """
    preset = next((preset for preset in PRESETS if preset.name.lower() == name.lower()), None)
    if preset is None:
        raise UsageError(f"There is no preset {name!r}", "", f"Choose one of {', '.join(p.name for p in PRESETS)}.")
    if preset.lossless and not manifest.lossless:
        raise UsageError(
            f"This pack cannot run {preset.name}",
            f"It holds {manifest.widths.describe()}; {preset.name} needs the source's own 16-bit weights.",
            f"Choose one of {', '.join(available(manifest))}, or pack with --up 16 --rows 16 --dense 16.",
        )
    return preset
