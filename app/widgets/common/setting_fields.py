"""Fields of the settings page: one for each kind of setting, all with the same few methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.widgets import Checkbox, Input, Select, TextArea

from ...settings.settings import SettingKey
from ...text.plain_text import printable


class Written(Input):
    """A setting that is typed; `key` is None for the key of an action."""

    def __init__(self, setting: str, key: SettingKey | None, value: Any, unset: str) -> None:
        super().__init__("" if value is None else printable(str(value)), placeholder=unset, compact=True)
        self.setting = setting
        self.key = key
        self.saved: object = self.value

    @property
    def shown(self) -> object:
        """The field's current value, to compare with `saved`."""
        return self.value

    def meant(self) -> Any:
        """The value to save; None unsets it.

        Raises:
            UsageError: it cannot be this setting.
        """
        return self.key.typed(self.value) if self.key is not None else self.value.strip() or None


class Prose(TextArea):
    """A text of several lines."""

    def __init__(self, setting: str, key: SettingKey, value: str) -> None:
        super().__init__(value, tab_behavior="focus", compact=True)
        self.setting = setting
        self.key: SettingKey | None = key
        self.saved: object = self.text

    @property
    def shown(self) -> object:
        """As `Written.shown`."""
        return self.text

    def meant(self) -> Any:
        """As `Written.meant`."""
        return self.text.strip() or None


class ChoiceField(Select[str], inherit_bindings=False):
    """One of a list. Up and Down go to other settings, as in every field here; Enter opens the list."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "show_overlay", "open the list", show=False)]

    def __init__(
        self, setting: str, key: SettingKey, value: str | None, values: Sequence[str], trouble: str = ""
    ) -> None:
        """`trouble`: why the file's value is not used; shown until something is chosen."""
        super().__init__(
            [(printable(each), each) for each in _with(values, value)],
            value=Select.NULL if trouble or not value else value,
            allow_blank=bool(trouble) or not key.default,
            prompt=printable(trouble) or key.unset or "none",
            compact=True,
        )
        self.setting = setting
        self.key: SettingKey | None = key
        self.saved: object = Select.NULL if trouble or not value else value

    @property
    def shown(self) -> object:
        """As `Written.shown`."""
        return self.value

    def meant(self) -> Any:
        """As `Written.meant`."""
        return None if self.value is Select.NULL else str(self.value)

    def offer(self, values: Sequence[str]) -> None:
        """Offer these values; the shown one stays."""
        shown = self.value
        with self.prevent(Select.Changed):
            self.set_options([(printable(each), each) for each in _with(values, self.meant())])
            self.value = shown


class Toggle(Checkbox):
    """On or off."""

    def __init__(self, setting: str, key: SettingKey, value: bool) -> None:
        super().__init__(_word(value), value, compact=True)
        self.setting = setting
        self.key: SettingKey | None = key
        self.saved: object = value

    def watch_value(self) -> None:
        """Show the state in words too."""
        super().watch_value()
        self.label = _word(self.value)

    @property
    def shown(self) -> object:
        """As `Written.shown`."""
        return self.value

    def meant(self) -> Any:
        """As `Written.meant`."""
        return self.value


Field = Written | Prose | ChoiceField | Toggle


def _with(values: Sequence[str], value: str | None) -> list[str]:
    """`values`, and `value` if it is not among them: the file's value stays possible."""
    return [*values, *([value] if value and value not in values else [])]


def _word(value: bool) -> str:
    return "on" if value else "off"
