"""What changes how an answer's tokens are drawn, and what is told of them."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from .serving import QUESTIONS, Served, user


@pytest.mark.parametrize("stream", [False, True])
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
        body = {"messages": user("?"), "max_tokens": 60, "logprobs": True, "logit_bias": {"300": 20}, **penalty}
        tokens = [token["token"] for token in demo.post(body).json()["choices"][0]["logprobs"]["content"]]
        return max(tokens.count(token) for token in tokens)

    assert repeated() > repeated(frequency_penalty=2) > 1
    assert repeated() >= repeated(presence_penalty=2)


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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1.5])
def test_an_answer_of_a_form(demo: Served, temperature: float, stream: bool) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
    for seed in range(2):
        reply: Any = demo.client().chat.completions.create(
            model="demo",
            messages=user("Name a thing."),
            response_format=form,
            temperature=temperature,
            seed=seed,
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


def test_an_answer_is_any_object(demo: Served) -> None:
    body = {"messages": user("?"), "response_format": {"type": "json_object"}, "max_tokens": 40}
    choice = demo.post(body).json()["choices"][0]
    text = choice["message"]["content"]
    assert text.startswith("{") and (choice["finish_reason"] == "length" or isinstance(json.loads(text), dict))
    assert demo.post({"messages": user("?"), "max_tokens": 4}).json()["choices"][0]["message"]["content"][0] != "{"


@pytest.mark.parametrize("schema", [{"type": "objekt"}, {"$ref": "http://page.example/x"}, {"pattern": "("}])
def test_a_schema_that_cannot_be_followed(demo: Served, schema: dict[str, Any]) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    reply = demo.post({"messages": user("?"), "response_format": form, "max_tokens": 4})
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == "response_format.json_schema.schema"
    assert "schema" in error["message"] and "%json" not in error["message"]
