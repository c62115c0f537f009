"""The chat: its keys and commands, what it is answered with, and the pages that lie over it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from ...models.errors import FloeError, UsageError
from ..bridge import EngineBridge
from ..chat_setup import changed, with_persona
from ..history import History, Setup
from ..settings import Persona
from ..widgets.blocks import ErrorBlock
from ..widgets.composer import Composer
from ..widgets.turns import CODE
from .chats import Chats
from .commands import Command
from .experts import ExpertsScreen
from .quality import QualityScreen
from .setup import SetupScreen

# Before the text field's own keys: F6 would select a line there, and a person may give an action any other of them.
_first = partial(Binding, show=False, priority=True)


class ChatScreen(Chats):
    """One chat with one model, and the way to all that can be done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "stop", "stop the answer, or take a waiting question back", show=False, id="stop"),
        _first("ctrl+n", "new_chat", "begin another chat", id="new_chat"),
        _first("f3", "next_preset", "next quality preset, also in mid-answer", id="next_preset"),
        _first("ctrl+g", "editor", "write the question in $EDITOR", id="editor"),
        _first("ctrl+r", "order('history')", "earlier chats, and the search in them", id="history"),
        _first("f4", "order('quality')", "the quality dial", id="quality"),
        _first("f5", "order('chat')", "this chat: instructions, persona, quality, sampling", id="setup"),
        _first("f6", "order('models')", "models: installed, begun, and to be had", id="models"),
        _first("f9", "order('experts')", "experts, layer by layer", id="experts"),
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
        super().__init__(bridge, history, setup, max_new_tokens)
        self._personas = personas
        self.commands: tuple[Command, ...] = self._make_commands()

    def on_mount(self) -> None:
        super().on_mount()
        careful = {command.name for command in self.commands if command.careful}
        self._writing.know({command.name: command.does for command in self.commands}, careful)

    def know(self, commands: Iterable[Command]) -> None:
        """These commands are understood too; they are the program's, not the chat's."""
        self.commands = (*self.commands, *commands)

    def _make_commands(self) -> tuple[Command, ...]:
        return (
            Command("new", "New chat", "Begin another chat; this one is kept", lambda _text: self.action_new_chat()),
            Command("stop", "Stop", "Stop the running answer", lambda _text: self.action_stop()),
            Command("again", "Answer again", "Answer the last question again", self.answer_again),
            Command("more", "Go on", "Let the last answer go on where it ended", self.go_on),
            Command("edit", "Edit", "Change the last question; the old one is kept", self.edit_last),
            Command("copy", "Copy", "Copy the last answer", lambda _text: self.copy_last()),
            Command("code", "Copy code", "Copy the last answer's code", lambda _text: self.copy_last(CODE)),
            Command("fork", "Fork", "Go on in a copy of this chat", self.fork_here),
            Command("rename", "Rename", "Give this chat a title", self.rename, "TITLE"),
            Command("delete", "Delete", "Delete this chat", self.delete_chat, careful=True),
            Command("undo", "Undo", "Bring back what was deleted last", self.undo),
            Command("history", "History", "Earlier chats, and the search in them", self.open_history, "[WORDS]"),
            Command("last", "Last chat", "Open the chat that was written to last", self.open_last),
            Command("file", "Attach", "Send a text file along", self.attach, "PATH"),
            Command("export", "Export", "Write this chat to a .md or .json file", self.export, "[FILE]"),
            Command("chat", "This chat", "Its instructions, persona and sampling", self.open_setup),
            Command("system", "Instructions", "What the model is told before the chat", self.instruct, "TEXT"),
            Command("persona", "Persona", "Instructions under a name", self.take_persona, "NAME"),
            Command("set", "Sampling", "Such as: /set temperature 0.3", self.set_sampling, "NAME VALUE"),
            Command("quality", "Quality dial", "Presets and fine controls, with their cost", self.turn_dial),
            Command("preset", "Preset", "Use this quality from the next token on", self.take_preset, "NAME"),
            Command("panel", "Panel", "Column, two lines, none", lambda _text: self.action_toggle_panel()),
            Command("pause", "Pause", "Hold the panel's figures", lambda _text: self.action_pause_panel()),
            Command("experts", "Experts", "How calls spread over experts, by layer", self.open_experts),
        )

    async def action_order(self, name: str) -> None:
        """Do what the command `name` does."""
        await self.obey(name, "")

    async def obey(self, name: str, argument: str) -> None:
        """Do a command; what stands against it is said."""
        command = next((command for command in self.commands if command.name == name), None)
        if command is None:
            return
        if command.needs_argument and not argument:
            if self._composer.text:
                self._status.remark(f"Send or clear what you wrote first, then: {command.usage}")
            else:
                self._composer.put(f"/{name} ")
                self._status.remark(f"Write what it needs: {command.usage}")
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

    # What this chat is answered with

    def instruct(self, text: str) -> None:
        """Tell the model something before the chat."""
        self._dialogue.set_up(replace(self._dialogue.setup, system_prompt=text, persona=""))
        self._show_name()
        self._status.remark("The model is told so from the next question on")

    def take_persona(self, name: str) -> None:
        """Use the instructions and sampling values of a persona."""
        self._dialogue.set_up(with_persona(self._dialogue.setup, self._personas, name))
        self._show_name()
        self._status.remark(f"{name} answers from the next question on")

    def set_sampling(self, words: str) -> None:
        """Change how the next answers are drawn."""
        name, _space, value = words.partition(" ")
        sampling = changed(self._dialogue.setup.sampling, name, value.strip())
        self._dialogue.set_up(replace(self._dialogue.setup, sampling=sampling))
        self._status.remark(f"{name} is {getattr(sampling, name)} from the next answer on")

    def open_setup(self, _argument: str = "") -> None:
        """Show what this chat is answered with."""
        setup = self._dialogue.setup
        page = SetupScreen(self._dialogue.name, setup, self._personas, self._presets, self._wanted_preset)
        self.app.push_screen(page, self._set_up)

    def _set_up(self, chosen: tuple[str, Setup] | None) -> None:
        if chosen is not None:
            title, setup = chosen
            if title != self._dialogue.name:
                self._dialogue.rename(title)
            self._dialogue.set_up(setup)
            self._ask_for_its_quality()
            self._show_name()

    def take_preset(self, name: str) -> None:
        """Use a preset, by its name in any case."""
        preset = next((preset for preset in self.presets if preset.lower() == name.lower()), None)
        if preset is None:
            raise UsageError(f"There is no preset {name!r}", f"Known: {', '.join(self.presets) or 'none yet'}.")
        self.choose_preset(preset)

    def turn_dial(self, _argument: str = "") -> None:
        """Show the quality dial."""
        if not self.presets:
            self._status.remark("The presets are known when the model is loaded")
            return
        self.app.push_screen(QualityScreen(self._bridge, self._figures, self._status.preset, self.choose_preset))

    def open_experts(self, _argument: str = "") -> None:
        """Show the experts, layer by layer."""
        self.app.push_screen(ExpertsScreen(self._figures))

    async def _new(self, _argument: str) -> None:
        await self.action_new_chat()

    async def _stop(self, _argument: str) -> None:
        await self.action_stop()
