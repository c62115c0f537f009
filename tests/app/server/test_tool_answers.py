"""Calls that models of several families write, as OpenAI's client gets them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from .reciting import make_reciter
from .serving import Served, serving

FIND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Finds.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["at"],
        },
    },
}
PLACES = {"type": "object", "properties": {"at": {"enum": ["sea", "land"]}}, "required": ["at"]}
PLACE: dict[str, Any] = {"type": "function", "function": {"name": "find", "parameters": PLACES}}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Where is it?"}]
SCRIPTS: dict[str, dict[str, list[str]]] = {
    "qwen3_moe": {
        "Ċ": [
            *("Let me ", "look.\n", "<tool_call>", '\n{"name": "fi', 'nd", "argum', 'ents": {"at": "', "sea \\u00e9"),
            *('", "n": 3}', "}\n", "</tool_call>"),
        ]
    },
    "mixtral": {
        "[/INST]": [
            *("[TOOL_CALLS]", ' [{"name": "find", ', '"arguments": {"at"', ': "sea é", "n"', ": 3}}", ", "),
            *('{"name": "fi', 'nd", "arguments": ', '{"at": "land"}}]'),
        ],
        "]": ["It is at ", "the sea."],
    },
    "deepseek_v31": {
        "</think>": [
            *("Let me look.", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "find", "<｜tool▁sep｜>", '{"at": "'),
            *("sea é", '", "n": 3', "}", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ],
        ">": ["It is at ", "the sea."],
    },
}
SEA, LAND = {"at": "sea é", "n": 3}, {"at": "land"}
EXPECTED: dict[str, tuple[str | None, list[dict[str, Any]]]] = {
    "qwen3_moe": ("Let me look.\n", [SEA]),
    "mixtral": (None, [SEA, LAND]),
    "deepseek_v31": ("Let me look.", [SEA]),
}
Reciter = tuple[str, Served]


@pytest.fixture(scope="module", params=SCRIPTS)
def reciter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reciter]:
    """A model of a family that calls, and answers when it got what the function returned."""
    pack = make_reciter(tmp_path_factory.mktemp("reciter"), request.param, SCRIPTS[request.param])
    with serving(pack) as served:
        yield request.param, served


@contextmanager
def reciting(folder: Path, family: str, *script: str) -> Generator[Served]:
    with serving(make_reciter(folder, family, {SCRIPTS_BEGIN[family]: script})) as served:
        yield served


SCRIPTS_BEGIN = {name: next(iter(scripts)) for name, scripts in SCRIPTS.items()}


def joined(pieces: Sequence[Any]) -> tuple[str, list[dict[str, Any]], str]:
    """Content, calls and the end of the first answer in a stream, as clients join its pieces."""
    content, calls, reason = "", list[dict[str, Any]](), ""
    for piece in pieces:
        for choice in piece.choices:
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(calls) and call.type == "function"
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments
    return content, calls, reason


def asking(served: Served, **more: Any) -> Any:
    given: Any = {"model": served.model, "messages": ASKED, "tools": [FIND], **more}
    return served.client().chat.completions.create(**given)


def test_calls_come_apart_from_the_text(reciter: Reciter) -> None:
    name, served = reciter
    content, arguments = EXPECTED[name]
    choice = asking(served).choices[0]
    calls = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == (content, "tool_calls")
    assert [call.function.name for call in calls] == ["find"] * len(calls)
    assert [json.loads(call.function.arguments) for call in calls] == arguments
    again = asking(served).choices[0].message.tool_calls
    assert len({call.id for call in [*calls, *again]}) == 2 * len(calls)


async def test_they_come_in_pieces(reciter: Reciter) -> None:
    name, served = reciter
    content, arguments = EXPECTED[name]
    given: Any = {"model": served.model, "messages": ASKED, "tools": [FIND], "stream": True}
    given["stream_options"] = {"include_usage": True}
    sync = list(served.client().chat.completions.create(**given))
    pieces = [piece async for piece in await served.async_client().chat.completions.create(**given)]
    assert sync[-1].usage == pieces[-1].usage and pieces[-1].usage is not None
    for each in (sync, pieces):
        text, calls, reason = joined(each)
        assert (text or None, reason) == (content, "tool_calls")
        assert [json.loads(call["arguments"]) for call in calls] == arguments
    some = [call for piece in pieces[:-1] for call in piece.choices[0].delta.tool_calls or ()]
    assert sum(call.id is None for call in some) > len(arguments)  # more than one for each


def test_an_answer_follows_what_was_returned(reciter: Reciter) -> None:
    name, served = reciter
    message = asking(served).choices[0].message
    returned = [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in message.tool_calls]
    talk: Any = [*ASKED, message.model_dump(exclude_none=True), *returned]
    reply = served.client().chat.completions.create(model=served.model, messages=talk, tools=[FIND])  # pyright: ignore
    if name == "qwen3_moe":  # whose turns all begin alike, for one that recites
        assert reply.choices[0].finish_reason == "tool_calls"
    else:
        assert reply.choices[0].message.content == "It is at the sea." and reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.tool_calls is None


def test_without_tools_a_call_is_text(reciter: Reciter) -> None:
    _, served = reciter
    for more in ({"tools": None}, {"tool_choice": "none"}):
        choice = asking(served, **more).choices[0]
        assert choice.finish_reason == "stop" and not choice.message.tool_calls and "find" in choice.message.content


def test_one_call_if_no_more_are_wanted(reciter: Reciter) -> None:
    name, served = reciter
    named = {"type": "function", "function": {"name": "find"}}
    most = 9 if name == "qwen3_moe" else 4
    cut = asking(served, parallel_tool_calls=False, tool_choice=named, max_tokens=most).choices[0]
    assert cut.finish_reason == "length"
    for choice in ("auto", "required", named):
        tools = [FIND if choice == "auto" else PLACE]
        reply = asking(served, parallel_tool_calls=False, tool_choice=choice, tools=tools, max_tokens=200)
        assert len(reply.choices[0].message.tool_calls) == 1 and reply.choices[0].finish_reason == "tool_calls"
        assert "at" in json.loads(reply.choices[0].message.tool_calls[0].function.arguments)
    if name == "mixtral":
        assert len(asking(served, parallel_tool_calls=True).choices[0].message.tool_calls) == 2


def test_several_answers_and_their_tokens(reciter: Reciter) -> None:
    name, served = reciter
    reply = asking(served, n=2, logprobs=True)
    for choice in reply.choices:
        content, arguments = EXPECTED[name]
        assert len(choice.message.tool_calls) == len(arguments)
        told = choice.logprobs.content if choice.logprobs else []
        assert b"".join(bytes(token.bytes) for token in told).decode() == (content or "")
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == len(ids)


def test_an_answer_cut_inside_of_a_call(reciter: Reciter) -> None:
    name, served = reciter
    most = {"qwen3_moe": 7, "mixtral": 4, "deepseek_v31": 7}[name]
    choice = asking(served, max_tokens=most).choices[0]
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert json.dumps(SEA, ensure_ascii=False).startswith(call.function.arguments.replace("\\u00e9", "é"))
    text, calls, reason = joined(list(asking(served, max_tokens=most, stream=True)))
    assert calls[0]["arguments"] == call.function.arguments and reason == "length"
    assert (text or None) == choice.message.content


BROKEN = "<tool_call>", '{"name": "find", "arguments": {"at": ', "sea", "}}", "</tool_call>", " Well."


def test_a_broken_call_is_not_lost(tmp_path: Path) -> None:
    with reciting(tmp_path, "qwen3_moe", *BROKEN) as served:
        choice = asking(served).choices[0]
        assert (choice.message.content, choice.finish_reason) == ("".join(BROKEN), "stop")
        assert choice.message.tool_calls is None
        text, calls, reason = joined(list(asking(served, stream=True)))
        assert (text, reason) == (" Well.", "tool_calls") and calls[0]["arguments"] == '{"at": sea}'


def test_an_unknown_function_is_passed_on(tmp_path: Path) -> None:
    call = "<tool_call>", '{"name": "lose", "arguments": {}}', "</tool_call>"
    with reciting(tmp_path, "qwen3_moe", *call) as served:
        assert asking(served).choices[0].message.tool_calls[0].function.name == "lose"


def test_strict_functions_get_arguments_by_their_schema(tmp_path: Path) -> None:
    script = "Well. ", "<tool_call>", '\n{"name": "', "fi", 'nd", "arguments": {"', "up", '": 1}', "}\n", "</tool_call>"
    with reciting(tmp_path, "qwen3_moe", *script) as served:
        for strict in (False, True):
            function = {**PLACE["function"], "strict": strict}
            message = asking(served, tools=[{"type": "function", "function": function}]).choices[0].message
            assert message.content == "Well. "
            found = json.loads(message.tool_calls[0].function.arguments)
            assert found == {"up": 1} if not strict else found["at"] in ("sea", "land") and list(found) == ["at"]


def test_thinking_comes_before_a_call_that_has_to_be(tmp_path: Path) -> None:
    script = "<think>", "They ", "lost it.", "</think>", "I will not."
    with reciting(tmp_path, "qwen3_moe", *script) as served:
        choice = asking(served, tool_choice="required", tools=[PLACE]).choices[0]
        assert choice.message.reasoning_content == "They lost it." and choice.message.content is None
        assert "at" in json.loads(choice.message.tool_calls[0].function.arguments)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [{"a": 1}]}}}
        choice = asking(served, tools=None, response_format=form).choices[0]
        assert choice.message.reasoning_content == "They lost it." and json.loads(choice.message.content) == {"a": 1}
        choice = asking(served, tools=None, response_format=form, extra_body={"floe": {"think": False}}).choices[0]
        assert json.loads(choice.message.content) == {"a": 1}
        assert getattr(choice.message, "reasoning_content", None) is None
