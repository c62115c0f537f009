"""`floe-chat eval`: how far a pack is from its reference, preset by preset, on the next tokens of a text.

The reference (`references.py`) is the 16-bit source, streamed (`source_model.py`), its logits cached
(`models/packing/logits_cache.py`), or the pack itself with nothing left out. Both read the same windows
(`text_windows.py`); each position is compared in float64 (`divergence.py`).

The greedy gate needs no slow generating by the reference: the pack continues a prompt greedily, the reference reads
prompt and continuation in one pass, and the first token that is not its own likeliest is where their greedy
continuations part, since up to there both have read the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.rule import Rule
from ...models.checkpoint import Checkpoint
from ...models.errors import UsageError, damaged
from ...models.pack.manifest import Manifest
from ...models.transformers_import import import_model_code
from .. import quality_presets
from ..decoder.decoders import FusedDecoder
from ..events import Advanced, Loaded, Sampling
from ..generate import KVCache, generate
from ..loader import LoadedModel, load
from ..quality_presets import Preset
from .divergence import Divergence, Scores, score, summarize
from .half_resident import half_resident
from .references import NO_SPARSITY, PackReference, Reference, SourceReference, pack_logits, use
from .text_windows import cut, cut_prompts
from .told import Told

NEW_TOKENS = 32  # tokens by which each prompt of the greedy gate is continued


@dataclass(frozen=True, slots=True)
class PresetLoss:
    """One preset's figures.

    Attributes:
        rule: what a token may skip. first_divergence: for each prompt, how many tokens of the greedy continuation are
            the reference's before the first that is not; None where all are.
        active_neurons, bytes_per_token: counted while continuing the prompts, as `Stats` has them.
        kv: how far the pack with keys and values of 8 bits is from the pack with those of 16; None if not measured.
    """

    preset: str
    rule: Rule
    divergence: Divergence
    first_divergence: tuple[int | None, ...]
    active_neurons: float | None
    bytes_per_token: float | None
    kv: Divergence | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation's inputs and figures. `tokens` were read in `windows` windows, `scored` of them predicted.

    Attributes:
        source: the reference's name; None: it is the pack itself with nothing left out.
        lenient: whether the presets left out weak rows, as if none of them were ever on the device.
        kv_bits: of the keys and values that the windows' tokens read as a chat stores them; None: they were not stored.
        notes: what of a published rule is not as published on this pack. placed: where experts were, in words.
    """

    model: str
    source: str | None
    widths: str
    device: str
    backend: str
    window: int
    windows: int
    tokens: int
    scored: int
    continued: int
    presets: tuple[PresetLoss, ...]
    lenient: bool = False
    kv_bits: int | None = None
    notes: tuple[str, ...] = ()
    placed: str = ""


def choose_presets(names: Sequence[str], manifest: Manifest, rule: Rule | None = None) -> list[Preset]:
    """The presets to measure, best first: those named, or all that the pack can run and NO_SPARSITY. Published rules
    come last, and only if they are named.

    Args:
        rule: to measure after those named, or alone if none is: a quality set by hand.

    Raises:
        UsageError: a name that is no preset, or one that this pack cannot run, or such a rule.
    """
    if rule is not None:
        return [*(choose_presets(names, manifest) if names else ()), quality_presets.custom(manifest, rule)]
    runnable = quality_presets.of(manifest)
    every = [*(p for p in runnable if p.exact), NO_SPARSITY, *(p for p in runnable if not p.exact)]
    wanted = {
        NO_SPARSITY if name.lower() == NO_SPARSITY.name.lower() else quality_presets.get(name, manifest)
        for name in names
    }
    if not names:
        return every
    return [preset for preset in (*every, *quality_presets.published(manifest)) if preset in wanted]


