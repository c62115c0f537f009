"""Settings: each is documented, refused by itself with its line and the reason; the file is changed in one place."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import stat
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.actions import OWN
from floe_chat.app.screens.settings import SettingsScreen, useless
from floe_chat.app.settings.file import change, change_soon, documented, read, settings_file, with_installed_model
from floe_chat.app.settings.settings import KEYS, Persona, Settings, fill
from floe_chat.app.widgets.common.setting_fields import ChoiceField, Field, Prose, Toggle, Written
from floe_chat.app.widgets.panel import figures as draw
from floe_chat.app.widgets.panel.dashboard import PerformancePanel
from floe_chat.app.widgets.panel.figures import PanelFigures
from floe_chat.engine.events import Advanced, Finished, LayerRows, Load, Loaded
from floe_chat.models import catalog
from floe_chat.models.errors import FloeError, TryAgainError, UsageError
from textual.pilot import Pilot
from textual.widgets import Static

from ..engine.driver import Engine, asking
from ..helpers import explained, run_cli
from .scripted import (
    LOADED,
    ROWS,
    ScriptedClient,
    ask,
    chatting,
    composer,
    finish,
    order,
    ready,
    stats,
    status,
    until,
    write,
)
from .wizardry import see

GOOD = {
    "chat.model": "mixtral",
    "chat.preset": "High",
    "chat.device": "cpu",
    "chat.vram": "10gb",
    "chat.max_tokens": 100,
    "chat.system_prompt": "Be\nbrief.",
    "chat.thinking": "show",
    "sampling.temperature": 0.0,
    "sampling.top_k": 40,
    "sampling.top_p": 0.9,
    "sampling.min_p": 1.0,
    "sampling.repetition_penalty": 1.1,
    "screen.theme": "floe-light",
    "screen.panel": "compact",
    "history.save": False,
    "folders.models": "/models",
    "advanced.predictor": "none",
    "advanced.cpu_share": False,
    "advanced.placement": "pool:4gb",
    "advanced.transfer": "staged",
    "advanced.kv_bits": "8",
    "advanced.context": 16384,
    "advanced.draft": False,
    "advanced.drafter": "small",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config" / "settings.toml"


def test_without_a_file_the_defaults_are_in_force() -> None:
    assert settings_file().name == "settings.toml" and not settings_file().exists()
    found = read(settings_file())
    assert (found.settings, found.problems) == (Settings(), ()) and not settings_file().parent.exists()


def test_the_documented_file_means_the_defaults_and_so_does_each_of_its_lines(file: Path) -> None:
    assert read(written(file, documented())).settings == Settings() and told(file) == []
    lines = [
        line[1:] if line.startswith("#") and not line.startswith("# ") else line for line in documented().split("\n")
    ]
    settings = read(written(file, "\n".join(lines))).settings
    assert told(file) == []
    assert settings.personas.keys() == {"Tutor"} and settings.keys == Settings().keys
    assert all(getattr(settings, key.field) == key.example for key in KEYS)
    assert max(map(len, documented().split("\n"))) <= 90


def test_a_new_file_is_the_documented_one_with_the_values_in_their_places(file: Path) -> None:
    change(file, GOOD | {"keys.quit": "f10, ctrl+q"})
    settings = read(file).settings
    assert {key.name: getattr(settings, key.field) for key in KEYS if key.name in GOOD} == GOOD
    assert settings.keys["quit"] == "f10,ctrl+q" and told(file) == []
    ours, theirs = (text.split("\n") for text in (file.read_text(), documented()))
    assert [line for line in theirs if line not in ours and not line.startswith("#")] == []
    assert all(line in ours for line in theirs if line.startswith("# "))
    change(file, dict.fromkeys(GOOD) | {"keys.quit": None})
    assert read(file).settings == Settings()


def test_personas_have_a_prompt_and_sampling_values(file: Path) -> None:
    text = "[personas.'My tutor. 2']\nsystem_prompt = 'Ask why.'\ntemperature = 0.2\ntop_k = 5\n[personas.Poet]\n"
    change(written(file, text + "system_prompt = 'Rhyme.'\n"), {"chat.persona": "Poet"})
    settings = read(file).settings
    tutor = Persona("Ask why.", temperature=0.2, top_k=5)
    assert settings.personas == {"My tutor. 2": tutor, "Poet": Persona("Rhyme.")} and told(file) == []
    assert settings.with_persona("My tutor. 2").temperature == 0.2
    assert settings.with_persona("").system_prompt == "" and settings.with_persona("Poet").system_prompt == "Rhyme."
    with pytest.raises(UsageError, match="poet"):
        settings.with_persona("poet")


def test_a_number_among_words_needs_no_quotes(file: Path) -> None:
    assert read(written(file, "advanced.kv_bits = 8\n")).settings.kv_bits == "8" and told(file) == []


BAD = [
    ("sampling.top_p", "0", "must be a number above 0, at most 1"),
    ("sampling.top_p", "nan", "must be a number above 0, at most 1"),
    ("sampling.top_k", "-1", "0 to 1,000,000"),
    ("sampling.repetition_penalty", "inf", "0.001 to 10"),
    ("chat.max_tokens", "99999999999999999999", "1 to 1,000,000"),
    ("chat.preset", "'Best'", "must be one of Exact, High, Balanced, Fast"),
    ("chat.vram", "'lots'", "must be a size such as 10gb"),
    ("chat.model", "''", "not empty"),
    ("chat.model", '"a\\u001bb"', "control characters"),
    ("chat.persona", "'Nobody'", "does not exist"),
    ("history.save", "1", "true or false"),
    ("keys.quit", "''", "a key"),
    ("keys.quit", "'f1'", "help has that key already"),
    ("keys.quit", "'nonsense+key'", "cannot be 'nonsense+key', which is not a key"),
    ("keys.quit", "'F12'", "did you mean f12?"),
    ("keys.quit", "'escape'", "which text fields and pages use"),
    ("keys.help", "'a'", "which types a character"),
    ("keys.fly", "'f9'", "is not a setting"),
    ("chat.modle", "'demo'", "is not a setting; did you mean chat.model?"),
    ("smapling.top_p", "1.0", "did you mean sampling?"),
    ("personas.X", "3", "must be a table"),
    ("chat.device", "'gpu'", "must be auto, cpu, cuda"),
    ("advanced.kv_bits", "4", "must be one of auto, 16, 8"),
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD, ids=[f"{name}={value}" for name, value, _why in BAD])
def test_a_bad_value_is_told_with_its_line_and_costs_only_itself(
    file: Path, name: str, value: str, reason: str
) -> None:
    text = f"# a comment\nscreen.theme = 'floe-light'\n{name} = {value}\n"
    before = read(written(file, text))
    (problem,) = before.problems
    assert problem.line == 3 and reason in problem.reason and str(problem).startswith("line 3: ")
    assert before.settings.theme == "floe-light" and file.read_text() == text
    expected = Settings(theme="floe-light", personas=before.settings.personas)
    assert before.settings == expected


def test_every_problem_has_its_line_however_many_there_are(file: Path) -> None:
    """Also below a prompt of many lines that look like settings."""
    prompt = "\n".join(["personas.p1.colour = 3"] * 1000)
    text = f"[chat]\nsystem_prompt = '''\n{prompt}\n'''\nmodal = 1\n"
    text += "".join(f"[personas.p{number}]\ncolour = 3\n" for number in range(3000))
    lines = [problem.line for problem in read(written(file, text)).problems]
    assert lines == [1004, *range(1006, 1006 + 2 * 49, 2), None]


def test_the_command_line_comes_before_settings_and_those_before_defaults() -> None:
    settings = Settings(model="big", top_p=0.5, system_prompt="Be brief.", vram="4gb")
    options = {"model": "demo", "preset": None, "top_p": 0.9, "top_k": None, "system": None, "seed": 5}
    filled = fill(options, {"top_p", "seed"}, settings)
    assert filled == options | {"model": "big", "system": "Be brief."}
    persona = Settings(persona="Poet", system_prompt="Be brief.", personas={"Poet": Persona("Rhyme.", top_k=7)})
    assert fill(options, set(), persona) == options | {"system": "Rhyme.", "top_k": 7}
    assert fill(options, {"system"}, persona)["system"] is None
    with pytest.raises(UsageError):
        fill(options, set(), Settings(persona="Nobody"))


def test_what_is_typed_is_read_as_the_setting_means_it() -> None:
    keys = {key.name: key for key in KEYS}
    assert keys["sampling.temperature"].typed(" 0.5 ") == 0.5 and keys["sampling.top_k"].typed("") is None
    assert keys["history.save"].typed("True") is True and keys["chat.model"].typed("a b") == "a b"
    wrong = {
        "sampling.temperature": "hot",
        "sampling.top_k": "9" * 5000,
        "history.save": "perhaps",
        "chat.device": "gpu",
    }
    for name, text in wrong.items():
        with pytest.raises(UsageError, match=f"{name} cannot be '{text[:40]}") as caught:
            keys[name].typed(text)
        assert caught.value.cause.startswith("It must be ") and len(str(caught.value)) < 200
        assert "convert" not in str(caught.value) and "literal" not in str(caught.value)


def test_a_model_that_is_not_installed_does_not_lock_anybody_out(file: Path, tiny_pack: Path, tmp_path: Path) -> None:
    for model in ("hot", str(tmp_path), "a/b", "x" * 5000, "~nobody/x"):
        written(file, f"[screen]\npanel = 'hidden'\n[chat]\n\nmodel = '{model}'\n")
        found = with_installed_model(read(file), file)
        (problem,) = found.problems
        assert found.settings == Settings(panel="hidden") and problem.line == 5
        assert problem.name == "chat.model" and problem.effect == "the model demo is used"
    change(file, {"chat.model": str(tiny_pack)})
    assert with_installed_model(read(file), file) == read(file)
    written(settings_file(), "[chat]\nmodel = 'hot'\n")
    ran = run_cli("ask", "hi", "--max-tokens", "1")
    assert ran.code == 0
    assert f"{settings_file()}: line 2: chat.model 'hot' is not installed; the model demo is used" in ran.err
    ran = run_cli("ask", "hi", "--model", str(tiny_pack), "--max-tokens", "1")
    assert ran.code == 0 and "hot" not in ran.err


# The settings file: changed in one place, whoever else writes it, and left as it is where it cannot be read


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


def test_any_prompt_survives_a_round_trip(file: Path) -> None:
    dice = random.Random()
    parts = ['"', '"""', *"\\\n\t#\x1b\u202e\x7fé漢=' ", "\r\n", "[a]", "\\u0000"]
    for _ in range(6):
        prompt = "".join(dice.choices(parts, k=dice.randrange(12)))
        change(file, {"chat.system_prompt": prompt, "chat.model": "demo"})
        assert read(file).settings.system_prompt in (prompt, prompt.replace("\r\n", "\n"))
        assert tomllib.loads(file.read_text())["chat"]["model"] == "demo"


