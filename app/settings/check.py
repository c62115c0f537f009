"""Checks a settings file: the valid values, and what is wrong with the others."""

from __future__ import annotations

import difflib
import re
import string
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..actions import OWN, Scope
from .settings import KEYS, Persona, SettingKey, Settings

Path = tuple[str, ...]

_NAMED = {tuple(key.name.split(".")): key for key in KEYS}
_OF_PERSONAS = {field.name: next(key for key in KEYS if key.field == field.name) for field in fields(Persona)}
_NAMES = (*(key.name for key in KEYS), *(f"keys.{action}" for action in OWN))
_TABLES = (*dict.fromkeys(name.split(".")[0] for name in _NAMES), "personas")
_UNKNOWN = "is not a setting"
_IGNORED = "the file is ignored and all settings have their defaults"
# Keys by Textual's names, and those that writing and leaving a page need.
_MODIFIERS = frozenset({"ctrl", "alt", "shift", "super", "hyper", "meta"})
_MOVING = ("up", "down", "left", "right", "home", "end", "pageup", "pagedown")
_KEYS = frozenset(
    (*_MOVING, "insert", "delete", "backspace", "tab", "enter", "escape", *(f"f{number}" for number in range(1, 25)))
)
_SIGNS = {
    "solidus": "slash",
    "reverse_solidus": "backslash",
    "commercial_at": "at",
    "hyphen_minus": "minus",
    "plus_sign": "plus",
    "low_line": "underscore",
}
_CHARACTERS = frozenset((*string.ascii_letters, *string.digits, "space")) | {
    _SIGNS.get(name, name)
    for name in (re.sub("[ -]", "_", unicodedata.name(sign).lower()) for sign in string.punctuation)
}
_NEEDED = frozenset(("tab", "shift+tab", "ctrl+c", "ctrl+i", "ctrl+m"))
_NEEDED_TO_WRITE = _NEEDED | {*_MOVING, "delete", "backspace", "enter", "escape"}
_MOST_PROBLEMS = 50  # problems listed; a file with more is not a settings file
_ENDS = ('"""', "'''", "]")  # of statements of several lines
_MOST_READ = 10  # times that a text is read to find the ends of its statements
_LONGEST_NAME = 60  # characters of a setting's name that a problem repeats
# Of dotted keys and statements: `tomllib` takes quadratic time for the first, `tomlkit` long for many of the second.
_MOST_PARTS = 32
_MOST_STATEMENTS = 10_000
_PART = r"""(?:[\w-]++|"[^"\n]*"|'[^'\n]*')"""
_TOO_DEEP = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{_MOST_PARTS}}}")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong in the file.

    Attributes:
        line: from 1; None: the file as a whole. name: of the setting, or "". reason: completes a sentence that begins
            with the name, or is a sentence if there is no name. effect: what is used instead.
    """

    line: int | None
    name: str
    reason: str
    effect: str = "its default is used"

    @property
    def whole(self) -> bool:
        """Whether the whole file is ignored because of it."""
        return self.effect == _IGNORED

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{f'{self.name} ' if self.name else ''}{self.reason}"


def whole_file(line: int | None, reason: str) -> Problem:
    """A problem because of which the whole file is ignored."""
    return Problem(line, "", reason, _IGNORED)


def check(text: str) -> tuple[Settings, tuple[Problem, ...]]:
    """The settings in a file's `text`, with defaults for unusable values, and what is wrong with those."""
    if problem := _too_much(text):
        return Settings(), (problem,)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return Settings(), (_syntax_problem(text, error),)
    problems = _Problems(text)
    settings = _settings(document, problems)
    return settings, problems.all()


def trouble_with(path: Path, value: Any) -> str:
    """Why the setting at `path`, such as ("sampling", "top_p"), cannot be `value`, as the rest of a sentence; or "".

    None, which unsets it, is always possible.
    """
    if (key := _key(path)) is not None:
        return key.trouble(value) if value is not None else ""
    if path[0] == "keys" and path[1:] and path[1] in OWN:
        return _trouble_of_keys(path[1], value) if value is not None else ""
    is_table = (path[0] in _TABLES and len(path) == 1) or (path[0] == "personas" and len(path) == 2)
    return f"must be a table: [{_shown('.'.join(path))}]" if is_table else _UNKNOWN


