"""A server that does not say how long its context is: that is shown, and its refusal becomes a clear sentence."""

from __future__ import annotations

import json

import pytest
from floe_chat.app.client.interface import PromptTurn, Question
from floe_chat.engine.events import Failed, Finished, Sampling

from .model_server import ModelServer, Reply, models, refusing, said, serving
from .scripted import screen_text, status, until
from .test_remote_client import asked, connected, failure, heard, loaded
from .test_remote_screen import answered, ask
from .test_remote_screen import connected as screen_before

# As the servers word it.
REFUSALS = {
    "vLLM": (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."),
    "SGLang": (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
    "llama-server": (400, "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it"),
    "older llama-server": (500, "Input prompt is too big compared to KV size. Please try increasing KV size."),
    "llama-server without shift": (500, "context shift is disabled"),
    "Ollama": (400, "prompt too long; exceeded max context length by 904 tokens"),
    "LM Studio": (400, "The number of tokens to keep from the initial prompt is greater than the context length"),
    "TGI": (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"),
    "a proxy": (413, ""),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_of_a_long_chat(kind: str) -> None:
    status_code, words = REFUSALS[kind]
    with serving(ModelServer(models("tiny"), refusing(status_code, words))) as server, connected(server.url) as client:
        assert loaded(client).context_window == 0
        failed = failure(asked(client))
        assert "The chat is too long for 127.0.0.1" in failed.title and failed.exit_code == 2
        assert words.rstrip(".") in failed.cause and "Start a new chat" in failed.hint


@pytest.mark.parametrize("kind", ["llama-server", "Ollama"])
@pytest.mark.parametrize("form", [b"data: %s\n\n", b"error: %s\n\n"])
def test_a_refusal_within_the_stream(kind: str, form: bytes) -> None:
    error = {"code": 400, "message": REFUSALS[kind][1], "type": "exceed_context_size_error"}
    sent = json.dumps({"error": error} if form.startswith(b"data") else error).encode()
    reply = Reply(parts=(form % sent,))
    with serving(ModelServer(models("tiny"), reply)) as server, connected(server.url) as client:
        loaded(client)
        assert "too long for" in failure(asked(client)).title


@pytest.mark.parametrize("words", ["the worker took too long", "out of memory", "size of the context is fine"])
def test_other_failures_are_not_taken_for_it(words: str) -> None:
    with serving(ModelServer(models("tiny"), refusing(500, words))) as server, connected(server.url) as client:
        loaded(client)
        assert "has a problem" in failure(asked(client)).title


def test_all_of_a_chat_goes_there() -> None:
    """Without a number there is nothing to cut by."""
    turns = [PromptTurn(role, "word " * 9_000) for _ in range(3) for role in ("user", "assistant")]
    hi = Reply(parts=said({"content": "Hi"}))
    with serving(ModelServer(models("tiny"), hi)) as server, connected(server.url) as client:
        loaded(client)
        assert client.submit(Question([*turns, PromptTurn("user", "?")], Sampling(), 64)).dropped == 0
        heard(client, Finished, Failed)
    assert len(server.questions[0].body["messages"]) == 7


async def test_the_screen_says_that_it_is_not_known() -> None:
    refused = refusing(*REFUSALS["llama-server"])
    server = ModelServer(models("tiny"), Reply(parts=said({"content": "Hello"})), refused)
    with serving(server):
        async with screen_before(server) as pilot:
            await until(pilot, lambda: "context window" in screen_text(pilot) and "not known" in screen_text(pilot))
            bottom = screen_text(pilot).splitlines()[-1]
            assert "context" not in bottom and "window" not in bottom  # rather than a number that nobody knows
            await ask(pilot, "hi")
            await answered(pilot, "Hello")
            await ask(pilot, "and a long one")
            await until(pilot, lambda: "The chat is too long for" in screen_text(pilot))
            assert "Start a new chat" in " ".join(screen_text(pilot).split())
            await until(pilot, lambda: status(pilot).state == "ready")
