"""Every setting with its default, range and description: one frozen dataclass.

The documented file (`file.py`) and the settings page are made from the same descriptions. The hub's address,
tokens and proxies are not settings: they come from the environment, as Hugging Face's own tools read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, cast

from ...engine.context import CONTEXT
from ...engine.events import Advanced
from ...engine.quality_presets import PRESETS, PUBLISHED
from ...engine.ranges import KV_BITS, MAX_TOKENS, PREDICTORS, RESERVED, SAMPLING, TRANSFERS, Range, Wanted
from ...models.errors import UsageError
from ...models.quantities import memory_size
from ..actions import OWN

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,2})?(,cuda:\d{1,2})*|sim:\S+")
_SHOWN = 60  # characters of a wrong value quoted in an error


@dataclass(frozen=True, slots=True)
class Text:
    """A kind of text: its description, and a test. `obvious`: the description need not be shown in advance."""

    words: str
    check: Callable[[str], object]
    obvious: bool = False


def disk_size(text: str) -> int:
    """Bytes of a size as `memory_size` reads it, or 0 for "0". Raises UsageError: something else."""
    return 0 if text.strip() == "0" else memory_size(text) or 0


def _is_disk_size(text: str) -> bool:
    try:
        return disk_size(text) >= 0
    except UsageError:
        return False


def _is_size(text: str) -> bool:
    try:
        return memory_size(text) is not None
    except UsageError:
        return False


def _is_placement(text: str) -> bool:
    try:
        return bool(Wanted.of(text).kind)
    except UsageError:
        return False


_LINE = Text(
    "text in quotes, not empty and without control characters", lambda text: text and text.isprintable(), obvious=True
)
_MAYBE_LINE = Text("text in quotes, without control characters", str.isprintable, obvious=True)
_ANY_TEXT = Text('text in quotes, such as "this"', lambda _text: True, obvious=True)
_A_DEVICE = Text("auto, cpu, cuda, a card such as cuda:1, or several such as cuda:0,cuda:1", _DEVICE.fullmatch)
_A_SIZE = Text("a size such as 10gb", _is_size)
_A_DISK_SIZE = Text("a size such as 4gb, or 0", _is_disk_size)
_A_PLACEMENT = Text("auto, pool, a pool's size such as pool:4gb, static or cpu", _is_placement)

THINKING = ("fold", "show", "off")
"""What can be done with a model's thinking."""

Values = Range | tuple[str, ...] | Text | None


@dataclass(frozen=True, slots=True)
class SettingKey:
    """How one setting is written, checked and explained.

    Attributes:
        name: in the file, with its table, such as "sampling.top_p". field: in `Settings`.
        default: None where the model or the machine decides, as `unset` says. example: the value shown in that case.
        description: one or two sentences. among: the values that it may have; None: true or false.
    """

    name: str
    field: str
    default: Any
    description: str
    unset: str
    example: Any
    among: Values

    @property
    def values(self) -> str:
        """The values that it accepts, in words."""
        match self.among:
            case None:
                return "true or false"
            case tuple():
                return f"one of {', '.join(self.among)}"
            case Text(words):
                return words
            case Range():
                return str(self.among)

    @property
    def hint(self) -> str:
        """A sentence about `values`, or "" if they are obvious."""
        return "" if isinstance(self.among, Text) and self.among.obvious else f"Values: {self.values}."

    def converted(self, value: Any, *, typed: bool = False) -> Any:
        """`value`, from the file or `typed` by the user, converted to the type of this setting.

        Raises:
            ValueError: it cannot be this setting.
        """
        import msgspec  # takes time, and without a settings file nothing needs it

        match self.among:
            case Range():
                return self.among.converted(value, typed=typed)
            case Text(_, check):
                kind: Any = str
            case None:
                kind, check = bool, None
            case choices:
                kind, check = Literal[choices], None
                if type(value) is int:
                    value = str(value)  # 8 without quotes is "8"
        value = msgspec.convert(value, kind, strict=not typed)
        if check is not None and not check(value):
            raise ValueError(value)
        return value

    def trouble(self, value: Any) -> str:
        """What is wrong with `value`, as the end of a sentence: "must be a number from 0 to 5"; or ""."""
        try:
            self.converted(value)
        except ValueError:
            return f"must be {self.values}"
        return ""

    def typed(self, text: str) -> Any:
        """The value that the user means by `text`; None if it is blank.

        Raises:
            UsageError: it cannot be this setting.
        """
        text = text.strip()
        if not text:
            return None
        try:
            return self.converted(text, typed=True)
        except ValueError as error:
            raise refused(self.name, text, f"must be {self.values}") from error


