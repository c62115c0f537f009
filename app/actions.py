"""Every action of the chat screen, declared once: its keys, command, palette entry, footer hint and help line.

The screens bind the keys (`widgets/common/keys.py`), the settings check the user's own keys, and the help page, the
palette, the slash commands and the bottom row list these actions.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

_CLOSE = 0.6  # of 1: how similar a mistyped name must be to the one it may mean


class Scope(Enum):
    """Where the keys of an action work: on every page, in the chat, or while one part of the chat has the focus."""

    ANYWHERE = auto()
    CHAT = auto()
    FIELD = auto()
    MESSAGES = auto()
    PANEL = auto()


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a user can do.

    Attributes:
        name: in the settings, under [keys]. does: one short sentence; "" for what the help page leaves out.
        keys: its default keys, separated by commas; "" if it has none.
        place: where these keys work. run: what they call, as Textual writes it; "" calls the chat's `action_do`.
        title: in the palette; "" if it is not listed there. hint: its word in a row of hints.
        command: its name after a slash. argument: what the command needs, such as "TITLE"; in brackets if it is
            optional. careful: the command is not run by its first letters.
        fixed: its keys cannot be set. yields: the widget that has the focus gets the keys first.
    """

    name: str
    does: str
    keys: str = ""
    place: Scope = Scope.CHAT
    run: str = ""
    title: str = ""
    hint: str = ""
    command: str = ""
    argument: str = ""
    careful: bool = False
    fixed: bool = False
    yields: bool = False

    @property
    def needs_argument(self) -> bool:
        """Whether the command cannot run without an argument."""
        return bool(self.argument) and not self.argument.startswith("[")

    @property
    def usage(self) -> str:
        """How the command is written."""
        return f"/{self.command} {self.argument}".rstrip()


def _command(
    command: str, title: str, does: str, argument: str = "", *, keys: str = "", name: str = "", careful: bool = False
) -> Action:
    return Action(name or command, does, keys, title=title, command=command, argument=argument, careful=careful)


def _field(name: str, does: str, keys: str, run: str = "", *, fixed: bool = True) -> Action:
    return Action(name, does, keys, Scope.FIELD, run or f"screen.do('{name}')", fixed=fixed)


def _message(name: str, does: str, keys: str, run: str = "", hint: str = "") -> Action:
    return Action(name, does, keys, Scope.MESSAGES, run or f"act('{name}')", hint=hint)


def _panel(name: str, does: str, keys: str, run: str = "") -> Action:
    return Action(name, does, keys, Scope.PANEL, run or f"screen.do('{name}')", fixed=True)


