"""The server as OpenAI's own client and others see it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from floe_chat.app.server import openapi
from floe_chat.app.server.requests import ChatRequest, CompletionRequest
from floe_chat.app.server.stops import Stops
from floe_chat.models.catalog import asset

from .serving import QUESTIONS, Served, serving, user


def test_answers_are_those_of_the_chat(demo: Served, expected: dict[str, str]) -> None:
    for question, answer in expected.items():
        reply = demo.client().chat.completions.create(model="demo", messages=user(question), max_tokens=200)
        assert reply.choices[0].message.content == answer
        assert reply.choices[0].finish_reason == "stop" and reply.usage is not None
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


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


async def test_many_at_once_each_get_their_own_answer(demo: Served, expected: dict[str, str]) -> None:
    client = demo.async_client()

    async def ask(number: int) -> tuple[str, str]:
        question = QUESTIONS[number % len(QUESTIONS)]
        if number % 2:
            reply = await client.chat.completions.create(model="demo", messages=user(question), user=str(number))
            return question, reply.choices[0].message.content or ""
        pieces = await client.chat.completions.create(model="demo", messages=user(question), stream=True)
        return question, "".join([piece.choices[0].delta.content or "" async for piece in pieces])

    for question, answer in await asyncio.gather(*map(ask, range(14))):
        assert answer == expected[question]


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


def test_the_length_is_kept(demo: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        reply = demo.post({"messages": user(QUESTIONS[0]), name: 5}).json()
        assert reply["choices"][0]["finish_reason"] == "length" and reply["usage"]["completion_tokens"] == 5


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


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "oracle", "content": "?"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"floe": {"preset": "Best"}}, "floe.preset"),
        ({"floe": {"rule": {"sparsity": 2}}}, "floe.rule.sparsity"),
        ({"floe": {"speed": 2}}, "floe"),
    ],
)
def test_what_is_wrong_is_named(demo: Served, body: dict[str, object], field: str) -> None:
    reply = demo.post({"messages": user("Hi"), **body})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == field and error["message"]


def test_what_changes_nothing_is_tolerated(demo: Served) -> None:
    neutral = {"parallel_tool_calls": True, "prompt_cache_key": "k", "reasoning_effort": "low", "tools": [], "n": None}
    neutral |= {"response_format": {"type": "text"}, "presence_penalty": 0, "logit_bias": {}, "invented": [1]}
    assert demo.post({"messages": user("Hi"), "max_tokens": 2, **neutral}).status_code == 200


def test_content_may_come_in_parts(demo: Served, expected: dict[str, str]) -> None:
    parts: Any = [{"type": "text", "text": QUESTIONS[1]}]
    reply = demo.client().chat.completions.create(model="demo", messages=[{"role": "user", "content": parts}])
    assert reply.choices[0].message.content == expected[QUESTIONS[1]]


def test_a_prompt_too_long_is_refused_whole(demo: Served) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as caught:
        demo.client().chat.completions.create(model="demo", messages=user("token " * 2000))
    assert caught.value.code == "context_length_exceeded"
    talk = [*user("token " * 700), {"role": "assistant", "content": "Yes."}, *user("token " * 700)]
    assert demo.post({"messages": talk}).json()["error"]["code"] == "context_length_exceeded"


def test_another_model_is_not_here(demo: Served) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError):
        demo.client().chat.completions.create(model="gpt-4", messages=user("Hi"))
    assert [model.id for model in demo.client().models.list()] == ["demo"]
    described = httpx2.get(f"{demo.url}/models/demo").json()
    assert described["context_length"] == 1024 and described["floe"]["presets"]
    assert "FloE 80 %" in described["floe"]["published"]
    assert httpx2.get(f"{demo.url}/models/other").status_code == 404


def asking(text: bytes) -> bytes:
    return b'{"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "' + text + b'"}]}'


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 400, id="empty"),
        pytest.param(b"[1]", 400, id="list"),
        pytest.param(asking(b"\xff\xfe"), 400, id="not-utf-8"),
        pytest.param(asking(b"\\ud800"), 400, id="half-a-pair"),
        pytest.param(b"[" * 200_000, 400, id="deep"),
        pytest.param(b'{"a":' * 200_000, 400, id="deep-objects"),
        pytest.param(asking(b"word " * 2_000_000), 400, id="10-mb"),
        pytest.param(asking(b"x" * (33 << 20)), 413, id="too-long"),
    ],
)
def test_bodies_of_any_kind_get_an_answer(demo: Served, body: bytes, status: int) -> None:
    reply = demo.post(body)
    assert reply.status_code == status and reply.json()["error"]["message"]


def test_other_paths_and_methods(demo: Served) -> None:
    assert httpx2.get(f"{demo.root}/health").json() == {"status": "ok"}
    for reply in (httpx2.get(f"{demo.root}/nothing"), httpx2.get(f"{demo.url}/chat/completions")):
        assert reply.status_code in (404, 405) and reply.json()["error"]["type"]


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
    for _ in range(3000):
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
    assert met > 1000


# Who may ask the server


PAGE = "https://page.example"


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(asset("demo", "packed"), key="a-long-secret", origins=(PAGE,)) as served:
        yield served


WRONG = "", "Bearer", "Bearer wrong", "Basic a-long-secret", "Bearer a-long-secret2", "Bearer \xe9"
FOREIGN = "evil.example", "evil.example:80", "localhost.evil.example", "[::1", "127.0.0.1.nip.io"


@pytest.mark.parametrize("given", WRONG)
def test_only_the_key_opens(locked: Served, given: str) -> None:
    headers = {b"Authorization": given.encode("latin-1")}
    for path in ("/models", "/nothing"):
        reply = httpx2.get(locked.url + path, headers=headers)
        assert reply.status_code == 401 and reply.json()["error"]["code"] == "invalid_api_key"
    assert httpx2.get(f"{locked.root}/metrics", headers=headers).status_code == 401
    assert httpx2.get(f"{locked.root}/health", headers=headers).status_code == 200


def test_the_key_opens(locked: Served) -> None:
    assert [model.id for model in locked.client().models.list()] == ["demo"]


def test_only_pages_that_are_allowed_may_ask(locked: Served, demo: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret"}
    allowed = httpx2.get(f"{locked.url}/models", headers={**key, "Origin": PAGE})
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == PAGE
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    before = httpx2.options(f"{locked.url}/chat/completions", headers=asked)
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == PAGE
    for origin in ("https://evil.example", "null", "http://[", "http://evil.example]"):
        refused = httpx2.get(f"{demo.url}/models", headers={"Origin": origin})
        assert refused.status_code == 403 and "access-control-allow-origin" not in refused.headers
    assert httpx2.get(f"{demo.url}/models", headers={"Origin": demo.root}).status_code == 200


def test_a_name_that_is_no_address_is_no_fault_of_the_server(locked: Served) -> None:
    key = {"Authorization": "Bearer a-long-secret", "Host": "[::1"}
    assert httpx2.get(f"{locked.root}/nothing", headers=key).status_code == 404
    assert httpx2.get(f"{locked.url}/models", headers=key).status_code == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_another_name_for_this_machine_is_refused(demo: Served, host: str) -> None:
    assert httpx2.get(f"{demo.url}/models", headers={"Host": host}).status_code == 403


def test_names_of_this_machine(demo: Served) -> None:
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80", "LOCALHOST:8080"):
        assert httpx2.get(f"{demo.url}/models", headers={"Host": host}).status_code == 200
