"""Where the statements of a TOML text stand, found in one pass: `tomllib` gives values without their places.

The text is not checked here beyond what a pass needs; `tomllib` does that.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

MOST_STATEMENTS = 10_000
MOST_PARTS = 32
"""Of one dotted key: `tomllib` and `tomlkit` take time by the square of them."""

# Strings of several lines, of one, comments, names and numbers, and single signs. A quote that nothing ends matches
# nothing: no valid text goes on behind it.
_TOKEN = re.compile(
    r'''"""(?:[^"\\]|\\.|"{1,2}(?!"))*+"{3,5}|'{3}(?:[^']|'{1,2}(?!'))*+'{3,5}'''
    r"""|"(?!"")(?:[^"\\\n]|\\.)*+"|'(?!'')[^'\n]*+'|\#[^\n]*+|[^\s"'\#.=\[\]{},]++|[ \t\r]++|[\n.=\[\]{},]""",
    re.DOTALL,
)

Path = tuple[str, ...]


class OutlineError(ValueError):
    """The text asks for more work than any person's file does."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


@dataclass(frozen=True, slots=True)
class Outline:
    """The line, from 1, at which each table and key of a text begins."""

    lines: dict[Path, int]

    @classmethod
    def of(cls, text: str) -> Outline:
        """Raises OutlineError: too many statements, or a key of too many parts."""
        scan = _Scan()
        at = 0
        while found := _TOKEN.match(text, at):
            scan.take(found[0])
            at = found.end()
        return cls(scan.lines)

    def line(self, path: Sequence[str]) -> int | None:
        """Where the setting at `path` is said: by itself, in an inline table, or by a table that implies it."""
        wanted = tuple(path)
        for length in range(len(wanted), 0, -1):
            if (line := self.lines.get(wanted[:length])) is not None:
                return line
            if length == len(wanted):
                within = (line for key, line in self.lines.items() if key[:length] == wanted)
                if (line := next(within, None)) is not None:
                    return line
        return None


class _Scan:
    def __init__(self) -> None:
        self.lines: dict[Path, int] = {}
        self._line = 1
        self._table: Path = ()
        self._parts: list[str] = []
        self._state = "start"  # of a statement, or in a "header", a "key", a "value"; or behind a header
        self._depth = 0  # brackets open in a value
        self._dots = 0
        self._count = 0

    def take(self, token: str) -> None:
        if token == ".":
            self._dots += 1
            if self._dots >= MOST_PARTS:
                raise OutlineError(self._line, f"a key has more than {MOST_PARTS} parts")
        elif token in "=,[]{}\n":
            self._dots = 0
        if token == "\n":
            self._line += 1
            if not self._depth:
                self._state, self._parts = "start", []
        elif token[0] in " \t\r#":
            pass
        elif self._state == "start" and token == "[":
            self._state = "header"
        elif self._state == "header" and token == "]":
            self._table = tuple(self._parts)
            self._note(self._table, "behind")
        elif self._state in ("start", "key") and token == "=":
            self._note((*self._table, *self._parts), "value")
        elif self._state == "value":
            self._depth += (token in "[{") - (token in "]}")
            self._line += token.count("\n")
        elif self._state in ("start", "header", "key") and token not in ".[]{},=":
            self._state = "header" if self._state == "header" else "key"
            self._parts.append(_name(token))
            self._line += token.count("\n")

    def _note(self, path: Path, state: str) -> None:
        self._state = state
        self._count += 1
        if self._count > MOST_STATEMENTS:
            raise OutlineError(self._line, f"there are more than {MOST_STATEMENTS:,} settings")
        self.lines.setdefault(path, self._line)


def _name(token: str) -> str:
    if token[0] not in "\"'":
        return token
    try:
        return str(tomllib.loads(f"name = {token}")["name"])
    except ValueError:
        return token
