"""Quality presets: how much of each expert a token may skip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..models.errors import UsageError
from ..models.manifest import Manifest

# Of the active neurons the share, the weakest, that a lenient preset does without where their rows are not there. Were
# they never there, that would add 0.065 nats to Balanced on the demo model; half of the neurons would add 0.15.
LATE = 0.25


@dataclass(frozen=True, slots=True)
class Preset:
    """What a token may skip. Shares are of an expert's neurons, on text like the calibration's.

    Attributes:
        sparsity: share left out by |up · x| (FloE eq. 6). product: share whose down half is left out, by
            |silu(gate · x) · up · x|.
        drop, major: scores of the router, relative to the mean of a token's experts, below which an expert is left out,
            or only its major half computed (DualSparse-MoE section 4).
        alpha: how far from the best rejected score an absent expert may be replaced by a resident one, and the other
            way round (importance-driven scheduling section 5.1). lenient: where rows are moved to a device, rows that
            matter little are left out instead of waited for (CORM), see `late`.
        lossless: nothing is left out, and the kernels keep all of float32's precision.
        coarse: weights that are codes meet x in 8 bits instead of 15, in the CPU's kernels.
        weighed: thresholds rise as the router's weight of a call falls, see `work.Work`.
    """

    name: str
    sparsity: float
    product: float = 0.0
    drop: float = 0.0
    major: float = 0.0
    alpha: float = 0.0
    lenient: bool = False
    lossless: bool = False
    coarse: bool = False
    weighed: bool = False

    @property
    def x_bits(self) -> int:
        """How much of x's precision the kernels keep (`kernels.X_BITS`)."""
        return 22 if self.lossless else 8 if self.coarse else 15

    @property
    def late(self) -> float | None:
        """Of an expert's neurons the share, by |up · x|, whose rows may be left out; None where every row is awaited.

        So an answer is never worse than at this sparsity, whatever the link does. Without that bound an active row that
        is absent is as likely the strongest as the weakest, and 5 % of them cost 0.3 nats a token (BENCHMARKS.md).
        """
        return 1 - (1 - self.sparsity) * (1 - LATE) if self.lenient else None


PRESETS = (
    Preset("Exact", 0.0, lossless=True),
    Preset("High", 0.3, 0.5, drop=0.2, major=0.2),
    Preset("Balanced", 0.4, 0.7, drop=0.4, major=0.8, coarse=True),
    Preset("Fast", 0.6, 0.8, drop=0.4, major=0.8, coarse=True),
)
DEFAULT = "Balanced"


def of(manifest: Manifest) -> tuple[Preset, ...]:
    """The presets that a pack can run, best first.

    Exact is there only where all weights are the source's own 16-bit weights. High, Balanced and Fast are those that
    were measured on this very pack (`floe-chat tune`), or else shares that did well on others.
    """
    measured = {
        t.name: tuned(t.name, t.sparsity, t.product, t.drop, t.major, weighed=t.weighed) for t in manifest.tuned
    }
    presets = [measured.get(p.name, p) for p in PRESETS if manifest.lossless or not p.lossless]
    if manifest.architecture.intermediate % 2:  # an odd number of neurons has no halves
        presets = [replace(p, major=p.drop) for p in presets]
    return tuple(presets)


def tuned(name: str, sparsity: float, product: float, drop: float, major: float, *, weighed: bool) -> Preset:
    """The preset `name` with shares that were measured; how x is read goes with the name."""
    known = next((preset for preset in PRESETS if preset.name == name), Preset(name, sparsity))
    return replace(known, sparsity=sparsity, product=product, drop=drop, major=major, weighed=weighed)


CUSTOM = "Custom"


def custom(
    manifest: Manifest,
    *,
    sparsity: float,
    product: float = 0.0,
    drop: float = 0.0,
    major: float = 0.0,
    alpha: float = 0.0,
    lenient: bool = False,
) -> Preset:
    """A preset of one's own. One that skips at least the neurons that Balanced skips reads x as coarsely; its
    thresholds are weighed as Balanced's are.

    Raises:
        UsageError: a share that is none, or halves of experts that have an odd number of neurons.
    """
    shares = {"sparsity": sparsity, "product": product, "drop": drop, "major": major, "alpha": alpha}
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise UsageError(f"{name} cannot be {value}", "It is a share.", "Choose a number from 0 to 1.")
    if major > drop and manifest.architecture.intermediate % 2:
        raise UsageError("This model's experts have no halves", "Their number of neurons is odd.", "Leave out major.")
    balanced = get(DEFAULT, manifest)
    coarse = balanced.coarse and sparsity >= balanced.sparsity
    return Preset(CUSTOM, sparsity, product, drop, major, alpha, lenient, coarse=coarse, weighed=balanced.weighed)


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
