"""The scrolling column of messages: it follows its end, and a message can be selected."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar, cast

from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.layout import DockArrangeResult
from textual.message import Message
from textual.reactive import Reactive
from textual.widget import Widget

from ....engine.events import Failed
from ....models.errors import FloeError
from ...actions import Place
from ...history import Message as Record
from ..common.keys import bindings
from ..common.stable_text import Ground
from .answer import AnswerTurn
from .blocks import ErrorBlock, Note, Welcome
from .transcript_window import Read, Window
from .turns import Turn, UserTurn


class Transcript(Ground, VerticalScroll):
    """Follows its end until the user scrolls away from it.

    Of a long branch only some pages are mounted; others come as one scrolls. While it has the focus, one message is
    selected and keys act on it: `Turn.Act` asks for that.
    """

    FOCUS_ON_CLICK: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.MESSAGES)

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._window = Window(self, read, self._keeping_view)
        self._demo, self._sent = False, ""
        self._held: tuple[Turn, float] | None = None  # a message, and the row of the view where it must stay

    def on_mount(self) -> None:
        self.anchor()
        self.mount(Welcome(demo=self._demo, sent=self._sent))

    # What is shown

    @property
    def live(self) -> int | None:
        """The answer that is being written here."""
        return self._window.live

    @live.setter
    def live(self, message: int | None) -> None:
        self._window.live = message

    def welcome(self, *, demo: bool, sent: str) -> None:
        """Say in an empty chat that the demo model answers, or another one, and what is `sent` where."""
        self._demo, self._sent = demo, sent
        for shown in self.query(Welcome):
            shown.demo, shown.sent = demo, sent

    async def show(self, ids: tuple[int, ...]) -> None:
        """Show the end of a branch, or the welcome where it is empty."""
        await self._window.show_end(ids, Welcome(demo=self._demo, sent=self._sent))
        self.anchor()
        self.call_after_refresh(self._window.fill)

    async def show_end(self) -> None:
        """Scroll to the end and follow it."""
        if self._window.stop < len(self._window.ids):
            await self.show(self._window.ids)
        self.anchor()

    async def change(self, ids: tuple[int, ...], *, follow: bool = True) -> None:
        """Show another state of the same branch, or another branch: what they have in common stays as it is.

        With `follow` the end comes into view.
        """
        if not await self._window.change(ids, follow=follow):
            await self.show(ids)
            return
        if follow:
            self.anchor()
        await self._window.trim()

    async def note(self, text: str) -> None:
        """Add a remark of the program."""
        await self._window.insert([Note(text)])

    async def explain(self, problem: FloeError | Failed) -> None:
        """Add what went wrong, why, and what to do."""
        await self._window.insert([ErrorBlock(problem.title, problem.cause, problem.hint)])

    async def queue(self, text: str, note: str, files: tuple[str, ...]) -> UserTurn:
        """Add a question that waits."""
        turn = UserTurn(text, note, files=files)
        self.anchor()
        await self.query(Welcome).remove()
        await self.mount(turn)
        return turn

    def mark_horizon(self, seen: Sequence[int] | None) -> None:
        """Mark the first of the messages that the model still sees; None: it sees all."""
        self._window.mark_horizon(seen)

    def scroll_pages(self, pages: int) -> None:
        """Scroll up (-1) or down (1) by a page."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)

    # The answer that is being written

    def feed(self, text: str) -> None:
        """Show more of the answer."""
        if (turn := self._answer(self.live)) is not None:
            turn.feed(text)

    def think(self, text: str, tokens: int) -> None:
        """Show more of what the model thinks before it answers."""
        if (turn := self._answer(self.live)) is not None:
            turn.think(text, tokens)

    def show_thinking(self, *, opened: bool) -> None:
        """Open what the models thought, or fold it, from now on."""
        self._window.opened = opened
        for turn in self._window.turns.values():
            if isinstance(turn, AnswerTurn):
                turn.thought.opened = opened

    def turn_thinking(self, of: Turn | None = None) -> bool:
        """Open or fold what the model thought before an answer (None: the last one); False if there is nothing."""
        turns = self._window.turns.values() if of is None else (of,)
        found = [turn for turn in turns if isinstance(turn, AnswerTurn) and turn.thought.text]
        if not found:
            return False
        turn = found[-1]
        turn.thought.opened = not turn.thought.opened
        if turn.thought.opened and turn is not self._answer(self.live):
            self.release_anchor()  # its beginning is to be read, not the end of the answer
            self.call_after_refresh(self.scroll_to_widget, turn.thought, animate=False, top=True)
        return True

    def show_progress(self, words: str) -> None:
        """Show what happens before its first token."""
        if (turn := self._answer(self.live)) is not None:
            turn.show_progress(words)

    def finish(self, answer: Record) -> None:
        """No more text comes."""
        if (turn := self._answer(answer.id)) is not None:
            turn.finish(answer)

    def _answer(self, message: int | None) -> AnswerTurn | None:
        turn = None if message is None else self._window.turns.get(message)
        return turn if isinstance(turn, AnswerTurn) else None

    # Selecting

    @property
    def selected(self) -> Turn | None:
        """The message that keys act on."""
        return next((turn for turn in self._window.turns.values() if turn.selected), None)

    def on_focus(self) -> None:
        if self.selected is None and self._window.turns:
            self._select(self._window.ids[self._window.stop - 1])

    def on_blur(self) -> None:
        if (selected := self.selected) is not None:
            selected.selected = False

    async def go_to(self, message: int) -> None:
        """Bring a message of the branch into view and select it."""
        if message not in self._window.ids:
            return
        if message not in self._window.turns:
            await self._window.show_around(self._window.ids.index(message))
            self.call_after_refresh(self._window.fill)
        self.focus()
        self.call_after_refresh(self._select, message)

    def select_at(self, position: int) -> None:
        """Select the message there, if it is mounted and this has the focus."""
        if self.has_focus and position < len(self._window.ids):
            self._select(self._window.ids[position])

    def action_act(self, action: str) -> None:
        """Ask for something to be done to the selected message."""
        if (selected := self.selected) is not None:
            self.post_message(Turn.Act(selected, action))

    async def action_select(self, step: int) -> None:
        """Select a neighbour of the selected message."""
        selected, window = self.selected, self._window
        if selected is None or selected.record is None:
            self.on_focus()
            return
        at = window.ids.index(selected.record.id) + step
        if at >= len(window.ids):
            self.action_leave()
        elif at >= 0:
            if at < window.start:
                await window.load_earlier()
            elif at >= window.stop:
                await window.load_later()
            self._select(window.ids[at])

    async def action_select_first(self) -> None:
        """Go to the beginning of the chat."""
        if self._window.ids:
            await self.go_to(self._window.ids[0])

    def action_leave(self) -> None:
        """Give the focus back to the text field."""
        self.post_message(self.Left())

    class Left(Message):
        """The user has finished selecting."""

    def _select(self, message: int) -> None:
        if (turn := self._window.turns.get(message)) is not None:
            self.on_blur()
            turn.selected = True
            self.call_after_refresh(self.scroll_to_widget, turn, animate=False)  # its bar may take another row

    # Scrolling

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        if self._held is not None:  # somebody scrolls meanwhile
            turn, place = self._held
            self._held = turn, place + old_value - new_value
        self._window.fill()

    @contextmanager
    def _keeping_view(self, turn: Turn) -> Generator[None]:
        """Keep `turn` at its place on the screen, whatever changes above it: laid out before anything is painted.

        If the end is followed, the layout itself keeps it in view.
        """
        self._held = turn, turn.virtual_region.y - self.scroll_y
        with self.app.batch_update():
            yield
        self.call_after_refresh(self._let_go, turn)

    def _let_go(self, turn: Turn) -> None:
        if self._held is not None and self._held[0] is turn:
            self._held = None

    def arrange(self, size: Size, optimal: bool = False) -> DockArrangeResult:
        """Place the messages, and scroll so that the held one stays where it is, before anything is painted."""
        arranged = super().arrange(size, optimal)
        if self._held is not None:
            turn, place = self._held
            y = next((found.region.y - place for found in arranged.placements if found.widget is turn), self.scroll_y)
            self.set_reactive(Widget.scroll_y, y)
            self.set_reactive(cast("Reactive[float]", Widget.scroll_target_y), y)
            self.vertical_scrollbar.position = y
        return arranged
