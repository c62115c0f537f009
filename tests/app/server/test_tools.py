"""Tools in requests: what is wrong with them is named, and every model can be held to call."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx2
import pytest
from floe_chat.app.client.interface import CallDelta, TextDelta, Tools
from floe_chat.app.server.spoken import Called, Spoken, Text
from pydantic import BaseModel, Field

from .serving import QUESTIONS, Served, user

CITY: dict[str, Any] = {"type": "string", "maxLength": 12}
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get current weather for a location.",
    "parameters": {"type": "object", "properties": {"location": CITY}, "required": ["location"]},
}
TOOLS: Any = [{"type": "function", "function": WEATHER}]


def tools(**changed: Any) -> Any:
    return [{"type": "function", "function": {**WEATHER, **changed}}]


def deep(levels: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": deep(levels - 1)}} if levels else {}


def called(*calls: tuple[str, str], returned: str = "1") -> list[dict[str, Any]]:
    made = [{"id": id_, "type": "function", "function": {"name": "f", "arguments": text}} for id_, text in calls]
    return [
        *({"role": "user", "content": "?"}, {"role": "assistant", "content": None, "tool_calls": made}),
        {"role": "tool", "tool_call_id": returned, "content": "found"},
    ]


NAMED = {"type": "function", "function": {"name": "get_time"}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": tools(name="get weather")}, "tools[0].function.name"),
    ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
    ({"tools": TOOLS * 129}, "tools"),
    ({"tools": tools(parameters=[])}, "tools[0].function.parameters"),
    ({"tools": tools(parameters={"type": "string"})}, "tools[0].function.parameters"),
    ({"tools": tools(parameters={"properties": {"a": {"type": "objekt"}}})}, "tools[0].function.parameters"),
    ({"tools": tools(parameters={"properties": {"a": {"pattern": "("}}})}, "tools[0].function.parameters"),
    ({"tools": tools(parameters={"properties": {"a": {}}, "required": [[1]]})}, "tools[0].function.parameters"),
    ({"tools": tools(parameters={"properties": {"a": False}, "required": ["a"]})}, "tools[0].function.parameters"),
    ({"tools": tools(parameters=deep(70))}, "tools[0].function.parameters"),
    ({"tools": tools(strict="yes")}, "tools[0].function.strict"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "9" * 5000}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"messages": called(("1", "{"))}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": called(("1", '{"a":' * 100 + "1" + "}" * 100))}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": called(("1", "[" * 99_999))}, "messages[1].tool_calls[0].function.arguments"),
    ({"messages": called(("1", "{}"), returned="2")}, "messages[2].tool_call_id"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": "?", "tool_calls": called(("1", "{}"))[1]["tool_calls"]}]},
        "messages[0].tool_calls",
    ),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
]


@pytest.mark.parametrize(("body", "field"), WRONG)
def test_what_is_wrong_is_named(demo: Served, body: dict[str, Any], field: str) -> None:
    reply = demo.post({"messages": user("Hi"), "max_tokens": 2, **body})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field) and 0 < len(error["message"]) <= 1001


def test_what_changes_nothing_is_tolerated(demo: Served, expected: dict[str, str]) -> None:
    for neutral in (
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": TOOLS, "tool_choice": "none"},
    ):
        reply = demo.post({"messages": user(QUESTIONS[0]), "parallel_tool_calls": False, **neutral}).json()
        assert reply["choices"][0]["message"]["content"] == expected[QUESTIONS[0]]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_a_model_without_tools_of_its_own_can_be_held_to_call(demo: Served, choice: Any, temperature: float) -> None:
    given: Any = {"model": "demo", "messages": user("What is the weather?"), "tools": TOOLS, "tool_choice": choice}
    for seed in range(2):
        reply = demo.client().chat.completions.create(**given, temperature=temperature, seed=seed)
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls" and message.content is None
        for call in message.tool_calls:
            found = json.loads(call.function.arguments)
            assert call.function.name == "get_weather" and list(found) == ["location"] and len(found["location"]) <= 12
        assert choice == "required" or len(message.tool_calls) == 1


def test_it_may_answer_as_ever(demo: Served) -> None:
    reply = demo.post({"messages": user(QUESTIONS[0]), "tools": TOOLS}).json()["choices"][0]
    assert reply["finish_reason"] == "stop" and reply["message"]["content"] and "tool_calls" not in reply["message"]


async def test_a_talk_with_tools_goes_on(demo: Served) -> None:
    client, talk = demo.async_client(), list[Any](user("What is the weather?"))
    for _ in range(2):
        pieces = await client.chat.completions.create(
            model="demo", messages=talk, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, stream=True
        )
        deltas = [piece.choices[0].delta async for piece in pieces]
        found = [call for delta in deltas for call in delta.tool_calls or ()]
        first, arguments = found[0], "".join(call.function.arguments or "" for call in found if call.function)
        assert first.id and first.function and first.function.name == "get_weather" and not first.function.arguments
        assert [call.id for call in found[1:]] == [None] * (len(found) - 1) and len(found) > 2
        call = {"id": first.id, "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
        talk += [{"role": "assistant", "content": None, "tool_calls": [call]}]
        talk += [{"role": "tool", "tool_call_id": first.id, "content": [{"type": "text", "text": "Sunny."}]}]
    reply = await client.chat.completions.create(model="demo", messages=talk, max_tokens=20)
    assert reply.choices[0].message.content


class Turn(BaseModel):
    """A class as OpenAI's client makes a strict function of it."""

    side: Literal["left", "right"]
    steps: list[Literal[1, 2]] = Field(max_length=3)


