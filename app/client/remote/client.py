"""A server that speaks OpenAI's protocol (vLLM, SGLang, llama-server, Ollama, ...) behind the interface of the engine.

Questions, the chats before them and attached files go to that server. A thread with its own loop asks; everything
arrives by `poll`. What the server says is untrusted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ....engine.events import Failed, Loaded, Loading, Notice, Rule
from ....models.errors import FloeError, TryAgainError, UsageError
from ...settings.servers import SavedServer
from ..asking import Asked, Asking, apart
from ..interface import Choice, Costs, PromptTurn, Question, Submitted
from .address import Address, Key
from .meter import Meter
from .models import Offered, as_name

if TYPE_CHECKING:
    from .answer import Server

_LONGEST_S = 30.0  # between two tries to reach a server
_CHARACTERS = 3.0  # per token, before a server has counted some: fewer than most texts have


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds: `silence` without a byte that end an answer, `first` before a server is asked again whether it is there;
    None: never.
    """

    silence: float = 300.0
    first: float | None = 2.0


@dataclass(slots=True)
class _Asked(Asked):
    """An answer. `characters`: of the prompt. `dropped`: see `Submitted`."""

    fields: tuple[dict[str, Any], dict[str, Any]] = field(kw_only=True)
    characters: int = field(kw_only=True)
    dropped: int = field(kw_only=True)


