"""The chat screen, driven by keys: in front of a real engine with a tiny model, then of a scripted one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from floe_chat.app.background import later
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, Question, TextDelta, ThoughtDelta
from floe_chat.app.history import History
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.settings.file import read
from floe_chat.app.widgets.answer_markdown import AnswerMarkdown
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.chat.blocks import ErrorBlock, Horizon, Welcome
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.chat.transcript import Transcript
from floe_chat.app.widgets.chat.turns import UserTurn
from floe_chat.app.widgets.markdown.growing import Paragraph, TextList
from floe_chat.app.widgets.panel import status_line
from floe_chat.app.widgets.panel.dashboard import PanelStrip, PerformancePanel
from floe_chat.app.widgets.panel.status_line import StatusLine
from floe_chat.engine.events import Failed, Finished, Loading, PrefillProgress, PresetChanged
from floe_chat.engine.experts.moe_layer import MoELayer
from floe_chat.models.errors import FloeError
from floe_chat.models.packing.pack import PackSpec
from floe_chat.models.tokenizer.chat_process import ChatProcess
from textual import events
from textual.pilot import Pilot

from ..engine.driver import layer_by_layer
from ..helpers import make_checkpoint, make_pack
from .scenes import showing, still
from .scripted import (
    LOADED,
    ScriptedClient,
    app_for,
    ask,
    chatting,
    click,
    composer,
    exchange,
    finish,
    order,
    ready,
    screen_text,
    stats,
    status,
    text_of,
    until,
    write,
)
from .test_idle import timers
from .wizardry import lines, see, shown


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


def answers(pilot: Pilot[int]) -> list[AnswerTurn]:
    return list(pilot.app.screen_stack[0].query(AnswerTurn))


def failing(*_given: object) -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be")


async def put(pilot: Pilot[int], text: str) -> None:
    await write(pilot, text)
    await pilot.press("enter")
    await until(pilot, lambda: bool(answers(pilot)) and answers(pilot)[-1].text != "")


async def test_answer_streams_and_is_summed_up(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine begins when the question is painted."""
    client, seen = HeldClient(tiny_pack), list[str]()
    async with running(client, max_new_tokens=60) as pilot:
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

        await until(pilot, lambda: status(pilot).state == "ready")
        assert pilot.app.query(Welcome)
        monkeypatch.setattr(pilot.app.screen, "_compositor_refresh", paint)
        monkeypatch.setattr(client, "begin", begun)
        for number in (1, 2):
            await put(pilot, f"question {number}")
            assert seen.count("begun") == number and seen.index("painted") < seen.index("begun")
            await until(pilot, lambda: status(pilot).state == "ready")
        assert not pilot.app.query(Welcome)
        answer = answers(pilot)[0]
        await until(pilot, lambda: answer.query_one(AnswerMarkdown).source == answer.text)
        assert "tokens · " in screen_text(pilot)
        assert "tokens/s · first token" in text_of(answer.query(".footer").first())
        line = status(pilot)
        assert (line.model, line.preset) == ("tiny", "Balanced")
        assert line.context_used and line.context_window == 512
        await until(pilot, lambda: "last answer" in screen_text(pilot))
        assert "no GPU" in screen_text(pilot) and "Why: " in screen_text(pilot)
        with monkeypatch.context() as patch:  # a card that fails ends this answer, and nothing else
            layer_by_layer(patch)
            patch.setattr(MoELayer, "forward", failing)
            await write(pilot, "question 3")
            await pilot.press("enter")
            await until(pilot, lambda: "The graphics card reported an error" in screen_text(pilot))
        assert "memory has a fault" in text_of(pilot.app.query_one(ErrorBlock))
        await put(pilot, "question 4")
        await until(pilot, lambda: status(pilot).state == "ready")
        assert answers(pilot)[-1].text and len(client.asked[3]) == 5  # without what was not answered
    assert [message.role for message in client.asked[1]] == ["user", "assistant", "user"]
    assert client.asked[1][1].text == answer.text


async def test_a_small_terminal_loses_nothing(long_pack: Path) -> None:
    async with running(HeldClient(long_pack, endless=True), max_new_tokens=30_000) as pilot:
        await until(pilot, lambda: status(pilot).state == "ready")
        await put(pilot, "go on")
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


@pytest.mark.parametrize("during", [pytest.param("loading", marks=pytest.mark.thorough), "writing"])
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
        if during == "writing":
            await until(pilot, lambda: status(pilot).state == "ready")
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


