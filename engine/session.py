"""The engine thread: commands in, events out. Importing this file is cheap; torch is loaded by the thread itself."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..models.errors import FloeError, PackError, verify_hint
from .events import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    Loading,
    NewTokens,
    Notice,
    PrefillProgress,
    PresetChanged,
    SetPreset,
    SetQuality,
    Shutdown,
    Stats,
    Unload,
    Unloaded,
)
from .mailbox import Mailbox
from .outcomes import card_failed, card_lost, explained
from .torch_import import import_torch

if TYPE_CHECKING:
    from .answers import Answers, Running, Step
    from .decoder.state_files import StateFiles
    from .loader import LoadedModel
    from .parallel.spread import Spread
    from .sampling import Allowed

PARKED = 1 / 32  # of the RAM that is free once the model is loaded, for conversations that may come back
STATS_EVERY_S = 0.2  # 5 Hz, as often as a person can follow
READING_EVERY_S = 0.5  # within a part of a prompt, which may take many seconds
KEPT_AFTER_S = 10.0  # of silence, a chat's states are written: its answer is being read, or nobody is there
MOMENT_S = 1.5  # that the end of the program waits for that
NO_ROOM = Notice(
    "This chat no longer fits in GPU memory",
    "Part of its context is now read from RAM for each token, so its answers become slower. A new chat is fast again.",
)
_log = logging.getLogger("floe_chat.engine")


class Session:
    """One engine on a daemon thread of its own.

    Some answers are computed at the same time where that is faster (`answers.py`), else one after the other.
    `send` never blocks and `poll` returns events since the last call; both may be called from any thread. A cancel is
    seen within one layer, since it does not queue behind the running answer. After it, nothing of the answer is
    reported but its end.

    Attributes:
        keeping: whether it is about to end, and what there is of a chat is written before.
    """

    def __init__(self, report: Callable[[Event], None] | None = None) -> None:
        """`report` gets each event, on the engine's thread, and never waits; without one, `poll` returns them."""
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: deque[Command] = deque()
        self._events: Mailbox[Event] = Mailbox()
        self._say = report or self._events.put
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._allowed: dict[int, Allowed] = {}
        self._running: set[int] = set()
        self._closing = self.keeping = False
        self._loaded: LoadedModel | None = None
        self._answers: Answers | None = None  # of the loaded model
        self._spread: Spread | None = None  # over several processes
        self._lost = ""  # what a card's driver reported, if it refuses everything since
        self._held: list[object] = []  # what is on such a card: freeing it would call the driver, and end the process
        self._spilled: set[int] = set()  # chats of which NO_ROOM was said
        self._thread = threading.Thread(target=self._run, name="floe-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; commands sent before wait for it."""
        self._thread.start()

    def send(self, command: Command) -> None:
        """Hand over a command."""
        if isinstance(command, Cancel | Shutdown):
            with self._lock:
                if isinstance(command, Cancel):
                    self._cancelled.add(command.request)
                else:
                    self._closing = True
                if self._loaded is not None and any(map(self.must_stop, self._running)):
                    self._loaded.control.cancelled.set()
        if not isinstance(command, Cancel):
            self._commands.put(command)

    def constrain(self, request: int, allowed: Allowed) -> None:
        """Let `allowed` say which tokens the answer to `request`, still to be sent, may have."""
        self._allowed[request] = allowed

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Events since the last call, in order; waits at most `timeout` seconds for the first."""
        return self._events.take(timeout)

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False if it still runs after `timeout` seconds."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def must_stop(self, request: int) -> bool:
        """Whether the answer to `request` was cancelled, or the engine is to end; for any thread."""
        return self._closing or request in self._cancelled

    def _run(self) -> None:
        while True:
            command = self._waiting.popleft() if self._waiting else self._next()
            if self._closing:
                self.keeping = self._answers is not None and self._answers.files is not None
                try:
                    self._forget(MOMENT_S)
                except RuntimeError as error:
                    if not card_failed(error):
                        raise
                    _log.warning("a card failed while the model was closed: %s", error)
                if self._spread is not None:
                    with suppress(FloeError):  # another process ended first
                        self._spread.group.end()
                return
            try:
                self._obey(command)
            # The thread's border: every failure below must reach the user, and the engine must survive it. A panic of a
            # Rust library, such as the one that reads weights, is not an Exception.
            except BaseException as error:  # noqa: BLE001
                self._fail(error, command)
            if self._loaded is None:  # nor does a model that could not be loaded keep what it had so far
                _give_back()

    def _next(self) -> Command:
        """The next command. If none comes for a while, what there is of a chat is written."""
        if self._answers is not None and self._answers.unkept:
            with suppress(queue.Empty):
                return self._commands.get(timeout=KEPT_AFTER_S)
            self._answers.keep()
        return self._commands.get()

    def _obey(self, command: Command) -> None:
        match command:
            case Load():
                self._load(command)
            case Generate():
                self._generate(command)
            case SetPreset() | SetQuality():
                self._set_preset(command)
            case Unload():
                self._forget()
                self._say(Unloaded())
            case Cancel() | Shutdown():  # dealt with where they arrive
                pass

    def _fail(self, error: BaseException, command: Command) -> None:
        request = command.request if isinstance(command, Generate) else None
        known = error if isinstance(error, FloeError) else explained(error)
        if reported := card_failed(error):
            _log.error("%s: a card failed", type(command).__name__, exc_info=error)
            known = self._lose(error, reported, request) or known
        if known is None:
            _log.error("%s failed", type(command).__name__, exc_info=error)
            title = "The answer stopped" if isinstance(command, Generate) else "The engine failed"
            hint = "This is a bug in floe-chat; the log has the details. Try again, or load the model again."
            known = FloeError(title, f"{type(error).__name__}: {error}", hint)
        elif known is not error and not reported:
            _log.warning("%s: %s", type(command).__name__, str(error))  # whose frames hold what it was about
        if isinstance(known, PackError) and request is not None and self._loaded is not None:
            known = PackError(known.title, known.cause, verify_hint(self._loaded.packed.folder))
        self._say(Failed(known.title, known.cause, known.hint, request, known.exit_code))

    def _lose(self, error: BaseException, reported: str, request: int | None) -> FloeError | None:
        """Give up the model if a card fails for good, and end all other answers; None if the card still works."""
        from .machine import gpus

        if not gpus.lost():
            return None
        self._lost, known = reported, card_lost(reported)
        self._held += [error, self._loaded, self._answers]  # an error's frames hold what was being computed
        if self._answers is not None:
            running, self._answers.running = self._answers.running, []
            self._held += running
            for command in [one.command for one in running]:
                self._leave(command)
                if command.request != request:
                    self._say(Failed(known.title, known.cause, known.hint, command.request, known.exit_code))
        self._loaded = self._answers = None
        return known

    def _forget(self, patience: float = 0.0) -> None:
        """Unload the model and everything computed with it; patience: see `Answers.close`."""
        if self._answers is not None:
            self._answers.close(patience)
        loaded, self._loaded, self._answers = self._loaded, None, None
        if loaded is not None:
            loaded.close()
            del loaded  # or its memory could not be given back
            _give_back()

    def _load(self, command: Load) -> None:
        self._say(Loading("Starting torch", 0.0))
        import_torch()
        from .answers import Answers
        from .decoder.kv_shelf import KVShelf
        from .loader import load, load_together
        from .machine.hardware import ram
        from .parallel.leading import lead

        if self._lost and command.device != "cpu":
            raise card_lost(self._lost)
        self._forget()  # the old model's memory goes before the new one's comes
        folder, parked = Path(command.pack), command.parked

        def report(step: str, share: float) -> None:
            self._say(Loading(step, share))

        self._spread = spread = lead(command, report)
        if spread is None:
            loaded, event = load(
                folder, command.preset, command.device, report, vram=command.vram, advanced=command.advanced
            )
        else:
            loaded, event = load_together(lambda: folder, command, report, spread)
            parked = 0  # other processes have keys and values too, and no copies
        self._loaded = loaded
        shelf = KVShelf(int(PARKED * ram()[1]) if parked is None else parked)
        files = None if spread is not None else self._files(command, loaded, event)
        self._answers = Answers(loaded, shelf, files, draft=bool(command.advanced.draft))
        self._spilled.clear()
        self._say(event)
        # Memory is known before the first answer; what was not measured stays None.
        self._say(
            loaded.telemetry.stats(
                kv_bytes=0, vram_bytes=loaded.vram_bytes(), context_used=0, context_window=loaded.window
            )
        )

    def _files(self, command: Load, loaded: LoadedModel, event: Loaded) -> StateFiles | None:
        """Where states of saved chats are kept; None: nowhere."""
        if not command.states:
            return None
        from .decoder.state_files import StateFiles

        how = f"{event.backend}, {event.device}, {loaded.control.chunk}"  # they decide how sums round
        try:
            return StateFiles(Path(command.pack), how, command.states)
        except (OSError, ImportError) as error:
            _log.warning("states of chats are not kept: %s", error)
            return None

    def _set_preset(self, command: SetPreset | SetQuality) -> None:
        from . import quality_presets

        loaded = self._need_model()
        manifest = loaded.packed.manifest
        if isinstance(command, SetPreset):
            preset = quality_presets.get(command.preset, manifest)
        else:
            preset = quality_presets.custom(manifest, command.rule)
        loaded.control.preset = preset
        self._say(PresetChanged(preset.name))

    def _need_model(self) -> LoadedModel:
        if self._lost and self._loaded is None:
            raise card_lost(self._lost)
        if self._loaded is None:
            raise FloeError("No model is loaded", "", "Load one first.")
        return self._loaded

    def _generate(self, command: Generate) -> None:
        """Compute answers until none runs."""
        from .experts.moe_layer import Cancelled

        self._need_model().control.cancelled.clear()
        self._begin(command)
        answers = self._answers
        assert answers is not None
        while answers.running:
            with suppress(Cancelled):
                for step in answers.step():
                    self._report(step)
            for running in answers.running:  # a step that computes nothing new does not see a cancel
                if self.must_stop(running.request):
                    self._end(running, "cancelled")
            self._obey_between_tokens()

    def _begin(self, command: Generate) -> None:
        answers = self._answers
        assert answers is not None
        with self._lock:
            self._running.add(command.request)
            cancelled = self.must_stop(command.request)
        if cancelled:
            self._withdraw(command)
            return
        try:
            running = answers.begin(command, self._allowed.get(command.request))
            running.answer.reached = partial(self._reached, running)
        except BaseException as error:  # noqa: BLE001 - as in `_run`: others may go on
            self._leave(command)
            self._fail(error, command)

    def _withdraw(self, command: Generate) -> None:
        """It was cancelled before it began."""
        self._leave(command)
        loaded = self._need_model()
        stats = loaded.telemetry.nothing(command.request, len(command.prompt), loaded.window)
        self._say(Finished(command.request, "cancelled", stats))

    def _leave(self, command: Generate) -> None:
        """It does not run any more; others are stopped only if they have to be."""
        with self._lock:
            for kept in (self._running, self._cancelled):
                kept.discard(command.request)
            self._allowed.pop(command.request, None)
            if self._loaded is not None and not any(map(self.must_stop, self._running)):
                self._loaded.control.cancelled.clear()

    def _end(self, running: Running, why: str | BaseException) -> None:
        answers = self._answers
        assert answers is not None
        self._leave(running.command)
        if isinstance(why, str):
            self._say(Finished(running.request, why, self._stats(running)))
        else:
            self._fail(why, running.command)
        if running in answers.running:  # else a card failed, which ended them all
            answers.end(running)

    def _reached(self, running: Running, done: int) -> None:
        if time.perf_counter() - running.told >= READING_EVERY_S:
            running.told = time.perf_counter()
            with self._lock:
                if not self.must_stop(running.request):
                    self._say(PrefillProgress(running.request, done, len(running.command.prompt)))

    def _report(self, step: Step) -> None:
        running = step.running
        if self._answers is None:  # a card failed at another answer's step, which ended them all
            return
        with self._lock:  # so that none of it follows a cancel
            cancelled = self.must_stop(running.request)
            for one in () if cancelled else step.progress:
                if one.token is None:
                    self._say(PrefillProgress(running.request, one.done, len(running.command.prompt)))
                else:
                    chances = () if one.chance is None else (one.chance,)
                    self._say(NewTokens(running.request, (one.token,), chances))
        self._tell(running)
        if cancelled:
            self._end(running, "cancelled")
        elif step.error is not None or running.answer.end:
            self._end(running, step.error or running.answer.end)
        elif time.perf_counter() - running.told > STATS_EVERY_S:
            running.told = time.perf_counter()
            self._say(self._stats(running))

    def _tell(self, running: Running) -> None:
        loaded, kv, chat = self._need_model(), running.answer.kv, running.command.conversation
        assert self._answers is not None
        if kv is self._answers.kv and chat not in self._spilled and kv.spilled():
            self._spilled.add(chat)
            self._say(NO_ROOM)
        for notices in (loaded.control.notices, loaded.shared.notices if loaded.shared is not None else []):
            while notices:
                self._say(notices.pop(0))

    def _obey_between_tokens(self) -> None:
        """Apply a preset change at once, and begin answers that may join those that run; everything else waits for
        these to end.

        A change sent after a load or unload is meant for the next model, so it waits for that.
        """
        while not self._commands.empty():
            command = self._commands.get_nowait()
            other_model = any(isinstance(waiting, Load | Unload) for waiting in self._waiting)
            if isinstance(command, SetPreset | SetQuality) and not other_model:
                try:
                    self._set_preset(command)
                except FloeError as error:
                    self._fail(error, command)
            else:
                self._waiting.append(command)
        for command in [one for one in self._waiting if isinstance(one, Generate) and self.must_stop(one.request)]:
            self._waiting.remove(command)
            self._withdraw(command)
        while self._waiting and isinstance(command := self._waiting[0], Generate):
            if self._answers is None or not self._answers.running or not self._answers.joins(command):
                return
            self._begin(self._waiting.popleft())  # pyright: ignore[reportArgumentType]

    def _stats(self, running: Running) -> Stats:
        loaded, kv = self._need_model(), running.answer.kv
        assert self._answers is not None
        loaded.telemetry.answer = running.answer.counts
        found = loaded.telemetry.stats(
            kv_bytes=kv.nbytes(),
            vram_bytes=loaded.vram_bytes(),
            context_used=max(kv.length, len(running.command.prompt)),
            context_window=loaded.window,
        )
        return replace(found, together=self._answers.together)


def _give_back() -> None:
    """Return what a model left on graphics cards, for other programs and the next model."""
    if "torch" in sys.modules:
        from .machine import gpus

        gpus.give_back()
