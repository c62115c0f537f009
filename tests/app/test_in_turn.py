"""Several answers to one question, one after the other: from the engine, and from a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import Client, PromptTurn, Question, TextDelta
from floe_chat.app.client.loading import wait_until_loaded
from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import RemoteClient
from floe_chat.engine.events import Failed, Finished, Sampling
from floe_chat.models.errors import FloeError

from .model_server import ANSWER, recorded, serving

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
    while len(ended) < count:
        updates = client.poll(timeout=60)
        assert updates, f"nothing came after {ended}"
        for update in updates:
            if isinstance(update, TextDelta):
                texts[update.request] = texts.get(update.request, "") + update.text
            elif isinstance(update, Finished | Failed):
                ended.append(update)
    return texts, ended


def test_each_answer_has_its_own_seed(client: ChatClient) -> None:
    assert [one.request for one in client.prepare_others(HI, 3)] == [1, 2, 3]
    client.begin()
    texts, ended = ends(client, 3)
    assert [end.request for end in ended] == [1, 2, 3] and len(set(texts.values())) == 3
    client.submit(HI)
    again, _ = ends(client, 1)
    assert again == {4: texts[1]}


def test_one_or_all_are_stopped(client: ChatClient) -> None:
    client.prepare_others(HI, 3)
    client.cancel(2)
    client.begin()
    texts, ended = ends(client, 3)
    assert [end.reason for end in ended if isinstance(end, Finished)] == ["length", "cancelled", "length"]
    assert set(texts) == {1, 3}
    client.prepare_others(HI, 3)
    client.cancel()
    client.begin()
    texts, ended = ends(client, 3)
    assert [end.reason for end in ended if isinstance(end, Finished)] == ["cancelled"] * 3 and not texts


def test_an_answer_that_cannot_be_prepared_fails_and_the_next_one_comes(
    client: ChatClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = client.prepare, list[Question]()

    def refusing(question: Question) -> object:
        prepared.append(question)
        if len(prepared) == 2:
            raise FloeError("It broke", "A reason.", "A hint.")
        return prepare(question)

    monkeypatch.setattr(client, "prepare", refusing)
    client.prepare_others(HI, 3)
    client.begin()
    texts, ended = ends(client, 3)
    assert [(type(end), end.request) for end in ended] == [(Finished, 1), (Failed, 2), (Finished, 3)]
    assert set(texts) == {1, 3}


def test_a_server_answers_in_turn() -> None:
    with serving(recorded("vllm")) as server:
        client = RemoteClient(Address.parse(server.url), Key(""), None)
        client.start()
        try:
            wait_until_loaded(client)
            client.prepare_others(HI, 3)
            client.begin()
            texts, ended = ends(client, 1)
            client.cancel(3)
            more, others = ends(client, 2)
            assert texts == {1: ANSWER} and more == {2: ANSWER}
            assert [end.reason for end in (*ended, *others) if isinstance(end, Finished)] == [
                "stop",
                "stop",
                "cancelled",
            ]
        finally:
            client.close()
