"""Whole chats: begin or open one, rename, delete or export this one, and undo deletions."""

from __future__ import annotations

from ...models.errors import FloeError, UsageError
from ..history import ChatSetup, History, Message
from .answering import Answering
from .dialogue import Dialogue
from .export_file import write_chat
from .model import ChatModel, Phase
from .others import Others
from .questions import Questions
from .view import View

_RECALLED = 100  # messages of an opened chat whose questions Up brings back


class Chats:
    """Changes which conversation is on the screen."""

    def __init__(
        self,
        history: History,
        dialogue: Dialogue,
        model: ChatModel,
        answering: Answering,
        questions: Questions,
        others: Others,
        view: View,
    ) -> None:
        self._history = history
        self._dialogue = dialogue
        self._model = model
        self._answering = answering
        self._questions = questions
        self._others = others
        self._view = view
        self._setup = dialogue.setup  # of a new chat
        self._deletions: list[tuple[int, int]] = []  # marks and chats of what was deleted here, newest last

    async def begin(self) -> None:
        """Start another chat; this one stays in the history."""
        if self._model.phase is not Phase.BROKEN:
            await self._leave()
            self._dialogue.begin_anew(self._model.setup_of_new(self._setup))
            await self._show()

    async def open(self, conversation: int, message: int | None = None, *, own_model: bool = True) -> None:
        """Show another chat; with `message`, on the branch that holds it and with it in view.

        own_model: that chat's model answers from now on, if it is still installed.
        """
        await self._leave()
        self._dialogue.open(conversation)
        if message is not None and message not in self._dialogue.ids:
            self._history.switch(conversation, self._history.newest_leaf(message))
            await self._dialogue.reload()
        await self._show()
        recent = self._dialogue.messages(self._dialogue.ids[-_RECALLED:])
        self._view.field.remember([known.text for known in recent if known.role == "user" and known.text])
        if message is not None:
            await self._view.messages.go_to(message)
        if own_model and (remark := self._model.change_to_its_own()):
            await self._view.messages.note(remark)

    async def reopen(self, conversation: int, *, own_model: bool) -> None:
        """`open` at the start of the program; a failure is shown."""
        await self._history.settled()
        try:
            await self.open(conversation, own_model=own_model)
        except FloeError as error:
            await self._view.messages.explain(error)

    async def open_last(self) -> None:
        """Open the last used chat."""
        await self._history.settled()
        newest = self._history.newest()
        if newest is None:
            self._view.gauges.remark("There is no earlier chat")
        elif newest.id == self._dialogue.id:
            self._view.gauges.remark("This is the last chat")
        else:
            await self.open(newest.id)

    async def fork(self, message: Message) -> None:
        """Continue in a copy of this chat up to `message`."""
        conversation = self._history.fork(message.id)
        await self._history.settled()
        await self._leave()
        self._dialogue.open(conversation)
        await self._show()
        self._view.gauges.remark("This is a copy of the chat up to that message; the original is unchanged")

    def rename(self, title: str) -> None:
        """Give this chat a title."""
        self._dialogue.rename(" ".join(title.split()))
        self._questions.show_name()

    def set_up(self, title: str, setup: ChatSetup) -> None:
        """Answer this chat with `setup` from now on, and rename it if it had another title."""
        if title != self._dialogue.name:
            self._dialogue.rename(title)
        self._dialogue.set_up(setup)
        self._model.ask_for_its_quality()
        self._questions.show_name()

    async def delete(self) -> None:
        """Delete this chat, and start another."""
        if (conversation := self._dialogue.id) is None:
            self._view.gauges.remark("This chat is empty: there is nothing to delete")
            return
        await self.begin()
        self._deletions.append((self._history.delete(conversation), conversation))
        self._view.gauges.remark("Chat deleted; /undo restores it")

    async def delete_from(self, message: Message) -> None:
        """Delete a message and all that follow it."""
        self._deletions.append((await self._dialogue.delete(message), message.conversation))
        await self._view.messages.change(self._dialogue.ids, follow=False)
        if not self._dialogue.ids:
            await self._view.messages.show(())
        self._answering.measure_context()
        self._view.gauges.remark("Deleted with all messages after it; /undo restores them")
        self._view.field.take_focus()

    async def undo(self) -> None:
        """Restore the last deleted chat or messages, and show them; a second call restores the deletion before."""
        if not self._deletions:
            self._view.gauges.remark("There is nothing to restore")
            return
        mark, conversation = self._deletions.pop()
        if conversation == self._dialogue.id:
            await self._dialogue.undo(mark)
            await self._view.messages.change(self._dialogue.ids)
            self._answering.measure_context()
        else:
            self._history.undo(mark)
            await self._history.settled()
            await self.open(conversation)
        self._view.gauges.remark("Restored")

    async def export(self, name: str) -> None:
        """Write this chat to a new file."""
        if (conversation := self._dialogue.id) is None:
            raise UsageError("This chat is empty: there is nothing to export", "", "Ask something first.")
        await self._history.settled()
        file = write_chat(self._history.tree(conversation), name)
        await self._view.messages.note(f"Exported to {file.absolute()}")

    async def _leave(self) -> None:
        """Stop what runs for the conversation on the screen; queued text goes back into the field."""
        await self._others.leave()
        self._answering.leave()
        await self._questions.leave()

    async def _show(self) -> None:
        """Show the conversation from its end."""
        await self._view.messages.show(self._dialogue.ids)
        if self._model.phase is Phase.READY:
            self._view.gauges.say("ready", "$success")  # its former value belongs to the conversation that was left
        self._answering.measure_context()
        self._questions.show_name()
        self._model.ask_for_its_quality()
        self._view.field.take_focus()
