"""Three other answers to the last question, side by side, of which the person picks one."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.events import Stats
from ...models.errors import FloeError
from ..history import Message
from .answering import Answering, Running
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .questions import Questions
from .view import Column, View

COUNT = 3


@dataclass(slots=True)
class _Slot:
    """A column and its answer; while it `waits`, that is still to be asked for."""

    column: Column
    running: Running | None = None
    waits: bool = True


class Others:
    """Asks for the answers, and shows the one that was picked in the chat; the others stay beside it as its siblings.

    The chat shows the answer that was there before until one is picked.
    """

    def __init__(
        self, dialogue: Dialogue, model: ChatModel, answering: Answering, questions: Questions, view: View
    ) -> None:
        self._dialogue = dialogue
        self._model = model
        self._answering = answering
        self._questions = questions
        self._view = view
        self._slots: list[_Slot] = []  # while the page is open
        self._restarts = False  # the answer that is being stopped will be asked for again

    @property
    def open(self) -> bool:
        """Whether the answers are on the screen."""
        return bool(self._slots)

    async def ask(self) -> None:
        """Have the last question answered three times more."""
        remark = self._view.gauges.remark
        if self.open:
            return
        if self._model.phase is not Phase.READY:
            remark("Wait until the model has loaded" if self._model.phase is Phase.LOADING else self._questions.busy)
        elif not self._dialogue.ids:
            remark("There is no message yet")
        else:
            self._open()
            await self.go_on()

    def take_in(self, first: Running) -> None:
        """Two others besides `first`, which is being written. If nothing came of it yet it is stopped, so that all
        three are computed together; else the others follow it.
        """
        self._open()
        slot = self._slots[0]
        slot.running, first.place = first, slot.column
        slot.column.begin(first.so_far)
        self._view.messages.live = None
        self._restarts = slot.waits = first.blank
        if self._restarts:
            self._model.stop()

    async def go_on(self, *, stopped: bool = False) -> None:
        """The model can answer: ask for the answers that wait for that, unless the person `stopped` the one before."""
        if stopped and not self._restarts:
            self._give_up()
        self._restarts = False
        waiting = [slot for slot in self._slots if slot.waits]
        if not waiting or self._model.phase is not Phase.READY:
            return
        try:
            begun = await self._answering.start_beside([slot.column for slot in waiting], self._present)
        except FloeError as error:
            for slot in waiting:
                slot.waits = False
                await slot.column.explain(error)
            return
        for slot, running in zip(waiting, begun, strict=True):
            slot.running, slot.waits = running, False
            slot.column.begin(running.message)

    def show_stats(self, stats: Stats) -> None:
        """Newer figures came."""
        for slot in self._slots:
            if slot.running is not None and slot.running.request == stats.request:
                slot.column.count(stats.new_tokens)

    async def pick(self, at: int) -> None:
        """Go on with answer number `at`, from 0: those that are still being written are stopped, but for this one."""
        if at >= len(self._slots):
            return
        slot = self._slots[at]
        if slot.waits or slot.running is None or (slot.running.blank and not self._is_live(slot.running)):
            state = "has not begun yet" if slot.waits else "has no text"
            self._view.beside.remark(f"Answer {at + 1} {state}")
        else:
            await self._close(slot.running)
            await self._questions.send_next()

    async def escape(self) -> None:
        """Stop what is being written; if nothing is, or it is being stopped, go back to the chat."""
        if self._model.answering or any(slot.waits for slot in self._slots):
            self._give_up()
            self._model.stop()
        else:
            await self.leave()
            await self._questions.send_next()

    async def leave(self) -> None:
        """Go back to the chat; answers that are being written are stopped."""
        if self.open:
            await self._close()

    @property
    def _present(self) -> Message | None:
        """The answer that the chat shows."""
        last = self._dialogue.message(self._dialogue.ids[-1])
        return last if last is not None and last.role == "assistant" else None

    def _is_live(self, running: Running) -> bool:
        return self._answering.live(running.request) is running

    def _give_up(self) -> None:
        """Ask for no more answers."""
        for slot in self._slots:
            if slot.waits:
                slot.waits = False
                slot.column.give_up()

    def _open(self) -> None:
        asked = [message.text for message in self._dialogue.messages(self._dialogue.ids[-2:]) if message.role == "user"]
        remark = "" if self._dialogue.setup.sampling.temperature else "at temperature 0 all answers are the same"
        columns = self._view.beside.open("".join(asked[-1:]), remark, COUNT, self)
        self._slots = [_Slot(column) for column in columns]

    async def _close(self, picked: Running | None = None) -> None:
        """Show the chat again, with the answer that was `picked` or the one before; if there is none, with the first
        that has text.
        """
        begun = [slot.running for slot in self._slots if slot.running is not None]
        self._slots = []
        self._view.beside.close()
        self._view.field.take_focus()
        try:
            await self._show(begun, picked)
        except FloeError as error:  # the history cannot be read, or the chat was deleted in another window
            self._model.stop()
            await self._view.messages.explain(error)

    async def _show(self, begun: list[Running], picked: Running | None) -> None:
        for running in begun:
            if running is not picked:
                self._answering.let_go(running)
        dialogue, messages = self._dialogue, self._view.messages
        if picked is None and self._present is None:
            picked = next((running for running in begun if not running.blank), None)
        await (dialogue.reload() if picked is None else dialogue.show(picked.message))
        await messages.change(dialogue.ids[:-1], follow=False)
        goes_on = picked is not None and self._is_live(picked)
        if picked is not None and goes_on:
            self._answering.show_in_chat(picked)
        await messages.change(dialogue.ids)
        if not goes_on:
            self._answering.measure_context()
