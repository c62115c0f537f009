"""The settings file: changed in one place, whoever else writes it, and left as it is where it cannot be read."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.settings.file import change, read
from floe_chat.app.settings.settings import Settings
from floe_chat.models.errors import FloeError, TryAgainError, UsageError

from .settings_texts import told, written


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "settings.toml"


def test_what_is_changed_is_read_back_and_nothing_else_is_touched(file: Path) -> None:
    text = "# mine\r\n\r\n[sampling]   # how\r\ntop_p = 0.5  # not too wild\r\n\r\n[chat]\r\nmodel = 'demo' # small\r\n"
    change(written(file, text), {"sampling.top_p": 0.75})
    assert file.read_bytes().decode() == text.replace("0.5", "0.75")
    change(file, {"chat.model": "big", "sampling.top_k": 3})
    assert "# mine\r\n" in file.read_bytes().decode() and "# not too wild" in file.read_text()
    settings = read(file).settings
    assert (settings.model, settings.top_k, settings.top_p) == ("big", 3, 0.75) and told(file) == []
    change(file, {"chat.model": None, "sampling.top_k": None})
    assert read(file).settings == Settings(top_p=0.75)


def test_it_is_private_and_written_at_once(file: Path, tmp_path: Path) -> None:
    change(written(file, ""), {"chat.model": "a"})
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {path.name for path in file.parent.iterdir()} <= {"settings.toml", "settings.toml.lock"}
    elsewhere = tmp_path / "dotfiles.toml"
    file.replace(elsewhere)
    file.symlink_to(elsewhere)
    change(file, {"chat.model": "b"})
    assert file.is_symlink() and "b" in elsewhere.read_text()


def test_lines_are_right_where_texts_look_like_tables(file: Path) -> None:
    text = '[chat]\nsystem_prompt = """\n[sampling]\ntop_p = 7\n"""\n\n[sampling]\ntemperature = 1\ntop_p = 7\n'
    assert [problem.line for problem in read(written(file, text)).problems] == [9]
    change(file, {"sampling.top_p": 0.5})
    assert read(file).settings.system_prompt == "[sampling]\ntop_p = 7\n" and told(file) == []


@pytest.mark.parametrize(
    ("text", "line"),
    [("[chat]\nmodel = \n", 2), ("a = 1\na = 2\n", 2), ("[chat\n", 1), ("x = '''\nnever ends\n", 3), ("\0", 1)],
)
def test_a_file_that_is_no_toml_is_told_and_never_written(file: Path, text: str, line: int) -> None:
    found = read(written(file, text))
    assert found.settings == Settings() and [problem.line for problem in found.problems] == [line]
    with pytest.raises(UsageError, match="has a mistake"):
        change(file, {"chat.model": "demo"})
    assert file.read_text() == text


def test_what_cannot_be_read_is_told(file: Path) -> None:
    file.parent.mkdir()
    file.write_bytes(b"[chat]\nmodel = '\xff'\n")
    assert told(file) == ["line 2: it is not UTF-8 text"]
    file.write_bytes(b"a = " + b"[" * 100_000)
    assert len(told(file)) == 1
    file.unlink()
    file.mkdir()
    assert "cannot be read" in told(file)[0]
    with pytest.raises(FloeError, match="cannot be saved"):
        change(file, {"chat.model": "demo"})
    (file.parent / "plain").write_text("")
    with pytest.raises(FloeError, match="cannot be saved"):
        change(file.parent / "plain" / "settings.toml", {"chat.model": "demo"})


@pytest.mark.parametrize(
    "values", [{"chat.modle": "x"}, {"sampling.top_p": 2}, {"keys.fly": "f1"}, {"chat": "x"}, {"": 1}]
)
def test_what_cannot_be_is_not_written(file: Path, values: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        change(file, {"chat.model": "demo"} | values)
    assert not file.exists()


@pytest.mark.parametrize("seed", range(6))
def test_any_prompt_survives_a_round_trip(file: Path, seed: int) -> None:
    dice = random.Random(seed)
    parts = [
        '"',
        '"""',
        "\\",
        "\n",
        "\r\n",
        "\t",
        "#",
        "\x1b",
        "\u202e",
        "\x7f",
        "é",
        "漢",
        "[a]",
        "=",
        "'",
        " ",
        "\\u0000",
    ]
    prompt = "".join(dice.choices(parts, k=dice.randrange(12)))
    change(file, {"chat.system_prompt": prompt, "chat.model": "demo"})
    assert (
        read(file).settings.system_prompt == prompt.replace("\r\n", "\n") or read(file).settings.system_prompt == prompt
    )
    assert tomllib.loads(file.read_text())["chat"]["model"] == "demo"


def test_two_programs_change_different_things_at_once(file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from floe_chat.app.settings.file import change\n"
        "for n in range(1, 26): change(Path(sys.argv[1]), {sys.argv[2]: n})"
    )
    names = ("sampling.top_k", "chat.max_tokens")
    both = [subprocess.Popen([sys.executable, "-c", script, str(file), name]) for name in names]
    assert [process.wait(60) for process in both] == [0, 0]
    settings = read(file).settings
    assert (settings.top_k, settings.max_tokens) == (25, 25) and told(file) == []


