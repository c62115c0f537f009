"""The client that the screen and `ask` share: messages in, text out, one answer at a time, old turns left out first."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question, Submitted, TextDelta, ThoughtDelta, Update
from floe_chat.engine.events import Failed, Finished, Loaded, PresetChanged, Rule, Sampling, Stats
from floe_chat.models.errors import PackError, TryAgainError, UsageError
from floe_chat.models.tokenizer import chat_process
from floe_chat.models.tokenizer.chat_process import ChatProcess

from ..helpers import edit_json, reseal

DEADLINE_S = 120.0
GREEDY = Sampling(temperature=0)
HI = [PromptTurn("user", "hi")]
AROUND = len("<") + len("[INST]  [/INST]")  # tokens of the test template around one question: <s> is one
E = TypeVar("E")


def until(client: ChatClient, *kinds: type[E]) -> tuple[E, list[Update]]:
    """The next update of one of `kinds`, and everything before it."""
    seen: list[Update] = []
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        for update in client.poll(timeout=0.2):
            if isinstance(update, kinds):
                return update, seen
            seen.append(update)
    raise AssertionError(f"no {kinds} among {seen}")


@pytest.fixture
def client(tiny_pack: Path) -> Iterator[ChatClient]:
    """A client whose model is ready."""
    client = ChatClient(tiny_pack, None, "cpu")
    client.start()
    loaded, _ = until(client, Loaded, Failed)
    assert isinstance(loaded, Loaded), loaded
    yield client
    client.close()


def answered(client: ChatClient) -> tuple[str, Finished]:
    """The text of the running answer, and its end."""
    finished, before = until(client, Finished, Failed)
    assert isinstance(finished, Finished), finished
    return "".join(update.text for update in before if isinstance(update, TextDelta)), finished


def test_questions_are_answered_one_after_the_other(client: ChatClient) -> None:
    client.cancel()  # what is not there
    texts: list[str] = []
    for number in (1, 2):
        submitted = client.submit(Question(HI, GREEDY, 8))
        assert (submitted.request, submitted.prompt_tokens, submitted.dropped) == (number, AROUND + 2, 0)
        text, finished = answered(client)
        assert finished.request == number and finished.stats.prompt_tokens == AROUND + 2
        texts.append(text)
    assert texts[0] == texts[1] != ""
    client.submit(Question(HI, GREEDY, 400))
    with pytest.raises(TryAgainError, match="still"):
        client.submit(Question(HI, GREEDY, 8))
    client.cancel()
    assert answered(client)[1].reason == "cancelled"
    begun = "once upon"  # an answer that goes on where it ended
    held = client.count(begun)
    assert held and client.count("") == 0
    submitted = client.submit(Question(HI, GREEDY, 8, begun))
    assert submitted.prompt_tokens == AROUND + 2 + held
    rest, finished = answered(client)
    assert finished.reason == "length" and finished.stats.prompt_tokens == submitted.prompt_tokens
    assert rest != texts[0]


def test_what_was_prepared_is_computed_when_it_is_begun(client: ChatClient) -> None:
    assert client.prepare(Question(HI, GREEDY, 8)) == [1]
    assert not [update for update in client.poll(timeout=0.3) if not isinstance(update, Stats)]
    with pytest.raises(TryAgainError, match="still"):
        client.prepare(Question(HI, GREEDY, 8))
    client.begin()
    assert until(client, Submitted)[0] == Submitted(1, AROUND + 2, 0)
    text, finished = answered(client)
    assert (finished.request, finished.reason) == (1, "length") and text
    client.begin()  # nothing is left to begin
    client.prepare(Question(HI, GREEDY, 8))
    client.cancel()
    client.begin()
    text, finished = answered(client)
    assert (finished.request, finished.reason, text) == (2, "cancelled", "")


def test_nobody_waits_for_a_tokenizer_that_gets_no_time(client: ChatClient) -> None:
    """Its process is stopped: `poll` returns, a count has its own, and a cancel ends the answer."""
    chat = client._format  # pyright: ignore[reportPrivateUsage]
    assert isinstance(chat, ChatProcess) and chat._child is not None  # pyright: ignore[reportPrivateUsage]
    number = chat._child.number  # pyright: ignore[reportPrivateUsage]
    for request in (1, 2):
        client.prepare(Question(HI, GREEDY, 400))
        if request == 2:
            client.begin()
            until(client, TextDelta)
        os.kill(number, signal.SIGSTOP)
        client.begin()
        client.poll(0.0)
        assert client.count("hi") == 2
        client.cancel()
        finished, before = until(client, Finished, Failed)
        assert isinstance(finished, Finished) and (finished.request, finished.reason) == (request, "cancelled")
        assert not [update for update in before if isinstance(update, TextDelta | Submitted)]
        os.kill(number, signal.SIGCONT)
    client.submit(Question(HI, GREEDY, 4))
    finished, before = until(client, Finished, Failed)
    assert finished.request == 3 and {each.request for each in before if isinstance(each, TextDelta)} == {3}


def test_an_interrupt_while_a_prompt_is_made_leaves_no_trace(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.submit(Question(HI, GREEDY, 8))
    expected = answered(client)[0]

    def interrupted(_child: object) -> float:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def send(pipe: Any, asked: dict[str, Any]) -> None:
        monkeypatch.setattr(chat_process._Child, "_computed", interrupted)  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(chat_process, "_LOOK_S", 0.0)
        pipe.write(b"half")

    monkeypatch.setattr(chat_process, "send", send)
    with pytest.raises(KeyboardInterrupt):
        client.submit(Question(HI, GREEDY, 8))
    client.submit(Question(HI, GREEDY, 8))
    assert answered(client)[0] == expected


def test_a_chat_takes_as_much_of_the_window_as_its_next_question_would_without_words(client: ChatClient) -> None:
    asked = (*HI, PromptTurn("assistant", "there"), PromptTurn("user", ""))
    submitted = client.submit(Question(asked, GREEDY, 1))
    answered(client)
    assert client.context_of(asked[:-1], 1) == client.context_of(asked, 1) == (submitted.prompt_tokens, 0)
    assert client.context_of(HI, 1) == (AROUND + 2, 0)
    long = [PromptTurn(role, "word " * 30) for _ in range(40) for role in ("user", "assistant")]
    submitted = client.submit(Question((*long, PromptTurn("user", "")), GREEDY, 60))
    answered(client)
    assert client.context_of(long, 60) == (submitted.prompt_tokens, submitted.dropped)
    fewer = client.context_of(long, 4000)
    assert fewer is not None and submitted.prompt_tokens is not None
    assert fewer[0] < submitted.prompt_tokens and fewer[1] > submitted.dropped > 0
    much = PromptTurn("user", "word " * 4000)
    empty = client.context_of((), 60)
    assert empty is not None and client.context_of((much, PromptTurn("assistant", "well")), 60) == (empty[0], 2)
    assert client.context_of((much,), 60) is None


def test_presets_with_what_they_cost(client: ChatClient) -> None:
    known = client.costs()
    costs = known.presets
    assert known.dials is None and known.demo is not None and known.demo.sparsity
    assert [cost.preset.name for cost in costs][-2:] == ["Balanced", "Fast"]
    assert all(cost.kl is None and cost.bytes_per_token is None for cost in costs)  # nobody has tuned it
    client.set_quality(Rule(sparsity=0.7))
    assert until(client, PresetChanged)[0].preset == "Custom"
    client.set_quality(Rule(sparsity=7))
    assert until(client, Failed)[0].exit_code == 2


def turns(count: int, length: int) -> list[PromptTurn]:
    """A conversation of `count` questions with answers between them, `length` characters each."""
    return [PromptTurn(("user", "assistant")[i % 2], chr(97 + i % 26) * length) for i in range(2 * count - 1)]


@pytest.mark.parametrize("system", [(), (PromptTurn("system", "s" * 50),)], ids=["bare", "instructions"])
def test_the_oldest_turns_leave_first_and_in_pairs(client: ChatClient, system: tuple[PromptTurn, ...]) -> None:
    """Instructions never do."""
    # The window holds 512; some are kept for the answer. Without three messages the rest would fit, but begin with
    # an answer to nothing.
    room = 70 if not system else 100
    submitted = client.submit(Question([*system, *turns(4, 100)], GREEDY, room))
    assert submitted.dropped == 4 and (submitted.prompt_tokens or 999) <= 512 - room
    answered(client)
    alone = client.submit(Question([*system, *turns(4, 100)[4:]], GREEDY, room))
    assert (alone.dropped, alone.prompt_tokens) == (0, submitted.prompt_tokens)


def test_what_is_too_long_is_explained_and_the_next_is_answered(client: ChatClient) -> None:
    with pytest.raises(UsageError) as caught:
        client.submit(Question([*turns(2, 10)[:2], PromptTurn("user", "x" * 600)], GREEDY, 8))
    assert "512" in caught.value.cause and caught.value.hint
    with pytest.raises(UsageError, match="message is too long") as caught:
        client.submit(Question([PromptTurn("user", "word " * 3_000_000)], GREEDY, 4))
    assert "more text than fits" in caught.value.cause  # it was not read
    with pytest.raises(UsageError, match="system prompt is too long"):
        client.submit(Question([PromptTurn("system", "word " * 3_000_000), *HI], GREEDY, 4))
    old = [PromptTurn(role, "word " * 300_000) for role in ("user", "assistant")] * 2
    assert client.submit(Question([*old, *HI], GREEDY, 4)).dropped == 4
    assert answered(client)[1].reason == "length"


def test_a_model_that_cannot_be_used_is_told_once(tmp_path: Path) -> None:
    client, failed = opened(tmp_path / "missing")
    assert isinstance(failed, Failed) and failed.title and failed.hint and failed.exit_code == 2
    client.close()
    assert not [update for update in client.poll() if isinstance(update, Failed | Loaded)]


def test_a_client_can_be_closed_at_any_time(tiny_pack: Path) -> None:
    never_started = ChatClient(tiny_pack)
    never_started.close()
    loading = ChatClient(tiny_pack, None, "cpu")
    loading.start()
    loading.close()
    loading.close()
    assert not [update for update in loading.poll() if isinstance(update, Failed)]


def opened(pack: Path) -> tuple[ChatClient, Loaded | Failed]:
    client = ChatClient(pack, None, "cpu")
    client.start()
    return client, until(client, Loaded, Failed)[0]


def crafted(pack: Path, folder: Path, name: str, change: Callable[[Any], None]) -> Path:
    """A copy of a pack by somebody who crafts one: one JSON file is changed, and all checksums are right."""
    shutil.copytree(pack, folder)
    edit_json(folder / name, change)
    reseal(folder)
    return folder


def test_a_tokenizer_that_panics_is_reported(tiny_pack: Path, tmp_path: Path) -> None:
    tokenizer = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}
    pack = crafted(tiny_pack, tmp_path / "pack", "tokenizer.json", lambda fields: fields.update(tokenizer))
    client, failed = opened(pack)
    assert isinstance(failed, Failed) and "tokenizer" in failed.title and str(pack) in failed.hint
    with pytest.raises(TryAgainError):
        client.submit(Question(HI, GREEDY, 4))
    client.open(tiny_pack)  # another model answers as ever
    assert isinstance(until(client, Loaded, Failed)[0], Loaded)
    client.submit(Question(HI, GREEDY, 4))
    assert answered(client)[1].reason == "length"
    client.close()


def test_a_template_that_loops_is_stopped_and_the_next_question_answered(
    tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_process, "_REQUEST_S", 0.3)
    loops = "{% if 'loop' in messages[0].content %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    pack = crafted(
        tiny_pack,
        tmp_path / "pack",
        "tokenizer_config.json",
        lambda fields: fields.update(chat_template=loops + "{% endfor %}{% endif %}" + fields["chat_template"]),
    )
    client, loaded = opened(pack)
    assert isinstance(loaded, Loaded)
    with pytest.raises(PackError, match="chat template"):
        client.submit(Question([PromptTurn("user", "loop")], GREEDY, 4))
    assert client.count("hi") == 2 and client.context_of(HI, 4) == (AROUND + 2, 0)
    assert client.context_of([PromptTurn("user", "loop")], 4) is None
    assert client.count("hi") is None and client.context_of(HI, 4) is None  # nothing is started for a figure alone
    client.submit(Question(HI, GREEDY, 4))
    assert answered(client)[1].reason == "length"
    client.close()


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_pack: Path, tmp_path: Path) -> None:
    def add(fields: Any) -> None:
        fields["model"]["vocab"]["word"] = 259

    client, failed = opened(crafted(tiny_pack, tmp_path / "pack", "tokenizer.json", add))
    assert isinstance(failed, Failed) and "damaged" in failed.title and "259 ('word')" in failed.cause
    client.close()


def test_a_tokenizer_that_fails_in_an_answer_ends_it(tiny_pack: Path, tmp_path: Path) -> None:
    def grow(fields: Any) -> None:
        more = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 100_000}
        fields["decoder"] = {"type": "Sequence", "decoders": [fields["decoder"], more]}

    client, loaded = opened(crafted(tiny_pack, tmp_path / "pack", "tokenizer.json", grow))
    assert isinstance(loaded, Loaded)
    submitted = client.submit(Question(HI, GREEDY, 40))
    failed = until(client, Failed)[0]
    assert failed.request == submitted.request and "tokenizer" in failed.title
    client.submit(Question(HI, GREEDY, 1))
    client.close()


# The client with a model that thinks: thinking is apart, does not count as answer, and is not sent back


OPENS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
MAY = "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] }}{% endfor %}[assistant]"
Opened = Callable[[str], ChatClient]


@pytest.fixture
def with_template(tiny_pack: Path, tmp_path: Path) -> Iterator[Opened]:
    """Opens the tiny model with another chat template."""
    clients: list[ChatClient] = []

    def open_it(template: str) -> ChatClient:
        folder = tmp_path / str(len(clients))
        pack = crafted(tiny_pack, folder, "tokenizer_config.json", lambda fields: fields.update(chat_template=template))
        clients.append(ChatClient(pack, None, "cpu"))
        clients[-1].start()
        until(clients[-1], Loaded)
        return clients[-1]

    yield open_it
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


def test_thinking_comes_apart_and_has_room_of_its_own(with_template: Opened) -> None:
    client = with_template(OPENS)
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
    client.think = True  # an answer goes on inside and after its thinking
    plain = client.submit(Question(HI, GREEDY, 4)).prompt_tokens
    thought(client, 1)
    inside = client.submit(Question(HI, GREEDY, 4, thought="They say")).prompt_tokens
    assert thought(client, 1)[2] == "" and plain is not None and inside is not None
    assert inside == plain + len("They say")
    after = client.submit(Question(HI, GREEDY, 4, "Yes", thought="They say")).prompt_tokens
    text, finished = answered(client)
    assert text and finished.reason == "length" and after == inside + len("\n</think>\n\nYes")


def test_an_answer_is_as_long_as_was_asked_for(with_template: Opened) -> None:
    client = with_template(MAY)
    assert client.thinking == "always"
    client.submit(Question(HI, GREEDY, 5))
    found, _, text, finished = thought(client, 1)
    assert not found and finished.reason == "length" and finished.stats.new_tokens >= 5
    assert client.count(text) in range(1, 16)  # five tokens, of which broken characters are shown as three bytes
    client.submit(Question(HI, GREEDY, 5))
    assert thought(client, 1)[3].reason == "length"
