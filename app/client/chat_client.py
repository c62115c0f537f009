"""One engine and one model's chat format behind a small interface: messages in, text out. Independent of any screen.

The screen and `floe-chat ask` both use this class; they never see a token id. Tokenizer and chat template are programs
by the model's publisher, so they run in their own process (models/tokenizer/chat_process.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...engine.events import (
    MOST_TOGETHER,
    Advanced,
    Cancel,
    Event,
    Extras,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    NewTokens,
    Rule,
    Sampling,
    SetPreset,
    SetQuality,
    Shutdown,
    SpreadBy,
    Unload,
)
from ...engine.session import Session
from ...models import catalog
from ...models.errors import FloeError, PackError, TryAgainError, UsageError
from ...models.tokenizer.chat_process import ChatProcess, Fitted
from .interface import NO_TOOLS, Choice, Cost, PromptTurn, Question, Submitted, Tools, Update
from .loading import foreign_token
from .prompt import fit, whole
from .speaking import Speaking, apart

Figure = TypeVar("Figure")
_THINKING = 8192  # tokens that a model may think, beside those of its answer


class ChatClient:
    """Usage: `start()`, then `poll()` until `Loaded`, `submit(...)`, then `poll()` until `Finished` or `Failed`."""

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
    ) -> None:
        """`think`: False asks the model for answers without thinking. Others: see `Load`."""
        self._pack = pack
        self.think = think
        self._load = Load(str(pack), preset, device, vram, advanced or Advanced(), parked, spread or SpreadBy())
        self._session = Session()
        self._format: ChatProcess | FloeError | None = None
        self._figures: ChatProcess | None = None  # counts, so that no answer waits for that
        self._format_lock, self._format_ready = threading.Lock(), threading.Event()
        self._closed = False
        self._held: Loaded | None = None
        self._window = self._vocabulary = 0
        self._last_request = 0
        self._running: dict[int, Speaking] = {}  # by request
        self._prepared: list[Generate] = []
        self._heard: Callable[[], None] = lambda: None

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
        self._begin_loading()
        self._session.start()

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on some thread, whenever there is something to `poll`."""
        self._heard = heard
        self._session.listen(heard)

    def open(self, chosen: Choice) -> None:
        """Switch to the model in this folder, on the same device; `poll` reports as after `start`.

        A running answer ends first: cancel it, or wait for it.

        Raises:
            UsageError: it is a server.
        """
        if not isinstance(chosen, Path):
            raise UsageError(f"{chosen.url} is no model of this machine", "", "Give --connect to use a server.")
        self._forget()
        self._pack, self._load = chosen, replace(self._load, pack=str(chosen), preset=None)
        self._begin_loading()

    def unload(self) -> None:
        """Give back the model's memory; `open` loads one again. No answer may be running."""
        self._forget()
        self._session.send(Unload())

    def _forget(self) -> None:
        self._close_format()
        self._held, self._window = None, 0

    def _begin_loading(self) -> None:
        arguments = (self._pack, self._format_ready)
        threading.Thread(target=self._read_format, args=arguments, name="floe-tokenizer", daemon=True).start()
        self._session.send(self._load)

    def poll(self, timeout: float = 0.0) -> list[Update]:
        """What happened since the last call, in order; waits at most `timeout` seconds for the first."""
        updates: list[Update] = []
        events: list[Event] = self._session.poll(timeout)
        if self._held is not None and self._format_ready.is_set():
            events.insert(0, self._held)
            self._held = None
        ids: dict[int, list[int]] = {}  # of each answer: all that came since the last call become text at once
        for event in events:
            match event:
                case NewTokens(request=request) if (speaking := self._running.get(request)) is not None:
                    if event.chances:
                        updates += speaking.likely(event)
                    else:
                        ids.setdefault(request, []).extend(event.ids)
                case NewTokens():
                    pass
                case Loaded():
                    updates += self._model_ready(event)
                case Finished(request=int(request)) | Failed(request=int(request)) if request in self._running:
                    speaking = self._running.pop(request)
                    updates += speaking.text(ids.pop(request, []), last=True)
                    if isinstance(event, Finished) and speaking.left == 0:
                        event = replace(event, reason="length")
                    updates.append(event)
                case _:
                    updates.append(event)
        for request, some in ids.items():
            updates += self._running[request].text(some)
        self._running = {request: one for request, one in self._running.items() if not one.failed}
        return updates

    def submit(self, question: Question) -> Submitted:
        """Ask a question: `prepare` and `begin` in one."""
        submitted = self.prepare(question)
        self.begin()
        return submitted

    def prepare(self, question: Question) -> Submitted:
        """Make a prompt of the question.

        From then on the model counts as answering, and can be stopped, though nothing is computed before `begin`. Takes
        as long as template and tokenizer do, a few seconds at most.

        Raises:
            FloeError: no model yet or still busy; the last message alone does not fit the window; the model's
                template refuses the turns, fails, or takes too long. A sampling value out of range arrives as `Failed`.
        """
        return self.prepare_others(question, 1)[0]

    def prepare_others(self, question: Question, count: int) -> list[Submitted]:
        """As `prepare`, for so many answers to the same question, each drawn apart; at most `together`."""
        chat, most = self._free_format(1), self.most_new(question.max_new_tokens)
        left = None if most == question.max_new_tokens else question.max_new_tokens
        asked, found = replace(question, max_new_tokens=most), list[Submitted]()
        for number in range(count):
            request = self._last_request + 1
            fitted = fit(chat, self._window, asked, think=self.think, begin=request)
            speaking = Speaking(request, chat, partial(self.cancel, request), left=left)
            sampling = apart(question.sampling, number)
            found.append(self._take(speaking, fitted, sampling, most, question.conversation))
        return found

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
    ) -> Submitted:
        """As `submit`, for all of these messages, or a text to continue; also while other answers are computed, up to
        `together` in all. `max_new_tokens` count thinking too. With a
        `schema` the answer is JSON by it, after its thinking. Calls of `tools` come as `CallDelta`.

        Raises:
            FloeError: as `prepare`; they do not fit the window; a schema cannot be followed.
        """
        chat, request = self._free_format(self.together), self._last_request + 1
        how = tools, schema, self._vocabulary
        fitted = whole(chat, self._window, given, *how, think=think, begin=request)
        speaking = Speaking(request, chat, partial(self.cancel, request), calls=bool(tools.listed))
        submitted = self._take(speaking, fitted, sampling, max_new_tokens, 0, extras)
        if fitted.constrained:
            self._session.constrain(request, partial(chat.allowed, request=request))
        self.begin()
        return submitted

    def _free_format(self, most: int) -> ChatProcess:
        """What makes a prompt, if the model is ready and computes fewer than so many answers."""
        chat = self._format
        if self._window == 0 or not isinstance(chat, ChatProcess):
            raise TryAgainError("The model is not ready", "", "Wait until it has loaded.")
        if len(self._running) >= most:
            raise TryAgainError("The model is still answering", "", "Stop that answer first, or wait for it.")
        return chat

    def _take(
        self,
        speaking: Speaking,
        fitted: Fitted,
        sampling: Sampling,
        most: int,
        conversation: int,
        extras: Extras | None = None,
    ) -> Submitted:
        """From now on the model counts as answering this prompt."""
        request = self._last_request = speaking.request
        self._running[request] = speaking
        ids, stop_ids = tuple(fitted.ids), speaking.chat.stop_ids
        self._prepared.append(Generate(request, ids, sampling, most, stop_ids, conversation, extras or Extras()))
        return Submitted(request, len(fitted.ids), fitted.dropped)

    def begin(self) -> None:
        """Let the engine compute the answers that were prepared."""
        for command in self._prepared:
            self._session.send(command)
        self._prepared.clear()

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

    def costs(self) -> tuple[Cost, ...]:
        """See `Client`."""
        from .costs import costs_of

        return costs_of(self._pack)

    def cancel(self, request: int | None = None) -> None:
        """Stop the answer to a request, or all."""
        for running in [*self._running]:
            if request in (None, running):
                self._session.send(Cancel(running))

    def set_preset(self, preset: str) -> None:
        """Change the quality preset from the next token on."""
        self._session.send(SetPreset(preset))

    def set_quality(self, rule: Rule) -> None:
        """Set the quality by hand, from the next token on."""
        self._session.send(SetQuality(rule))

    def close(self) -> None:
        """End the engine; never hangs: the thread is a daemon and gets half a second to end."""
        self._closed = True
        self._close_format()
        self._session.send(Shutdown())
        self._session.join(0.5)

    def _model_ready(self, event: Loaded) -> list[Update]:
        """Pass `event` on once the chat format is ready too; the two load in parallel."""
        if event.folder != self._load.pack:  # another model was requested meanwhile
            return []
        if not self._format_ready.is_set():
            self._held = event
            return []
        error = foreign_token(self._format, event.vocabulary, self._pack)
        if error is not None:
            self._session.send(Unload())
            return [Failed(error.title, error.cause, error.hint, None, error.exit_code)]
        self._window, self._vocabulary = event.context_window, event.vocabulary
        return [event]

    def _read_format(self, pack: Path, ready: threading.Event) -> None:
        found: ChatProcess | FloeError
        try:
            found = ChatProcess(pack)
        except FloeError as error:
            found = error
        # This thread's border: without an answer here the model would never be ready.
        except Exception as error:  # noqa: BLE001
            cause = f"{type(error).__name__}: {error}"
            found = FloeError("The tokenizer's process cannot be started", cause, "Close other programs and try again.")
        with self._format_lock:
            wanted = ready is self._format_ready and not self._closed  # no other model was requested meanwhile
            if wanted:
                self._format = found
                self._figures = found.beside() if isinstance(found, ChatProcess) else None
        if not wanted and isinstance(found, ChatProcess):
            found.close()
        ready.set()
        self._heard()

    def _close_format(self) -> None:
        with self._format_lock:
            chats = self._format, self._figures
            self._format, self._figures, self._format_ready = None, None, threading.Event()
        for chat in chats:
            if isinstance(chat, ChatProcess):
                chat.close()
