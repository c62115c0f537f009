"""Copying from the messages: one of them, the last answer, or its code."""

from __future__ import annotations

from ...widgets.chat.answer import AnswerTurn
from ...widgets.chat.transcript import Transcript
from ...widgets.chat.turns import Turn
from ...widgets.common.clipboard import copy
from ...widgets.panel.status_line import StatusLine


class Copying:
    """Copies what `transcript` shows, and says so in the bottom row."""

    def __init__(self, transcript: Transcript, status: StatusLine) -> None:
        self._transcript = transcript
        self._status = status
        self._code = (0, -1)  # the answer whose code was copied last, and which of its blocks

    def copy(self, text: str, what: str) -> None:
        """Copy `text`, called `what`."""
        copy(self._transcript.app, text)
        self._status.remark(f"Copied {what}")

    def copy_code_of(self, turn: Turn) -> None:
        """Copy the first code block of a message; again the next one."""
        codes = turn.codes() if isinstance(turn, AnswerTurn) else ()
        if not codes or turn.record is None:
            self._status.remark("There is no code block in this message")
            return
        message, last = self._code
        at = (last + 1) % len(codes) if message == turn.record.id else 0
        self._code = (turn.record.id, at)
        which = f"code block {at + 1} of {len(codes)}" if len(codes) > 1 else "the code"
        self.copy(codes[at], which)

    def copy_last(self) -> None:
        """Copy the last answer."""
        if (turn := self._last()) is not None:
            self.copy(turn.text, "the last answer")

    def copy_code_of_last(self) -> None:
        """Copy the last answer's code."""
        if (turn := self._last()) is not None:
            self.copy_code_of(turn)

    def _last(self) -> AnswerTurn | None:
        turns = list(self._transcript.query(AnswerTurn))
        if not turns:
            self._status.remark("There is no answer yet")
        return turns[-1] if turns else None
