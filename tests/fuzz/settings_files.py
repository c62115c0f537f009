"""Hostile settings files: what is read, changed and offered on the settings page from them.

A change that is accepted has to change that value alone; a file that is refused has to stay as it was.
"""

from __future__ import annotations

import os
import random
import tomllib
from pathlib import Path
from typing import Any

from floe_chat.app.actions import OWN
from floe_chat.app.settings.file import change, documented, read, with_installed_model, with_known_theme
from floe_chat.app.settings.settings import KEYS
from floe_chat.models.errors import FloeError

_NAMES = (
    *(key.name for key in KEYS),
    *(f"keys.{action}" for action in OWN),
    *("personas.X.top_p", "personas.X", "chat", "keys", "sampling.modle", "a.b.c.d", "''", '"chat".model', "x y", "é"),
)
_VALUES = (
    *("1", "-1", "0.5", "nan", "inf", "-0", "1e400", "true", "1_0", "0x10", "9" * 400, "1979-05-27", "07:32:00"),
    *('""', '"demo"', "'hot'", '"\\u0000"', '"\\ud800"', "'cuda:1'", "'Balanced'", "'full'", "'f1'", "'ctrl+q,f1'"),
    *("'''\na\n'''", '"""\\\n  b"""', '"""a""""', '"""\n[chat]\nmodel = 1\n#theme = "x"\n"""', '"10gb"'),
    *("[]", "{}", "[1, [2]]", "{a = 1, b.c = 2}", "[{}]", "[\n1, # x\n2]"),
)
_NOISE = (
    *("\0", "\x1b[2J", "\u202e", "\ufeff", "\r", "\r\n", "\t", "é", "漢", "\U0001f9ca"),
    *("#", "=", "[", "]", '"', "'", "\\"),
)
_SET: tuple[Any, ...] = (
    *("", "a", "demo", "f10", "ctrl+q", "a\nb", "\ud800"),
    *(0, 1, 0.5, True, False, None, float("nan"), [], {}),
)
_PLAIN = {"chat.vram": "1gb", "chat.device": "cpu", "folders.models": "/a", "chat.system_prompt": "a\n'''\"\"\"\\"}


def attempt(seed: int, scratch: Path) -> str:
    dice = random.Random(seed)
    file = scratch / "config" / "settings.toml"
    file.parent.mkdir(exist_ok=True)
    if os.path.lexists(file):
        file.unlink()
    content = _strange(dice, file) if dice.random() < 0.02 else _content(dice)
    if content is not None:
        file.write_bytes(content)
    found = with_known_theme(with_installed_model(read(file), file), file, ("floe",))
    assert found.settings.theme == "floe" and len(found.problems) < 60
    for problem in found.problems:
        assert "bug in floe-chat" not in str(problem) and len(str(problem)) < 1000, problem
    assert found.problems or content is None or _is_toml(content)
    _type(dice)
    before = content or b""
    try:
        _change(dice, file)
    except FloeError as error:
        assert "bug in floe-chat" not in str(error) and len(str(error)) < 2000
        assert content is None or file.read_bytes() == before
        return "change refused"
    assert content is None or file.is_file()
    return "problems" if found.problems else "accepted"


def good(scratch: Path) -> None:
    """A file of the usual kind, changed."""
    change(scratch / "good" / "settings.toml", {"chat.model": "demo"})


def _content(dice: random.Random) -> bytes:
    made = dice.choices((_statements, _broken, _bytes, _deep), (6, 2, 1, 1))[0](dice)
    return made if isinstance(made, bytes) else made.encode("utf-8", "surrogatepass")


def _statements(dice: random.Random) -> str:
    lines = [documented()] if dice.random() < 0.3 else []
    for _ in range(dice.randrange(8)):
        name, value = _name(dice), dice.choice(_VALUES)
        table, _, key = name.partition(".")
        form = dice.choices(range(5), (6, 3, 1, 1, 1))[0]
        if form == 0:
            lines.append(f"[{table}]\n{key or 'x'} = {value}")
        elif form == 1:
            lines.insert(0, f"{name} = {value}")
        elif form == 2:
            lines.append(f"{table} = {{{key or 'x'} = {value}}}")
        elif form == 3:
            lines.append(f"[{'[' * (nested := dice.random() < 0.3)}{name}]{']' * nested} # {dice.choice(_NOISE[7:])}")
        else:
            lines.append(f"{dice.choice(_NAMES)} = {value}{dice.choice((' # x', '', '  '))}")
    return dice.choice(("\n", "\r\n")).join(lines)


