"""Process 0's decoder: it tells the others what to compute before each pass."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from ..decoder.decoders import Decoder
from ..decoder.draft_assistant import DraftAssistant
from ..decoder.draft_head import DraftHead
from ..decoder.draft_model import DraftModel
from ..decoder.kv_cache import KVCache
from ..experts.moe_layer import Cancelled, Control
from ..quality_presets import Preset
from ..sampling import Sampler
from .group import Group
from .members import GroupLost
from .messages import Look, Message, Pass

T = TypeVar("T")


class Led:
    """A `Decoder` whose passes all processes compute together; see there.

    Each of them has the whole dense part, and keys and values of its own.
    """

    def __init__(self, inner: Decoder, group: Group, control: Control, words: str) -> None:
        self._inner, self._group, self._control = inner, group, control
        self.reason, self.device = f"{words}; {inner.reason}", inner.device
        self.passed: Callable[[float], None] | None = None
        self.head: DraftHead | DraftAssistant | DraftModel | None = None
        self._told: Preset | None = None  # which the others have
        self._numbers: weakref.WeakKeyDictionary[KVCache, int] = weakref.WeakKeyDictionary()
        self._next = itertools.count()
        self._gone: list[int] = []

    def prepare(self) -> None:
        """See `Decoder`."""
        self._inner.prepare()

    def forward(self, ids: Sequence[int], kv: KVCache) -> Tensor:
        """See `Decoder`.

        Raises:
            GroupLost: a process does not answer.
        """
        preset, self._inner.passed = self._control.preset, self.passed
        gone, self._gone = tuple(self._gone), []
        new = None if preset is self._told else preset
        message = Pass(self._number(kv), kv.length, tuple(ids), self._control.counting, new, gone)
        self._told = preset
        return self._leading(message, lambda: self._inner.forward(ids, kv))

    def several(
        self, token: int, kv: KVCache, sampler: Sampler, most: int, last: Sequence[int], guessed: Sequence[int] = ()
    ) -> None:
        """See `Decoder`: tokens are drawn one at a time."""

    def together(self, tokens: Sequence[int], kvs: Sequence[KVCache]) -> None:
        """See `Decoder`: a pass is one text's."""

    def beside(self) -> None:
        """See `Decoder`: as `together`."""

    def store(self, kv: KVCache) -> None:
        """See `Decoder`: the other processes have keys and values too, and no copies."""

    def first_nonfinite(self, ids: Sequence[int]) -> str:
        """See `Decoder`."""
        return self._leading(Look(tuple(ids)), lambda: self._inner.first_nonfinite(ids))

    def _leading(self, message: Message, work: Callable[[], T]) -> T:
        self._group.tell(message)
        try:
            return work()
        except (Cancelled, GroupLost):
            raise
        except BaseException as error:  # the others are in the middle of the pass
            self._group.give_up(f"{type(error).__name__}: {error}")
            raise

    def _number(self, kv: KVCache) -> int:
        if (number := self._numbers.get(kv)) is None:
            number = self._numbers[kv] = next(self._next)
            weakref.finalize(kv, self._gone.append, number)
        return number
