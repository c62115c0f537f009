"""What another, smaller model of the same tokenizer guesses (speculative decoding, arXiv 2211.17192).

It reads the text itself, with keys and values of its own, and only when it is asked: a text that it has not followed is
read in parts between the tokens of an answer, from as far back as pays. Its text then begins there, not with the chat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from torch import Tensor

from ...kernels.cpu.native_ends import NativeEnds
from ..events import MOST_TOGETHER
from ..experts.moe_layer import Control
from ..quality_presets import X_BITS_COARSE
from .draft_head import nearest, parts
from .kv_cache import KVCache

_THIN = 4  # times as far back as it has read: from there it pays to read again


class Reader(Protocol):
    """The decoder of such a model."""

    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`."""
        ...

    def few(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """Of at most `MOST_TOGETHER` tokens, by what computes single ones: the stream (1, H) behind the last."""
        ...

    def ends_of(self, rows: int) -> NativeEnds:
        """Around the layers, of the first tokens of the vocabulary, by codes of few bits."""
        ...

    @property
    def vocabulary(self) -> int:
        """How many tokens there are."""
        ...

    def back(self, kv: KVCache, length: int) -> None:
        """Drop all but the first `length` tokens: of the last `MOST_TOGETHER` that `few` computed, some."""
        ...


class DraftModel:
    """A model that guesses for another one, and the text that it is in.

    Args:
        name: for people. decoder, control: the model's own. window: tokens of its longest text.
        cost: of one of its tokens, in tokens of the other model, by what they read: an estimate.
    """

    def __init__(self, name: str, decoder: Reader, control: Control, window: int, cost: float) -> None:
        self.name, self.cost = name, cost
        self._decoder, self._control, self._window = decoder, control, window
        self._sizes = parts(decoder.vocabulary)
        self._ends = [decoder.ends_of(rows) for rows in self._sizes]
        self._text: Sequence[int] = ()
        self._start, self._kv = 0, KVCache()  # of the text, from `_start` on
        self._ahead = 0  # tokens in `_kv` that were guesses

    @property
    def behind(self) -> int:
        """How many tokens of the text it has not read."""
        return len(self._text) - self._start - self._kv.length

    def saw(self, _kv: KVCache, _ids: Sequence[int], _streams: Tensor) -> None:
        """See `DraftHead`: it reads tokens, not streams."""

    def follow(self, text: Sequence[int], reach: int, part: int) -> int:
        """Read on towards the end of a text, all but its last tokens, which are read with the first guess.

        Args:
            reach: so far back from the end it begins, where it is not as near. part: at most so many tokens.

        Returns:
            How many were read.

        Raises:
            Cancelled: the answer was stopped.
        """
        kv, self._text = self._kv, text
        kept, reach = _alike(kv.tokens, text[self._start : -1]), min(reach, self._window // 2)
        if kv.length - kept <= self._ahead:
            self._decoder.back(kv, kept)
        else:
            kv.cut(kept)
        self._ahead = 0
        seen, full = len(text) - self._start, len(text) - self._start + MOST_TOGETHER > self._window
        if not kept or full or self.behind > reach or (self._start and _THIN * seen < reach):
            kv.cut(0)
            self._start = max(0, len(text) - reach)
        if (missing := self.behind - MOST_TOGETHER) <= 0:
            return 0
        some = text[self._start + kv.length :][: min(missing, part, self._control.chunk)]
        self._decoder.forward(some, kv)
        kv.computed(some, self._control.preset)
        return len(some)

    def guess(self, token: int, kv: KVCache, more: Callable[[list[float]], bool]) -> tuple[list[int], list[float]]:
        """See `DraftHead`, behind the text that was followed last.

        Raises:
            Cancelled: the answer was stopped.
        """
        tokens, chances, own = list[int](), list[float](), self._kv
        if len(self._text) != kv.length + 1 or not 0 < self.behind <= MOST_TOGETHER:
            return tokens, chances
        some, ends = self._text[self._start + own.length :], self._ends[nearest(self._sizes, self._text)]
        while len(tokens) < MOST_TOGETHER - 1 and more(chances):
            logits = ends.logits(self._decoder.few(some, own), X_BITS_COARSE)[0].numpy()  # see `DraftHead.guess`
            own.computed(some, self._control.preset)
            self._ahead = len(tokens)
            tokens.append(int(logits.argmax()))
            chances.append(1 / float(np.exp(logits - logits[tokens[-1]]).sum()))
            some = tokens[-1:]
        return tokens, chances


def _alike(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens both begin with."""
    count = min(len(some), len(others))
    if some[:count] == others[:count]:  # else it is compared for each of thousands of tokens
        return count
    return next(index for index, (one, other) in enumerate(zip(some, others, strict=False)) if one != other)