# What the screen does in cases that a real engine does not produce on demand


async def test_keys_of_the_composer() -> None:
    async with chatting() as (client, pilot):
        await pilot.press("enter", "space", "enter", "backspace")
        assert client.asked == []
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c")
        assert composer(pilot).text == "a\nb\nc"
        await pilot.press("enter", "d")
        await until(pilot, lambda: len(client.asked) == 1)
        assert client.asked[0] == (PromptTurn("user", "a\nb\nc"),)
        assert composer(pilot).text == "d"
        await pilot.press("up")
        assert composer(pilot).text == "d"
        await pilot.press("delete", "up")
        assert composer(pilot).text == "a\nb\nc"


@pytest.mark.thorough
async def test_a_question_that_waited_begins_also_behind_another_page() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        await write(pilot, "next")
        await pilot.press("enter", "f4")
        await until(pilot, lambda: len(pilot.app.screen_stack) > 1)
        assert (len(client.asked), client.began) == (1, 1)
        client.say(TextDelta(request, "done"), Finished(request, "stop", stats(request)))
        await until(pilot, lambda: client.began == 2)
        assert len(client.asked) == 2 and len(pilot.app.screen_stack) > 1


async def test_what_is_written_is_shown_literally() -> None:
    client = ScriptedClient()
    text = "[red]no[/red] <b>tag</b> **stars** [link](x)"
    async with ready(client) as pilot:
        composer(pilot).post_message(events.Paste(f"{text}\x1b[31m\x07\r\nnext\x9b"))
        await until(pilot, lambda: text in composer(pilot).text)
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 1)
        shown = f"{text}\ufffd[31m\ufffd\nnext\ufffd"
        assert client.asked[0][0].text == shown
        assert text_of(pilot.app.query_one(UserTurn).query_one(".said")) == shown
        assert text in screen_text(pilot)


async def test_questions_wait_for_their_turn() -> None:
    client = ScriptedClient()
    async with app_for(client).run_test(size=(120, 40)) as pilot:
        client.say(Loading("dense weights", 0.4))
        await until(pilot, lambda: "loading 40 %" in status(pilot).state)
        for text in ("one", "two", "three"):
            await order(pilot, text)
        await until(pilot, lambda: screen_text(pilot).count("queued until the model is loaded") == 3)
        await pilot.press("escape")
        await until(pilot, lambda: composer(pilot).text == "three" and len(pilot.app.query(UserTurn)) == 2)
        client.say(LOADED)
        await until(pilot, lambda: len(client.asked) == 1)
        client.say(TextDelta(1, "first"))
        await finish(pilot, client, 1, waiting=True)
        await until(pilot, lambda: len(client.asked) == 2)
        assert [message.text for message in client.asked[1]] == ["one", "first", "two"]
        await pilot.press("enter", "escape")
        assert client.cancelled == 1
        client.say(TextDelta(2, "second"))
        await finish(pilot, client, 2, "cancelled", waiting=True)
        await until(pilot, lambda: len(client.asked) == 3)
        assert client.asked[2][-2:] == (PromptTurn("assistant", "second"), PromptTurn("user", "three"))
        assert not [turn for turn in pilot.app.query(UserTurn) if turn.note]


async def test_failed_load_gives_the_text_back() -> None:
    client = ScriptedClient()
    async with app_for(client).run_test(size=(120, 40)) as pilot:
        await order(pilot, "early")
        await until(pilot, lambda: bool(pilot.app.query(UserTurn)))
        client.say(Failed("The pack is damaged", "sha256 differs", "Pack it again", None, 3))
        await until(pilot, lambda: composer(pilot).text == "early")
        block = text_of(pilot.app.query_one(ErrorBlock))
        assert block == "The pack is damaged\nsha256 differs\nWhat to do: Pack it again"
        await pilot.press("enter")
        await until(pilot, lambda: "No model is loaded" in screen_text(pilot))
        await pilot.press("ctrl+n", "ctrl+q")
        await until(pilot, lambda: pilot.app.return_value == 3)


async def test_refused_question_comes_back() -> None:
    async with chatting(system_prompt="Be brief.") as (client, pilot):
        client.refuse = FloeError("It does not fit", "too long", "Shorten it")
        await order(pilot, "long")
        await until(pilot, lambda: bool(pilot.app.query(ErrorBlock)))
        assert composer(pilot).text == "long" and not pilot.app.query(UserTurn)
        await until(pilot, lambda: status(pilot).state == "ready")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.asked[1] == (PromptTurn("system", "Be brief."), PromptTurn("user", "long"))


