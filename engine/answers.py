"""The answers that are computed at the same time: together where that is faster, else one after the other.

Together, weights are read once for the tokens of all of them, and a card's rows fetched once: importance-driven expert
scheduling (section 5) measures batches, where its Algorithm 2 has most to balance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .decoder.draft_model import DraftModel
from .decoder.kv_cache import KVCache, Parked
from .decoder.kv_shelf import KVShelf
from .decoder.kv_stores import GrowingStore
from .decoder.state_files import StateFiles
from .drafts import Depth
from .events import MOST_TOGETHER as MOST
from .events import Generate
from .experts.moe_layer import Cancelled
from .generate import Answer, Progress, step_together
from .loader import LoadedModel
from .machine.hardware import ram
from .pace import Pace
from .quality_presets import Preset
from .sampling import Allowed

_LIKELY = 1024  # tokens of an answer that memory has to be there for
_RAM = 1 / 4  # of what is free, that another answer may take


@dataclass(slots=True)
class Running:
    """One of them. `told`: when its figures were, by time.perf_counter."""

    command: Generate
    answer: Answer
    told: float

    @property
    def request(self) -> int:
        """The request's number."""
        return self.command.request


@dataclass(frozen=True, slots=True)
class Step:
    """What came of one answer's step: progress, or an error that ends it."""

    running: Running
    progress: Sequence[Progress]
    error: BaseException | None = None


