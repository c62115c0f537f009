"""The chat line by line: several turns, commands, stopping, errors; and nothing but lines on the terminal."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner
from floe_chat.app.cli.main import cli
from floe_chat.app.client.interface import PromptTurn, Question, Submitted, TextDelta, ThoughtDelta, Update
from floe_chat.app.history import ChatSetup, History
from floe_chat.app.plain.plain_chat import PlainChat
from floe_chat.app.plain.plain_markdown import PlainMarkdown, plain_text
from floe_chat.app.settings.file import read, settings_file
from floe_chat.app.settings.settings import Persona
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
        if text == "hm":
            thought = [ThoughtDelta(request, "So: ", 2), ThoughtDelta(request, "\x1b[2J *hm*.\n", 5)]
            return [*thought, TextDelta(request, "**Yes**."), Finished(request, reason, stats(request))]
        if text == "cut":
            return [ThoughtDelta(request, "So", 1), Finished(request, "length", stats(request))]
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
    PlainChat(client, history, ChatSetup(sampling=Sampling(), system_prompt="Be brief."), 100, reader(*lines)).run()
    return client


def test_a_chat_of_several_turns(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "hello", "", "one\\", "two", "/new", "again", "/open 1", "on", "/quit", "never")
    system = PromptTurn("system", "Be brief.")
    first = (PromptTurn("user", "hello"), PromptTurn("assistant", "HELLO!"))
    second = (PromptTurn("user", "one\ntwo"), PromptTurn("assistant", "ONE\nTWO!"))
    assert client.asked[1] == (system, *first, second[0])
    assert client.asked[2] == (system, PromptTurn("user", "again"))
    assert client.asked[3] == (system, *first, *second, PromptTurn("user", "on"))
    one, two = client.conversations[0], client.conversations[2]
    assert one != two and client.conversations == [one, one, two, one]
    said = capsys.readouterr()
    assert said.out.splitlines()[:3] == ["scripted: HELLO!", "scripted: ONE", "TWO!"]
    assert "\x1b" not in said.out + said.err and "\r" not in said.out + said.err
    assert [one.messages for one in kept.conversations(5)] == [6, 2]


def test_commands_and_what_is_wrong_are_said(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (
        "/stats|fail|/stats x|hi|/stats|/preset floe 90 %|/preset fast|/preset|/rename New  name|/history|/history hi"
    )
    more = ("/nothing", "/open 77", "/open x", "/open 99999999999999999999999", "\udcff")
    assert chat(kept, *lines.split("|"), *more).wanted == ["FloE 90 %", "Fast"]
    told = capsys.readouterr().err
    for words in (
        "No memory",
        "Take less.",
        "42 tokens",
        "; as published: FloE 80 %, FloE 90 %, CORM,",
        "In use: Fast",
    ):
        assert words in told
    for words in ("1: New name, 3 messages\n1: New name\n", "There is no command /nothing", "The line is not text"):
        assert words in told
    assert "no chat " in told and told.count(" is not a chat number") == 2


def test_the_last_chat_is_continued(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    chat(kept, "/last", "/rename Early", "hello")
    client = chat(kept, "/last", "on")
    assert [message.text for message in client.asked[0][1:]] == ["hello", "HELLO!", "on"]
    told = capsys.readouterr().err
    assert "There is no earlier chat" in told and "This chat is empty" in told


def test_waiting_is_said_and_ctrl_c_stops_that_too(
    kept: History, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floe_chat.app.plain.plain_chat._QUIET_S", -1.0)
    submit = Echo.submit

    def interrupted(client: Echo, question: Question) -> Submitted:
        if question.messages[-1].text == "stop":
            raise KeyboardInterrupt
        return submit(client, question)

    monkeypatch.setattr(Echo, "submit", interrupted)
    client = chat(kept, "stop", "on")
    out, err = capsys.readouterr()
    assert out == "scripted: ON!\n" and "The question was stopped" in err
    assert err.count("Waiting for scripted. Ctrl+C stops it.") == 1
    assert [turn.text for turn in client.asked[-1]] == ["Be brief.", "on"]


def test_ctrl_c_stops_the_answer_and_not_the_chat(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "long", "more")
    assert client.cancelled == 1 and len(client.asked) == 2
    assert capsys.readouterr().out.startswith("scripted: and so on LONG!\n")
    tree = kept.tree((kept.newest() or pytest.fail("nothing is kept")).id)
    assert [message.state for message in tree.messages if message.role == "assistant"] == ["stopped", "stopped"]
    client = chat(kept, "long", "/others", "/edit hi")  # one of three is stopped: no more are asked for
    assert len(client.asked) == 3 and "This is answer 2 of 2" in capsys.readouterr().err


def test_what_is_refused_is_not_saved(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client, lines = Echo(), iter(["much", "one", "two", "/edit three", "four", "/quit"])

    def read(_prompt: str) -> str:
        line = next(lines)
        client.refuse = FloeError("Too long") if line in ("much", "/edit three") else None
        return line

    PlainChat(client, kept, ChatSetup(), 100, read).run()
    assert capsys.readouterr().err.count("Too long") == 2 and len(kept.conversations(5)) == 1
    assert [turn.text for turn in client.asked[-1]] == ["one", "ONE!", "two", "TWO!", "four"]  # the earlier version


def test_a_question_is_edited_and_answered_again(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "/again", "/edit too soon", "one", "two", "/edit too", "/again", "three")
    system, one = PromptTurn("system", "Be brief."), (PromptTurn("user", "one"), PromptTurn("assistant", "ONE!"))
    too = (PromptTurn("user", "too"), PromptTurn("assistant", "TOO!"))
    assert client.asked[2:4] == [(system, *one, too[0])] * 2
    assert client.asked[4] == (system, *one, *too, PromptTurn("user", "three"))
    assert capsys.readouterr().err.count("no question in this chat yet") == 2
    tree = kept.tree((kept.newest() or pytest.fail("nothing is saved")).id)
    assert sorted(message.text for message in tree.messages) == sorted(
        ["one", "ONE!", "two", "TWO!", "too", "TOO!", "TOO!", "three", "THREE!"]
    )


def test_three_others_come_one_after_the_other_and_one_is_picked(
    kept: History, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "/others|/pick 1|/set seed 7|one|/pick 2|/others|/pick 5|/pick x|/pick 2|on"
    client = chat(kept, *lines.split("|"))
    assert [asked[-1].text for asked in client.asked] == ["one"] * 4 + ["on"]
    assert [sampling.seed for sampling in client.samplings] == [7, None, None, None, 7]
    out, err = capsys.readouterr()
    assert out == "scripted: ONE!\n" * 4 + "ONE!\n" + "scripted: ON!\n"
    assert "This is answer 4 of 4. /pick NUMBER continues with another one." in err
    assert err.count("no question in this chat yet") == 2 and "There is no answer '2'\nThe last question has 1." in err
    assert "There is no answer '5'\nThe last question has 4." in err and "There is no answer 'x'" in err
    tree = kept.tree((kept.newest() or pytest.fail("nothing is kept")).id)
    answers = [message for message in tree.messages if message.text == "ONE!"]
    assert tree.messages[-2].parent == answers[1].id and [message.siblings for message in answers] == [4] * 4


def test_files_are_attached_once(kept: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my notes.txt").write_text("ice\n")
    client = chat(kept, f"/file {tmp_path}/none.txt", f"/file '{tmp_path}/my notes.txt'", "what?", "and?", "/last")
    assert "ice" in client.asked[0][-1].text and "what?" in client.asked[0][-1].text
    assert client.asked[1][-1].text == "and?"
    told = capsys.readouterr()
    assert "cannot be attached" in told.err and "Attached to your next question: my notes.txt." in told.err
    assert "You: what? [my notes.txt]" in told.out


def test_what_a_chat_is_answered_with_can_be_changed(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = Echo()
    personas = {"pirate": Persona("Say arr.", temperature=0.1)}
    lines = "/system|/system Be long.|/set temperature 0.3|/set top_k x|/set|hi|/persona|/new|new"
    more = "|/persona nobody|/persona pirate|arr|/system none|bare"
    setup = ChatSetup(sampling=Sampling(), system_prompt="Be brief.")
    PlainChat(client, kept, setup, 100, reader(*(lines + more).split("|")), personas).run()
    firsts = [asked[0] for asked in client.asked]
    system = [PromptTurn("system", text) for text in ("Be long.", "Be brief.", "Say arr.")]
    assert firsts == [*system, PromptTurn("user", "new")]
    assert [sampling.temperature for sampling in client.samplings] == [0.3, Sampling().temperature, 0.1, 0.1]
    told = capsys.readouterr().err
    for words in ("Be brief.\n", "temperature: 0.3", "top_k cannot be 'x'", "Personas: pirate.", "no persona 'nobody'"):
        assert words in told


def test_a_chat_is_exported_deleted_and_brought_back(
    kept: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chat(
        kept,
        *["/export", "/delete", "/undo", "hi", "/export", "/export", "/export x.json", "/delete", "/history", "/undo"],
    )
    told = capsys.readouterr()
    assert told.err.count("This chat is empty") == 2 and "nothing to restore" in told.err
    assert told.err.count("Written to") == 2 and "It was not changed." in told.err
    assert sorted(path.suffix for path in tmp_path.glob("*.*") if "history" not in path.name) == [".json", ".md"]
    assert "There are no chats yet." in told.err and told.out.endswith("You: hi\nscripted: HI!\n")


def test_other_names_and_mistyped_ones(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "hi", "/retry", "/clear", "on", "/list", "/?", "/histroy", "/file", "/edit")
    assert [len(asked) for asked in client.asked] == [2, 2, 2]
    told = capsys.readouterr().err
    assert "Did you mean /history?" in told and "1: hi, 2 messages" in told and "/quit: quits" in told
    assert "Write: /file PATH" in told and "Write: /edit TEXT" in told


def test_an_answer_loses_its_marks_on_the_way_to_stdout_alone(
    kept: History, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(kept, "**hi** `x`", "/last")
    assert capsys.readouterr().out == "scripted: HI X!\nYou: **hi** `x`\nscripted: HI X!\n"
    newest = kept.newest() or pytest.fail("nothing is saved")
    assert [message.text for message in kept.tree(newest.id).messages] == ["**hi** `x`", "**HI** `X`!"]


def test_another_model_answers(tiny_pack: Path, exact_pack: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(exact_pack, tmp_path / "broken"))
    (broken / "dense.safetensors").unlink()
    lines = f"hi\n/models {exact_pack}\n/preset\n/models /nowhere\n/models {broken}\nhi again\n/models\n"
    given = ["--plain", "--model", str(tiny_pack), "--max-tokens", "4", "--seed", "1"]
    done = CliRunner().invoke(cli, given, input=lines, standalone_mode=False)
    assert done.stdout.count("tiny: ") == 2, done.output
    assert "best quality first: Exact, High" in done.stderr and "demo: " in done.stderr
    assert "There is no model '/nowhere'" in done.stderr and "dense.safetensors" in done.stderr
    assert done.stderr.count("tiny answers at preset") == 3  # the last model that worked again
    assert read(settings_file()).settings.model == str(exact_pack)
    ran = run_cli("--plain", "--max-tokens", "2", stdin=b"/new\nbye\n/open 1\n/preset\n")
    assert ran.code == 0 and "best quality first: Exact" in ran.err


def test_a_model_that_cannot_be_loaded(kept: History) -> None:
    class Broken(ScriptedClient):
        def poll(self, timeout: float = 0.0) -> list[Update]:
            return [Failed("The pack is damaged", "", "", None)]

    with pytest.raises(FloeError, match="damaged"):
        PlainChat(Broken(), kept, ChatSetup(), 100, reader("hi")).run()


def test_what_is_piped_in_and_cannot_be_done_is_told_and_fails(tiny_pack: Path) -> None:
    plain = ("--plain", "-m", str(tiny_pack), "--max-tokens", "2", "--seed", "1")
    for line in (b"caf\xe9", b"/open 5"):
        ran = run_cli(*plain, stdin=b"hi\n" + line + b"\nhi\n")
        assert ran.code == 1 and ran.out.count("tiny: ") == 2 and "bug in floe-chat" not in ran.err
    assert "cannot be" in explained(run_cli(*plain, "--top-k", "1000001", stdin=b"hi\n"), 2)


def test_thinking_is_announced_and_read_on_demand(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "hm", "/thinking", "/thinking show", "hm", "/thinking off", "/thinking loud", "/again")
    out, err = capsys.readouterr()
    assert out == "scripted: Yes.\nSo: \ufffd[2J hm.\nscripted: Yes.\nscripted: Yes.\n"
    assert "The model is thinking.\nThought for 7 tokens. /thinking reads it.\nThinking is shown" in err
    assert "Thinking:\nSo: \ufffd[2J *hm*.\n\nAnswers come without thinking" in err
    assert "Thinking cannot be 'loud'" in err and not client.think
    assert client.asked[1][2] == PromptTurn("assistant", "**Yes**.", "So: \x1b[2J *hm*.\n")
    chat(kept, "/last")
    assert "Thought for 7 tokens.\n" in capsys.readouterr().err


def test_an_answer_that_ended_in_its_thinking_says_so(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = chat(kept, "cut", "/again", "on")
    out, err = capsys.readouterr()
    assert out == "scripted: \nscripted: \nscripted: ON!\n" and err.count("still thinking at the end. /again") == 2
    assert client.asked[2] == (PromptTurn("system", "Be brief."), PromptTurn("user", "on"))


def test_a_model_that_has_to_think_says_so(kept: History, capsys: pytest.CaptureFixture[str]) -> None:
    client = Echo()
    client.kind = "always"
    PlainChat(client, kept, ChatSetup(), 100, reader("hi"), thinking="off").run()
    assert "has no switch" in capsys.readouterr().err


# Markdown without its marks, in whatever pieces it comes


CASES = [
    ("plain words", "plain words"),
    ("**bold** and *slanted*, __bold__ and _slanted_.", "bold and slanted, bold and slanted."),
    ("***both***", "both"),
    ("_snake_case_ is a *word*", "snake_case is a word"),
    ("**a *b* c**", "a b c"),
    ("## A heading\ntext", "A heading\ntext"),
    ("* one\n* **two**\n  + three", "- one\n- two\n  - three"),
    ("- one\n1. two", "- one\n1. two"),
    ("use `floe-chat **x**` now", "use floe-chat **x** now"),
    ("a [link](https://a.b) and [https://a.b](https://a.b)", "a link (https://a.b) and https://a.b"),
    ("2 * 3 * 4 = 24", "2 * 3 * 4 = 24"),
    ("snake_case_name and a_b", "snake_case_name and a_b"),
    ("an unclosed **star", "an unclosed **star"),
    ("an unclosed `code\nnext *line*", "an unclosed `code\nnext line"),
    ("~~gone~~", "gone"),
    ("```python\nx = **y**\n# no\n```\n**after**", "[code, python]\nx = **y**\n# no\n[end of code]\nafter"),
    ("````\n```\nstill code\n````\n*out*", "[code]\n```\nstill code\n[end of code]\nout"),
    ("~~~\n*code*\n~~~", "[code]\n*code*\n[end of code]"),
    ("| a | b |\n|---|---|\n| **c** | d |", "| a | b |\n|---|---|\n| c | d |"),
    ("> a *quote*", "> a quote"),
    ("---", "---"),
    ("\n\n", "\n\n"),
    ("", ""),
]


def test_pieces_give_what_the_whole_gives() -> None:
    for text, plain in CASES:
        assert plain_text(text) == plain
        rng = random.Random(text)
        for _ in range(10):
            stream, given, at = PlainMarkdown(), "", 0
            while at < len(text):
                size = rng.randint(1, 5)
                given += stream.feed(text[at : at + size])
                at += size
            assert given + stream.end() == plain
    stream, pieces = PlainMarkdown(), ("The ", "answer", " is **4", "2**", ".")  # given as they come
    assert [stream.feed(piece) for piece in pieces] == ["The ", "answer", " is ", "", "42."]
    for mark in ("*", "_", "`", "[", "**a", "](", "~~", "*a "):  # lines of marks alone come through
        stream = PlainMarkdown()
        assert "".join(stream.feed(mark) for _ in range(300)) + stream.end()
