"""The scrolling column of messages: it follows its end, and a message can be selected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from ...actions import Scope
from ...history import Message as Record
from ..common.keys import bindings
from ..common.stable_text import Ground
from .answer import AnswerTurn
from .blocks import ErrorBlock, Horizon, Note, Welcome
from .turns import Turn, UserTurn

PAGE = 6  # messages loaded at once: each costs Textual some 20 ms, during which keys wait
_NONE_SEEN = -1  # before the oldest message that the model sees
_MOST = 24  # messages out of sight that stay mounted while one scrolls

Read = Callable[[Sequence[int]], list[Record]]


class Window:
    """Mounts messages in `box`, at positions `start` to `stop` of the branch `ids`.

    Attributes:
        turns: the mounted ones. live: the answer that is being written here. opened: whether thinking is shown.
    """

    def __init__(
        self, box: VerticalScroll, read: Read, keeping_view: Callable[[Turn], AbstractContextManager[None]]
    ) -> None:
        """`read`: reads messages by their ids. `keeping_view`: keeps a turn at its place on the screen."""
        self._box = box
        self._read = read
        self._keeping_view = keeping_view
        self._horizon: int | None = None
        self._moving = asyncio.Lock()
        self.ids: tuple[int, ...] = ()
        self.turns: dict[int, Turn] = {}
        self.start, self.stop = 0, 0
        self.live: int | None = None
        self.opened = False

    async def show_end(self, ids: tuple[int, ...], empty: Widget) -> None:
        """Mount the end of a branch, or `empty`."""
        async with self._moving:
            await self._remove_all()
            self.ids, self.start, self.stop = ids, max(0, len(ids) - PAGE), len(ids)
            self._horizon = None
            await self.insert(self._blocks(self.start, self.stop) if ids else [empty])

    async def show_around(self, at: int) -> None:
        """Mount the messages around a position."""
        async with self._moving:
            await self._remove_all()
            self.start, self.stop = max(0, at - PAGE // 2), min(len(self.ids), at + PAGE // 2 + 1)
            self._box.release_anchor()
            await self.insert(self._blocks(self.start, self.stop))

    async def change(self, ids: tuple[int, ...], *, follow: bool) -> bool:
        """Mount what differs between two branches; False if the window would have to move."""
        same = next((at for at, (old, new) in enumerate(zip(self.ids, ids, strict=False)) if old != new), None)
        same = min(len(self.ids), len(ids)) if same is None else same
        if same < self.start or (follow and self.stop < len(self.ids)):
            return False
        async with self._moving:
            await self._remove_from(same)
            stop = len(ids) if follow else min(len(ids), same + PAGE)
            start = min(self.stop, same)
            self.ids, self.stop = ids, max(start, stop)
            await self.insert(self._blocks(start, self.stop))
        return True

    async def insert(self, blocks: Sequence[Widget]) -> None:
        """Mount at the end, but before queued questions; the first blocks replace the welcome."""
        await self._box.query(Welcome).remove()
        await self._box.mount_all(blocks, before=next((block for block in self._box.children if _waits(block)), None))

    def mark_horizon(self, seen: Sequence[int] | None) -> None:
        """Mark the first of the messages that the model still sees; None: it sees all."""
        message = None if seen is None else seen[0] if seen else _NONE_SEEN
        if message == self._horizon:
            return
        self._horizon = message
        self._box.query(Horizon).remove()
        if message is not None and (turn := self.turns.get(message)) is not None:
            self._box.mount(Horizon(), before=turn)
        elif message == _NONE_SEEN and self.stop == len(self.ids):
            self._box.mount(Horizon())

    # As one scrolls

    def fill(self) -> None:
        """Load messages within one screen of the view."""
        box = self._box
        if self._moving.locked() or not self.turns:
            return
        if self.start > 0 and box.scroll_y < box.size.height:
            box.run_worker(self.load_earlier(), group="page", exclusive=False)
        elif self.stop < len(self.ids) and box.max_scroll_y - box.scroll_y < box.size.height:
            box.run_worker(self.load_later(), group="page", exclusive=False)

    async def load_earlier(self) -> None:
        """Mount the page before."""
        async with self._moving:
            if self.start == 0:
                return
            start, end = max(0, self.start - PAGE), self.start
            last = self.stop - PAGE
            away = len(self.turns) >= _MOST and self.live is None and self._is_far(last)
            blocks = self._blocks(start, end)
            self.start = start
            with self._keeping_view(self.turns[self.ids[end]]):
                await self._box.mount_all(blocks, before=0)
                if away:
                    await self._remove_from(last)
        self._box.call_after_refresh(self.fill)

    async def load_later(self) -> None:
        """Mount the page after."""
        async with self._moving:
            if self.stop >= len(self.ids):
                return
            self._box.release_anchor()
            away = self.start + PAGE if len(self.turns) >= _MOST else self.start
            away = away if self._is_far(away) else self.start
            start, self.stop = self.stop, min(len(self.ids), self.stop + PAGE)
            blocks = self._blocks(start, self.stop)
            with self._keeping_view(self.turns[self.ids[start - 1]]):
                await self.insert(blocks)
                await self._remove_before(away)
        self._box.call_after_refresh(self.fill)

    async def trim(self) -> None:
        """Unmount the oldest messages while the end is in view."""
        far = self.stop - 2 * PAGE
        if len(self.turns) > _MOST and self._box.is_vertical_scroll_end and self._is_far(far):
            async with self._moving:
                await self._remove_before(self.stop - 2 * PAGE)

    def _is_far(self, position: int) -> bool:
        """Whether the message there is too far from the view to be loaded."""
        turn = self.turns.get(self.ids[position])
        if turn is None:
            return False
        y, height = turn.virtual_region.y, self._box.size.height
        return y < self._box.scroll_y - height or y > self._box.scroll_y + 2 * height

    def _blocks(self, start: int, stop: int) -> list[Widget]:
        """Blocks for the messages at positions `start` to `stop`."""
        blocks: list[Widget] = []
        found = {record.id: record for record in self._read(self.ids[start:stop])}
        for position in range(start, stop):
            record = found.get(self.ids[position]) or _missing(self.ids[position], position)
            if record.id == self._horizon and not self._box.query(Horizon):
                blocks.append(Horizon())
            if record.role == "user":
                self.turns[record.id] = UserTurn(record.text, record=record)
            else:
                self.turns[record.id] = AnswerTurn(record, live=record.id == self.live, opened=self.opened)
            blocks.append(self.turns[record.id])
        return blocks

    async def _remove_before(self, position: int) -> None:
        """Remove the messages before `position`, and the remarks between them."""
        if position == self.start:
            return
        first = self._box.children.index(self.turns[self.ids[position]])
        for message in self.ids[self.start : position]:
            self.turns.pop(message, None)
        self.start = position
        await self._box.remove_children(list(self._box.children[:first]))

    async def _remove_all(self) -> None:
        """Remove all but queued questions."""
        self.turns.clear()
        await self._box.remove_children([block for block in self._box.children if not _waits(block)])

    async def _remove_from(self, position: int) -> None:
        """Remove the messages from `position` on, and the remarks between and after them."""
        leaving = [message for message in self.ids[position : self.stop] if message in self.turns]
        if leaving:
            at = self._box.children.index(self.turns[leaving[0]])
            gone = [block for block in self._box.children[at:] if not _waits(block)]
            for message in leaving:
                del self.turns[message]
            self.stop = position
            await self._box.remove_children(gone)


def _waits(block: Widget) -> bool:
    return isinstance(block, UserTurn) and block.record is None


def _missing(message: int, position: int) -> Record:
    """A placeholder for a message that another floe-chat has deleted."""
    words = "(deleted in another floe-chat window)"
    return Record(message, 0, None, position, "user", words, "complete", 0, "", "", None, (), 1, 1)


class Transcript(Ground, VerticalScroll):
    """Follows its end until the user scrolls away from it.

    Of a long branch only some pages are mounted; others come as one scrolls. While it has the focus, one message is
    selected and keys act on it: `Turn.Act` asks for that.
    """

    FOCUS_ON_CLICK: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = bindings(Scope.MESSAGES)

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
        """Scope the messages, and scroll so that the held one stays where it is, before anything is painted."""
        arranged = super().arrange(size, optimal)
        if self._held is not None:
            turn, place = self._held
            y = next((found.region.y - place for found in arranged.placements if found.widget is turn), self.scroll_y)
            self.set_reactive(Widget.scroll_y, y)
            self.set_reactive(cast("Reactive[float]", Widget.scroll_target_y), y)
            self.vertical_scrollbar.position = y
        return arranged
