"""Actions on whole chats: open, rename, delete, export; and what the history reports."""

from __future__ import annotations

from textual import on
from textual.timer import Timer

from ...models.errors import FloeError, UsageError
from ..bridge import HistoryTold
from ..chat_file import write_chat
from ..history import Changed, Ready, Recovered, Trouble, Unsent
from ..widgets.blocks import ErrorBlock, Note
from ..widgets.chips import Chips
from ..widgets.composer import Composer
from ..widgets.files import meant
from .acts import Acts
from .history import Choice, HistoryScreen

_SAVE_SECONDS = 0.5  # what a killed process loses of what is being written
_LOOK_SECONDS = 0.2  # between two looks at the history while its page is open
_RECALLED = 100  # messages of an opened chat whose questions Up brings back


class Chats(Acts):
    """A talk that can be left for another one."""

    _unsent: tuple[Unsent, ...] | None = None  # as the history knows it; None before that is open

    _next_save: Timer | None = None
    _looking: Timer | None = None

    @on(Composer.Changed)
    @on(Composer.Sent)
    @on(Chips.Changed)
    def _save_soon(self) -> None:
        """Drafts changed, or the queue."""
        if self._next_save is None:
            self._next_save = self.set_timer(_SAVE_SECONDS, self.keep_unsent)

    async def _become_ready(self, words: str) -> None:
        await super()._become_ready(words)
        self._save_soon()  # a queued question may have been asked

    async def open(self, conversation: int, message: int | None = None, *, own_model: bool = True) -> None:
        """Show another chat; with `message`, on the branch that holds it and with it in view.

        own_model: the model of that chat answers from now on, if it is still here.
        """
        await self._leave()
        self._dialogue.open(conversation)
        if message is not None and message not in self._dialogue.ids:
            self._history.switch(conversation, self._history.newest_leaf(message))
            self._dialogue.reload()
        await self._show_dialogue()
        recent = self._dialogue.messages(self._dialogue.ids[-_RECALLED:])
        self._composer.remember([known.text for known in recent if known.role == "user" and known.text])
        if message is not None:
            await self._transcript.go_to(message)
        if own_model and (remark := await self._change_to_its_own()):
            await self._transcript.add(Note(remark))

    async def reopen(self, conversation: int, *, own_model: bool) -> None:
        """`open` at the start of the program; what stands against it is shown."""
        try:
            await self.open(conversation, own_model=own_model)
        except FloeError as error:
            await self._transcript.add(_explained(error))

    async def rename(self, title: str) -> None:
        """Give this chat a title."""
        self._dialogue.rename(" ".join(title.split()))
        self._show_name()

    async def delete_chat(self) -> None:
        """Delete this chat, and start another."""
        if (conversation := self._dialogue.id) is None:
            self._status.remark("This chat is empty: there is nothing to delete")
            return
        await self.new_chat()
        self.deleted(conversation)

    def deleted(self, conversation: int) -> None:
        """Delete a chat; `undo` restores it."""
        self._deletions.append((self._history.delete(conversation), conversation))
        self._status.remark("Chat deleted; /undo restores it")

    async def undo(self) -> None:
        """Restore the last deleted chat or messages, and show them; again restores the one before."""
        if not self._deletions:
            self._status.remark("There is nothing to restore")
            return
        mark, conversation = self._deletions.pop()
        if conversation == self._dialogue.id:
            self._dialogue.undo(mark)
            await self._transcript.change(self._dialogue.ids)
            self._measure_context()
        else:
            self._history.undo(mark)
            self._history.settle()
            await self.open(conversation)
        self._status.remark("Restored")

    async def open_last(self) -> None:
        """Open the chat that was written to last."""
        newest = self._history.newest()
        if newest is None:
            self._status.remark("There is no earlier chat")
        elif newest.id == self._dialogue.id:
            self._status.remark("This is the last chat")
        else:
            await self.open(newest.id)

    def open_history(self, words: str = "") -> None:
        """Show earlier chats."""
        # What other programs write is seen by looking only.
        self._looking = self.set_interval(_LOOK_SECONDS, lambda: self._bridge.drain(self))
        self.app.push_screen(HistoryScreen(self._history, words, self._dialogue.id), self._chosen)

    async def _chosen(self, choice: Choice | None) -> None:
        if self._looking is not None:
            self._looking.stop()
        try:
            if choice is None:
                return
            if choice.conversation is not None:
                await self.open(choice.conversation, choice.message)
            elif self._dialogue.id in choice.deleted:
                await self.new_chat()
        except FloeError as error:
            await self._transcript.add(_explained(error))

    async def export(self, name: str) -> None:
        """Write this chat to a new file."""
        if (conversation := self._dialogue.id) is None:
            raise UsageError("This chat is empty: there is nothing to export", "", "Ask something first.")
        self._history.settle()
        file = write_chat(self._history.tree(conversation), name)
        await self._transcript.add(Note(f"Exported to {file.absolute()}"))

    def attach(self, path: str) -> None:
        """Attach a file to the next question."""
        self._writing.chips.attach(meant(path))

    def keep_unsent(self) -> None:
        """Save drafts and queued questions for the next start."""
        self._next_save = None
        if self._unsent is None:
            return
        unsent = (*(Unsent(queued.text, queued.files) for queued in self._queue), *self._drafts)
        if unsent != self._unsent:
            self._history.keep_unsent(unsent)
            self._unsent = unsent

    async def _take_over_unsent(self) -> None:
        """Put drafts and queued questions of the last run into the text field, for the person to send."""
        try:
            left = self._history.take_over_unsent()
        except FloeError as error:
            await self._transcript.add(_explained(error))
            left = []
        for question in reversed(left):
            self._composer.take_back(question.text, question.files)
        if len(left) > 1:
            await self._transcript.add(Note("Questions that were queued when floe-chat ended are in the text field"))
        self._unsent = ()
        self._save_soon()

    @on(HistoryTold)
    async def _hear(self, told: HistoryTold) -> None:
        match told.event:
            case Ready(_saved, interrupted):
                if interrupted:
                    many = "An answer was" if interrupted == 1 else f"{interrupted} answers were"
                    words = f"{many} cut off when floe-chat last ended. The text so far is saved; /last opens the chat"
                    await self._transcript.add(Note(words))
                await self._take_over_unsent()
            case Trouble(title, cause, hint):
                self.app.notify(f"{cause} {hint}".strip(), title=title, severity="warning", timeout=15, markup=False)
            case Recovered():
                self.app.notify("All unsaved messages are on the disk now.", title="The history is saved again")
            case Changed():
                if isinstance(self.app.screen, HistoryScreen):
                    self.app.screen.refresh_list()


def _explained(error: FloeError) -> ErrorBlock:
    return ErrorBlock(error.title, error.cause, error.hint)
