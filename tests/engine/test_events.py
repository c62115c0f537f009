"""Commands and events survive a trip through JSON, so that the engine could live in a process of its own."""

from __future__ import annotations

import dataclasses
import random
import string
import types
import typing
from typing import Any

import msgspec
import pytest
from floe_chat.engine import events
from floe_chat.engine.events import (
    Advanced,
    CardRows,
    Chance,
    Command,
    Event,
    Extras,
    LayerRows,
    Rows,
    Sampling,
    SpreadBy,
)

_PARTS: list[type[Any]] = [Sampling, Advanced, Rows, CardRows, LayerRows, Extras, Chance, SpreadBy]
KINDS: list[type[Any]] = [*typing.get_args(Command), *typing.get_args(Event), *_PARTS]


def some_value(kind: Any, chance: random.Random) -> Any:
    """A random value of a type as the dataclasses write it."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return some_value(chance.choice(typing.get_args(kind)), chance)
    if origin is tuple:
        first, *others = typing.get_args(kind)
        several = [first] * chance.randrange(4) if others == [Ellipsis] else [first, *others]
        return tuple(some_value(one, chance) for one in several)
    if dataclasses.is_dataclass(kind):
        return some_message(typing.cast("type[Any]", kind), chance)
    if kind is types.NoneType:
        return None
    return {
        int: lambda: chance.randint(-(1 << 62), 1 << 62),
        float: lambda: chance.choice([0.0, -1.5, 1e-300, 1e300, chance.random()]),
        str: lambda: "".join(chance.choices([*string.printable, "é", "🎉", "\x1b", "\0", '"', "\\"], k=8)),
        bool: lambda: chance.random() < 0.5,
    }[kind]()


def some_message(kind: type[Any], chance: random.Random) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{field.name: some_value(hints[field.name], chance) for field in dataclasses.fields(kind)})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_comes_back_from_json_and_is_frozen(kind: type[Any]) -> None:
    chance = random.Random(kind.__name__)
    for _ in range(8):
        message = some_message(kind, chance)
        assert msgspec.json.decode(msgspec.json.encode(message), type=kind) == message
        assert isinstance(hash(message), int)
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(message, field.name, None)


def test_no_kind_is_forgotten() -> None:
    defined = {
        value for value in vars(events).values() if isinstance(value, type) and value.__module__ == events.__name__
    }
    assert {kind for kind in defined if dataclasses.is_dataclass(kind)} == set(KINDS)
