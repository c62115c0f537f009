"""What the screen, the lines and `ask` use of an engine: messages in, text out, wherever it computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ...engine.events import Event, Rule, Sampling
from ...models.errors import FloeError
from ..settings.servers import SavedServer

if TYPE_CHECKING:
    from ...engine.quality_presets import Preset
    from ...models.pack.dial_loss import DialLoss

UNKNOWN_WINDOW = 1 << 17
"""Tokens that are read of a chat where a server does not say how many it takes."""


Choice = Path | SavedServer
"""What can answer: the model in a folder, or a server."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool: `arguments` are a JSON object, `number` is by what it is answered."""

    number: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PromptTurn:
    """One turn: `role` is "system", "user", "assistant" or "tool"; `text` is what was written, `thought` what an
    answer's model thought before, `calls` what it called. `answers`: the number of the call that returned this.
    """

    role: str
    text: str
    thought: str = ""
    calls: tuple[Call, ...] = ()
    answers: str = ""


@dataclass(frozen=True, slots=True)
class Tools:
    """Functions that an answer may call.

    Attributes:
        listed: {"type": "function", "function": {"name", "description", "parameters"}}. choice: "auto", "required", or
            "named": the function `named`. parallel: whether there may be several calls. strict: names of functions
            whose arguments have to follow their schema.
    """

    listed: tuple[Mapping[str, Any], ...] = ()
    choice: Literal["auto", "required", "named"] = "auto"
    named: str = ""
    parallel: bool = True
    strict: tuple[str, ...] = ()


NO_TOOLS = Tools()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of the answer to `request`, safe to show: control characters are already replaced."""

    request: int
    text: str


@dataclass(frozen=True, slots=True)
class ThoughtDelta:
    """More of what the model thinks before the answer to `request`, as safe to show; `tokens` of the model's, 0 where
    they are not known.
    """

    request: int
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class CallDelta:
    """More of a call of a tool in the answer to `request`: `arguments` go on, until there are no `more`.

    Attributes:
        text: as the model wrote it, with the marks around it. trouble: why the call is broken.
    """

    request: int
    name: str
    arguments: str
    text: str
    more: bool = False
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        messages: the last one is the user's. max_new_tokens: of the answer; thinking before it does not count.
        answer, thought: where the answer goes on. conversation, alike: see `Generate`.
    """

    messages: Sequence[PromptTurn]
    sampling: Sampling
    max_new_tokens: int
    answer: str = ""
    conversation: int = 0
    thought: str = ""
    alike: bool = True


@dataclass(frozen=True, slots=True)
class Submitted:
    """A prompt was made of a question, and the engine has it.

    `prompt_tokens` is the whole prompt's length, None where only a server can count it; `dropped` counts the oldest
    messages that no longer fit the window.
    """

    request: int
    prompt_tokens: int | None
    dropped: int


@dataclass(frozen=True, slots=True)
class Refused:
    """No prompt can be made of a question: this is all that comes of the request."""

    request: int
    error: FloeError


@dataclass(frozen=True, slots=True)
class Cost:
    """A preset and its quality loss as measured on this pack; None where `floe-chat tune` has not run.

    Attributes:
        kl: mean KL divergence, nats. bytes_per_token: of experts' weights read.
        text: what `kl` was measured on, "" where that is not known. tokens: how many of it were predicted.
        rounded: whether `kl` is from the 16-bit model, and counts what rounding costs; else from the pack itself.
    """

    preset: Preset
    kl: float | None
    bytes_per_token: float | None
    text: str = ""
    tokens: int = 0
    rounded: bool = True


@dataclass(frozen=True, slots=True)
class Costs:
    """What quality costs: each preset, best first, and the dials of a quality set by hand; None: not measured.
    demo: the demo model's dials, where the pack's own were not measured. unskipped: in words, in how many layers no
    neuron is skipped whatever the quality; "" where there is none.
    """

    presets: tuple[Cost, ...] = ()
    dials: DialLoss | None = None
    demo: DialLoss | None = None
    unskipped: str = ""


@dataclass(frozen=True, slots=True)
class Spelled:
    """What a token writes, which may be a part of a character, and its probability as a natural logarithm."""

    written: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Likely:
    """The next token of the answer to `request`, before its text, and those that were the likeliest."""

    request: int
    token: Spelled
    likeliest: tuple[Spelled, ...]


Update = Event | Submitted | Refused | TextDelta | ThoughtDelta | CallDelta | Likely


class Client(Protocol):
    """An engine, here (`ChatClient`) or on a server (`RemoteClient`), or one after the other (`Engines`).

    Usage: `start()`, then `poll()` until `Loaded`, `submit(...)`, then `poll()` until `Finished` or `Failed`.
    """

    @property
    def think(self) -> bool:
        """False asks the model for answers without thinking."""
        ...

    @think.setter
    def think(self, wanted: bool) -> None: ...

    @property
    def chosen(self) -> Choice:
        """What answers, or will once it is loaded."""
        ...

    @property
    def reference(self) -> str:
        """The name under which a chat saves what answers it."""
        ...

    @property
    def remote(self) -> str:
        """The host that everything is sent to; "" if nothing leaves this machine."""
        ...

    @property
    def privacy(self) -> str:
        """What is sent where, in a sentence; "" if nothing leaves this machine."""
        ...

    @property
    def thinking(self) -> str:
        """Whether the model thinks before it answers: "never", "optional" (`think` decides), "less" (`think` shortens
        it), "always", or "asked" (`think` is passed on, and a server decides).
        """
        ...

    def start(self) -> None:
        """Begin loading in the background; returns at once."""

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on some thread, whenever there is something to `poll`."""

    @property
    def placement(self) -> str:
        """Where experts are to be, see `Advanced.placement`; "" where a server decides."""
        ...

    def open(self, chosen: Choice, placement: str | None = None) -> None:
        """Let `chosen` answer from now on; `poll` reports as after `start`.

        Args:
            placement: of its experts; None: as before.

        Raises:
            UsageError: this engine has no such models, or that is no address of a server.
        """

    def poll(self, timeout: float = 0.0) -> list[Update]:
        """What happened since the last call, in order; waits at most `timeout` seconds for the first."""
        ...

    def submit(self, question: Question) -> Submitted:
        """Ask a question, and wait until a prompt is made of it. Raises FloeError: it cannot be asked."""
        ...

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        """Ask a question `count` times, each answer drawn apart; returns the requests' numbers and never waits.

        From now on the model counts as answering. For each request `Submitted` or `Refused` comes after `begin`.

        Raises:
            FloeError: no model yet, or still busy.
        """
        ...

    def begin(self) -> None:
        """Let the answers that were prepared be computed; never waits."""

    def most_new(self, max_new_tokens: int) -> int:
        """How many tokens an answer of `max_new_tokens` may have with the thinking before it."""
        ...

    def count(self, text: str) -> int | None:
        """How many tokens `text` takes by itself; None where that is not known."""
        ...

    def context_of(self, messages: Sequence[PromptTurn], max_new_tokens: int) -> tuple[int, int] | None:
        """How many tokens a chat takes, and how many of its oldest messages are left out; None if not known."""
        ...

    def costs(self) -> Costs:
        """What presets and dials were measured to cost. Raises FloeError: it cannot be known."""
        ...

    def cancel(self, request: int | None = None) -> None:
        """Stop the answer to a request, or all: nothing comes of it any more but its end."""

    def set_preset(self, preset: str) -> None:
        """Change the quality preset from the next token on."""

    def set_quality(self, rule: Rule) -> None:
        """Set the quality by hand, from the next token on."""

    def close(self) -> None:
        """End it; never hangs."""