async def test_what_the_model_no_longer_sees_is_marked() -> None:
    async with chatting() as (client, pilot):
        for dropped in (0, 2, 2):
            client.dropped = dropped
            await exchange(pilot, client, "hi", "yes")
        turns = list(pilot.app.query_one(Transcript).children)
        assert [type(block) for block in turns[:4]] == [UserTurn, AnswerTurn, Horizon, UserTurn]
        assert "the model no longer sees the messages above" in screen_text(pilot)
        for dropped in (4, 6):  # nothing at all fits beside the next question
            await pilot.press("ctrl+n")
            await until(pilot, lambda: bool(pilot.app.query(Welcome)))
            client.dropped = dropped
            await order(pilot, "/last")
            await until(pilot, lambda: bool(pilot.app.query(Horizon)))
            kinds = [type(block) for block in pilot.app.query_one(Transcript).children]
            assert kinds.index(Horizon) == dropped and len(kinds) == 7


@pytest.mark.thorough
async def test_new_chat_ignores_the_old_answer() -> None:
    async with chatting() as (client, pilot):
        old = await ask(pilot, client, "old")
        client.say(TextDelta(old, "old text"))
        await until(pilot, lambda: answers(pilot)[-1].text == "old text")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: bool(pilot.app.query(Welcome)))
        await order(pilot, "new")
        await until(pilot, lambda: "queued until the last answer has stopped" in screen_text(pilot))
        client.say(TextDelta(old, "late"), Finished(old, "cancelled", stats(old)))
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.asked[1] == (PromptTurn("user", "new"),)
        client.say(TextDelta(2, "new "), TextDelta(old, "later"), TextDelta(2, "text"))
        await until(pilot, lambda: answers(pilot)[-1].text == "new text")
        await pilot.press("escape")
        await finish(pilot, client, 2, "cancelled")
        await until(pilot, lambda: status(pilot).state == "stopped")
        await pilot.press("ctrl+n")
        await until(pilot, lambda: status(pilot).state == "ready")


async def test_transcript_follows_its_end_unless_scrolled_away() -> None:
    async with chatting(size=(100, 24)) as (client, pilot):
        transcript = pilot.app.query_one(Transcript)
        request = await ask(pilot, client)
        client.say(TextDelta(request, "line\n\n" * 30))
        await until(pilot, lambda: transcript.max_scroll_y > 20 and transcript.is_vertical_scroll_end)
        await pilot.press("pageup")
        place = transcript.scroll_y
        assert place < transcript.max_scroll_y
        height = transcript.max_scroll_y
        client.say(TextDelta(request, "more\n\n" * 10))
        await until(pilot, lambda: transcript.max_scroll_y > height)
        await finish(pilot, client, request)
        await until(pilot, lambda: "end of turn" in text_of(answers(pilot)[-1].query(".footer").first()))
        assert transcript.scroll_y == place
        await pilot.press(*["pagedown"] * 6)
        await until(pilot, lambda: transcript.is_vertical_scroll_end)


@pytest.mark.thorough
async def test_a_remark_stays_its_time_and_is_told_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_line, "_REMARK_SECONDS", 1000.0)
    monkeypatch.setattr(status_line, "_TOGETHER_SECONDS", 1000.0)
    async with ready(ScriptedClient()) as pilot:
        line = status(pilot)
        line.remark("once")
        await until(pilot, lambda: len(timers(pilot)) == 1)
        assert "once" in text_of(line)
        monkeypatch.setattr(status_line, "_REMARK_SECONDS", 0.01)
        line.remark("once")
        await until(pilot, lambda: "once" not in text_of(line))
        monkeypatch.setattr(status_line, "_REMARK_SECONDS", 1000.0)
        line.remark("about the new state")
        line.state = "stopped"
        assert "about the new state" in text_of(line)
        monkeypatch.setattr(status_line, "_TOGETHER_SECONDS", -1.0)  # some time later
        line.state = "ready"
        assert "about" not in text_of(line)
        long = f"latin1.txt cannot be attached: {'it is not text, ' * 6}and what comes last"
        line.remark(long)
        await until(pilot, lambda: "comes last" in screen_text(pilot))
        assert "latin1" not in text_of(line)


