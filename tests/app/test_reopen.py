"""The model that answers: the one chosen last, a saved chat's own, and the one named on the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from floe_chat.app.history import ChatSetup, History, history_file
from floe_chat.app.settings.file import change, read, settings_file
from floe_chat.models import catalog

from ..helpers import Ran, explained, run_cli

SHORT = ("--max-tokens", "4", "--temperature", "0", "--json")


@pytest.fixture
def olmoe(tiny_pack: Path) -> Path:
    """A model of the models folder."""
    folder = catalog.models_folder() / "olmoe"
    folder.parent.mkdir(parents=True)
    return Path(shutil.copytree(tiny_pack, folder))


def chat_of(model: str, question: str) -> int:
    """Save a chat of one question with `model`; returns its id."""
    history = History(history_file())
    conversation = history.begin(ChatSetup(model))
    history.ask(conversation, None, question)
    assert history.close()
    return conversation


def answered_by(ran: Ran) -> str:
    assert ran.code == 0, ran.err
    return str(json.loads(ran.out)["model"])


def test_ask_starts_with_the_model_of_the_settings(olmoe: Path, tiny_pack: Path) -> None:
    assert answered_by(run_cli("ask", "hi", *SHORT)) == "demo"
    change(settings_file(), {"chat.model": "olmoe"})
    assert answered_by(run_cli("ask", "hi", *SHORT)) == "olmoe"
    assert answered_by(run_cli("ask", "hi", *SHORT, "-m", "demo")) == "demo"
    assert read(settings_file()).settings.model == "olmoe"  # --model holds for one run


def test_ask_continues_a_chat_with_its_own_model(olmoe: Path, tiny_pack: Path) -> None:
    chat_of("olmoe", "of olmoe")
    chat_of(str(tiny_pack), "of a folder")
    assert answered_by(run_cli("ask", "hi", *SHORT, "--continue")) == "tiny"
    assert answered_by(run_cli("ask", "hi", *SHORT, "--chat", "1")) == "olmoe"
    assert answered_by(run_cli("ask", "hi", *SHORT, "--chat", "1", "--model", "demo")) == "demo"
    ran = run_cli("ask", "hi", *SHORT, "--chat", "1")  # what answered meanwhile is not the chat's own
    assert (answered_by(ran), ran.err) == ("olmoe", "")


def test_a_chat_is_continued_at_its_own_preset(olmoe: Path) -> None:
    assert json.loads(run_cli("ask", "hi", *SHORT, "-m", "olmoe", "--preset", "fast").out)["preset"] == "Fast"
    assert json.loads(run_cli("ask", "hi", *SHORT, "--continue").out)["preset"] == "Fast"


def test_a_model_that_is_gone_is_named_with_the_one_that_answers_instead(olmoe: Path) -> None:
    chat_of("olmoe", "of olmoe")
    (olmoe / "manifest.json").unlink()
    ran = run_cli("ask", "hi", *SHORT, "--continue")
    assert answered_by(ran) == "demo"
    assert "This chat was answered by olmoe, which cannot be used" in ran.err and "demo answers instead." in ran.err
    shutil.rmtree(olmoe)
    ran = run_cli("ask", "hi", *SHORT, "--continue")
    assert ran.err.endswith("answered by olmoe, which is not installed any more. demo answers instead.\n")


def test_a_name_in_a_saved_chat_means_nothing_in_the_current_folder(
    tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_pack, tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    chat_of("mine", "of another folder")
    ran = run_cli("ask", "hi", *SHORT, "--continue")
    assert answered_by(ran) == "demo" and "mine, which is not installed" in ran.err


def test_plain_opens_a_chat_with_its_own_model_and_remembers_a_choice(olmoe: Path) -> None:
    chat_of("olmoe", "of olmoe")
    chat_of("demo", "of the demo")
    ran = run_cli("--plain", "--continue", stdin=b"/open 1\n/open 2\n")
    said = [line for line in ran.out.splitlines() if line != "You: "]
    assert ran.code == 0 and [line.rpartition("You: ")[2] for line in said] == [
        "of the demo",
        "of olmoe",
        "of the demo",
    ]
    assert [line.split()[0] for line in ran.err.splitlines() if " answers at " in line] == ["demo", "olmoe", "demo"]
    ran = run_cli("--plain", "--chat", "1", stdin=b"/models demo\n")
    assert ran.code == 0 and read(settings_file()).settings.model == "demo"
    assert "demo answers at" in run_cli("--plain", "--chat", "1").err  # the choice was for this chat, too
    run_cli("--plain", stdin=b"/models olmoe\n")
    assert read(settings_file()).settings.model == "olmoe"
    shutil.rmtree(olmoe)
    chat_of("olmoe", "of olmoe again")
    ran = run_cli("--plain", "--model", "demo", "--chat", "2", stdin=b"/open 3\n")
    assert "olmoe, which is not installed any more. demo answers instead." in ran.err


@pytest.mark.parametrize(
    "arguments",
    [["--continue"], ["--chat", "3"], ["--chat", str(1 << 60)], ["--continue", "--chat", "1"]],
    ids=" ".join,
)
@pytest.mark.parametrize("command", [[], ["ask", "hi"]], ids=["screen", "ask"])
def test_a_chat_that_there_is_not(command: list[str], arguments: list[str]) -> None:
    ran = run_cli(*command, *arguments, terminal=not command)
    assert ran.code == 2 and "\x1b[?1049h" not in ran.out + ran.err and ran.err.strip()
    assert not history_file().exists()


def test_no_saved_chat_is_opened_where_saving_is_off() -> None:
    chat_of("demo", "saved before")
    change(settings_file(), {"history.save": False})
    assert "history.save is false" in explained(run_cli("--continue", terminal=True), 2)


def test_what_belongs_to_ask_is_named_as_it_was_written() -> None:
    ran = run_cli("--continue", "ask", "hi")
    assert ran.code == 2 and "--continue belongs after the command: floe-chat ask --continue" in ran.err
