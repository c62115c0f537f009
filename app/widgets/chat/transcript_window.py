"""Which messages of a branch are mounted: a window that moves as one scrolls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from textual.containers import VerticalScroll
from textual.widget import Widget

from ...history import Message as Record
from .answer import AnswerTurn
from .blocks import Horizon, Welcome
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
