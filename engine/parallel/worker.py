"""What every process but number 0 does: the passes that it is told to compute."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from ...models.errors import FloeError
from ..decoder.decoders import Decoder
from ..decoder.kv_cache import KVCache
from ..experts.moe_layer import Cancelled, Control
from .group import Group
from .members import GroupLost
from .messages import End, Forget, Look, Open, Pass

_log = logging.getLogger("floe_chat.engine")


class Model(Protocol):
    """What a worker needs of a loaded model."""

    decoder: Decoder
    control: Control

    def close(self) -> None:
        """Free what it holds."""
        ...


class Worker:
    """Serves process 0.

    Args:
        load: opens a model as a message says. report: called with what a person should know.
    """

    def __init__(self, group: Group, load: Callable[[Open], Model], report: Callable[[str], None]) -> None:
        self._group, self._load, self._report = group, load, report
        self._model: Model | None = None
        self._kept: dict[int, KVCache] = {}

    def run(self) -> None:
        """Until process 0 ends.

        Raises:
            GroupLost: a process does not answer, this one included.
        """
        while not isinstance(message := self._group.hear(), End):
            try:
                self._obey(message)
            except (Cancelled, GroupLost) as end:
                if isinstance(end, GroupLost):
                    raise
            except FloeError as error:
                if isinstance(message, Open):  # all processes know it
                    self._report(str(error))
                    continue
                self._fail(error)
            # Whatever it is, the others wait for this process's part.
            except Exception as error:  # noqa: BLE001
                _log.exception("a pass failed")
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._group.give_up(str(error) if isinstance(error, FloeError) else f"{type(error).__name__}: {error}")
        raise self._group.lost from error

    def _obey(self, message: Open | Pass | Look | Forget | End) -> None:
        match message:
            case Open():
                self._forget()
                self._model = self._load(message)
            case Pass():
                self._pass(message)
            case Look():
                self._need().decoder.first_nonfinite(message.ids)
            case Forget():
                self._forget()
            case End():
                pass

    def _pass(self, told: Pass) -> None:
        model = self._need()
        if told.preset is not None:
            model.control.preset = told.preset
        model.control.counting = told.counting
        for number in told.gone:
            self._kept.pop(number, None)
        kv = self._kept.setdefault(told.kv, KVCache())
        kv.cut(told.start)
        model.decoder.forward(told.ids, kv)
        kv.computed(told.ids, model.control.preset)

    def _need(self) -> Model:
        assert self._model is not None, "process 0 asks for a pass before it has opened a model"
        return self._model

    def _forget(self) -> None:
        model, self._model, self._kept = self._model, None, {}
        if model is not None:
            model.close()
