"""Quality presets: how much of each expert a token may skip."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..kernels.rule import LATE, NOTHING, Rule
from ..models.errors import UsageError

if TYPE_CHECKING:
    from ..models.pack.manifest import Manifest  # imports torch, which takes long

X_BITS_EXACT, X_BITS_FINE, X_BITS_COARSE = 22, 15, 8  # `kernels.types.X_BITS`


@dataclass(frozen=True, slots=True)
class Preset:
    """A rule under a name.

    Attributes:
        x_bits: how much of x's precision the kernels keep if weights are codes (`kernels.operations`).
        without_weak: whether no row that the rule may skip while it is absent is there at all, so that the most that
            this can cost is measured.
    """

    name: str
    rule: Rule = NOTHING
    x_bits: int = X_BITS_FINE
    without_weak: bool = False

    @property
    def exact(self) -> bool:
        """Whether the kernels keep all of float32's precision, as preset Exact wants."""
        return self.x_bits == X_BITS_EXACT


PRESETS = (
    Preset("Exact", NOTHING, X_BITS_EXACT),
    Preset("High", Rule(0.4, 0.5, drop=0.2, major=0.2, weighed=True)),
    Preset("Balanced", Rule(0.6, 0.7, drop=0.4, major=0.4, weighed=True), X_BITS_COARSE),
    Preset("Fast", Rule(0.7, 0.85, drop=0.4, major=0.4, weighed=True), X_BITS_COARSE),
)
DEFAULT = "Balanced"
LEVELS = {"High": 0.003, "Balanced": 0.01, "Fast": 0.03}
"""KL that a preset's skipping may add where it is found by measuring (`floe-chat tune`), nats."""
CUSTOM = "Custom"


def of(manifest: Manifest) -> tuple[Preset, ...]:
    """The presets that a pack can run, best first.

    Exact is there only where all weights are the source's own 16-bit weights. High, Balanced and Fast are those
    measured on this pack (`floe-chat tune`), or else rules that did well on others.
    """
    measured = {tuned.name: tuned.rule for tuned in manifest.tuned}
    presets = [replace(p, rule=measured.get(p.name, p.rule)) for p in PRESETS if manifest.unquantized or not p.exact]
    if manifest.architecture.intermediate % 2:  # an odd number of neurons has no halves
        presets = [replace(p, rule=replace(p.rule, major=p.rule.drop)) for p in presets]
    return tuple(presets)


def ruled(name: str, rule: Rule) -> Preset:
    """The preset `name` with another rule; the precision of x goes with the name."""
    known = next((preset for preset in PRESETS if preset.name == name), Preset(name))
    return replace(known, rule=rule)


def lenient(preset: Preset) -> Preset:
    """A preset that leaves out weak rows, as if none of them were ever there."""
    return replace(preset, rule=replace(preset.rule, late=LATE), without_weak=True)


def custom(manifest: Manifest, rule: Rule) -> Preset:
    """A custom preset. If it skips at least as many neurons as Balanced, it reads x as coarsely; its thresholds are
    weighed, and vary by layer, as in Balanced.

    Raises:
        UsageError: a share that is none, or halves of experts that have an odd number of neurons.
    """
    if name := rule.wrong:
        raise UsageError(f"{name} cannot be {getattr(rule, name)}", "It is a share.", "Choose a number from 0 to 1.")
    if rule.parts > 1 and manifest.architecture.intermediate % 2:
        raise UsageError("This model's experts have no halves", "Their number of neurons is odd.", "Leave out major.")
    balanced = get(DEFAULT, manifest)
    coarse = rule.sparsity >= balanced.rule.sparsity
    rule = replace(rule, weighed=balanced.rule.weighed, layers=balanced.rule.layers)
    return Preset(CUSTOM, rule, balanced.x_bits if coarse else X_BITS_FINE)


def available(manifest: Manifest) -> tuple[str, ...]:
    """The names of the presets that a pack can run, best first."""
    return tuple(preset.name for preset in of(manifest))


def get(name: str, manifest: Manifest) -> Preset:
    """The preset `name`, in any case of letters.

    Raises:
        UsageError: there is no such preset, or this pack cannot run it.
    """
    known = next((preset.name for preset in PRESETS if preset.name.lower() == name.lower()), None)
    if known is None:
        raise UsageError(f"There is no preset {name!r}", "", f"Choose one of {', '.join(p.name for p in PRESETS)}.")
    preset = next((preset for preset in of(manifest) if preset.name == known), None)
    if preset is None:
        raise UsageError(
            f"This pack cannot run {known}",
            f"It holds {manifest.widths.describe()}; {known} needs the source's own 16-bit weights.",
            f"Choose one of {', '.join(available(manifest))}, or pack with --up 16 --rows 16 --dense 16.",
        )
    return preset
