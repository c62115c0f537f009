"""Quality presets: how much of each expert a token may skip. Ours, and the rules of five papers as published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..kernels.rule import LATE, NOTHING, Rule
from ..models.errors import UsageError
from ..models.pack.widths import HQQ

if TYPE_CHECKING:
    from ..kernels.activation import Projection
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


@dataclass(frozen=True, slots=True)
class Published:
    """A paper's rule.

    Attributes:
        paper: its name, and where the rule is. rule: for a pack. signal: the projection that it thresholds, of weights
            that HQQ rounded; None: it thresholds none. widths: the paper's, of the signal, the other projection, down
            and attention. beyond: what belongs to the method and is no part of a rule.
    """

    name: str
    paper: str
    rule: Callable[[Manifest], Rule]
    signal: Projection | None = None
    widths: tuple[int, int, int, int] = (16, 16, 16, 16)
    beyond: str = ""


def _floe(share: float) -> Published:
    """FloE (section 3.2, equations 5, 6 and 11): of an expert, neuron n is skipped, its gate row and its down column,
    where |up_n · x| < t, with t = min{t' : F(t') >= k}: F is the distribution of |up · x| of that expert, k the share.
    Up has 2 bits, gate and down 16.
    """
    return Published(f"FloE {100 * share:g} %", "FloE, section 3.2", lambda _: Rule(share), "up", (2, 16, 16, 16))


def _corm(_: Manifest) -> Rule:
    """CORM (section 3): neuron n is skipped where |silu(gate_n · x)| <= θ, one θ for all experts. 0.25 is what it chose
    for Mixtral (figure 10), where it skips 55 % of the neurons (figure 2): a layer whose signal is up skips that share.
    """
    return Rule(0.55, theta=0.25)


def _threshold(top_k: int) -> float:
    """T of DualSparse-MoE's tables 1 and 2, which drops 20 to 27 %: 0.30 of 2 experts, 0.15 of 4, 0.12 of 6 (table 2,
    DeepSeek-V2-Lite), 0.08 of 8. Scores of K experts that sum to 1 fall with K: another K gets 0.64 / K, as 8 do.
    """
    return {2: 0.30, 4: 0.15, 6: 0.12}.get(top_k, 0.64 / top_k)


def _one_threshold(manifest: Manifest) -> Rule:
    """DualSparse-MoE, section 4.1: an expert is skipped where w / Σ w < T, over the K that a token chose. `Rule`
    compares w with their mean, Σ w / K, so its limit is K T.
    """
    k = manifest.architecture.top_k
    return Rule(drop=k * _threshold(k), major=k * _threshold(k))


def _two_thresholds(manifest: Manifest) -> Rule:
    """DualSparse-MoE, section 4.2: below T - 0.01 an expert is skipped, below T + 0.01 its minor half."""
    k = manifest.architecture.top_k
    drop, major = (k * max(0.0, _threshold(k) + apart) for apart in (-0.01, 0.01))
    return Rule(drop=drop, major=min(1.0, major))


def _importance(_: Manifest) -> Rule:
    """Importance-driven expert scheduling, section 5.1: with β the best score that was not chosen, an absent expert of
    a score below (1 + α) β is replaced by a present one of (1 - α) β or more. α is 0.35, 0.3 and 0.25 in its three
    settings (section 6.2).
    """
    return Rule(alpha=0.3)


def _fiddler(_: Manifest) -> Rule:
    """Fiddler (section 3.2) is exact: the experts used most are on the GPU, the CPU computes the others."""
    return NOTHING


_PLACED = "where experts are, and which of them the CPU computes, is chosen for this machine"
PUBLISHED = (
    _floe(0.8),
    _floe(0.9),
    Published("CORM", "CORM, section 3", _corm, "gate", (4, 4, 4, 4)),
    Published("1T-Drop", "DualSparse-MoE, section 4.1", _one_threshold),
    Published("2T-Drop", "DualSparse-MoE, section 4.2", _two_thresholds),
    Published("Importance", "Importance-driven expert scheduling, section 5.1", _importance),
    Published("Fiddler", "Fiddler, section 3.2", _fiddler, beyond=_PLACED),
)
"""In the order in which they are listed, after our presets. Every pack has them; `differs` says what it cannot do."""


def of(manifest: Manifest) -> tuple[Preset, ...]:
    """The presets that a pack can run, best first.

    Exact is there only where all weights are the source's own 16-bit weights. High, Balanced and Fast are those
    measured on this pack (`floe-chat tune`), or else rules that did well on others.
    """
    measured = {tuned.name: tuned.rule for tuned in manifest.tuned}
    presets = [replace(p, rule=measured.get(p.name, p.rule)) for p in PRESETS if manifest.unquantized or not p.exact]
    return _with_halves(manifest, presets)


def published(manifest: Manifest) -> tuple[Preset, ...]:
    """The papers' rules for a pack, at its widths."""
    x_bits = X_BITS_EXACT if manifest.unquantized else X_BITS_FINE
    return _with_halves(manifest, [Preset(one.name, one.rule(manifest), x_bits) for one in PUBLISHED])


