"""What a person can choose of a model's thinking, and what a model can do about it, in words."""

from __future__ import annotations

from collections.abc import Mapping

from ...models.errors import UsageError
from ..settings.settings import THINKING

THINKING_CHOSEN: Mapping[str, str] = {
    "fold": "Thinking is folded; /thinking opens the last",
    "show": "Thinking is shown",
    "off": "Answers come without thinking, from the next question on",
}
_LIMITS: Mapping[str, str] = {
    "less": "This model cannot answer without thinking. It is asked to think less",
    "always": "This model has no switch for its thinking, so it may think",
    "asked": "The server is asked for answers without thinking; it may think all the same",
}


def need_mode(mode: str) -> None:
    """Raises UsageError: thinking cannot be `mode`."""
    if mode not in THINKING:
        known = f"It is one of {', '.join(THINKING)}."
        raise UsageError(f"Thinking cannot be {mode!r}", known, "Example: /thinking show")


def limit_of_off(thinking: str) -> str:
    """A sentence on what a model of this kind (see `Client.thinking`) does when no thinking is wanted, or ""."""
    return _LIMITS.get(thinking, "")
