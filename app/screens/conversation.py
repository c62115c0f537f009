"""The turns of one chat as the model gets them: a system prompt, then user and assistant in turn."""

from __future__ import annotations

from ..chat_client import Message


class Conversation:
    """Keeps the roles alternating, as chat templates require: a question without an answer is taken out."""

    def __init__(self, system_prompt: str | None) -> None:
        self._start = [Message("system", system_prompt)] if system_prompt else []
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All turns, the system prompt first."""
        return self._start + self._turns

    def ask(self, text: str) -> None:
        """Add a question."""
        self._turns.append(Message("user", text))

    def answer(self, text: str) -> bool:
        """Add the answer to the last question; False if it is blank, which takes the question out too."""
        if not text.strip():
            self.withdraw()
            return False
        self._turns.append(Message("assistant", text))
        return True

    def withdraw(self) -> None:
        """Take the last question out."""
        self._turns.pop()

    def clear(self) -> None:
        """Begin anew."""
        self._turns.clear()