class RemoteClient(Asking[_Asked]):
    """One server and one of its models; see `interface.Client`."""

    def __init__(
        self,
        address: Address,
        key: Key,
        model: str | None = None,
        *,
        think: bool = True,
        patience: Patience | None = None,
    ) -> None:
        """`model`: its id or a part of it; None: the only one that the server offers."""
        super().__init__()
        self.think = think
        self._address, self._key, self._wanted = address, key, model
        self._patience = patience or Patience()
        self._model: Offered | None = None
        self._window = 0
        self._per_token = _CHARACTERS
        self._refused: set[str] = set()  # fields that this server does not know
        self._server: Server | None = None
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="floe-remote", daemon=True)

    @property
    def chosen(self) -> Choice:
        """The server, and the model that was asked for."""
        return SavedServer(self.remote, self._address.base, self._wanted or "", self._key.value)

    @property
    def reference(self) -> str:
        """The model's own address (GET /v1/models/MODEL), whose last part is its name."""
        name = self._model.name if self._model else as_name(self._wanted or "")
        return f"{self._address.base}/models/{name}"

    @property
    def remote(self) -> str:
        """Host and port that everything is sent to."""
        return self._address.host

    @property
    def privacy(self) -> str:
        """What is sent where, and who can read it on the way."""
        sent = f"Your questions, the chat before them and attached files are sent to {self.remote}"
        if self._address.encrypted:
            return f"{sent}, encrypted on the way."
        return f"{sent}." if self._address.loopback else f"{sent}, not encrypted: others on the network can read them."

    @property
    def thinking(self) -> str:
        """Always "asked": the wish is passed on."""
        return "asked"

    def start(self) -> None:
        """Ask the server for its models; returns at once."""
        self._thread.start()

    @property
    def placement(self) -> str:
        """Always "": the server decides."""
        return ""

    def open(self, chosen: Choice, placement: str | None = None) -> None:
        """Raises UsageError: always; another server is another client's."""
        hint = "Start floe-chat without --connect to use a model of this machine."
        raise UsageError(f"floe-chat is connected to {self.remote}", "", hint)

    def submit(self, question: Question) -> Submitted:
        """See `Client`: only the server can count the prompt's tokens."""
        (request,) = self.prepare(question)
        dropped = self._asked[request].dropped
        self.begin()
        return Submitted(request, None, dropped)

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        """See `Client`; the server gets all at once.

        Which of the oldest messages no longer fit is estimated from the characters per token that it counted so far.

        Raises:
            FloeError: no connection yet, or still busy; thinking is to be continued.
        """
        from .request import body, without

        if self._model is None:
            raise TryAgainError(f"{self.remote} is not connected yet", "", "Wait until it answers.")
        if self._asked:
            raise TryAgainError("The model is still answering", "", "Stop that answer first, or wait for it.")
        if question.thought and not question.answer:
            raise UsageError("A server cannot continue thinking", "", "Ask again instead.")
        kept, dropped = self._fitting(question.messages, question.max_new_tokens)
        characters = sum(len(turn.text) for turn in kept) + len(question.answer)
        first = self._last_request + 1
        for at in range(count):
            one = replace(question, messages=kept, sampling=apart(question.sampling, at))
            needed, others = body(self._model, one, think=self.think)
            fields = needed, without(others, [*self._refused])
            self._asked[first + at] = _Asked(first + at, fields=fields, characters=characters, dropped=dropped)
        self._last_request += count
        return [*range(first, first + count)]

    def _fitting(self, messages: Sequence[PromptTurn], most_new: int) -> tuple[Sequence[PromptTurn], int]:
        """The latest messages that should fit the window, and how many older ones do not. The last one always goes."""
        from ..prompt import offered_turns

        if not self._window:
            return messages, 0
        fitting = offered_turns(messages, int(max(0, self._window - most_new) * self._per_token))
        if isinstance(fitting, tuple):
            return fitting
        system = [turn for turn in messages[:1] if turn.role == "system"]
        return [*system, messages[-1]], len(messages) - len(system) - 1

    def begin(self) -> None:
        """See `Client`."""
        for asked in [*self._asked.values()]:
            if not asked.begun:
                asked.begun = True
                self._news.put(Submitted(asked.request, None, asked.dropped))
                self._ask(asked)

    def _ask(self, asked: _Asked) -> None:
        if asked.hand_over():
            asyncio.run_coroutine_threadsafe(self._answer(asked), self._loop)

    def _stop(self, asked: _Asked) -> None:
        """By closing its connection."""
        self._ask(asked)
        if self._server is not None:
            self._loop.call_soon_threadsafe(self._server.stop, asked.request)

    def most_new(self, max_new_tokens: int) -> int:
        """As many: a server counts thinking with the answer."""
        return max_new_tokens

    def count(self, text: str) -> int | None:
        """None: only the server could count."""
        return None

    def context_of(self, messages: Sequence[PromptTurn], max_new_tokens: int) -> tuple[int, int] | None:
        """None: only the server could count."""
        return None

    def costs(self) -> Costs:
        """Raises FloeError: a server does not say what its model's rounding costs."""
        raise UsageError(f"{self.remote} decides about quality", "A server has no presets.", "")

    def set_preset(self, preset: str) -> None:
        """Nothing: a server has no presets."""

    def set_quality(self, rule: Rule) -> None:
        """Nothing: a server has no such values."""

    def close(self) -> None:
        """Close the connections; never hangs: the thread is a daemon and gets half a second to end."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._closing.set)
        if self._thread.is_alive():
            self._thread.join(0.5)
        elif not self._loop.is_closed():  # it was never started
            self._loop.close()

    # On the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()  # without waiting for the name server

    async def _serve(self) -> None:
        connecting = asyncio.create_task(self._connect())
        await self._closing.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait(others, timeout=0.4) if others else None
        if connecting.done() and self._server is not None:
            await self._server.close()

    async def _connect(self) -> None:
        """Learn which model answers; tries again while a failure may pass, and reports the first."""
        from ....models.hub.hub_errors import backoff
        from .answer import Server

        begun, failures = time.perf_counter(), 0
        self._news.put(Loading(f"asking {self.remote} which model it has", 0.0))
        while True:
            try:
                if self._server is None:
                    self._server = Server(self._address, self._key, self._patience.silence)
                self._model = await self._server.find(self._wanted)
                self._window = self._model.window
                self._news.put(self._loaded(time.perf_counter() - begun))
                return
            except FloeError as error:
                failures += 1
                if failures == 1:
                    self._news.put(_failed(error, None))
                if not isinstance(error, TryAgainError) or self._patience.first is None:
                    return
                await asyncio.sleep(backoff(failures, 2 * self._patience.first, _LONGEST_S))

    def _loaded(self, seconds: float) -> Loaded:
        assert self._model is not None
        maker = self._model.maker
        return Loaded(
            model=self._model.name,
            folder=self.reference,
            source=self._address.base,
            context_window=self._window,
            vocabulary=0,
            presets=(),
            preset="",
            widths="",
            device="remote",
            backend=f"{maker} at {self.remote}" if maker else self.remote,
            reason=f"you connected to {self.remote}",
            seconds=seconds,
            memory_bytes=0,
            remote=self.remote,
        )

    async def _answer(self, asked: _Asked) -> None:
        assert self._server is not None
        meter = Meter(asked.request, self._window)
        if asked.cancelled:  # before it began
            self._server.stop(asked.request)
        try:
            await self._server.answer(asked.request, asked.fields, meter, self._news.put, self._refuse)
        except FloeError as error:
            self._news.put(_failed(error, asked.request))
        # The thread's border: without an end here the chat would wait for ever.
        except Exception as error:  # noqa: BLE001
            self._news.put(Failed(f"{self.remote} cannot be asked", f"{type(error).__name__}", "", asked.request))
        if meter.usage.prompt:
            self._per_token = min(8.0, max(1.0, asked.characters / meter.usage.prompt))

    def _refuse(self, names: Sequence[str]) -> None:
        """Do not send these fields again."""
        said = ", ".join(name for name in names if name not in (*self._refused, "max_tokens"))
        self._refused.update(names)
        if said:
            self._news.put(Notice(f"{self.remote} does not know {said}", "It answers without."))


def _failed(error: FloeError, request: int | None) -> Failed:
    return Failed(error.title, error.cause, error.hint, request, error.exit_code)
