"""The chat's commands: one list for the palette, for the text field's slash and for the help page."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_CLOSE = 0.6  # of 1: how alike a mistyped name is to one that it may mean
ALIASES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("clear", "reset"), "new"),
        **dict.fromkeys(("retry", "regenerate", "redo"), "again"),
        **dict.fromkeys(("chats", "load", "open", "search"), "history"),
        **dict.fromkeys(("model", "list", "ls", "run"), "models"),
        **dict.fromkeys(("pull", "download"), "setup"),
        **dict.fromkeys(("?", "h", "keys", "commands"), "help"),
        **dict.fromkeys(("exit", "bye", "q"), "quit"),
        **dict.fromkeys(("attach", "add"), "file"),
        **dict.fromkeys(("parameter", "params"), "set"),
        **dict.fromkeys(("config", "options"), "settings"),
        **dict.fromkeys(("colors", "colours"), "theme"),
        "cancel": "stop",
        "continue": "more",
        "personas": "persona",
        "presets": "preset",
        "prompt": "system",
        "restore": "undo",
        "resume": "last",
        "show": "chat",
        "stats": "panel",
        "title": "rename",
    }
)
"""What other programs call a command, and what it is called here."""
_ELSEWHERE = {
    "save": "Chats are saved as you write; /export writes this one to a file",
    "rm": "/models removes models, /delete deletes this chat",
    "serve": "There is no server; for scripts there is: floe-chat ask --json",
}
"""What other programs' commands are here, where one of ours alone is not the answer."""


@dataclass(frozen=True, slots=True)
class Command:
    """One thing a person can ask for.

    Attributes:
        name: after the slash. title: in the palette. does: one short sentence.
        run: gets what was written after the name, or "".
        argument: what it needs, such as "TITLE"; in brackets if it is optional; "" if it takes nothing.
        careful: it is not run by its first letters.
        key: the action of `settings.ACTIONS` that does the same.
    """

    name: str
    title: str
    does: str
    run: Callable[[str], Awaitable[None] | None]
    argument: str = ""
    careful: bool = False
    key: str = ""

    @property
    def needs_argument(self) -> bool:
        """Whether it cannot run without an argument."""
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def usage(self) -> str:
        """How it is written."""
        return f"/{self.name} {self.argument}".rstrip()


def find(commands: Iterable[Command], name: str) -> Command | None:
    """The command of this name or alias."""
    name = ALIASES.get(name, name)
    return next((command for command in commands if command.name == name), None)


def unknown(commands: Iterable[Command], name: str) -> str:
    """What to say of `name`, which is no command."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    meant = {**ALIASES, **{command.name: command.name for command in commands}}
    close = dict.fromkeys(meant[known] for known in difflib.get_close_matches(name, meant, n=3, cutoff=_CLOSE))
    if close:
        return f"There is no command /{name}. Did you mean {' or '.join(f'/{known}' for known in list(close)[:2])}?"
    return f"There is no command /{name}. Put a space first to send it as text"