def explained(path: Path, trouble: str) -> str:
    """`trouble`, with a suggestion if there is no setting at `path`."""
    if trouble != _UNKNOWN:
        return trouble
    if path[0] == "personas":
        return trouble + _near(path, tuple(_OF_PERSONAS))
    return trouble + _near(path, (*_TABLES, *_NAMES) if len(path) == 1 else _NAMES)


def line_of(text: str, path: Path) -> int | None:
    """The line, from 1, of the TOML `text` that sets `path`; if none is found, the line that begins its table."""
    return _line(_lines(text), path)


def _line(lines: Mapping[Path, int], path: Path) -> int | None:
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def _lines(text: str) -> dict[Path, int]:
    """The first line of each table and setting: `tomllib` gives no lines.

    A statement ends with the first line at which it is TOML by itself. Where that takes too many tries to find, the
    rest of the text is left out.
    """
    room = _MOST_READ * len(text) + (1 << 16)
    found: dict[Path, int] = {}
    table: Path = ()
    statement, begun = list[str](), 0
    for number, line in enumerate(text.split("\n"), 1):
        if not statement and line.lstrip()[:1] in ("", "#"):
            continue
        begun = number if not statement else begun
        statement.append(line)
        if len(statement) > 1 and not any(end in line for end in _ENDS):
            continue
        room -= sum(map(len, statement))
        if room < 0:
            break
        try:
            content = tomllib.loads("\n".join(statement))
        except (ValueError, RecursionError):
            continue
        paths = list(_paths(content))
        if statement[0].lstrip().startswith("["):
            table = paths[-1]
        else:
            paths = [table + path for path in paths]
        for path in paths:
            found.setdefault(path, begun)
        statement = []
    return found


def _paths(content: Any, above: Path = ()) -> Iterator[Path]:
    """The path of each value and table."""
    if isinstance(content, dict):
        for name, value in content.items():
            yield (*above, name)
            yield from _paths(value, (*above, name))


class _Problems:
    """The problems of a file with their lines; only the first are listed, the others counted."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines: dict[Path, int] | None = None
        self._found: list[Problem] = []
        self._more = 0

    def add(self, path: Path, reason: str) -> None:
        if len(self._found) >= _MOST_PROBLEMS:
            self._more += 1
        else:
            self._lines = _lines(self._text) if self._lines is None else self._lines
            line, name = _line(self._lines, path), _shown(".".join(path))
            self._found.append(Problem(line, name, explained(path, reason)))

    def all(self) -> tuple[Problem, ...]:
        if not self._more:
            return tuple(self._found)
        return (*self._found, Problem(None, "", f"{self._more:,} more settings cannot be used", "defaults are used"))


def _settings(document: dict[str, Any], problems: _Problems) -> Settings:
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    found = document.get("personas")
    personas: dict[str, dict[str, Any]] = {
        name: {} for name, content in (found if isinstance(found, dict) else {}).items() if isinstance(content, dict)
    }
    for path, value in _statements(document):
        if trouble := trouble_with(path, value):
            problems.add(path, trouble)
        elif (key := _key(path)) is None:
            keys[path[1]] = ",".join(part.strip() for part in value.split(","))
        else:
            (personas[path[1]] if len(path) == 3 else values)[key.field] = key.converted(value)
    if (chosen := values.get("persona", "")) and chosen not in personas:
        near = _near((chosen,), tuple(personas))
        problems.add(("chat", "persona"), f"names {_shown(chosen)!r}, which does not exist{near}")
        del values["persona"]
    made = {name: Persona(**given) for name, given in personas.items()}
    return Settings(**values, keys=_without_twins(keys, problems), personas=made)


def _statements(document: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Every setting of a document, known or not, with its value; tables in place of values too, and the reverse."""
    for table, content in document.items():
        if table not in _TABLES or not isinstance(content, dict):
            yield (table,), content
            continue
        for name, value in content.items():
            if table == "personas" and isinstance(value, dict):
                yield from (((table, name, field), each) for field, each in value.items())
            else:
                yield (table, name), value


