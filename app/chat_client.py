"""One engine and one model's chat format behind a small interface: messages in, text out. It knows no screen.

The screen and `floe-chat ask` both talk to this class; they never see a token id.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.events import (
    Advanced,
    Cancel,
    Event,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Sampling,
    SetPreset,
    SetQuality,
    Shutdown,
    Tokens,
)
from ..engine.session import Session
from ..models.errors import FloeError, TryAgainError, UsageError

if TYPE_CHECKING:
    from ..engine.quality import Preset
    from ..models.chat_format import ChatFormat, Detokenizer

_PRIMING = 8  # tokens; more than any character takes bytes


@dataclass(frozen=True, slots=True)
class Message:
    """One turn: `role` is "system", "user" or "assistant"; `text` is what was written."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer to `request`, safe to show: control characters are already replaced."""

    request: int
    text: str


@dataclass(frozen=True, slots=True)
class Submitted:
    """A question accepted by the engine.

    `prompt_tokens` is its whole length; `dropped` counts the oldest messages that no longer fit the window.
    """

    request: int
    prompt_tokens: int
    dropped: int


@dataclass(frozen=True, slots=True)
class Cost:
    """A preset and its quality loss as measured on this very pack; None where `floe-chat tune` has not run.

    Attributes:
        kl: mean KL divergence from the 16-bit model, nats. bytes_per_token: of experts' weights read.
        text: what `kl` was measured on, "" where that is not known. tokens: how many of it were predicted.
    """

    preset: Preset
    kl: float | None
    bytes_per_token: float | None
    text: str = ""
    tokens: int = 0


Update = Event | TextDelta


