"""The command line around `ask`: help at once, doctor, completion, and no traceback whatever is typed."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from floe_chat.app.cli import doctor, main
from floe_chat.app.cli.command_names import translated
from floe_chat.models.catalog import models_folder

from ..helpers import explained, run_cli

HEAVY = {"torch", "transformers", "textual", "tokenizers", "hqq", "safetensors", "numpy"}


def python(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a fresh interpreter."""
    command = [sys.executable, "-c", program, *arguments]
    environ = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ, check=False)


LIGHT = ["--help", "-h", "--version", "ask --help", "bench kernels --help", "paper", "completion bash", "nonesuch", ""]


def test_what_needs_no_model_imports_no_heavy_library() -> None:
    program = """
import io, json, sys
from floe_chat.app.cli import main
out, heavy = sys.stdout, {}
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments.split()
    sys.stdout = sys.stderr = io.StringIO()
    try:
        main.main()
    except SystemExit:
        pass
    heavy[arguments] = [name for name in json.loads(WANTED) if name in sys.modules]
out.write(json.dumps(heavy))
""".replace("WANTED", repr(json.dumps(sorted(HEAVY))))
    # In this order, since what one imports stays for the next.
    done = python(program, json.dumps(LIGHT))
    assert done.returncode == 0, done.stderr
    assert {arguments: heavy for arguments, heavy in json.loads(done.stdout).items() if heavy} == {}


def examples(command: click.Command) -> Iterator[str]:
    """The command lines that the help pages show, up to where the shell takes over."""
    for line in (command.help or "").splitlines():
        if shown := re.search(r"(?:^\s*|Example: |\| )(floe-chat [^|>()]+)", line):
            yield shown[1].strip()
    if isinstance(command, click.Group):
        for its in command.commands.values():
            yield from examples(its)


def test_the_examples_of_the_help_are_what_the_commands_take() -> None:
    lines = set(examples(main.cli))
    for line in lines:
        found: click.Command = main.cli
        words = shlex.split(line)[1:]
        while isinstance(found, click.Group) and words:
            found = found.commands[words.pop(0)]
        found.make_context(line, words)  # raises where an option, a value or an argument cannot be
    assert len(lines) > 40


def test_options_before_the_command_are_pointed_out() -> None:
    assert "floe-chat ask --model" in explained(run_cli("--model", "demo", "ask", "hi"), 2)
    for arguments in ("--plain ask hi", "-p Fast history list", "--vram 1gb doctor"):
        told = explained(run_cli(*arguments.split()), 2)
        assert "has no --" in told and "belongs after" not in told  # the command lacks it


@pytest.mark.parametrize(
    ("arguments", "title", "more"),
    [
        (["ask", "--modle", "x", "hi"], "No such option", ["--model", "floe-chat ask --help"]),
        (["ask", "--temperature", "hot", "hi"], "Invalid value for '--temperature'", ["floe-chat ask --help"]),
        (["ask", "--model", "nonesuch", "hi"], "There is no model 'nonesuch'", ["Installed"]),
        (["histroy"], "There is no command 'histroy'", ["history"]),
    ],
    ids=str,
)
def test_every_wrong_use_is_explained_in_one_form(arguments: list[str], title: str, more: list[str]) -> None:
    first, *rest = explained(run_cli(*arguments), 2).splitlines()
    assert first.startswith(f"floe-chat: {title}") and rest and all(line.startswith("  ") for line in rest)
    assert all(word in "".join(rest) for word in more)


@pytest.mark.skipif(os.name == "nt", reason="no folder in use can be deleted on Windows")
def test_a_folder_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "current folder no longer exists" in explained(run_cli("doctor"), 1)
    assert run_cli("--help").code == 0


def test_the_screen_is_not_opened_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "floe-chat ask" in explained(run_cli(), 2)  # there is no terminal
    for arguments in (["-m", "nonesuch"], ["--temperature", "hot"]):
        ran = run_cli(*arguments, terminal=True)
        assert ran.code == 2 and "\x1b[?1049h" not in ran.out + ran.err
    monkeypatch.setenv("TERM", "dumb")
    ran = run_cli(terminal=True)
    assert ran.code == 2 and "floe-chat --plain" in ran.err and "\x1b" not in ran.out + ran.err


def test_doctor_speaks_json(tiny_pack: Path, own_folders: Path) -> None:
    shutil.copytree(tiny_pack, models_folder() / "mine")
    (models_folder() / "broken").mkdir()
    fields = json.loads(run_cli("doctor", "--json").out)
    models = {model["name"]: model for model in fields["models"]}
    assert models["mine"]["trouble"] is None and models["broken"]["trouble"]
    assert fields["hardware"]["ram_total"] > 0 and {path["device"] for path in fields["paths"]} == {"cpu", "cuda"}
    assert Path(fields["log_file"]).is_relative_to(own_folders)


