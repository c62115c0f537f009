"""What of a settings file can be taken, and what is wrong with the rest."""

from __future__ import annotations

import difflib
import re
import string
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from .settings import ACTIONS, KEYS, Persona, Settings

PERSONA_FIELDS = tuple(field.name for field in fields(Persona))
FIELD_KEYS = {key.field: key for key in KEYS}

_NAMED = {key.name: key for key in KEYS}
_NAMES = (*_NAMED, *(f"keys.{action}" for action in ACTIONS))
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
_NEEDED = frozenset(
    (*_MOVING, "delete", "backspace", "tab", "shift+tab", "enter", "escape", "ctrl+c", "ctrl+i", "ctrl+m")
)
_MOST_LINES = 2_000  # of a file in which the line of a mistake is looked for


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong in the file: the line (None: the file as a whole), the setting's name or "", and the reason."""

    line: int | None
    name: str
    reason: str

    def __str__(self) -> str:
        where = f"line {self.line}: " if self.line is not None else ""
        return f"{where}{f'{self.name}: ' if self.name else ''}{self.reason}"

    @property
    def effect(self) -> str:
        """What is done instead, in words."""
        return "the default is in force" if self.name else "nothing of the file is in force, all is at its default"


def check(text: str) -> tuple[Settings, tuple[Problem, ...]]:
    """The settings in a file's `text`, with the default wherever a value cannot be taken, and why."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        return Settings(), (_syntax_problem(text, error),)
    checker = _Checker(text)
    return checker.settings(document), tuple(checker.problems)


def trouble_with(name: str, value: Any) -> str:
    """Why the setting `name`, such as "sampling.top_p" or "keys.quit", cannot be `value`, or "".

    None, which unsets it, always can.
    """
    if name not in _NAMES:
        return _unknown(name, _NAMES)
    if value is None:
        return ""
    return _NAMED[name].trouble(value) if name in _NAMED else _trouble_of_keys(name.removeprefix("keys."), value)


class _Checker:
    def __init__(self, text: str) -> None:
        self.problems: list[Problem] = []
        self._lines = text.splitlines(keepends=True)

    def settings(self, document: dict[str, Any]) -> Settings:
        values: dict[str, Any] = {}
        tables: dict[str, dict[str, Any]] = {}
        for table, content in document.items():
            if table not in _TABLES:
                self._tell((table,), _unknown(table, (*_TABLES, *_NAMES)))
            elif not isinstance(content, dict):
                self._tell((table,), f"it has to be a table: [{table}]")
            else:
                tables[table] = content
        for table, content in tables.items():
            for name, value in content.items() if table not in ("keys", "personas") else ():
                if trouble := trouble_with(f"{table}.{name}", value):
                    self._tell((table, name), trouble)
                else:
                    key = _NAMED[f"{table}.{name}"]
                    values[key.field] = key.kind(value)
        values["keys"] = self._keys(tables.get("keys", {}))
        values["personas"] = self._personas(tables.get("personas", {}))
        if (chosen := values.get("persona", "")) and chosen not in values["personas"]:
            self._tell(("chat", "persona"), _unknown(chosen, tuple(values["personas"])))
            del values["persona"]
        return Settings(**values)

    def _keys(self, content: dict[str, Any]) -> dict[str, str]:
        keys = {action: key for action, (key, _does) in ACTIONS.items()}
        for action, value in content.items():
            if trouble := trouble_with(f"keys.{action}", value):
                self._tell(("keys", action), trouble)
            else:
                keys[action] = ",".join(part.strip() for part in value.split(","))
        for action in (action for action in content if action in keys):
            others = {key: other for other, its in keys.items() if other != action for key in its.split(",")}
            taken = [key for key in keys[action].split(",") if key in others]
            if taken and keys[action] != ACTIONS[action][0]:
                self._tell(("keys", action), f"{taken[0]} is the key of {others[taken[0]]} already")
                keys[action] = ACTIONS[action][0]
        return keys

    def _personas(self, content: dict[str, Any]) -> dict[str, Persona]:
        personas: dict[str, Persona] = {}
        for name, values in content.items():
            if not isinstance(values, dict):
                self._tell(("personas", name), f"it has to be a table: [personas.{name}]")
                continue
            given: dict[str, Any] = {}
            for field, value in values.items():
                trouble = (
                    FIELD_KEYS[field].trouble(value) if field in PERSONA_FIELDS else _unknown(field, PERSONA_FIELDS)
                )
                if trouble:
                    self._tell(("personas", name, field), trouble)
                else:
                    given[field] = FIELD_KEYS[field].kind(value)
            personas[name] = Persona(**given)
        return personas

    def _tell(self, path: Sequence[str], reason: str) -> None:
        self.problems.append(Problem(self._line_of(path), ".".join(path), reason))

    def _line_of(self, path: Sequence[str]) -> int | None:
        """The first line up to which the file, read by itself, says something at `path`."""
        for count in range(1, min(len(self._lines), _MOST_LINES) + 1):
            try:
                at: Any = tomllib.loads("".join(self._lines[:count]))
                for name in path:
                    at = at[name]
            except (ValueError, KeyError, TypeError):
                continue
            return count
        return None


def _syntax_problem(text: str, error: Exception) -> Problem:
    if isinstance(error, RecursionError):
        return Problem(None, "", "it is nested too deeply")
    words = re.sub(r" \(at [^()]*\)$", "", str(error))
    line = re.search(r"\(at line (\d+)", str(error))
    ends = str(error).endswith("(at end of document)")
    return Problem(int(line[1]) if line else text.count("\n") + 1 if ends else None, "", words[:1].lower() + words[1:])


def _trouble_of_keys(action: str, value: Any) -> str:
    """Why `value`, one key or several with commas between, cannot be those of `action`, or ""."""
    if not isinstance(value, str) or not value.strip():
        return 'it has to name a key, such as "f10" or "ctrl+n", or several with commas between'
    return next((trouble for key in value.split(",") if (trouble := _trouble_of_key(action, key.strip()))), "")


def _trouble_of_key(action: str, key: str) -> str:
    *modifiers, last = key.split("+")
    character = last in _CHARACTERS
    if not set(modifiers) <= _MODIFIERS or len(set(modifiers)) < len(modifiers) or not (character or last in _KEYS):
        near = difflib.get_close_matches(last.lower(), _KEYS, 1)
        meant = "+".join([*(one.lower() for one in modifiers), *near])
        hint = f"is it {meant}?" if near and meant != key else 'write it such as "f10" or "ctrl+n"'
        return f"there is no key {key!r}; {hint}"
    if character and set(modifiers) <= {"shift"}:
        return f"{key} is typed into texts; put ctrl+ or alt+ before it"
    if key in _NEEDED and (action, key) != ("stop", "escape"):
        return f"{key} has its own use in texts and pages; take another"
    return ""


def _unknown(name: str, known: Sequence[str]) -> str:
    short = {one.split(".")[-1]: one for one in reversed(known)} | {one: one for one in known}
    if (last := name.split(".")[-1]) in short:
        return f"there is no such name; is it {short[last]}?"
    near = difflib.get_close_matches(name, short, 1) or difflib.get_close_matches(last, short, 1)
    return f"there is no such name; is it {short[near[0]]}?" if near else "there is no such name"
