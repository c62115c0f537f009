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
from textual.timer import Timer

from ....models.errors import FloeError
from ...actions import NAMED, Scope, command
from ...chat.controller import Controller, Do
from ...chat.dialogue import Dialogue
from ...chat.view import View
from ...client.bridge import EngineBridge, Heard
from ...client.interface import Client
from ...history import Changed, ChatSetup, History, HistoryTrouble, Recovered
from ...settings.settings import Persona
from ...text.plain_text import one_line, printable
from ...widgets.chat.answer import AnswerTurn
from ...widgets.chat.blocks import Welcome
from ...widgets.chat.chips import Chips
from ...widgets.chat.composer import Composer
from ...widgets.chat.transcript import Transcript
from ...widgets.chat.turns import CODE, COPY, THINKING, Turn
from ...widgets.chat.writing import Writing
from ...widgets.common.clipboard import copy
from ...widgets.common.keys import bindings
from ...widgets.common.stable_text import Ground
from ...widgets.panel.dashboard import Dashboard
from ...widgets.panel.figures import PanelFigures
from ...widgets.panel.status_line import StatusLine
from ..experts import ExpertsScreen
from ..history import HistoryScreen, PickedChat
from ..others import OthersPage
from ..quality import QualityScreen
from ..setup import SetupScreen

if TYPE_CHECKING:
    from ...widgets.markdown.answer_block import AnswerBlock
    from ...widgets.markdown.code import CodeBlock


class Copying:
    """Copies what `transcript` shows, and says so in the bottom row."""

    def __init__(self, transcript: Transcript, status: StatusLine) -> None:
        self._transcript = transcript
        self._status = status
        self._code = (0, -1)  # the answer whose code was copied last, and which of its blocks

    def copy(self, text: str, what: str) -> None:
        """Copy `text`, called `what`."""
        copy(self._transcript.app, text)
        self._status.remark(f"Copied {what}")

    def copy_code_of(self, turn: Turn) -> None:
        """Copy the first code block of a message; again the next one."""
        codes = turn.codes() if isinstance(turn, AnswerTurn) else ()
        if not codes or turn.record is None:
            self._status.remark("There is no code block in this message")
            return
        message, last = self._code
        at = (last + 1) % len(codes) if message == turn.record.id else 0
        self._code = (turn.record.id, at)
        which = f"code block {at + 1} of {len(codes)}" if len(codes) > 1 else "the code"
        self.copy(codes[at], which)

    def copy_last(self) -> None:
        """Copy the last answer."""
        if (turn := self._last()) is not None:
            self.copy(turn.text, "the last answer")

    def copy_code_of_last(self) -> None:
        """Copy the last answer's code."""
        if (turn := self._last()) is not None:
            self.copy_code_of(turn)

    def _last(self) -> AnswerTurn | None:
        turns = list(self._transcript.query(AnswerTurn))
        if not turns:
            self._status.remark("There is no answer yet")
        return turns[-1] if turns else None


_LOOK_SECONDS = 0.2  # between two looks at the history while its page is open


class ChatPages:
    """Opens them over `screen`, and carries out what the user chose there."""

    def __init__(
        self,
        screen: Screen[None],
        bridge: EngineBridge,
        history: History,
        controller: Controller,
        figures: PanelFigures,
    ) -> None:
        self._screen = screen
        self._bridge = bridge
        self._history = history
        self._controller = controller
        self._figures = figures
        self._looking: Timer | None = None

    @property
    def does(self) -> Mapping[str, Do]:
        """The functions of the actions that open pages, by name."""
        return {
            "history": self._open_history,
            "setup": self._open_setup,
            "quality": self._open_quality,
            "experts": self._open_experts,
        }

    def history_changed(self) -> None:
        """This program or another one wrote to the history."""
        if isinstance(self._screen.app.screen, HistoryScreen):
            self._screen.app.screen.refresh_list()

    def _open_history(self, words: str = "") -> None:
        # Only polling sees what other programs write.
        self._looking = self._screen.set_interval(_LOOK_SECONDS, lambda: self._bridge.drain(self._screen))
        page = HistoryScreen(self._history, words, self._controller.dialogue.id)
        self._screen.app.push_screen(page, self._chosen)

    async def _chosen(self, choice: PickedChat | None) -> None:
        if self._looking is not None:
            self._looking.stop()
        try:
            if choice is None:
                return
            if choice.conversation is not None:
                await self._controller.chats.open(choice.conversation, choice.message)
            elif self._controller.dialogue.id in choice.deleted:
                await self._controller.chats.begin()
        except FloeError as error:
            await self._controller.view.messages.explain(error)

    def _open_setup(self) -> None:
        dialogue, model = self._controller.dialogue, self._controller.model
        personas = self._controller.setting.personas
        page = SetupScreen(dialogue.name, dialogue.setup, personas, model.known, model.wanted)
        self._screen.app.push_screen(page, self._set_up)

    def _set_up(self, chosen: tuple[str, ChatSetup] | None) -> None:
        if chosen is not None:
            self._controller.chats.set_up(*chosen)

    def _open_quality(self) -> None:
        model = self._controller.model
        if model.presets:
            self._screen.app.push_screen(QualityScreen(model, self._figures))
        else:
            self._controller.view.gauges.remark(model.no_presets)

    def _open_experts(self) -> None:
        if remote := self._controller.model.client.remote:
            self._controller.view.gauges.remark(f"{remote} does not say which experts it calls")
            return
        self._screen.app.push_screen(ExpertsScreen(self._figures))


class _Beside(Ground, Horizontal):
    """The chat and the panel."""


class _Below(Ground, Vertical):
    """The messages and the text field."""


class ChatScreen(Ground, Screen[None]):
    """One chat.

    Attributes:
        controller: the conversation. dashboard: the engine's figures. does: the function of each action, by name.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(Scope.CHAT)

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