@pytest.mark.thorough
def test_two_programs_change_different_things_at_once(file: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from floe_chat.app.settings.file import change\n"
        "for n in range(1, 16): change(Path(sys.argv[1]), {sys.argv[2]: n})"
    )
    names = ("sampling.top_k", "chat.max_tokens")
    both = [subprocess.Popen([sys.executable, "-c", script, str(file), name]) for name in names]
    assert [process.wait(60) for process in both] == [0, 0]
    settings = read(file).settings
    assert (settings.top_k, settings.max_tokens) == (15, 15) and told(file) == []


def test_a_file_that_somebody_is_writing_is_waited_for_and_then_told(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import filelock

    monkeypatch.setattr("floe_chat.app.settings.file._LOCK_SECONDS", 0.05)
    file.parent.mkdir()
    ended, late = threading.Event(), list[FloeError | None]()
    with filelock.FileLock(f"{file}.lock") as lock:
        with pytest.raises(TryAgainError, match="are locked"):
            change(file, {"chat.model": "demo"})
        monkeypatch.setattr("floe_chat.app.settings.file._LOCK_SECONDS", 60.0)
        assert not change_soon(file, {"chat.model": "demo"}, lambda error: (late.append(error), ended.set()))
        assert not file.exists()
        lock.release()
        assert ended.wait(60) and late == [None] and read(file).settings.model == "demo"


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


# A settings file with the text that a test wants, and what is reported of it


def written(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8", newline="")
    return file


def told(file: Path) -> list[str]:
    return [str(problem) for problem in read(file).problems]


# The settings page: lists and toggles where a setting has few values, checks where it is typed


def shown_fields(pilot: Pilot[Any]) -> dict[str, Field]:
    screen = pilot.app.screen
    kinds = (Written, Prose, ChoiceField, Toggle)
    return {field.setting: field for kind in kinds for field in screen.query(kind)}


async def opened(pilot: Pilot[Any]) -> dict[str, Field]:
    await order(pilot, "/settings")
    await until(pilot, lambda: isinstance(pilot.app.screen, SettingsScreen))
    return shown_fields(pilot)


WRONG = (
    ("sampling.temperature", "hot", "sampling.temperature cannot be 'hot'. It must be a number from 0 to 5."),
    ("folders.models", "/nowhere/at/all", "There is no folder /nowhere/at/all."),
    ("keys.quit", "f1", "keys.quit cannot be f1: help has that key already"),
)


async def test_fields_are_gone_through_explained_checked_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    text = '# mine\n[keys]\ntoggle_panel = "f12"\n[chat]\nsystem_prompt = """\nBe kind.\n"""\n'
    file.write_text(text)
    split = dataclasses.replace(ROWS, layers=(LayerRows(None, 1.0, 0.0, 0.0, 0.0), LayerRows(None, 0.0, 0.0, 0.0, 1.0)))
    assert useless(None) == useless(stats(rows=ROWS)) == () != useless(stats(rows=split))
    assert {"advanced.predictor", "advanced.transfer"} < {*useless(stats())}
    async with chatting(size=(120, 36), settings=file) as (client, pilot):
        await pilot.press("f12")
        await until(pilot, lambda: not pilot.app.screen.query_one(PerformancePanel).display)
        request = await ask(pilot, client)
        client.say(Finished(request, "stop", stats(request, rows=split)))
        await until(pilot, lambda: status(pilot).state == "ready")
        fields = await opened(pilot)
        for setting, typed, said in WRONG:
            field = fields[setting]
            assert isinstance(field, Written)
            field.focus()
            before, field.value = field.value, typed
            await pilot.press("enter")
            await see(pilot, said)
            field.value = before
        assert file.read_text() == text
        for name in ("predictor", "transfer", "kv_bits"):
            fields[f"advanced.{name}"].focus()
            said = next(key.description for key in KEYS if key.name == f"advanced.{name}")
            meaning = pilot.app.screen.query_one(".explained", Static)
            await until(pilot, lambda said=said, shown=meaning: said in str(shown.render()))
            assert ("No effect where" in str(meaning.render())) == (name == "predictor"), name
        fields["chat.model"].focus()
        await pilot.pause()
        seen = [pilot.app.focused]
        for _ in range(4):
            await pilot.press("down")
            seen.append(pilot.app.focused)
        assert seen == [fields[f"chat.{name}"] for name in ("model", "preset", "device", "vram", "max_tokens")]
        await pilot.press("up")
        assert pilot.app.focused is seen[-2]
        fields["sampling.top_k"].focus()
        await write(pilot, "40")
        await pilot.press("enter")
        await until(pilot, lambda: "top_k = 40" in file.read_text())
        fields["screen.theme"].focus()
        await pilot.press("enter", "down", "enter")  # the list opens at the theme that is used
        await until(pilot, lambda: pilot.app.theme == "floe-light" and "floe-light" in file.read_text())
        field = fields["keys.stop"]
        assert isinstance(field, Written)
        field.focus()
        field.value = "f10"
        await pilot.press("enter")
        await until(pilot, lambda: 'stop = "f10"' in file.read_text())
        prompt = fields["chat.system_prompt"]  # of several lines, which stay
        assert isinstance(prompt, Prose)
        prompt.focus()
        prompt.move_cursor(prompt.document.end)
        await write(pilot, "Be right.")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, SettingsScreen))
        await until(pilot, lambda: read(file).settings.system_prompt == "Be kind.\nBe right.")
        assert file.read_text().startswith("# mine\n")
        request = await ask(pilot, client)
        await pilot.press("escape")
        assert client.cancelled == 0
        await pilot.press("f10")
        await until(pilot, lambda: client.cancelled == 1)
        await finish(pilot, client, request, "cancelled")