def _name(dice: random.Random) -> str:
    return dice.choice(KEYS).name if dice.random() < 0.8 else dice.choice(_NAMES)


def _broken(dice: random.Random) -> str:
    text = list(_statements(dice) or documented())
    for _ in range(dice.randrange(1, 6)):
        at = dice.randrange(len(text) + 1)
        text[at : at + dice.randrange(3)] = [dice.choice(_NOISE)]
    return "".join(text)


def _bytes(dice: random.Random) -> bytes:
    made = bytearray(_statements(dice).encode())
    for _ in range(dice.randrange(1, 9)):
        made[dice.randrange(len(made) + 1) :][:1] = b""
        made.insert(dice.randrange(len(made) + 1), dice.randrange(256))
    return bytes(made[: dice.randrange(len(made) + 1)]) if dice.random() < 0.3 else bytes(made)


def _deep(dice: random.Random) -> str:
    """A little that is meant to take long: the parts of keys, brackets, quotes, and many statements."""
    many = dice.choice((9, 33, 300)) if dice.random() < 0.9 else dice.choice((3_000, 60_000))
    sign = dice.choice(("a.", '"a".', "[", "{a=", "[[a]]\n", "[a.b]\n", '"""', "'''", "\\", "[1,", "#", "a.b.c=1\n"))
    numbered = dice.random() < 0.3
    body = "".join(f"k{at}{dice.choice(('.x', ''))}=1\n" for at in range(many)) if numbered else sign * many
    start = dice.choice(("", "[chat]\n", "x=", "[", "[keys]\n", "[personas]\n", "x={", '"'))
    return start + body + dice.choice(("", "=1", "]", "}", '"', "'''", "\n[chat]\nmodel='a'"))


def _strange(dice: random.Random, file: Path) -> None:
    """Something else than a file."""
    kind = dice.randrange(4)
    if kind == 0:
        os.mkfifo(file)
    elif kind == 1:
        file.symlink_to(dice.choice(("nowhere", file.name, ".")))
    elif kind == 2:
        with file.open("wb") as opened:
            opened.truncate(dice.choice((1 << 20, (1 << 20) + 1, 1 << 40)))


def _is_toml(content: bytes) -> bool:
    try:
        tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return False
    return True


def _type(dice: random.Random) -> None:
    """Something is typed into a field of the settings page."""
    key = dice.choice(KEYS)
    text = dice.choice(
        (dice.choice(_VALUES), dice.choice(_NOISE) * dice.randrange(9), "9" * dice.randrange(6_000), "hot")
    )
    try:
        value = key.typed(text)
    except FloeError as error:
        assert "could not convert" not in str(error) and "invalid literal" not in str(error)
    else:
        assert value is None or key.trouble(value) == ""


def _change(dice: random.Random, file: Path) -> None:
    earlier, known = _values(file)
    if dice.random() < 0.3:
        name, value = dice.choice(_NAMES), dice.choice(_SET)
    else:
        key = dice.choice(KEYS)
        name, value = key.name, None if dice.random() < 0.1 else _PLAIN.get(key.name, key.example)
    change(file, {name: value})
    later, _ = _values(file)
    path = tuple(name.split("."))
    if known:
        for values in (earlier, later):
            values.pop(path, None)
        assert earlier == later, (name, value)
    found = read(file)
    assert value is None or name not in {problem.name for problem in found.problems}


def _values(file: Path) -> tuple[dict[tuple[str, ...], str], bool]:
    """Every value of the file by its path; whether there is a file."""
    try:
        small = file.is_file() and file.stat().st_size < 20_000  # others may take long here, where nothing limits them
        document = tomllib.loads(file.read_bytes().decode("utf-8-sig")) if small else None
    except (OSError, ValueError, RecursionError):
        document = None
    if document is None:
        return {}, False
    found: dict[tuple[str, ...], str] = {}

    def look(values: dict[str, Any], above: tuple[str, ...]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                look(value, (*above, name))
            else:
                found[(*above, name)] = repr(value)

    look(document, ())
    return found, True
