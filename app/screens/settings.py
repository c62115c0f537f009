"""The settings page: every setting with its value and meaning. Comments in the file stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Checkbox, Input, Select, Static

from ...engine.events import Stats
from ...models import catalog
from ...models.errors import FloeError, UsageError
from ...models.paths import expanded
from ..actions import OWN
from ..background import in_background
from ..settings.file import SettingsRead, change_soon, read
from ..settings.settings import KEYS, SettingKey
from ..text.plain_text import printable
from ..widgets.common.hints import Page, hints
from ..widgets.common.setting_fields import ChoiceField, Field, Prose, Toggle, Written

_OF_A_POOL = ("advanced.predictor",)
_OF_A_PART = ("advanced.placement", "advanced.cpu_share", "advanced.transfer", "advanced.context")
Apply = Callable[[SettingsRead], None]

_DEVICES = ("auto", "cpu", "cuda", "cuda:0", "cuda:1")
_AT_ONCE = ("screen.theme", "chat.thinking", "keys.")  # prefixes of settings that need no restart


class _Fields(VerticalScroll, inherit_bindings=False):
    """Scrolls only by page: Up and Down move between fields."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "page_up", "scroll up", show=False),
        Binding("pagedown", "page_down", "scroll down", show=False),
    ]


class SettingsScreen(ModalScreen[None]):
    """A choice is saved at once, a text with Enter or when its field loses focus. An invalid value stays in the field,
    with the reason below.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", show=False),
        Binding("up", "app.focus_previous", "the setting above", show=False),
        Binding("down", "app.focus_next", "the setting below", show=False),
    ]

    def __init__(self, file: Path | None, found: SettingsRead, apply: Apply, stats: Stats | None = None) -> None:
        """stats: of the last answer, by which some settings have no effect."""
        super().__init__()
        self._useless = useless(stats)
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
            with _Fields(can_focus=False):
                table = ""
                for key in KEYS:
                    if not key.name.startswith(f"{table}."):
                        table = key.name.split(".")[0]
                        yield Static(table.capitalize(), classes="heading", markup=False)
                    yield _row(self._field(key, getattr(settings, key.field)))
                yield Static("Keys", classes="heading", markup=False)
                for name, action in OWN.items():
                    yield _row(Written(f"keys.{name}", None, settings.keys.get(name, action.keys), action.keys))
            yield self._meaning

    def _field(self, key: SettingKey, value: Any) -> Field:
        if key.among is None:
            return Toggle(key.name, key, value)
        if key.field == "system_prompt":
            return Prose(key.name, key, value)
        if (values := self._values(key)) is not None:
            trouble = next((each.reason for each in self._found.problems if each.name == key.name), "")
            return ChoiceField(key.name, key, value, values, trouble)
        return Written(key.name, key, value, key.unset or str(key.default))

    def _values(self, key: SettingKey) -> tuple[str, ...] | None:
        """The choices for this setting; None: it is typed."""
        match key.field:
            case "model":
                return (catalog.DEMO,)  # the others are looked up in the background
            case "theme":
                own = [name for name in self.app.available_themes if name.startswith("floe")]
                return (*own, *sorted(set(self.app.available_themes) - set(own)))
            case "persona":
                return tuple(self._found.settings.personas)
            case "device":
                return _DEVICES
            case _:
                return key.among if isinstance(key.among, tuple) else None

    def on_mount(self) -> None:
        self.query_one(f"#{_id('chat.model')}").focus()
        in_background(self, _installed, self.query_one(f"#{_id('chat.model')}", ChoiceField).offer)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Explain the setting that has the focus."""
        if isinstance(field := event.widget, Field):
            self._explain(field)

    def on_descendant_blur(self, event: events.DescendantBlur) -> None:
        """Save the text of the field that lost focus."""
        if isinstance(event.widget, Written | Prose):
            self._save(event.widget)

    @on(Input.Submitted)
    def _submit(self, event: Input.Submitted) -> None:
        if isinstance(event.input, Written) and self._save(event.input):
            self.focus_next()

    @on(Select.Changed)
    @on(Checkbox.Changed)
    def _choose(self, event: Select.Changed | Checkbox.Changed) -> None:
        if isinstance(event.control, ChoiceField | Toggle):
            self._save(event.control)

    def action_close(self) -> None:
        """Close the page and save the field that has the focus; a wrong value is reported once before it is dropped."""
        field = self.focused
        if not isinstance(field, Field) or field.has_class("-wrong") or self._save(field):
            self.dismiss()

    def _explain(self, field: Field) -> None:
        if field.key is None:
            said = f"{OWN[field.setting.removeprefix('keys.')].does}. Separate several keys with commas."
        else:
            said = f"{field.key.description} {field.key.hint if isinstance(field, Written) else ''}".rstrip()
        if not field.setting.startswith(_AT_ONCE):
            said += " Takes effect at the next start."
        if field.setting in self._useless:
            why = "there is no pool of rows" if field.setting in _OF_A_POOL else "all experts are in one place"
            said = f"No effect where the last answer was computed: {why}. {said}"
        where = f"[{field.setting}] in {self._file}" if self._file else "Not saved: there is no settings file here"
        self._meaning.update(f"{said}\n{where}", layout=False)  # its size is fixed
        self._meaning.remove_class("-wrong")

    def _save(self, field: Field) -> bool:
        if field.shown == field.saved:
            return True
        if self._file is None:
            return self._refuse(field, "There is no settings file here")
        try:
            value = field.meant()
            if field.setting == "folders.models" and value is not None and not expanded(value).is_dir():
                raise UsageError(f"There is no folder {value}", "", "Create it first, or give another one.")
            saved = change_soon(
                self._file, {field.setting: value}, lambda error: self.call_later(self._saved, field, error)
            )
        except FloeError as error:
            return self._refuse(field, " ".join(part for part in (f"{error.title}.", error.cause, error.hint) if part))
        field.saved = field.shown
        field.remove_class("-wrong")
        if self._meaning.has_class("-wrong") and self.focused is field:
            self._explain(field)
        if saved:
            self._saved(field, None)
        return True

    def _saved(self, field: Field, error: FloeError | None) -> None:
        if error is not None:
            self._refuse(field, f"{error.title}. {error.cause} {error.hint}")
        elif self._file is not None:
            self._found = read(self._file)
            self._apply(self._found)

    def _refuse(self, field: Field, reason: str) -> bool:
        field.add_class("-wrong")
        self._meaning.update(printable(reason), layout=False)
        self._meaning.add_class("-wrong")
        return False


def useless(stats: Stats | None) -> tuple[str, ...]:
    """The settings without effect on the last answer, by its figures; none if there are no figures."""
    if stats is None or (stats.rows is not None and not stats.rows.static):
        return ()
    return _OF_A_POOL if stats.rows else (*_OF_A_POOL, *_OF_A_PART)


def _installed() -> list[str]:
    try:
        return [model.name for model in catalog.installed() if model.trouble is None]
    except FloeError:
        return [catalog.DEMO]  # the folder cannot be read: F6 shows why


def _id(setting: str) -> str:
    return setting.replace(".", "-")


def _row(field: Field) -> Horizontal:
    field.id = _id(field.setting)
    name = field.setting.split(".")[1].replace("_", " ")
    return Horizontal(Static(name, classes="name", markup=False), field, classes="row")
