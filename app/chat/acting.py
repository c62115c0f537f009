"""The actions on one message: edit it, answer again, continue, fork, delete, and switch between its versions."""

from __future__ import annotations

from dataclasses import dataclass

from ..history import Message
from .answering import Answering
from .chats import Chats
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .others import Others
from .questions import Questions
from .view import View


@dataclass(frozen=True, slots=True)
class Acting:
    """Runs actions on messages, by name; no version is lost."""

    _dialogue: Dialogue
    _model: ChatModel
    _answering: Answering
    _questions: Questions
    _chats: Chats
    _others: Others
    _view: View

    async def again(self) -> None:
        """Answer the last question again, or (while that answer is read for or written) three times: a terminal sends
        a key that is held as presses that follow each other.
        """
        running = self._answering.newest
        if running is not None and running.again and self._model.answering and not self._others.open:
            self._others.take_in(running)
            return
        await self.act_on_last("answer_again", "assistant", "user")
        if self._answering.newest is not running and self._answering.newest is not None:
            self._answering.newest.again = True

    async def act(self, action: str, message: Message) -> None:
        """Do `action` to a message, if nothing prevents it. Raises FloeError: the history cannot be read."""
        remark = self._view.gauges.remark
        await self._others.leave()
        if self._model.phase is not Phase.READY and action in ("answer_again", "continue_answer"):
            loading = self._model.phase is Phase.LOADING
            remark("Wait until the model has loaded" if loading else self._questions.busy)
        elif self._answering.shown:
            remark(self._questions.busy)
        else:
            await self._change(action, message)

    async def act_on_last(self, action: str, *roles: str) -> None:
        """Do `action` to the last message of one of these `roles`."""
        for message in reversed(self._dialogue.messages(self._dialogue.ids[-2:])):
            if message.role in roles:
                await self.act(action, message)
                return
        self._view.gauges.remark("There is no message yet")

    async def _change(self, action: str, message: Message) -> None:
        match action:
            case "edit_message":
                self._questions.edit(message)
            case "answer_again":
                await self._answer_again(message)
            case "continue_answer" if message.id == self._dialogue.ids[-1]:
                await self._continue(message)
            case "continue_answer":
                self._view.gauges.remark("Only the last answer can be continued")
            case "fork_chat":
                await self._chats.fork(message)
            case "delete_message":
                await self._chats.delete_from(message)
            case _:
                await self._switch(message, -1 if action == "older_version" else 1)

    async def _switch(self, message: Message, step: int) -> None:
        """Show another version of a message, and the branch that follows it."""
        await self._dialogue.settled()
        if self._dialogue.switch(message, step):
            await self._view.messages.change(self._dialogue.ids, follow=False)
            self._answering.measure_context()
            self._view.messages.select_at(message.position)
        else:
            self._view.gauges.remark(f"This message has no {'earlier' if step < 0 else 'later'} version")

    async def _answer_again(self, message: Message) -> None:
        """Answer again: an answer gets a sibling, a question is answered (again)."""
        if message.role == "assistant":
            await self._answering.start(instead=message)
            return
        at = self._dialogue.ids.index(message.id) + 1
        if at == len(self._dialogue.ids):
            await self._answering.start()
        elif (answer := self._dialogue.message(self._dialogue.ids[at])) is not None:
            await self._answer_again(answer)

    async def _continue(self, message: Message) -> None:
        remark = self._view.gauges.remark
        if message.role != "assistant":
            await self._answer_again(message)
        elif message.state == "streaming":
            remark("Another floe-chat is writing this answer")
        elif message.state == "complete" and message.stats is not None and message.stats.stop_reason == "stop":
            remark("This answer is complete")
        else:
            await self._answering.start(more_of=message)
