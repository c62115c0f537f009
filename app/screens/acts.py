"""Actions on messages: copy, edit, answer again, continue, fork, delete, and switch between versions."""

from __future__ import annotations

from textual import on

from ...models.errors import FloeError
from ..bridge import EngineBridge
from ..history import History, Message, Setup, Unsent
from ..widgets.answer import AnswerTurn
from ..widgets.blocks import ErrorBlock
from ..widgets.keys import key_of
from ..widgets.turns import AGAIN, CODE, COPY, DELETE, EDIT, FORK, MORE, NEWER, OLDER, Turn
from .engine_view import Phase
from .talk import Talk


class Acts(Talk):
    """A talk whose messages can be changed; no version is lost."""

    _code = (0, -1)  # the answer whose code was copied last, and which of its blocks

    def __init__(self, bridge: EngineBridge, history: History, setup: Setup, max_new_tokens: int) -> None:
        super().__init__(bridge, history, setup, max_new_tokens)
        self._deletions: list[tuple[int, int]] = []  # marks and chats of what was deleted here, newest last

    @on(Turn.Act)
    async def _act(self, event: Turn.Act) -> None:
        record = event.turn.record
        if record is None:
            return
        if event.action == COPY:
            self._copy(event.turn.text, "the message")
        elif event.action == CODE:
            self._copy_code_of(event.turn)
        elif self._phase is not Phase.READY and event.action in (AGAIN, MORE):
            self._status.remark(self._busy if self._phase is not Phase.LOADING else "Wait until the model has loaded")
        elif self._live is not None and not self._live.left:
            self._status.remark(self._busy)
        else:
            try:
                await self._change(event.action, record)
            except FloeError as error:
                await self._transcript.add(ErrorBlock(error.title, error.cause, error.hint))

    async def _change(self, action: str, record: Message) -> None:
        ids = self._dialogue.ids
        if action == EDIT:
            self._edit(record)
        elif action == AGAIN:
            await self._again(record)
        elif action == MORE and record.id == ids[-1]:
            await self._go_on(record)
        elif action == MORE:
            self._status.remark("Only the last answer can be continued")
        elif action == FORK:
            await self._fork(record)
        elif action == DELETE:
            await self._delete(record)
        elif action in (OLDER, NEWER):
            if self._dialogue.switch(record, -1 if action == OLDER else 1):
                await self._transcript.change(self._dialogue.ids, follow=False)
                self._measure_context()
                self._select_at(record.position)
            else:
                self._status.remark(f"This message has no {'earlier' if action == OLDER else 'later'} version")

    # The last ones, by key or command

    def copy_last(self, what: str = "") -> None:
        """Copy the last answer, or its code."""
        turn = next((turn for turn in reversed(self._answers())), None)
        if turn is None:
            self._status.remark("There is no answer yet")
        elif what == CODE:
            self._copy_code_of(turn)
        else:
            self._copy(turn.text, "the last answer")

    async def answer_again(self) -> None:
        """Answer the last question again."""
        await self._act_on_last(AGAIN, "assistant", "user")

    async def go_on(self) -> None:
        """Continue the last answer."""
        await self._act_on_last(MORE, "assistant")

    async def edit_last(self) -> None:
        """Change the last question."""
        await self._act_on_last(EDIT, "user")

    async def fork_here(self) -> None:
        """Continue in a copy of this chat."""
        await self._act_on_last(FORK, "assistant", "user")

    async def _act_on_last(self, action: str, *roles: str) -> None:
        for message in reversed(self._dialogue.messages(self._dialogue.ids[-2:])):
            if message.role in roles and (turn := self._transcript.turn(message.id)) is not None:
                await self._act(Turn.Act(turn, action))
                return
        self._status.remark("There is no message yet")

    # One message

    def _copy_code_of(self, turn: Turn) -> None:
        codes = turn.codes() if isinstance(turn, AnswerTurn) else ()
        if not codes or turn.record is None:
            self._status.remark("There is no code block in this message")
            return
        message, last = self._code
        at = (last + 1) % len(codes) if message == turn.record.id else 0
        self._code = (turn.record.id, at)
        which = f"code block {at + 1} of {len(codes)}" if len(codes) > 1 else "the code"
        self._copy(codes[at], which)

    def _edit(self, record: Message) -> None:
        if self._editing is not None:
            self._stop_editing(keep=True)
        self._editing = record
        self._aside = Unsent(self._composer.text, self._writing.chips.take_all())
        self._composer.put(record.text)
        self._writing.chips.give_back(record.attachments)
        what = "question" if record.role == "user" else "answer"
        self._writing.title(f"Editing the {what}", f"Enter saves a new version · {key_of(self, 'stop')} cancels")
        self._composer.focus()

    async def _again(self, record: Message) -> None:
        """Answer again: an answer gets a sibling, a question is answered (again)."""
        if record.role == "assistant":
            await self._answer(instead=record)
            return
        at = self._dialogue.ids.index(record.id) + 1
        if at == len(self._dialogue.ids):
            await self._answer()
        elif (answer := self._dialogue.message(self._dialogue.ids[at])) is not None:
            await self._again(answer)

    async def _go_on(self, record: Message) -> None:
        if record.role != "assistant":
            await self._again(record)
        elif record.state == "streaming":
            self._status.remark("Another floe-chat is writing this answer")
        elif record.state == "complete" and record.stats is not None and record.stats.stop_reason == "stop":
            self._status.remark("This answer is complete")
        else:
            await self._answer(more_of=record)

    async def _fork(self, record: Message) -> None:
        conversation = self._history.fork(record.id)
        self._history.settle()
        await self._leave()
        self._dialogue.open(conversation)
        await self._show_dialogue()
        self._status.remark("This is a copy of the chat up to that message; the original is unchanged")

    async def _delete(self, record: Message) -> None:
        self._deletions.append((self._dialogue.delete(record), record.conversation))
        await self._transcript.change(self._dialogue.ids, follow=False)
        if not self._dialogue.ids:
            await self._transcript.show(())
        self._measure_context()
        self._status.remark("Deleted with all messages after it; /undo restores them")
        self._composer.focus()

    def _select_at(self, position: int) -> None:
        ids = self._dialogue.ids
        if self._transcript.has_focus and position < len(ids):
            self._transcript.select(ids[position])

    def _answers(self) -> list[AnswerTurn]:
        return list(self._transcript.query(AnswerTurn))