def _with_halves(manifest: Manifest, presets: Sequence[Preset]) -> tuple[Preset, ...]:
    """An odd number of neurons has none: there is one limit then."""
    if manifest.architecture.intermediate % 2 == 0:
        return tuple(presets)
    return tuple(replace(p, rule=replace(p.rule, major=p.rule.drop)) for p in presets)


def differs(name: str, manifest: Manifest) -> str:
    """In a sentence or two, how a published rule runs on this pack; "" for other presets."""
    known = next((one for one in PUBLISHED if one.name == name), None)
    if known is None:
        return ""
    w, a, rule = manifest.widths, manifest.architecture, known.rule(manifest)
    up, gate, down, dense = known.widths
    words: list[str] = []
    if (w.up, w.gate, w.down, w.dense) != known.widths:
        words.append(f"its weights are {replace(w, up=up, gate=gate, down=down, dense=dense).describe()}")
    if known.signal and w.rounding != HQQ:
        words.append("it rounds by HQQ")
    others = sum(manifest.signal_of(layer) != known.signal for layer in range(a.layers)) if known.signal else 0
    if others:
        by_share = f" and {100 * rule.sparsity:g} % are skipped" if rule.theta else ""
        words.append(f"in {others} of {a.layers} layers the signal is not {known.signal}{by_share}")
    if rule.sparsity and (others or not rule.theta) and not manifest.calibration.plain:
        words.append("thresholds were measured of the signal times the router's weight")
    if rule.parts > 1 and a.intermediate % 2:
        words.append("experts have no halves")
    if (rule.sparsity or rule.parts > 1) and manifest.whole:
        words.append(manifest.unskipped)
    if rule.alpha and manifest.family.routing.kind != "softmax":
        words.append(f"experts of {manifest.family.called} cannot be replaced")
    packing = f"--up {up} --rows {gate} --dense {dense} --signal {known.signal} --rounding hqq"
    hint = f" To pack so: floe-chat pack SOURCE FOLDER {packing}" if words and known.signal else ""
    words += [known.beyond] if known.beyond else []
    but = f" Not as published: {'; '.join(words)}." if words else ""
    return f"the rule of {known.paper}.{but}{hint}"


def notes(presets: Sequence[Preset], manifest: Manifest) -> tuple[str, ...]:
    """What `differs` says of these, once for those of which it says the same."""
    found: dict[str, list[str]] = {}
    for preset in presets:
        if note := differs(preset.name, manifest):
            found.setdefault(note, []).append(preset.name)
    return tuple(f"{', '.join(names)}: {note}" for note, names in found.items())


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
    """The preset or published rule `name`, in any case of letters; spaces and "%" may be left out.

    Raises:
        UsageError: there is no such preset, or this pack cannot run it.
    """
    known = next((p.name for p in (*PRESETS, *PUBLISHED) if _key(p.name) == _key(name)), None)
    if known is None:
        ours, theirs = (", ".join(p.name for p in presets) for presets in (PRESETS, PUBLISHED))
        raise UsageError(f"There is no preset {name!r}", "", f"Choose one of {ours}; as published: {theirs}.")
    preset = next((preset for preset in (*of(manifest), *published(manifest)) if preset.name == known), None)
    if preset is None and (why := manifest.inexact):
        raise UsageError(
            f"This pack cannot run {known}",
            why,
            f"Choose one of {', '.join(available(manifest))}.",
        )
    if preset is None:
        raise UsageError(
            f"This pack cannot run {known}",
            f"It holds {manifest.describe()}; {known} needs the source's own 16-bit weights.",
            f"Choose one of {', '.join(available(manifest))}, or pack with --up 16 --rows 16 --dense 16.",
        )
    return preset


def _key(name: str) -> str:
    return name.lower().replace(" ", "").removesuffix("%")
