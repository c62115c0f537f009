"""`floe-chat eval`: how far a pack is from its 16-bit source, preset by preset, on the next tokens of a text.

Both read the same windows (`text_windows.py`), the source streamed (`source_model.py`) and its logits cached
(`models/packing/logits_cache.py`); each position is compared in float64 (`divergence.py`).

The greedy gate needs no slow generating by the source: the pack continues a prompt greedily, the source reads prompt
and continuation in one pass, and the first token that is not the source's own likeliest is where their greedy
continuations part, since up to there both have read the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...models.checkpoint import Checkpoint
from ...models.errors import PackError, UsageError, damaged
from ...models.pack.manifest import Manifest
from ...models.packing import logits_cache
from ...models.transformers_import import import_model_code
from .. import quality_presets
from ..decoder.decoders import FusedDecoder
from ..decoder.finite_check import first_nonfinite
from ..events import Advanced, Loaded, Sampling
from ..generate import KVCache, generate
from ..loader import LoadedModel, load
from ..quality_presets import Preset
from .divergence import Divergence, Scores, score, summarize
from .source_model import SourceModel, identify
from .text_windows import cut, cut_prompts

NEW_TOKENS = 32  # tokens by which each prompt of the greedy gate is continued
NO_SPARSITY = Preset("No sparsity")


@dataclass(frozen=True, slots=True)
class PresetLoss:
    """One preset's figures.

    Attributes:
        first_divergence: for each prompt, how many tokens of the greedy continuation are the source's before the
            first that is not; None where all are.
        active_neurons, bytes_per_token: counted while continuing the prompts, as `Stats` has them.
        kv: how far the pack with keys and values of 8 bits is from the pack with those of 16; None if not measured.
    """

    preset: str
    sparsity: float
    divergence: Divergence
    first_divergence: tuple[int | None, ...]
    active_neurons: float | None
    bytes_per_token: float | None
    kv: Divergence | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation's inputs and figures. `tokens` were read in `windows` windows, `scored` of them predicted.

    Attributes:
        lenient: whether the presets left out weak rows, as if none of them were ever on the device.
        kv_bits: of the keys and values that the windows' tokens read as a chat stores them; None: they were not stored.
    """

    model: str
    source: str
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


@dataclass(frozen=True, slots=True)
class Told:
    """Receives a run's messages: `step` gets progress that may be overwritten, `note` what should be read."""

    step: Callable[[str], None]
    note: Callable[[str], None]


def choose_presets(names: Sequence[str], manifest: Manifest) -> list[Preset]:
    """The presets to measure, best first: those named, or all that the pack can run and NO_SPARSITY.

    Raises:
        UsageError: a name that is no preset, or one that this pack cannot run.
    """
    runnable = quality_presets.of(manifest)
    every = [*(p for p in runnable if p.exact), NO_SPARSITY, *(p for p in runnable if not p.exact)]
    wanted = {
        NO_SPARSITY if name.lower() == NO_SPARSITY.name.lower() else quality_presets.get(name, manifest)
        for name in names
    }
    return [preset for preset in every if not names or preset in wanted]


def run(
    pack: Path,
    source: Path,
    ids: Sequence[int],
    names: Sequence[str],
    tokens: int,
    device: str,
    told: Told,
    *,
    lenient: bool = False,
    kv_bits: int | None = None,
) -> Evaluation:
    """Measure a pack against its source.

    Args:
        ids: the text by the pack's tokenizer, without a start token; as much of it is used as `tokens` says.
        names: presets to measure, see `choose_presets`. tokens: to read, in whole windows, start tokens among them.
        device: for the pack, as `load` takes it; the source is computed on the CPU in float32.
        lenient: whether presets leave out weak rows, see `quality_presets.lenient`.
        kv_bits: 16 or 8: store keys and values with so many bits, and with 8 compare the pack with itself at 16 too.

    Raises:
        UsageError: a preset that does not exist, too few or too many tokens, a text too short, another source, or a
            model whose keys and values cannot have 8 bits.
        CheckpointError, PackError: the source or the pack cannot be read, or computes values that are not finite.
    """
    presets = choose_presets(names, Manifest.read(pack))
    presets = [quality_presets.lenient(preset) for preset in presets] if lenient else presets
    told.step("Starting transformers")
    import_model_code()
    checkpoint = Checkpoint(source)
    windows, keep = cut(ids, checkpoint.config, tokens)
    loaded, facts = _opened(pack, device, kv_bits, told)
    if int(windows.max()) >= checkpoint.config.vocab_size:
        raise damaged(pack, f"Its tokenizer knows token {int(windows.max())}; the weights have fewer.")
    reference = Reference(checkpoint, _identity(checkpoint, loaded, told), told)
    expected = reference.logits(windows[:, :-1], keep)
    found = [measured_divergence(loaded, preset, windows, expected, told, kv_bits) for preset in presets]
    coarse = [kv_divergence(loaded, preset, windows, keep, told) if kv_bits == 8 else None for preset in presets]
    prompts = cut_prompts(ids, checkpoint.config)
    answers = [continuation(loaded, preset, prompts, told) for preset in presets]
    parted = _where_parted(reference, prompts, [answer.tokens for answer in answers])
    return Evaluation(
        model=facts.model,
        source=facts.source,
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
    )


