"""Clients that send half of what they should, take nothing, go at any moment, or come in crowds."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from floe_chat.models.catalog import asset

from .serving import QUESTIONS, Served, serving, user

PAUSE = 1.0  # seconds, instead of the thirty that people get
NEVER_S = 60.0  # what would have to take longer, fails


@pytest.fixture
def impatient(long_winded: Path) -> Iterator[Served]:
    """Answers that do not end by themselves, one at a time, for clients that may pause for a second."""
    with serving(long_winded, pause=PAUSE, together=1) as served:
        yield served


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """The demo model, for clients that may pause for a second."""
    with serving(asset("demo", "packed"), pause=PAUSE) as served:
        yield served


def asking(served: Served, **fields: Any) -> bytes:
    body = {"model": served.model, "messages": user("hi"), "max_tokens": 3, **fields}
    return json.dumps(body).encode()


def head(length: int, path: str = "/v1/chat/completions", *, more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {length}\r\n{more}\r\n".encode()


def connected(served: Served, sent: bytes = b"", *, held: int | None = None) -> socket.socket:
    """A connection on which this was sent. held: bytes that the system may hold of an answer."""
    made = socket.socket()
    if held is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, held)
    made.settimeout(NEVER_S)
    host, port = served.root.removeprefix("http://").split(":")
    made.connect((host, int(port)))
    made.sendall(sent)
    return made


def everything(made: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    parts = list[bytes]()
    try:
        while part := made.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def is_served(served: Served) -> bool:
    return served.post({"messages": user("hi"), "max_tokens": 2}).status_code == 200


# What comes in part only


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"POST /v1/chat/comp", id="half-a-line"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-More: ", id="half-the-headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /heal", id="half-of-the-second"),
    ],
)
def test_who_sends_half_a_head_is_left(hasty: Served, sent: bytes) -> None:
    with closing(connected(hasty, sent)) as made:
        assert is_served(hasty)
        came = everything(made)
    assert came.count(b"200 OK") == (1 if sent.count(b"GET") == 2 else 0)


def test_a_head_that_drips_is_no_head(hasty: Served) -> None:
    """Each byte in time, all of them too late."""
    with closing(connected(hasty, b"GET /health HTTP/1.1\r\nX-Slow: ")) as made:
        made.settimeout(PAUSE / 5)
        for _ in range(int(NEVER_S / PAUSE * 5)):
            try:
                made.sendall(b"x")
                if made.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    raise AssertionError("it would have waited for ever")


def test_a_body_that_stops_is_refused(hasty: Served) -> None:
    whole = asking(hasty)
    with closing(connected(hasty, head(len(whole)) + whole[:-9])) as made:
        assert is_served(hasty)
        came = everything(made)
    assert came.startswith(b"HTTP/1.1 408 ") and json.loads(came.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_large_body_may_take_its_time(hasty: Served) -> None:
    """Longer than one pause in all, without one in between: a line that is slow, not a client that is gone."""
    text = "word " * 2_000_000
    whole = asking(hasty, messages=user(text))
    with closing(connected(hasty, head(len(whole)))) as made:
        for at in range(0, len(whole), len(whole) // 8 + 1):
            made.sendall(whole[at : at + len(whole) // 8 + 1])
            assert httpx2.get(f"{hasty.root}/health").status_code == 200
        made.settimeout(NEVER_S)
        assert made.recv(12) == b"HTTP/1.1 400"  # 10 MB are too much for the model, not for the server


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="tls"),
        pytest.param(b"GET /health HTTP/9.9\r\n\r\n", id="version"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", id="two-hosts"),
        pytest.param(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n", id="length"),
        pytest.param(b"GET /" + b"a" * 100_000, id="long-line"),
        pytest.param(head(2, more="Transfer-Encoding: chunked\r\n") + b"zz\r\n", id="chunk"),
    ],
)
def test_what_is_no_http_is_refused(hasty: Served, sent: bytes) -> None:
    with closing(connected(hasty, sent)) as made:
        assert everything(made).startswith((b"HTTP/1.1 4", b""))
    assert is_served(hasty)


@pytest.mark.parametrize(
    ("begun", "size", "status"),
    [
        pytest.param(head(20 << 20, "/v1/models", more="Connection: close\r\n"), 20 << 20, b"405", id="of-no-use"),
        pytest.param(head(40 << 20), 40 << 20, b"413", id="too-long"),
        pytest.param(b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 20 << 20, b"400", id="no-http"),
    ],
)
def test_a_refusal_is_not_lost_with_a_body_that_still_comes(
    demo: Served, begun: bytes, size: int, status: bytes
) -> None:
    with closing(connected(demo, begun)) as made:
        made.sendall(bytes(size))
        made.shutdown(socket.SHUT_WR)
        assert made.recv(1 << 16).startswith(b"HTTP/1.1 " + status)
        while made.recv(1 << 16):
            pass


def test_hundreds_of_idle_connections_keep_nobody_out(hasty: Served) -> None:
    with ExitStack() as opened:
        crowd = [opened.enter_context(closing(connected(hasty))) for _ in range(200)]
        assert is_served(hasty)
        for made in crowd:
            assert everything(made) == b""
    hasty.until_connections(0)


# What nobody takes


def test_who_takes_nothing_frees_the_line(impatient: Served) -> None:
    wide = {"logprobs": True, "top_logprobs": 20, "stream": True, "max_tokens": 30_000, "temperature": 5}
    whole = asking(impatient, **wide)
    with closing(connected(impatient, head(len(whole)) + whole, held=4096)) as made:
        impatient.until("floe_running", 1)
        other = impatient.post({"messages": user("hi"), "max_tokens": 2, "user": "another"})  # waits for that line
        assert other.status_code == 200 and other.json()["usage"]["completion_tokens"] == 2
        assert impatient.desk.counts.answers == {"failed": 1, "length": 1}  # it was ended, not finished
        impatient.until_connections(0)  # without a word from the client: the server holds nothing for it any more
        assert b"[DONE]" not in everything(made)


def test_a_reader_that_is_slow_gets_all(hasty: Served, expected: dict[str, str]) -> None:
    """Each pause shorter than the limit, all of them together longer."""
    whole = asking(hasty, messages=user(QUESTIONS[0]), stream=True, max_tokens=200)
    with closing(connected(hasty, head(len(whole), more="Connection: close\r\n") + whole, held=4096)) as made:
        came = everything(made)
    events = [line[6:] for line in came.decode().splitlines() if line.startswith("data: {")]
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == expected[QUESTIONS[0]]


# Who goes


def test_going_while_waiting_leaves_the_line(slow: Served) -> None:
    long = asking(slow, stream=True, max_tokens=30_000, temperature=5)
    with closing(connected(slow, head(len(long)) + long)) as first:
        slow.until("floe_running", 1)
        whole = asking(slow)
        with closing(connected(slow, head(len(whole)) + whole)):
            slow.until("floe_waiting", 1)
        slow.until("floe_waiting", 0)
        assert slow.metric("floe_running") == 1 and slow.desk.counts.answers == {}
        first.shutdown(socket.SHUT_RDWR)
    slow.until("floe_running", 0)
    assert slow.desk.counts.answers == {"failed": 1}


def test_going_while_the_prompt_is_read_ends_it(slow: Served) -> None:
    whole = asking(slow, messages=user("word " * 6_000), stream=True, max_tokens=1)
    made = connected(slow, head(len(whole)) + whole)
    slow.until("floe_running", 1)
    made.close()
    slow.until("floe_running", 0)
    assert slow.desk.counts.answers == {"failed": 1} and slow.desk.counts.new_tokens == 0


@pytest.mark.parametrize("stream", [True, False])
def test_going_in_the_middle_of_an_answer_ends_it(slow: Served, stream: bool) -> None:
    whole = asking(slow, stream=stream, max_tokens=30_000, temperature=5)
    made = connected(slow, head(len(whole)) + whole)
    if stream:
        assert made.recv(12) == b"HTTP/1.1 200"
    slow.until("floe_running", 1)
    # A reset, as from a process that was killed with something still to read.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    made.close()
    slow.until("floe_running", 0)
    assert slow.desk.counts.answers == {"failed": 1}


@pytest.mark.parametrize("part", [0.2, 0.95])
def test_going_in_the_middle_of_a_request_is_no_failure(hasty: Served, part: float) -> None:
    whole = head(len(body := asking(hasty))) + body
    answers = dict(hasty.desk.counts.answers)
    connected(hasty, whole[: int(part * len(whole))]).close()
    assert is_served(hasty)
    assert hasty.desk.counts.answers == answers | {"length": answers.get("length", 0) + 1}


def test_one_who_goes_does_not_disturb_those_who_stay(hasty: Served, expected: dict[str, str]) -> None:
    whole = asking(hasty, messages=user(QUESTIONS[1]), stream=True, max_tokens=200)

    async def all_of_them() -> list[str]:
        async with hasty.async_client() as client:

            async def ask(number: int) -> str:
                if number % 2:
                    connected(hasty, head(len(whole)) + whole).close()
                    return expected[QUESTIONS[0]]
                messages = user(QUESTIONS[0])
                reply = await client.chat.completions.create(model="demo", messages=messages, max_tokens=200)
                return reply.choices[0].message.content or ""

            return await asyncio.gather(*map(ask, range(20)))

    assert set(asyncio.run(all_of_them())) == {expected[QUESTIONS[0]]}
    hasty.until("floe_running", 0)


# Presets side by side
