"""`floe-chat --plain`: the chat line by line, for screen readers, braille displays and slow lines.

The screen is painted cell by cell, which no screen reader can follow. Here nothing is painted and no cursor moves: what
is said goes to stdout as it comes, remarks go to stderr, each on lines of its own. Engine and history are the screen's,
so a chat can be gone on with in either.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace

from ..engine.events import Failed, Finished, Loaded, Notice
from ..models.errors import FloeError, UsageError
from .arguments import need_text
from .chat_client import ChatClient, TextDelta
from .history import Answer, AnswerStats, Conversation, History, Setup, Trouble, footer
from .history.exchange import Exchange, ask_anew, ask_in
from .widgets.plain import printable

_LISTED = 20
_DIGITS = 18  # of a chat's number at the most: it fits 64 bits
_HELP = """Write a question and press Enter. A line that ends in \\ goes on in the next one. Ctrl+C stops an answer.
/new begins another chat; this one is kept.
/history lists the chats that were written to last; /history WORDS those in which the words are found.
/open NUMBER goes on with one of them, /last with the one that was written to last.
/rename TITLE gives this chat a title.
/preset NAME changes the quality from the next answer on; without a name it tells which there are.
/stats tells the figures of the last answer.
/help tells this again.
/quit leaves, as Ctrl+D does."""


class PlainChat:
    """One chat on stdin and stdout.

    Attributes:
        failed: whether something that was written could not be done.

    Args:
        setup: model, instructions and sampling of new chats. max_tokens: of an answer. read: asks for a line; raises
            EOFError at the end, and KeyboardInterrupt where somebody wants out of the line.
    """

    def __init__(
        self,
        client: ChatClient,
        history: History,
        setup: Setup,
        max_tokens: int,
        read: Callable[[str], str] = input,
    ) -> None:
        self._client, self._history, self._setup, self._max_tokens = client, history, setup, max_tokens
        self._read = read
        self._number: int | None = None  # of the chat; None before its first question
        self._presets: tuple[str, ...] = ()
        self._last: AnswerStats | None = None
        self.failed = False

    def run(self) -> None:
        """Chat until the person leaves. Raises FloeError: no model can be loaded."""
        self._load()
        while (text := self._question()) is not None:
            name, _space, argument = text.strip().partition(" ")
            try:
                need_text("The line", text)
                if name == "/quit":
                    return
                if name.startswith("/"):
                    self._obey(name, argument.strip())
                elif name:
                    self._ask(text)
            except FloeError as error:
                self.failed = True
                _tell(str(error))

    def _load(self) -> None:
        _tell("Loading the model.")
        self._client.start()
        while True:
            for update in self._client.poll(timeout=0.1):
                match update:
                    case Loaded():
                        self._presets = update.presets
                        self._setup = replace(self._setup, model=update.model, preset=update.preset)
                        _tell(f"{update.model} answers, with preset {update.preset}. /help tells what else there is.")
                        return
                    case Failed():
                        raise _error(update)
                    case _:
                        pass

    def _question(self) -> str | None:
        """What the person wrote, over as many lines as they wanted; None at the end."""
        lines: list[str] = []
        while True:
            try:
                lines.append(self._read("You: " if not lines else ""))
            except EOFError:
                return None
            except KeyboardInterrupt:
                lines.clear()
                _tell("\n/quit leaves.")
                continue
            if not lines[-1].endswith("\\"):
                return "\n".join(lines)
            lines[-1] = lines[-1][:-1]

    def _obey(self, name: str, argument: str) -> None:
        match name:
            case "/help":
                _tell(_HELP)
            case "/new":
                self._number = None
                _tell("Another chat begins with your next question.")
            case "/history":
                _tell("\n".join(self._found(argument)) or ("Nothing is found." if argument else "None yet."))
            case "/open":
                if not argument.isdecimal() or len(argument) > _DIGITS:
                    raise UsageError(f"{argument!r} is no number of a chat", "", "/history tells them.")
                self._open(self._history.numbered(int(argument)))
            case "/last":
                if (newest := self._history.newest()) is None:
                    raise UsageError("There is no earlier chat", "", "Write a question.")
                self._open(newest)
            case "/rename":
                self._rename(argument)
            case "/preset":
                self._take_preset(argument)
            case "/stats":
                _tell(footer(self._last) if self._last else "No answer has been written yet.")
            case _:
                raise UsageError(f"There is no command {name}", "", "/help tells those that there are.")

    def _found(self, words: str) -> list[str]:
        """Chats as lines: the newest, or those that hold `words`."""
        if words:
            return list(dict.fromkeys(f"{hit.number}: {hit.name}" for hit in self._history.search(words, _LISTED)))
        return [f"{one.number}: {one.name}, {one.messages} messages" for one in self._history.conversations(_LISTED)]

    def _open(self, found: Conversation) -> None:
        self._number = found.number
        for message in self._history.messages(self._history.branch(found.head)):
            _say(f"{'You' if message.role == 'user' else self._setup.model}: {message.text}")

    def _rename(self, title: str) -> None:
        if self._number is None:
            raise UsageError("There is no chat to rename yet", "", "Ask something first.")
        if not title:
            raise UsageError("A title is missing", "", "Such as: /rename Sea ice")
        self._history.rename(self._history.numbered(self._number).id, " ".join(title.split()))
        self._history.settle()
        _tell(f"This chat is called {title}.")

    def _take_preset(self, name: str) -> None:
        wanted = next((preset for preset in self._presets if preset.lower() == name.lower()), None)
        if wanted is None:
            _tell(f"Presets, best first: {', '.join(self._presets)}. In force: {self._setup.preset}.")
            return
        self._client.set_preset(wanted)
        self._setup = replace(self._setup, preset=wanted)
        _tell(f"{wanted} from the next answer on.")

    def _ask(self, text: str) -> None:
        if self._number is None:
            exchange = ask_anew(self._history, text, self._setup)
        else:
            exchange = ask_in(self._history, self._number, text, self._setup)
        with exchange.keep() as kept, _interrupts(self._client.cancel):
            self._answer(exchange, kept)
        self._history.settle()
        if self._number is None and (written := self._history.messages([kept.id])):
            self._number = self._history.conversation(written[0].conversation).number

    def _answer(self, exchange: Exchange, kept: Answer) -> None:
        request = self._client.submit(exchange.turns, self._setup.sampling, self._max_tokens).request
        sys.stdout.write(f"{printable(self._setup.model)}: ")
        try:
            while True:
                for update in self._client.poll(timeout=0.1):
                    match update:
                        case TextDelta():
                            kept.append(update.text)
                            sys.stdout.write(update.text)
                            sys.stdout.flush()
                        case Finished(request=done) if done == request:
                            self._last = AnswerStats.of(update.stats, update.reason)
                            kept.finish(self._last, "stopped" if update.reason == "cancelled" else "complete")
                            return
                        case Notice(title, cause):
                            _tell(f"{title}. {cause}")
                        case Failed():
                            raise _error(update)
                        case _:
                            pass
        finally:
            _say("")


def run_plain(client: ChatClient, setup: Setup, max_tokens: int, history: History) -> int:
    """Chat line by line until the person leaves; returns the exit code.

    Where the lines do not come from a person at a terminal, it is 1 if one of them could not be obeyed or answered.

    Raises:
        FloeError: the model cannot be loaded.
    """
    with suppress(ImportError):  # there is none on Windows; elsewhere it gives lines a history and cursor keys
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # what is no text is told of, line by line
    chat = PlainChat(client, history, setup, max_tokens)
    try:
        chat.run()
    finally:
        client.close()
        saved = history.close()
        for event in history.poll():
            if isinstance(event, Trouble):
                _tell(f"{event.title}. {event.cause} {event.hint}")
    return 1 if not saved or (chat.failed and not sys.stdin.isatty()) else 0


@contextmanager
def _interrupts(stop: Callable[[], None]) -> Generator[None]:
    """Let Ctrl+C `stop` what runs."""
    before = signal.signal(signal.SIGINT, lambda _number, _frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(text: str) -> None:
    sys.stdout.write(f"{printable(text)}\n")
    sys.stdout.flush()


def _tell(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"{printable(text)}\n")
    sys.stderr.flush()


def _error(failed: Failed) -> FloeError:
    error = FloeError(failed.title, failed.cause, failed.hint)
    error.exit_code = failed.exit_code
    return error
