"""Bodies of requests: which fields there are, which of them are supported, and how an answer is drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from ...engine.events import Extras, Rule, Sampling
from ...engine.ranges import MAX_TOKENS, SAMPLING
from ..client.interface import NO_TOOLS, Call, PromptTurn, Tools
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


MOST_CHOICES = 16
MOST_LIKELY = 20
_MOST_STOPS, _LONGEST_STOP, _MOST_BIASED = 16, 1_000, 1_000
_PATH = re.compile(r" - at `\$\.?(?P<path>.*?)`$")


def _within(name: str) -> Meta:
    limits = SAMPLING[name]
    return Meta(gt=limits.low, le=limits.high) if limits.above_low else Meta(ge=limits.low, le=limits.high)


_Tokens = Annotated[int, Meta(ge=int(MAX_TOKENS.low), le=int(MAX_TOKENS.high))] | None
_Stop = Annotated[str, Meta(min_length=1, max_length=_LONGEST_STOP)]
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None


class TextPart(Struct, frozen=True):
    """A part of a message's content: text is the only kind that these models read."""

    type: Literal["text", "input_text"]
    text: str


class Message(Struct, frozen=True):
    """A turn. `reasoning_content`: what the model thought before its answer. `tool_call_id`: the call that returned
    this.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: None = None

    def turn(self, field: str) -> PromptTurn:
        """As the chat template gets it. `field`: its name in the request.

        Raises:
            RefusedError: calls, or what a call returned, where there can be none.
        """
        content = self.content or ""
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        if self.tool_calls and role != "assistant":
            raise RefusedError(400, "Only an assistant calls tools.", f"{field}.tool_calls", "invalid_value")
        if role == "tool" and not self.tool_call_id:
            message = "A tool's message names the call that it answers."
            raise RefusedError(400, message, f"{field}.tool_call_id", "invalid_value")
        calls = calls_of(self.tool_calls or (), f"{field}.tool_calls")
        return PromptTurn(role, text, self.reasoning_content or "", calls, (role == "tool" and self.tool_call_id) or "")


class StreamOptions(Struct, frozen=True):
    """`include_usage`: a last event says how many tokens there were."""

    include_usage: bool | None = None


class Floe(Struct, frozen=True, forbid_unknown_fields=True):
    """What only this server knows.

    Attributes:
        preset: the quality of this answer. rule: the same by hand. think: False asks for
            no thinking. figures: whether the answer comes with its figures.
    """

    preset: str | None = None
    rule: Rule | None = None
    think: bool = True
    figures: bool = False


class Drawing(Struct, frozen=True, kw_only=True):
    """What both kinds of requests say about drawing an answer; what is left out comes from the server's settings."""

    model: str
    max_tokens: _Tokens = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: _Stop | Annotated[list[_Stop], Meta(max_length=_MOST_STOPS)] | None = None
    seed: _Seed = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=int(SAMPLING["top_k"].high))] | None = None
    repetition_penalty: Annotated[float, _within("repetition_penalty")] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, _Bias], Meta(max_length=_MOST_BIASED)] | None = None
    user: str | None = None
    floe: Floe | None = None

    @property
    def longest(self) -> int | None:
        """Tokens that the answer may have; None: as many as fit."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many tokens to report with each of the answer; None: not even its own probability."""
        return None

    def extras(self, vocabulary: int) -> Extras:
        """What else changes the drawing.

        Raises:
            RefusedError: a bias of something that is none of so many tokens.
        """
        for number in self.logit_bias or {}:
            if not (number.isascii() and number.isdecimal() and int(number) < vocabulary):
                message = f"logit_bias: {number[:50]!r} is none of the {vocabulary:,} tokens."
                raise RefusedError(400, message, "logit_bias", "invalid_value")
        bias = tuple((int(number), added) for number, added in (self.logit_bias or {}).items())
        return Extras(self.presence_penalty or 0.0, self.frequency_penalty or 0.0, bias, self.likeliest)

    @property
    def schema(self) -> str:
        """Of the JSON that the answer has to be; "" for any text."""
        return ""

    @property
    def tooling(self) -> Tools:
        """What the answer may call."""
        return NO_TOOLS

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer, and are no part of it."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, default: Sampling) -> Sampling:
        """How to draw."""
        given = {field.name: value for field in fields(Sampling) if (value := getattr(self, field.name)) is not None}
        if given.get("top_k") == -1:  # the other way to write "off"
            given["top_k"] = 0
        if "seed" in given:
            given["seed"] &= (1 << 63) - 1
        return replace(default, **given)


