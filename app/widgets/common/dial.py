"""A share from 0 to 1, set by keys and the mouse."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widget import Widget

from ...text.units import share
from .themes import MUTED

_STEP, _FINE = 0.05, 0.01
_LABEL, _VALUE = 26, 7


class Dial(Widget, can_focus=True):
    """A name, a bar and a percentage in one row; with `words`, a choice of one of them instead."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,minus", f"turn(-{_STEP})", "less, by 5 %", show=False),
        Binding("right,plus", f"turn({_STEP})", "more, by 5 %", show=False),
        Binding("shift+left", f"turn(-{_FINE})", "less, by 1 %", show=False),
        Binding("shift+right", f"turn({_FINE})", "more, by 1 %", show=False),
    ]

    class Turned(Message):
        """The user turned a dial."""

        def __init__(self, dial: Dial) -> None:
            super().__init__()
            self.dial = dial

    def __init__(self, name: str, label: str, meaning: str, words: tuple[str, ...] | None = None) -> None:
        super().__init__(id=name)
        self.meaning = meaning
        self._label = label
        self._words = words
        self._value = 0.0

    @property
    def value(self) -> float:
        """Where it stands."""
        return self._value

    @value.setter
    def value(self, value: float) -> None:
        self._value = min(1.0, max(0.0, round(value, 4)))
        self.refresh()

    @property
    def place(self) -> int:
        """Which of its words it shows."""
        return round(self._value * (len(self._words) - 1)) if self._words else 0

    @place.setter
    def place(self, place: int) -> None:
        assert self._words is not None
        self.value = place / max(1, len(self._words) - 1)

    def render(self) -> Content:
        if self._words is not None:
            word = self._words[self.place]
            return Content.assemble((f"{self._label:<{_LABEL}}", MUTED), ("◂ ", MUTED), word, (" ▸", MUTED))
        room = max(1, self.content_size.width - _LABEL - _VALUE)
        filled = round(self._value * room)
        return Content.assemble(
            (f"{self._label:<{_LABEL}}", MUTED),
            ("━" * filled, "$primary"),
            ("─" * (room - filled), "$primary 35%"),
            f"{share(self._value):>{_VALUE}}",
        )

    def action_turn(self, step: float) -> None:
        """Turn it by `step`."""
        before = self._value
        if self._words is not None:
            self.place += 1 if step > 0 else -1
        else:
            self.value = before + step
        if self._value != before:
            self.post_message(self.Turned(self))

    def on_click(self, event: events.Click) -> None:
        if self._words is not None:
            last = len(self._words) - 1
            self.place = 0 if self.place == last else self.place + 1
            self.post_message(self.Turned(self))
            return
        at = event.get_content_offset(self)
        room = max(1, self.content_size.width - _LABEL - _VALUE)
        if at is not None and _LABEL <= at.x <= _LABEL + room:
            self.action_turn((at.x - _LABEL) / room - self._value)