@pytest.mark.thorough
async def test_many_mistakes_in_the_settings_leave_the_text_field_in_view(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[keys]\n" + "".join(f'{action} = "?"\n' for action in OWN))
    async with ready(ScriptedClient(), size=(80, 24), settings=file) as pilot:
        assert status(pilot).keys == Settings().keys
        await see(
            pilot,
            f"{len(OWN)} settings cannot be used",
            f"line 2: keys.{next(iter(OWN))} cannot be",
            f"{len(OWN) - 2} more",
        )
        (toast,) = pilot.app.screen.query("Toast")
        assert not toast.region.overlaps(composer(pilot).region)
        await order(pilot, "/settings")
        await see(pilot, f"line 2: keys.{next(iter(OWN))} cannot be '?'", "model")
        await pilot.press("shift+tab", "end")
        await see(pilot, f"line {len(OWN) + 1}: keys.{list(OWN)[-1]}")


@pytest.mark.thorough
async def test_what_has_few_values_is_chosen_and_not_typed(tmp_path: Path, tiny_pack: Path) -> None:
    catalog.models_folder().mkdir(parents=True)
    (catalog.models_folder() / "tiny").symlink_to(tiny_pack)
    file = tmp_path / "settings.toml"
    file.write_text(text := "[personas.Tutor]\ntop_k = 5\n[chat]\nmodel = 'hot'\n[screen]\ntheme = 'loud'\n")
    async with ready(ScriptedClient(), settings=file, size=(120, 36)) as pilot:
        await see(pilot, "line 4: chat.model 'hot' is not", "line 6: screen.theme 'loud' is not")
        assert pilot.app.theme == "floe"
        fields = await opened(pilot)
        assert {name for name, field in fields.items() if isinstance(field, ChoiceField)} >= {
            *(f"chat.{name}" for name in ("model", "preset", "device", "persona")),
            *("screen.theme", "screen.panel"),
        }
        assert all(isinstance(fields[key.name], Toggle) for key in KEYS if key.among is None)
        model = fields["chat.model"]
        assert isinstance(model, ChoiceField) and pilot.app.focused is model and model.meant() is None
        await until(pilot, lambda: ("tiny", "tiny") in model._options)  # pyright: ignore[reportPrivateUsage]
        assert file.read_text() == text  # to look up what there is changes nothing
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.model == "demo")
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.model == "tiny")
        fields["chat.persona"].focus()
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.persona == "Tutor")
        fields["history.save"].focus()
        await pilot.press("space")
        await until(pilot, lambda: not read(file).settings.save_history)
        assert "loud" in file.read_text()