def test_the_clients_own_helpers_understand_it(demo: Served) -> None:
    from openai import pydantic_function_tool

    given: Any = {"model": "demo", "messages": user("Turn!"), "tools": [pydantic_function_tool(Turn)]}
    whole = demo.client().chat.completions.parse(**given, tool_choice="required", parallel_tool_calls=False)
    with demo.client().chat.completions.stream(**given, tool_choice="required", n=2) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    for choice in (*whole.choices, *streamed.choices):
        assert choice.message.tool_calls
        assert all(isinstance(call.function.parsed_arguments, Turn) for call in choice.message.tool_calls)


def test_a_model_says_how_it_gets_tools(demo: Served) -> None:
    assert httpx2.get(f"{demo.url}/models/demo").json()["floe"]["tools"] == "general"


def test_stops_end_text_and_no_call() -> None:
    spoken = Spoken(["END", "{"], Tools(({},)))
    assert spoken.take(TextDelta(1, "\n")) == [] and spoken.take(TextDelta(1, "a E")) == [Text("\na ")]
    begun = spoken.take(CallDelta(1, "f", '{"END"', '{"END"', more=True))
    assert [type(each) for each in begun] == [Text, Called, Called] and begun[0] == Text("E")
    assert spoken.take(CallDelta(1, "f", "}", "}")) == [Called(0, arguments="}", written="}")]
    assert spoken.take(TextDelta(1, "so END of")) == [Text("so ")] and spoken.over
    assert spoken.take(CallDelta(1, "g", "{}", "{}")) == [] and spoken.reason("cancelled") == "stop"


def test_blanks_around_calls_are_no_text() -> None:
    spoken = Spoken([], Tools(({},)))
    assert spoken.take(TextDelta(1, "\n\n")) == []
    assert len(spoken.take(CallDelta(1, "f", "{}", "{}"))) == 2 and spoken.take(TextDelta(1, "\n")) == []
    assert spoken.end() == [] and spoken.reason("stop") == "tool_calls" and spoken.reason("context") == "length"
    alone = Spoken([], Tools(({},)))
    assert alone.take(TextDelta(1, " ")) == [] and alone.end() == [Text(" ")]