def run(
    pack: Path,
    source: Path | None,
    ids: Sequence[int],
    names: Sequence[str],
    tokens: int,
    device: str,
    told: Told,
    *,
    rule: Rule | None = None,
    lenient: bool = False,
    kv_bits: int | None = None,
    vram: int | None = None,
    placement: str = "auto",
) -> Evaluation:
    """Measure a pack against its source, or against itself with nothing left out if none is given.

    Args:
        ids: the text by the pack's tokenizer, without a start token; as much of it is used as `tokens` says.
        names: presets to measure, see `choose_presets`. tokens: to read, in whole windows, start tokens among them.
        device: for the pack, as `load` takes it; the source is computed on the CPU in float32.
        rule: a quality set by hand, see `choose_presets`.
        lenient: whether presets leave out weak rows, see `quality_presets.lenient`.
        kv_bits: 16 or 8: store keys and values with so many bits, and with 8 compare the pack with itself at 16 too.
        vram: see `load`. placement: see `opened`.

    Raises:
        UsageError: a preset that does not exist, too few or too many tokens, a text too short, another source, or a
            model whose keys and values cannot have 8 bits.
        CheckpointError, PackError: the source or the pack cannot be read, or computes values that are not finite.
    """
    presets = presets_of(names, rule, Manifest.read(pack), lenient=lenient, kv_bits=kv_bits)
    told.step("Starting transformers")
    import_model_code()
    checkpoint = None if source is None else Checkpoint(source)
    loaded, facts = opened(pack, device, kv_bits, told, vram, placement)
    config: Any = loaded.model.config if checkpoint is None else checkpoint.config
    windows, keep = cut(ids, config, tokens)
    if int(windows.max()) >= config.vocab_size:
        raise damaged(pack, f"Its tokenizer knows token {int(windows.max())}; the weights have fewer.")
    reference: Reference = PackReference(loaded, told)
    if checkpoint is not None:
        reference = SourceReference.of(checkpoint, loaded, told)
    expected = reference.logits(windows[:, :-1], keep)
    found: list[Divergence] = []
    coarse: list[Divergence | None] = []
    answers: list[Continued] = []
    prompts = cut_prompts(ids, config)
    for one in presets:
        with half_resident(loaded, one) as (model, preset):
            found.append(measured_divergence(model, preset, windows, expected, told, kv_bits))
            coarse.append(kv_divergence(model, preset, windows, keep, told) if kv_bits == 8 else None)
            answers.append(continuation(model, preset, prompts, told))
    parted = _where_parted(reference, prompts, [answer.tokens for answer in answers])
    return Evaluation(
        model=facts.model,
        source=None if checkpoint is None else facts.source,
        widths=facts.widths,
        device=facts.device,
        backend=facts.backend,
        window=windows.shape[1],
        windows=windows.shape[0],
        tokens=windows.numel(),
        scored=windows.shape[0] * keep,
        continued=answers[0].tokens.shape[1],
        presets=tuple(map(_loss, presets, found, parted, answers, coarse)),
        lenient=lenient,
        kv_bits=kv_bits,
        notes=quality_presets.notes(presets, loaded.packed.manifest),
        placed=facts.placed,
    )


def presets_of(
    names: Sequence[str], rule: Rule | None, manifest: Manifest, *, lenient: bool, kv_bits: int | None
) -> list[Preset]:
    """See `choose_presets`, and `run` for the others.

    Raises:
        UsageError: likewise; or two things that cannot be measured together.
    """
    presets = choose_presets(names, manifest, rule)
    if kv_bits == 8 and any(preset.rule.alpha for preset in presets):
        raise UsageError(
            "Substituting experts (alpha) and --kv-bits 8 cannot be measured together",
            "Substitution is measured in transformers' own pass, whose keys and values have 16 bits.",
            "Measure one after the other.",
        )
    return [quality_presets.lenient(preset) for preset in presets] if lenient else presets


def opened(
    pack: Path, device: str, kv_bits: int | None, told: Told, vram: int | None = None, placement: str = "auto"
) -> tuple[LoadedModel, Loaded]:
    """A pack whose chats store keys and values with so many bits, None: as they choose.

    Args:
        vram: see `load`. placement: see `ranges.Wanted`.

    Raises:
        UsageError: 8 bits, where the model's own pass cannot store them, or a placement where all experts are in one
            place. FloeError: as `load`.
    """
    advanced = Advanced(kv_bits="auto" if kv_bits is None else str(kv_bits), placement=placement)

    def report(step: str, _share: float) -> None:
        told.step(step)

    loaded, facts = load(pack, None, device, report, vram=vram, advanced=advanced, library=True)
    if placement != "auto" and facts.pools is None:
        loaded.close()
        raise UsageError(f"--mix {placement} has no effect on {facts.device}", "All experts are in one place there.")
    if kv_bits == 8:
        _need_codes(loaded)
    return loaded, facts


