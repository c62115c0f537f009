"""`floe-chat ask`: data on stdout, talk on stderr, an exit code, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.cli import ask as ask_command
from floe_chat.app.cli.ask import Asked, Form
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import TextDelta, ThoughtDelta, Update
from floe_chat.app.history import ChatSetup, History, Message, history_file, live, open_history
from floe_chat.app.settings.file import settings_file
from floe_chat.engine.events import Finished
from floe_chat.engine.experts.moe_layer import PREFILL_CHUNK
from floe_chat.engine.state_folder import files
from floe_chat.models import private_file
from floe_chat.models.catalog import asset
from floe_chat.models.packing.pack import PackSpec

from ..helpers import Ran, edit_json, explained, make_checkpoint, make_pack, reseal, run_cli
from .scripted import LOADED, ScriptedClient, stats

SHORT = ("--max-tokens", "6", "--seed", "1")
FIGURES = {
    **dict.fromkeys(("answer", "thinking", "stop_reason", "model", "preset", "backend"), str),
    **dict.fromkeys(("seed", "prompt_tokens", "reused_tokens", "new_tokens", "thinking_tokens"), int),
    **dict.fromkeys(("drafted_tokens", "accepted_tokens"), int),
    **dict.fromkeys(("first_token_s", "decode_tokens_per_s", "active_neurons", "bytes_per_token"), float),
    **dict.fromkeys(("remote", "rows", "drafter", "draft_speedup"), type(None)),
}


def ask(pack: Path, *arguments: str, stdin: bytes = b"") -> Ran:
    return run_cli("ask", "-m", str(pack), *arguments, stdin=stdin)


def test_the_answer_alone_or_one_object_with_every_figure_is_on_stdout(tiny_pack: Path) -> None:
    ran = ask(tiny_pack, "hi", *SHORT, "--json")
    assert (ran.code, ran.err) == (0, "") and ran.out.count("\n") == 1
    fields = json.loads(ran.out)
    assert {name: type(value) for name, value in fields.items()} == FIGURES
    assert fields["seed"] == 1 and fields["new_tokens"] == 6 and fields["stop_reason"] == "length"
    assert fields["model"] == "tiny" and fields["preset"] == "Balanced" and 0 < fields["active_neurons"] < 1
    alone = ask(tiny_pack, *SHORT, "--", "hi")
    assert (alone.code, alone.err) == (0, "") and alone.out.strip()
    assert ask(tiny_pack, *SHORT, "--", "--help").out != alone.out  # a question as well


def test_the_seed_that_was_drawn_gives_the_answer_again(tiny_pack: Path) -> None:
    warm = ("hi", "--temperature", "2", "--max-tokens", "12", "--json")
    first = json.loads(ask(tiny_pack, *warm).out)
    again = json.loads(ask(tiny_pack, *warm, "--seed", str(first["seed"])).out)
    assert again["answer"] == first["answer"]


def prompt_tokens(ran: Ran) -> int:
    return int(json.loads(ran.out)["prompt_tokens"])


def test_guesses_can_be_left_out() -> None:
    """The demo repeats its answer where it is asked again, so that there is something to guess."""
    asked = ("ask", "What is an expert?", "--temperature", "0", "--json")
    run_cli(*asked)
    other, one = (json.loads(run_cli(*asked, "--chat", "1", *more).out) for more in (("--no-draft", "--no-save"), ()))
    assert one["accepted_tokens"] > 0 and one["draft_speedup"] > 0 and other["answer"] == one["answer"]
    assert other["drafted_tokens"] == 0 and other["draft_speedup"] is None
    server = ("--connect", "http://127.0.0.1:9", "--no-draft")
    assert "--no-draft is for models of this machine" in explained(run_cli("ask", "hi", *server), 2)


def test_another_model_guesses(tiny_pack: Path, tmp_path: Path) -> None:
    make_pack(make_checkpoint(tmp_path / "source", layers=1, seed=3), tmp_path / "small", PackSpec(), "small")
    plain = json.loads(ask(tiny_pack, "hi", *SHORT, "--json").out)
    by = ("--draft", str(tmp_path / "small"))
    ran = ask(tiny_pack, "hi", *SHORT, "--json", *by)
    fields = json.loads(ran.out)
    assert (ran.code, ran.err, fields["drafter"], fields["answer"]) == (0, "", "small", plain["answer"])
    settings_file().parent.mkdir(parents=True)
    settings_file().write_text(f'[advanced]\ndrafter = "{tmp_path / "small"}"\n')
    assert json.loads(ask(tiny_pack, "hi", *SHORT, "--json").out)["drafter"] == "small"
    assert json.loads(ask(tiny_pack, "hi", *SHORT, "--json", "--no-draft").out)["drafter"] is None
    unlike = ask(asset("demo", "packed"), "hi", *SHORT)  # of another tokenizer: the setting is for other models
    assert unlike.code == 0 and "small cannot guess tokens for demo" in unlike.err and unlike.out.strip()
    assert "small cannot guess" in explained(run_cli("ask", "-m", "demo", "hi", *SHORT, *by), 2)
    assert "--no-draft" in explained(ask(tiny_pack, "hi", *by, "--no-draft"), 2)
    assert "There is no model" in explained(ask(tiny_pack, "hi", "--draft", "nothing-like-it"), 2)
    server = ("--connect", "http://127.0.0.1:9", *by)
    assert "--draft is for models of this machine" in explained(run_cli("ask", "hi", *server), 2)


def test_words_file_and_pipe_make_the_question_in_this_order(tiny_pack: Path, tmp_path: Path) -> None:
    (tmp_path / "q.txt").write_text("from a file\n", encoding="utf-8")
    whole = "two words\n\nfrom a file\n\nfrom a pipe"
    pieces = ask(tiny_pack, "two", "words", "-f", str(tmp_path / "q.txt"), "--json", *SHORT, stdin=b"\nfrom a pipe\n\n")
    together = ask(tiny_pack, whole, "--json", *SHORT)
    assert prompt_tokens(pieces) == prompt_tokens(together)
    assert json.loads(pieces.out)["answer"] == json.loads(together.out)["answer"]
    briefly = ask(tiny_pack, whole, "--json", *SHORT, "--system", "be brief")
    # The test template writes the instructions and a line break: one token a byte.
    assert prompt_tokens(briefly) == prompt_tokens(together) + len("be brief\n")


BAD_OPTIONS = (
    """
