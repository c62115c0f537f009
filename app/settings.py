"""What a person may set, with a default, a range and a description each: one frozen dataclass.

The same descriptions make the documented file (`settings_file.py`) and the settings screen. The hub's address, tokens
and proxies are no settings: they come from the environment, as Hugging Face's own tools read them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, cast

from ..engine.ranges import MOST_TOKENS, MOST_TOP_K
from ..models.errors import UsageError
from .arguments import memory_size

ACTIONS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "quit": ("ctrl+q", "Leave floe-chat"),
        "help": ("f1", "All keys, and the panel's words"),
        "palette": ("ctrl+p", "Every command by name"),
        "stop": ("escape", "Stop the answer, or take a waiting question back"),
        "new_chat": ("ctrl+n", "Begin another chat"),
        "toggle_panel": ("f2", "The live panel"),
        "next_preset": ("f3", "The next quality preset"),
        "quality": ("f4", "The quality dial"),
        "setup": ("f5", "This chat: instructions, persona, quality, sampling"),
        "models": ("f6", "Models: installed, begun, and to be had"),
        "experts": ("f9", "Experts, layer by layer"),
        "history": ("ctrl+r", "Earlier chats, and the search in them"),
        "regenerate": ("ctrl+t", "Answer the last question again"),
        "copy": ("ctrl+o", "Copy the last answer"),
        "newline": ("ctrl+j", "A new line in the question"),
        "editor": ("ctrl+g", "Write the question in $EDITOR"),
        "redraw": ("ctrl+l", "Draw the screen anew"),
    }
)
"""What has a key: the key it has by default (several: with commas between), and what it does."""


@dataclass(frozen=True, slots=True)
class Key:
    """How one setting is written, checked and explained.

    Attributes:
        name: in the file, with its table, such as "sampling.top_p". field: in `Settings`.
        default: None where the model or the machine decides, as `unset` says. example: a value to show then.
        description: one or two sentences.
        low, high: the range of a number, both included, but for `above_low`. choices: all that a text may be, if known.
    """

    name: str
    field: str
    kind: type
    default: Any
    description: str
    unset: str
    example: Any
    low: float
    high: float
    above_low: bool
    choices: tuple[str, ...]

    @property
    def values(self) -> str:
        """What it may be, in words; "" where any text will do."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else ""
        return f"{'above ' if self.above_low else ''}{self.low:,g} to {self.high:,.0f}"

    def trouble(self, value: Any) -> str:
        """Why `value` cannot be this setting, or ""."""
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            kinds = {str: 'text in quotes, such as "this"', int: "a whole number", float: "a number"}
            return f"it has to be {kinds.get(self.kind, self.values)}"
        if isinstance(value, str):
            return self._trouble_of_text(value)
        above = value > self.low if self.above_low else value >= self.low
        if not isinstance(value, bool) and not (above and value <= self.high):
            return f"it has to be {self.values}"
        return ""

    def _trouble_of_text(self, value: str) -> str:
        if self.choices and value not in self.choices:
            return f"it has to be one of {self.values}"
        if self.field == "vram":
            try:
                memory_size(value)
            except UsageError as error:
                return f"{error.title}; write it such as 10gb"
        if self.field != "system_prompt" and not value.isprintable():
            return "it holds control characters"
        return "" if value or self.default == "" else "it is empty"


@dataclass(frozen=True, slots=True)
class Persona:
    """Instructions under a name, and the sampling values that go with them; None leaves what is in force."""

    system_prompt: str = ""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def _key(
    name: str,
    default: Any,
    description: str,
    *,
    unset: str = "",
    example: Any = None,
    low: float = -math.inf,
    high: float = math.inf,
    above_low: bool = False,
    choices: tuple[str, ...] = (),
) -> Any:
    kind = type(example if default is None else default)
    shown = default if example is None else example
    key = Key(name, "", kind, default, description, unset, shown, low, high, above_low, choices)
    return field(default=default, metadata={"key": key})


