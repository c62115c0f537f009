"""Several answers at once: from the engine, and from a server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import Client, PromptTurn, Question, TextDelta
from floe_chat.app.client.loading import wait_until_loaded
from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import RemoteClient
from floe_chat.engine.events import Failed, Finished, Sampling

from .model_server import ModelServer, Reply, models, refusing, said, serving

HI = Question([PromptTurn("user", "hi")], Sampling(temperature=1.0, seed=7), 12)


@pytest.fixture
def client(tiny_pack: Path) -> Iterator[ChatClient]:
    client = ChatClient(tiny_pack, None, "cpu")
    client.start()
    wait_until_loaded(client)
    yield client
    client.close()


def ends(client: Client, count: int) -> tuple[dict[int, str], list[Finished | Failed]]:
    """The text of each request, and `count` ends in their order."""
    texts, ended = dict[int, str](), list[Finished | Failed]()
    deadline = time.monotonic() + 120
    while len(ended) < count:
        assert time.monotonic() < deadline, f"nothing came after {ended}"
        for update in client.poll(timeout=5):
            if isinstance(update, TextDelta):
                texts[update.request] = texts.get(update.request, "") + update.text
            elif isinstance(update, Finished | Failed):
                ended.append(update)
    return texts, ended


def test_each_answer_has_its_own_seed(client: ChatClient) -> None:
    assert client.prepare(HI, 3) == [1, 2, 3]
    client.begin()
    texts, ended = ends(client, 3)
    assert sorted(end.request for end in ended if end.request) == [1, 2, 3] and len(set(texts.values())) == 3
    client.submit(HI)
    again, _ = ends(client, 1)
    assert again == {4: texts[1]}


def test_one_or_all_are_stopped(client: ChatClient) -> None:
    client.prepare(HI, 3)
    client.cancel(2)
    client.begin()
    texts, ended = ends(client, 3)
    reasons = {end.request: end.reason for end in ended if isinstance(end, Finished)}
    assert reasons == {1: "length", 2: "cancelled", 3: "length"}
    assert set(texts) == {1, 3}
    client.prepare(HI, 3)
    client.cancel()
    client.begin()
    texts, ended = ends(client, 3)
    assert [end.reason for end in ended if isinstance(end, Finished)] == ["cancelled"] * 3 and not texts


def test_a_server_is_asked_for_all_at_once() -> None:
    hanging, usage = Reply(parts=said({"content": "Hm"}, reason=None), end="hang"), {"completion_tokens": 2}
    answered = Reply(parts=said({"content": "Hello"}, usage={"prompt_tokens": 10, **usage}))
    with serving(ModelServer(models("tiny"), hanging, answered, refusing(500, "It broke"))) as server:
        client = RemoteClient(Address.parse(server.url), Key(""), None)
        client.start()
        try:
            wait_until_loaded(client)
            assert client.prepare(HI, 3) == [1, 2, 3]
            client.begin()
            texts, ended = ends(client, 2)
            client.cancel()
            ended += ends(client, 1)[1]
            assert "Hello" in texts.values() and {end.request for end in ended} == {1, 2, 3}
            kinds = sorted("failed" if isinstance(end, Failed) else end.reason for end in ended)
            assert kinds == ["cancelled", "failed", "stop"]
            stats = next(end.stats for end in ended if isinstance(end, Finished) and end.reason == "stop")
            assert texts[stats.request] == "Hello" and stats.new_tokens == 2
            assert sorted(each.body["seed"] for each in server.questions) == [7, 8, 9]
        finally:
            client.close()