async def test_a_theme_is_chosen_where_the_file_has_no_table_for_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("screen = 5\n")
    async with ready(ScriptedClient(), settings=file) as pilot:
        await see(pilot, "line 1: screen must be a table")
        pilot.app.theme = "floe-light"
        await see(pilot, "was not changed")
        assert pilot.app.theme == "floe-light"
    assert file.read_text() == "screen = 5\n"


# Advanced settings: in force in the engine of every kind of chat, shown where they differ


ADVANCED = Advanced("none", cpu_share=False, transfer="staged", kv_bits="8", context=600)
ADVANCED_WORDS = (
    "predictor none",
    "no CPU share",
    "transfer staged",
    "8-bit context",
    "600 tokens of context reserved",
)


def test_the_engine_works_as_it_is_told(tiny_pack: Path) -> None:
    with Engine() as engine:
        engine.send(Load(str(tiny_pack), None, "throttled:1gb", 1 << 28, ADVANCED))
        assert engine.until(Loaded).advanced == ADVANCED_WORDS
        engine.send(asking(1, [1, 40, 41, 42], tokens=4))
        rows = engine.until(Finished).stats.rows
        assert rows is not None and rows.on_cpu == 0 and rows.recall is None
        # Where all rows are in place little of it matters, which is said.
        engine.send(Load(str(tiny_pack), None, "cpu", None, ADVANCED))
        loaded = engine.until(Loaded)
        useless = {f"{word} (no effect here)" for word in ADVANCED_WORDS} - {"8-bit context (no effect here)"}
        assert {*loaded.advanced} == useless | {"8-bit context"} and "keys and values of 8 bits" in loaded.reason


