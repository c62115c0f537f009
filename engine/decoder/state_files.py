"""States of saved chats on the disk: what `KVShelf` parks in RAM, for the next start.

A file is safetensors: the tokens, keys and values of each layer that attends, and states at few places. JSON in its
header says how they were computed, by which `Computed.common` decides what of them serves a prompt. All of it is
sealed: what is damaged, or is not this user's, is deleted, and the prompt read instead. The conversation itself is
never here.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from threading import Thread

import msgspec
import torch

from ...models import private_file, sealed_tensors
from .. import state_folder
from ..machine.hardware import ram
from ..quality_presets import Preset
from .kv_cache import Computed, Held, KVCache, KVStore, Parked, StateCopy
from .kv_stores import GrowingStore

LEAST = 256  # tokens that are worth a file: some take 64 MB and more however few tokens they are of
_FORMAT = 1
_RAM = 1 / 4  # of what is free, for a copy on its way
_TURNS = 2  # places, besides the last one, that states are kept of: where the last question ends, and before that
_log = logging.getLogger("floe_chat.engine")


@dataclass(frozen=True, slots=True)
class _Header:
    """How the tensors of a file were computed: see `Computed` and `Held`.

    Attributes:
        presets: one after the other, by which so many tokens were computed. copies: the length and turn of each
            `StateCopy`. entries, states: how many layers attend, and how many keep a state.
    """

    presets: list[tuple[Preset, int]]
    chunks: list[int]
    long: bool
    first: int
    sees: int
    entries: int
    states: int
    copies: list[tuple[int, bool]]


class StateFiles:
    """Those of a loaded model.

    Args:
        pack: its folder. how: what else its states depend on, besides the program's version. most: bytes that all files
            may take.

    Raises:
        OSError: the folder cannot be made, or the pack's manifest not read. ImportError: the program has no version.
    """

    def __init__(self, pack: Path, how: str, most: int) -> None:
        private_file.own_folder(state_folder.states_folder())
        self._mark, self._most = state_folder.pack_mark(pack), most
        self._how = f"{_FORMAT}, {version('floe-chat')}, {how}"
        self._writing: Thread | None = None

    def find(self, chat: int, store: KVStore | None, common: Callable[[Parked], int], least: int) -> Parked | None:
        """What was kept of a chat, if `common` says that at least so many tokens of it serve, and `store` takes them.

        What is damaged is deleted, and the log says why.
        """
        if not isinstance(store, GrowingStore) or not (file := self._file(chat, store)).exists():
            return None
        try:
            private_file.need_ordinary(file)
            if not private_file.is_ours(file):
                raise PermissionError("it is a link, or other users could have written it")
            if (taken := file.stat().st_size) > self._most:
                raise ValueError("it takes more than all may")
            if taken > _RAM * ram()[1]:
                _log.info("a chat's text is read again: there is no memory for %s", file)
                return None
            if (parked := _read(file, common, least, store)) is not None:
                os.utime(file)
        except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
            _log.warning("a chat's text is read again: %s: %s", file, error)
            if private_file.is_ours(file):
                state_folder.delete([file])
            return None
        return parked

    def keep(self, chat: int, kv: KVCache, begun: float) -> None:
        """Write what is there of a chat, on another thread; begun: when its answer did, by time.time().

        Where that cannot be done, the log says so.
        """
        if kv.length < LEAST:
            return
        try:
            parked = kv.parked(int(min(self._most, _RAM * ram()[1])))
            if parked is None or not isinstance(kv.store, GrowingStore):
                raise ValueError("they are too large, or cannot be copied")
            last = parked.held.copies[-1:]
            turns = [copy for copy in parked.held.copies[:-1] if copy.turn][-_TURNS:]
            parked = Parked(parked.computed, replace(parked.held, copies=[*turns, *last]))
            given = self._writing, chat, self._file(chat, kv.store), parked, begun
            writing = Thread(target=self._write, args=given, name="floe-states", daemon=True)
            writing.start()
            self._writing = writing
        except (ValueError, RuntimeError, MemoryError) as error:  # or there is no memory, or no thread
            _log.info("a chat's states are not kept: %s", error)

    def close(self, patience: float) -> None:
        """Wait at most so many seconds for what is being written."""
        if self._writing is not None:
            self._writing.join(patience)

    def _file(self, chat: int, store: GrowingStore) -> Path:
        layout = store.layout
        form = layout.entries, layout.dtype, layout.windowed, layout.sees
        return state_folder.file_of(chat, self._mark, f"{self._how}, {form}")

    def _write(self, before: Thread | None, chat: int, file: Path, parked: Parked, begun: float) -> None:
        """On its own thread, after the one before."""
        if before is not None:
            before.join()
        try:
            if state_folder.forgotten(chat, begun):
                return
            if not state_folder.make_room(file, parked.nbytes(), self._most):
                _log.info("a chat's states are not kept: there is no room for %d bytes", parked.nbytes())
                return
            _save(file, parked)
            if state_folder.forgotten(chat, begun):
                state_folder.delete([file])
        # The thread's border: a cache that cannot be written is no error of the chat's.
        except Exception as error:  # noqa: BLE001
            _log.warning("a chat's states are not kept: %s: %s", type(error).__name__, error)


def _save(file: Path, parked: Parked) -> None:
    computed, held = parked.computed, parked.held
    presets = [(preset, len(list(run))) for preset, run in itertools.groupby(computed.presets)]
    copies = [(copy.length, copy.turn) for copy in held.copies]
    layers = len(held.entries), len(held.copies[0].states) if held.copies else 0
    header = _Header(presets, computed.chunks, computed.long, held.first, held.sees, *layers, copies)
    tensors = {"tokens": torch.tensor(computed.tokens)}
    tensors |= {f"entries.{layer}": entries for layer, entries in enumerate(held.entries)}
    for number, copy in enumerate(held.copies):
        tensors |= {f"states.{number}.{layer}": state for layer, state in enumerate(copy.states)}
    sealed_tensors.save(file, msgspec.json.encode(header).decode(), tensors, state_folder.secret())


def _read(file: Path, common: Callable[[Parked], int], least: int, store: GrowingStore) -> Parked | None:
    """Nothing but the tokens is read if too few of them serve.

    Raises:
        OSError, ValueError, LookupError, RuntimeError, TypeError: it is not what `_save` wrote.
    """
    sealed = sealed_tensors.read(file)
    header, tensors = msgspec.json.decode(sealed.how, type=_Header), sealed.tensors
    tokens: list[int] = tensors["tokens"].tolist()
    presets = (preset for preset, count in header.presets for _ in range(count))
    computed = Computed(tokens, [*itertools.islice(presets, len(tokens))], header.chunks, long=header.long)

    def parked() -> Parked:
        copies = [
            StateCopy(length, [tensors[f"states.{number}.{layer}"] for layer in range(header.states)], turn)
            for number, (length, turn) in enumerate(header.copies)
        ]
        entries = [tensors[f"entries.{layer}"] for layer in range(header.entries)]
        return Parked(computed, Held(entries, copies, header.first, header.sees))

    if (found := common(parked())) < least:
        return None
    tensors = sealed.checked(state_folder.secret())
    if not store.fits(parked().held, found):
        raise ValueError("it does not fit the model")
    return parked()
