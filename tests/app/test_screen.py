"""The chat screen in front of a real engine with a tiny model, driven by keys."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question
from floe_chat.app.widgets.answer_markdown import AnswerMarkdown
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.blocks import Welcome
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.chat.turns import UserTurn
from floe_chat.app.widgets.panel.panel import PanelStrip, PerformancePanel
from floe_chat.app.widgets.panel.status_line import StatusLine
from floe_chat.models.packing.pack import PackSpec
from floe_chat.models.tokenizer.chat_process import ChatProcess
from textual.pilot import Pilot

from ..helpers import make_checkpoint, make_pack
from .scripted import app_for, screen_text, text_of, until, write


@pytest.fixture(scope="module")
def long_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a window for answers that last minutes."""
    folder = tmp_path_factory.mktemp("long")
    checkpoint = make_checkpoint(folder / "checkpoint", window=32768)
    make_pack(checkpoint, folder / "long", PackSpec(), "long")
    return folder / "long"


class HeldClient(ChatClient):
    """A real client that remembers what it was asked.

    When `held`, it begins to load when the test says so; `endless` answers do not end by themselves.
    """

    def __init__(self, pack: Path, *, held: bool = False, endless: bool = False) -> None:
        super().__init__(pack)
        self._hold = held
        self._endless = endless
        self.asked: list[list[PromptTurn]] = []

    def start(self) -> None:
        if not self._hold:
            super().start()

    def let_go(self) -> None:
        """Load now."""
        super().start()

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        self.asked.append(list(question.messages))
        if self._endless and isinstance(self._format, ChatProcess):
            self._format.stop_ids = ()
        return super().prepare(question, count)


@asynccontextmanager
async def running(
    client: ChatClient, size: tuple[int, int] = (120, 40), max_new_tokens: int = 400
) -> AsyncGenerator[Pilot[int]]:
    app = app_for(client, max_new_tokens)
    try:
        async with app.run_test(size=size) as pilot:
            yield pilot
    finally:
        client.close()


def state(pilot: Pilot[int]) -> str:
    return pilot.app.screen_stack[0].query_one(StatusLine).state


def answers(pilot: Pilot[int]) -> list[AnswerTurn]:
    return list(pilot.app.screen_stack[0].query(AnswerTurn))


async def ask(pilot: Pilot[int], text: str) -> None:
    await write(pilot, text)
    await pilot.press("enter")
    await until(pilot, lambda: bool(answers(pilot)) and answers(pilot)[-1].text != "")


async def test_the_engine_begins_when_the_question_is_painted(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client, seen = HeldClient(tiny_pack), list[str]()
    async with running(client, max_new_tokens=20) as pilot:
        painted = pilot.app.screen._compositor_refresh  # pyright: ignore[reportPrivateUsage]
        begin = client.begin

        def paint() -> None:
            if pilot.app.screen.is_current and pilot.app.query(UserTurn):
                seen.append("painted")
            painted()

        def begun() -> None:
            seen.append("begun")
            assert "question" in screen_text(pilot)
            begin()

        await until(pilot, lambda: state(pilot) == "ready")
        monkeypatch.setattr(pilot.app.screen, "_compositor_refresh", paint)
        monkeypatch.setattr(client, "begin", begun)
        await ask(pilot, "question")
        assert seen.count("begun") == 1 and seen.index("painted") < seen.index("begun")
        await until(pilot, lambda: state(pilot) == "ready")


async def test_answer_streams_and_is_summed_up(tiny_pack: Path) -> None:
    client = HeldClient(tiny_pack)
    async with running(client, max_new_tokens=60) as pilot:
        await until(pilot, lambda: state(pilot) == "ready")
        assert pilot.app.query(Welcome)
        for number in (1, 2):
            await ask(pilot, f"question {number}")
            await until(pilot, lambda: state(pilot) == "ready")
        assert not pilot.app.query(Welcome)
        answer = answers(pilot)[0]
        await until(pilot, lambda: answer.query_one(AnswerMarkdown).source == answer.text)
        assert "tokens · " in screen_text(pilot)
        assert "tokens/s · first token" in text_of(answer.query(".footer").first())
        status = pilot.app.query_one(StatusLine)
        assert (status.model, status.preset) == ("tiny", "Balanced")
        assert status.context_used and status.context_window == 512
        await until(pilot, lambda: "last answer" in screen_text(pilot))
        assert "no GPU" in screen_text(pilot) and "Why: " in screen_text(pilot)
    assert [message.role for message in client.asked[1]] == ["user", "assistant", "user"]
    assert client.asked[1][1].text == answer.text


async def test_escape_stops_and_the_chat_goes_on(long_pack: Path) -> None:
    client = HeldClient(long_pack, endless=True)
    async with running(client, max_new_tokens=30_000) as pilot:
        await until(pilot, lambda: state(pilot) == "ready")
        await ask(pilot, "go on")
        await pilot.press("escape")
        await until(pilot, lambda: state(pilot) == "stopped")
        await until(pilot, lambda: "stopped by you" in text_of(answers(pilot)[0].query(".footer").first()))
        kept = answers(pilot)[0].text
        await ask(pilot, "and now")
        await pilot.press("escape")
        await until(pilot, lambda: state(pilot) == "stopped")
    assert client.asked[1][1] == PromptTurn("assistant", kept)


async def test_a_small_terminal_loses_nothing(long_pack: Path) -> None:
    async with running(HeldClient(long_pack, endless=True), max_new_tokens=30_000) as pilot:
        await until(pilot, lambda: state(pilot) == "ready")
        await ask(pilot, "go on")
        # Keys are few here: the pilot waits up to a second for each while the engine is busy.
        await write(pilot, "dra")
        await pilot.resize_terminal(40, 12)
        await until(pilot, lambda: "this terminal has 40x12" in " ".join(screen_text(pilot).split()))
        before = len(answers(pilot)[0].text)
        await until(pilot, lambda: len(answers(pilot)[0].text) > before + 20)
        await pilot.press("f1", "x")
        await pilot.resize_terminal(50, 14)
        await until(pilot, lambda: "this terminal has 50x14" in " ".join(screen_text(pilot).split()))
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "dra" in screen_text(pilot))
        await write(pilot, "ft")
        assert pilot.app.query_one(Composer).text == "draft"
        assert pilot.app.query_one(PanelStrip).display and not pilot.app.query_one(PerformancePanel).display


@pytest.mark.parametrize("during", ["loading", "reading", "writing"])
async def test_quit_is_immediate(long_pack: Path, during: str) -> None:
    client = HeldClient(long_pack, held=True, endless=True)
    pressed: list[str] = []
    async with running(client, max_new_tokens=20_000) as pilot:
        screen = pilot.app.screen_stack[0]

        def press(now: str) -> None:
            if now.startswith(during) and not pressed:
                pressed.append(now)
                pilot.app.simulate_key("ctrl+q")

        client.let_go()
        # From the state's own change: a state may be over before a test that looks now and then sees it.
        pilot.app.watch(screen.query_one(StatusLine), "state", press)
        if during in ("reading", "writing"):
            await until(pilot, lambda: state(pilot) == "ready")
            screen.query_one(Composer).put("a long question " * 70)
            await pilot.press("enter")
        # The screen may not wait for the engine, whose answer would never end.
        await until(pilot, lambda: bool(pressed))
        await until(pilot, lambda: not pilot.app.is_running)
        assert pilot.app.return_value == 0


def test_first_paint_needs_no_torch() -> None:
    code = "import sys, floe_chat.app.tui; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