class Answers:
    """Those of a loaded model.

    Attributes:
        running: the first to begin first. together: of how many the last tokens came.
        kv: of the chat that the device's memory is planned for. unkept: whether there is more of it than in a file.
        files: for states of saved chats; None: none are kept.
    """

    def __init__(
        self, loaded: LoadedModel, shelf: KVShelf, files: StateFiles | None = None, *, draft: bool = True
    ) -> None:
        self._loaded, self._shelf, self.files, self._pace = loaded, shelf, files, Pace()
        head = loaded.decoder.head
        self._depth = (Depth(head.cost) if isinstance(head, DraftModel) else Depth()) if draft else None
        self._chat, self._begun, self.unkept = 0, 0.0, False  # of what `kv` holds
        self.running: list[Running] = []
        self.together = 1
        self.kv = KVCache()
        self._beside: list[KVCache] = []  # free ones

    def joins(self, command: Generate) -> bool:
        """Whether an answer may begin beside those that run, of which none reads its prompt."""
        together = len(self.running) + 1
        if together > MOST or any(one.answer.reading for one in self.running):
            return False
        if not self._pace.may_join(self._loaded.control.preset, together):
            return False
        if all(one.answer.kv is not self.kv for one in self.running) or self._beside:
            return True
        if (new := self._loaded.decoder.beside()) is None:
            return False
        assert isinstance(new.store, GrowingStore)
        layout, tokens = new.store.layout, len(command.prompt) + min(command.max_new_tokens, _LIKELY)
        if new.nbytes() + layout.nbytes(layout.layers, tokens) > _RAM * ram()[1]:
            return False
        self._beside.append(new)
        return True

    def begin(self, command: Generate, allowed: Allowed | None) -> Running:
        """Begin one, after `joins` if others run.

        Raises:
            ValueError, UsageError: see `Answer`.
        """
        loaded, control, others = self._loaded, self._loaded.control, [one.answer.kv for one in self.running]
        kv = self.kv if all(kv is not self.kv for kv in others) else self._beside.pop()
        try:
            loaded.telemetry.begin(
                *(command.request, len(command.prompt), loaded.telemetry.clock()), beside=bool(others)
            )
            answer = Answer(
                *(loaded.decoder, kv, command.prompt, command.sampling),
                max_new_tokens=command.max_new_tokens,
                stop_ids=command.stop_ids,
                window=loaded.window,
                control=control,
                telemetry=loaded.telemetry,
                extras=command.extras,
                allowed=allowed,
                alike=command.alike,
                depth=self._depth,
            )
        except BaseException:
            self._leave(kv)
            raise
        how = command.prompt, control.preset
        if kv is not self.kv or self.files is None or command.conversation == self._chat:
            self._shelf.turn_to(kv, *how, others, alike=answer.alike)
        else:
            self.keep()
            self._chat = command.conversation
            self._shelf.turn_to(kv, *how, others, alike=answer.alike, kept=partial(self._kept, *how, answer.alike))
        if kv is self.kv:
            self._begun = time.time()
        self.running.append(Running(command, answer, time.perf_counter()))
        return self.running[-1]

    def _kept(self, prompt: Sequence[int], preset: Preset, alike: bool, least: int) -> Parked | None:
        """What an earlier start has of the chat, if that serves at least so many tokens of its prompt."""
        if self.files is None or not self._chat:
            return None
        common = partial(Parked.common, prompt=prompt, preset=preset, alike=alike)
        return self.files.find(self._chat, self._loaded.decoder.store(self.kv), common, least)

    def keep(self) -> None:
        """Write what there is of the chat for the next start, if a file lacks it, on another thread."""
        if self.files is not None and self.unkept and self._chat:
            self.files.keep(self._chat, self.kv, self._begun)
        self.unkept = False

    def close(self, patience: float) -> None:
        """No more answers will come: `keep`, and wait at most so many seconds until it is written."""
        if self.files is not None:
            self.keep()
            self.files.close(patience)

    def end(self, one: Running) -> None:
        """It has ended, or is given up."""
        self.running = [other for other in self.running if other is not one]
        self.unkept |= one.answer.kv is self.kv and self.files is not None
        self._leave(one.answer.kv)

    def _leave(self, kv: KVCache) -> None:
        if kv is not self.kv:
            self._shelf.leave(kv)
            self._beside = [kv] if self.running else []
            kv.cut(0)
        if not self.running:
            self._beside = []

    def step(self) -> list[Step]:
        """A part of the first prompt that is being read, and the next tokens: of all others together, or of the first.

        Raises:
            Cancelled: one of them was stopped before anything came; all are as before.
        """
        reading = [one for one in self.running if one.answer.reading][:1]
        begins = [one for one in self.running if not one.answer.reading and not one.answer.joins]
        group = [one for one in self.running if one.answer.joins]
        found: list[Step] = []
        try:
            for one in (*reading, *begins):
                found.append(self._one(one))
            if group and not begins:  # else all wait for those, to go on together
                joined = self._pace.joins(self._loaded.control.preset, len(group))
                found += self._timed(group if joined else group[:1])
        except Cancelled:
            if not found:
                raise
        return found

    def _timed(self, group: Sequence[Running]) -> list[Step]:
        telemetry, preset = self._loaded.telemetry, self._loaded.control.preset
        began = telemetry.clock()
        steps = self._together(group) if len(group) > 1 else None
        self.together = 1 if steps is None else len(group)
        steps = steps or [self._one(group[0])]
        if tokens := sum(len(step.progress) for step in steps):
            self._pace.observed(preset, self.together, telemetry.clock() - began, tokens)
        return steps

    def _together(self, group: Sequence[Running]) -> list[Step] | None:
        """None if it cannot be."""
        control, began = self._loaded.control, self._loaded.telemetry.clock()
        preset = control.preset
        try:
            logits = step_together([one.answer for one in group], control)
        except Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - the session's border reports it for each
            return [Step(one, (), error) for one in group]
        if logits is None:
            self._pace.refused(preset, len(group))
            return None
        found: list[Step] = []
        for one, row in zip(group, logits.split(1), strict=True):
            try:
                found.append(Step(one, one.answer.take(row, began, preset)))
            except BaseException as error:  # noqa: BLE001 - likewise
                found.append(Step(one, (), error))
        return found

    def _one(self, one: Running) -> Step:
        try:
            return Step(one, one.answer.step())
        except Cancelled:
            raise
        except BaseException as error:  # noqa: BLE001 - likewise
            return Step(one, (), error)
