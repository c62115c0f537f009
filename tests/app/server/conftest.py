"""Servers that many tests ask."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import httpcore2
import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question, TextDelta
from floe_chat.app.client.loading import wait_until_loaded
from floe_chat.engine.events import Finished, Sampling
from floe_chat.models.catalog import asset

from .serving import QUESTIONS, Served, serving

_certificates = cache(httpcore2.default_ssl_context)


@pytest.fixture(autouse=True)
def certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client of httpx2 reads all certificates, although nothing here is encrypted: it takes 30 ms."""
    monkeypatch.setattr(httpcore2, "default_ssl_context", _certificates)


@pytest.fixture(scope="session")
def demo() -> Iterator[Served]:
    """The demo model."""
    with serving(asset("demo", "packed")) as served:
        yield served


@pytest.fixture
def slow(long_winded: Path) -> Iterator[Served]:
    """Answers that do not end by themselves, one at a time, of which two may wait."""
    with serving(long_winded, queue=2, together=1) as served:
        yield served


@pytest.fixture(scope="session")
def expected() -> dict[str, str]:
    """What the chat itself answers."""
    client = ChatClient(asset("demo", "packed"))
    client.start()
    answers = dict[str, str]()
    try:
        wait_until_loaded(client)
        for question in QUESTIONS:
            client.submit(Question([PromptTurn("user", question)], Sampling(temperature=0.0), 200))
            pieces, done = list[str](), False
            while not done:
                for update in client.poll(1.0):
                    pieces += [update.text] if isinstance(update, TextDelta) else []
                    done = done or isinstance(update, Finished)
            answers[question] = "".join(pieces)
    finally:
        client.close()
    return answers
