"""Tools in the bodies of requests: functions that may be called, calls, and what they returned."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from ..client.interface import Call, Tools
from .refusals import RefusedError

MOST_TOOLS = 128
_DEEPEST = 64  # that a schema, or a call's arguments, may be nested


class Function(Struct, frozen=True):
    """A function that may be called. `parameters`: the schema of its arguments. `strict`: they always follow it."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """Functions are the only kind of tools."""

    type: Literal["function"]
    function: Function


class FunctionName(Struct, frozen=True):
    """One of the functions."""

    name: str


class ToolChoice(Struct, frozen=True):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(Struct, frozen=True):
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str = ""


class ToolCall(Struct, frozen=True):
    """A call in an earlier answer."""

    id: Annotated[str, Meta(min_length=1, max_length=200)]
    function: CalledFunction
    type: Literal["function"] = "function"


def tools_of(
    tools: Sequence[Tool] | None, choice: Literal["none", "auto", "required"] | ToolChoice | None, *, parallel: bool
) -> Tools:
    """What an answer may call.

    Raises:
        RefusedError: two functions of a name, a schema of something else than an object, or a choice of nothing.
    """
    names = list[str]()
    for number, tool in enumerate(tools or ()):
        where, function = f"tools[{number}].function", tool.function
        if function.name in names:
            raise _wrong(f"{where}.name", f"There is another function {function.name!r}.")
        if (kind := (function.parameters or {}).get("type", "object")) != "object":
            raise _wrong(f"{where}.parameters", f"Arguments are an object, not {str(kind)[:50]!r}.")
        if _deep(function.parameters):
            raise _wrong(f"{where}.parameters", f"It is nested more than {_DEEPEST} times.")
        names.append(function.name)
    named = choice.function.name if isinstance(choice, ToolChoice) else ""
    if named and named not in names:
        raise _wrong("tool_choice.function.name", f"{named[:100]!r} is none of the tools.")
    if choice == "required" and not names:
        raise _wrong("tool_choice", "There are no tools that could be called.")
    if not names or choice == "none":
        return Tools()
    listed = tuple(_declared(tool.function) for tool in tools or ())
    strict = tuple(tool.function.name for tool in tools or () if tool.function.strict)
    how = "named" if named else "required" if choice == "required" else "auto"
    return Tools(listed, how, named, parallel, strict)


def _declared(function: Function) -> dict[str, Any]:
    """As templates get it: they expect all of the fields."""
    parameters = {"type": "object", "properties": {}, **(function.parameters or {})}
    fields = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": fields}


def calls_of(given: Sequence[ToolCall], field: str) -> tuple[Call, ...]:
    """The calls in an earlier answer. Raises RefusedError: arguments that are no JSON object."""
    for number, call in enumerate(given):
        where = f"{field}[{number}].function.arguments"
        try:
            found = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _wrong(where, f"They are not JSON: {str(error)[:200]}.") from None
        if not isinstance(found, dict) or _deep(found):
            raise _wrong(where, f"They are no JSON object of at most {_DEEPEST} levels.")
    return tuple(Call(call.id, call.function.name, call.function.arguments or "{}") for call in given)


def _wrong(field: str, why: str) -> RefusedError:
    return RefusedError(400, f"{field}: {why}", field, "invalid_value")


def _deep(value: Any) -> bool:
    """Whether JSON is nested too deeply to be worked on."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True
