"""The server as OpenAI's own client and others see it."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
from floe_chat.app.client.interface import PromptTurn, Question, TextDelta, Update
from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import RemoteClient
from floe_chat.app.server import openapi
from floe_chat.app.server.requests import ChatRequest, CompletionRequest
from floe_chat.app.server.spoken import Stops
from floe_chat.engine.events import Failed, Finished, Loaded, Sampling
from floe_chat.models.catalog import asset

from .serving import QUESTIONS, Served, serving, user


def test_pieces_make_the_answer(demo: Served, expected: dict[str, str]) -> None:
    question = QUESTIONS[0]
    given: Any = {"model": "demo", "messages": user(question), "stream": True}
    for usage in (True, False):
        chunks = list(demo.client().chat.completions.create(**given, stream_options={"include_usage": usage}))
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == expected[question]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert [bool(chunk.usage) for chunk in chunks] == [*(False for _ in chunks[1:]), usage]


@pytest.mark.thorough
async def test_many_at_once_each_get_their_own_answer(demo: Served, expected: dict[str, str]) -> None:
    client = demo.async_client()

    async def ask(number: int) -> tuple[str, str]:
        question = QUESTIONS[number % len(QUESTIONS)]
        if number % 2:
            reply = await client.chat.completions.create(model="demo", messages=user(question), user=str(number))
            assert reply.choices[0].finish_reason == "stop" and reply.usage is not None
            assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
            return question, reply.choices[0].message.content or ""
        pieces = await client.chat.completions.create(model="demo", messages=user(question), stream=True)
        return question, "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    for question, answer in await asyncio.gather(*map(ask, range(6))):
        assert answer == expected[question]


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ends_the_answer_before_it(demo: Served, expected: dict[str, str], stream: bool) -> None:
    whole = expected[QUESTIONS[0]]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 7]
    reply: Any = demo.client().chat.completions.create(
        model="demo", messages=user(QUESTIONS[0]), stop=["never to be met", stop], stream=stream
    )
    if stream:
        choices = [piece.choices[0] for piece in reply]
        text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    assert (text, reason) == (whole[: whole.index(stop)], "stop")


def test_a_seed_repeats_answers_and_each_of_several_has_its_own(demo: Served) -> None:
    def texts(seed: int, n: int) -> list[str]:
        body = {"messages": user("Tell me more."), "temperature": 2, "seed": seed, "n": n, "max_tokens": 12}
        choices = demo.post(body).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(n))
        return [choice["message"]["content"] for choice in choices]

    three = texts(7, 3)
    assert len(set(three)) == 3 and three == texts(7, 3)
    demo.post({"messages": [*user("Tell me more."), {"role": "assistant", "content": three[0]}, *user("And then?")]})
    assert three[1:] == [texts(8, 1)[0], texts(9, 1)[0]]  # whatever was computed in between


def test_a_text_is_continued(demo: Served) -> None:
    client, text = demo.client(), "An expert is a small"
    alone, both = (
        client.completions.create(model="demo", prompt=prompt, max_tokens=4) for prompt in (text, [text, "The router"])
    )
    assert alone.choices[0].text and [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == alone.choices[0].text != both.choices[1].text
    longer = client.completions.create(model="demo", prompt=text + alone.choices[0].text, max_tokens=1)
    assert longer.choices[0].text  # the same model goes on
    pieces = client.completions.create(model="demo", prompt=text, max_tokens=4, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == alone.choices[0].text


def test_quality_is_per_request(demo: Served) -> None:
    def preset(**floe: object) -> str:
        reply = demo.post({"messages": user("Hi"), "max_tokens": 2, "floe": {"figures": True, **floe}}).json()
        figures = reply["choices"][0]["floe"]
        assert 0 < figures["active_neurons"] <= 1
        return figures["preset"]

    assert preset() == "Balanced"
    assert preset(preset="high") == "High"
    assert preset(preset="floe80") == "FloE 80 %"
    assert preset(rule={"sparsity": 0.5}) == "Custom"
    assert preset() == "Balanced"


WRONG: list[tuple[dict[str, object], str]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"n": 99}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"seed": 1 << 70}, "seed"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": 3}, "stream_options"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 40}, "stop"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "oracle", "content": "?"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"floe": {"preset": "Best"}}, "floe.preset"),
    ({"floe": {"rule": {"sparsity": 2}}}, "floe.rule.sparsity"),
    ({"floe": {"speed": 2}}, "floe"),
]


def test_what_is_wrong_is_named(demo: Served) -> None:
    for body, field in WRONG:
        reply = demo.post({"messages": user("Hi"), **body})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, field) and error["message"], body
    for prompt in (None, [], [1, 2], [[1, 2]], {"a": 1}):
        reply = demo.post({"prompt": prompt, "max_tokens": 2}, "/completions")
        assert reply.status_code == 400 and "prompt" in reply.json()["error"]["param"], prompt
    number = b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}'
    assert demo.post(number).status_code == 400


def test_what_changes_nothing_is_tolerated(demo: Served, expected: dict[str, str]) -> None:
    neutral = {"parallel_tool_calls": True, "prompt_cache_key": "k", "reasoning_effort": "low", "tools": [], "n": None}
    neutral |= {"response_format": {"type": "text"}, "presence_penalty": 0, "logit_bias": {}, "invented": [1]}
    for name in ("max_tokens", "max_completion_tokens"):
        parts = [{"type": "text", "text": QUESTIONS[1]}]
        reply = demo.post({"messages": [{"role": "user", "content": parts}], **neutral, name: 5}).json()
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 5
        assert expected[QUESTIONS[1]].startswith(reply["choices"][0]["message"]["content"])


def test_another_model_is_not_here(demo: Served) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError):
        demo.client().chat.completions.create(model="gpt-4", messages=user("Hi"))
    assert [model.id for model in demo.client().models.list()] == ["demo"]
    described = httpx2.get(f"{demo.url}/models/demo", timeout=60).json()
    assert described["context_length"] == 1024 and described["floe"]["presets"]
    assert "FloE 80 %" in described["floe"]["published"]
    assert httpx2.get(f"{demo.url}/models/other", timeout=60).status_code == 404


def test_bodies_of_any_kind_get_an_answer(demo: Served) -> None:
    begun, end = b'{"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "', b'"}]}'
    wrong = [begun + text + end for text in (b"\xff\xfe", b"\\ud800", b"word " * 2_000_000)]
    too_long = begun + b"x" * (33 << 20) + end
    for body in (b"", b"[1]", *wrong, b"[" * 200_000, b'{"a":' * 200_000, too_long):
        reply = demo.post(body)
        assert reply.status_code == (413 if body is too_long else 400) and reply.json()["error"]["message"], body[:99]


def test_the_description_knows_its_own_examples() -> None:
    document = openapi.document()
    text = json.dumps(document)
    names = document["components"]["schemas"]
    assert {kind.__name__ for kind in (ChatRequest, CompletionRequest)} <= names.keys()
    references = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert references <= names.keys()
    fields = names["ChatRequest"]["properties"]
    assert {"messages", "max_completion_tokens", "floe", "stop"} <= fields.keys()


# Texts that end an answer, however it is cut into pieces


def test_as_if_the_text_came_at_once() -> None:
    rng = random.Random(0)
    met = 0
    for _ in range(1000):
        text = "".join(rng.choices("ab", k=rng.randrange(30)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(4))]
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        cutter, got, rest = Stops(stops), "", text
        while rest:
            size = rng.randrange(1, 5)
            got += cutter.feed(rest[:size])
            rest = rest[size:]
        got += cutter.rest()
        assert cutter.met == bool(ends)
        assert got == (text[: min(ends)[1]] if ends else text)  # the stop that is complete first ends it
        met += bool(ends)
    assert met > 300


# Who may ask the server


PAGE = "https://page.example"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(asset("demo", "packed"), key="a-long-secret", origins=(PAGE,)) as served:
        yield served


FOREIGN = "evil.example", "evil.example:80", "localhost.evil.example", "[::1", "127.0.0.1.nip.io"


def test_only_the_key_opens(locked: Served) -> None:
    for given in ("", "Bearer", "Bearer wrong", "Basic a-long-secret", "Bearer a-long-secret2", "Bearer \xe9"):
        headers = {b"Authorization": given.encode("latin-1")}
        for path in ("/models", "/nothing"):
            reply = httpx2.get(locked.url + path, headers=headers, timeout=60)
            assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
        assert httpx2.get(f"{locked.root}/metrics", headers=headers, timeout=60).status_code == 401
        assert httpx2.get(f"{locked.root}/health", headers=headers, timeout=60).json() == {"status": "ok"}
    assert [model.id for model in locked.client().models.list()] == ["demo"]


def test_only_pages_that_are_allowed_may_ask(locked: Served, demo: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret"}
    allowed = httpx2.get(f"{locked.url}/models", headers={**key, "Origin": PAGE}, timeout=60)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = httpx2.options(f"{locked.url}/chat/completions", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == PAGE
    for origin in ("https://evil.example", "null", "http://[", "http://evil.example]"):
        refused = httpx2.get(f"{demo.url}/models", headers={"Origin": origin}, timeout=60)
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert httpx2.get(f"{demo.url}/models", headers={"Origin": demo.root}, timeout=60).status_code == 200


def test_a_name_that_is_no_address_is_no_fault_of_the_server(locked: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret", "Host": "[::1"}
    assert httpx2.get(f"{locked.root}/nothing", headers=key, timeout=60).status_code == 404
    assert httpx2.get(f"{locked.url}/models", headers=key, timeout=60).status_code == 200


def test_names_of_this_machine(demo: Served) -> None:
    for host in FOREIGN:
        assert httpx2.get(f"{demo.url}/models", headers={"Host": host}, timeout=60).status_code == 403
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:8080"):
        assert httpx2.get(f"{demo.url}/models", headers={"Host": host}, timeout=60).status_code == 200


# What llama.cpp's tests of its server ask for, of ours: requests of every form, caching, the end of the context


HI: Mapping[str, Any] = {"messages": user("Hi"), "max_tokens": 2}


def streamed(served: Served, body: dict[str, Any], path: str = "/chat/completions") -> list[dict[str, Any]]:
    """The events of an answer."""
    reply = served.post({**body, "stream": True}, path)
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def test_any_text_may_be_continued_and_asked(demo: Served) -> None:
    for text in ("", "\n\x00\x1b[2J", "🦙" * 20, "<|im_start|></s><|im_end|>{% if %}"):
        reply = demo.post({"prompt": text, "max_tokens": 3}, "/completions")
        assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] <= 3, text
        reply = demo.post({"messages": user(text), "max_tokens": 3})
        assert reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] in ("stop", "length"), text

    def prompt(*roles: str) -> int:
        messages = [*({"role": role, "content": "Be brief."} for role in roles), *user("Hi")]
        return demo.post({"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]

    assert prompt("system") == prompt("developer") > prompt()


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "body",
    [
        {"messages": user(QUESTIONS[3]), "max_tokens": 20, "temperature": 1.5, "seed": 5, "n": 3},
        {"messages": user(QUESTIONS[3]), "max_tokens": 40},
        {"messages": user(QUESTIONS[3]), "stop": ["\n", "."], "max_tokens": 40},
    ],
)
def test_a_stream_and_a_whole_answer_are_the_same(demo: Served, body: dict[str, Any]) -> None:
    demo.post({**body, "n": 1, "max_tokens": 1})  # from here on the same part of the prompt is there already
    whole = [
        (choice["message"]["content"] or "", choice["finish_reason"]) for choice in demo.post(body).json()["choices"]
    ]
    pieces, ends = [""] * len(whole), [""] * len(whole)
    events = streamed(demo, body)
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    begun = [choice["index"] for event in events for choice in event["choices"] if choice["delta"].get("role")]
    assert sorted(begun) == list(range(len(whole)))
    for event in events:
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content") or ""
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert list(zip(pieces, ends, strict=True)) == whole


def test_a_prompt_that_was_read_before_is_not_read_again(demo: Served) -> None:
    body = {"messages": user("A question that nobody asked before, to be asked twice here."), "max_tokens": 12}
    first, second = (demo.post(body).json() for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
    assert cached[0] < cached[1] <= second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


# The end of the context, where this server moves nothing out


@pytest.mark.thorough
def test_an_answer_ends_where_the_context_does(demo: Served) -> None:
    window = demo.scheduler.loaded.context_window
    # The bias keeps the token that would end it away.
    body = {"messages": user("token " * (window * 15 // 16)), "logit_bias": {"300": 100}}
    *events, last = streamed(demo, {**body, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["total_tokens"] in (window, window + 1)
    assert demo.post({**body, "max_tokens": 1}).json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_what_does_not_fit_is_no_stream_yet(demo: Served, path: str) -> None:
    given = {"messages": user("token " * 2000)} if path.startswith("/chat") else {"prompt": "token " * 2000}
    reply = demo.post({**given, "stream": True}, path)
    assert reply.status_code == 400 and reply.headers["content-type"] == "application/json"
    error = reply.json()["error"]
    assert error["code"] == "context_length_exceeded" and "1,024" in error["message"]
    talk = [*user("token " * 700), {"role": "assistant", "content": "Yes."}, *user("token " * 700)]
    assert demo.post({"messages": talk}).json()["error"]["code"] == "context_length_exceeded"


# Other paths


def test_what_is_not_here_says_so(demo: Served) -> None:
    for path in ("embeddings", "audio/speech", "chat"):
        reply = httpx2.post(f"{demo.url}/{path}", json={"model": "demo", "input": "Hi"}, timeout=60)
        assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"
    wrong = httpx2.get(f"{demo.url}/chat/completions", timeout=60)
    assert wrong.status_code == 405 and wrong.json()["error"]["type"]
    assert httpx2.head(f"{demo.root}/health").status_code == 200
    assert httpx2.options(f"{demo.url}/models").status_code in (204, 405)


def test_a_body_in_pieces_and_any_content_type(demo: Served) -> None:
    body = json.dumps({"model": "demo", **HI}).encode()
    pieces = (body[at : at + 7] for at in range(0, len(body), 7))
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        reply = httpx2.post(f"{demo.url}/chat/completions", content=body, headers={"Content-Type": kind}, timeout=60)
        assert reply.status_code == 200
    assert httpx2.post(f"{demo.url}/chat/completions", content=pieces, timeout=60).status_code == 200


@pytest.mark.parametrize("depth", [50, 5_000])
def test_deep_values_of_a_field(demo: Served, depth: int) -> None:
    """JSON within a request that is otherwise right: in a field that nobody knows, and in a schema."""
    deep = '{"a":' * depth + "1" + "}" * depth
    asked = '{"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}], "unknown": %s}'
    assert demo.post((asked % deep).encode()).status_code in ((200,) if depth < 100 else (200, 400))
    form = f'{{"type": "json_schema", "json_schema": {{"name": "x", "schema": {deep}}}}}'
    asked = '{"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}], "response_format": %s}'
    assert demo.post((asked % form).encode()).status_code in (200, 400)
    assert demo.post(dict(HI)).status_code == 200


# What changes how an answer's tokens are drawn, and what is told of them


@pytest.mark.some(1)
@pytest.mark.parametrize("stream", [True, False])
def test_probabilities_of_tokens(demo: Served, expected: dict[str, str], stream: bool) -> None:
    given: Any = {"model": "demo", "messages": user(QUESTIONS[0]), "logprobs": True, "top_logprobs": 3}
    reply: Any = demo.client().chat.completions.create(**given, stream=stream)
    if stream:
        tokens = [token for piece in reply if (found := piece.choices[0].logprobs) for token in found.content]
    else:
        tokens = reply.choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == expected[QUESTIONS[0]]
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.top_logprobs[0].token == token.token  # the likeliest is drawn
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1 + 1e-6


def test_probabilities_of_a_texts_tokens(demo: Served) -> None:
    reply = demo.post({"prompt": "The router", "max_tokens": 6, "logprobs": 2}, "/completions").json()
    found = reply["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == reply["choices"][0]["text"]
    assert [len(others) for others in found["top_logprobs"]] == [2] * len(found["tokens"])


def test_a_bias_forces_and_forbids(demo: Served, expected: dict[str, str]) -> None:
    given: Any = {"model": "demo", "messages": user(QUESTIONS[0]), "max_tokens": 4}
    forced = demo.client().chat.completions.create(**given, logit_bias={"300": 100}, logprobs=True)
    logprobs = forced.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert len({token.token for token in logprobs.content}) == 1
    assert max(token.logprob for token in logprobs.content) < -0.01  # of what the model thinks of it, without the bias
    assert demo.post({"messages": user("Hi"), "logit_bias": {"99999": 1}}).json()["error"]["param"] == "logit_bias"


def test_penalties_of_tokens_that_the_answer_has(demo: Served) -> None:
    def repeated(**penalty: float) -> int:
        body = {"messages": user("?"), "max_tokens": 30, "logprobs": True, "logit_bias": {"300": 20}, **penalty}
        tokens = [token["token"] for token in demo.post(body).json()["choices"][0]["logprobs"]["content"]]
        return max(tokens.count(token) for token in tokens)

    without = repeated()
    assert without > repeated(frequency_penalty=2) > 1
    assert without >= repeated(presence_penalty=2)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["expert", "neuron"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("temperature", "stream"), [(1.5, True), (0, False)])
def test_an_answer_of_a_form(demo: Served, temperature: float, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    reply: Any = demo.client().chat.completions.create(
        model="demo",
        messages=user("Name a thing."),
        response_format=form,
        temperature=temperature,
        seed=0,
        stream=stream,
    )
    if stream:
        choices = [piece.choices[0] for piece in reply]
        text, reason = "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason
    else:
        text, reason = reply.choices[0].message.content, reply.choices[0].finish_reason
    found = json.loads(text)
    assert reason == "stop" and list(found) == ["name", "kind", "counts"]
    assert len(found["name"]) <= 8 and found["kind"] in ("expert", "neuron")
    assert len(found["counts"]) <= 3 and all(0 <= count <= 99 for count in found["counts"])


def test_any_object_is_a_form_and_some_schemas_cannot_be_followed(demo: Served) -> None:
    body = {"messages": user("?"), "response_format": {"type": "json_object"}, "max_tokens": 40}
    choice = demo.post(body).json()["choices"][0]
    text = choice["message"]["content"]
    assert text.startswith("{") and (choice["finish_reason"] == "length" or isinstance(json.loads(text), dict))
    for schema in ({"type": "objekt"}, {"$ref": "http://page.example/x"}, {"pattern": "("}):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        reply = demo.post({"messages": user("?"), "response_format": form, "max_tokens": 4})
        error = reply.json()["error"]
        assert reply.status_code == 400 and error["param"] == "response_format.json_schema.schema"
        assert "schema" in error["message"] and "%json" not in error["message"]


# Our client before our server: a chat on another machine is the chat


GREEDY = Sampling(temperature=0, min_p=0.0)
ASKED = [PromptTurn("user", "What is an expert?")]


def heard(client: RemoteClient, end: type[Update]) -> list[Update]:
    updates: list[Update] = []
    while not any(isinstance(update, end | Failed) for update in updates):
        more = client.poll(timeout=60)
        assert more, updates
        updates += more
    return updates


def connected(served: Served, key: str = "") -> RemoteClient:
    client = RemoteClient(Address.parse(served.root), Key(key))
    client.start()
    return client


def test_a_talk_is_answered_as_here(demo: Served) -> None:
    client, talk = connected(demo), list(ASKED)
    try:
        loaded = heard(client, Loaded)[-1]
        assert isinstance(loaded, Loaded)
        assert (loaded.model, loaded.context_window) == ("demo", 1024)
        for question in ("And a neuron?", "And the router?"):
            client.submit(Question(talk, GREEDY, 60))
            updates = heard(client, Finished)
            answer = "".join(update.text for update in updates if isinstance(update, TextDelta))
            messages = [{"role": turn.role, "content": turn.text} for turn in talk]
            direct = demo.post({"messages": messages, "max_tokens": 60}).json()
            finished = updates[-1]
            assert isinstance(finished, Finished)
            assert answer == direct["choices"][0]["message"]["content"]
            assert finished.reason == direct["choices"][0]["finish_reason"]
            assert finished.stats.prompt_tokens == direct["usage"]["prompt_tokens"]
            talk += [PromptTurn("assistant", answer), PromptTurn("user", question)]
    finally:
        client.close()


def test_a_server_that_ends_says_so(long_winded: Path) -> None:
    with serving(long_winded) as served:
        client = connected(served)
        heard(client, Loaded)
        client.submit(Question(ASKED, Sampling(temperature=5.0), 30_000))
        heard(client, TextDelta)
    try:
        failed = heard(client, Finished)[-1]
        assert isinstance(failed, Failed) and "ending" in f"{failed.title} {failed.cause}"
    finally:
        client.close()
