"""The engine thread: commands in, events out. Importing this file is cheap; torch is loaded by the thread itself."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
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
from .outcomes import explained
from .torch_import import import_torch

if TYPE_CHECKING:
    from .decoder.kv_cache import KVCache
    from .decoder.kv_shelf import KVShelf
    from .loader import LoadedModel
    from .parallel.spread import Spread
    from .sampling import Allowed

PARKED = 1 / 32  # of the RAM that is free once the model is loaded, for conversations that may come back
STATS_EVERY_S = 0.2  # 5 Hz, as often as a person can follow
NO_ROOM = Notice(
    "This chat no longer fits in GPU memory",
    "Part of its context is now read from RAM for each token, so its answers become slower. A new chat is fast again.",
)
_log = logging.getLogger("floe_chat.engine")


class Session:
    """One engine on a daemon thread of its own.

    `send` never blocks and `poll` returns events since the last call; both may be called from any thread. A cancel is
    seen within one layer, since it does not queue behind the running answer.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._waiting: deque[Command] = deque()
        self._events: Mailbox[Event] = Mailbox()
        self._lock = threading.Lock()
        self._cancelled: set[int] = set()
        self._allowed: dict[int, Allowed] = {}
        self._running: int | None = None
        self._closing = False
        self._loaded: LoadedModel | None = None
        self._kv: KVCache | None = None  # of the loaded model; kept after an answer for the conversation's next turn
        self._shelf: KVShelf | None = None  # of conversations before that one
        self._spread: Spread | None = None  # over several processes
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
                if self._loaded is not None and self._must_stop(self._running):
                    self._loaded.control.cancelled.set()
        if not isinstance(command, Cancel):
            self._commands.put(command)

    def constrain(self, request: int, allowed: Allowed) -> None:
        """Let `allowed` say which tokens the answer to `request`, still to be sent, may have."""
        self._allowed[request] = allowed

    def poll(self, timeout: float = 0.0) -> list[Event]:
        """Events since the last call, in order; waits at most `timeout` seconds for the first."""
        return self._events.take(timeout)

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on the engine's thread, whenever there is something to `poll`."""
        self._events.heard = heard

    def join(self, timeout: float) -> bool:
        """Wait for the thread to end; False if it still runs after `timeout` seconds."""
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _must_stop(self, request: int | None) -> bool:
        return request is not None and (self._closing or request in self._cancelled)

    def _run(self) -> None:
        while True:
            command = self._waiting.popleft() if self._waiting else self._commands.get()
            if self._closing:
                self._forget()
                if self._spread is not None:
                    with suppress(FloeError):  # another process ended first
                        self._spread.group.end()
                return
            try:
                self._obey(command)
            except FloeError as error:
                self._fail(error.title, error.cause, error.hint, command, error.exit_code)
            # The thread's border: every failure below must reach the user, and the engine must survive it. A panic of a
            # Rust library, such as the one that reads weights, is not an Exception.
            except BaseException as error:  # noqa: BLE001
                if (known := explained(error)) is not None:
                    _log.warning("%s: %s", type(command).__name__, error)
                    self._fail(known.title, known.cause, known.hint, command, known.exit_code)
                    continue
                _log.exception("%s failed", type(command).__name__)
                title = "The answer stopped" if isinstance(command, Generate) else "The engine failed"
                hint = "This is a bug in floe-chat; the log has the details. Try again, or load the model again."
                self._fail(title, f"{type(error).__name__}: {error}", hint, command, 1)

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
                self._events.put(Unloaded())
            case Cancel() | Shutdown():  # dealt with where they arrive
                pass

    def _fail(self, title: str, cause: str, hint: str, command: Command, exit_code: int) -> None:
        request = command.request if isinstance(command, Generate) else None
        self._events.put(Failed(title, cause, hint, request, exit_code))

    def _forget(self) -> None:
        """Unload the model and everything computed with it."""
        loaded, self._loaded, self._kv, self._shelf = self._loaded, None, None, None
        if loaded is not None:
            loaded.close()

    def _load(self, command: Load) -> None:
        self._events.put(Loading("Starting torch", 0.0))
        import_torch()
        from .decoder.kv_cache import KVCache
        from .decoder.kv_shelf import KVShelf
        from .loader import load, load_together
        from .machine.hardware import ram
        from .parallel.leading import lead

        self._forget()  # the old model's memory goes before the new one's comes
        folder, parked = Path(command.pack), command.parked

        def report(step: str, share: float) -> None:
            self._events.put(Loading(step, share))

        self._spread = spread = lead(command, report)
        if spread is None:
            loaded, event = load(
                folder, command.preset, command.device, report, vram=command.vram, advanced=command.advanced
            )
        else:
            loaded, event = load_together(lambda: folder, command, report, spread)
            parked = 0  # other processes have keys and values too, and no copies
        self._loaded, self._kv = loaded, KVCache()
        self._shelf = KVShelf(int(PARKED * ram()[1]) if parked is None else parked)
        self._spilled.clear()
        self._events.put(event)
        # Memory is known before the first answer; what was not measured stays None.
        self._events.put(
            loaded.telemetry.stats(
                kv_bytes=0, vram_bytes=loaded.vram_bytes(), context_used=0, context_window=loaded.window
            )
        )

    def _set_preset(self, command: SetPreset | SetQuality) -> None:
        from . import quality_presets

        loaded = self._need_model()
        manifest = loaded.packed.manifest
        if isinstance(command, SetPreset):
            preset = quality_presets.get(command.preset, manifest)
        else:
            preset = quality_presets.custom(manifest, command.rule)
        loaded.control.preset = preset
        self._events.put(PresetChanged(preset.name))

    def _need_model(self) -> LoadedModel:
        if self._loaded is None:
            raise FloeError("No model is loaded", "", "Load one first.")
        return self._loaded

    def _generate(self, command: Generate) -> None:
        from .decoder.kv_cache import KVCache
        from .experts.moe_layer import Cancelled

        loaded = self._need_model()
        loaded.telemetry.begin(command.request, len(command.prompt), loaded.telemetry.clock())
        kv = self._kv = self._kv or KVCache()
        with self._lock:
            loaded.control.cancelled.clear()
            self._running = command.request
            if self._must_stop(command.request):
                loaded.control.cancelled.set()
        try:
            reason = self._answer(command, loaded, kv)
        except Cancelled:
            reason = "cancelled"
        finally:
            with self._lock:
                self._running = None
                self._cancelled.discard(command.request)
                self._allowed.pop(command.request, None)
        self._events.put(Finished(command.request, reason, self._stats(loaded, kv, command)))

    def _answer(self, command: Generate, loaded: LoadedModel, kv: KVCache) -> str:
        from .generate import generate

        if self._shelf is not None:
            self._shelf.turn_to(kv, command.prompt, loaded.control.preset)
        steps = generate(
            loaded.decoder,
            kv,
            command.prompt,
            command.sampling,
            max_new_tokens=command.max_new_tokens,
            stop_ids=command.stop_ids,
            window=loaded.window,
            control=loaded.control,
            telemetry=loaded.telemetry,
            extras=command.extras,
            allowed=self._allowed.get(command.request),
        )
        told = time.perf_counter()
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                return str(end.value)
            except PackError as error:
                raise PackError(error.title, error.cause, verify_hint(loaded.packed.folder)) from error
            if step.token is None:
                self._events.put(PrefillProgress(command.request, step.done, len(command.prompt)))
            else:
                chances = () if step.chance is None else (step.chance,)
                self._events.put(NewTokens(command.request, (step.token,), chances))
            self._tell(loaded, kv, command.conversation)
            self._obey_between_tokens()
            if time.perf_counter() - told > STATS_EVERY_S:
                told = time.perf_counter()
                self._events.put(self._stats(loaded, kv, command))

    def _tell(self, loaded: LoadedModel, kv: KVCache, conversation: int) -> None:
        if conversation not in self._spilled and kv.spilled():
            self._spilled.add(conversation)
            self._events.put(NO_ROOM)
        for notices in (loaded.control.notices, loaded.shared.notices if loaded.shared is not None else []):
            while notices:
                self._events.put(notices.pop(0))

    def _obey_between_tokens(self) -> None:
        """Apply a preset change at once; everything else waits for the answer to end.

        A change sent after a load or unload is meant for the next model, so it waits for that.
        """
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            other_model = any(isinstance(waiting, Load | Unload) for waiting in self._waiting)
            if isinstance(command, SetPreset | SetQuality) and not other_model:
                try:
                    self._set_preset(command)
                except FloeError as error:
                    self._fail(error.title, error.cause, error.hint, command, error.exit_code)
            else:
                self._waiting.append(command)

    def _stats(self, loaded: LoadedModel, kv: KVCache, command: Generate) -> Stats:
        return loaded.telemetry.stats(
            kv_bytes=kv.nbytes(),
            vram_bytes=loaded.vram_bytes(),
            context_used=max(kv.length, len(command.prompt)),
            context_window=loaded.window,
        )