def refused(name: str, value: object, trouble: str) -> UsageError:
    """Why the setting `name` cannot be `value`; `trouble` completes a sentence that begins with the name."""
    if not trouble.startswith("must be"):
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
    name: str, default: Any, description: str, among: Values = None, *, unset: str = "", example: Any = None
) -> Any:
    shown = default if example is None else example
    return field(default=default, metadata={"key": SettingKey(name, "", default, description, unset, shown, among)})


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
        _LINE,
    )
    preset: str | None = _key(
        "chat.preset",
        None,
        "The quality preset of new chats, from the most exact to the fastest, or a rule as published.",
        tuple(preset.name for preset in (*PRESETS, *PUBLISHED)),
        unset="Balanced, or the model's own",
        example="Balanced",
    )
    device: str = _key("chat.device", "auto", "Where the model runs.", _A_DEVICE)
    vram: str | None = _key(
        "chat.vram",
        None,
        "The most GPU memory to use.",
        _A_SIZE,
        unset="all that is free when the model loads",
        example="10gb",
    )
    max_tokens: int = _key("chat.max_tokens", 512, "Maximum length of an answer, in tokens.", MAX_TOKENS)
    system_prompt: str = _key("chat.system_prompt", "", "The system prompt of new chats.", _ANY_TEXT)
    persona: str = _key(
        "chat.persona", "", "The persona of new chats: the name of one of the personas below.", _MAYBE_LINE
    )
    thinking: str = _key(
        "chat.thinking",
        "fold",
        "What models think before they answer: fold shows one line that opens, show all of it; off asks for answers "
        "without thinking, which not every model can give.",
        THINKING,
    )
    temperature: float | None = _key(
        "sampling.temperature",
        None,
        "How much answers vary; 0 always takes the most likely token.",
        SAMPLING["temperature"],
        unset=_MODELS_OWN.format(0.7),
        example=0.7,
    )
    top_k: int | None = _key(
        "sampling.top_k",
        None,
        "Sample from this many of the most likely tokens; 0 is off.",
        SAMPLING["top_k"],
        unset=_MODELS_OWN.format(0),
        example=0,
    )
    top_p: float | None = _key(
        "sampling.top_p",
        None,
        "Sample from the most likely tokens whose probabilities add up to this; 1 is off.",
        SAMPLING["top_p"],
        unset=_MODELS_OWN.format(1),
        example=1.0,
    )
    min_p: float | None = _key(
        "sampling.min_p",
        None,
        "Leave out tokens with less than this share of the top token's probability; 0 is off.",
        SAMPLING["min_p"],
        unset=_MODELS_OWN.format(0.05),
        example=0.05,
    )
    repetition_penalty: float | None = _key(
        "sampling.repetition_penalty",
        None,
        "Values above 1 make repeated words less likely; 1 is off.",
        SAMPLING["repetition_penalty"],
        unset=_MODELS_OWN.format(1),
        example=1.0,
    )
    theme: str = _key("screen.theme", "floe", "The colours; the settings page lists the themes.", _LINE)
    panel: str = _key("screen.panel", "full", "The live panel when floe-chat starts.", ("full", "compact", "hidden"))
    save_history: bool = _key("history.save", True, "Save chats on this machine.")
    states: str = _key(
        "history.states",
        "4gb",
        "Disk space for what models computed of saved chats, at most a quarter of what is free: after a restart a chat "
        "goes on without its text being read again. 0 keeps nothing.",
        _A_DISK_SIZE,
    )
    models_folder: str | None = _key(
        "folders.models",
        None,
        "The folder of packed models.",
        _LINE,
        unset="in floe-chat's data folder; `floe-chat paths` shows it",
        example="/data/models",
    )
    placement: str = _key(
        "advanced.placement",
        "auto",
        "Where experts are if they do not all fit GPU memory: pool keeps the rows used most there, as many as fit or "
        "pool:4gb; static keeps whole layers there, cpu none; auto takes the fastest by estimate.",
        _A_PLACEMENT,
    )
    predictor: str = _key(
        "advanced.predictor",
        "auto",
        "How the weights that the next layer needs are predicted, to prefetch them: gate uses its router, learned a "
        "predictor that was trained while packing, partial the next layer's attention too; none prefetches nothing, "
        "and auto does so in the layers where the first answers show that it pays.",
        PREDICTORS,
    )
    cpu_share: bool = _key(
        "advanced.cpu_share", True, "Let the CPU compute a share of the weights that are not in GPU memory."
    )
    transfer: str = _key(
        "advanced.transfer",
        "auto",
        "How weights reach the GPU: staged copies them in chunks, in place lets the GPU read RAM, auto uses whichever "
        "was measured to be faster.",
        TRANSFERS,
    )
    kv_bits: str = _key(
        "advanced.kv_bits",
        "auto",
        "Bits of the chat's keys and values: 8 take half the memory of 16 and are slightly less exact; auto takes 8 "
        "where memory is short.",
        KV_BITS,
    )
    context: int = _key(
        "advanced.context",
        CONTEXT,
        "Tokens of a chat that GPU memory is reserved for. A longer chat takes memory from the weights, and then RAM.",
        RESERVED,
    )
    draft: bool = _key(
        "advanced.draft",
        True,
        "Guess further words, by what a text repeats or by a model's drafting head, and compute them together where "
        "that is faster. Answers stay the same.",
    )
    drafter: str | None = _key(
        "advanced.drafter",
        None,
        "A smaller packed model of the same tokenizer that guesses further words, in RAM: its name or folder. It is "
        "left out where a model has another tokenizer.",
        _LINE,
        unset="what a text repeats, or a model's drafting head",
        example="qwen3-30b-a3b",
    )
    keys: Mapping[str, str] = field(default_factory=lambda: {name: action.keys for name, action in OWN.items()})
    personas: Mapping[str, Persona] = field(default_factory=dict[str, Persona])

    @property
    def advanced(self) -> Advanced:
        """Those of the table [advanced], most of which matter for models larger than the GPU's memory."""
        memory = self.predictor, self.cpu_share, self.transfer, self.kv_bits, self.context, self.placement
        return Advanced(*memory, self.drafter if self.draft and self.drafter else self.draft)

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


KEYS: tuple[SettingKey, ...] = tuple(
    replace(cast(SettingKey, one.metadata["key"]), field=one.name) for one in fields(Settings) if "key" in one.metadata
)
"""Every plain setting, in the order of the file."""

_OPTIONS = {"system": "system_prompt"}  # where the command line uses another name for a setting


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
