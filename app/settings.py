"""Every setting with its default, range and description: one frozen dataclass.

The documented file (`settings_file.py`) and the settings page are made from the same descriptions. The hub's address,
tokens and proxies are not settings: they come from the environment, as Hugging Face's own tools read them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, cast

from ..engine.events import Advanced
from ..engine.ranges import MOST_TOKENS, MOST_TOP_K, PREDICTORS, TRANSFERS
from ..models.errors import UsageError
from .actions import OWN
from .arguments import memory_size

_SHOWN = 60  # characters of a wrong value that an error repeats
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?|sim:\S+")


@dataclass(frozen=True, slots=True)
class Key:
    """How one setting is written, checked and explained.

    Attributes:
        name: in the file, with its table, such as "sampling.top_p". field: in `Settings`.
        default: None where the model or the machine decides, as `unset` says. example: the value shown in that case.
        description: one or two sentences.
        low, high: the range of a number, both included, except for `above_low`. choices: every value of a text that
            has few.
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
        """The values that it accepts, in words; "" where any text will do."""
        if self.choices:
            return ", ".join(self.choices)
        if self.kind in (bool, str):
            return "true or false" if self.kind is bool else ""
        if self.above_low:
            return f"above {self.low:,g}, at most {self.high:,.0f}"
        return f"{self.low:,g} to {self.high:,.0f}"

    def trouble(self, value: Any) -> str:
        """What is wrong with `value`, as the rest of a sentence: "must be 0 to 5"; or ""."""
        if type(value) is not self.kind and not (self.kind is float and type(value) is int):
            kinds = {str: 'text in quotes, such as "this"', int: "a whole number", float: "a number"}
            return f"must be {kinds.get(self.kind, self.values)}"
        if isinstance(value, str):
            return self._trouble_of_text(value)
        above = value > self.low if self.above_low else value >= self.low
        if not isinstance(value, bool) and not (above and value <= self.high):
            return f"must be {self.values}"
        return ""

    def typed(self, text: str) -> Any:
        """The value that a person means by `text`; None if it is blank.

        Raises:
            UsageError: it cannot be this setting.
        """
        text = text.strip()
        if not text:
            return None
        value: Any = text
        if self.kind is bool:
            value = {"true": True, "false": False}.get(text.lower(), text)
        elif self.kind is not str:
            with suppress(ValueError):
                value = self.kind(text)
        same_kind = isinstance(value, self.kind)
        if trouble := self.trouble(value) if same_kind else f"must be {self.values}":
            raise refused(self.name, text, trouble)
        return value

    def _trouble_of_text(self, value: str) -> str:
        if self.choices and value not in self.choices:
            return f"must be one of {self.values}"
        if self.field == "device" and not _DEVICE.fullmatch(value):
            return "must be auto, cpu, cuda, or one card such as cuda:1"
        if self.field == "vram":
            try:
                memory_size(value)
            except UsageError:
                return "must be a size such as 10gb"
        if self.field != "system_prompt" and not value.isprintable():
            return "contains control characters"
        return "" if value or self.default == "" else "is empty"


def refused(name: str, value: object, trouble: str) -> UsageError:
    """Why the setting `name` cannot be `value`; `trouble` is the rest of a sentence that begins with the name."""
    if not trouble.startswith(("must be", "is empty", "contains")):
        return UsageError(f"{name} {trouble}")
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
    return UsageError(f"{name} cannot be {shown}", f"It {trouble}.")


