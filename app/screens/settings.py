"""The settings: every value of the settings file with what it means. Comments in the file stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ...models.errors import FloeError
from ..settings import ACTIONS, KEYS, Key
from ..settings_file import Read, change, read
from ..widgets.hints import Page, hints
from ..widgets.plain import printable

Apply = Callable[[Read], None]


class Setting(Input):
    """The field of one setting; `key` is None for the key of an action."""

    def __init__(self, name: str, key: Key | None, value: str, meaning: str, unset: str) -> None:
        super().__init__(printable(value), placeholder=unset, compact=True)
        self.setting = name
        self.key = key
        self.meaning = meaning
        self.saved = self.value

    def parsed(self) -> Any:
        """The value that was typed; None if the field is blank. Raises UsageError: it cannot be this setting."""
        return self.key.typed(self.value) if self.key is not None else self.value.strip() or None


class SettingsScreen(ModalScreen[None]):
    """Enter, or leaving a field, saves it; what cannot be saved says why and stays in the field."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss", "Close", show=False),
        Binding("up", "app.focus_previous", "the setting above", show=False),
        Binding("down", "app.focus_next", "the setting below", show=False),
    ]

    def __init__(self, file: Path | None, found: Read, apply: Apply) -> None:
        super().__init__()
        self._file = file
        self._found = found
        self._apply = apply
        self._meaning = Static("", markup=False, classes="explained")

    def compose(self) -> ComposeResult:
        settings = self._found.settings
        with Page(classes="page") as page:
            page.border_title = "Settings"
            page.border_subtitle = hints("Enter saves", "Esc closes")
            if self._found.problems:
                with VerticalScroll(id="problems"):
                    for problem in self._found.problems:
                        yield Static(f"{problem}; {problem.effect}", markup=False, classes="trouble")
            with VerticalScroll(can_focus=False):
                table = ""
                for key in KEYS:
                    if not key.name.startswith(f"{table}."):
                        table = key.name.split(".")[0]
                        yield Static(table.capitalize(), classes="heading", markup=False)
                    value = getattr(settings, key.field)
                    shown = str(value).lower() if key.kind is bool else "" if value is None else str(value)
                    yield _row(Setting(key.name, key, shown, key.description, key.unset or str(key.default)))
                yield Static("Keys", classes="heading", markup=False)
                for action, (default, does) in ACTIONS.items():
                    given = settings.keys.get(action, default)
                    yield _row(Setting(f"keys.{action}", None, given, f"{does}.", default))
            yield self._meaning

    def on_mount(self) -> None:
        self.query(Setting).first().focus()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Explain the setting that has the focus."""
        if isinstance(field := event.widget, Setting):
            facts = [field.meaning, f"{field.key.values}." if field.key is not None and field.key.values else ""]
            where = f"[{field.setting}] in {self._file}" if self._file else "Not saved: there is no settings file here"
            self._meaning.update("\n".join([" ".join(fact for fact in facts if fact), where]))
            self._meaning.remove_class("-wrong")

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        """Save what was written in the field that is left."""
        if isinstance(event.widget, Setting):
            self._save(event.widget)

    @on(Input.Submitted)
    def _submit(self, event: Input.Submitted) -> None:
        if isinstance(event.input, Setting) and self._save(event.input):
            self.focus_next()

    def _save(self, field: Setting) -> bool:
        if field.value == field.saved:
            return True
        if self._file is None:
            return self._refuse(field, "There is no settings file here")
        try:
            change(self._file, {field.setting: field.parsed()})
        except FloeError as error:
            return self._refuse(field, f"{error.title}. {error.cause} {error.hint}")
        field.saved = field.value
        field.remove_class("-wrong")
        self._found = read(self._file)
        self._apply(self._found)
        return True

    def _refuse(self, field: Setting, reason: str) -> bool:
        field.add_class("-wrong")
        self._meaning.update(printable(reason))
        self._meaning.add_class("-wrong")
        return False


def _row(field: Setting) -> Horizontal:
    name = field.setting.split(".")[1].replace("_", " ")
    return Horizontal(Static(name, classes="name", markup=False), field, classes="row")
