"""What the user wrote and the model has not received yet: queued questions, drafts, and a message being edited."""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from dataclasses import dataclass

from ...models.errors import FloeError
from ..background import later
from ..history import Attachment, History, Message, Unsent
from ..text.plain_text import printable
from .answering import Answering
from .dialogue import Dialogue
from .model import ChatModel, Phase
from .view import View, Waiting

_SAVE_SECONDS = 0.5  # the most that a killed process loses of a draft
_WAITS = {
    Phase.LOADING: "queued until the model is loaded",
    Phase.STOPPING: "queued until the last answer has stopped",
}


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued question."""

    text: str
    files: tuple[Attachment, ...]
    waiting: Waiting


class Questions:
    """Sends questions, now or when it is their turn, and saves unsent ones."""

    def __init__(
        self, history: History, dialogue: Dialogue, model: ChatModel, answering: Answering, view: View
    ) -> None:
        self._history = history
        self._dialogue = dialogue
        self._model = model
        self._answering = answering
        self._view = view
        self._queue: deque[Queued] = deque()
        self._editing: Message | None = None
        self._aside = Unsent("")  # what was in the field before that message
        self._unsent: tuple[Unsent, ...] | None = None  # as saved in the history; None before that is open
        self._next_save: TimerHandle | None = None

    @property
    def busy(self) -> str:
        """The remark shown while an answer is running."""
        return f"Stop the running answer first ({self._view.gauges.key('stop')})"

    async def send(self, text: str, files: tuple[Attachment, ...]) -> None:
        """Ask now, or queue the question; a message that is being edited gets a new version."""
        if refusal := self._refusal():
            self._view.field.take_back(text, files)
            self._view.gauges.remark(refusal)
        elif self._editing is not None:
            await self._send_edited(self._editing, text, files)
        elif self._model.phase is Phase.READY and not self._queue:
            await self._ask(text, files)
        else:
            note = _WAITS.get(self._model.phase, "queued until the answer has ended")
            waiting = await self._view.messages.queue(text, note, tuple(file.name for file in files))
            self._queue.append(Queued(text, files, waiting))

    async def send_next(self) -> None:
        """Ask the first queued question, if there is one."""
        if self._model.phase is Phase.READY and self._queue:
            queued = self._queue.popleft()
            await queued.waiting.withdraw()
            await self._ask(queued.text, queued.files)

    async def take_back(self) -> None:
        """Stop editing, else put the last queued question back into the field."""
        if self._editing is not None:
            self._stop_editing()
        elif self._queue:
            await self._take_back_last()

    async def take_back_queued(self) -> None:
        """Put all queued questions back into the field."""
        while self._queue:
            await self._take_back_last()

    async def leave(self) -> None:
        """The conversation is left: what waits goes back into the field."""
        await self.take_back_queued()
        if self._editing is not None:
            self._stop_editing(keep=True)

    def edit(self, message: Message) -> None:
        """Put a message into the field, to be changed."""
        if self._editing is not None:
            self._stop_editing(keep=True)
        field = self._view.field
        self._editing = message
        self._aside = Unsent(field.text, field.files)
        field.put(message.text, message.attachments)
        what = "question" if message.role == "user" else "answer"
        field.title(f"Editing the {what}", f"Enter saves a new version · {self._view.gauges.key('stop')} cancels")
        field.take_focus()

    def show_name(self) -> None:
        """Say on the field's frame which chat this is."""
        self._view.field.title(self._dialogue.name, self._dialogue.setup.persona)

    def _refusal(self) -> str:
        """Why nothing can be sent now, or None."""
        if self._model.phase is Phase.BROKEN:
            return "No model is loaded: the message above says why"
        if self._editing is not None and self._model.phase is not Phase.READY:
            return self.busy
        return ""

    async def _ask(self, text: str, files: tuple[Attachment, ...], instead: Message | None = None) -> None:
        question = self._dialogue.ask(text, files, instead)
        if await self._answering.start(asked=question, edited=instead):
            self.show_name()
        else:
            self._dialogue.withdraw(question, instead)
            self._view.field.take_back(text, files)

    async def _send_edited(self, message: Message, text: str, files: tuple[Attachment, ...]) -> None:
        """Put `text` in the place of an earlier message, on a branch of its own."""
        self._end_editing(self._aside)
        if message.role == "user":
            await self._ask(text, files, message)
        elif text:
            self._dialogue.rewrite(message, text)
            await self._view.messages.change(self._dialogue.ids)
            self._answering.measure_context()

    def _stop_editing(self, *, keep: bool = False) -> None:
        """Put back what was in the field before; with `keep`, what was changed stays there too."""
        kept = self._drafts if keep else (self._aside,)
        self._view.field.put("")
        self._end_editing(*kept)

    def _end_editing(self, *drafts: Unsent) -> None:
        self._editing, self._aside = None, Unsent("")
        for draft in reversed(drafts):
            self._view.field.take_back(draft.text, draft.files)
        self.show_name()

    async def _take_back_last(self) -> None:
        queued = self._queue.pop()
        await queued.waiting.withdraw()
        self._view.field.take_back(queued.text, queued.files)

    # Saved for the next start

    @property
    def _drafts(self) -> tuple[Unsent, ...]:
        """All unsent text; a message being edited only if it was changed."""
        text, files = self._view.field.text, self._view.field.files
        edited = self._editing
        if edited is not None and text == printable(edited.text) and set(files) <= set(edited.attachments):
            text, files = "", ()
        return tuple(draft for draft in (Unsent(text, files), self._aside) if draft.text.strip() or draft.files)

    def save_soon(self) -> None:
        """Drafts changed, or the queue."""
        if self._next_save is None:
            self._next_save = later(self._view.pump, _SAVE_SECONDS, self.save)

    def save(self) -> None:
        """Save drafts and queued questions for the next start."""
        self._next_save = None
        if self._unsent is None:
            return
        unsent = (*(Unsent(queued.text, queued.files) for queued in self._queue), *self._drafts)
        if unsent != self._unsent:
            self._history.keep_unsent(unsent)
            self._unsent = unsent

    async def take_over(self) -> None:
        """Put drafts and queued questions of the last run into the field, for the person to send."""
        try:
            left = self._history.take_over_unsent()
        except FloeError as error:
            await self._view.messages.explain(error)
            left = []
        for question in reversed(left):
            self._view.field.take_back(question.text, question.files)
        if len(left) > 1:
            words = "Questions that were queued when floe-chat ended are in the text field"
            await self._view.messages.note(words)
        self._unsent = ()
        self.save_soon()
