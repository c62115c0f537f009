"""The scrolling column of messages: a window on a branch of any length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import ClassVar

from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widget import Widget

from ..actions import Place
from ..history import Message as Record
from .answer import AnswerTurn
from .blocks import Horizon, Welcome
from .keys import bindings
from .turns import Turn, UserTurn

PAGE = 6  # messages that are loaded at once: each costs Textual some 20 ms, and keys wait for that
NONE_SEEN = -1  # in the place of the oldest message that the model sees
_MOST = 24  # messages that stay mounted while one scrolls, as far as they are out of sight

Read = Callable[[Sequence[int]], list[Record]]


class Transcript(VerticalScroll):
    """Follows its end until the person scrolls away from it.

    Of a long branch only some pages are mounted; others come as one scrolls. While it has the focus, one message is
    selected and keys act on it: `Turn.Act` asks for that.
    """

    FOCUS_ON_CLICK: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.MESSAGES)

    def __init__(self, read: Read) -> None:
        super().__init__()
        self._read = read
        self._ids: tuple[int, ...] = ()
        self._turns: dict[int, Turn] = {}  # the mounted ones
        self._from, self._to = 0, 0  # their positions on the branch
        self._horizon: int | None = None
        self._paging = asyncio.Lock()
        self._demo = False
        self.live: int | None = None
        """The answer that is being written here."""

    def on_mount(self) -> None:
        self.anchor()
        self.mount(Welcome(demo=self._demo))

    # What is shown

    def welcome(self, *, demo: bool) -> None:
        """Say in an empty chat that the demo model answers, or another one."""
        self._demo = demo
        for shown in self.query(Welcome):
            shown.demo = demo

    def turn(self, message: int) -> Turn | None:
        """The block of a message, if it is mounted."""
        return self._turns.get(message)

    @property
    def selected(self) -> Turn | None:
        """The message that keys act on."""
        return next((turn for turn in self._turns.values() if turn.selected), None)

    async def show(self, ids: tuple[int, ...]) -> None:
        """Show the end of a branch, or the welcome where it is empty."""
        async with self._paging:
            await self._remove_blocks()
            self._ids, self._from, self._to = ids, max(0, len(ids) - PAGE), len(ids)
            self._horizon = None
            await self._insert(self._blocks(self._from, self._to) if ids else [Welcome(demo=self._demo)])
        self.anchor()
        self.call_after_refresh(self._fill)

    async def show_end(self) -> None:
        """Bring the end into view and follow it."""
        if self._to < len(self._ids):
            await self.show(self._ids)
        self.anchor()

    async def change(self, ids: tuple[int, ...], *, follow: bool = True) -> None:
        """Show another state of the same branch, or another branch: what both begin with stays as it is.

        With `follow` the end comes into view.
        """
        same = next((at for at, (old, new) in enumerate(zip(self._ids, ids, strict=False)) if old != new), None)
        same = min(len(self._ids), len(ids)) if same is None else same
        if same < self._from or (follow and self._to < len(self._ids)):
            await self.show(ids)
            return
        async with self._paging:
            await self._remove_from(same)
            to = len(ids) if follow else min(len(ids), same + PAGE)
            start = min(self._to, same)
            self._ids, self._to = ids, max(start, to)
            await self._insert(self._blocks(start, self._to))
        if follow:
            self.anchor()
        await self._trim()

    async def add(self, block: Widget) -> None:
        """Append a remark, or a queued question; the first one replaces the welcome."""
        await self.query(Welcome).remove()
        if isinstance(block, UserTurn):
            await self.mount(block)
        else:
            await self._insert([block])

    def mark_horizon(self, message: int | None) -> None:
        """Mark the oldest message that the model still sees; None: it sees all."""
        if message == self._horizon:
            return
        self._horizon = message
        self.query(Horizon).remove()
        if message is not None and (turn := self._turns.get(message)) is not None:
            self.mount(Horizon(), before=turn)
        elif message == NONE_SEEN and self._to == len(self._ids):
            self.mount(Horizon())

    def scroll_pages(self, pages: int) -> None:
        """Scroll up (-1) or down (1) by a page."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)

    # Selecting

    def on_focus(self) -> None:
        if self.selected is None and self._turns:
            self._select(self._turns[self._ids[self._to - 1]])

    def on_blur(self) -> None:
        if (selected := self.selected) is not None:
            selected.selected = False

    async def go_to(self, message: int) -> None:
        """Bring a message of the branch into view and select it."""
        if message not in self._ids:
            return
        if message not in self._turns:
            at = self._ids.index(message)
            async with self._paging:
                await self._remove_blocks()
                self._from, self._to = max(0, at - PAGE // 2), min(len(self._ids), at + PAGE // 2 + 1)
                self.release_anchor()
                await self._insert(self._blocks(self._from, self._to))
            self.call_after_refresh(self._fill)
        self.focus()
        self.call_after_refresh(self.select, message)

    def select(self, message: int) -> None:
        """Select a message that is mounted."""
        if (turn := self._turns.get(message)) is not None:
            self._select(turn)

    def action_act(self, action: str) -> None:
        """Ask for something to be done to the selected message."""
        if (selected := self.selected) is not None:
            self.post_message(Turn.Act(selected, action))

    async def action_select(self, step: int) -> None:
        """Select a neighbour of the selected message."""
        selected = self.selected
        if selected is None or selected.record is None:
            self.on_focus()
            return
        at = self._ids.index(selected.record.id) + step
        if at >= len(self._ids):
            self.action_leave()
        elif at >= 0:
            if at < self._from:
                await self._load_earlier()
            elif at >= self._to:
                await self._load_later()
            self._select(self._turns[self._ids[at]])

    async def action_select_first(self) -> None:
        """Go to where the chat began."""
        if not self._ids:
            return
        await self.go_to(self._ids[0])

    def action_leave(self) -> None:
        """Give the keys back to the text field."""
        self.post_message(self.Left())

    class Left(Message):
        """The person is done with selecting."""

    def _select(self, turn: Turn) -> None:
        self.on_blur()
        turn.selected = True
        self.call_after_refresh(self.scroll_to_widget, turn, animate=False)  # its bar may take another row

    # The window

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        super().watch_scroll_y(old_value, new_value)
        self._fill()

    def _fill(self) -> None:
        """Load what is a screen away from what is in view."""
        if self._paging.locked() or not self._turns:
            return
        if self._from > 0 and self.scroll_y < self.size.height:
            self.run_worker(self._load_earlier(), group="page", exclusive=False)
        elif self._to < len(self._ids) and self.max_scroll_y - self.scroll_y < self.size.height:
            self.run_worker(self._load_later(), group="page", exclusive=False)

    async def _load_earlier(self) -> None:
        async with self._paging:
            if self._from == 0:
                return
            start, end = max(0, self._from - PAGE), self._from
            last = self._to - PAGE
            away = len(self._turns) >= _MOST and self.live is None and self._is_far(last)
            blocks = self._blocks(start, end)
            self._from = start
            with self._keeping_view(self._turns[self._ids[end]]):
                await self.mount_all(blocks, before=0)
                if away:
                    await self._remove_from(last)
        self.call_after_refresh(self._fill)

    async def _load_later(self) -> None:
        async with self._paging:
            if self._to >= len(self._ids):
                return
            self.release_anchor()
            away = self._from + PAGE if len(self._turns) >= _MOST else self._from
            away = away if self._is_far(away) else self._from
            start, self._to = self._to, min(len(self._ids), self._to + PAGE)
            blocks = self._blocks(start, self._to)
            with self._keeping_view(self._turns[self._ids[start - 1]]):
                await self._insert(blocks)
                await self._remove_before(away)
        self.call_after_refresh(self._fill)

    @contextmanager
    def _keeping_view(self, turn: Turn) -> Generator[None]:
        """Where `turn` is on the screen it stays, whatever happens above it: laid out before anything is painted.

        Where the end is followed, the layout itself keeps it in view, and to scroll would end that.
        """
        with self.app.batch_update():
            yield
            place = turn.virtual_region.y - self.scroll_y  # now: somebody may have scrolled meanwhile
            self.screen._refresh_layout()  # pyright: ignore[reportPrivateUsage]
            if not self._follows:
                self.scroll_to(y=turn.virtual_region.y - place, animate=False, force=True, immediate=True)

    @property
    def _follows(self) -> bool:
        """Whether the end stays in view when something is added."""
        return self._anchored and not self._anchor_released

    async def _trim(self) -> None:
        """Let go of the oldest messages while the end is in view."""
        if len(self._turns) > _MOST and self.is_vertical_scroll_end and self._is_far(self._to - 2 * PAGE):
            async with self._paging:
                await self._remove_before(self._to - 2 * PAGE)

    def _is_far(self, position: int) -> bool:
        """Whether the message there is so far from what is in view that it would not be loaded."""
        turn = self._turns.get(self._ids[position])
        if turn is None:
            return False
        y, height = turn.virtual_region.y, self.size.height
        return y < self.scroll_y - height or y > self.scroll_y + 2 * height

    def _blocks(self, start: int, stop: int) -> list[Widget]:
        """Blocks for the messages at positions `start` to `stop`."""
        blocks: list[Widget] = []
        found = {record.id: record for record in self._read(self._ids[start:stop])}
        for position in range(start, stop):
            record = found.get(self._ids[position]) or _missing(self._ids[position], position)
            if record.id == self._horizon and not self.query(Horizon):
                blocks.append(Horizon())
            if record.role == "user":
                self._turns[record.id] = UserTurn(record.text, record=record)
            else:
                self._turns[record.id] = AnswerTurn(record, live=record.id == self.live)
            blocks.append(self._turns[record.id])
        return blocks

    async def _insert(self, blocks: Sequence[Widget]) -> None:
        """Mount at the end, but before questions that wait."""
        await self.query(Welcome).remove()
        await self.mount_all(blocks, before=next((block for block in self.children if _waits(block)), None))

    async def _remove_before(self, position: int) -> None:
        """Take away the messages before `position`, and the remarks between them."""
        if position == self._from:
            return
        first = self.children.index(self._turns[self._ids[position]])
        for message in self._ids[self._from : position]:
            self._turns.pop(message, None)
        self._from = position
        await self.remove_children(list(self.children[:first]))

    async def _remove_blocks(self) -> None:
        """Take all away but questions that wait."""
        self._turns.clear()
        await self.remove_children([block for block in self.children if not _waits(block)])

    async def _remove_from(self, position: int) -> None:
        """Take away the messages from `position` on, and the remarks between and after them."""
        leaving = [message for message in self._ids[position : self._to] if message in self._turns]
        if leaving:
            at = self.children.index(self._turns[leaving[0]])
            gone = [block for block in self.children[at:] if not _waits(block)]
            for message in leaving:
                del self._turns[message]
            self._to = position
            await self.remove_children(gone)


def _waits(block: Widget) -> bool:
    return isinstance(block, UserTurn) and block.record is None


def _missing(message: int, position: int) -> Record:
    """Stands in for a message that another floe-chat has deleted."""
    words = "(deleted in another floe-chat window)"
    return Record(message, 0, None, position, "user", words, "complete", 0, "", "", None, (), 1, 1)
