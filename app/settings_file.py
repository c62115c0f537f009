"""The settings file: TOML, documented, the person's own; the program changes only the values it was told to change."""

from __future__ import annotations

import errno
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ..models import private_file
from ..models.errors import FloeError, TryAgainError, UsageError
from .settings import ACTIONS, KEYS, Key, Persona, Settings
from .settings_check import FIELD_KEYS, Problem, check, trouble_with

_LOCK_SECONDS = 5.0
_LARGEST = 1 << 20  # bytes of a settings file

_Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Read:
    """The settings in force, and what of the file could not be taken: the defaults stand in for that alone."""

    settings: Settings
    problems: tuple[Problem, ...] = ()


def settings_file() -> Path:
    """Where the settings lie."""
    return Path(platformdirs.user_config_dir("floe-chat", appauthor=False)) / "settings.toml"


def read(file: Path) -> Read:
    """The settings in `file`, or the defaults if there is none; the file is not touched."""
    try:
        text = _content(file).decode("utf-8-sig")
    except FileNotFoundError:
        return Read(Settings())
    except OSError as error:
        return Read(Settings(), (Problem(None, "", f"it cannot be read: {error.strerror}"),))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return Read(Settings(), (Problem(line, "", "it is not UTF-8 text"),))
    return Read(*check(text))


def change(file: Path, values: Mapping[str, Any]) -> None:
    """Set the settings `values`, such as {"sampling.top_p": 0.9, "keys.quit": "f10"}; None unsets one.

    All else in the file stays as it is, comments too; a file that is not there is begun as the documented one. What
    another floe-chat changes at the same time is not lost.

    Raises:
        UsageError: a value or name that cannot be, or a mistake in the file, which is then left alone.
        TryAgainError: another program is writing it. FloeError: it cannot be written.
    """
    for name, value in values.items():
        _need(name, trouble_with(name, value), value)
    paths = {tuple(name.split(".")): value for name, value in values.items()}
    _edit(file, lambda text: _with_values(text, paths))


def change_persona(file: Path, name: str, persona: Persona | None) -> None:
    """Set the persona `name`, or take it away (None). Raises as `change` does."""
    if not name.strip() or not name.isprintable():
        raise UsageError("A persona needs a name", "", "Give it a word or a few.")
    values = {} if persona is None else asdict(persona)
    for field, value in values.items():
        _need(field, "" if value is None else FIELD_KEYS[field].trouble(value), value)
    paths: dict[_Path, Any] = {("personas", name, field): value or None for field, value in values.items()}
    _edit(file, lambda text: _with_values(text, paths or {("personas", name): None}))


def documented() -> str:
    """The file as it is begun: every setting explained, and commented out at its default."""
    lines = [
        "# Settings of floe-chat. What is commented out is the default; the command line's options come first.",
        "",
    ]
    table = ""
    for key in KEYS:
        if not key.name.startswith(f"{table}."):
            table = key.name.split(".")[0]
            lines += [f"[{table}]"]
        lines += _explained(key)
    lines += ["[keys]", '# Several keys for one action: with commas between, such as "f10,ctrl+q".']
    lines += [f'#{action} = "{key}"  # {does}' for action, (key, does) in ACTIONS.items()]
    lines += [
        "",
        "# Personas: instructions under a name, with sampling values of their own where wanted.",
        "#[personas.Tutor]",
        '#system_prompt = "Explain in small steps, and ask me what I think comes next."',
        "#temperature = 0.5",
    ]
    return "\n".join(lines) + "\n"


def _explained(key: Key) -> list[str]:
    facts = [key.description]
    if key.values:
        facts.append(f"{key.values[:1].upper()}{key.values[1:]}.")
    if key.unset:
        facts.append(f"Not set: {key.unset}.")
    shown = str(key.example).lower() if isinstance(key.example, bool) else key.example
    literal = f'"{shown}"' if key.kind is str else shown
    return [f"# {' '.join(facts)}", f"#{key.name.split('.')[1]} = {literal}", ""]


def _need(name: str, trouble: str, value: Any) -> None:
    if trouble:
        raise UsageError(f"{name} cannot be {value!r}", f"{trouble[:1].upper()}{trouble[1:]}.")


def _edit(file: Path, edit: Callable[[str], str]) -> None:
    """Replace the file by what `edit` makes of its text, at once, with nobody else in between."""
    import filelock

    real = file.resolve()  # people keep such files elsewhere and link to them
    try:
        real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with filelock.FileLock(real.with_name(real.name + ".lock"), timeout=_LOCK_SECONDS, mode=0o600):
            try:
                text = _content(real).decode("utf-8-sig")
                tomllib.loads(text)
            except FileNotFoundError:
                text = documented()
            except (ValueError, RecursionError) as error:
                problem = read(real).problems[0]
                raise UsageError(f"{file} has a mistake and was left as it is", f"{problem}.", "Correct it.") from error
            private_file.replace(real, edit(text))
    except filelock.Timeout as error:
        raise TryAgainError("The settings are being written", f"By another program: {file}.", "Try again.") from error
    except OSError as error:
        cause = f"{file}: {error.strerror or error}."
        raise FloeError("The settings cannot be saved", cause, "Give yourself the right to write there.") from error


def _content(file: Path) -> bytes:
    """Raises OSError: it cannot be read, or is nothing that anybody would keep settings in."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EINVAL, "it is no ordinary file", str(file))  # a pipe would be waited for
    if found.st_size > _LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {_LARGEST >> 20} MB", str(file))
    return file.read_bytes()


def _with_values(text: str, values: Mapping[_Path, Any]) -> str:
    """`text` with `values` at their places; None takes one away."""
    import tomlkit

    for path, value in values.items():
        document = tomlkit.parse(text)
        table: Any = document
        for name in path[:-1]:
            if name not in table and value is not None:
                table[name] = tomlkit.table(is_super_table=len(path) == 3 and table is document)
            table = table.get(name, {})
        if value is None:
            table.pop(path[-1], None)
        elif path[-1] in table or (uncommented := _uncommented(text, path, _item(value))) is None:
            table[path[-1]] = _item(value)
        else:
            text = uncommented
            continue
        text = tomlkit.dumps(document)
    return text


def _item(value: Any) -> Any:
    import tomlkit

    if isinstance(value, str):
        value = value.encode("utf-8", "replace").decode()
        several = "\n" in value and "\r" not in value and not value.startswith("\n")
        return tomlkit.string(value, multiline=several)
    return tomlkit.item(value)


def _uncommented(text: str, path: _Path, item: Any) -> str | None:
    """`text` with the line that shows the default, commented out in its table, replaced; None if there is none."""
    header, comment = re.compile(r"\s*\["), re.compile(rf"#\s*{re.escape(path[-1])}\s*=")
    lines = text.split("\n")
    try:
        start = next(at for at, line in enumerate(lines) if line.split("#")[0].strip() == f"[{'.'.join(path[:-1])}]")
    except StopIteration:
        return None
    for at in range(start + 1, len(lines)):
        if header.match(lines[at]):
            return None
        if comment.match(lines[at]):
            lines[at] = f"{path[-1]} = {item.as_string()}"
            changed = "\n".join(lines)
            return changed if _holds(changed, path, item) else None
    return None


def _holds(text: str, path: _Path, value: Any) -> bool:
    # The line may have stood inside a text of several lines, where it is no comment.
    try:
        at: Any = tomllib.loads(text)
        for name in path:
            at = at[name]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(at == value)