async def test_a_link_is_copied_instead_of_opened_and_what_is_nested_deep_is_seen() -> None:
    text = (
        "\n".join(f"{'  ' * depth}- level{depth}" for depth in range(16)) + "\n\n" + "> - " * 20 + "level16\n\nlevel17"
    )
    async with chatting(size=(60, 70)) as (client, pilot):
        await exchange(pilot, client, "hi", "- see [here](https://a.example/%20x)\n\nor [there](https://b.example)")
        await until(pilot, lambda: "of turn" in screen_text(pilot))  # the last that moves the answer's lines
        for kind, column, address in ((TextList, 7, "https://a.example/ x"), (Paragraph, 5, "https://b.example")):
            await click(pilot, answers(pilot)[-1].query_one(kind), offset=(column, 0))
            await until(pilot, lambda address=address: pilot.app.clipboard == address)
        await exchange(pilot, client, "hi", text)
        await until(pilot, lambda: all(f"level{at}" in shown(pilot) for at in range(text.count("level"))))


# The panel, the layouts and the pages over the chat


@pytest.mark.thorough
async def test_layouts_and_the_panel_key() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        panel, strip = pilot.app.query_one(PerformancePanel), pilot.app.query_one(PanelStrip)
        for width, height in ((120, 36), (60, 20)):
            await pilot.resize_terminal(width, height)
            await until(pilot, lambda w=width: (panel.display, strip.display) == (w >= 100, w < 100))
            await until(pilot, lambda h=height: composer(pilot).region.bottom < h)
            await until(pilot, lambda w=width: "Backend" in screen_text(pilot) or w < 100)
            if width >= 100:
                await pilot.press("f2")
                assert not panel.display and strip.display
            await pilot.press("f2")
            assert not panel.display and not strip.display
            client.say(stats(request), PresetChanged(f"at {width}"))
            await until(pilot, lambda w=width: status(pilot).preset == f"at {w}")
            await pilot.press("f2")
            await until(pilot, lambda: "1.31 GB" in screen_text(pilot))
            assert panel.display or strip.display


@pytest.mark.thorough
async def test_a_held_panel_shows_nothing_newer() -> None:
    async with chatting() as (client, pilot):
        request = await ask(pilot, client)
        client.say(stats(request))
        await until(pilot, lambda: "58.9" in screen_text(pilot) or "3.20 MB" in screen_text(pilot))
        await pilot.press("f8")
        client.say(dataclasses.replace(stats(request), bytes_per_token=9.99e6), PresetChanged("later"))
        await until(pilot, lambda: status(pilot).preset == "later" and "paused" in screen_text(pilot))
        await until(pilot, lambda: len(timers(pilot)) == 1)  # the remark's: no later painting is due
        assert "3.20 MB" in screen_text(pilot)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "paused · " in shown(pilot) and "F8 resumes them" in shown(pilot))
        await pilot.resize_terminal(120, 36)
        await pilot.press("f8")
        await until(pilot, lambda: "9.99 MB" in screen_text(pilot))


async def test_the_palette_finds_commands_by_their_words() -> None:
    async with chatting() as (client, pilot):
        await pilot.press("ctrl+p")
        await write(pilot, "models")
        await until(pilot, lambda: "F6 · /models · Switch, check or remove models" in screen_text(pilot))
        await pilot.press("ctrl+u")
        await write(pilot, "preset exact")
        await until(pilot, lambda: "Preset: Exact" in screen_text(pilot))
        await pilot.press("enter")
        await until(pilot, lambda: client.wanted == ["Exact"])


@pytest.mark.thorough
async def test_prose_stays_narrow_where_code_may_be_wide() -> None:
    async with chatting(size=(200, 50)) as (client, pilot):
        chat = pilot.app.screen_stack[0]
        chat.dashboard.show_panel("hidden")  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        request = await ask(pilot, client, "word " * 60)
        words, code = "word " * 60, "x = " + "1 + " * 30 + "1"
        client.say(TextDelta(request, f"# {words}\n\n{words}\n\n- {words}\n\n> {words}\n\n```python\n{code}\n```\n"))
        await finish(pilot, client, request)
        await until(pilot, lambda: "end of turn" in screen_text(pilot))
        await until(pilot, lambda: any(code in line for line in lines(pilot)))  # on one line
        prose = [line[: line.rindex("word") + 4].lstrip(" ▌▊•▍") for line in lines(pilot) if line.count("word") > 5]
        assert len(prose) > 12 and max(map(len, prose)) <= 100


