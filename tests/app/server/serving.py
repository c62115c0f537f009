"""A server in this process, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.loading import wait_until_loaded
from floe_chat.app.server.application import application
from floe_chat.app.server.connections import PAUSE_S, Server
from floe_chat.app.server.guard import LOOPBACK, Guard
from floe_chat.app.server.scheduler import Scheduler
from floe_chat.engine.events import MOST_TOGETHER, Sampling

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI
    from openai.types.chat import ChatCompletionMessageParam

QUESTIONS = [f"What is {what}?" for what in ("an expert", "a neuron", "a token", "a router")]


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


@dataclass(frozen=True)
class Served:
    """`url`: of the protocol."""

    root: str
    scheduler: Scheduler
    server: Server
    key: str | None = None

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def model(self) -> str:
        return self.scheduler.loaded.model

    def client(self) -> OpenAI:
        from openai import OpenAI

        return OpenAI(base_url=self.url, api_key=self.key or "none", max_retries=0)

    def async_client(self) -> AsyncOpenAI:
        from openai import AsyncOpenAI

        return AsyncOpenAI(base_url=self.url, api_key=self.key or "none", max_retries=0)

    def post(self, body: object, path: str = "/chat/completions", **headers: str) -> httpx2.Response:
        """A body as it is: bytes, or what JSON can say, with the model's name."""
        if isinstance(body, dict):
            return httpx2.post(self.url + path, json={"model": self.model, **body}, headers=headers, timeout=60)
        assert isinstance(body, bytes)
        return httpx2.post(self.url + path, content=body, headers=headers, timeout=60)

    def metric(self, name: str) -> float:
        """A figure of /metrics."""
        lines = httpx2.get(f"{self.root}/metrics", timeout=60).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.split(" ")[0].partition("{")[0] == name)

    def until_connections(self, number: int) -> None:
        """Wait until so many are open."""
        for _ in range(2400):
            if len(self.server.server_state.connections) == number:
                return
            time.sleep(0.05)
        raise AssertionError(f"{len(self.server.server_state.connections)} connections are open")

    def until(self, name: str, value: float) -> None:
        """Wait for it."""
        for _ in range(2400):
            if self.metric(name) == value:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} is {self.metric(name)}, not {value}")


@contextmanager
def serving(
    pack: Path,
    queue: int = 64,
    key: str | None = None,
    origins: tuple[str, ...] = (),
    *,
    pause: float = PAUSE_S,
    together: int = MOST_TOGETHER,
) -> Generator[Served]:
    """The model in `pack`, drawing the likeliest token unless a request says otherwise. With a `pause` of its own, the
    system holds little of what nobody takes.
    """
    client = ChatClient(pack)
    client.start()
    scheduler = Scheduler(client, wait_until_loaded(client), queue, together)
    guard = Guard(key, LOOPBACK if key is None else None, origins)
    app = application(scheduler, Sampling(temperature=0.0, min_p=0.0), guard, origins, pause)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    if pause != PAUSE_S:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is
    listening.bind(("127.0.0.1", 0))
    server = Server(app, scheduler, pause)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", scheduler, server, key)
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
