"""Driving the engine from a test: a session with deadlines, and `generate` without a thread."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from floe_chat.engine.decoder.card.card_token import CardToken
from floe_chat.engine.decoder.token_pass import TokenPass
from floe_chat.engine.events import (
    Command,
    Event,
    Failed,
    Finished,
    Generate,
    Load,
    Loaded,
    NewTokens,
    Sampling,
    Shutdown,
)
from floe_chat.engine.generate import KVCache, generate
from floe_chat.engine.loader import LoadedModel, load
from floe_chat.engine.quality_presets import Preset
from floe_chat.engine.session import Session
from floe_chat.kernels.rule import Rule

DEADLINE_S = 120.0  # a machine busy with something else may take its time; nothing is asserted about speed
GREEDY = Sampling(temperature=0)
E = TypeVar("E")


def never(_token: CardToken, _layers: int) -> bool:
    return False


def layer_by_layer(patch: pytest.MonkeyPatch) -> None:
    """Let each token, too, go through `MoELayer.forward`, which a test is going to replace."""
    patch.setattr(TokenPass, "watched", True)
    patch.setattr(CardToken, "ready", never)


def silent(_step: str, _share: float) -> None:
    """Progress that nobody looks at."""


def open_model(pack: Path, preset: str | None = None) -> LoadedModel:
    """A loaded model on the CPU, without a thread."""
    return load(pack, preset, "cpu", silent, library=True)[0]


@dataclass(frozen=True)
class Answer:
    """What `generate` yielded: the new tokens, prompt tokens done after each step of prefill, why it ended."""

    tokens: list[int]
    progress: list[int]
    reason: str


def answer(
    loaded: LoadedModel,
    prompt: Sequence[int],
    *,
    sampling: Sampling = GREEDY,
    max_new_tokens: int = 16,
    stop_ids: Sequence[int] = (),
    kv: KVCache | None = None,
) -> Answer:
    """Run `generate` to its end, counting as the engine does, on an empty cache if none is given."""
    loaded.telemetry.begin(1, len(prompt), time.perf_counter())
    steps = generate(
        loaded.decoder,
        KVCache() if kv is None else kv,
        prompt,
        sampling,
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        window=loaded.window,
        control=loaded.control,
        telemetry=loaded.telemetry,
    )
    tokens: list[int] = []
    progress: list[int] = []
    while True:
        try:
            step = next(steps)
        except StopIteration as end:
            return Answer(tokens, progress, end.value)
        if step.token is None:
            progress.append(step.done)
        else:
            tokens.append(step.token)


class Engine:
    """A session that a test waits on: `until` returns what happened up to an event, or fails at the deadline."""

    def __init__(self) -> None:
        self.session = Session()
        self.seen: list[Event] = []
        self._read = 0

    def __enter__(self) -> Engine:
        self.session.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.session.send(Shutdown())
        assert self.session.join(DEADLINE_S), "the engine thread does not end"

    def send(self, *commands: Command) -> None:
        for command in commands:
            self.session.send(command)

    def until(self, kind: type[E] | tuple[type[E], ...], **fields: Any) -> E:
        """The next event of a kind whose fields have these values; earlier ones are skipped but stay in `seen`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            while self._read < len(self.seen):
                event = self.seen[self._read]
                self._read += 1
                if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items()):
                    return event
            assert time.monotonic() < deadline, f"no {kind} with {fields} among {self.seen}"
            self.seen += self.session.poll(timeout=0.5)

    def load(self, pack: Path, preset: str | None = None) -> Loaded:
        """Load a pack that must load."""
        self.send(Load(str(pack), preset, "cpu"))
        event = self.until((Loaded, Failed))
        assert isinstance(event, Loaded), event
        return event

    def end_of(self, request: int) -> Finished | Failed:
        """How the answer to `request` ended."""
        return self.until((Finished, Failed), request=request)

    def tokens_of(self, request: int) -> list[int]:
        """All tokens of an answer that were seen so far."""
        events = (event for event in self.seen if isinstance(event, NewTokens) and event.request == request)
        return [token for event in events for token in event.ids]


def asking(request: int, prompt: Sequence[int], *, tokens: int = 16, stop: Sequence[int] = ()) -> Generate:
    """A greedy question."""
    return Generate(request, tuple(prompt), GREEDY, tokens, tuple(stop))


def a_preset(
    name: str,
    sparsity: float = 0.0,
    product: float = 0.0,
    *,
    lossless: bool = False,
    coarse: bool = False,
    **others: Any,
) -> Preset:
    """A preset by the fields of its rule."""
    return Preset(name, Rule(sparsity, product, **others), 22 if lossless else 8 if coarse else 15)


def with_rule(preset: Preset, **fields: Any) -> Preset:
    """A preset with other fields of its rule."""
    return dataclasses.replace(preset, rule=dataclasses.replace(preset.rule, **fields))
