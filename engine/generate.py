"""Prompt ids in, answer ids out: prefill in chunks, then decode steps of a token or some. A plain generator."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..kernels.sampling import NotNumbersError
from ..models.errors import PackError
from .decoder.decoders import Decoder, LibraryDecoder
from .decoder.kv_cache import KVCache
from .events import Chance, Extras, Sampling
from .experts.moe_layer import Control
from .sampling import Allowed, Sampler
from .telemetry import Telemetry

_log = logging.getLogger("floe_chat.engine")


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of progress.

    Attributes:
        token: None while the prompt is read. done: prompt tokens in the KV cache so far.
        at: when the token was drawn, by the telemetry's clock: one call may draw several, which are reported one after
            the other.
        chance: of the token, if asked.
    """

    token: int | None
    done: int
    at: float | None = None
    chance: Chance | None = None


def generate(
    model: Decoder | nn.Module,
    kv: KVCache,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    window: int,
    control: Control,
    telemetry: Telemetry,
    extras: Extras | None = None,
    allowed: Allowed | None = None,
) -> Generator[Progress, None, str]:
    """Yield the progress of every prefill chunk and every new token; the generator's return value says why it ended.

    The part of the prompt that is in `kv` is not computed again, except for the last token; if there is any, it is
    reported first.

    Args:
        model: what computes the next tokens; a transformers model is called as it is.

    Returns (through StopIteration):
        "stop": a stop id was drawn (it is not yielded); "length": max_new_tokens; "context": the window is full.

    Raises:
        ValueError: an empty prompt, or one that leaves no room in the window.
        PackError: no token can be drawn from the logits: they are not finite.
        Cancelled: `control.cancelled` was set; takes effect at the next layer. `kv` stays valid with what was computed.
    """
    if not 0 < len(prompt) < window:
        raise ValueError(f"a prompt of {len(prompt)} tokens for a window of {window}")
    decoder = LibraryDecoder(model) if isinstance(model, nn.Module) else model
    sampler = Sampler(sampling, prompt, extras, allowed)
    if kept := kv.keep(prompt, control.preset):
        telemetry.reused(kept)
        yield Progress(None, kept)
    started = telemetry.clock()
    control.counting = False
    logits = torch.empty(0)
    for start in range(kept, len(prompt), control.chunk):
        logits = _forward(decoder, kv, prompt[start : start + control.chunk], control)
        yield Progress(None, kv.length)
    telemetry.prefill_done(telemetry.clock() - started)
    control.counting = True
    most = min(max_new_tokens, window - len(prompt))
    drawn: list[int] = []
    try:
        for token, at in _drawn(decoder, kv, logits, sampler, most, stop_ids, control, telemetry):
            if token in stop_ids:
                return "stop"
            telemetry.token(at)
            drawn.append(token)
            yield Progress(token, len(prompt), at, sampler.chance)
    except NotNumbersError as error:
        raise _not_finite(decoder.first_nonfinite([*prompt, *drawn])) from error
    return "length" if len(prompt) + most < window else "context"


def _not_finite(part: str) -> PackError:
    return PackError(
        "The packed model computes values that are not numbers",
        f"No token can be drawn from its logits. The first values that are NaN or infinite come from {part}: the"
        " pack's weights there are damaged, or far too large.",
        "Run `floe-chat verify` with the name of the model to see whether its files are damaged.",
    )


def _drawn(
    decoder: Decoder,
    kv: KVCache,
    logits: Tensor,
    sampler: Sampler,
    most: int,
    stop_ids: Sequence[int],
    control: Control,
    telemetry: Telemetry,
) -> Generator[tuple[int, float]]:
    """At most this many tokens, and when each was drawn; the first from the prompt's logits."""
    if not most:
        return
    token = sampler.draw(logits)
    yield token, telemetry.clock()
    while most := most - 1:
        began, preset = telemetry.clock(), control.preset
        several = decoder.several(token, kv, sampler, most, stop_ids)
        if several is None:
            several = [sampler.draw(_forward(decoder, kv, [token], control))], [telemetry.clock() - began]
        else:
            kv.computed([token, *several[0][:-1]], preset)
        telemetry.decoded(telemetry.clock() - began, len(several[0]))
        for token, after in zip(*several, strict=True):
            yield token, began + after
        most -= len(several[0]) - 1


def _forward(decoder: Decoder, kv: KVCache, ids: Sequence[int], control: Control) -> Tensor:
    """Logits (1, V) after `ids`, which are then in `kv`. If device memory runs out, retries once with more room."""
    preset = control.preset
    while (logits := _once(decoder, kv, ids, control)) is None:
        # Not inside the except block: the traceback holds the very memory that must be freed.
        if control.make_room is None or not control.make_room():
            raise torch.OutOfMemoryError("the device's memory ran out, and nothing can be freed")
    kv.computed(ids, preset)
    return logits


def _once(decoder: Decoder, kv: KVCache, ids: Sequence[int], control: Control) -> Tensor | None:
    """Logits, or None if the device's memory ran out."""
    try:
        return decoder.forward(ids, kv)
    except torch.OutOfMemoryError as error:
        control.ran_out = str(error)  # not the error itself, which holds its frames
        _log.warning("out of memory: %s", control.ran_out)
        return None