class ChatClient:
    """Usage: `start()`, then `poll()` until `Loaded`, `submit(...)`, then `poll()` until `Finished` or `Failed`."""

    def __init__(
        self,
        pack: Path,
        preset: str | None = None,
        device: str = "auto",
        vram: int | None = None,
        advanced: Advanced | None = None,
    ) -> None:
        self._pack = pack
        self._load = Load(str(pack), preset, device, vram, advanced or Advanced())
        self._session = Session()
        self._format: ChatFormat | FloeError | None = None
        self._format_ready = threading.Event()
        self._held: Loaded | None = None
        self._window = 0
        self._last_request = 0
        self._running: tuple[int, Detokenizer] | None = None
        self._prepared: Generate | None = None

    @property
    def pack(self) -> Path:
        """The pack that is loaded, or being loaded."""
        return self._pack

    def start(self) -> None:
        """Begin loading in the background; returns at once."""
        self._begin_loading()
        self._session.start()

    def open(self, pack: Path) -> None:
        """Let the model in `pack` answer from now on, on the same device; `poll` tells as after `start`.

        What runs ends first: cancel it, or wait for it.
        """
        self._pack, self._load = pack, replace(self._load, pack=str(pack), preset=None)
        self._format, self._held, self._window = None, None, 0
        self._format_ready = threading.Event()
        self._begin_loading()

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
        for event in events:
            match event:
                case Tokens():
                    if self._running and self._running[0] == event.request:
                        updates.append(TextDelta(event.request, self._running[1].push(event.ids)))
                case Loaded():
                    updates += self._model_ready(event)
                case Finished() | Failed():
                    if self._running and event.request == self._running[0]:
                        self._running = None
                    updates.append(event)
                case _:
                    updates.append(event)
        return updates

    def submit(
        self, messages: Sequence[Message], sampling: Sampling, max_new_tokens: int, answer: str = ""
    ) -> Submitted:
        """Ask for an answer to `messages`: `prepare` and `begin` in one."""
        submitted = self.prepare(messages, sampling, max_new_tokens, answer)
        self.begin()
        return submitted

    def prepare(
        self, messages: Sequence[Message], sampling: Sampling, max_new_tokens: int, answer: str = ""
    ) -> Submitted:
        """Make a prompt of `messages` (the last one is the user's) for an answer that goes on where `answer` ends.

        From then on the model counts as answering, and can be stopped, though nothing is computed before `begin`.

        Raises:
            FloeError: no model yet or still busy; the last message alone does not fit the window; the model's
                template refuses the turns. A sampling value out of range arrives as `Failed`.
        """
        if self._window == 0 or self._format is None or isinstance(self._format, FloeError):
            raise TryAgainError("The model is not ready", "", "Wait until it has loaded.")
        if self._running is not None:
            raise TryAgainError("The model is still answering", "", "Stop that answer first, or wait for it.")
        begun = tuple(self._format.encode_text(answer)) if answer else ()
        prompt, dropped = self._fit(self._format, messages, max_new_tokens, begun)
        self._last_request += 1
        decoder = self._format.decoder()
        decoder.push(begun[-_PRIMING:])  # a decoder drops the space before its very first word
        self._running = (self._last_request, decoder)
        stop_ids = self._format.stop_ids
        self._prepared = Generate(self._last_request, tuple(prompt), sampling, max_new_tokens, stop_ids)
        return Submitted(self._last_request, len(prompt), dropped)

    def begin(self) -> None:
        """Let the engine compute the answer that was prepared."""
        if self._prepared is not None:
            self._session.send(self._prepared)
            self._prepared = None

    def count(self, text: str) -> int | None:
        """How many tokens `text` takes by itself; None while the model is not ready."""
        if self._format is None or isinstance(self._format, FloeError):
            return None
        return len(self._format.encode_text(text))

    def context_of(self, messages: Sequence[Message], max_new_tokens: int) -> tuple[int, int] | None:
        """How many tokens a chat takes before its next question, and how many of its oldest messages leave for that to
        fit with its answer; for any thread.

        None while the model is not ready, or where its template refuses the chat.
        """
        chat = self._format
        if chat is None or isinstance(chat, FloeError):
            return None
        asked = [] if messages and messages[-1].role == "user" else [Message("user", "")]
        try:
            prompt, dropped = self._fit(chat, (*messages, *asked), max_new_tokens, ())
        except FloeError:
            return None
        return len(prompt), dropped

    def costs(self) -> tuple[Cost, ...]:
        """The presets of the loaded pack, best first, and what each was measured to cost.

        Raises:
            FloeError: the pack is gone.
        """
        from ..engine import quality
        from ..models.manifest import Manifest

        manifest = Manifest.read(self._pack)
        measured = {tuned.name: tuned for tuned in manifest.tuned}
        costs: list[Cost] = []
        for preset in quality.of(manifest):
            known = measured.get(preset.name)
            if known is None:
                costs.append(Cost(preset, None, None))
            else:
                costs.append(Cost(preset, known.kl, known.bytes_per_token, known.text, known.tokens))
        return tuple(costs)

    def cancel(self) -> None:
        """Stop the running answer, if there is one."""
        if self._running is not None:
            self._session.send(Cancel(self._running[0]))

    def set_preset(self, preset: str) -> None:
        """Change the quality preset from the next token on."""
        self._session.send(SetPreset(preset))

    def set_quality(self, quality: SetQuality) -> None:
        """Turn the quality dial by hand, from the next token on."""
        self._session.send(quality)

    def close(self) -> None:
        """End the engine; never hangs: the thread is a daemon and is given half a second to leave by itself."""
        self._session.send(Shutdown())
        self._session.join(0.5)

    def _model_ready(self, event: Loaded) -> list[Update]:
        """Pass `event` on when the chat format is there too; the two load side by side."""
        if event.folder != self._load.pack:  # another model was asked for meanwhile
            return []
        if not self._format_ready.is_set():
            self._held = event
            return []
        if isinstance(self._format, FloeError):
            error = self._format
            return [Failed(error.title, error.cause, error.hint, None, error.exit_code)]
        self._window = event.context_window
        return [event]

    def _read_format(self, pack: Path, ready: threading.Event) -> None:
        found: ChatFormat | FloeError
        try:
            from ..models.chat_format import ChatFormat

            found = ChatFormat(pack)
        except FloeError as error:
            found = error
        # This thread's border: without an answer here the model would never be ready.
        except Exception as error:  # noqa: BLE001
            found = FloeError("The tokenizer failed", f"{type(error).__name__}: {error}", "Pack the model again.")
        if ready is self._format_ready:  # no other model was asked for meanwhile
            self._format = found
        ready.set()

    def _fit(
        self, chat: ChatFormat, messages: Sequence[Message], max_new_tokens: int, begun: Sequence[int]
    ) -> tuple[list[int], int]:
        """The prompt with the beginning of the answer, and how many of the oldest messages it leaves out."""
        from ..engine import context

        system = [message for message in messages[:1] if message.role == "system"]
        turns = list(messages[len(system) :])
        limit = self._window - context.room_for_answer(self._window, max_new_tokens)

        most = (len(turns) + 1) // 2  # a question leaves together with its answer

        def first(rounds: int) -> int:
            return 0 if rounds == most else len(turns) + 1 - 2 * rounds

        def prompt(rounds: int) -> list[int]:
            kept = (*system, *turns[first(rounds) :])
            return chat.encode([{"role": m.role, "content": m.text} for m in kept]) + list(begun)

        best, fits, over, step = prompt(1), 1, most + 1, 1
        if len(best) > limit:
            bare = chat.encode([{"role": m.role, "content": m.text} for m in (*system, Message("user", ""))])
            long = "message is" if len(bare) <= limit else "instructions are"
            raise UsageError(
                f"The {long} too long for the model's window",
                f"{len(best):,} tokens with the model's own marks; the window holds {self._window:,}"
                f" and {self._window - limit:,} of them are kept for the answer.",
                f"Shorten the {long.split()[0]}, or ask for a shorter answer (--max-tokens).",
            )
        # In steps that double, then by halves: a chat of thousands of turns is not encoded thousands of times.
        while over - fits > 1:
            rounds = min(fits + step, most) if over > most else (fits + over) // 2
            longer = prompt(rounds)
            if len(longer) <= limit:
                best, fits, step = longer, rounds, step * 2
            else:
                over = rounds
        return best, first(fits)
