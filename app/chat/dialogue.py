"""The chat on the screen: one branch of a conversation in the history, and the part of it that the model gets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ...engine import state_folder
from ...models.errors import FloeError
from ..client.interface import PromptTurn as PromptTurn
from ..history import Answer, AnswerStats, Attachment, ChatSetup, History, Message, MessageState, shortened
from ..history.records import first_line, new_id, now

_PAGE = 200  # messages per read while looking back for what fits the window
_CHARACTERS_PER_TOKEN = 16  # more than any text has; older messages cannot fit


class Dialogue:
    """Holds the ids of the branch on the screen, and those of its messages that were read or written here.

    The history writes later, on its own thread; what was just written is remembered here.

    Attributes:
        setup: model, sampling and prompt that answer it. title: the user's, or "".
        ids: the messages from the first to the last.
    """

    def __init__(self, history: History, setup: ChatSetup) -> None:
        self._history = history
        self._conversation: int | None = None
        self._drawn: int | None = None  # the id that the next one gets
        self._known: dict[int, Message] = {}
        self.setup = setup
        self.title = ""
        self.ids: tuple[int, ...] = ()

    @property
    def id(self) -> int | None:
        """The conversation's id; None until its first question."""
        return self._conversation

    @property
    def number(self) -> int:
        """By what the engine knows the conversation, also before its first question; 0 where it is not saved."""
        if not self._history.saved:
            return 0
        if self._conversation is None and self._drawn is None:
            self._drawn = new_id()
        return self._conversation or self._drawn or 0

    @property
    def name(self) -> str:
        """What to call it; "" while it is empty."""
        if self.title or not self.ids:
            return self.title
        return shortened(first_line(self.messages(self.ids[:1])[0].text)) if self.messages(self.ids[:1]) else ""

    def begin_anew(self, setup: ChatSetup) -> None:
        """Leave this conversation; the next question begins a new one."""
        self._conversation, self.setup, self.title = None, setup, ""
        self._known.clear()
        self.ids = ()

    def open(self, conversation: int) -> None:
        """Show another conversation. Raises FloeError: it is gone, or the history cannot be read."""
        found = self._history.conversation(conversation)
        ids = self._history.branch(found.head)
        self.begin_anew(found.setup)
        self._conversation, self.title, self.ids = found.id, found.title, ids

    def messages(self, ids: Sequence[int]) -> list[Message]:
        """The messages `ids`; those that no longer exist are left out."""
        unknown = [identity for identity in ids if identity not in self._known]
        read = {message.id: message for message in self._history.messages(unknown)} if unknown else {}
        return [self._known.get(identity) or read[identity] for identity in ids if identity in {**self._known, **read}]

    def message(self, identity: int) -> Message | None:
        """One message."""
        return next(iter(self.messages([identity])), None)

    def ask(self, text: str, attachments: Sequence[Attachment] = (), instead: Message | None = None) -> Message:
        """Add a question at the end, or `instead` of an earlier message: that stays, on a branch of its own."""
        if self._conversation is None:
            self._conversation, self._drawn = self._history.begin(self.setup, self.title, self._drawn), None
        if instead is not None:
            self._cut(instead)
        parent = self.ids[-1] if self.ids else None
        identity = self._history.ask(self._conversation, parent, text, attachments)
        return self._add(identity, "user", text, "complete", tuple(attachments), instead)

    def answering(self, model: str, preset: str, instead: Message | None = None) -> tuple[Message, Answer]:
        """Begin an answer to the last question, or `instead` of one that there is."""
        if instead is not None:
            self._cut(instead)
        answer = self._history.answering(self.ids[-1], model, preset)
        return self._add(answer.id, "assistant", "", "streaming", (), instead, model, preset), answer

    def beside(self, shown: Message | None, count: int, model: str, preset: str) -> list[tuple[Message, Answer]]:
        """Begin `count` answers to the last question, as siblings of the answer `shown`, which stays the one that the
        chat shows; without one, the first of them is shown next time.
        """
        ids, begun = self.ids, list[tuple[Message, Answer]]()
        for _ in range(count):
            begun.append(self.answering(model, preset, shown))
            self.ids = ids
        if self._conversation is not None:
            self._history.switch(self._conversation, begun[0][0].id if shown is None else shown.id)
        return begun

    async def show(self, message: Message) -> None:
        """Show the branch that ends in a sibling of its last message."""
        if self._conversation is not None:
            self._history.switch(self._conversation, message.id)
            await self.reload()

    def remember(self, message: Message) -> None:
        """Show a message of this branch like this, whatever of it is written yet."""
        self._known[message.id] = message

    def continuing(self, message: Message, model: str, preset: str) -> tuple[Message, Answer]:
        """Continue the last answer."""
        answer = self._history.continuing(message, model, preset)
        self._known[message.id] = replace(message, state="streaming", stats=None)
        return self._known[message.id], answer

    def rewrite(self, message: Message, text: str) -> Message:
        """Put the user's text in an answer's place; the answer stays, on its own branch."""
        rewritten, answer = self.answering(message.model, message.preset, message)
        answer.append(text)
        answer.finish(None)
        return self.ended(rewritten, text, "complete", None)

    def ended(
        self, message: Message, text: str, state: MessageState, stats: AnswerStats | None, thought: str = ""
    ) -> Message:
        """Remember how an answer ended."""
        ended = replace(message, text=text, state=state, stats=stats, thought=thought)
        if message.id in self._known:
            self._known[message.id] = ended
        return ended

    def withdraw(self, message: Message, instead: Message | None = None) -> None:
        """Take away the last message: a question that could not be asked, or an answer without any text. The branch of
        the version `instead` of which it was asked for is shown again.
        """
        self._history.delete_message(message.id)
        before = self.ids[:-1]
        if instead is not None:
            with suppress(FloeError):  # it was deleted in another window
                head = self._history.newest_leaf(instead.id)
                self._history.switch(message.conversation, head)
                before = self._history.branch(head)
        if self.ids[-1:] != (message.id,):
            return  # it is not shown, or its conversation was left meanwhile
        self.ids = before
        if instead is not None:
            self._known[instead.id] = instead  # with the siblings that it had
        if not self.ids and message.siblings == 1 and self._conversation is not None:
            self._history.delete(self._conversation)
            self._conversation = None

    def switch(self, message: Message, steps: int) -> bool:
        """Show the branch of the sibling `steps` further, once all is written; False if there is none."""
        if self._conversation is None or message.siblings < 2:
            return False
        siblings = self._history.siblings(message.id)
        at = siblings.index(message.id) + steps if message.id in siblings else -1
        if not 0 <= at < len(siblings):
            return False
        head = self._history.newest_leaf(siblings[at])
        self._history.switch(self._conversation, head)
        self._show(self._history.branch(head))
        return True

    async def delete(self, message: Message) -> int:
        """Delete a message and all that follows it; returns what `undo` takes."""
        mark = self._history.delete_message(message.id)
        state_folder.forget(message.conversation)
        await self.reload()
        return mark

    async def undo(self, mark: int) -> None:
        """Take a deletion back."""
        self._history.undo(mark)
        await self.reload()

    async def reload(self) -> None:
        """Show this conversation's branch as it is in the history, once all is written."""
        conversation = self._conversation
        await self._history.settled()
        if conversation is not None and conversation == self._conversation:
            self._show(self._history.branch(self._history.conversation(conversation).head))

    def rename(self, title: str) -> None:
        """Give it a title."""
        self.title = title
        if self._conversation is not None:
            self._history.rename(self._conversation, title)

    def set_up(self, setup: ChatSetup) -> None:
        """Answer with `setup` from now on."""
        self.setup = setup
        if self._conversation is not None:
            self._history.set_up(self._conversation, setup)

    def turns(self, window: int, before: Message | None = None, asking: str = "") -> tuple[list[PromptTurn], list[int]]:
        """The messages that the model gets, and the id of each. They end with the last question, the last one `before`
        an answer, or `asking`, which is not in the history yet.

        The system prompt comes first; it and `asking` have no id. Roles alternate, as chat templates require: a
        question without an answer is left out. Messages too old for `window` tokens to hold are not even read.
        """
        kept: list[Message] = []
        ids = self.ids if before is None else self.ids[: self.ids.index(before.id)]
        room = window * _CHARACTERS_PER_TOKEN
        while ids and room > 0:
            page = self.messages(ids[-_PAGE:])
            ids = ids[:-_PAGE]
            room -= sum(len(prompt_of(message)) for message in page)
            kept = page + kept
        answered: list[Message] = []
        for message in kept:
            if message.role == "user":
                if answered and answered[-1].role == "user":
                    answered.pop()
                answered.append(message)
            elif answered and answered[-1].role == "user" and message.text.strip():
                answered.append(message)
        if asking and answered and answered[-1].role == "user":
            answered.pop()
        system = [PromptTurn("system", self.setup.system_prompt)] if self.setup.system_prompt else []
        turns = [PromptTurn(message.role, prompt_of(message), message.thought) for message in answered]
        last = [PromptTurn("user", asking)] if asking else []
        return system + turns + last, [message.id for message in answered]

    async def settled(self) -> None:
        """Wait until all is written, for `switch`; a lock is waited for a moment only."""
        await self._history.settled()

    def _cut(self, before: Message) -> None:
        """Leave out `before` and all that follows it."""
        self.ids = self.ids[: self.ids.index(before.id)] if before.id in self.ids else self.ids

    def _show(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._known.clear()  # numbers of siblings may have changed

    def _add(
        self,
        identity: int,
        role: str,
        text: str,
        state: MessageState,
        attachments: tuple[Attachment, ...],
        instead: Message | None,
        model: str = "",
        preset: str = "",
    ) -> Message:
        count = 1 if instead is None else instead.siblings + 1
        message = Message(
            *(identity, self._conversation or 0, self.ids[-1] if self.ids else None, len(self.ids)),
            *("user" if role == "user" else "assistant", text, state, now(), model, preset, None, attachments),
            *(count, count),
        )
        self.ids = (*self.ids, identity)
        self._known[identity] = message
        return message


def prompt_of(message: Message) -> str:
    """A message as the model gets it: its text and the attached files."""
    parts = [message.text]
    for file in message.attachments:
        fence = "```"
        while fence in file.text:
            fence += "`"
        parts.append(f"{file.name}:\n{fence}\n{file.text}\n{fence}")
    return "\n\n".join(part for part in parts if part)
