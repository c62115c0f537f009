"""The settings file: documented TOML that belongs to the user. The program changes only the values it is asked to."""

from __future__ import annotations

import re
import textwrap
import threading
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import platformdirs

from ...models import catalog, private_file
from ...models.errors import FloeError, TryAgainError, UsageError
from ..actions import OWN
from .check import Path as _Path
from .check import Problem, check, explained, line_of, trouble_with, whole_file
from .settings import KEYS, Range, SettingKey, Settings, refused

_LOCK_SECONDS = 60.0  # another program writes for some milliseconds; a busy machine is no reason to lose a value
_WIDTH = 88  # columns of a comment in a new file
_LARGEST = 1 << 20  # bytes of a settings file
_TOLD = 2  # problems of a settings file that are named at the start


@dataclass(frozen=True, slots=True)
class SettingsRead:
    """The settings in force, and the problems of the file: settings named in problems have their defaults."""

    settings: Settings
    problems: tuple[Problem, ...] = ()


def settings_file() -> Path:
    """The settings file of this user."""
    return Path(platformdirs.user_config_dir("floe-chat", appauthor=False)) / "settings.toml"


def read(file: Path) -> SettingsRead:
    """The settings in `file`, or the defaults if there is none; the file is not changed."""
    try:
        text = private_file.read(file, _LARGEST).decode("utf-8-sig")
    except FileNotFoundError:
        return SettingsRead(Settings())
    except OSError as error:
        return SettingsRead(Settings(), (whole_file(None, f"it cannot be read: {error.strerror}"),))
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        return SettingsRead(Settings(), (whole_file(line, "it is not UTF-8 text"),))
    return SettingsRead(*check(text))


def with_installed_model(found: SettingsRead, file: Path) -> SettingsRead:
    """The result of `read(file)`, with the demo in place of a model that is not installed, and a problem that says so.

    Models are looked for in the folder that was chosen (`catalog.use_models_folder`).
    """
    model = found.settings.model
    try:
        catalog.find(model)
    except FloeError as error:
        why = "is not installed" if isinstance(error, UsageError) else f"cannot be used: {error.title}"
        settings = replace(found.settings, model=catalog.DEMO)
        return _with_problem(settings, found, file, "chat.model", f"{model!r} {why}", f"the model {catalog.DEMO}")
    return found


def with_known_theme(found: SettingsRead, file: Path, themes: Collection[str]) -> SettingsRead:
    """The result of `read(file)`, with the default theme if the named one is not in `themes`, and a problem that says
    so.
    """
    theme, default = found.settings.theme, Settings().theme
    if theme in themes:
        return found
    settings = replace(found.settings, theme=default)
    return _with_problem(settings, found, file, "screen.theme", f"{theme!r} is not a theme", f"the theme {default}")


def _with_problem(
    settings: Settings, found: SettingsRead, file: Path, name: str, reason: str, instead: str
) -> SettingsRead:
    try:
        line = line_of(private_file.read(file, _LARGEST).decode("utf-8-sig"), tuple(name.split(".")))
    except (OSError, ValueError):
        line = None
    return SettingsRead(settings, (*found.problems, Problem(line, name, reason, f"{instead} is used")))


def change_soon(file: Path, values: Mapping[str, Any], late: Callable[[FloeError | None], object]) -> bool:
    """As `change`, for a screen: a thread waits for another program's lock, then calls `late` with what `change`
    raised, or with None. False: it has begun to wait.
    """
    try:
        change(file, values, patience=0.0)
    except TryAgainError:

        def wait() -> None:
            try:
                change(file, values)
            except FloeError as error:
                late(error)
            else:
                late(None)

        threading.Thread(target=wait, name="floe-settings", daemon=True).start()
        return False
    return True


