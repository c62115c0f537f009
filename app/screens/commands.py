"""What can be done in the chat: one list for the palette, for the text field's slash and for the help page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """One thing a person can ask for.

    Attributes:
        name: after the slash. title: in the palette. does: one short sentence.
        run: gets what was written after the name, or "".
        argument: what it wants to be told, such as "TITLE"; in brackets if it can do without; "" if it takes nothing.
        careful: it is not run by its first letters.
    """

    name: str
    title: str
    does: str
    run: Callable[[str], Awaitable[None] | None]
    argument: str = ""
    careful: bool = False

    @property
    def needs_argument(self) -> bool:
        """Whether it cannot do without being told something."""
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def usage(self) -> str:
        """How it is written."""
        return f"/{self.name} {self.argument}".rstrip()
