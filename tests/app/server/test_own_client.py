"""Our client before our server: a chat on another machine is the chat."""

from __future__ import annotations

from pathlib import Path

from floe_chat.app.client.interface import PromptTurn, Question, TextDelta, Update
from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import RemoteClient
from floe_chat.engine.events import Failed, Finished, Loaded, Sampling

from .serving import Served, serving

GREEDY = Sampling(temperature=0, min_p=0.0)
ASKED = [PromptTurn("user", "What is an expert?")]


def heard(client: RemoteClient, end: type[Update]) -> list[Update]:
    updates: list[Update] = []
    while not any(isinstance(update, end | Failed) for update in updates):
        more = client.poll(timeout=30)
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
