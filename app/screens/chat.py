"""The chat: its keys and commands, its settings, and the pages over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from ...models.errors import FloeError
from ..bridge import EngineBridge
from ..history import History, Setup
from ..settings import Persona
from ..widgets.blocks import ErrorBlock
from ..widgets.composer import Composer
from ..widgets.turns import CODE
from .chat_settings import ChatSettings
from .commands import ALIASES, Command, find, unknown
from .experts import ExpertsScreen
from .quality import QualityScreen

# Before the text field's own keys: F6 would select a line there, and a person may give an action any other of them.
_first = partial(Binding, show=False, priority=True)


class ChatScreen(ChatSettings):
    """One chat with one model, and all of its commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop the answer, or take back a queued question", show=False, id="stop"),
        _first("ctrl+n", "new_chat", "start another chat", id="new_chat"),
        _first("f3", "next_preset", "next quality preset, also in mid-answer", id="next_preset"),
        _first("ctrl+g", "editor", "write the question in $EDITOR", id="editor"),
        _first("ctrl+r", "order('history')", "earlier chats, with a search", id="history"),
        _first("f4", "order('quality')", "quality: presets and fine controls", id="quality"),
        _first("f5", "order('chat')", "this chat: system prompt, persona, quality, sampling", id="setup"),
        _first("f6", "order('models')", "models: installed, unfinished and available", id="models"),
        _first("f9", "order('experts')", "expert use, layer by layer", id="experts"),
        _first("ctrl+t", "order('again')", "answer the last question again", id="regenerate"),
        _first("ctrl+o", "order('copy')", "copy the last answer", id="copy"),
    ]

    def __init__(
        self,
        bridge: EngineBridge,
        history: History,
        setup: Setup,
        max_new_tokens: int,
        personas: Mapping[str, Persona],
    ) -> None:
        super().__init__(bridge, history, setup, max_new_tokens, personas)
        self.commands: tuple[Command, ...] = self._make_commands()

    def on_mount(self) -> None:
        super().on_mount()
        careful = {command.name for command in self.commands if command.careful}
        does = {command.name: command.does for command in self.commands}
        self._writing.know(does, ALIASES, careful, lambda name: unknown(self.commands, name))

    def know(self, commands: Iterable[Command]) -> None:
        """Add the program's commands to the chat's."""
        self.commands = (*self.commands, *commands)

    def _make_commands(self) -> tuple[Command, ...]:
        return (
            Command("new", "New chat", "Start another chat; this one is saved", self._new, key="new_chat"),
            Command("stop", "Stop", "Stop the running answer", self._stop, key="stop"),
            Command("again", "Answer again", "Answer the last question again", self.answer_again, key="regenerate"),
            Command("more", "Continue", "Continue the last answer where it ended", self.go_on),
            Command("edit", "Edit", "Change the last question; the old one is saved too", self.edit_last),
            Command("copy", "Copy", "Copy the last answer", lambda _text: self.copy_last(), key="copy"),
            Command("code", "Copy code", "Copy the last answer's code", lambda _text: self.copy_last(CODE)),
            Command("fork", "Fork", "Continue in a copy of this chat", self.fork_here),
            Command("rename", "Rename", "Give this chat a title", self.rename, "TITLE"),
            Command("delete", "Delete", "Delete this chat", self.delete_chat, careful=True),
            Command("undo", "Undo", "Restore what was deleted last", self.undo),
            Command("history", "History", "Earlier chats, with a search", self.open_history, "[WORDS]", key="history"),
            Command("last", "Last chat", "Open the chat that was written to last", self.open_last),
            Command("file", "Attach", "Attach a text file to the next question", self.attach, "PATH"),
            Command("cut", "Cut", "Shorten attached texts that are too large", self.cut),
            Command("export", "Export", "Write this chat to a .md or .json file", self.export, "[FILE]"),
            Command(
                "chat",
                "This chat",
                "This chat's system prompt, persona, quality and sampling",
                self.open_setup,
                key="setup",
            ),
            Command("system", "System prompt", "Show or change this chat's system prompt", self.instruct, "[TEXT]"),
            Command("persona", "Persona", "List personas, or use one", self.take_persona, "[NAME]"),
            Command("set", "Sampling", "Show sampling values, or set one", self.set_sampling, "[NAME VALUE]"),
            Command(
                "quality",
                "Quality",
                "Presets and fine controls, with the quality loss of each",
                self.turn_dial,
                key="quality",
            ),
            Command("preset", "Preset", "List quality presets, or use one", self.take_preset, "[NAME]"),
            Command(
                "panel",
                "Panel",
                "Switch the panel: column, two lines, hidden",
                lambda _text: self.action_toggle_panel(),
                key="toggle_panel",
            ),
            Command(
                "pause", "Pause", "Pause the panel's figures, or resume them", lambda _text: self.action_pause_panel()
            ),
            Command("experts", "Experts", "Expert use, layer by layer", self.open_experts, key="experts"),
        )

    async def action_order(self, name: str) -> None:
        """Run the command `name`."""
        await self.obey(name, "")

    async def obey(self, name: str, argument: str) -> None:
        """Run a command; show why it cannot run."""
        command = find(self.commands, name)
        if command is None:
            return
        if command.needs_argument and not argument:
            if self._composer.text:
                self._status.remark(f"Send or clear your text first, then type {command.usage}")
            else:
                self._composer.put(f"/{command.name} ")
                self._status.remark(f"Usage: {command.usage}")
            return
        try:
            running = command.run(argument)
            if running is not None:
                await running
        except FloeError as error:
            await self._transcript.add(ErrorBlock(error.title, error.cause, error.hint))

    @on(Composer.Ordered)
    async def _obey(self, event: Composer.Ordered) -> None:
        await self.obey(event.name, event.argument)

    def action_editor(self) -> None:
        """Write the question in the person's editor."""
        if trouble := self._writing.edit_outside(lambda: self._bridge.drain(self)):
            self._status.remark(trouble)

    def turn_dial(self, _argument: str = "") -> None:
        """Show the quality dial."""
        if not self.presets:
            self._status.remark("The presets are known when the model is loaded")
            return
        self.app.push_screen(QualityScreen(self._bridge, self._figures, self._status.preset, self.choose_preset))

    def open_experts(self, _argument: str = "") -> None:
        """Show the experts, layer by layer."""
        self.app.push_screen(ExpertsScreen(self._figures))

    def cut(self, _argument: str = "") -> None:
        """Shorten attached texts that do not fit the window."""
        if not self._writing.chips.cut():
            self._status.remark("No attached text is too large")

    async def _new(self, _argument: str) -> None:
        await self.action_new_chat()

    async def _stop(self, _argument: str) -> None:
        await self.action_stop()
