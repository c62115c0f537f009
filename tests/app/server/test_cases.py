"""What llama.cpp's tests of its server ask for, of ours: requests of every form, caching, the end of the context."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx2
import pytest

from .serving import QUESTIONS, Served, user

HI: Mapping[str, Any] = {"messages": user("Hi"), "max_tokens": 2}


def streamed(served: Served, body: dict[str, Any], path: str = "/chat/completions") -> list[dict[str, Any]]:
    """The events of an answer."""
    reply = served.post({**body, "stream": True}, path)
    assert reply.status_code == 200 and reply.text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ("Hi", "messages"),
        ({}, "messages"),
        ([], "messages"),
        (["Hi"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": ["Hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": 1, "content": "Hi"}], "messages[0].role"),
    ],
)
def test_messages_of_a_wrong_form_are_named(demo: Served, messages: object, field: str) -> None:
    reply = demo.post({"messages": messages, "stream": True})
    assert reply.status_code == 400 and field in reply.json()["error"]["param"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stream", "yes"),
        ("stream_options", 3),
        ("seed", 1 << 70),
        ("stop", 5),
        ("stop", ["a"] * 40),
        ("top_k", -2),
        ("min_p", 2),
        ("n", 99),
        ("max_tokens", 1.5),
        ("repetition_penalty", 0),
        ("presence_penalty", float("1e9")),
        ("temperature", 1e300),
        ("logit_bias", [1]),
        ("logprobs", "all"),
        ("user", 5),
        ("model", 5),
    ],
)
def test_values_of_a_wrong_kind_are_named(demo: Served, name: str, value: object) -> None:
    reply = demo.post({**HI, name: value})
    assert reply.status_code == 400 and name in reply.json()["error"]["param"]


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"1e999"])
def test_numbers_that_are_none(demo: Served, number: bytes) -> None:
    body = b'{"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "temperature": ' + number + b"}"
    assert demo.post(body).status_code == 400


@pytest.mark.parametrize("prompt", [None, 5, [], [1, 2], [[1, 2]], ["a", 1], {"a": 1}])
def test_prompts_are_texts(demo: Served, prompt: object) -> None:
    reply = demo.post({"prompt": prompt, "max_tokens": 2}, "/completions")
    assert reply.status_code == 400 and "prompt" in reply.json()["error"]["param"]


@pytest.mark.parametrize("prompt", ["", "\n", "\x00", "🦙" * 20, "<|im_start|>"])
def test_any_text_may_be_continued(demo: Served, prompt: str) -> None:
    reply = demo.post({"prompt": prompt, "max_tokens": 3}, "/completions")
    assert reply.status_code == 200 and reply.json()["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize("content", ["", "\x00\x1b[2J", "</s><|im_end|>", "{% if %}"])
def test_any_text_may_be_asked(demo: Served, content: str) -> None:
    reply = demo.post({"messages": user(content), "max_tokens": 3})
    assert reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_a_system_prompt_changes_the_prompt(demo: Served) -> None:
    def prompt(*roles: str) -> int:
        messages = [*({"role": role, "content": "Be brief."} for role in roles), *user("Hi")]
        return demo.post({"messages": messages, "max_tokens": 1}).json()["usage"]["prompt_tokens"]

    assert prompt("system") == prompt("developer") > prompt()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": user(QUESTIONS[3]), "max_tokens": 40},
        {"messages": user(QUESTIONS[3]), "max_tokens": 40, "temperature": 1.5, "seed": 5},
        {"messages": user(QUESTIONS[3]), "max_tokens": 20, "temperature": 1.5, "seed": 5, "n": 3},
        {"messages": user(QUESTIONS[3]), "stop": ["\n", "."], "max_tokens": 40},
    ],
)
def test_a_stream_and_a_whole_answer_are_the_same(demo: Served, body: dict[str, Any]) -> None:
    demo.post({**body, "n": 1, "max_tokens": 1})  # from here on the same part of the prompt is there already
    whole = [
        (choice["message"]["content"] or "", choice["finish_reason"]) for choice in demo.post(body).json()["choices"]
    ]
    pieces, ends = [""] * len(whole), [""] * len(whole)
    for event in streamed(demo, body):
        for choice in event["choices"]:
            pieces[choice["index"]] += choice["delta"].get("content") or ""
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
    assert list(zip(pieces, ends, strict=True)) == whole


def test_all_events_of_a_stream_belong_together(demo: Served) -> None:
    events = streamed(demo, {"messages": user(QUESTIONS[0]), "max_tokens": 20, "n": 2})
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    begun = [choice["index"] for event in events for choice in event["choices"] if choice["delta"].get("role")]
    ended = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(begun) == sorted(ended) == [0, 1]


def test_a_prompt_that_was_read_before_is_not_read_again(demo: Served) -> None:
    body = {"messages": user("A question that nobody asked before, to be asked twice here."), "max_tokens": 12}
    first, second = (demo.post(body).json() for _ in range(2))
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, second)]
    assert cached[0] < cached[1] <= second["usage"]["prompt_tokens"] == first["usage"]["prompt_tokens"]


# The end of the context, where this server moves nothing out


def test_an_answer_ends_where_the_context_does(demo: Served) -> None:
    window = demo.desk.loaded.context_window
    # The bias keeps the token that would end it away.
    body = {"messages": user("token " * (window * 7 // 8)), "logit_bias": {"300": 100}}
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


# Other paths


@pytest.mark.parametrize("path", ["embeddings", "audio/speech", "chat"])
def test_what_is_not_here_says_so(demo: Served, path: str) -> None:
    reply = httpx2.post(f"{demo.url}/{path}", json={"model": "demo", "input": "Hi"})
    assert reply.status_code == 404 and reply.json()["error"]["type"] == "not_found_error"


def test_a_head_alone(demo: Served) -> None:
    assert httpx2.head(f"{demo.root}/health").status_code == 200
    assert httpx2.options(f"{demo.url}/models").status_code in (204, 405)


def test_a_body_in_pieces_and_any_content_type(demo: Served) -> None:
    body = json.dumps({"model": "demo", **HI}).encode()
    pieces = (body[at : at + 7] for at in range(0, len(body), 7))
    for kind in ("application/json", "text/plain", "application/x-www-form-urlencoded"):
        reply = httpx2.post(f"{demo.url}/chat/completions", content=body, headers={"Content-Type": kind}, timeout=60)
        assert reply.status_code == 200
    assert httpx2.post(f"{demo.url}/chat/completions", content=pieces, timeout=60).status_code == 200


def test_a_body_with_a_mark_of_its_coding(demo: Served) -> None:
    body = json.dumps({"model": "demo", **HI})
    assert demo.post(body.encode("utf-8-sig")).status_code in (200, 400)
    for coding in ("utf-16", "utf-32"):
        assert demo.post(body.encode(coding)).status_code == 400


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