def change(file: Path, values: Mapping[str, Any], patience: float | None = None) -> None:
    """Set the settings `values`, such as {"sampling.top_p": 0.9, "keys.quit": "f10"}; None unsets one.

    Everything else in the file stays as it is, comments too. A missing file is created from the documented one.
    Concurrent changes by another floe-chat are not lost. `patience`: seconds to wait for its lock, None: a minute.

    Raises:
        UsageError: an impossible value, no such setting, or a mistake in the file, which then is not changed.
        TryAgainError: another program is writing it. FloeError: it cannot be written.
    """
    paths: dict[_Path, Any] = {tuple(name.split(".")): value for name, value in values.items()}
    for path, value in paths.items():
        if trouble := trouble_with(path, value):
            raise refused(".".join(path), value, explained(path, trouble))

    def edit(text: str) -> str:
        changed = _with_values(text, paths)
        for problem in check(changed)[1]:  # with the others: two actions cannot have one key
            if values.get(problem.name) is not None:
                raise refused(problem.name, values[problem.name], problem.reason)
        return changed

    _edit(file, edit, _LOCK_SECONDS if patience is None else patience)


def documented() -> str:
    """A new file: every setting explained, and commented out at its default."""
    lines = [
        "# Settings of floe-chat. To change one, remove the # in front of its line.",
        "# Options on the command line take precedence over this file.",
        "",
    ]
    table = ""
    for key in KEYS:
        if not key.name.startswith(f"{table}."):
            table = key.name.split(".")[0]
            lines += [f"[{table}]"]
        lines += _explained(key)
    lines += ["[keys]", '# An action can have several keys, separated by commas, such as "f10,ctrl+q".']
    lines += [f'#{name} = "{action.keys}"  # {action.does}' for name, action in OWN.items()]
    lines += [
        "",
        "# Personas: a system prompt under a name; sampling values can be added.",
        "#[personas.Tutor]",
        '#system_prompt = "Explain in small steps, and ask me what I think comes next."',
        "#temperature = 0.5",
    ]
    return "\n".join(lines) + "\n"


def _explained(key: SettingKey) -> list[str]:
    facts = " ".join(part for part in (key.hint, f"If not set: {key.unset}." if key.unset else "") if part)
    said = [line for text in (key.description, facts) for line in textwrap.wrap(text, _WIDTH, break_on_hyphens=False)]
    shown = str(key.example).lower() if isinstance(key.example, bool) else key.example
    literal = shown if key.among is None or isinstance(key.among, Range) else f'"{shown}"'
    return [*(f"# {line}" for line in said), f"#{key.name.split('.')[1]} = {literal}", ""]


def _edit(file: Path, edit: Callable[[str], str], patience: float) -> None:
    """Replace the file with the result of `edit` on its text, in one atomic step."""
    import filelock

    try:
        real = private_file.real(file)  # users store such files elsewhere and link to them
        if real.exists():
            private_file.need_ordinary(real)  # before the lock makes a file beside it
        private_file.make_folder(real.parent)
        with filelock.FileLock(real.with_name(real.name + ".lock"), timeout=patience, mode=0o600):
            try:
                text = private_file.read(real, _LARGEST).decode("utf-8-sig")
                if (problems := check(text)[1]) and problems[0].whole:
                    raise UsageError(f"{file} has a mistake and was not changed", f"{problems[0]}.", "Correct it.")
            except FileNotFoundError:
                text = documented()
            except UnicodeDecodeError as error:
                problem = read(real).problems[0]
                raise UsageError(f"{file} has a mistake and was not changed", f"{problem}.", "Correct it.") from error
            try:
                changed = edit(text)
            except _UnchangeableError as error:
                raise _unchangeable(file, text, error.path) from error
            private_file.replace(real, changed)
    except filelock.Timeout as error:
        cause = f"Another program is writing {file}."
        raise TryAgainError("The settings are locked", cause, "Try again.") from error
    except OSError as error:
        cause = f"{file}: {error.strerror or error}."
        hint = "Free some space on that disk." if error.errno in private_file.FULL else "Make it writable."
        raise FloeError("The settings cannot be saved", cause, hint) from error