# What a model thinks is folded, shown or switched off, and never taken for its answer


WORDS = "They ask about ice.\n\x1b[31mSo: frozen."


async def thoughtful(
    pilot: Pilot[int], client: ScriptedClient, thought: str = WORDS, text: str = "Frozen water."
) -> None:
    request = await ask(pilot, client)
    client.say(ThoughtDelta(request, thought[:9], 3), ThoughtDelta(request, thought[9:], 1231))
    if text:
        client.say(TextDelta(request, text))
    await finish(pilot, client, request)


async def test_thinking_is_one_line_that_opens_and_an_answer_without_has_none() -> None:
    async with chatting((80, 24)) as (client, pilot):
        await thoughtful(pilot, client, "", "Thawed.")
        assert "Thought" not in screen_text(pilot)
        await order(pilot, "/thinking")
        await see(pilot, "No answer here has thinking")
        await pilot.press("ctrl+up")
        await pilot.pause()
        assert "show_thinking" not in answers(pilot)[-1].actions
        await pilot.press("escape")
        request = await ask(pilot, client)
        client.say(ThoughtDelta(request, "They ", 1))
        await see(pilot, "Thinking, 1 token ▸", "● thinking", absent="They")
        client.say(ThoughtDelta(request, "ask about ice.\n\x1b[31mSo: frozen.", 1233))
        await see(pilot, "Thinking, 1,234 tokens ▸")
        client.say(TextDelta(request, "Frozen water."))
        await see(pilot, "● writing", "Frozen water.")
        await finish(pilot, client, request)
        await see(pilot, "Thought for 1,234 tokens ▸", "Frozen water.", absent="They ask")
        await click(pilot, answers(pilot)[-1].query_one(".thought-line"))
        await see(pilot, "Thought for 1,234 tokens ▾", "They ask about ice.", "�[31mSo: frozen.")
        await order(pilot, "/thinking")
        await see(pilot, "tokens ▸", absent="They ask")
        await pilot.press("ctrl+up", "t")
        await see(pilot, "tokens ▾", "They ask")
        await pilot.press("t")
        await see(pilot, "tokens ▸", absent="They ask")
        await pilot.press("escape", "ctrl+o")
        await until(pilot, lambda: pilot.app.clipboard == "Frozen water.")


@pytest.mark.parametrize("end", ["cancelled", pytest.param("failed", marks=pytest.mark.thorough)])
async def test_an_answer_that_ends_inside_its_thinking_is_kept_and_goes_on(end: str, tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, (80, 24), history=history) as pilot:
        request = await ask(pilot, client)
        client.say(ThoughtDelta(request, "They ask", 2))
        await see(pilot, "Thinking, 2 tokens ▸")
        if end == "cancelled":
            await pilot.press("escape")
            assert client.cancelled == 1
        if end == "failed":
            client.say(Failed("The device is gone", "", "", request))
            await see(pilot, "The device is gone", "Thought ▸", "stopped by an error")
        else:
            await finish(pilot, client, request, end)
            await see(pilot, "Thought for 2 tokens ▸", "stopped by you")
            await see(pilot, "/more lets the model think on")
        await order(pilot, "/more")
        await until(pilot, lambda: len(client.asked) == 2)
        assert client.thoughts == ["", "They ask"] and client.begun == ["", ""]
        client.say(ThoughtDelta(2, " about ice.", 3), TextDelta(2, "Frozen."))
        await finish(pilot, client, 2)
        tokens = 3 if end == "failed" else 5
        await see(pilot, f"Thought for {tokens} tokens ▸", "Frozen.")
        assert answers(pilot)[-1].text == "Frozen." and answers(pilot)[-1].thought.text == "They ask about ice."
        assert (await ask(pilot, client, "on")) == 3
        assert client.asked[2] == (
            *(PromptTurn("user", "hi"), PromptTurn("assistant", "Frozen.", "They ask about ice.")),
            PromptTurn("user", "on"),
        )
    history.close()