def _opened(pack: Path, device: str, kv_bits: int | None, told: Told) -> tuple[LoadedModel, Loaded]:
    stored = Advanced() if kv_bits is None else Advanced(kv_bits=str(kv_bits))
    loaded, facts = load(pack, None, device, lambda step, _share: told.step(step), advanced=stored, library=True)
    if kv_bits == 8:
        _need_codes(loaded)
    return loaded, facts


def _loss(
    preset: Preset, divergence: Divergence, parted: tuple[int | None, ...], answer: Continued, kv: Divergence | None
) -> PresetLoss:
    counted = answer.active_neurons, answer.bytes_per_token
    return PresetLoss(preset.name, preset.rule.sparsity, divergence, parted, *counted, kv)


def _identity(checkpoint: Checkpoint, loaded: LoadedModel, told: Told) -> str:
    """See `identify`; a folder of another name is noted."""
    told.step("Comparing the pack with its source")
    identity = identify(checkpoint, loaded.packed)
    packed_from, called = loaded.packed.manifest.source.name, checkpoint.folder.resolve().name
    if called != packed_from:
        told.note(f"The pack was made from a folder called {packed_from}; {called} has the same embedding and norms.")
    return identity


class Reference:
    """The source's logits, from the cache if possible; the model is built when first needed."""

    def __init__(self, checkpoint: Checkpoint, identity: str, told: Told) -> None:
        self._checkpoint, self._identity, self._told = checkpoint, identity, told

    def logits(self, ids: Tensor, keep: int) -> Tensor:
        """ids (N, T) -> logits of the last `keep` positions, (N, keep, V) float32."""
        shape = (ids.shape[0], keep, self._checkpoint.config.vocab_size)
        key = logits_cache.key_of(self._identity, ids, keep)

        def compute() -> Tensor:
            return SourceModel(self._checkpoint, self._told.step).logits(ids, keep)

        return logits_cache.cached(key, shape, self._told.note, compute)


def _use(loaded: LoadedModel, preset: Preset) -> None:
    loaded.control.preset = preset
    loaded.control.counting = False


def measured_divergence(
    loaded: LoadedModel, preset: Preset, windows: Tensor, expected: Tensor, told: Told, kv_bits: int | None = None
) -> Divergence:
    """How far a pack is from its source at one preset; expected: (N, keep, V), the source's logits of each window.

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


def pack_logits(loaded: LoadedModel, preset: Preset, ids: Tensor, keep: int, kv_bits: int | None = None) -> Tensor:
    """ids (1, T) -> logits of the last `keep` positions, (keep, V) float32 on the CPU.

    kv_bits: of stored keys and values; None: they are not stored.

    Raises:
        PackError: values that are not finite.
    """
    _use(loaded, preset)
    decoder = loaded.decoder
    # transformers' own modules store keys and values as they compute them: without a store the same is computed.
    own = decoder if kv_bits is not None and isinstance(decoder, FusedDecoder) else None

    def forward() -> Tensor:
        with torch.inference_mode():
            return loaded.model(input_ids=ids.to(loaded.device), use_cache=False, logits_to_keep=keep).logits[0]

    logits = (forward() if own is None or kv_bits is None else own.read(ids[0].tolist(), keep, kv_bits)).float().cpu()
    if not bool(torch.isfinite(logits).all()):
        where = first_nonfinite(loaded.model, forward) if own is None else own.first_nonfinite(ids[0].tolist())
        raise PackError(
            f"The packed model at {loaded.packed.folder} computes values that are not finite",
            f"The first come from {where}.",
            "Pack the source checkpoint again, or restore a copy.",
        )
    return logits


@dataclass(frozen=True, slots=True)
class Continued:
    """The greedy continuation of each prompt, tokens (P, T) int64, and means of the counters meanwhile."""

    tokens: Tensor
    active_neurons: float | None
    bytes_per_token: float | None


def continuation(loaded: LoadedModel, preset: Preset, prompts: Tensor, told: Told) -> Continued:
    """Continue prompts (P, T) greedily at one preset."""
    _use(loaded, preset)
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
    """For each answer of each preset, the position of the first token that the source would not have chosen."""
    rows = torch.cat([torch.cat([prompts, answer], dim=1) for answer in answers])
    new = answers[0].shape[1]
    likeliest = reference.logits(rows[:, :-1], new).argmax(-1)
    agree = (likeliest == rows[:, -new:]).int().cumprod(1).sum(1).tolist()
    found = [None if count == new else int(count) for count in agree]
    return [tuple(found[start : start + len(prompts)]) for start in range(0, len(found), len(prompts))]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