@dataclass(frozen=True, slots=True)
class Persona:
    """A system prompt under a name, with sampling values of its own; None leaves a value as it is."""

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
        keys: the key of every action of `OWN`. personas: by name.
    """

    model: str = _key(
        "chat.model",
        "demo",
        "The model to start with: its name (`floe-chat models` lists them) or its folder. Choosing a model on the "
        "screen changes this.",
    )
    preset: str | None = _key(
        "chat.preset",
        None,
        "The quality preset of new chats, from the most exact to the fastest.",
        unset="Balanced, or the model's own",
        example="Balanced",
        choices=("Exact", "High", "Balanced", "Fast"),
    )
    device: str = _key(
        "chat.device", "auto", "Where the model runs: auto, cpu, cuda, or one card of several, such as cuda:1."
    )
    vram: str | None = _key(
        "chat.vram",
        None,
        "The most GPU memory to use, such as 10gb.",
        unset="all that is free when the model loads",
        example="10gb",
    )
    max_tokens: int = _key("chat.max_tokens", 512, "The longest answer, in tokens.", low=1, high=MOST_TOKENS)
    system_prompt: str = _key("chat.system_prompt", "", "The system prompt of new chats.")
    persona: str = _key("chat.persona", "", "The persona of new chats: the name of one of the personas below.")
    temperature: float | None = _key(
        "sampling.temperature",
        None,
        "How much answers vary; 0 always takes the most likely token.",
        unset=_MODELS_OWN.format(0.7),
        example=0.7,
        low=0,
        high=5,
    )
    top_k: int | None = _key(
        "sampling.top_k",
        None,
        "Sample from this many of the most likely tokens; 0 is off.",
        unset=_MODELS_OWN.format(0),
        example=0,
        low=0,
        high=MOST_TOP_K,
    )
    top_p: float | None = _key(
        "sampling.top_p",
        None,
        "Sample from the most likely tokens whose probabilities add up to this; 1 is off.",
        unset=_MODELS_OWN.format(1),
        example=1.0,
        low=0,
        high=1,
        above_low=True,
    )
    min_p: float | None = _key(
        "sampling.min_p",
        None,
        "Leave out tokens with less than this share of the top token's probability; 0 is off.",
        unset=_MODELS_OWN.format(0.05),
        example=0.05,
        low=0,
        high=1,
    )
    repetition_penalty: float | None = _key(
        "sampling.repetition_penalty",
        None,
        "Values above 1 make repeated words less likely; 1 is off.",
        unset=_MODELS_OWN.format(1),
        example=1.0,
        low=0.001,
        high=10,
    )
    theme: str = _key("screen.theme", "floe", "The colours; the settings page lists the themes.")
    panel: str = _key(
        "screen.panel", "full", "The live panel when floe-chat starts.", choices=("full", "compact", "hidden")
    )
    save_history: bool = _key("history.save", True, "Save chats on this machine.")
    models_folder: str | None = _key(
        "folders.models",
        None,
        "The folder of packed models.",
        unset="in floe-chat's data folder; `floe-chat paths` shows it",
        example="/data/models",
    )
    predictor: str = _key(
        "advanced.predictor",
        "auto",
        "How the weights that the next layer needs are predicted, to prefetch them: gate uses its router, learned a "
        "predictor that was trained while packing, partial the next layer's attention too; none prefetches nothing.",
        choices=PREDICTORS,
    )
    cpu_share: bool = _key(
        "advanced.cpu_share",
        True,
        "Let the CPU compute a share of the weights that are not in GPU memory.",
    )
    transfer: str = _key(
        "advanced.transfer",
        "auto",
        "How weights reach the GPU: staged copies them in chunks, in place lets the GPU read RAM, auto uses the faster "
        "of both as measured.",
        choices=TRANSFERS,
    )
    keys: Mapping[str, str] = field(default_factory=lambda: {name: action.keys for name, action in OWN.items()})
    personas: Mapping[str, Persona] = field(default_factory=dict[str, Persona])

    @property
    def advanced(self) -> Advanced:
        """Those of the table [advanced], which matter for models larger than the GPU's memory."""
        return Advanced(self.predictor, self.cpu_share, self.transfer)

    def with_persona(self, name: str) -> Settings:
        """These settings with the system prompt and sampling values of persona `name`; "" changes nothing.

        Raises:
            UsageError: there is no such persona.
        """
        if not name:
            return self
        if name not in self.personas:
            known = f"Personas: {', '.join(self.personas)}." if self.personas else "There are no personas yet."
            raise UsageError(f"There is no persona {name!r}", known, "Add it to the settings file.")
        given = {field: value for field, value in asdict(self.personas[name]).items() if value not in (None, "")}
        return replace(self, persona=name, **given)


KEYS: tuple[Key, ...] = tuple(
    replace(cast(Key, one.metadata["key"]), field=one.name) for one in fields(Settings) if "key" in one.metadata
)
"""Every plain setting, in the order of the file."""

_OPTIONS = {"system": "system_prompt"}  # where the command line calls a setting by another name


def fill(options: Mapping[str, Any], given: Collection[str], settings: Settings) -> dict[str, Any]:
    """The command line's `options`; those that were not `given` come from `settings` and its persona.

    An option that neither sets keeps its default. Options that are not settings are passed on.

    Raises:
        UsageError: the settings name a persona that does not exist.
    """
    chosen = settings.with_persona(settings.persona)
    known = {key.field for key in KEYS}
    filled = dict(options)
    for option in options:
        setting = _OPTIONS.get(option, option)
        if option not in given and setting in known and (value := getattr(chosen, setting)) not in (None, ""):
            filled[option] = value
    return filled