def _unchangeable(file: Path, text: str, path: _Path) -> UsageError:
    name = ".".join(path)
    line, (_settings, problems) = line_of(text, path), check(text)
    reason = next((str(problem) for problem in problems if f"{name}.".startswith(f"{problem.name}.")), "")
    where = f"line {line}" if line is not None else "the file"
    cause = f"{reason}." if reason else f"{where} is written in a form that floe-chat cannot change."
    return UsageError(f"{file} was not changed", f"{cause[:1].upper()}{cause[1:]}", f"Set {name} there by hand.")


def _with_values(text: str, values: Mapping[_Path, Any]) -> str:
    """`text` with `values` set; None removes one.

    Raises:
        _UnchangeableError: the text has it in a form that cannot be changed without changing something else.
    """
    for path, value in values.items():
        text = _with_value(text, path, value)
    return text


def _with_value(text: str, path: _Path, value: Any) -> str:
    before = _flat(tomllib.loads(text))
    if any(len(key) > len(path) and key[: len(path)] == path for key in before):
        raise _UnchangeableError(path)  # a table has its name, and its values are not the setting's
    wanted = {key: known for key, known in before.items() if key != path}
    if value is not None:
        value = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
        wanted[path] = repr(value)
    if wanted == before:
        return text
    for write in (_uncommented, _edited):
        changed = write(text, path, value)
        if changed is not None and _means(changed, wanted):
            return changed
    raise _UnchangeableError(path)


class _UnchangeableError(ValueError):
    def __init__(self, path: _Path) -> None:
        super().__init__(".".join(path))
        self.path = path


def _flat(values: Mapping[str, Any], above: _Path = ()) -> dict[_Path, str]:
    """The repr of every value of a document, by its path."""
    found: dict[_Path, str] = {}
    for name, value in values.items():
        found |= _flat(value, (*above, name)) if isinstance(value, dict) else {(*above, name): repr(value)}
    return found


def _means(text: str, wanted: Mapping[_Path, str]) -> bool:
    try:
        return _flat(tomllib.loads(text)) == wanted
    except (ValueError, RecursionError):
        return False


def _edited(text: str, path: _Path, value: Any) -> str | None:
    """`text` as tomlkit changes it; None where it cannot."""
    import tomlkit

    try:
        document = tomlkit.parse(text)
        table: Any = document
        for name in path[:-1]:
            if name not in table and value is not None:
                table[name] = tomlkit.table()
            table = table.get(name, {})
        if value is None:
            table.pop(path[-1], None)
        else:
            table[path[-1]] = _item(value)
        return tomlkit.dumps(document)
    # tomlkit fails in many ways on unusual but valid files; `_means` checks its result.
    except Exception:  # noqa: BLE001
        return None


def _item(value: Any) -> Any:
    import tomlkit

    if isinstance(value, str):
        several = "\n" in value and "\r" not in value and not value.startswith("\n")
        return tomlkit.string(value, multiline=several)
    return tomlkit.item(value)


def _uncommented(text: str, path: _Path, value: Any) -> str | None:
    """`text` with the line that shows the default, commented out in its table, replaced; None if there is none."""
    if value is None:
        return None
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
            lines[at] = f"{path[-1]} = {_item(value).as_string()}"
            return "\n".join(lines)
    return None


def told(file: Path | None, problems: Sequence[Problem]) -> tuple[str, str]:
    """How many problems the settings file has, and the first of them."""
    title = "A setting cannot be used" if len(problems) == 1 else f"{len(problems)} settings cannot be used"
    lines = [f"{problem}; {problem.effect}." for problem in problems[:_TOLD]]
    if len(problems) > _TOLD:
        lines.append(f"{len(problems) - _TOLD} more: /settings shows them all.")
    return title, "\n".join([f"{file}:", *lines, "The file was not changed."])
