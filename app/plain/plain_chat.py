"""`floe-chat --plain`: the chat line by line, for screen readers, braille displays and slow lines.

The screen is painted cell by cell, which no screen reader can follow. Here nothing is painted and no cursor moves. The
conversation goes to stdout as it comes, without Markdown's marks; remarks go to stderr, on their own lines. Engine and
history are the screen's, so a chat can be continued in either.
"""

from __future__ import annotations

import io
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from ...engine.events import Failed, Finished, Loaded, Notice, Rule
from ...models import catalog
from ...models.errors import FloeError, TryAgainError
from ..arguments import need_text
from ..chat import model_choice
from ..chat.beginning import Beginning
from ..chat.dialogue import Dialogue
from ..client.engines import Engines
from ..client.interface import UNKNOWN_WINDOW, Choice, Client, Question, Submitted, TextDelta, ThoughtDelta
from ..client.thinking import limit_of_off
from ..history import Answer, AnswerStats, Attachment, ChatSetup, Conversation, History, Message
from ..history.exporting import thought_for
from ..settings.settings import Persona
from ..text.plain_text import printable
from .plain_commands import PlainCommands
from .plain_lines import remark, say
from .plain_markdown import PlainMarkdown, plain_text


class PlainAnswer:
    """Prints what it gets, after the model's `name`. `shown`: what it thinks too, and not only that it does.

    Attributes:
        text, thought: all of it so far. thought_tokens: of the latter.
    """

    def __init__(self, name: str, *, shown: bool) -> None:
        self._name, self._shown = printable(name), shown
        self._markdown = PlainMarkdown()
        self.text = self.thought = ""
        self.thought_tokens = 0
        self._named = self._thinking = False

    @property
    def begun(self) -> bool:
        """Whether any of it came."""
        return bool(self.text or self.thought)

    def think(self, text: str, tokens: int) -> None:
        """More of what the model thinks."""
        self.thought += text
        self.thought_tokens += tokens
        if not self._thinking:
            self._thinking = True
            remark("Thinking:" if self._shown else "The model is thinking.")
        if self._shown:
            sys.stderr.write(printable(text))
            sys.stderr.flush()

    def write(self, text: str) -> None:
        """More of the answer."""
        self._begin()
        self.text += text
        sys.stdout.write(self._markdown.feed(text))
        sys.stdout.flush()

    def end(self) -> None:
        """No more comes."""
        self._begin()
        say(self._markdown.end())

    def _begin(self) -> None:
        if self._thinking:
            self._thinking = False
            counted = AnswerStats(0, None, None, "", thought_tokens=self.thought_tokens)
            remark("" if self._shown else f"{thought_for(counted)}. /thinking reads it.")
        if not self._named:
            self._named = True
            sys.stdout.write(f"{self._name}: ")
            sys.stdout.flush()


_QUIET_S = 3.0  # without any of an answer, before that is said