def test_what_may_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's data folder; who runs the tests as root may read everything."""
    data, look = models_folder().parent, Path.stat

    def denied(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self.is_relative_to(data):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return look(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", denied)
    for arguments in ("models", "history list", "ask hi -m mine"):
        told = explained(run_cli(*arguments.split()), 1)
        assert str(data) in told and "Permission denied" in told
    ran = run_cli("doctor")
    assert ran.code == 0 and "torch" in ran.out and f"{models_folder()}: Permission denied" in ran.out
    assert "Permission denied" in json.loads(run_cli("doctor", "--json").out)["models_trouble"]


def test_completion_scripts_are_what_the_shells_take() -> None:
    for shell in ("bash", "zsh", "fish"):
        ran = run_cli("completion", shell)
        assert ran.code == 0 and "_FLOE_CHAT_COMPLETE" in ran.out and "floe-chat" in ran.out
        if shutil.which(shell):
            checked = subprocess.run([shell, "-n"], input=ran.out, capture_output=True, text=True, check=False)
            assert (checked.returncode, checked.stderr) == (0, "")


def test_commands_complete_themselves() -> None:
    asked = {"_FLOE_CHAT_COMPLETE": "bash_complete", "COMP_WORDS": "floe-chat do", "COMP_CWORD": "1"}
    program = "import sys; sys.argv = ['floe-chat']; from floe_chat.app.start import command; command()"
    done = python(program, **asked)
    assert done.stdout.split() == ["plain,doctor"] and done.stderr == ""


def test_a_fault_of_the_programs_goes_to_the_log_which_is_private_not_to_the_screen(
    own_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_options: object) -> None:
        raise RuntimeError("something nobody thought of")

    monkeypatch.setattr(doctor, "report", broken)
    monkeypatch.setattr(logging.getLogger("floe_chat"), "handlers", [])  # as a program that has just started
    ran = run_cli("doctor")
    assert ran.code == 1 and "something nobody thought of" in ran.err and "Traceback" not in ran.err
    (log,) = own_folders.rglob("floe-chat.log")
    assert "Traceback" in log.read_text() and str(log) in ran.err
    assert os.name == "nt" or log.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(os.name == "nt", reason="no SIGINT to oneself on Windows")
def test_an_interrupt_while_the_program_is_imported_ends_it_quietly() -> None:
    program = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
class Interrupting:
    def find_spec(self, name, *_):
        if name == "floe_chat.app.cli.verify":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from floe_chat.app.start import command
command()
"""
    done = python(program, "paths")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "floe-chat: interrupted")


@pytest.mark.some(2)
@pytest.mark.skipif(os.name == "nt", reason="no such shell on Windows")
@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "told"),
    [
        ("history list", "2>&-", 0, ""),
        ("ask hi </dev/null", ">&-", 1, "Standard output is closed"),
        ("completion bash", ">/dev/full", 1, "No space left"),
        ("ask", "<&-", 2, "question"),
    ],
)
def test_streams_that_are_closed_or_full(arguments: str, redirection: str, code: int, told: str) -> None:
    if "/dev/full" in redirection and not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    program = "from floe_chat.app.start import command; command()"
    line = f'exec "$0" -c "{program}" {arguments} {redirection}'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False)
    assert done.returncode == code and told in done.stderr
    assert "bug in floe-chat" not in done.stderr and "Traceback" not in done.stderr


# Names that people bring from other programs, and mistyped ones


def test_names_of_other_programs_become_ours() -> None:
    names = {"run mixtral --preset fast": "--model mixtral --preset fast", "run mixtral hi": "ask --model mixtral hi"}
    names |= {"run": "", "run --plain": "--plain", "chat --plain": "--plain", "pull mixtral": "setup mixtral", "": ""}
    names |= {"list": "models", "ls --json": "models --json", "rm x -y": "models remove x -y", "ask run": "ask run"}
    assert {typed: " ".join(translated(typed.split())) for typed in names} == names


def test_they_run(tiny_pack: Path) -> None:
    listed = run_cli("list")
    assert listed.code == 0 and "demo" in listed.out and listed.out == run_cli("models").out
    ran = run_cli("run", str(tiny_pack), "hi", "--max-tokens", "3", "--seed", "1")
    assert ran.code == 0 and ran.out.strip()
    assert "nonesuch" in explained(run_cli("rm", "nonesuch"), 2)
    assert "nonesuch" in explained(run_cli("pull", "nonesuch"), 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["docter"], "Did you mean doctor?"),
        (["chatt"], "Did you mean chat?"),
        (["history", "lst"], "Did you mean list?"),
        (["history", "rm"], "Did you mean delete?"),
        (["models", "delete"], "Did you mean remove?"),
        (["bench", "krenels"], "Did you mean kernels?"),
        (["zzz"], "floe-chat --help"),
        (["What's an expert?"], """floe-chat ask 'What'"'"'s an expert?'"""),
    ],
)
def test_what_is_no_command_is_answered_with_the_right_one(arguments: list[str], named: str) -> None:
    assert named in explained(run_cli(*arguments), 2)
