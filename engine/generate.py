"""Prompt ids in, answer ids out: prefill in chunks, then decode steps of a token or some."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..kernels.sampling import NotNumbersError
from ..models.errors import PackError
from .decoder.decoders import Decoder, LibraryDecoder
from .decoder.draft_model import DraftModel
from .decoder.kv_cache import KVCache
from .drafts import Depth, Guess, Repeats
from .events import MOST_TOGETHER, Chance, Extras, Sampling
from .experts.moe_layer import Control
from .machine import gpus
from .outcomes import ran_out
from .quality_presets import Preset
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


class Answer:
    """One answer, computed step by step: by itself, or with others in between or together with them.

    The part of the prompt that is in `kv` is not computed again, except for the last token where its logits are not
    there; if there is any, it is reported first. What it does counts for the answer that telemetry began last before it
    was made.

    Args:
        model: what computes the next tokens; a transformers model is called as it is. alike: whether a seed makes the
            answer one that can be repeated. depth: how many tokens it pays to guess; None: none are guessed.

    Attributes:
        counts: what it counts by itself.
        alike: whether to reuse only what is exactly as if it were computed again.
        reached: is given how many tokens of the prompt a running step has read, as an estimate.
        end: why it ended: "stop" (a stop id was drawn; it is not reported), "length" (max_new_tokens), "context" (the
            window is full); "" before that.

    Raises:
        ValueError: an empty prompt, or one that leaves no room in the window. UsageError: see `Sampler`.
    """

    def __init__(
        self,
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
        alike: bool = True,
        depth: Depth | None = None,
    ) -> None:
        if not 0 < len(prompt) < window:
            raise ValueError(f"a prompt of {len(prompt)} tokens for a window of {window}")
        self.decoder = LibraryDecoder(model) if isinstance(model, nn.Module) else model
        self.kv, self.end = kv, ""
        self._prompt, self._stop_ids, self._control = prompt, stop_ids, control
        self._sampler = Sampler(sampling, prompt, extras, allowed)
        self.alike = alike and sampling.seed is not None
        self._telemetry, self.counts = telemetry, telemetry.answer
        self._most = min(max_new_tokens, window - len(prompt))
        self._ended = "length" if len(prompt) + self._most < window else "context"
        self._began: float | None = None
        self.reached: Callable[[int], None] | None = None
        self._logits: Tensor | None = None  # of the prompt
        self._drawn: list[int] = []
        self._depth, self._repeats = depth, None if depth is None else Repeats(prompt)

    @property
    def reading(self) -> bool:
        """Whether it still reads its prompt."""
        return not self._drawn and self._logits is None

    @property
    def token(self) -> int:
        """The token that is to be computed next, once the first was drawn."""
        return self._drawn[-1]

    @property
    def joins(self) -> bool:
        """Whether its next step may be one of `step_together`."""
        return bool(self._drawn)

    def step(self) -> list[Progress]:
        """The next chunk of the prompt, or the next tokens.

        Raises:
            PackError: no token can be drawn from the logits: they are not finite.
            Cancelled: `control.cancelled` was set; takes effect at the next layer. `kv` stays valid with what was
                computed.
        """
        self._telemetry.answer = self.counts
        return self._read() if self.reading else self._write()

    def take(self, logits: Tensor, began: float, preset: Preset) -> list[Progress]:
        """The next token from logits (1, V) behind `token`, which others computed too, since `began`, at `preset`.

        Raises:
            PackError: as `step`.
        """
        self._telemetry.answer = self.counts
        self.kv.computed([self.token], preset)
        token = self._draw(logits)
        now = self._telemetry.clock()
        self._telemetry.decoded(now - began)
        return self._took([token], [now])

    def _read(self) -> list[Progress]:
        kv, prompt, control, telemetry = self.kv, self._prompt, self._control, self._telemetry
        if self._began is None:
            kept, self._began = kv.keep(prompt, control.preset, alike=self.alike), telemetry.clock()
            kv.turns = [at + 1 for at, token in enumerate(prompt) if token in self._stop_ids]
            if kept:
                telemetry.reused(kept)
                if kept == len(prompt):
                    self._prompt_read(kv.logits)
                return [Progress(None, kept)]
        control.counting = False
        start, some = kv.length, prompt[kv.length :][: control.chunk]
        if (reached := self.reached) is not None:
            self.decoder.passed = lambda share: reached(start + int(share * len(some)))
        try:
            with telemetry.prompt():
                logits = _forward(self.decoder, kv, some, control, reading=True)
        finally:
            self.decoder.passed = None
        if kv.length == len(prompt):
            kv.read(start, logits)
            self._prompt_read(logits)
        return [Progress(None, kv.length)]

    def _prompt_read(self, logits: Tensor | None) -> None:
        assert self._began is not None
        assert logits is not None
        self._telemetry.prefill_done(self._telemetry.clock() - self._began)
        self._logits = logits.clone()
        if not self._most:
            self.end = self._ended

    def _write(self) -> list[Progress]:
        control, telemetry = self._control, self._telemetry
        control.counting = True
        if self._logits is not None:
            logits, self._logits = self._logits, None
            return self._took([self._draw(logits)], [telemetry.clock()])
        began, preset = telemetry.clock(), control.preset
        guess = self._guess(preset)
        guessed = self._depth.worth(guess, preset) if self._depth and guess else []
        guessed, made = guessed[: self._most - 1], telemetry.clock()
        try:
            several = self.decoder.several(self.token, self.kv, self._sampler, self._most, self._stop_ids, guessed)
        except NotNumbersError as error:
            raise self._not_finite() from error
        if several is None:
            token = self._draw(_forward(self.decoder, self.kv, [self.token], control))
            tokens, at, checked = [token], [telemetry.clock() - began], 0
        else:
            tokens, at, checked = several
            self.kv.computed([self.token, *tokens[:-1]], preset)
        ended = telemetry.clock()
        took = ended - made
        telemetry.decoded(ended - began, len(tokens))
        if self._depth is not None:
            alone = took if not checked else self._depth.alone(preset, len(tokens))
            saved = None if alone is None else alone - (ended - began)
            telemetry.drafted(checked, len(tokens) - 1 if checked else 0, saved)
            if guess is not None:
                self._depth.compare(guess, tokens)
            self._depth.took(preset, checked, len(tokens), took)
        return self._took(tokens, [made + after for after in at])

    def _guess(self, preset: Preset) -> Guess | None:
        """What may follow, by what the text repeats, or by the model's head or another model, whichever is right more
        often.
        """
        depth, head = self._depth, self.decoder.head
        guess = None if self._repeats is None else self._repeats.guess()
        if depth is None or head is None or not depth.asks(preset, guess):
            return guess
        if isinstance(head, DraftModel):
            began = self._telemetry.clock()
            if read := head.follow([*self.kv.tokens, self.token], *depth.reach(preset, self._most)):
                depth.read(preset, read, self._telemetry.clock() - began)
            if head.behind > MOST_TOGETHER:
                return guess
        began, far = self._telemetry.clock(), head.behind > MOST_TOGETHER
        tokens, likely = head.guess(self.token, self.kv, partial(depth.more, preset))
        if tokens and not far:
            depth.asked(preset, len(tokens), self._telemetry.clock() - began)
        return Guess(tokens, [depth.of_head(one) for one in likely]) if tokens else guess

    def _draw(self, logits: Tensor) -> int:
        try:
            return self._sampler.draw(logits)
        except NotNumbersError as error:
            raise self._not_finite() from error

    def _took(self, tokens: Sequence[int], at: Sequence[float]) -> list[Progress]:
        """These tokens were drawn, and when."""
        found: list[Progress] = []
        for token, when in zip(tokens, at, strict=True):
            if token in self._stop_ids:
                self.end = "stop"
                break
            self._telemetry.token(when)
            self._drawn.append(token)
            chances = self._sampler.chances
            found.append(Progress(token, len(self._prompt), when, chances.pop(0) if chances else None))
        self._most -= len(tokens)
        if self._repeats is not None:
            self._repeats.add(tokens)
        if not self._most:
            self.end = self.end or self._ended
        return found

    def _not_finite(self) -> PackError:
        part = self.decoder.first_nonfinite([*self._prompt, *self._drawn])
        return _not_finite(part, narrow=self._control.narrow)


def step_together(answers: Sequence[Answer], control: Control) -> Tensor | None:
    """Logits (N, V) behind the next token of each of N answers, for their `take`. None if the decoder computes them one
    by one, or has no memory for more.

    Raises:
        Cancelled: an answer was stopped; all are as before.
    """
    control.counting = True
    try:
        return answers[0].decoder.together([answer.token for answer in answers], [answer.kv for answer in answers])
    except RuntimeError as error:
        if not ran_out(error):
            raise
        _log.warning("out of memory: %s", error)
        return None


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
) -> Generator[Progress, None, str]:
    """Yield what the steps of an `Answer` report; the generator's return value says why it ended. Raises as that."""
    answer = Answer(
        *(model, kv, prompt, sampling),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        window=window,
        control=control,
        telemetry=telemetry,
    )
    while not answer.end:
        yield from answer.step()
    return answer.end