async def test_the_choice_is_applied_at_once_and_saved(tmp_path: Path) -> None:
    client, file = ScriptedClient(), tmp_path / "settings.toml"
    client.kind = "optional"
    async with ready(client, settings=file) as pilot:
        await pilot.press("escape")
        await thoughtful(pilot, client)
        await order(pilot, "/thinking show")
        await see(pilot, "Thinking is shown", "They ask about ice.", "▾")
        assert read(file).settings.thinking == "show" and client.think
        await thoughtful(pilot, client, "Again, ice.")
        await see(pilot, "Again, ice.")
        await order(pilot, "/thinking off")
        await see(pilot, "Answers come without thinking", absent="Again, ice.")
        assert read(file).settings.thinking == "off" and not client.think
        await order(pilot, "/thinking loud")
        await see(pilot, "Thinking cannot be 'loud'", "fold, show, off")
        await order(pilot, "/thinking fold")
        await see(pilot, "Thinking is folded")
        assert client.think


@pytest.mark.some(1)
@pytest.mark.parametrize(("kind", "told"), [("less", "cannot answer without thinking"), ("optional", "")])
async def test_a_model_that_cannot_do_without_says_so(kind: str, told: str, tmp_path: Path) -> None:
    client, file = ScriptedClient(), tmp_path / "settings.toml"
    client.kind = kind
    file.write_text('[chat]\nthinking = "off"\n')
    async with ready(client, settings=file) as pilot:
        if told:
            await see(pilot, told)
        assert not client.think
        client.say(LOADED)
        await order(pilot, "/thinking off")
        await see(pilot, told or "Answers come without thinking")


@pytest.mark.thorough
async def test_it_is_there_after_a_restart(tmp_path: Path) -> None:
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await thoughtful(pilot, client)
    history.close()
    client, history = ScriptedClient(), History(tmp_path / "history.db")
    async with ready(client, history=history) as pilot:
        await order(pilot, "/last")
        await see(pilot, "Thought for 1,234 tokens ▸", "Frozen water.")
        await order(pilot, "/thinking")
        await see(pilot, "They ask about ice.")
        await order(pilot, f"/export {tmp_path / 'chat.md'}")
        await see(pilot, "Exported")
    assert "> *Thought for 1,234 tokens*\n>\n> They ask" in (tmp_path / "chat.md").read_text()
    history.close()


# What the screens offer by keys can be clicked where it is written


async def click_on(pilot: Pilot[int], words: str) -> None:
    """Click where these words begin, as soon as they are on the screen; the lowest place if there are several."""
    await until(pilot, lambda: any(words in line for line in lines(pilot)))
    await still(pilot)
    y = max(y for y, line in enumerate(lines(pilot)) if words in line)
    x = lines(pilot)[y].index(words)
    for kind in (events.MouseDown, events.MouseUp):  # the pilot's own clicks do not reach the rim of a padded screen
        pilot.app.post_message(kind(None, x, y, 0, 0, 1, False, False, False, screen_x=x, screen_y=y))
        await pilot.pause()


async def test_the_bottom_row_of_the_chat() -> None:
    async with chatting(size=(150, 40)) as (client, pilot):
        for words, page, leave in (
            ("F1 help", "Function keys", "Esc closes"),
            ("Ctrl+P commands", "Search for commands", ""),
            ("Balanced", "Custom", "Esc closes"),
            ("scripted", "Installed", "Esc back"),
        ):
            await click_on(pilot, words)
            await see(pilot, page)
            if leave:
                await click_on(pilot, leave)
            else:
                await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
        request = await ask(pilot, client)
        client.say(PrefillProgress(request, 1, 20))
        await click_on(pilot, "Esc stop")
        await until(pilot, lambda: client.cancelled == 1)


async def test_the_way_through_the_wizard(monkeypatch: pytest.MonkeyPatch) -> None:
    async with showing("wizard-machine", (100, 34), monkeypatch) as stage:
        pilot = stage.pilot
        await click_on(pilot, "Enter continues")
        await see(pilot, "Speed: ")
        await click_on(pilot, "F other folder")
        await see(pilot, "Models folder")
        await click_on(pilot, "Ctrl+D demo model")
        await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))


async def test_what_is_due_at_once_is_done_too() -> None:
    """Textual's timers of so short a time never fire: one of them kept the screen from hearing of anything more."""
    async with ready(ScriptedClient(), (80, 24)) as pilot:
        done: list[int] = []
        for number in range(20):
            later(pilot.app.screen, (number + 1) * 1e-8, partial(done.append, number))
        await until(pilot, lambda: len(done) == 20)
