"""Answers whose tokens are guessed, right or wrong, are those without guesses, whatever a request asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from floe_chat.engine.drafts import Depth, Guess
from openai.types import CompletionUsage

from .serving import QUESTIONS, Served, user
from .test_serving import SCHEMA
from .test_tools import TOOLS

FORM = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
THINGS = '{"name":"a router","kind":"expert","counts":[12,34]}'
BODIES: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["small feed", "never to be met"]},
    "length": {"max_tokens": 17},
    "warm": {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    "several": {"temperature": 1.2, "seed": 3, "n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "form": {
        "messages": [*user("A thing?"), {"role": "assistant", "content": THINGS}, *user("A thing?")],
        "response_format": FORM,
        "max_tokens": 40,
    },
    "tools": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 60},
}


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Guess always, or never, whatever pays."""

    def turn(on: bool) -> None:
        def worth(_depth: Depth, guess: Guess, _preset: object) -> list[int]:
            return guess.tokens if on else []

        monkeypatch.setattr(Depth, "worth", worth)

    return turn


def choices(reply: dict[str, Any]) -> list[Any]:
    """What was answered, but for the numbers of calls, which are drawn."""
    found = reply["choices"]
    for choice in found:
        for call in choice["message"].get("tool_calls") or ():
            call["id"] = ""
    return found


@pytest.mark.some(3)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_they_are_the_same(
    demo: Served, expected: dict[str, str], guessing: Callable[[bool], None], body: dict[str, Any]
) -> None:
    repeated = [*user(QUESTIONS[0]), {"role": "assistant", "content": expected[QUESTIONS[0]]}, *user(QUESTIONS[0])]
    body = {"messages": repeated, **body}
    guessing(False)
    plain = demo.post(body).json()
    guessing(True)
    guessed = demo.post(body).json()
    assert choices(guessed) == choices(plain)
    usage, without = (CompletionUsage.model_validate(reply["usage"], strict=True) for reply in (guessed, plain))
    details, none = usage.completion_tokens_details, without.completion_tokens_details
    assert details is not None and none is not None
    # What stops it, a text or the end of a call, is found while further tokens are drawn.
    assert usage.completion_tokens == without.completion_tokens or {"stop", "tools"} & body.keys()
    assert none.accepted_prediction_tokens == none.rejected_prediction_tokens == 0
    assert details.accepted_prediction_tokens is not None and details.rejected_prediction_tokens is not None
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0
    assert details.accepted_prediction_tokens <= usage.completion_tokens
    assert usage.model_extra == {} and details.model_extra == {}


def test_who_goes_ends_them(slow: Served, guessing: Callable[[bool], None]) -> None:
    guessing(True)
    body = {"model": slow.model, "messages": user("Go on. Go on. Go on."), "max_tokens": 30_000, "stream": True}
    with httpx2.stream("POST", f"{slow.url}/chat/completions", json=body, timeout=60) as reply:
        pieces = reply.iter_lines()
        assert [next(pieces) for _ in range(40)]
    slow.until("floe_running", 0)
    assert slow.scheduler.counts.answers == {"failed": 1}
    again = slow.post({"messages": user("Go on. Go on. Go on."), "max_tokens": 30}).json()
    guessing(False)
    assert again["choices"] == slow.post({"messages": user("Go on. Go on. Go on."), "max_tokens": 30}).json()["choices"]