def test_a_setting_reaches_the_engine() -> None:
    """No test device can read rows in place: the engine refuses, and names the setting."""
    change(settings_file(), {"advanced.transfer": "in place"})
    for arguments in (("ask", "hi"), ("--plain",)):
        told = explained(run_cli(*arguments, "--device", "throttled:1gb", "--vram", "64mb"), 2)
        assert "in place" in told and "advanced.transfer" in told


def test_a_placement_can_be_chosen() -> None:
    """By the option or the setting; what cannot be is refused before anything answers."""
    arguments, on_a_card = ("ask", "hi"), ("--device", "sim:rtx3060-12gb", "--vram", "10mb")
    for mix in ("pool:1mb", "static"):
        assert run_cli(*arguments, *on_a_card, "--mix", mix, "--max-tokens", "2").code == 0
    assert "does not suit" in explained(run_cli(*arguments, *on_a_card, "--mix", "pool:0.0625mb"), 2)
    assert "pool:SIZE" in explained(run_cli(*arguments, "--mix", "heap"), 2)
    assert "--mix" in run_cli(*arguments, "--device", "cpu", "--mix", "pool").err
    several = ("--devices", "sim:rtx3060-12gb,sim:rtx3060-12gb")
    assert "one card" in explained(run_cli(*arguments, *several, "--mix", "pool"), 2)
    change(settings_file(), {"advanced.placement": "pool:0.0625mb"})
    assert "does not suit" in explained(run_cli(*arguments, *on_a_card), 2)


def test_doctor_shows_them() -> None:
    assert json.loads(run_cli("doctor", "--json").out)["advanced"] == dataclasses.asdict(Advanced())
    change(settings_file(), {"advanced.cpu_share": False})
    assert json.loads(run_cli("doctor", "--json").out)["advanced"]["cpu_share"] is False
    text = run_cli("doctor").out
    lines = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert lines["predictor"] == ["auto", "default"]
    shares = [line for line in text.splitlines() if "cpu share" in line]
    assert len(shares) == 1 and "false" in shares[0] and str(settings_file()) in shares[0]


def test_the_panel_shows_what_differs() -> None:
    assert "Advanced" not in draw.backend(PanelFigures(loaded=LOADED), 32).plain
    other = dataclasses.replace(LOADED, advanced=ADVANCED.changed())
    assert f"Advanced: {', '.join(ADVANCED_WORDS)}" in draw.backend(PanelFigures(loaded=other), 32).plain
