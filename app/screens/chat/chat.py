"""The chat screen: its layout, its keys, and the functions behind its actions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen

from ....models.errors import FloeError
from ...actions import NAMED, Place, command
from ...chat.controller import Controller, Do
from ...chat.dialogue import Dialogue
from ...chat.view import View
from ...client.bridge import EngineBridge, Heard
from ...client.interface import Client
from ...history import Changed, ChatSetup, History, HistoryTrouble, Recovered
from ...settings.settings import Persona
from ...text.plain_text import one_line, printable
from ...widgets.chat.blocks import Welcome
from ...widgets.chat.chips import Chips
from ...widgets.chat.composer import Composer
from ...widgets.chat.transcript import Transcript
from ...widgets.chat.turns import CODE, COPY, THINKING, Turn
from ...widgets.chat.writing import Writing
from ...widgets.common.keys import bindings
from ...widgets.common.stable_text import Ground
from ...widgets.panel.dashboard import Dashboard
from ..others import OthersPage
from .chat_pages import ChatPages
from .copying import Copying

if TYPE_CHECKING:
    from ...widgets.markdown.answer_block import AnswerBlock
    from ...widgets.markdown.code import CodeBlock


class _Beside(Ground, Horizontal):
    """The chat and the panel."""


class _Below(Ground, Vertical):
    """The messages and the text field."""


class ChatScreen(Ground, Screen[None]):
    """One chat.

    Attributes:
        controller: the conversation. dashboard: the engine's figures. does: the function of each action, by name.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.CHAT)

    def __init__(
        self,
        client: Client,
        history: History,
        setup: ChatSetup,
        max_new_tokens: int,
        personas: Mapping[str, Persona],
        program: Mapping[str, Do],
    ) -> None:
        """`program`: the functions of the program's actions, by name."""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self._bridge = EngineBridge(client, history)
        dialogue = Dialogue(history, setup)
        self._transcript = Transcript(dialogue.messages)
        self._writing = Writing(client.count, lambda: self.controller.answering.question_room())
        self.dashboard = Dashboard(self)
        self._copying = Copying(self._transcript, self.dashboard.status)
        view = View(self._transcript, OthersPage(self), self._writing, self.dashboard, self)
        self.controller = Controller(client, self._bridge, history, dialogue, view, max_new_tokens, personas)
        self._pages = ChatPages(self, self._bridge, history, self.controller, self.dashboard.figures)
        self.does: Mapping[str, Do] = {**program, **self.controller.does, **self._pages.does, **self._own()}

    def _own(self) -> Mapping[str, Do]:
        """The functions of the screen's own actions, by name."""
        return {
            "copy": self._copying.copy_last,
            "code": self._copying.copy_code_of_last,
            "file": self._writing.attach,
            "cut": self._cut,
            "editor": self._edit_outside,
            "toggle_panel": self.dashboard.toggle_panel,
            "pause_panel": self.dashboard.pause,
            "select_message": self._select_message,
            "scroll_up": partial(self._transcript.scroll_pages, -1),
            "scroll_down": partial(self._transcript.scroll_pages, 1),
            "scroll_to_end": self._transcript.show_end,
            "leave_panel": self._writing.take_focus,
        }

    def compose(self) -> ComposeResult:
        yield self.dashboard.strip
        with _Beside():
            with _Below(id="chat"):
                yield self._transcript
                yield self._writing
            yield self.dashboard.panel
        yield self.dashboard.status

    def on_mount(self) -> None:
        self._writing.take_focus()
        self.controller.model.begin()

    def start(self) -> None:
        """Let the engine begin."""
        self._bridge.start(self)

    def take_keys(self, keys: Mapping[str, str]) -> None:
        """Use these keys for the actions from now on."""
        self.dashboard.take_keys(keys)
        self._writing.composer.take_keys(keys)
        for welcome in self.query(Welcome):
            welcome.refresh(layout=True)

    # What the person asks for

    async def action_do(self, name: str) -> None:
        """Do the action `name`."""
        await self.do(name)

    async def do(self, name: str, argument: str = "") -> None:
        """Do an action; show why it cannot be done."""
        action = NAMED[name]
        if action.needs_argument and not argument:
            if self._writing.text:
                self.dashboard.remark(f"Send or clear your text first, then type {action.usage}")
            else:
                self._writing.put(f"/{action.command} ")
                self.dashboard.remark(f"Usage: {action.usage}")
            return
        try:
            running = self.does[name](argument) if action.argument else self.does[name]()
            if running is not None:
                await running
        except FloeError as error:
            await self._transcript.explain(error)

    @on(Composer.Ordered)
    async def _obey(self, event: Composer.Ordered) -> None:
        if (action := command(event.name)) is not None:
            await self.do(action.name, event.argument)

    @on(Composer.Sent)
    async def _send(self, event: Composer.Sent) -> None:
        await self.controller.questions.send(event.text, event.files)
        self._save_soon()

    @on(Composer.Changed)
    @on(Chips.Changed)
    def _save_soon(self) -> None:
        self.controller.questions.save_soon()

    @on(Turn.Act)
    async def _act(self, event: Turn.Act) -> None:
        if event.turn.record is None:
            return
        if event.action == COPY:
            self._copying.copy(event.turn.text, "the message")
        elif event.action == CODE:
            self._copying.copy_code_of(event.turn)
        elif event.action == THINKING:
            self._transcript.turn_thinking(event.turn)
        else:
            try:
                await self.controller.acting.act(event.action, event.turn.record)
            except FloeError as error:
                await self._transcript.explain(error)

    @on(Transcript.Left)
    def _leave_messages(self) -> None:
        self._writing.take_focus()

    @on(Composer.Refused)
    @on(Chips.Refused)
    def _remark(self, event: Composer.Refused | Chips.Refused) -> None:
        self.dashboard.remark(one_line(event.reason))

    # By name: their modules are imported only after the first frame.

    def on_code_block_copied(self, event: CodeBlock.Copied) -> None:
        self._copying.copy(event.code, "the code")

    def on_answer_block_link_clicked(self, event: AnswerBlock.LinkClicked) -> None:
        href = printable(event.href)
        self._copying.copy(href, href)

    def _select_message(self) -> None:
        self._transcript.focus()

    def _cut(self) -> None:
        """Shorten attached texts that do not fit the window."""
        if not self._writing.chips.cut():
            self.dashboard.remark("No attached text is too large")

    def _edit_outside(self) -> None:
        """Write the question in the user's editor."""
        if trouble := self._writing.edit_outside(lambda: self._bridge.drain(self)):
            self.dashboard.remark(trouble)

    # What the engine and the history report

    @on(Heard)
    async def _hear(self, event: Heard) -> None:
        match event.news:
            case HistoryTrouble(title, cause, hint):
                self.notify(f"{cause} {hint}".strip(), title=title, severity="warning", timeout=15, markup=False)
            case Recovered():
                self.notify("All unsaved messages have now been saved.", title="The history is saved again")
            case Changed():
                self._pages.history_changed()
            case news:
                await self.controller.hear(news)
