"""Which values of a settings file can be used, and what is wrong with the others."""

from __future__ import annotations

import difflib
import re
import string
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .actions import OWN, Place
from .settings import KEYS, Persona, Settings
from .toml_outline import Outline, OutlineError

PERSONA_FIELDS = tuple(field.name for field in fields(Persona))
FIELD_KEYS = {key.field: key for key in KEYS}

_NAMED = {key.name: key for key in KEYS}
_NAMES = (*_NAMED, *(f"keys.{action}" for action in OWN))
_TABLES = (*dict.fromkeys(name.split(".")[0] for name in _NAMES), "personas")
# Keys by Textual's names, and those without which nobody could write or leave a page.
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
_MOST_PROBLEMS = 50  # that are listed; a file with more is not a settings file
_LONGEST_NAME = 60  # characters of a setting's name that a problem repeats


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong in the file.

    Attributes:
        line: from 1; None: the file as a whole. name: of the setting, or "". reason: the rest of the sentence that
            begins with the name, or a sentence without one. effect: what is used instead.
    """

    line: int | None
    name: str
    reason: str
    effect: str = "its default is used"

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{f'{self.name} ' if self.name else ''}{self.reason}"


def whole_file(line: int | None, reason: str) -> Problem:
    """A problem because of which nothing of the file is used."""
    return Problem(line, "", reason, "the file is ignored and all settings have their defaults")


def check(text: str) -> tuple[Settings, tuple[Problem, ...]]:
    """The settings in a file's `text`, with the default in place of every value that cannot be used, and why not."""
    try:
        outline = Outline.of(text)
        document = tomllib.loads(text)
    except OutlineError as error:
        return Settings(), (whole_file(error.line, str(error)),)
    except (ValueError, RecursionError) as error:
        return Settings(), (_syntax_problem(text, error),)
    checker = _Checker(outline)
    return checker.settings(document), checker.problems()


def trouble_with(name: str, value: Any) -> str:
    """Why the setting `name`, such as "sampling.top_p", cannot be `value`, as the rest of a sentence; or "".

    None, which unsets it, is always possible.
    """
    if name not in _NAMES:
        return f"is not a setting{_near(name, _NAMES)}"
    if value is None:
        return ""
    return _NAMED[name].trouble(value) if name in _NAMED else _trouble_of_keys(name.removeprefix("keys."), value)


class _Checker:
    def __init__(self, outline: Outline) -> None:
        self._outline = outline
        self._found: list[Problem] = []
        self._more = 0

    def problems(self) -> tuple[Problem, ...]:
        if not self._more:
            return tuple(self._found)
        return (*self._found, Problem(None, "", f"{self._more:,} more settings cannot be used", "defaults are used"))

    def settings(self, document: dict[str, Any]) -> Settings:
        values: dict[str, Any] = {}
        tables: dict[str, dict[str, Any]] = {}
        for table, content in document.items():
            if table not in _TABLES:
                self._tell_unknown((table,), (*_TABLES, *_NAMES))
            elif not isinstance(content, dict):
                self._tell((table,), f"must be a table: [{table}]")
            else:
                tables[table] = content
        for table, content in tables.items():
            for name, value in content.items() if table not in ("keys", "personas") else ():
                if (key := _NAMED.get(f"{table}.{name}")) is None:
                    self._tell_unknown((table, name), _NAMES)
                elif trouble := key.trouble(value):
                    self._tell((table, name), trouble)
                else:
                    values[key.field] = key.kind(value)
        values["keys"] = self._keys(tables.get("keys", {}))
        values["personas"] = self._personas(tables.get("personas", {}))
        if (chosen := values.get("persona", "")) and chosen not in values["personas"]:
            near = _near(chosen, tuple(values["personas"]))
            self._tell(("chat", "persona"), f"names {_shown(chosen)!r}, which does not exist{near}")
            del values["persona"]
        return Settings(**values)

    def _keys(self, content: dict[str, Any]) -> dict[str, str]:
        keys = {name: action.keys for name, action in OWN.items()}
        for action, value in content.items():
            if action not in OWN:
                self._tell_unknown(("keys", action), _NAMES)
            elif trouble := _trouble_of_keys(action, value):
                self._tell(("keys", action), trouble)
            else:
                keys[action] = ",".join(part.strip() for part in value.split(","))
        for action in (action for action in content if action in keys):
            usual = OWN[action].keys.split(",")
            others = {key: other for other in keys if _meet(action, other) for key in keys[other].split(",")}
            taken = [key for key in keys[action].split(",") if key in others and key not in usual]
            if taken:
                self._tell(("keys", action), f"cannot be {taken[0]}: {others[taken[0]]} has that key already")
                keys[action] = OWN[action].keys
        return keys

    def _personas(self, content: dict[str, Any]) -> dict[str, Persona]:
        personas: dict[str, Persona] = {}
        for name, values in content.items():
            if not isinstance(values, dict):
                self._tell(("personas", name), f"must be a table: [personas.{_shown(name)}]")
                continue
            given: dict[str, Any] = {}
            for field, value in values.items():
                if field not in PERSONA_FIELDS:
                    self._tell_unknown(("personas", name, field), PERSONA_FIELDS)
                elif trouble := FIELD_KEYS[field].trouble(value):
                    self._tell(("personas", name, field), trouble)
                else:
                    given[field] = FIELD_KEYS[field].kind(value)
            personas[name] = Persona(**given)
        return personas

    def _tell_unknown(self, path: Sequence[str], known: Sequence[str]) -> None:
        full = len(self._found) >= _MOST_PROBLEMS  # then nobody reads which name was meant, and it takes time to find
        self._tell(path, "" if full else f"is not a setting{_near('.'.join(path), known)}")

    def _tell(self, path: Sequence[str], reason: str) -> None:
        if len(self._found) >= _MOST_PROBLEMS:
            self._more += 1
        else:
            self._found.append(Problem(self._outline.line(path), _shown(".".join(path)), reason))


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
    """Whether the keys of two actions can work at the same time: messages and text field never have the focus both."""
    return action != other and {OWN[action].place, OWN[other].place} != {Place.FIELD, Place.MESSAGES}


def _trouble_of_key(action: str, key: str) -> str:
    writing = OWN[action].place is not Place.MESSAGES  # while a message is selected nothing is written
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


def _near(name: str, known: Sequence[str]) -> str:
    """A question whether one of `known` was meant, to go behind a sentence; or ""."""
    short = {one.split(".")[-1]: one for one in reversed(known)} | {one: one for one in known}
    last = name.split(".")[-1]
    near = [last] if last in short else []
    if not near and len(name) <= _LONGEST_NAME:
        near = difflib.get_close_matches(name, short, 1) or difflib.get_close_matches(last, short, 1)
    return f"; did you mean {short[near[0]]}?" if near else ""


def _shown(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