--temperature nan|--top-p 0|--min-p 2|--repetition-penalty 0|--top-k 9223372036854775808|--seed 99999999999999999999
--conversation 9223372036854775808|--max-tokens 9223372036854775808|--json --json-lines|--continue --conversation 1
--preset Nonsense|--preset Exact|--device cuda:99|--device rubbish|--seed|--thinking loud|--model ~nosuchuser/x
""".strip()
    .replace("\n", "|")
    .split("|")
)


def test_bad_options_are_usage_errors_and_leave_no_chat(tiny_pack: Path) -> None:
    for options in BAD_OPTIONS:
        explained(ask(tiny_pack, "hi", "--max-tokens", "2", *options.split()), 2)
    for model in ("", "x" * 5000):
        assert "demo" in explained(run_cli("ask", "hi", "-m", model), 2)
    assert run_cli("history", "list").out == ""


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[sqlite3.Connection]:
    """Another program at the history, in which nothing is yet."""
    monkeypatch.setattr("floe_chat.app.history.database.opening.BUSY_SECONDS", 0.05)
    open_history(history_file()).store.close()
    connection = sqlite3.connect(history_file(), isolation_level=None, check_same_thread=False)
    yield connection
    connection.close()


def test_a_chat_that_is_not_to_be_saved_is_not(tiny_pack: Path) -> None:
    ran = ask(tiny_pack, "hi", *SHORT, "--no-save")
    assert (ran.code, ran.err) == (0, "") and ran.out.strip()
    assert not history_file().exists()
    assert "no chat to continue" in explained(ask(tiny_pack, "hi", *SHORT, "--no-save", "--continue"), 2).lower()
    assert not history_file().exists()


def test_a_saved_chat_may_be_continued_without_saving(tiny_pack: Path) -> None:
    def saved() -> list[str]:
        return [line for line in run_cli("history", "show", "1").out.splitlines() if line]

    assert ask(tiny_pack, "My number is 7.", *SHORT).code == 0
    before = saved()
    ran = ask(tiny_pack, "And now?", *SHORT, "--continue", "--no-save", "--json")
    assert ran.code == 0 and saved() == before
    alone = ask(tiny_pack, "And now?", *SHORT, "--no-save", "--json")
    assert json.loads(ran.out)["prompt_tokens"] > json.loads(alone.out)["prompt_tokens"]


LONG = "What an expert is, and what a neuron is, in a hundred words. " * 6


def reused(ran: Ran) -> int:
    return int(json.loads(ran.out)["reused_tokens"])


def test_a_chat_that_is_continued_is_not_read_again(tiny_pack: Path) -> None:
    brief = ("--temperature", "0", "--max-tokens", "6", "--json")
    first = ask(tiny_pack, LONG, *brief)
    assert reused(first) == 0 and len(files()) == 1
    assert reused(ask(tiny_pack, "And now?", *brief, "--continue")) >= prompt_tokens(first)
    assert reused(ask(tiny_pack, "More.", *brief, "--continue", "--no-save")) == 0, "nor read where nothing is written"
    again = ask(tiny_pack, "More.", *brief, "--continue", "--seed", "1")  # to come again to the last bit
    assert reused(again) == PREFILL_CHUNK < prompt_tokens(first), "only parts that every prompt is read in"
    assert reused(ask(tiny_pack, "More.", *brief, "--continue")) > 0


def test_states_go_with_their_chat_or_by_themselves(tiny_pack: Path) -> None:
    for command in ("forget", "1"), ("delete", "2"), ("forget",):
        assert ask(tiny_pack, LONG, *SHORT).code == 0 and len(files()) == 1
        assert run_cli("history", *command).code == 0 and not files()
    assert len(run_cli("history", "list").out.splitlines()) == 2


def test_what_is_not_saved_or_has_no_room_leaves_no_states(tiny_pack: Path) -> None:
    assert ask(tiny_pack, LONG, *SHORT, "--no-save").code == 0 and not files()
    private_file.make_folder(settings_file().parent)
    assert ask(tiny_pack, LONG, *SHORT).code == 0 and files()
    for table in ('[history]\nstates = "0"\n', "[history]\nsave = false\n"):
        settings_file().write_text(table, encoding="utf-8")
        assert ask(tiny_pack, LONG, *SHORT).code == 0 and not files()


@pytest.mark.parametrize("which", [["--continue"], ["--conversation", "1"]], ids=["newest", "number"])
def test_going_on_in_a_history_that_cannot_be_read_says_so(
    tiny_pack: Path, other: sqlite3.Connection, which: list[str]
) -> None:
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    err = explained(ask(tiny_pack, "hi", *SHORT, *which), 3)
    assert "locked" in err and "goes on" not in err and "no such" not in err.lower()
    other.close()
    history_file().rename(history_file().with_name("aside"))
    history_file().mkdir()
    assert "cannot be" in explained(ask(tiny_pack, "hi", *SHORT, *which), 1)


def test_a_chat_waits_for_the_history_at_its_end(
    tiny_pack: Path, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = live._say  # pyright: ignore[reportPrivateUsage]

    def said(text: str) -> None:
        say(text)
        if other.in_transaction:
            other.execute("ROLLBACK")

    monkeypatch.setattr(live, "_say", said)
    other.execute("BEGIN IMMEDIATE")
    ran = ask(tiny_pack, "hi", *SHORT)
    assert ran.code == 0 and "is locked" in ran.err and "Waiting up to" in ran.err and "is now saved" in ran.err
    assert len(run_cli("history", "list").out.splitlines()) == 1


def test_a_chat_that_could_not_be_kept_says_so_in_words_and_code(
    tiny_pack: Path, other: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("floe_chat.app.cli.ask.PATIENCE_SECONDS", 0.1)
    other.execute("BEGIN IMMEDIATE")
    ran = ask(tiny_pack, "hi", *SHORT)
    assert ran.code == 1 and ran.out and "This chat was not saved" in ran.err
    assert "Waiting" not in explained(ask(tiny_pack, "x" * 600), 2)  # there is nothing to keep


def test_a_history_that_cannot_be_opened_costs_the_exit_code_and_not_the_answer(tiny_pack: Path) -> None:
    file = history_file()
    file.mkdir(parents=True)
    ran = ask(tiny_pack, "hi", *SHORT)
    assert ran.code == 1 and ran.out.strip() and "it is a folder" in ran.err and "This chat was not saved" in ran.err
    assert ask(tiny_pack, "hi", *SHORT, "--no-save").code == 0


Damage = Callable[[Path], Any]
DAMAGES: dict[str, Damage] = {
    "no-manifest": lambda pack: (pack / "manifest.json").unlink(),
    "garbage-manifest": lambda pack: (pack / "manifest.json").write_bytes(b"\xff{"),
    "truncated-layer": lambda pack: os.truncate(pack / "layer_01.safetensors", 1000),
    "no-template": lambda pack: (edit_json(pack / "tokenizer_config.json", dict.clear), reseal(pack)),
    "empty-configuration": lambda pack: ((pack / "config.json").write_text("{}"), reseal(pack)),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_packs_are_explained(tiny_pack: Path, tmp_path: Path, damage: Damage) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "p"))
    damage(pack)
    explained(ask(pack, "hi", *SHORT), 1)


def test_a_pack_with_a_strange_generation_config_answers(tiny_pack: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "p"))
    sampling = '{"do_sample": true, "top_k": 50.0, "temperature": "hot", "min_p": true}'
    for content in ("[]", "null", "[" * 100_000, sampling):
        (pack / "generation_config.json").write_text(content)
        reseal(pack)
        ran = ask(pack, "hi", *SHORT)
        assert (ran.code, ran.err) == (0, ""), content[:80]


def test_an_explanation_passes_no_escape_sequence_on(tiny_pack: Path, tmp_path: Path) -> None:
    evil, changes = "\x1b[2J\x07\u202e", list[tuple[str, Callable[[Any], Any]]]()
    changes.append(("manifest.json", lambda fields: fields["files"].update({evil: fields["files"]["config.json"]})))
    changes.append(("manifest.json", lambda fields: fields.update(version=evil)))
    template = f"{{{{ raise_exception('{evil}') }}}}"
    changes.append(("tokenizer_config.json", lambda fields: fields.update(chat_template=template)))
    for number, (name, change) in enumerate(changes):
        pack = Path(shutil.copytree(tiny_pack, tmp_path / str(number)))
        edit_json(pack / name, change)
        if name != "manifest.json":
            reseal(pack)
        ran = ask(pack, "hi", *SHORT)
        assert ran.code in (1, 2) and ran.err
        assert not {*evil} & set(ran.err) - {*"[2J"}


def test_json_passes_no_escape_sequence_on(tiny_pack: Path, tmp_path: Path) -> None:
    pack = Path(shutil.copytree(tiny_pack, tmp_path / "p"))
    edit_json(pack / "manifest.json", lambda fields: fields.update(name="a\x9b31m\u202eb\x1b]0;c\x07"))
    for form in ("--json", "--json-lines"):
        ran = ask(pack, "say \x9b31m\u202e", *SHORT, form)
        assert ran.code == 0 and not {"\x9b", "\u202e", "\x1b", "\x07"} & set(ran.out + ran.err)
        assert json.loads(ran.out.splitlines()[-1])["model"].startswith("a")


def test_progress_on_a_terminal_is_text_and_carriage_returns(tiny_pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    ran = run_cli("ask", "-m", str(tiny_pack), "hi", *SHORT, terminal=True)
    assert ran.code == 0 and "..." in ran.err and "\x1b" not in ran.err
    assert max(len(line) for line in ran.err.split("\r")) < 30


def test_what_is_no_question_is_a_usage_error(tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not-text").write_bytes(b"\x80\x81")
    (tmp_path / "folder").mkdir()
    for name in ("missing", "folder", "not-text"):
        assert name in explained(ask(tiny_pack, "-f", str(tmp_path / name)), 2)
    for words in (["\udcff"], ["hi", "--system", "\udcff"]):
        explained(ask(tiny_pack, *words, *SHORT), 2)
    assert "question" in explained(ask(tiny_pack, stdin=b" \n\t\n"), 2)
    assert "UTF-8" in explained(ask(tiny_pack, stdin=b"caf\xe9"), 2)
    monkeypatch.setattr("floe_chat.app.arguments._MOST_ASKED", 1000)
    assert "piped input is too large" in explained(ask(tiny_pack, stdin=b"x" * 1001), 2)
    if Path("/dev/zero").exists():  # it has no end
        assert "/dev/zero is too large" in explained(ask(tiny_pack, "-f", "/dev/zero"), 2)


def test_a_question_longer_than_the_window_is_a_usage_error(tiny_pack: Path) -> None:
    err = explained(ask(tiny_pack, "x" * 600), 2)
    assert "The message is too long" in err and "512" in err and "--max-tokens" in err
    assert "system prompt is too long" in explained(ask(tiny_pack, "hi", "--system", "x" * 600), 2)
    assert run_cli("history", "list").out == ""


def test_a_question_that_fills_the_window_is_answered(tiny_pack: Path) -> None:
    # 18 tokens of the template around it; one of the window is left for the answer.
    ran = ask(tiny_pack, "x" * (512 - 18 - 1 + len("hi")), "--max-tokens", "1", "--json")
    assert ran.code == 0 and prompt_tokens(ran) == 511


def test_control_characters_are_shown_not_obeyed_and_a_narrow_output_loses_some_not_the_answer(
    tiny_pack: Path,
) -> None:
    options = ("hi", "--temperature", "5", "--min-p", "0", "--max-tokens", "60", "--seed", "3")
    raw = ask(tiny_pack, *options).out
    assert not [char for char in raw if (ord(char) < 32 or 0x7F <= ord(char) < 0xA0) and char not in "\n\t"]
    ran = run_cli("ask", "-m", str(tiny_pack), *options, encoding="ascii")
    assert (ran.code, ran.err) == (0, "") and len(ran.out) > 10


# `floe-chat ask` and a model that thinks: stdout has the answer alone


class Thinker(ScriptedClient):
    """Thinks, then answers, unless it is cut before that."""

    def __init__(self, kind: str = "optional", *, cut: bool = False) -> None:
        super().__init__()
        self.kind, self._cut = kind, cut

    def poll(self, timeout: float = 0.0) -> list[Update]:
        if not self.asked:
            return [LOADED]
        thought: list[Update] = [ThoughtDelta(1, "They ask\n", 3), ThoughtDelta(1, "me.", 2)]
        answer: list[Update] = [] if self._cut else [TextDelta(1, "Yes"), TextDelta(1, ".")]
        return [*thought, *answer, Finished(1, "length" if self._cut else "stop", stats(1))]


def asked(client: Thinker, thinking: str, form: Form = "text", *, saved: bool = False) -> int:
    return ask_command.ask(client, Asked("hi", ChatSetup(), 100, saved=saved, thinking=thinking), form)


def test_thinking_is_on_stdout_as_json_alone_and_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    for thinking, err in (("fold", ""), ("show", "They ask\nme.\n\n"), ("off", "")):
        assert asked(Thinker(), thinking) == 0
        assert capsys.readouterr() == ("Yes.\n", err)
    answer = [{"text": "Yes"}, {"text": "."}]
    shown = [{"thinking": "They ask\n"}, {"thinking": "me."}, *answer]
    for thinking, pieces in (("fold", answer), ("show", shown)):
        asked(Thinker(), thinking, "json")
        whole = json.loads(capsys.readouterr().out)
        assert (whole["answer"], whole["thinking"], whole["thinking_tokens"]) == ("Yes.", "They ask\nme.", 5)
        asked(Thinker(), thinking, "lines")
        out, err = capsys.readouterr()
        *came, last = (json.loads(line) for line in out.splitlines())
        assert came == pieces and {**last, "seed": 0} == {**whole, "seed": 0} and err == ""


def test_a_model_that_has_to_think_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for kind, told in (("less", "asked to think less"), ("always", "has no switch")):
        asked(Thinker(kind), "off")
        out, err = capsys.readouterr()
        assert out == "Yes.\n" and told in err


def test_an_answer_that_ended_in_its_thinking_says_so_and_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(Thinker(cut=True), "fold", saved=True) == 0
    out, err = capsys.readouterr()
    assert out == "\n" and "still thinking" in err and "--max-tokens" in err
    store = open_history(history_file()).store
    (chat,) = store.conversations()
    _question, answer = store.messages(store.branch(store.conversation(chat.id).head))
    assert (answer.text, answer.thought) == ("", "They ask\nme.")
    assert answer.stats is not None and answer.stats.thought_tokens == 5
    store.close()


# As a process among others: interrupted by its user, left by whoever reads it; what it imports


def start(pack: Path, *options: str, heeding: str = "", stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    """`floe-chat ask` in a process of its own, answering for a long time.

    It says so when it begins to heed a signal.
    """
    # Whoever runs the tests in the background may have them inherit an ignored SIGINT, or with nohup an ignored SIGHUP.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    if os.name != "nt":
        heed += "; signal.signal(signal.SIGHUP, signal.SIG_DFL)"
    if heeding:
        heed += f"""
