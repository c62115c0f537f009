"""The line of answers that wait, and clients that go, send half of what they should or take nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn
from floe_chat.app.server.refusals import RefusedError
from floe_chat.app.server.scheduler import End, News, Request
from floe_chat.app.server.spoken import Text
from floe_chat.engine.events import Rule, Sampling
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_process import ChatProcess

from .serving import QUESTIONS, Served, serving, user


def test_a_full_line_says_when_to_come_again(slow: Served) -> None:
    body = {"model": slow.model, "messages": user("hi"), "temperature": 5, "stream": True, "max_tokens": 30_000}
    url = f"{slow.url}/chat/completions"
    with httpx2.Client(timeout=60) as client:
        streams = [client.stream("POST", url, json=body)]
        lines = streams[0].__enter__().iter_lines()
        assert next(lines)
        waiting = [wanted(), wanted()]
        slow.scheduler.take(waiting, lambda _, __: None)
        refused = slow.post({"messages": user("hi")})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert slow.metric("floe_refused_total") == 1
        streams[0].__exit__(None, None, None)
        for request in waiting:
            slow.scheduler.leave(request)
    slow.until("floe_waiting", 0)
    slow.until("floe_running", 0)


def wanted(client: str = "", longest: int = 3) -> Request:
    return Request([PromptTurn("user", "hi")], Sampling(temperature=5.0, seed=1), longest, client=client)


async def test_each_client_has_its_turn(demo: Served) -> None:
    ended, loop, done = list[str](), asyncio.get_running_loop(), asyncio.Event()
    names = ["first", "many 1", "many 2", "many 3", "one"]

    def tell(number: int, news: News) -> None:
        if isinstance(news, End):
            ended.append(names[number])
            if len(ended) == len(names):
                loop.call_soon_threadsafe(done.set)

    demo.scheduler.take([wanted(name.split()[0], 24) for name in names], tell)
    await asyncio.wait_for(done.wait(), 60)
    assert ended.index("one") < ended.index("many 2")
    assert [name for name in ended if name.startswith("many")] == names[1:4]


def test_the_figures_add_up(demo: Served) -> None:
    before = [demo.metric(f"floe_{name}_tokens_total") for name in ("prompt", "new")]
    used = demo.post({"messages": user("Why?"), "max_tokens": 6}).json()["usage"]
    after = [demo.metric(f"floe_{name}_tokens_total") for name in ("prompt", "new")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [used["prompt_tokens"], used["completion_tokens"]]


class TestTogether:
    """Several answers at a time, as the scheduler hands them over."""

    @staticmethod
    def taken(served: Served, requests: list[Request]) -> list[str]:
        """All of them at once; what each was told, and how it ended."""
        texts, left, done = [""] * len(requests), len(requests), threading.Event()

        def tell(number: int, news: News) -> None:
            nonlocal left
            match news:
                case Text(text):
                    texts[number] += text
                case End(reason=reason, preset=preset):
                    texts[number] += f" [{reason} {preset}]"
                    left -= 1
                case RefusedError():
                    texts[number] += f" [{news.status}]"
                    left -= 1
                case _:
                    pass
            if not left:
                done.set()

        served.scheduler.take([replace(request) for request in requests], tell)
        assert done.wait(120), texts
        return texts

    def test_each_is_what_it_is_alone(self, demo: Served) -> None:
        """With its own seed, stop, constraint, limit and preset; two qualities are never computed at once."""
        requests = [
            replace(wanted(f"client {number % 3}", 8 + 3 * number), sampling=Sampling(temperature=0.9, seed=number))
            for number in range(7)
        ]
        requests[2] = replace(requests[2], schema='{"enum": ["yes", "no"]}')
        requests[3] = replace(requests[3], quality="Fast")
        requests[4] = replace(requests[4], quality="Fast", stops=("e",))
        requests[6] = replace(requests[6], quality=Rule(sparsity=0.2))
        alone = [self.taken(demo, [one])[0] for one in requests]
        assert self.taken(demo, requests) == alone
        assert [one.rpartition(" ")[2] for one in alone[2:7]] == ["Balanced]", "Fast]", "Fast]", "Balanced]", "Custom]"]
        assert alone[2].startswith(('"yes"', '"no"')) and "e" not in alone[4].partition(" [")[0]

    def test_one_that_leaves_takes_none_with_it(self, long_winded: Path) -> None:
        with serving(long_winded, together=3) as served:
            requests = [wanted(str(number), 30_000) for number in range(4)]
            served.scheduler.take(requests, lambda _, __: None)
            served.until("floe_running", 3)
            assert served.metric("floe_waiting") == 1
            served.scheduler.leave(requests[1])
            served.until("floe_waiting", 0)
            served.until("floe_running", 3)  # a while after it has left the line
            assert served.scheduler.counts.answers == {"failed": 1}
            for request in requests:
                served.scheduler.leave(request)
            served.until("floe_running", 0)
            assert served.scheduler.counts.answers == {"failed": 4}

    @pytest.mark.some(2)
    @pytest.mark.parametrize("moment", ["in the line", "prompt", "first token", "held to a form", "ended"])
    def test_leaving_is_final_at_every_moment(self, long_winded: Path, moment: str) -> None:
        """Even where the tokenizer's process stands still; others go on, and the next is answered as ever."""
        told, begun, done = list[News](), threading.Event(), threading.Event()

        def tell(_number: int, news: News) -> None:
            told.append(news)
            begun.set()
            if isinstance(news, End | RefusedError):
                done.set()

        held = moment == "held to a form"
        with serving(asset("demo", "packed") if held else long_winded, together=2) as served:
            alone = self.taken(served, [wanted("x", 9)])
            long = [wanted(f"other {number}", 30_000) for number in range({"in the line": 2}.get(moment, not held))]
            served.scheduler.take(long, lambda _, __: None)
            served.until("floe_running", len(long))
            chat = served.scheduler._client._format  # pyright: ignore[reportPrivateUsage]
            assert isinstance(chat, ChatProcess) and chat._child is not None  # pyright: ignore[reportPrivateUsage]
            number = chat._child.number  # pyright: ignore[reportPrivateUsage]
            if moment == "prompt":
                os.kill(number, signal.SIGSTOP)
            schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 999}' if held else ""
            one = replace(wanted("one", 3 if moment == "ended" else 30_000), schema=schema)
            served.scheduler.take([one], tell)
            served.until("floe_waiting", int(moment == "in the line"))
            if moment == "ended":
                assert done.wait(60)
            elif held or moment == "first token":
                assert begun.wait(60) and isinstance(told[0], Text), told
            if held:
                os.kill(number, signal.SIGSTOP)
            served.scheduler.leave(one)
            if moment == "in the line":
                served.until("floe_waiting", 0)
            else:
                assert done.wait(60)
            os.kill(number, signal.SIGCONT)
            assert served.metric("floe_running") == len(long)
            for other in long:
                served.scheduler.leave(other)
            before = len(told)
            assert self.taken(served, [wanted("x", 9)]) == alone and len(told) == before
            ends = [type(news) for news in told if isinstance(news, End | RefusedError)]
            assert ends == ([] if moment == "in the line" else [End] if moment == "ended" else [RefusedError])

    def test_another_quality_is_not_kept_waiting_for_ever(self, demo: Served) -> None:
        ended: list[str] = []
        done = threading.Event()

        def tell(number: int, news: News) -> None:
            if isinstance(news, End):
                ended.append(names[number])
                if len(ended) == len(names):
                    done.set()

        names = ["a", "a", "a", "a", "fast", *"aaaaaaaa"]
        requests = [
            replace(wanted(f"{at}", 8), quality="Fast" if name == "fast" else None) for at, name in enumerate(names)
        ]
        demo.scheduler.take(requests, tell)
        assert done.wait(120) and ended.index("fast") == 4

    def test_a_preset_that_does_not_exist_ends_its_own_answer(self, demo: Served) -> None:
        requests = [wanted("a", 9), replace(wanted("b", 9), quality="Best"), wanted("c", 9)]
        told = self.taken(demo, requests)
        assert told[1] == " [400]" and told[0] == told[2] and told[0].endswith("[length Balanced]")

    def test_a_burst_may_be_as_large_as_what_is_free(self, slow: Served) -> None:
        """One is computed, and two may wait."""
        with pytest.raises(RefusedError, match="may"):
            slow.scheduler.take([wanted()] * 4, lambda _, __: None)
        requests = [wanted() for _ in range(3)]
        slow.scheduler.take(requests, lambda _, __: None)
        for request in requests:
            slow.scheduler.leave(request)
        slow.until("floe_running", 0)

    def test_what_nobody_expected_is_told_and_the_next_has_its_turn(
        self, demo: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_given: object, **_how: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(ChatClient, "submit_whole", broken)
            assert self.taken(demo, [wanted("a"), wanted("b")]) == [" [500]"] * 2
        assert self.taken(demo, [wanted("a")])[0].endswith("[length Balanced]")


# Clients that send half of what they should, take nothing, go at any moment, or come in crowds


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


def test_who_sends_half_a_head_is_left(hasty: Served) -> None:
    get = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with ExitStack() as opened:
        begun = (b"", b"POST /v1/chat/comp", get + b"X-More: ", get + b"\r\nGET /heal")
        crowd = [opened.enter_context(closing(connected(hasty, sent))) for sent in begun]
        assert is_served(hasty)
        assert [everything(made).count(b"200 OK") for made in crowd] == [0, 0, 0, 1]


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
            assert httpx2.get(f"{hasty.root}/health", timeout=60).status_code == 200
        made.settimeout(NEVER_S)
        assert made.recv(12) == b"HTTP/1.1 400"  # 10 MB are too much for the model, not for the server


def test_what_is_no_http_is_refused(hasty: Served) -> None:
    version, hosts = b"GET /health HTTP/9.9\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"
    length = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n"
    chunk = head(2, more="Transfer-Encoding: chunked\r\n") + b"zz\r\n"
    for sent in (b"\x16\x03\x01\x02\x00\x01\x00", version, hosts, length, b"GET /" + b"a" * 100_000, chunk):
        with closing(connected(hasty, sent)) as made:
            came = everything(made)
        assert came == b"" or came.startswith(b"HTTP/1.1 4"), sent
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
        assert impatient.scheduler.counts.answers == {"failed": 1, "length": 1}  # it was ended, not finished
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
        assert slow.metric("floe_running") == 1 and slow.scheduler.counts.answers == {}
        first.shutdown(socket.SHUT_RDWR)
    slow.until("floe_running", 0)
    assert slow.scheduler.counts.answers == {"failed": 1}


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
    assert slow.scheduler.counts.answers == {"failed": 1}


def test_going_in_the_middle_of_a_request_is_no_failure(hasty: Served) -> None:
    whole = head(len(body := asking(hasty))) + body
    answers = dict(hasty.scheduler.counts.answers)
    for part in (0.2, 0.95):
        connected(hasty, whole[: int(part * len(whole))]).close()
    assert is_served(hasty)
    assert hasty.scheduler.counts.answers == answers | {"length": answers.get("length", 0) + 1}


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

            return await asyncio.gather(*map(ask, range(6)))

    assert set(asyncio.run(all_of_them())) == {expected[QUESTIONS[0]]}
    hasty.until("floe_running", 0)