def _not_finite(part: str, *, narrow: bool) -> PackError:
    range_ = ", or exceed the range of float16, in which this card computes: --device cpu has a larger one" * narrow
    return PackError(
        "The packed model computes values that are not numbers",
        f"No token can be drawn from its logits. The first values that are NaN or infinite come from {part}: the"
        f" pack's weights there are damaged, or far too large{range_}.",
        "Run `floe-chat verify` with the name of the model to see whether its files are damaged.",
    )


def _forward(decoder: Decoder, kv: KVCache, ids: Sequence[int], control: Control, *, reading: bool = False) -> Tensor:
    """Logits (1, V) after `ids`, which are then in `kv`; of a prompt after as many of them as there is memory for.

    If the device's memory runs out, it is tried again: with fewer rows in a pool, then with fewer tokens at once, then
    with fewer keys and values on the device, and once as it is: what torch kept may be what a library lacked.
    """
    preset, last = control.preset, False
    while (logits := _once(decoder, kv, ids, control)) is None:
        # Not inside the except block: the traceback holds the very memory that must be freed.
        gpus.give_back()
        if control.make_room is not None and control.make_room():
            continue
        if reading and control.cut(len(ids)):
            ids = ids[: control.chunk]
        elif not kv.spill():
            if last:
                raise torch.OutOfMemoryError("the device's memory ran out, and nothing can be freed")
            last = True
    kv.computed(ids, preset, chunk=reading and len(ids) == control.chunk)
    return logits


def _once(decoder: Decoder, kv: KVCache, ids: Sequence[int], control: Control) -> Tensor | None:
    """Logits, or None if the device's memory ran out."""
    try:
        return decoder.forward(ids, kv)
    except RuntimeError as error:
        if not ran_out(error):
            raise
        control.ran_out = str(error)  # not the error itself, which holds its frames
        _log.warning("out of memory: %s", control.ran_out)
        return None