class JsonSchema(Struct, frozen=True):
    """`schema`: what the answer has to be."""

    schema: dict[str, Any]
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, frozen=True):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Drawing, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: _Tokens = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def tooling(self) -> Tools:
        return tools_of(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)

    @property
    def likeliest(self) -> int | None:
        if not self.logprobs:
            if self.top_logprobs:
                raise RefusedError(400, "top_logprobs needs logprobs.", "top_logprobs", "invalid_value")
            return None
        return self.top_logprobs or 0

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def schema(self) -> str:
        form = self.response_format
        if form is None or form.type == "text":
            return ""
        if form.type == "json_object":
            return '{"type": "object"}'
        if form.json_schema is None:
            raise RefusedError(400, "json_schema is missing.", "response_format.json_schema", "invalid_value")
        return msgspec.json.encode(form.json_schema.schema).decode()

    @property
    def turns(self) -> list[PromptTurn]:
        """The messages.

        Raises:
            RefusedError: one of them has what its role cannot have, or answers a call that nobody made.
        """
        turns, called = list[PromptTurn](), set[str]()
        for number, message in enumerate(self.messages):
            turns.append(turn := message.turn(f"messages[{number}]"))
            if turn.answers and turn.answers not in called:
                field = f"messages[{number}].tool_call_id"
                raise RefusedError(
                    400, f"No earlier message has the call {turn.answers[:100]!r}.", field, "invalid_value"
                )
            called |= {call.number for call in turn.calls}
        return turns


class CompletionRequest(Drawing, frozen=True, kw_only=True):
    """The body of POST /v1/completions."""

    prompt: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_CHOICES)]
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELY)] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str]:
        """The texts to continue."""
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


Asked = TypeVar("Asked", bound=Drawing)

_Neutral = Callable[[Any], bool]
_UNSUPPORTED: Mapping[str, tuple[_Neutral, str]] = {
    "functions": (lambda value: not value, "Use tools."),
    "function_call": (lambda value: value in ("none", "auto"), "Use tool_choice."),
    "modalities": (lambda value: value == ["text"], "These models read and write text."),
    "audio": (lambda _: False, "These models read and write text."),
    "prediction": (lambda _: False, "Answers cannot be predicted."),
    "web_search_options": (lambda _: False, "This server searches nothing."),
    "suffix": (lambda value: value == "", "These models do not fill in the middle."),
    "echo": (lambda value: value is False, "The prompt is not repeated."),
    "best_of": (lambda value: value == 1, "Use n, and choose."),
    "store": (lambda value: value is False, "This server stores nothing."),
}
"""Fields that other servers know and this one does not: which of their values change nothing, and what to say."""


def read(body: bytes, kind: type[Asked]) -> Asked:
    """The request in a body. Fields that nobody knows are ignored.

    Raises:
        RefusedError: it is no JSON, lacks a field, or has one of a wrong type, out of range, or not supported.
    """
    try:
        given = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(400, f"The body is not JSON: {error}.", None, "invalid_json") from None
    if not isinstance(given, dict):
        raise RefusedError(400, "The body is not a JSON object.", None, "invalid_json")
    for name, (neutral, hint) in _UNSUPPORTED.items():
        if (value := given.get(name)) is not None and not neutral(value):
            raise RefusedError(400, f"{name} is not supported. {hint}", name, "unsupported_field")
    try:
        return msgspec.convert(given, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        text = str(error)
        found = _PATH.search(text)
        field = ".".join(filter(None, (found and found["path"], _missing(text)))) or None
        raise RefusedError(400, f"{field or 'The body'}: {_PATH.sub('', text)}.", field, "invalid_value") from None


def _missing(text: str) -> str | None:
    found = re.search(r"required field `(\w+)`", text)
    return found[1] if found else None


def quality_of(floe: Floe | None) -> str | Rule | None:
    """The preset or rule of a request; None: the server's own.

    Raises:
        RefusedError: it is no rule.
    """
    if floe is None or floe.rule is None:
        return floe and floe.preset
    if wrong := floe.rule.wrong:
        value = getattr(floe.rule, wrong)
        raise RefusedError(400, f"floe.rule.{wrong} cannot be {value}.", f"floe.rule.{wrong}", "invalid_value")
    return floe.rule