_MODELS_OWN = "the model's own value, or {}"


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings; `KEYS` describes the plain ones.

    Attributes:
        keys: for every action of `ACTIONS` its key. personas: by name.
    """

    model: str = _key("chat.model", "demo", "Which model answers: a name that `floe-chat doctor` lists, or a folder.")
    preset: str | None = _key(
        "chat.preset",
        None,
        "Quality against speed; a chat can change it.",
        unset="Balanced, or what the model has",
        example="Balanced",
        choices=("Exact", "High", "Balanced", "Fast"),
    )
    device: str = _key("chat.device", "auto", "Where to compute: auto, cpu, cuda or cuda:1.")
    vram: str | None = _key(
        "chat.vram", None, "The most GPU memory to use.", unset="what is free when the model loads", example="10gb"
    )
    max_tokens: int = _key("chat.max_tokens", 512, "The longest answer, in tokens.", low=1, high=MOST_TOKENS)
    system_prompt: str = _key("chat.system_prompt", "", "Instructions that precede every new chat.")
    persona: str = _key("chat.persona", "", "The persona of a new chat: a name from the personas below.")
    temperature: float | None = _key(
        "sampling.temperature",
        None,
        "How freely words are drawn; 0 always takes the likeliest.",
        unset=_MODELS_OWN.format(0.7),
        example=0.7,
        low=0,
        high=5,
    )
    top_k: int | None = _key(
        "sampling.top_k",
        None,
        "Draw among so many of the likeliest tokens; 0 is off.",
        unset=_MODELS_OWN.format(0),
        example=0,
        low=0,
        high=MOST_TOP_K,
    )
    top_p: float | None = _key(
        "sampling.top_p",
        None,
        "Draw among the likeliest tokens up to this sum; 1 is off.",
        unset=_MODELS_OWN.format(1),
        example=1.0,
        low=0,
        high=1,
        above_low=True,
    )
    min_p: float | None = _key(
        "sampling.min_p",
        None,
        "Drop tokens below this share of the likeliest; 0 is off.",
        unset=_MODELS_OWN.format(0.05),
        example=0.05,
        low=0,
        high=1,
    )
    repetition_penalty: float | None = _key(
        "sampling.repetition_penalty",
        None,
        "Above 1 avoids repeats.",
        unset=_MODELS_OWN.format(1),
        example=1.0,
        low=0,
        high=10,
        above_low=True,
    )
    theme: str = _key("screen.theme", "floe", "The colours; the palette's Theme shows those there are.")
    panel: str = _key("screen.panel", "full", "The live panel at the start.", choices=("compact", "full", "hidden"))
    save_history: bool = _key("history.save", True, "Whether chats are kept on this machine.")
    models_folder: str | None = _key(
        "folders.models",
        None,
        "Where packed models lie.",
        unset="floe-chat's data folder; `floe-chat paths` shows it",
        example="/data/models",
    )
    keys: Mapping[str, str] = field(default_factory=lambda: {name: key for name, (key, _does) in ACTIONS.items()})
    personas: Mapping[str, Persona] = field(default_factory=dict[str, Persona])

    def with_persona(self, name: str) -> Settings:
        """These settings with the instructions and sampling values of persona `name`; "" changes nothing.

        Raises:
            UsageError: there is no such persona.
        """
        if not name:
            return self
        if name not in self.personas:
            known = ", ".join(self.personas) or "none yet"
            raise UsageError(f"There is no persona {name!r}", f"Known: {known}.", "Add it to the settings file.")
        given = {field: value for field, value in asdict(self.personas[name]).items() if value not in (None, "")}
        return replace(self, persona=name, **given)


KEYS: tuple[Key, ...] = tuple(
    replace(cast(Key, one.metadata["key"]), field=one.name) for one in fields(Settings) if "key" in one.metadata
)
"""Every plain setting, in the order of the file."""

_OPTIONS = {"system": "system_prompt"}  # where the command line calls a setting by another name


def fill(options: Mapping[str, Any], given: Collection[str], settings: Settings) -> dict[str, Any]:
    """The command line's `options`, where those that were not `given` come from `settings` and its persona.

    What neither sets keeps the option's own default. Options that are no settings are passed on.

    Raises:
        UsageError: the settings name a persona that there is not.
    """
    chosen = settings.with_persona(settings.persona)
    known = {key.field for key in KEYS}
    filled = dict(options)
    for option in options:
        setting = _OPTIONS.get(option, option)
        if option not in given and setting in known and (value := getattr(chosen, setting)) not in (None, ""):
            filled[option] = value
    return filled