from floe_chat.app.client.chat_client import ChatClient
begin = ChatClient.start
def start(client):
    begin(client)
    assert signal.getsignal(signal.{heeding}) is not signal.SIG_DFL
    print("heeded", flush=True)
ChatClient.start = start
"""
    program = f"{heed}\nfrom floe_chat.app.start import command; command()"
    options = ("ask", "hi", "-m", str(pack), "--max-tokens", "16000", "--temperature", "5", "--seed", "1", *options)
    command, nothing = [sys.executable, "-c", program, *options], subprocess.DEVNULL
    return subprocess.Popen(command, stdin=nothing, stdout=stdout, stderr=subprocess.PIPE)


def answers() -> list[Message]:
    """What the history has of answers."""
    history = History(history_file())
    try:
        newest = history.newest()
        branch = [] if newest is None else history.messages(history.branch(newest.head))
        return [message for message in branch if message.role == "assistant"]
    finally:
        history.close()


def test_an_interrupt_ends_a_running_answer(long_winded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poll, came = ChatClient.poll, list[Update]()

    def interrupted(client: ChatClient, timeout: float = 0.0) -> list[Update]:
        if came:
            monkeypatch.setattr(ChatClient, "poll", poll)
            signal.raise_signal(signal.SIGINT)
        updates = poll(client, timeout)
        came.extend(update for update in updates if isinstance(update, TextDelta) and update.text)
        return updates

    monkeypatch.setattr(ChatClient, "poll", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    try:
        ran = run_cli("ask", "hi", "-m", str(long_winded), "--max-tokens", "16000", "--temperature", "5", "--seed", "1")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ran.code, ran.err.strip()) == (130, "floe-chat: interrupted")
    assert [(answer.state, answer.text) for answer in answers()] == [("stopped", ran.out)]


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="no such signals to another process on Windows")
def test_a_hangup_ends_it_in_order_and_keeps_what_came(long_winded: Path) -> None:
    with start(long_winded) as process:
        assert process.stdout and process.stderr
        came = process.stdout.read(1)
        process.send_signal(signal.SIGHUP)
        came += process.stdout.read()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGHUP
    (answer,) = answers()
    assert answer.state == "stopped" and answer.text == came.decode()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has pipes of a page")
def test_a_signal_ends_it_while_nobody_reads(long_winded: Path) -> None:
    import fcntl

    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"-" * 4095)
    with start(long_winded, stdout=writing) as process:
        os.close(writing)
        assert process.stderr
        while not any(answer.text for answer in answers()):
            time.sleep(0.1)
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stderr.read()) == (143, b"")
    os.close(reading)
    assert [answer.state for answer in answers()] == ["stopped"]


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="no SIGTERM to another process on Windows")
def test_a_signal_ends_it_while_the_model_loads(long_winded: Path) -> None:
    with start(long_winded, heeding="SIGTERM") as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"heeded\n"
        process.send_signal(signal.SIGTERM)
        assert (process.wait(60), process.stdout.read(), process.stderr.read()) == (143, b"", b"")
    assert answers() == []


@pytest.mark.thorough
@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe differently")
def test_a_reader_that_leaves_ends_it_quietly(long_winded: Path) -> None:
    with start(long_winded) as process:
        assert process.stdout and process.stderr
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1, -signal.SIGPIPE, 128 + signal.SIGPIPE)
    (answer,) = answers()
    assert answer.state == "stopped" and answer.text


# What a chat does not need is not imported: it would take longer than the answer


HEAVY = (
    *("transformers", "huggingface_hub", "hqq", "textual", "torch._dynamo", "torch.distributed.tensor", "sympy"),
    *("scipy", "httpx2", "floe_chat.app.client.remote.client", "floe_chat.app.client.remote.answer"),
)
PROGRAM = """
import os, sys
from floe_chat.app.cli.main import command

def told(code):
    print(code, *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
    sys.stderr.flush()
    end(code)

end, os._exit = os._exit, told
command()
"""


def test_an_answer_of_another_process_waits_for_its_input_reads_on_and_imports_nothing_heavy(tiny_pack: Path) -> None:
    first = ask(tiny_pack, LONG, *SHORT, "--json")
    options = ["--repetition-penalty", "1.1", "--top-k", "40", "--top-p", "0.9", "--max-tokens", "3", "--seed", "1"]
    options += ["-m", str(tiny_pack), "--continue", "--json"]
    command = [sys.executable, "-c", PROGRAM.format(heavy=HEAVY), "ask", "hi", *options]
    piped = subprocess.PIPE
    with subprocess.Popen(command, stdin=piped, stdout=piped, stderr=piped) as process:
        assert process.stdin and process.stdout and process.stderr
        assert b"waiting for piped input to end" in process.stderr.readline()
        process.stdin.close()
        fields = json.loads(process.stdout.read())
        assert fields["answer"] and process.stderr.read().split() == [b"0"]
    assert fields["reused_tokens"] == PREFILL_CHUNK < prompt_tokens(first)  # as with any seed
