"""The client with a model that thinks: thinking is apart, does not count as answer, and is not sent back."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question, TextDelta, ThoughtDelta
from floe_chat.engine.events import Finished, Loaded, Sampling

from ..helpers import edit_json, reseal
from .test_chat_client import DEADLINE_S, GREEDY, HI, answered, until

OPENS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
MAY = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]"
Opened = Callable[[str], ChatClient]


@pytest.fixture
def opened(tiny_pack: Path, tmp_path: Path) -> Iterator[Opened]:
    """Opens the tiny model with another chat template."""
    clients: list[ChatClient] = []

    def with_template(template: str) -> ChatClient:
        pack = Path(shutil.copytree(tiny_pack, tmp_path / str(len(clients))))
        edit_json(pack / "tokenizer_config.json", lambda fields: fields.update(chat_template=template))
        reseal(pack)
        clients.append(ChatClient(pack, None, "cpu"))
        clients[-1].start()
        until(clients[-1], Loaded)
        return clients[-1]

    yield with_template
    for client in clients:
        client.close()


def thought(client: ChatClient, stop_at: int) -> tuple[str, int, str, Finished]:
    """Thinking, its tokens, and answer of what runs, which is stopped at some tokens."""
    found, tokens, text = "", 0, ""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for update in client.poll(timeout=0.2):
            match update:
                case ThoughtDelta():
                    found, tokens = found + update.text, tokens + update.tokens
                    if tokens >= stop_at:
                        client.cancel()
                case TextDelta():
                    text += update.text
                case Finished():
                    return found, tokens, text, update
                case _:
                    pass
    raise AssertionError(f"no end after {found!r}, {text!r}")


def test_thinking_comes_apart_and_has_room_of_its_own(opened: Opened) -> None:
    client = opened(OPENS)
    assert client.thinking == "optional" and client.most_new(8) > 2000
    client.submit(Question(HI, GREEDY, 8))
    found, tokens, text, finished = thought(client, 20)
    assert text == "" and found.strip() and finished.reason in ("cancelled", "context", "stop")
    assert tokens >= min(20, finished.stats.new_tokens)
    client.think = False
    assert client.most_new(8) == 8
    client.submit(Question(HI, GREEDY, 8))
    found, tokens, text, finished = thought(client, 20)
    assert (found, tokens, finished.reason) == ("", 0, "length") and text and finished.stats.new_tokens == 8


def test_an_answer_is_as_long_as_was_asked_for(opened: Opened) -> None:
    client = opened(MAY)
    assert client.thinking == "always"
    client.submit(Question(HI, GREEDY, 5))
    found, _, text, finished = thought(client, 1)
    assert not found and finished.reason == "length" and finished.stats.new_tokens >= 5
    assert client.count(text) in range(1, 16)  # five tokens, of which broken characters are shown as three bytes
    client.submit(Question(HI, GREEDY, 5))
    assert thought(client, 1)[3].reason == "length"


def test_the_next_turn_reuses_what_it_has_in_common_with_the_last(opened: Opened) -> None:
    client = opened(OPENS)
    first = client.submit(Question(HI, GREEDY, 8))
    found, _, _, _ = thought(client, 12)
    talk = [*HI, PromptTurn("assistant", "yes", found), PromptTurn("user", "on")]
    submitted = client.submit(Question(talk, GREEDY, 8))
    reused = thought(client, 1)[3].stats.reused_tokens
    assert first.prompt_tokens is not None
    # Thinking is not sent back: the prompts part where the first one opens it.
    assert first.prompt_tokens - len("<think>") <= reused < first.prompt_tokens
    client.submit(Question(talk, GREEDY, 8))
    again = thought(client, 8)
    fresh = opened(OPENS)
    fresh.submit(Question(talk, GREEDY, 8))
    assert again[0][:6] == thought(fresh, 8)[0][:6]
    assert client.context_of(talk, 8) == (submitted.prompt_tokens, 0)


def test_an_answer_goes_on_inside_and_after_its_thinking(opened: Opened) -> None:
    client = opened(OPENS)
    plain = client.submit(Question(HI, GREEDY, 4)).prompt_tokens
    thought(client, 1)
    inside = client.submit(Question(HI, GREEDY, 4, thought="They say")).prompt_tokens
    assert thought(client, 1)[2] == "" and plain is not None and inside is not None
    assert inside == plain + len("They say")
    after = client.submit(Question(HI, Sampling(temperature=0), 4, "Yes", thought="They say")).prompt_tokens
    text, finished = answered(client)
    assert text and finished.reason == "length" and after == inside + len("\n</think>\n\nYes")
