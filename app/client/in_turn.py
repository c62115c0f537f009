"""Several answers to one question from a client that computes one at a time."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ...engine.events import Failed
from ...models.errors import FloeError
from .interface import Question, Submitted
from .speaking import apart


class AnswersInTurn:
    """Lets each answer wait until the one before has ended. They are prepared when their turn comes."""

    def __init__(self) -> None:
        self._last_request = 0
        self._following: deque[tuple[int, Question]] = deque()
        self._unwanted: set[int] = set()  # requests that were cancelled before their turn

    def prepare(self, question: Question) -> Submitted:
        """Make a prompt of the question, under the number after `_last_request`."""
        raise NotImplementedError

    def begin(self) -> None:
        """Let the answer that was prepared be computed."""
        raise NotImplementedError

    def _stop(self) -> None:
        """Stop the answer that is being computed."""
        raise NotImplementedError

    def prepare_others(self, question: Question, count: int) -> list[Submitted]:
        """Prepare `count` answers to the same question: a seed that was chosen is another one for each.

        Raises:
            FloeError: as `prepare`.
        """
        first = self.prepare(question)
        found = [replace(first, request=first.request + at) for at in range(count)]
        for at, submitted in enumerate(found[1:], 1):
            drawn = replace(question, sampling=apart(question.sampling, at))
            self._following.append((submitted.request, drawn))
        return found

    def _cancel(self, request: int | None, running: int | None) -> None:
        """Stop the answer to `request`, or all; `running` is being computed."""
        self._unwanted.update(number for number, _ in self._following if request in (None, number))
        if running is not None and request in (None, running):
            self._stop()

    def _take_turn(self) -> list[Failed]:
        """No answer is being computed: begin the next one. Returns those that cannot be."""
        failed: list[Failed] = []
        while self._following:
            number, question = self._following.popleft()
            self._last_request = number - 1
            try:
                self.prepare(question)
            except FloeError as error:
                failed.append(Failed(error.title, error.cause, error.hint, number, error.exit_code))
                continue
            self.begin()
            if number in self._unwanted:
                self._unwanted.remove(number)
                self._stop()
            break
        return failed
