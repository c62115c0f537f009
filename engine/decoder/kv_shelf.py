"""Keys and values of conversations that were answered before the present one, in RAM.

The model has one store (kv_stores.py), wherever that is. What another conversation would overwrite there is copied away
first, and comes back when its prompt does: memory is copied much faster than it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..quality_presets import Preset
from .kv_cache import Held, KVCache, Parked
from .state_store import thinned

LEAST = 64  # tokens that are worth a copy


class KVShelf:
    """Parked conversations, the one used last at the end.

    Args:
        most: bytes that they may take.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parked: list[Parked] = []

    def nbytes(self) -> int:
        """Bytes that they take."""
        return sum(parked.nbytes() for parked in self._parked)

    @torch.inference_mode()
    def turn_to(
        self,
        kv: KVCache,
        prompt: Sequence[int],
        preset: Preset,
        others: Sequence[KVCache] = (),
        *,
        alike: bool = False,
        kept: Callable[[int], Parked | None] | None = None,
    ) -> None:
        """Before `kv.keep`: park what that would drop, and bring back what has more of `prompt`, which one of `others`
        may have too. `alike`: see `KVCache.common`. `kept`: gives what an earlier start has of so many tokens or more.
        """

        def common(one: KVCache | Parked) -> int:
            return one.common(prompt, preset, alike=alike)

        found = there = common(kv)
        best: Parked | None = None
        nearest = max(others, key=common, default=None)
        copies = [] if nearest is None or common(nearest) < there + LEAST else [nearest.parked(self._most)]
        for parked in (*filter(None, copies), *self._parked):
            least = 1 if parked.held.copies else LEAST  # states are far apart: what is gained adds to what is missing
            if (shared := common(parked)) > found and shared >= there + least:
                best, found = parked, shared
        if kept is not None and (earlier := kept(found + LEAST)) is not None:
            best, found = earlier, common(earlier)
        if kv.length - there >= LEAST:
            self.leave(kv)
        if best is not None and kv.resume(best, found):
            self._parked = [parked for parked in self._parked if parked is not best]
            if found < len(best.tokens):  # the rest is another conversation's
                self._put(best)

    def leave(self, kv: KVCache) -> None:
        """Park a copy of what is going to be dropped there."""
        if kv.length >= LEAST and (dropped := kv.parked(self._most)) is not None:
            self._put(dropped)

    def _put(self, new: Parked) -> None:
        """Park one, and drop what it contains. Without room for all, each keeps fewer copies of its states first;
        then the oldest are dropped.
        """
        self._parked = [parked for parked in self._parked if parked.tokens != new.tokens[: len(parked.tokens)]]
        self._parked.append(new)
        while self.nbytes() > self._most:
            fullest = max(range(len(self._parked)), key=lambda at: len(self._parked[at].held.copies))
            if len((held := self._parked[fullest].held).copies) > 1:
                fewer = Held(held.entries, thinned(held.copies, len(held.copies) - 1))
                self._parked[fullest] = Parked(self._parked[fullest].computed, fewer)
            else:
                del self._parked[0]
