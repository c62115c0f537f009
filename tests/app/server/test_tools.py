"""Tools in requests: what is wrong with them is named, and every model can be held to call."""

from __future__ import annotations

import json
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
import torch
from floe_chat.app.client.interface import CallDelta, TextDelta, Tools
from floe_chat.app.server.spoken import Called, Spoken, Text
from floe_chat.models.packing.pack import EXACT
from pydantic import BaseModel, Field
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from ...helpers import edit_tensors, make_pack
from ...models.chat_families import write_tools
from .serving import QUESTIONS, Served, serving, user

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


def test_what_is_wrong_with_tools_is_named(demo: Served) -> None:
    for body, field in WRONG:
        reply = demo.post({"messages": user("Hi"), "max_tokens": 2, **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field) and 0 < len(error["message"]) <= 1001, field


def test_what_changes_nothing_is_tolerated(demo: Served, expected: dict[str, str]) -> None:
    for neutral in ({"tools": []}, {"tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}):
        reply = demo.post({"messages": user(QUESTIONS[0]), "parallel_tool_calls": False, **neutral}).json()
        assert reply["choices"][0]["message"]["content"] == expected[QUESTIONS[0]]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("choice", "temperature"), [("required", 1.5), ({"type": "function", "function": {"name": "get_weather"}}, 0)]
)
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
    assert httpx2.get(f"{demo.url}/models/demo", timeout=60).json()["floe"]["tools"] == "general"


class Turn(BaseModel):
    """A class as OpenAI's client makes a strict function of it."""

    side: Literal["left", "right"]
    steps: list[Literal[1, 2]] = Field(max_length=3)


@pytest.mark.thorough
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


# Calls that models of several families write, as OpenAI's client gets them


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


# Models that recite: each token is followed by one that a test chose, so that a real answer has a known text


_HIDDEN = 192


def make_reciter(folder: Path, family: str, scripts: Mapping[str, Sequence[str]]) -> Path:
    """A pack with a family's tokenizer and its template for tools.

    Args:
        scripts: what follows a prompt's last token, piece by piece; all pieces differ. The end of the turn comes last.
    """

    from transformers import MixtralConfig, MixtralForCausalLM

    source = folder / "source"
    source.mkdir(parents=True)
    write_tools(source, family)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    known = set(tokenizer.get_vocab())
    new = [piece for script in scripts.values() for piece in script if piece not in known]
    tokenizer.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in new])
    tokenizer.save(str(source / "tokenizer.json"))
    kept = {path: path.read_bytes() for path in source.iterdir() if path.name != "config.json"}
    size, end = tokenizer.get_vocab_size(), _end(source)
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=size,
        hidden_size=_HIDDEN,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.token_to_id(end),
        sliding_window=None,
    )
    model: Any = MixtralForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(source)
    for path, content in kept.items():
        path.write_bytes(content)
    tokens = torch.sign(torch.randn(size, _HIDDEN))
    follows = torch.zeros(size, _HIDDEN)
    for first, script in scripts.items():
        pieces = [tokenizer.token_to_id(piece) for piece in (first, *script, end)]
        assert None not in pieces
        for before, after in pairwise(pieces):
            follows[after] += tokens[before]

    def change(name: str, tensor: Tensor) -> Tensor | None:
        if "embed_tokens" in name:
            return tokens.to(tensor.dtype)
        if "lm_head" in name:
            return follows.to(tensor.dtype)
        return tensor / 64 if "o_proj" in name or "w2" in name or "down_proj" in name else tensor

    edit_tensors(source, change)
    make_pack(source, folder / "packed", EXACT)
    shutil.rmtree(source)
    return folder / "packed"


def _end(folder: Path) -> str:
    return json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]


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
    asking(served)  # from here on the prompt is in the cache, which `usage` counts
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
