"""Names of commands: those that people bring from Ollama and llama.cpp, and suggestions for mistyped ones."""

from __future__ import annotations

import difflib
import shlex
from typing import ClassVar

import click

from ...models.errors import UsageError

_SAME = {
    "delete": "remove",
    "del": "remove",
    "rm": "delete",
    "remove": "delete",
    "ls": "list",
    "info": "show",
    "cat": "show",
}
"""Other programs' names for a subcommand, and ours."""


class SuggestingGroup(click.Group):
    """A group that names the commands that look like a mistyped one."""

    aliases: ClassVar[tuple[str, ...]] = ()

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not args[0].startswith("-") and not ctx.resilient_parsing:
            raise unknown(args[0], [*self.commands, *self.aliases], ctx.command_path)
        return super().resolve_command(ctx, args)


class CommandGroup(SuggestingGroup):
    """The group of all commands; `run`, `pull`, `list`, `rm` and `chat` become the commands that do the same here."""

    aliases = ("run", "pull", "list", "chat")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if ctx.resilient_parsing else translated(args))


def translated(args: list[str]) -> list[str]:
    """The command line as it is written here; a name that is ours already stays.

    Raises:
        UsageError: a command that other programs have and this one does not.
    """
    if not args:
        return args
    name, rest = args[0], args[1:]
    match name:
        case "run" if rest and not rest[0].startswith("-"):
            asks = len(rest) > 1 and not rest[1].startswith("-")
            return ["ask", "--model", *rest] if asks else ["--model", *rest]
        case "run" | "chat":
            return rest
        case "pull":
            return ["setup", *rest]
        case "list" | "ls":
            return ["models", *rest]
        case "rm":
            return ["models", "remove", *rest]
        case _:
            return args


def unknown(name: str, names: list[str], path: str) -> UsageError:
    """The error for an unknown command `name` of `path` (such as "floe-chat history"), with suggestions."""
    if " " in name.strip():
        return UsageError(
            f"There is no command {name!r}",
            "It looks like a question.",
            f"Ask it with: floe-chat ask {shlex.quote(name)}",
        )
    close = [_SAME[name.lower()]] if _SAME.get(name.lower()) in names else []
    close = close or difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.6)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Run `{path} --help` to see the commands."
    return UsageError(f"There is no command {name!r}", "", hint)