# In the order of the palette and of the settings file.
ACTIONS: tuple[Action, ...] = (
    _command("new", "New chat", "Start another chat; this one is saved", keys="ctrl+n", name="new_chat"),
    Action(
        "stop",
        "Stop the answer, or take back a queued question",
        "escape",
        title="Stop",
        hint="stop",
        command="stop",
        yields=True,
    ),
    _command(
        "again", "Answer again", "Answer the last question again; held: three times", keys="ctrl+t", name="regenerate"
    ),
    _command("others", "Three other answers", "Answer the last question three times, side by side"),
    _command("more", "Continue", "Continue the last answer where it ended"),
    _command("edit", "Edit", "Change the last question; the old one is saved too"),
    _command("copy", "Copy", "Copy the last answer", keys="ctrl+o"),
    _command("code", "Copy code", "Copy the last answer's code"),
    _command("fork", "Fork", "Continue in a copy of this chat"),
    _command("rename", "Rename", "Give this chat a title", "TITLE"),
    _command("delete", "Delete", "Delete this chat", careful=True),
    _command("undo", "Undo", "Restore what was deleted last"),
    _command("history", "History", "Earlier chats, with search", "[WORDS]", keys="ctrl+r"),
    _command("last", "Last chat", "Open the last used chat"),
    _command("file", "Attach", "Attach a text file to the next question", "PATH"),
    _command("cut", "Cut", "Shorten attached texts that are too large"),
    _command("export", "Export", "Write this chat to a .md or .json file", "[FILE]"),
    _command("chat", "This chat", "This chat's system prompt, persona, quality and sampling", keys="f5", name="setup"),
    _command("system", "System prompt", "Show or change this chat's system prompt", "[TEXT]"),
    _command("persona", "Persona", "List personas, or use one", "[NAME]"),
    _command("thinking", "Thinking", "Open the last answer's thinking; or fold, show, off for all", "[MODE]"),
    _command("set", "Sampling", "Show sampling values, or set one", "[NAME VALUE]"),
    _command("quality", "Quality", "Presets and fine controls, with the quality loss of each", keys="f4"),
    _command("preset", "Preset", "List quality presets, or use one", "[NAME]"),
    _command("mix", "Placement of experts", "Show where experts are, or load the model with another mix", "[KIND]"),
    Action("next_preset", "Next quality preset, even in mid-answer", "f3"),
    _command("panel", "Panel", "Switch the panel: column, two lines, hidden", keys="f2", name="toggle_panel"),
    _command("pause", "Pause", "Pause the panel's figures, or resume them", keys="f8", name="pause_panel"),
    _command("experts", "Experts", "Expert use, layer by layer", keys="f9"),
    Action("editor", "Write the question in $EDITOR", "ctrl+g"),
    _command("models", "Models", "Switch, check or remove models", keys="f6"),
    _command("setup", "Set up a model", "Download and pack a model, step by step", name="wizard"),
    _command("settings", "Settings", "Every setting and its meaning"),
    _command("theme", "Theme", "Choose the colours"),
    Action(
        "help",
        "Keys, commands and the panel's words",
        "f1",
        Scope.ANYWHERE,
        "help",
        title="Help",
        hint="help",
        command="help",
        yields=True,
    ),
    Action("palette", "Every command by name", "ctrl+p", Scope.ANYWHERE, "command_palette", hint="commands"),
    Action("redraw", "Redraw the screen", "ctrl+l", Scope.ANYWHERE, "redraw"),
    Action(
        "quit",
        "Quit floe-chat; the answer so far is saved",
        "ctrl+q",
        Scope.ANYWHERE,
        "quit",
        title="Quit",
        hint="quit",
        command="quit",
    ),
    _field("send", "Send; while an answer runs, the question is queued", "enter", "send"),
    _field("newline", "Start a new line in the question", "ctrl+j", "newline", fixed=False),
    _field("earlier", "In the first line: earlier questions", "up", "cursor_up"),
    _field("later", "In the last line: later questions", "down", "cursor_down"),
    _field("select_message", "Select a message, to copy, edit or fork it", "ctrl+up,shift+tab", fixed=False),
    _field("restore", "Undo; restores a removed file too", "ctrl+z", "undo"),
    _field("focus_panel", "Go to the panel, which explains its words", "tab", "app.focus_next", fixed=False),
    _field("scroll_up", "Scroll the chat up", "pageup"),
    _field("scroll_down", "Scroll the chat down", "pagedown"),
    _field("scroll_to_end", "Go to the end of the chat", "ctrl+end"),
    _message("previous_message", "The previous message", "up,k", "select(-1)"),
    _message("next_message", "The next message; after the last one, back to the text field", "down,j", "select(1)"),
    _message("first_message", "The first message", "home", "select_first"),
    _message("leave_messages", "Back to the text field", "escape,enter,end", "leave"),
    _message("copy_message", "Copy the message", "c", hint="copy"),
    _message("copy_code", "Copy its code block; again for the next one", "y", hint="code"),
    _message("show_thinking", "Show what the model thought before it, or fold it", "t", hint="thinking"),
    _message("edit_message", "Edit it; the old version is saved too", "e", hint="edit"),
    _message("answer_again", "Answer again", "r", hint="again"),
    _message("continue_answer", "Continue the last answer", "m", hint="more"),
    _message("fork_chat", "Fork: start another chat with all messages up to here", "f", hint="fork"),
    _message("delete_message", "Delete it and all messages after it", "d,delete", hint="delete"),
    _message("older_version", "The previous version, if there are several", "left,h"),
    _message("newer_version", "The next version", "right,l"),
    Action("", "", "pageup", Scope.MESSAGES, "screen.do('scroll_up')", fixed=True),
    Action("", "", "pagedown", Scope.MESSAGES, "screen.do('scroll_down')", fixed=True),
    _panel("section_above", "Explain the section above", "up,k", "explain(-1)"),
    _panel("section_below", "Explain the section below", "down,j", "explain(1)"),
    _panel("open_experts", "Expert use, layer by layer", "enter", "screen.do('experts')"),
    _panel("hold_figures", "Pause the figures, or resume them", "space", "screen.do('pause_panel')"),
    _panel("leave_panel", "Back to the text field", "escape"),
)
NAMED: Mapping[str, Action] = MappingProxyType({action.name: action for action in ACTIONS if action.name})
OWN: Mapping[str, Action] = MappingProxyType(
    {name: action for name, action in NAMED.items() if action.keys and not action.fixed}
)
"""The actions whose keys a person can set."""
COMMANDS: tuple[Action, ...] = tuple(action for action in ACTIONS if action.command)

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
"""Other programs' names for commands, and ours."""
_ELSEWHERE = {
    "save": "Chats are saved as you write; /export writes this one to a file",
    "rm": "/models removes models, /delete deletes this chat",
    "serve": "There is no server; for scripts, use: floe-chat ask --json",
}
"""Answers to other programs' commands that have no single counterpart here."""


def command(name: str) -> Action | None:
    """The action whose command has this name or alias."""
    name = ALIASES.get(name, name)
    return next((action for action in COMMANDS if action.command == name), None)


def unknown(name: str) -> str:
    """The remark on `name`, which is not a command."""
    if name in _ELSEWHERE:
        return _ELSEWHERE[name]
    meant = {**ALIASES, **{action.command: action.command for action in COMMANDS}}
    close = dict.fromkeys(meant[known] for known in difflib.get_close_matches(name, meant, n=3, cutoff=_CLOSE))
    if close:
        return f"There is no command /{name}. Did you mean {' or '.join(f'/{known}' for known in list(close)[:2])}?"
    return f"There is no command /{name}. Start with a space to send it as text"