def _without_twins(given: dict[str, str], problems: _Problems) -> dict[str, str]:
    """The keys of all actions; if two actions would have the same key, the one set by the user gets its default."""
    keys = {name: given.get(name, action.keys) for name, action in OWN.items()}
    for action in given:
        usual = OWN[action].keys.split(",")
        others = {key: other for other in keys if _meet(action, other) for key in keys[other].split(",")}
        taken = [key for key in keys[action].split(",") if key in others and key not in usual]
        if taken:
            problems.add(("keys", action), f"cannot be {taken[0]}: {others[taken[0]]} has that key already")
            keys[action] = OWN[action].keys
    return keys


def _key(path: Path) -> SettingKey | None:
    if len(path) == 3 and path[0] == "personas":
        return _OF_PERSONAS.get(path[2])
    return _NAMED.get(path)


def _too_much(text: str) -> Problem | None:
    """Rejects what no real settings file has and would take too long to read."""
    starts = [at for at, line in enumerate(text.split("\n"), 1) if "=" in line or line.lstrip().startswith("[")]
    if len(starts) > _MOST_STATEMENTS:
        return whole_file(starts[_MOST_STATEMENTS], f"there are more than {_MOST_STATEMENTS:,} settings")
    if deep := _TOO_DEEP.search(text):
        return whole_file(text.count("\n", 0, deep.start()) + 1, f"a key has more than {_MOST_PARTS} parts")
    return None


def _syntax_problem(text: str, error: Exception) -> Problem:
    if isinstance(error, RecursionError):
        return whole_file(None, "values are nested too deeply")
    words = re.sub(r" \(at [^()]*\)$", "", str(error))
    line = re.search(r"\(at line (\d+)", str(error))
    ends = str(error).endswith("(at end of document)")
    at = int(line[1]) if line else text.count("\n") + 1 if ends else None
    return whole_file(at, f"not TOML: {words[:1].lower()}{words[1:200]}")


def _trouble_of_keys(action: str, value: Any) -> str:
    """Why `value`, one key or several separated by commas, cannot be the key of `action`; or ""."""
    if not isinstance(value, str) or not value.strip():
        return 'must name a key, such as "f10" or "ctrl+n", or several separated by commas'
    return next((trouble for key in value.split(",") if (trouble := _trouble_of_key(action, key.strip()))), "")


def _meet(action: str, other: str) -> bool:
    """Whether the keys of two actions can work at the same time: messages and text field never both have the focus."""
    return action != other and {OWN[action].place, OWN[other].place} != {Scope.FIELD, Scope.MESSAGES}


def _trouble_of_key(action: str, key: str) -> str:
    writing = OWN[action].place is not Scope.MESSAGES  # while a message is selected nothing is written
    *modifiers, last = key.split("+")
    character = last in _CHARACTERS
    if not set(modifiers) <= _MODIFIERS or len(set(modifiers)) < len(modifiers) or not (character or last in _KEYS):
        near = difflib.get_close_matches(last[:_LONGEST_NAME].lower(), _KEYS, 1)
        meant = "+".join([*(one.lower() for one in modifiers), *near])
        hint = f"did you mean {meant}?" if near and meant != key else 'write it like "f10" or "ctrl+n"'
        return f"cannot be {_shown(key)!r}, which is not a key; {hint}"
    if key in OWN[action].keys.split(","):
        return ""
    if writing and character and set(modifiers) <= {"shift"}:
        return f"cannot be {key}, which types a character; put ctrl+ or alt+ before it"
    if key in (_NEEDED_TO_WRITE if writing else _NEEDED):
        return f"cannot be {key}, which text fields and pages use; choose another key"
    return ""


def _near(path: Path, known: Sequence[str]) -> str:
    """A suggestion from `known`, to append to a sentence; or ""."""
    short = {one.split(".")[-1]: one for one in reversed(known)} | {one: one for one in known}
    name, last = ".".join(path), path[-1].split(".")[-1]
    near = [last] if last in short else []
    if not near and len(name) <= _LONGEST_NAME:
        near = difflib.get_close_matches(name, short, 1) or difflib.get_close_matches(last, short, 1)
    return f"; did you mean {short[near[0]]}?" if near else ""


def _shown(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
