"""The records of the history, as small frozen dataclasses, independent of the database.

Times are whole milliseconds since 1970, UTC. Texts are unchanged: a screen or a terminal gets them through `printable`
(`app/text/plain_text.py`).
"""

from __future__ import annotations

import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

from ...engine.events import Rule, Sampling, Stats

Role = Literal["user", "assistant"]
MessageState = Literal["complete", "streaming", "stopped", "failed"]
"""`streaming` while it is written, `stopped` when the person or a crash ended it, `failed` when an error did."""

TITLE_LENGTH = 60
LATEST = 253_402_300_799_999
"""The end of the year 9999, in milliseconds since 1970; no time here is later."""
MOST = 1e12
"""The most that any figure of an answer can be: tokens, tokens per second, seconds."""
_RANDOM_BITS = 20


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """The setup that answers a conversation.

    Attributes:
        model: as `--model` takes it. preset: None is the model's own default.
        system_prompt: the one in force. persona: the name it came under, or "".
        quality: set by hand, instead of the preset; None: the preset is in force.
    """

    model: str = ""
    preset: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    system_prompt: str = ""
    persona: str = ""
    quality: Rule | None = None


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """The figures under an answer; None if not measured.

    `stop_reason` is the engine's ("stop", "length", "context", "cancelled"). `virtual`: the
    times are those of a device that is not there. `thought_tokens`: how many of the answer's tokens were thinking.
    """

    tokens: int
    tokens_per_s: float | None
    first_token_s: float | None
    stop_reason: str
    virtual: bool = False
    thought_tokens: int = 0

    @property
    def is_sound(self) -> bool:
        """Whether the figures are possible."""
        if not isinstance(self.stop_reason, str) or not isinstance(self.virtual, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            return False
        rates = (rate for rate in (self.tokens_per_s, self.first_token_s) if rate is not None)
        counts = (self.tokens, self.thought_tokens)
        return all(type(count) is int for count in counts) and all(
            type(figure) in (int, float) and 0 <= figure <= MOST for figure in (*counts, *rates)
        )

    @classmethod
    def of(cls, stats: Stats, reason: str, thought_tokens: int = 0) -> AnswerStats:
        """From the engine's last `Stats` of an answer."""
        virtual = stats.rows is not None and stats.rows.virtual
        return cls(stats.new_tokens, stats.decode_tps_mean, stats.first_token_s, reason, virtual, thought_tokens)


@dataclass(frozen=True, slots=True)
class Attachment:
    """An attached text file: its name without folders, and its whole text."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Unsent:
    """Unsent or queued text of the user, and its attachments."""

    text: str
    files: tuple[Attachment, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One tree of messages and the branch that is shown.

    Attributes:
        id: as every call takes it. number: short and stable, for people and the command line; never reused.
        title: the user's, or "". head: the last message of the branch that is shown; None while empty.
    """

    id: int
    number: int
    title: str
    created: int
    updated: int
    setup: ChatSetup
    head: int | None


@dataclass(frozen=True, slots=True)
class Summary:
    """A line of the list of conversations.

    Attributes:
        title: the user's, or "". first_line: of the first question, used as its name if there is no title.
        messages: on the branch that is shown.
    """

    id: int
    number: int
    title: str
    first_line: str
    model: str
    created: int
    updated: int
    messages: int

    @property
    def name(self) -> str:
        """What to call it."""
        return self.title or shortened(self.first_line) or "Empty conversation"


@dataclass(frozen=True, slots=True)
class Message:
    """A question or an answer.

    Attributes:
        parent: the message before it; None begins the conversation. position: how many come before it on its branch.
        sibling, siblings: it is number `sibling` (from 1, by age) of all `siblings` that follow the same parent.
        model, preset: of the answer; "" for questions. stats: None for questions, and for answers that a crash cut off.
        thought: what the model thought before the answer's text, or "".
    """

    id: int
    conversation: int
    parent: int | None
    position: int
    role: Role
    text: str
    state: MessageState
    created: int
    model: str
    preset: str
    stats: AnswerStats | None
    attachments: tuple[Attachment, ...]
    sibling: int
    siblings: int
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Tree:
    """A conversation with its messages, parents before children, for export, import and copies."""

    conversation: Conversation
    messages: tuple[Message, ...]

    @property
    def name(self) -> str:
        """What to call it."""
        question = next((message.text for message in self.messages if message.role == "user"), "")
        return self.conversation.title or shortened(first_line(question)) or "Empty conversation"


@dataclass(frozen=True, slots=True)
class Hit:
    """A place that a search found.

    Attributes:
        updated: when the conversation last changed, in milliseconds since 1970.
        message: None where the title matched. position: of the message on its branch.
        shown: whether it is on the branch that the conversation shows; if not, `History.switch` goes there.
        snippet: the text around it, in one line. marks: (start, end) of what matched, in characters of `snippet`.
    """

    conversation: int
    number: int
    name: str
    updated: int
    message: int | None
    position: int
    shown: bool
    snippet: str
    marks: tuple[tuple[int, int], ...]


def as_text(value: object) -> str:
    """A column as text: SQLite lets another program store anything there."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value if isinstance(value, str) else "" if value is None else str(value)


def as_whole(value: object) -> int:
    """A column as a whole number; 0 for anything else."""
    return value if isinstance(value, int) else 0


def first_line(text: str) -> str:
    """The first line of `text` that is not blank, or ""."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def shortened(line: str) -> str:
    """`line` cut at a word, with an ellipsis, for use as a title."""
    if len(line) <= TITLE_LENGTH:
        return line
    cut = line[: TITLE_LENGTH - 1]
    return (cut.rsplit(" ", 1)[0] if " " in cut[TITLE_LENGTH // 2 :] else cut) + "…"


def now() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000


_last_id = 0
_id_lock = threading.Lock()


def new_id(after: int = 0) -> int:
    """A unique number for a conversation or message, above `after` and all that this process has drawn before.

    Made without asking the database, so that nothing waits for it: the time, then 20 random bits in case another
    process draws one in the same millisecond. So a message's id is above its parent's, and siblings are in order of
    age.
    """
    global _last_id
    with _id_lock:
        _last_id = max((now() << _RANDOM_BITS) + secrets.randbits(_RANDOM_BITS), _last_id + 1, after + 1)
        return _last_id


def time_of(identity: int) -> int:
    """When `new_id` drew it, in milliseconds since 1970."""
    return identity >> _RANDOM_BITS
