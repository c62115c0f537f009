"""The chat: its keys and commands, its settings, and the pages over it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import ClassVar

from textual import on
from textual.binding import BindingType

from ...models.errors import FloeError
from ..actions import NAMED, Place, command
from ..bridge import EngineBridge
from ..history import History, Setup
from ..settings import Persona
from ..widgets.blocks import ErrorBlock
from ..widgets.composer import Composer
from ..widgets.keys import bindings
from ..widgets.turns import CODE
from .chat_settings import ChatSettings
from .experts import ExpertsScreen
from .quality import QualityScreen

Do = Callable[..., Awaitable[None] | None]
"""Does an action. One with an argument gets what was written after the command, or ""."""


class ChatScreen(ChatSettings):
    """One chat with one model, and all of its commands."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.CHAT)

    def __init__(
        self,
        bridge: EngineBridge,
        history: History,
        setup: Setup,
        max_new_tokens: int,
        personas: Mapping[str, Persona],
        pages: Mapping[str, Do],
    ) -> None:
        """`pages`: what the program does, by the names of its actions."""
        super().__init__(bridge, history, setup, max_new_tokens, personas)
        self._does: dict[str, Do] = {
            **pages,
            "new_chat": self.new_chat,
            "stop": self.action_stop,
            "regenerate": self.answer_again,
            "more": self.go_on,
            "edit": self.edit_last,
            "copy": self.copy_last,
            "code": partial(self.copy_last, CODE),
            "fork": self.fork_here,
            "rename": self.rename,
            "delete": self.delete_chat,
            "undo": self.undo,
            "history": self.open_history,
            "last": self.open_last,
            "file": self.attach,
            "cut": self.cut,
            "export": self.export,
            "setup": self.open_setup,
            "system": self.instruct,
            "persona": self.take_persona,
            "set": self.set_sampling,
            "quality": self.turn_dial,
            "preset": self.take_preset,
            "next_preset": self.next_preset,
            "toggle_panel": self.toggle_panel,
            "pause_panel": self.pause_panel,
            "experts": self.open_experts,
            "editor": self.edit_outside,
            "select_message": self.select_messages,
            "scroll_up": partial(self.scroll_transcript, -1),
            "scroll_down": partial(self.scroll_transcript, 1),
            "scroll_to_end": self.scroll_to_end,
            "leave_panel": self.focus_text,
        }

    async def action_do(self, name: str) -> None:
        """Do the action `name`."""
        await self.do(name)

    async def do(self, name: str, argument: str = "") -> None:
        """Do an action; show why it cannot be done."""
        action = NAMED[name]
        if action.needs_argument and not argument:
            if self._composer.text:
                self._status.remark(f"Send or clear your text first, then type {action.usage}")
            else:
                self._composer.put(f"/{action.command} ")
                self._status.remark(f"Usage: {action.usage}")
            return
        try:
            running = self._does[name](argument) if action.argument else self._does[name]()
            if running is not None:
                await running
        except FloeError as error:
            await self._transcript.add(ErrorBlock(error.title, error.cause, error.hint))

    @on(Composer.Ordered)
    async def _obey(self, event: Composer.Ordered) -> None:
        if (action := command(event.name)) is not None:
            await self.do(action.name, event.argument)

    def edit_outside(self) -> None:
        """Write the question in the person's editor."""
        if trouble := self._writing.edit_outside(lambda: self._bridge.drain(self)):
            self._status.remark(trouble)

    def turn_dial(self) -> None:
        """Show the quality dial."""
        if not self.presets:
            self._status.remark("The presets are known when the model is loaded")
            return
        self.app.push_screen(QualityScreen(self._bridge, self._figures, self._status.preset, self.choose_preset))

    def open_experts(self) -> None:
        """Show the experts, layer by layer."""
        self.app.push_screen(ExpertsScreen(self._figures))

    def cut(self) -> None:
        """Shorten attached texts that do not fit the window."""
        if not self._writing.chips.cut():
            self._status.remark("No attached text is too large")
