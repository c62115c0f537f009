"""The chat line by line: several turns, commands, stopping, errors; and nothing but lines on the terminal."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from floe_chat.app.chat_client import Message, TextDelta, Update
from floe_chat.app.cli import cli
from floe_chat.app.history import History, Setup
from floe_chat.app.plain_chat import PlainChat
from floe_chat.engine.events import Failed, Finished, Loading, Sampling
from floe_chat.models.errors import FloeError

from ..helpers import explained, run_cli
from .scripted import LOADED, ScriptedClient, stats


class Echo(ScriptedClient):
    """Answers each question with its words in capitals; "fail" fails, and "long" goes on until it is stopped."""

    def poll(self, timeout: float = 0.0) -> list[Update]:
        if not self.asked:
            return [Loading("reading", 0.5), LOADED]
        request, text = len(self.asked), self.asked[-1][-1].text
        if text == "fail":
            return [Failed("No memory", "It is full.", "Take less.", request)]
        if text == "long" and not self.cancelled:
            os.kill(os.getpid(), signal.SIGINT)
            return [TextDelta(request, "and so on ")]
        reason = "cancelled" if self.cancelled else "stop"
        return [TextDelta(request, f"{text.upper()}!"), Finished(request, reason, stats(request))]


def reader(*lines: str) -> Callable[[str], str]:
    left = iter(lines)

    def read(_prompt: str) -> str:
        try:
            return next(left)
        except StopIteration:
            raise EOFError from None

    return read


@pytest.fixture
def kept(tmp_path: Path) -> Iterable[History]:
    history = History(tmp_path / "history.db")
    yield history
    history.close()


def chat(history: History, *lines: str) -> Echo:
    client = Echo()
    PlainChat(client, history, Setup(sampling=Sampling(), system_prompt="Be brief."), 100, reader(*lines)).run()
    return client


def test_a_chat_of_several_turns(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "hello", "", "one\\", "two", "/new", "again", "/open 1", "on", "/quit", "never")
    system = Message("system", "Be brief.")
    first = (Message("user", "hello"), Message("assistant", "HELLO!"))
    second = (Message("user", "one\ntwo"), Message("assistant", "ONE\nTWO!"))
    assert client.asked[1] == (system, *first, second[0])
    assert client.asked[2] == (system, Message("user", "again"))
    assert client.asked[3] == (system, *first, *second, Message("user", "on"))
    said = capsys.readouterr()
    assert said.out.splitlines()[:3] == ["scripted: HELLO!", "scripted: ONE", "TWO!"]
    assert "\x1b" not in said.out + said.err and "\r" not in said.out + said.err
    assert [one.messages for one in kept.conversations(5)] == [6, 2]


def test_commands_and_what_is_wrong_are_said(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(
        kept,
        "/stats",
        "fail",
        "/stats x",
        "hi",
        "/stats",
        "/preset fast",
        "/preset",
        "/rename New  name",
        "/history",
        "/history hi",
        "/nothing",
        "/open 77",
        "/open x",
        "/open 99999999999999999999999",
        "\udcff",
    )
    assert client.wanted == ["Fast"]
    told = capsys.readouterr().err
    for words in (
        "No memory",
        "Take less.",
        "42 tokens",
        "In force: Fast",
        "2: New name, 2 messages\n1: fail",
        "messages\n2: New name\n",
        "no command /nothing",
    ):
        assert words in told
    assert "'99999999999999999999999' is no number of a chat" in told and "The line is not text" in told
    assert "no such conversation" in told and "'x' is no number of a chat" in told


def test_the_last_chat_is_gone_on_with(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    chat(kept, "/last", "/rename Early", "hello")
    client = chat(kept, "/last", "on")
    assert [message.text for message in client.asked[0][1:]] == ["hello", "HELLO!", "on"]
    told = capsys.readouterr().err
    assert "There is no earlier chat" in told and "no chat to rename yet" in told


def test_ctrl_c_stops_the_answer_and_not_the_chat(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "long", "more")
    assert client.cancelled == 1 and len(client.asked) == 2
    assert capsys.readouterr().out.startswith("scripted: and so on LONG!\n")
    tree = kept.tree((kept.newest() or pytest.fail("nothing is kept")).id)
    assert [message.state for message in tree.messages if message.role == "assistant"] == ["stopped", "stopped"]


def test_a_model_that_cannot_be_loaded(kept: History) -> None:
    class Broken(ScriptedClient):
        def poll(self, timeout: float = 0.0) -> list[Update]:
            return [Failed("The pack is damaged", "", "", None)]

    with pytest.raises(FloeError, match="damaged"):
        PlainChat(Broken(), kept, Setup(), 100, reader("hi")).run()


def test_the_command_chats_with_a_real_model(tiny_pack: Path) -> None:
    given = ["--plain", "--model", str(tiny_pack), "--max-tokens", "4"]
    done = CliRunner().invoke(cli, given, input="hi\nand more\n/history\n", standalone_mode=False)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("tiny: ") == 2 and "1: hi, 4 messages" in done.stderr


@pytest.mark.parametrize("options", [("--seed", "-1"), ("--repetition-penalty", "inf"), ("--top-k", "1000001")])
def test_impossible_options_are_refused_at_the_start(tiny_pack: Path, options: tuple[str, str]) -> None:
    assert "cannot be" in explained(run_cli("--plain", "-m", str(tiny_pack), *options, stdin=b"hi\n"), 2)


@pytest.mark.parametrize("line", [b"caf\xe9", b"\xff\xfe\x00", b"/open 5"])
def test_what_is_piped_in_and_cannot_be_done_is_told_and_fails(tiny_pack: Path, line: bytes) -> None:
    ran = run_cli("--plain", "-m", str(tiny_pack), "--max-tokens", "2", stdin=b"hi\n" + line + b"\nhi\n")
    assert ran.code == 1 and ran.out.count("tiny: ") == 2 and "fault" not in ran.err
