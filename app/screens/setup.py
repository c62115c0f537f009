"""One chat's title, persona, quality, system prompt and sampling values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Select, Static, TextArea

from ...models.errors import UsageError
from ..chat.answer_settings import NAMES, changed
from ..history import ChatSetup
from ..settings.settings import KEYS, Persona
from ..text.plain_text import printable
from ..widgets.common.hints import ScrollingPage, hints
from ..widgets.common.keys import closing, key_of

_MEANINGS = {key.field: key.description for key in KEYS} | {
    "seed": "The same number gives the same answer. Empty is random."
}


class SetupScreen(ModalScreen["tuple[str, ChatSetup] | None"]):
    """Ctrl+S or the button saves the changes, Esc discards them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", show=False),
        closing("setup", "close"),
        Binding("ctrl+s", "save", "save the changes", show=False, priority=True),
    ]

    def __init__(
        self,
        title: str,
        setup: ChatSetup,
        personas: Mapping[str, Persona],
        presets: Sequence[str] = (),
        in_force: str = "",
    ) -> None:
        """`presets`: of the model that answers, none while it loads. `in_force`: the preset in use, or the name for a
        quality set by hand.
        """
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (70, "-wide")]
        self._setup = setup
        self._personas = personas
        self._title = Input(printable(title), placeholder="the first question, if empty", id="title", compact=True)
        known = [(printable(name), name) for name in personas]
        chosen = setup.persona if setup.persona in personas else Select.NULL
        self._persona = Select[str](known, value=chosen, prompt="none", id="persona", compact=True)
        self._in_force = in_force
        by_hand = in_force not in presets
        self._quality = Select[str](
            [(name, name) for name in presets],
            value=Select.NULL if by_hand else in_force,
            allow_blank=by_hand,
            prompt="Custom" if presets else "not known yet",
            disabled=not presets,
            id="quality",
            compact=True,
        )
        self._system_prompt = TextArea(
            setup.system_prompt, placeholder="What the model reads before the chat", tab_behavior="focus"
        )
        self._trouble = Static("", markup=False, classes="trouble")

    def compose(self) -> ComposeResult:
        with ScrollingPage(classes="page", can_focus=False) as page:
            page.border_title = "This chat"
            page.border_subtitle = hints("Ctrl+S saves", "Esc cancels")
            yield _row("Title", self._title)
            if self._personas:
                yield _row("Persona", self._persona)
            yield _row("Quality", self._quality, f"{key_of(self, 'quality')} compares them")
            yield Static("System prompt", classes="heading")
            yield self._system_prompt
            yield Static("Sampling", classes="heading")
            for name in NAMES:
                value = getattr(self._setup.sampling, name)
                field = Input("" if value is None else f"{value:g}", id=name, compact=True)
                yield _row(name.replace("_", " "), field, _MEANINGS.get(name, ""))
            yield self._trouble
            with Horizontal(classes="buttons"):
                yield Button("Save", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._system_prompt.focus(scroll_visible=False)  # it is; and the page is not laid out yet

    @on(Select.Changed)
    def _take_persona(self, event: Select.Changed) -> None:
        persona = self._personas.get(str(event.value))
        if persona is not None and str(event.value) != self._setup.persona:
            self._system_prompt.load_text(persona.system_prompt)
            for name in NAMES:
                if (value := getattr(persona, name, None)) is not None:
                    self.query_one(f"#{name}", Input).value = f"{value:g}"

    def action_close(self) -> None:
        """Discard the changes."""
        self.dismiss(None)

    @on(Button.Pressed)
    @on(Input.Submitted)
    def action_save(self) -> None:
        """Save the changes, if they are valid."""
        sampling = self._setup.sampling
        try:
            for name in NAMES:
                sampling = changed(sampling, name, self.query_one(f"#{name}", Input).value.strip())
        except UsageError as error:
            self._trouble.update(f"{error.title}: {error.cause}")
            return
        text = self._system_prompt.text.strip()
        persona = "" if self._persona.value is Select.NULL else str(self._persona.value)
        if persona and self._personas[persona].system_prompt != text:
            persona = ""  # it is no longer its system prompt
        setup = replace(self._setup, sampling=sampling, system_prompt=text, persona=persona)
        if (preset := self._quality.value) not in (Select.NULL, self._in_force):
            setup = replace(setup, preset=str(preset), quality=None)
        self.dismiss((" ".join(self._title.value.split()), setup))


def _row(name: str, field: Input | Select[str], meaning: str = "") -> Horizontal:
    said = [Static(meaning, classes="meaning", markup=False)] if meaning else []  # else the field has its room
    return Horizontal(Static(name, classes="name", markup=False), field, *said, classes="row")