class PlainChat:
    """One chat on stdin and stdout.

    Attributes:
        dialogue: the chat. setup: of new chats. presets: of the model that answers. files: attached to the next
            question. stats: of the last answer. failed: whether some request could not be done. thinking: what to do
            with the model's, see `settings.THINKING`.

    Args:
        setup: model, system prompt and sampling of new chats. max_tokens: of an answer. read: asks for a line; raises
            EOFError at the end, and KeyboardInterrupt if the user cancels the line.
    """

    def __init__(
        self,
        client: Client,
        history: History,
        setup: ChatSetup,
        max_tokens: int,
        read: Callable[[str], str] = input,
        personas: Mapping[str, Persona] | None = None,
        thinking: str = "fold",
    ) -> None:
        self.client, self.history, self.setup, self._max_tokens = client, history, setup, max_tokens
        self.dialogue = Dialogue(history, setup)
        self.personas: Mapping[str, Persona] = personas or {}
        self.thinking = thinking
        self._read = read
        self._commands = PlainCommands(self)
        self._window = 0
        self.presets: tuple[str, ...] = ()
        self.model, self.preset = setup.model, setup.preset or ""
        self.files: list[Attachment] = []
        self.stats: AnswerStats | None = None
        self.failed = False

    def run(self, chat: Conversation | None = None, *, own_model: bool = True) -> None:
        """Chat until the person leaves, at first in the saved `chat` if one is given; `own_model`: as for `show`.

        Raises:
            FloeError: no model can be loaded.
        """
        self.client.start()
        self._load()
        if chat is not None:
            self.dialogue.open(chat.id)
            self.show(own_model=own_model)
        while (text := self._question()) is not None:
            name, _space, argument = text.strip().partition(" ")
            try:
                need_text("The line", text)
                if name in ("/quit", "/exit"):
                    return
                if name.startswith("/"):
                    self._commands.obey(name, argument.strip())
                elif name:
                    self.ask(text)
            except FloeError as error:
                self.failed = True
                remark(str(error))

    def use(self, chosen: Choice, placement: str | None = None) -> None:
        """Switch to that model or server, or to another placement of the same one's experts.

        Raises:
            FloeError: it cannot be loaded, and the previous model stays.
        """
        before = self.client.chosen, self.client.placement
        self.client.open(chosen, placement)
        try:
            self._load()
        except FloeError:
            if before != (self.client.chosen, self.client.placement):
                self.client.open(*before)
                self._load()
            raise

    def _load(self) -> None:
        remark(f"Connecting to {self.client.remote}." if self.client.remote else "Loading the model.")
        while True:
            for update in self.client.poll(timeout=0.1):
                match update:
                    case Loaded():
                        self._window, self.presets = update.context_window, update.presets
                        self.model, self.preset = update.model, update.preset
                        answers = self.client.reference
                        self.setup = replace(self.setup, model=answers, preset=update.preset)
                        if not self.dialogue.ids:
                            self.dialogue.set_up(replace(self.dialogue.setup, model=answers, preset=update.preset))
                        remark(f"{self._answering(update)} /help lists the commands.")
                        if self.thinking == "off" and (limit := limit_of_off(self.client.thinking)):
                            remark(f"{limit}.")
                        return
                    case Failed():
                        raise _error(update)
                    case _:
                        pass

    def _answering(self, loaded: Loaded) -> str:
        """What answers, and where everything is sent."""
        if not loaded.remote:
            placed = "" if loaded.pools is None else f" Its experts: {loaded.placed}."
            placed += f" {loaded.drafter} guesses tokens." if loaded.drafter else ""
            return f"{loaded.model} answers at preset {loaded.preset}.{placed}"
        return f"{loaded.model} answers, remote at {loaded.remote}. {self.client.privacy}"

    def _question(self) -> str | None:
        """The user's question, of one or more lines; None at the end."""
        lines: list[str] = []
        while True:
            try:
                lines.append(self._read("You: " if not lines else ""))
            except EOFError:
                return None
            except KeyboardInterrupt:
                lines.clear()
                remark("\n/quit leaves.")
                continue
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]

    def ask(self, text: str, instead: Message | None = None) -> None:
        """Answer a question with the attached files, at the end or in the place of an earlier one.

        Raises:
            FloeError: it does not fit the window, or the engine failed.
        """
        files = tuple(self.files) if instead is None else instead.attachments
        question = self.dialogue.ask(text, files, instead)
        try:
            submitted = self._submit()
        except FloeError:
            self.dialogue.withdraw(question, instead)
            raise
        if instead is None:
            self.files.clear()
        self._receive(submitted)

    def answer(self, instead: Message | None = None, *, fresh: bool = False) -> None:
        """Answer the last question, again `instead` of an answer that is there; with a `fresh` seed it is another one.
        Raises FloeError as `ask` does.
        """
        self._receive(self._submit(instead, fresh=fresh), instead)

    def _submit(self, instead: Message | None = None, *, fresh: bool = False) -> Submitted:
        turns, seen = self.dialogue.turns(self._window or UNKNOWN_WINDOW, instead)
        sampling, number = self.dialogue.setup.sampling, self.dialogue.number
        sampling = replace(sampling, seed=None) if fresh else sampling
        try:
            submitted = self.client.submit(Question(turns, sampling, self._max_tokens, conversation=number))
        except KeyboardInterrupt:
            raise TryAgainError("The question was stopped", "", "Ask it again, or /quit leaves.") from None
        if submitted.dropped:
            left_out = f"{submitted.dropped} of {len(seen)} messages"
            remark(f"The model does not see the oldest {left_out}: they no longer fit its window.")
        return submitted

    def _receive(self, submitted: Submitted, instead: Message | None = None) -> None:
        message, kept = self.dialogue.answering(self.model, self.preset, instead)
        shown = PlainAnswer(self.model, shown=self.thinking == "show")
        self.stats, state = None, "failed"
        try:
            with kept, _interrupts(self.client.cancel):
                self._write(submitted.request, kept, shown)
            state = "stopped" if self.stats is not None and self.stats.stop_reason == "cancelled" else "complete"
        finally:
            if shown.text.strip() or shown.thought.strip():
                self.dialogue.ended(message, shown.text, state, self.stats, shown.thought)
                if not shown.text.strip():
                    remark("The model was still thinking at the end. /again asks again.")
            else:
                self.dialogue.withdraw(message, instead)
            self.history.settle()

    def _write(self, request: int, kept: Answer, shown: PlainAnswer) -> None:
        """Print the answer as it comes; if nothing does for a while, that it is waited for."""
        said, begun = False, time.monotonic()
        try:
            while True:
                if not said and not shown.begun and time.monotonic() - begun > _QUIET_S:
                    said = True
                    remark(f"Waiting for {self.client.remote or self.model}. Ctrl+C stops it.")
                for update in self.client.poll(timeout=0.1):
                    match update:
                        case TextDelta():
                            kept.append(update.text)
                            shown.write(update.text)
                        case ThoughtDelta():
                            kept.think(update.text)
                            shown.think(update.text, update.tokens)
                        case Finished(request=done) if done == request:
                            self.stats = AnswerStats.of(update.stats, update.reason, shown.thought_tokens)
                            kept.finish(self.stats, "stopped" if update.reason == "cancelled" else "complete")
                            return
                        case Notice(title, cause):
                            remark(f"{title}. {cause}")
                        case Failed():
                            raise _error(update)
                        case _:
                            pass
        finally:
            shown.end()

    def show(self, *, own_model: bool = True) -> None:
        """Print the chat from its beginning. With `own_model` its own model answers it, if that is still installed."""
        for message in self.dialogue.messages(self.dialogue.ids):
            if message.role == "user":
                files = "".join(f" [{file.name}]" for file in message.attachments)
                say(f"You: {message.text}{files}")
            else:
                if message.thought:
                    remark(f"{thought_for(message.stats)}.")
                say(f"{catalog.short_name(message.model)}: {plain_text(message.text)}")
        own = self.dialogue.setup.model
        if not own_model or not own or own == self.client.reference:
            return
        if self.client.remote:
            remark(model_choice.sent_away(own, self.client.remote))
            return
        try:
            self.use(catalog.find(own, saved=True))
        except FloeError as error:
            remark(model_choice.missing(own, error, self.model))

    def set_quality(self, quality: Rule | str) -> None:
        """Answer with a preset, or with shares set by hand."""
        if isinstance(quality, str):
            self.client.set_preset(quality)
            self.preset = quality
            self.setup = replace(self.setup, preset=quality)
        else:
            self.client.set_quality(quality)


def run_plain(beginning: Beginning, history: History) -> int:
    """Chat line by line until the person leaves; returns the exit code.

    If the lines do not come from a terminal, it is 1 if one of them could not be carried out or answered.

    Raises:
        FloeError: the model cannot be loaded.
    """
    with suppress(ImportError):  # there is none on Windows; elsewhere it gives lines a history and cursor keys
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are not text are reported line by line
    client, thinking = Engines(beginning.client, beginning.local), beginning.thinking
    personas = beginning.settings.personas
    chat = PlainChat(client, history, beginning.setup, beginning.max_tokens, personas=personas, thinking=thinking)
    try:
        chat.run(beginning.chat, own_model=beginning.own_model)
    finally:
        saved = history.close_patiently()  # first: the engine may write what is only a cache
        client.close()
    return 1 if not saved or (chat.failed and not sys.stdin.isatty()) else 0


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Generator[None]:
    """Let Ctrl+C `stop` what runs."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _error(failed: Failed) -> FloeError:
    error = FloeError(failed.title, failed.cause, failed.hint)
    error.exit_code = failed.exit_code
    return error
