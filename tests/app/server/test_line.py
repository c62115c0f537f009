"""The line of answers that wait: who has a turn, who leaves, and what is counted."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn
from floe_chat.app.server.desk import End, News, Order
from floe_chat.app.server.refusals import RefusedError
from floe_chat.app.server.spoken import Text
from floe_chat.engine.events import Rule, Sampling
from floe_chat.models.catalog import asset
from floe_chat.models.tokenizer.chat_process import ChatProcess

from .serving import Served, serving, user


def test_a_full_line_says_when_to_come_again(slow: Served) -> None:
    from openai import RateLimitError

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


class TestTogether:
    """Several answers at a time, as the desk hands them over."""

    @staticmethod
    def taken(served: Served, orders: list[Order]) -> list[str]:
        """All of them at once; what each was told, and how it ended."""
        texts, left, done = [""] * len(orders), len(orders), threading.Event()

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

        served.desk.take(orders, tell)
        assert done.wait(120), texts
        return texts

    def test_each_is_what_it_is_alone(self, demo: Served) -> None:
        """With its own seed, stop, constraint, limit and preset; two qualities are never computed at once."""
        orders = [
            replace(order(f"client {number % 3}", 20 + 7 * number), sampling=Sampling(temperature=0.9, seed=number))
            for number in range(9)
        ]
        orders[2] = replace(orders[2], schema='{"enum": ["yes", "no"]}')
        orders[3] = replace(orders[3], quality="Fast")
        orders[4] = replace(orders[4], quality="Fast", stops=("e",))
        orders[6] = replace(orders[6], quality=Rule(sparsity=0.2))
        alone = [self.taken(demo, [one])[0] for one in orders]
        assert self.taken(demo, orders) == alone
        assert [one.rpartition(" ")[2] for one in alone[2:7]] == ["Balanced]", "Fast]", "Fast]", "Balanced]", "Custom]"]
        assert alone[2].startswith(('"yes"', '"no"')) and "e" not in alone[4].partition(" [")[0]

    def test_one_that_leaves_takes_none_with_it(self, long_winded: Path) -> None:
        with serving(long_winded, together=3) as served:
            tickets = [served.desk.take([order(str(number), 30_000)], lambda _, __: None)[0] for number in range(4)]
            served.until("floe_running", 3)
            assert served.metric("floe_waiting") == 1
            tickets[1].leave()
            served.until("floe_waiting", 0)
            assert served.metric("floe_running") == 3 and served.desk.counts.answers == {"failed": 1}
            for ticket in tickets:
                ticket.leave()
            served.until("floe_running", 0)
            assert served.desk.counts.answers == {"failed": 4}

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
            alone = self.taken(served, [order("x", 9)])
            long = [order(f"other {number}", 30_000) for number in range({"in the line": 2}.get(moment, not held))]
            others = served.desk.take(long, lambda _, __: None)
            served.until("floe_running", len(others))
            chat = served.desk._client._format  # pyright: ignore[reportPrivateUsage]
            assert isinstance(chat, ChatProcess) and chat._child is not None  # pyright: ignore[reportPrivateUsage]
            number = chat._child.number  # pyright: ignore[reportPrivateUsage]
            if moment == "prompt":
                os.kill(number, signal.SIGSTOP)
            schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 999}' if held else ""
            wanted = replace(order("one", 3 if moment == "ended" else 30_000), schema=schema)
            (ticket,) = served.desk.take([wanted], tell)
            served.until("floe_waiting", int(moment == "in the line"))
            if moment == "ended":
                assert done.wait(60)
            elif held or moment == "first token":
                assert begun.wait(60) and isinstance(told[0], Text), told
            if held:
                os.kill(number, signal.SIGSTOP)
            ticket.leave()
            if moment == "in the line":
                served.until("floe_waiting", 0)
            else:
                assert done.wait(60)
            os.kill(number, signal.SIGCONT)
            assert served.metric("floe_running") == len(others)
            for other in others:
                other.leave()
            before = len(told)
            assert self.taken(served, [order("x", 9)]) == alone and len(told) == before
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
        orders = [
            replace(order(f"{at}", 20), quality="Fast" if name == "fast" else None) for at, name in enumerate(names)
        ]
        demo.desk.take(orders, tell)
        assert done.wait(120) and ended.index("fast") == 4

    def test_a_preset_that_does_not_exist_ends_its_own_answer(self, demo: Served) -> None:
        orders = [order("a", 9), replace(order("b", 9), quality="Best"), order("c", 9)]
        told = self.taken(demo, orders)
        assert told[1] == " [400]" and told[0] == told[2] and told[0].endswith("[length Balanced]")

    def test_a_burst_may_be_as_large_as_what_is_free(self, slow: Served) -> None:
        """One is computed, and two may wait."""
        with pytest.raises(RefusedError, match="may"):
            slow.desk.take([order()] * 4, lambda _, __: None)
        for ticket in slow.desk.take([order()] * 3, lambda _, __: None):
            ticket.leave()
        slow.until("floe_running", 0)

    def test_what_nobody_expected_is_told_and_the_next_has_its_turn(
        self, demo: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_given: object, **_how: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(ChatClient, "submit_whole", broken)
            assert self.taken(demo, [order("a"), order("b")]) == [" [500]"] * 2
        assert self.taken(demo, [order("a")])[0].endswith("[length Balanced]")