def test_a_file_that_somebody_is_writing_is_waited_for_and_then_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import filelock

    monkeypatch.setattr("floe_chat.app.settings.file._LOCK_SECONDS", 0.05)
    file.parent.mkdir()
    with filelock.FileLock(f"{file}.lock"), pytest.raises(TryAgainError, match="are locked"):
        change(file, {"chat.model": "demo"})


def test_a_folder_that_may_not_be_written_leaves_the_file(file: Path) -> None:
    if os.name != "posix" or os.geteuid() == 0:
        pytest.skip("this user may write anywhere")
    change(file, {"chat.model": "demo"})
    before = file.read_bytes()
    file.parent.chmod(0o500)
    try:
        with pytest.raises(FloeError, match="cannot be saved"):
            change(file, {"chat.model": "other"})
    finally:
        file.parent.chmod(0o700)
    assert file.read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="no such files on Windows")
def test_what_is_no_ordinary_file_is_neither_waited_for_nor_read_for_ever(file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 40)
    for strange, why in (("pipe", "not an ordinary"), ("large", "more than 1 MB"), ("/dev/zero", "not an ordinary")):
        found = read(tmp_path / strange)
        assert found.settings == Settings() and why in str(found.problems[0])
    file.parent.mkdir()
    file.symlink_to(tmp_path / "pipe")
    with pytest.raises(FloeError, match="cannot be saved"):
        change(file, {"sampling.top_p": 0.5})


@pytest.mark.parametrize("value", ["b", None])
@pytest.mark.parametrize("text", ["[chat.model]\nsampling = {top_p = 'x'}\n", "chat = {model.a.b = 1}\n"])
def test_a_table_in_the_place_of_a_setting_keeps_its_values(file: Path, text: str, value: str | None) -> None:
    with pytest.raises(UsageError, match="was not changed"):
        change(written(file, text), {"chat.model": value})
    assert file.read_text() == text


@pytest.mark.parametrize("text", ["screen = 5\n", "[chat]\nmodel = 'a'\n[[screen]]\n", "[screen.theme]\nx = 1\n"])
def test_a_table_that_is_none_is_reported_and_never_written_over(file: Path, text: str) -> None:
    written(file, text)
    with pytest.raises(UsageError, match="was not changed") as caught:
        change(file, {"screen.theme": "floe-light"})
    line = text.count("\n", 0, text.index("screen")) + 1
    assert caught.value.cause.startswith(f"Line {line}: screen") and "must be" in caught.value.cause
    assert file.read_text() == text
    with pytest.raises(UsageError, match="was not changed"):
        change(written(file, "personas.Tutor = 'x'\n"), {"personas.Tutor.system_prompt": "y"})


UNUSUAL = [
    "chat = {model = 'a'}\n",
    "chat.model = 'a'\nsampling.top_p = 0.5\n",
    "['chat']\n\"model\" = 'a'\n",
    "[chat]\nmodel = 'a'\n[sampling]\n[sampling.more]\nx = 1\n",
    "[personas.X]\ntemperature = 1\n[chat]\nmodel='a'\n[personas.Y]\ntop_k = 1\n",
]


@pytest.mark.parametrize("text", UNUSUAL)
def test_however_a_file_is_written_a_change_changes_one_value(file: Path, text: str) -> None:
    before = tomllib.loads(text)
    for name, value in (("chat.model", "b"), ("sampling.top_p", 0.25), ("chat.max_tokens", 7), ("chat.model", None)):
        change(written(file, text), {name: value})
        table, key = name.split(".")
        wanted = {**before, table: {**before.get(table, {}), key: value}}
        if value is None:
            del wanted[table][key]
        found = tomllib.loads(file.read_text())
        assert {name: value for name, value in found.items() if value} == {n: v for n, v in wanted.items() if v}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[a]\n" + ".".join(["a"] * 5000) + " = 1\n", 2),
        ("x = '''\n\n'''\n[" + ".".join(['"a"'] * 5000) + "]\n", 4),
        ("x = {" + ".".join(["a"] * 5000) + " = 1}\n", 1),
        ("[chat]\n" + "".join(f"key{number} = 1\n" for number in range(20_000)), 10_001),
    ],
    ids=["key", "header", "inline", "many"],
)
def test_a_file_that_would_take_for_ever_is_refused_with_its_line(file: Path, text: str, line: int) -> None:
    (problem,) = read(written(file, text)).problems
    assert problem.line == line and "more than" in problem.reason
    with pytest.raises(UsageError, match="has a mistake"):
        change(file, {"chat.model": "demo"})


def test_thousands_of_mistakes_are_counted_and_the_first_are_shown(file: Path) -> None:
    written(file, "[chat]\nmodel = 'a'\n" + "".join(f"modle{number} = 1\n" for number in range(5000)))
    found = read(file)
    *shown, last = found.problems
    assert [problem.line for problem in shown] == list(range(3, 53)) and "did you mean chat.model?" in str(shown[0])
    assert str(last) == "4,950 more settings cannot be used" and found.settings.model == "a"
