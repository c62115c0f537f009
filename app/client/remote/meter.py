"""The figures of a server's answer as they are seen from here."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from ....engine.events import Stats
from .stream import Usage

_LAST = 1.0  # seconds over which the present speed is measured


class Meter:
    """Times and counts of one answer, by the clock here and the server's own counts.

    Tokens are the server's; where it counts none, pieces of the stream are counted, of which each has one token or
    more, and no speed is given. What only the server could know stays None.
    """

    def __init__(self, request: int, window: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`window`: the server's, in tokens, 0 if not known."""
        self._request, self._window, self._clock = request, window, clock
        self._asked = clock()
        self._first: float | None = None
        self._last = self._asked
        self._pieces = 0
        self._course: deque[tuple[float, int]] = deque()
        self.usage = Usage()

    @property
    def counted(self) -> bool:
        """Whether the server says how many tokens the answer has."""
        return self.usage.new is not None

    def piece(self) -> None:
        """A piece of the answer or its thinking came."""
        self._last = self._clock()
        self._first = self._last if self._first is None else self._first
        self._pieces += 1

    def take(self, usage: Usage | None) -> None:
        """The server's counts so far; what it leaves out keeps its last value."""
        if usage is None:
            return
        known, now = self.usage, self._clock()

        def newest(value: int | None, before: int | None) -> int | None:
            return before if value is None else value

        self.usage = Usage(
            newest(usage.prompt, known.prompt),
            newest(usage.new, known.new),
            newest(usage.reused, known.reused),
            newest(usage.thought, known.thought),
        )
        if self.usage.new is not None:
            self._course.append((now, self.usage.new))
            while now - self._course[0][0] > _LAST:
                self._course.popleft()

    def stats(self) -> Stats:
        """The figures now."""
        import psutil

        usage, first = self.usage, self._first
        mean = None
        if usage.new is not None and usage.new > 1 and first is not None and self._last > first:
            mean = (usage.new - 1) / (self._last - first)
        begun, ended = (self._course[0], self._course[-1]) if self._course else ((0.0, 0), (0.0, 0))
        now = (ended[1] - begun[1]) / (ended[0] - begun[0]) if ended[0] > begun[0] else None
        both = None if usage.prompt is None or usage.new is None else usage.prompt + usage.new
        return Stats(
            request=self._request,
            prompt_tokens=usage.prompt,
            new_tokens=self._pieces if usage.new is None else usage.new,
            decode_tps=now,
            decode_tps_mean=mean,
            prefill_tps=None,
            first_token_s=None if first is None else first - self._asked,
            active_neurons=None,
            bytes_per_token=None,
            layer_activity=(),
            expert_use=(),
            ram_bytes=psutil.Process().memory_info().rss,
            vram_bytes=None,
            kv_bytes=None,
            context_used=both,
            context_window=self._window,
            reused_tokens=usage.reused or 0,
        )
