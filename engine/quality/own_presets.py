"""`floe-chat tune` without a source: a pack's presets by what they add to its own loss.

The pack with nothing left out is the reference, so that nothing but the pack is needed. One dial stands for all shares:
on both small models the frontier of settings (BENCHMARKS.md) leads along it. Where some layers bear more than others,
they skip more (DualSparse-MoE figure 12, TEAL's greedy allocation). Each preset turns the dial as far as its level of
the KL divergence allows.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from ...kernels.rule import NOTHING, Rule
from ...models.errors import PackError
from ...models.pack.dial_loss import POINTS, DialLoss
from ...models.pack.manifest import PACK, Manifest, TunedPreset
from ...models.transformers_import import import_model_code
from ..loader import LoadedModel, load
from ..quality_presets import LEVELS, Preset, custom, ruled
from . import own_predictors
from .evaluate import continuation, measured_divergence
from .own_predictors import OwnPredictors
from .references import PackReference
from .text_windows import cut, cut_prompts
from .told import Told

MOST = 0.9  # of the dial
_PARTS = 8  # of the layers, in which they are told apart
_TRIES = 5  # settings of the dial for a level, at most
_NEAR = 0.02  # settings so close to each other are one
_STEEP = 2.5  # KL grows about with this power of the dial
_LEANING = 0.4  # and a part's share should fall with this power of what it costs
_LEAST_SHARE, _MOST_SHARE = 0.3, 1.6  # of a part, over that of the middle one

_EXACTLY = "High"  # the preset whose products are exact enough that only what is left out shows

Figure = Callable[[Rule], float]


def along(dial: float, layers: tuple[float, ...] = ()) -> Rule:
    """The rule where the dial (0..1) stands: the share left out by the signal, and others with it."""
    drop = min(0.6, max(0.0, 2 * (dial - 0.4)))
    product = min(0.95, dial + 0.2 * min(1.0, 5 * dial))
    return Rule(dial, product, drop=drop, major=drop, weighed=True, layers=layers)


@dataclass(frozen=True, slots=True)
class OwnPresets:
    """The result, measured on `scored` tokens in so many seconds.

    Attributes:
        adds: what each preset's rule adds by itself, nats; its `kl` counts the precision of its products too.
        dials: what each dial of a quality set by hand adds. predictors: see `own_predictors.run`.
    """

    model: str
    widths: str
    presets: tuple[TunedPreset, ...]
    adds: tuple[float, ...]
    dials: DialLoss
    scored: int
    seconds: float
    predictors: OwnPredictors | None = None


def run(
    pack: Path, ids: Sequence[int], tokens: int, told: Told, *, text: str, device: str = "auto", learn: bool = False
) -> OwnPresets:
    """Find the presets of a pack, and write them into it.

    Args:
        ids: the text by the pack's tokenizer, without a start token; as much of it is used as `tokens` says.
        text: its name, saved with the presets. device: as `load` takes it. learn: train the predictors on it too.

    Raises:
        UsageError: too few or too many tokens, a text too short. PackError: the pack cannot be read or written to.
    """
    need_writable(pack)
    began = time.monotonic()
    told.step("Starting transformers")
    import_model_code()
    loaded, facts = load(pack, None, device, lambda step, _share: told.step(step), library=True)
    windows, keep = cut(ids, loaded.model.config, tokens)
    prompts = cut_prompts(ids, loaded.model.config)
    expected = PackReference(loaded, told).logits(windows[:, :-1], keep)
    tried = 0

    def measure(preset: Preset) -> float:
        nonlocal tried
        tried += 1
        step = Told(lambda what: told.step(f"Setting {tried}. {what}"), told.note)
        return measured_divergence(loaded, preset, windows, expected, step).kl_mean

    def read(preset: Preset) -> float:
        return continuation(loaded, preset, prompts, told).bytes_per_token or 0.0

    found = search(
        lambda rule: measure(ruled(_EXACTLY, rule)),
        lambda rule: read(ruled(_EXACTLY, rule)),
        len(loaded.telemetry.layers),
    )
    measured = text, len(windows) * keep, PACK
    presets = [ruled(name, rule) for name, (rule, _) in found.items()]
    tuned = tuple(TunedPreset(p.name, p.rule, measure(p), read(p), *measured) for p in presets)
    manifest = replace(loaded.packed.manifest, tuned=tuned)
    dials = dial_losses(loaded, manifest, windows, expected, told, text)
    replace(manifest, dials=dials).write(pack)
    learned = own_predictors.run(loaded, ids, told) if learn else None
    given = facts.model, facts.widths, tuned, tuple(kl for _, kl in found.values()), dials, len(windows) * keep
    return OwnPresets(*given, time.monotonic() - began, learned)


def dial_losses(
    loaded: LoadedModel, manifest: Manifest, windows: Tensor, expected: Tensor, told: Told, text: str
) -> DialLoss:
    """What each dial of a quality set by hand adds by itself, by the shapes of the manifest's presets.

    expected: (N, keep, V), the pack's own logits of each window with nothing left out.
    """
    dials = {
        name: shares for name, shares in POINTS.items() if name != "major" or not manifest.architecture.intermediate % 2
    }
    settings = [(name, share) for name, shares in dials.items() for share in shares]
    curves: dict[str, list[tuple[float, float]]] = {name: [] for name in POINTS}
    for number, (name, share) in enumerate(settings, 1):
        step = Told(lambda what, n=number: told.step(f"Dial {n} of {len(settings)}. {what}"), told.note)
        preset = custom(manifest, replace(NOTHING, **{name: share}))
        kl = measured_divergence(loaded, preset, windows, expected, step).kl_mean
        curves[name].append((share, kl))
    return DialLoss(text, len(windows) * expected.shape[1], **{name: tuple(curve) for name, curve in curves.items()})


def need_writable(pack: Path) -> None:
    """Before a long search.

    Raises:
        PackError: the pack's presets cannot be changed.
    """
    if not os.access(pack, os.W_OK):
        raise PackError(
            f"The presets of {pack} cannot be changed",
            "Its folder is read-only.",
            "Copy the folder to a place where you can write, and tune the copy.",
        )


def search(measure: Figure, read: Figure, layers: int) -> dict[str, tuple[Rule, float]]:
    """For each level the rule, and what it adds.

    Args:
        measure: what a rule adds (KL, nats). read: the bytes of experts' weights that a token reads with it.
    """
    flat, middle = _Dial(measure, ()), LEVELS["Balanced"]
    if dial := flat.within(middle):
        shaped = _Dial(measure, _shares(measure, dial, layers))
        cheaper = min((flat, shaped), key=lambda one: read(one.found(middle)[0]))
        return {name: cheaper.found(level) for name, level in LEVELS.items()}
    return {name: flat.found(level) for name, level in LEVELS.items()}


def _shares(measure: Figure, dial: float, layers: int) -> tuple[float, ...]:
    """How much of the dial each layer takes: parts of the layers that cost more, alone, take less. Their mean is 1."""
    parts = min(_PARTS, layers)
    part_of = [layer * parts // layers for layer in range(layers)]
    costs = [measure(along(dial, tuple(float(own == part) for own in part_of))) for part in range(parts)]
    usual = statistics.median(costs)
    leaning = [(usual / max(cost, 1e-9)) ** _LEANING if usual else 1.0 for cost in costs]
    leaning = [min(_MOST_SHARE, max(_LEAST_SHARE, share)) for share in leaning]
    mean = sum(leaning[part] for part in part_of) / layers
    return tuple(round(leaning[part] / mean, 3) for part in part_of)


class _Dial:
    """What is added where the dial stands."""

    def __init__(self, measure: Figure, layers: tuple[float, ...]) -> None:
        self._measure, self._layers = measure, layers
        self._known = {0.0: 0.0}

    def found(self, level: float) -> tuple[Rule, float]:
        """The rule within a level, and what it adds."""
        dial = self.within(level)
        return along(dial, self._layers) if dial else NOTHING, self._known[dial]

    def within(self, level: float) -> float:
        """The farthest setting that was seen to add no more than that; 0, where nothing is skipped, if none is."""
        for _ in range(_TRIES):
            low, high = self._around(level)
            if (high is not None and high - low <= _NEAR) or low >= MOST:
                break
            dial = self._guess(level, low, high)
            self._known[dial] = self._measure(along(dial, self._layers))
        return self._around(level)[0]

    def _around(self, level: float) -> tuple[float, float | None]:
        """The farthest setting within the level, and the nearest one beyond it that is not."""
        low = max(dial for dial, kl in self._known.items() if kl <= level)
        return low, min((dial for dial, kl in self._known.items() if dial > low and kl > level), default=None)

    def _guess(self, level: float, low: float, high: float | None) -> float:
        """Where the level is likely to be reached, of what is known on both sides."""
        below, aim = self._known[low], 0.95 * level
        if high is None:
            guess = (low * (aim / below) ** (1 / _STEEP) if below else MOST) if low else 0.3
            return round(min(MOST, max(guess, low + 2 * _NEAR)), 3)
        above = self._known[high]
        if low and below:
            share = math.log(aim / below) / math.log(above / below)
            guess = low * (high / low) ** share
        else:
            guess = high * (aim / above) ** (1 / _STEEP)
        edge = max(_NEAR / 2, 0.1 * (high - low))
        return round(min(high - edge, max(low + edge, guess)), 3)
