"""One engine and one model's chat format behind a small interface: messages in, text out. Independent of any screen.

The screen and `floe-chat ask` both use this class; they never see a token id. Tokenizer and chat template are programs
by the model's publisher, so they run in their own process (models/tokenizer/chat_process.py).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...engine.events import (
    MOST_TOGETHER,
    Advanced,
    Cancel,
    Chance,
    Event,
    Extras,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Loading,
    NewTokens,
    Rule,
    Sampling,
    SetPreset,
    SetQuality,
    Shutdown,
    SpreadBy,
    Unload,
)
from ...engine.mailbox import Mailbox
from ...engine.session import MOMENT_S, Session
from ...models import catalog
from ...models.errors import FloeError, PackError, TryAgainError, UsageError
from ...models.tokenizer.chat_process import ChatProcess, Fitted, Stopped
from .asking import Asked, Asking, apart
from .interface import (
    NO_TOOLS,
    Choice,
    Costs,
    Likely,
    PromptTurn,
    Question,
    Refused,
    Spelled,
    Submitted,
    ThoughtDelta,
    Tools,
    Update,
)
from .loading import foreign_token
from .prompt import fit, updates_of, whole

Figure = TypeVar("Figure")
_THINKING = 8192  # tokens that a model may think, beside those of its answer


@dataclass(slots=True)
class _Asked(Asked):
    """An answer.

    Attributes:
        chat: writes its prompt and reads its tokens. think: see `Client`. calls: whether calls of tools come apart from
            the text. left: tokens that it may still have; None: the engine counts them. failed: whether the model's
            tokenizer did. ended: how the engine ended it; its last text may still be made.
    """

    chat: ChatProcess = field(kw_only=True)
    question: Question = field(kw_only=True)
    think: bool = field(kw_only=True)
    calls: bool = False
    left: int | None = None
    failed: bool = False
    ended: Finished | Failed | None = None


class ChatClient(Asking[_Asked]):
    """Usage: `start()`, then `poll()` until `Loaded`, `submit(...)`, then `poll()` until `Finished` or `Failed`.

    Text is made on a thread of its own, so that neither the engine nor who polls waits for the tokenizer's process.
    """

    def __init__(
        self,
        pack: Path,
        preset: str | None = None,
        device: str = "auto",
        vram: int | None = None,
        advanced: Advanced | None = None,
        *,
        think: bool = True,
        parked: int | None = None,
        spread: SpreadBy | None = None,
        states: int = 0,
    ) -> None:
        """`think`: False asks the model for answers without thinking. Others: see `Load`."""
        super().__init__()
        self._pack = pack
        self.think = think
        how = preset, device, vram, advanced or Advanced(), parked, spread or SpreadBy(), states
        self._load = Load(str(pack), *how)
        self._session = Session(self._hear)
        self._to_text: Mailbox[Event | Load | _Asked | None] = Mailbox()  # what the thread of the text is to do
        self._format: ChatProcess | FloeError | None = None
        self._figures: ChatProcess | None = None  # counts, so that no answer waits for that
        self._format_lock = threading.Lock()
        self._closed = False
        self._window = self._vocabulary = 0

    @property
    def pack(self) -> Path:
        """The pack that is loaded, or being loaded."""
        return self._pack

    @property
    def chosen(self) -> Choice:
        """See `pack`."""
        return self._pack

    @property
    def reference(self) -> str:
        """The name by which `catalog.find` finds the pack again."""
        return catalog.reference(self.pack)

    @property
    def together(self) -> int:
        """How many answers may be asked for at once."""
        return MOST_TOGETHER

    @property
    def remote(self) -> str:
        """Always "": nothing leaves this machine."""
        return ""

    def start(self) -> None:
        """Begin loading in the background; returns at once."""
        threading.Thread(target=self._make_text, name="floe-text", daemon=True).start()
        self._begin_loading()
        self._session.start()

    @property
    def placement(self) -> str:
        """See `Client`."""
        return self._load.advanced.placement

    def open(self, chosen: Choice, placement: str | None = None) -> None:
        """Switch to the model in this folder, on the same device; `poll` reports as after `start`.

        A running answer ends first: cancel it, or wait for it.

        Raises:
            UsageError: it is a server.
        """
        if not isinstance(chosen, Path):
            raise UsageError(f"{chosen.url} is no model of this machine", "", "Give --connect to use a server.")
        self._forget()
        advanced = self._load.advanced if placement is None else replace(self._load.advanced, placement=placement)
        self._pack, self._load = chosen, replace(self._load, pack=str(chosen), preset=None, advanced=advanced)
        self._begin_loading()

    def unload(self) -> None:
        """Give back the model's memory; `open` loads one again. No answer may be running."""
        self._forget()
        self._session.send(Unload())

    def _forget(self) -> None:
        self._close_format()
        self._window = 0

    def _begin_loading(self) -> None:
        self._to_text.put(self._load)
        self._session.send(self._load)

    def submit(self, question: Question) -> Submitted:
        """See `Client`. Takes as long as template and tokenizer do.

        Raises:
            FloeError: no model yet or still busy; the last message alone does not fit the window; the model's
                template refuses the turns, fails, or computes too long. A sampling value out of range arrives as
                `Failed`.
        """
        (request,) = self.prepare(question)
        asked = self._asked[request]
        asked.begun = True
        try:
            return self._prompt(asked)
        except BaseException:  # Ctrl+C too
            if not asked.hand_over():
                self._session.send(Cancel(request))
            self._asked.pop(request, None)
            raise

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        """See `Client`; at most `together`."""
        chat, most = self._free_format(1), self.most_new(question.max_new_tokens)
        left = None if most == question.max_new_tokens else question.max_new_tokens
        requests = [*range(self._last_request + 1, self._last_request + 1 + count)]
        for number, request in enumerate(requests):
            one = replace(question, max_new_tokens=most, sampling=apart(question.sampling, number))
            self._take(_Asked(request, chat=chat, question=one, think=self.think, left=left))
        return requests

    def begin(self) -> None:
        """See `Client`."""
        for asked in [*self._asked.values()]:
            if not asked.begun:
                asked.begun = True
                self._to_text.put(asked)

    def submit_whole(
        self,
        given: Sequence[PromptTurn] | str,
        sampling: Sampling,
        max_new_tokens: int,
        extras: Extras | None = None,
        schema: str = "",
        tools: Tools = NO_TOOLS,
        *,
        think: bool = True,
        stopped: Stopped | None = None,
    ) -> Submitted:
        """As `submit`, for all of these messages, or a text to continue; also while other answers are computed, up to
        `together` in all. `max_new_tokens` count thinking too. With a
        `schema` the answer is JSON by it, after its thinking. Calls of `tools` come as `CallDelta`. `stopped`: whether
        nobody wants it any more, while its prompt is made.

        Raises:
            FloeError: as `submit`; they do not fit the window; a schema cannot be followed.
        """
        chat, request = self._free_format(self.together), self._last_request + 1
        how = tools, schema, self._vocabulary
        fitted = whole(chat, self._window, given, *how, think=think, begin=request, stopped=stopped)
        question = Question((), sampling, max_new_tokens)
        asked = _Asked(request, True, chat=chat, question=question, think=think, calls=bool(tools.listed))
        self._take(asked)
        if fitted.constrained:
            stops = partial(self._session.must_stop, request)
            self._session.constrain(request, partial(chat.allowed, request=request, stopped=stops))
        return self._compute(asked, fitted, extras)

    def _free_format(self, most: int) -> ChatProcess:
        """What makes a prompt, if the model is ready and computes fewer than so many answers."""
        chat = self._format
        if self._window == 0 or not isinstance(chat, ChatProcess):
            raise TryAgainError("The model is not ready", "", "Wait until it has loaded.")
        if len(self._asked) >= most:
            raise TryAgainError("The model is still answering", "", "Stop that answer first, or wait for it.")
        return chat

    def _take(self, asked: _Asked) -> None:
        """From now on the model counts as answering it."""
        self._last_request = asked.request
        self._asked[asked.request] = asked

    def _prompt(self, asked: _Asked) -> Submitted:
        """Make a prompt of the question, for the engine to compute."""
        fitted = fit(asked.chat, self._window, asked.question, think=asked.think, begin=asked.request)
        return self._compute(asked, fitted)

    def _compute(self, asked: _Asked, fitted: Fitted, extras: Extras | None = None) -> Submitted:
        if asked.hand_over():
            question, ids, stop_ids = asked.question, tuple(fitted.ids), asked.chat.stop_ids
            how = question.sampling, question.max_new_tokens, stop_ids, question.conversation, extras or Extras()
            self._session.send(Generate(asked.request, ids, *how, alike=question.alike))
        return Submitted(asked.request, len(fitted.ids), fitted.dropped)

    def _stop(self, asked: _Asked) -> None:
        self._session.send(Cancel(asked.request))
        self._compute(asked, Fitted([], 0))  # a prompt that is still being made is not waited for
        if asked.ended is not None:  # nor is the rest of the text
            self._news.put(asked.ended)

    @property
    def privacy(self) -> str:
        """Always "": nothing is sent."""
        return ""

    @property
    def thinking(self) -> str:
        """Whether the model thinks before it answers: "never", "optional" (`think` decides), "less" (`think` shortens
        it), or "always"; "never" while it is not ready.
        """
        return self._format.thinking if isinstance(self._format, ChatProcess) else "never"

    @property
    def tools(self) -> str:
        """Whether tools are written as the model's template does ("own"), or as for all models ("general")."""
        return self._format.tools if isinstance(self._format, ChatProcess) else "general"

    def most_new(self, max_new_tokens: int) -> int:
        """How many tokens an answer of `max_new_tokens` may have with the thinking before it, which does not count."""
        thinks = self.thinking in ("less", "always") or (self.thinking == "optional" and self.think)
        return max_new_tokens + _THINKING if thinks else max_new_tokens

    def count(self, text: str) -> int | None:
        """How many tokens `text` takes by itself; None while the model is not ready, or once its tokenizer failed."""
        return self._figure(lambda chat: chat.count(text))

    def context_of(self, messages: Sequence[PromptTurn], max_new_tokens: int) -> tuple[int, int] | None:
        """How many tokens a chat takes before its next question, and how many of its oldest messages are left out so
        that the question and its answer fit; for any thread.

        None while the model is not ready, where its template refuses the chat, or once it failed.
        """
        asked = [] if messages and messages[-1].role == "user" else [PromptTurn("user", "")]
        question = Question((*messages, *asked), Sampling(), self.most_new(max_new_tokens))
        fitted = self._figure(lambda chat: fit(chat, self._window, question, think=self.think))
        return None if fitted is None else (len(fitted.ids), fitted.dropped)

    def _figure(self, found: Callable[[ChatProcess], Figure]) -> Figure | None:
        if (chat := self._figures) is None:
            return None
        try:
            return found(chat)
        except PackError:  # nothing is started again for a figure alone
            self._figures = None
            chat.close()
        except FloeError:
            pass
        return None

    def costs(self) -> Costs:
        """See `Client`."""
        from .costs import costs_of

        return costs_of(self._pack)

    def set_preset(self, preset: str) -> None:
        """Change the quality preset from the next token on."""
        self._session.send(SetPreset(preset))

    def set_quality(self, rule: Rule) -> None:
        """Set the quality by hand, from the next token on."""
        self._session.send(SetQuality(rule))

    def close(self) -> None:
        """End the engine; never hangs: the thread is a daemon and gets half a second to end, and a moment more where it
        writes what the next start goes on from.
        """
        self._closed = True
        self._close_format()
        self._to_text.put(None)
        self._session.send(Shutdown())
        if not self._session.join(0.5) and self._session.keeping:
            self._session.join(MOMENT_S)

    def _close_format(self) -> None:
        with self._format_lock:
            chats = self._format, self._figures
            self._format = self._figures = None
            self._load = replace(self._load)  # not the one that is being opened
        for chat in chats:
            if isinstance(chat, ChatProcess):
                chat.close()

    def _hear(self, event: Event) -> None:
        """On the engine's thread: what needs no text, or none any more, does not wait for that of others."""
        if isinstance(event, Loaded) and self._format is None:
            self._news.put(Loading("Waiting for the tokenizer", 1.0))
        asked = None
        if isinstance(event, Finished | Failed) and (asked := self._asked.get(event.request or 0)) is not None:
            asked.ended = event
        if isinstance(event, Loading) or (asked is not None and asked.cancelled):
            self._news.put(event)
        else:
            self._to_text.put(event)

    # On the thread of the text

    def _make_text(self) -> None:
        while True:
            items = self._to_text.take(None)
            try:
                self._take_up(item for item in items if item is not None)
            # The thread's border: without an answer from here the chat would wait for ever.
            except Exception as error:
                logging.getLogger("floe_chat.app").exception("making text failed")
                hint = "This is a bug in floe-chat; the log has the details. Load the model again."
                self._news.put(Failed("The model's text cannot be made", f"{type(error).__name__}: {error}", hint))
            if None in items:
                return

    def _take_up(self, items: Iterable[Event | Load | _Asked]) -> None:
        ids: dict[int, list[int]] = {}  # of each answer: all that came since the last time become text at once
        for item in items:
            match item:
                case Load():
                    self._open_format(item)
                case _Asked():
                    self._news.put(self._begun(item))
                case NewTokens(request=request) if not item.chances:
                    ids.setdefault(request, []).extend(item.ids)
                case _:
                    self._tell(item, ids)
        for request, some in ids.items():
            self._tell_text(request, some)

    def _begun(self, asked: _Asked) -> Update:
        try:
            return self._prompt(asked)
        except FloeError as error:
            return Refused(asked.request, error)

    def _tell(self, event: Event, ids: dict[int, list[int]]) -> None:
        """Pass on an event that is not text alone, and before an end the rest of its answer's `ids`."""
        match event:
            case NewTokens():
                for token, chance in zip(event.ids, event.chances, strict=True):
                    self._tell_text(event.request, [token], chance)
            case Loaded():
                self._model_ready(event)
            case Finished(request=int(request)) | Failed(request=int(request)):
                asked = self._tell_text(request, ids.pop(request, []), last=True)
                if isinstance(event, Finished) and asked is not None and asked.left == 0:
                    event = replace(event, reason="length")
                self._news.put(event)
            case _:
                self._news.put(event)

    def _tell_text(
        self, request: int, ids: Sequence[int], chance: Chance | None = None, *, last: bool = False
    ) -> _Asked | None:
        """The text of an answer's next tokens, or `Failed` if the model's tokenizer fails. Before it, with `chance`,
        how likely the token was, unless it is thinking.
        """
        asked = self._asked.get(request)
        if asked is None or asked.failed or asked.cancelled or not (ids or last):
            return asked
        try:
            pushed = asked.chat.push(ids, last=last, most=asked.left, request=request)
            found = updates_of(request, pushed, calls=asked.calls)
            if chance is not None and not any(isinstance(each, ThoughtDelta) for each in found):
                numbers, logprobs = zip((ids[0], chance.logprob), *chance.likeliest, strict=True)
                token, *others = map(Spelled, asked.chat.spelled(numbers), logprobs)
                self._news.put(Likely(request, token, tuple(others)))
        except FloeError as error:
            asked.failed = True
            self._session.send(Cancel(request))
            found = [Failed(error.title, error.cause, error.hint, request, error.exit_code)]
        else:
            if asked.left:
                asked.left = max(0, asked.left - (len(ids) - pushed.thought))
                if asked.left == 0 and not last:
                    self._session.send(Cancel(request))
        for update in found:
            self._news.put(update)
        return asked

    def _open_format(self, load: Load) -> None:
        if load is not self._load:  # another model was requested meanwhile
            return
        found: ChatProcess | FloeError
        try:
            found = ChatProcess(Path(load.pack))
        except FloeError as error:
            found = error
        except OSError as error:
            cause = f"{type(error).__name__}: {error}"
            found = FloeError("The tokenizer's process cannot be started", cause, "Close other programs and try again.")
        with self._format_lock:
            wanted = load is self._load and not self._closed
            if wanted:
                self._format = found
                self._figures = found.beside() if isinstance(found, ChatProcess) else None
        if not wanted and isinstance(found, ChatProcess):
            found.close()

    def _model_ready(self, event: Loaded) -> None:
        """Pass `event` on, unless another model was requested meanwhile, or this one's tokenizer is another's."""
        if event.folder != self._load.pack:
            return
        error = foreign_token(self._format, event.vocabulary, self._pack)
        if error is not None:
            self._session.send(Unload())
            self._news.put(Failed(error.title, error.cause, error.hint, None, error.exit_code))
            return
        self._window, self._vocabulary = event.context_window, event.vocabulary
        self._news.put(event)
