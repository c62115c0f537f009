"""Settings: each is documented, refused by itself with its line and the reason, and named as on the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click
import pytest
from floe_chat.app.actions import OWN
from floe_chat.app.cli.main import cli
from floe_chat.app.settings.file import change, documented, read, settings_file, with_installed_model
from floe_chat.app.settings.settings import KEYS, Persona, SettingKey, Settings, fill
from floe_chat.engine.events import Sampling
from floe_chat.engine.ranges import SAMPLING, check
from floe_chat.models.errors import UsageError

from ..helpers import run_cli
from .settings_texts import told, written

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
    "advanced.transfer": "staged",
    "advanced.kv_bits": "8",
    "advanced.context": 16384,
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


def test_every_key_is_documented_with_a_default_that_it_accepts() -> None:
    assert {key.name for key in KEYS} == GOOD.keys() | {"chat.persona"}
    said = " ".join(documented().replace("\n# ", " ").split())
    for key in KEYS:
        assert key.description.endswith(".") and not key.trouble(key.example), key.name
        assert (key.default is None) == bool(key.unset) and getattr(Settings(), key.field) == key.default
        assert key.description in said
    assert all(action.does in documented() for action in OWN.values())


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
    ("sampling.top_p", "'much'", "a number"),
    ("sampling.top_p", "true", "a number"),
    ("sampling.top_k", "1.5", "a whole number"),
    ("sampling.top_k", "-1", "0 to 1,000,000"),
    ("sampling.temperature", "-0.1", "0 to 5"),
    ("sampling.min_p", "1.1", "0 to 1"),
    ("sampling.repetition_penalty", "inf", "0.001 to 10"),
    ("chat.max_tokens", "0", "1 to 1,000,000"),
    ("chat.max_tokens", "99999999999999999999", "1 to 1,000,000"),
    ("chat.preset", "'Best'", "must be one of Exact, High, Balanced, Fast"),
    ("chat.vram", "'lots'", "must be a size such as 10gb"),
    ("chat.model", "''", "not empty"),
    ("chat.model", '"a\\u001bb"', "control characters"),
    ("chat.persona", "'Nobody'", "does not exist"),
    ("screen.panel", "'Full'", "one of full, compact, hidden"),
    ("history.save", "'yes'", "true or false"),
    ("history.save", "1", "true or false"),
    ("keys.quit", "''", "a key"),
    ("keys.quit", "'f1'", "help has that key already"),
    ("keys.quit", "'ctrl+q,,f1'", "cannot be ''"),
    ("keys.quit", "'nonsense+key'", "cannot be 'nonsense+key', which is not a key"),
    ("keys.quit", "'F12'", "did you mean f12?"),
    ("keys.quit", "'escape'", "which text fields and pages use"),
    ("keys.help", "'a'", "which types a character"),
    ("keys.help", "'f12,shift+slash'", "which types a character"),
    ("keys.newline", "'enter'", "which text fields and pages use"),
    ("keys.fly", "'f9'", "is not a setting"),
    ("chat.modle", "'demo'", "is not a setting; did you mean chat.model?"),
    ("sampling.theme", "'floe'", "did you mean screen.theme?"),
    ("smapling.top_p", "1.0", "did you mean sampling?"),
    ("personas.X.top_p", "3", "above 0, at most 1"),
    ("personas.X.colour", "3", "is not a setting"),
    ("personas.X", "3", "must be a table"),
    ("screen.panel.x", "1", "must be one of full"),
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
    options = {
        "model": "demo",
        "preset": None,
        "top_p": 0.9,
        "top_k": None,
        "system": None,
        "seed": 5,
        "max_tokens": 512,
    }
    filled = fill(options, {"top_p", "seed"}, settings)
    assert filled == options | {"model": "big", "system": "Be brief."}
    persona = Settings(persona="Poet", system_prompt="Be brief.", personas={"Poet": Persona("Rhyme.", top_k=7)})
    assert fill(options, set(), persona) == options | {"system": "Rhyme.", "top_k": 7}
    assert fill(options, {"system"}, persona)["system"] is None
    with pytest.raises(UsageError):
        fill(options, set(), Settings(persona="Nobody"))


def test_settings_are_called_as_the_command_line_calls_them() -> None:
    names = {option.name for option in cli.params if isinstance(option, click.Option)}
    fields = {key.field for key in KEYS} | {"system"}
    assert {"model", "preset", "device", "vram", "temperature", "top_k", "top_p", "min_p", "system"} <= names & fields


@pytest.mark.parametrize("key", [key for key in KEYS if key.name.startswith("sampling.")], ids=lambda key: key.name)
def test_what_a_sampling_setting_accepts_the_engine_accepts(key: SettingKey) -> None:
    values = SAMPLING[key.field]
    for value in (
        values.low,
        values.high,
        0.0,
        0,
        0.5,
        1.0,
        1,
        1e-9,
        7.0,
        -1.0,
        11.0,
        float("nan"),
        float("inf"),
        True,
    ):
        given = replace(Sampling(), **{key.field: value})
        if not key.trouble(value):
            check(given)
        else:
            with pytest.raises(UsageError, match=f"{key.field} cannot be"):
                check(given)
    assert [value in values for value in (values.high, values.high + 1, values.low - 1)] == [True, False, False]
    assert (values.low in values) != values.above_low


@pytest.mark.parametrize(
    ("text", "effect"),
    [("[sampling]\ntop_p = 7", "; its default is used"), ("[sampling", "; the file is ignored")],
)
def test_the_command_line_tells_what_is_done_instead(tiny_pack: Path, text: str, effect: str) -> None:
    written(settings_file(), text)
    ran = run_cli("ask", "hi", "-m", str(tiny_pack), "--max-tokens", "1")
    assert ran.code == 0 and effect in ran.err


def test_what_is_typed_is_read_as_the_setting_means_it() -> None:
    keys = {key.name: key for key in KEYS}
    assert keys["sampling.temperature"].typed(" 0.5 ") == 0.5 and keys["sampling.top_k"].typed("") is None
    assert keys["history.save"].typed("True") is True and keys["chat.model"].typed("a b") == "a b"
    for name, text in (
        ("sampling.temperature", "hot"),
        ("sampling.temperature", "nan"),
        ("sampling.top_k", "9" * 5000),
        ("chat.max_tokens", "1.5"),
        ("history.save", "perhaps"),
        ("chat.device", "gpu"),
        ("screen.panel", "wide"),
    ):
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
    assert run_cli("ask", "hi", "--model", "hot").code == 2