def _loss(
    preset: Preset, divergence: Divergence, parted: tuple[int | None, ...], answer: Continued, kv: Divergence | None
) -> PresetLoss:
    counted = answer.active_neurons, answer.bytes_per_token
    return PresetLoss(preset.name, preset.rule, divergence, parted, *counted, kv)


def measured_divergence(
    loaded: LoadedModel, preset: Preset, windows: Tensor, expected: Tensor, told: Told, kv_bits: int | None = None
) -> Divergence:
    """How far a pack is from its reference at one preset; expected: (N, keep, V), its logits of each window.

    kv_bits: of stored keys and values; None: they are not stored.
    """
    keep = expected.shape[1]
    scores: list[Scores] = []
    for index, row in enumerate(windows):
        told.step(f"{preset.name}: window {index + 1} of {len(windows)}")
        scores.append(score(pack_logits(loaded, preset, row[None, :-1], keep, kv_bits), expected[index], row[-keep:]))
    return summarize(scores)


def kv_divergence(loaded: LoadedModel, preset: Preset, windows: Tensor, keep: int, told: Told) -> Divergence:
    """How far a pack with keys and values of 8 bits is from itself with those of 16, on the ends of windows (N, T).

    Raises:
        UsageError: the pack's keys and values cannot have 8 bits.
    """
    _need_codes(loaded)
    scores: list[Scores] = []
    for index, row in enumerate(windows):
        told.step(f"{preset.name}: 8 bits against 16, window {index + 1} of {len(windows)}")
        coarse, exact = (pack_logits(loaded, preset, row[None, :-1], keep, bits) for bits in (8, 16))
        scores.append(score(coarse, exact, row[-keep:]))
    return summarize(scores)


def _need_codes(loaded: LoadedModel) -> None:
    if not isinstance(loaded.decoder, FusedDecoder):
        raise UsageError(
            "This model's keys and values cannot have 8 bits",
            f"Only floe-chat's own pass stores them so; this model has {loaded.decoder.reason}.",
            "Leave out --kv-bits, or give --kv-bits 16.",
        )


@dataclass(frozen=True, slots=True)
class Continued:
    """The greedy continuation of each prompt, tokens (P, T) int64, and means of the counters meanwhile."""

    tokens: Tensor
    active_neurons: float | None
    bytes_per_token: float | None


def continuation(loaded: LoadedModel, preset: Preset, prompts: Tensor, told: Told) -> Continued:
    """Continue prompts (P, T) greedily at one preset."""
    use(loaded, preset)
    tokens: list[list[int]] = []
    active: list[float] = []
    nbytes: list[float] = []
    for index, prompt in enumerate(prompts.tolist()):
        told.step(f"{preset.name}: prompt {index + 1} of {len(prompts)}")
        loaded.telemetry.begin(index, len(prompt), time.perf_counter())
        steps = generate(
            loaded.decoder,
            KVCache(),
            prompt,
            Sampling(temperature=0),
            max_new_tokens=min(NEW_TOKENS, loaded.window - len(prompt)),
            stop_ids=(),
            window=loaded.window,
            control=loaded.control,
            telemetry=loaded.telemetry,
        )
        tokens.append([step.token for step in steps if step.token is not None])
        stats = loaded.telemetry.stats(kv_bytes=0, vram_bytes=None, context_used=0, context_window=loaded.window)
        active += [] if stats.active_neurons is None else [stats.active_neurons]
        nbytes += [] if stats.bytes_per_token is None else [stats.bytes_per_token]
    return Continued(torch.tensor(tokens), _mean(active), _mean(nbytes))


def _where_parted(reference: Reference, prompts: Tensor, answers: list[Tensor]) -> list[tuple[int | None, ...]]:
    """For each answer of each preset, the position of the first token that the reference would not have chosen."""
    rows = torch.cat([torch.cat([prompts, answer], dim=1) for answer in answers])
    new = answers[0].shape[1]
    likeliest = reference.logits(rows[:, :-1], new).argmax(-1)
    agree = (likeliest == rows[:, -new:]).int().cumprod(1).sum(1).tolist()
    found = [None if count == new else int(count) for count in agree]
    return [tuple(found[start : start + len(prompts)]) for start in range(0, len(found), len(prompts))]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
