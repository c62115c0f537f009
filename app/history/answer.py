"""An answer while it is written."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from .records import AnswerStats, MessageState

End = Callable[["Answer", MessageState, AnswerStats | None], None]


class Answer:
    """An answer on its way into the history; made by `History.answering` and `History.continuing`.

    As a context it ends by itself: as "failed" after an exception, as "stopped" if `finish` was not called. `append`,
    `think` and `finish` are for one thread, `collect` is for the writing thread.
    """

    def __init__(self, message: int, text: str, thought: str, end: End) -> None:
        self.id = message
        self._text, self._thought = text, thought
        self._pieces: deque[tuple[str, str]] = deque()
        self._end = end
        self._ended = False

    def append(self, text: str) -> None:
        """More text. It costs no more than appending to a list and never waits."""
        if not self._ended:
            self._pieces.append((text, ""))

    def think(self, text: str) -> None:
        """More of what the model thinks; as `append`."""
        if not self._ended:
            self._pieces.append(("", text))

    def finish(self, stats: AnswerStats | None, state: MessageState = "complete") -> None:
        """No more text will come; later text is ignored. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._end(self, state, stats)

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish(None, "failed" if isinstance(error, Exception) else "stopped")

    def collect(self) -> tuple[str, str]:
        """All of its text so far, and all of its thinking."""
        pieces = [(self._text, self._thought)]
        while self._pieces:
            pieces.append(self._pieces.popleft())
        self._text, self._thought = map("".join, zip(*pieces, strict=True))
        return self._text, self._thought


def unsaved() -> Answer:
    """An answer that is not saved."""

    def ignored(_answer: Answer, _state: MessageState, _stats: AnswerStats | None) -> None:
        return

    return Answer(0, "", "", ignored)
