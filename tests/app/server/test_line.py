"""The line of answers that wait: who has a turn, who leaves, and what is counted."""

from __future__ import annotations

import asyncio

import httpx2
import pytest
from floe_chat.app.client.interface import PromptTurn
from floe_chat.app.server.desk import End, News, Order
from floe_chat.engine.events import Sampling
from openai import RateLimitError

from .serving import Served, user


def test_a_closed_connection_frees_the_line(slow: Served) -> None:
    body = {"model": slow.model, "messages": user("hi"), "temperature": 5, "stream": True, "max_tokens": 30_000}
    with httpx2.stream("POST", f"{slow.url}/chat/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()  # whose end would close the connection
        assert next(lines)
        assert slow.metric("floe_running") == 1
    slow.until("floe_running", 0)
    with pytest.raises(httpx2.TimeoutException):
        httpx2.post(f"{slow.url}/chat/completions", json={**body, "stream": False}, timeout=1)
    slow.until("floe_running", 0)


def test_a_full_line_says_when_to_come_again(slow: Served) -> None:
    body = {"model": slow.model, "messages": user("hi"), "temperature": 5, "stream": True, "max_tokens": 30_000}
    url = f"{slow.url}/chat/completions"
    with httpx2.Client(timeout=60) as client:
        streams = [client.stream("POST", url, json=body)]
        lines = streams[0].__enter__().iter_lines()
        assert next(lines)
        waiting = [slow.desk.take([order()], lambda _, __: None)[0] for _ in range(2)]
        with pytest.raises(RateLimitError) as caught:
            slow.client().chat.completions.create(model=slow.model, messages=user("hi"))
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert slow.metric("floe_refused_total") == 1
        streams[0].__exit__(None, None, None)
        for ticket in waiting:
            ticket.leave()
    slow.until("floe_waiting", 0)
    slow.until("floe_running", 0)


def order(client: str = "", longest: int = 3) -> Order:
    return Order([PromptTurn("user", "hi")], Sampling(temperature=5.0, seed=1), longest, client=client)


async def test_each_client_has_its_turn(demo: Served) -> None:
    ended, loop, done = list[str](), asyncio.get_running_loop(), asyncio.Event()
    names = ["first", "many 1", "many 2", "many 3", "one"]

    def tell(number: int, news: News) -> None:
        if isinstance(news, End):
            ended.append(names[number])
            if len(ended) == len(names):
                loop.call_soon_threadsafe(done.set)

    demo.desk.take([order(name.split()[0], 60) for name in names], tell)
    await asyncio.wait_for(done.wait(), 60)
    assert ended.index("one") < ended.index("many 2")
    assert [name for name in ended if name.startswith("many")] == names[1:4]


def test_the_figures_add_up(demo: Served) -> None:
    before = [demo.metric(f"floe_{name}_tokens_total") for name in ("prompt", "new")]
    used = demo.post({"messages": user("Why?"), "max_tokens": 6}).json()["usage"]
    after = [demo.metric(f"floe_{name}_tokens_total") for name in ("prompt", "new")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [used["prompt_tokens"], used["completion_tokens"]]
