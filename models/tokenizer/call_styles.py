"""How models write calls of tools: as text for a prompt, and as a form that an answer can be held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .calls import FORMS, CallForm, Named

_BEGIN, _END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


@dataclass(frozen=True, slots=True)
class CallStyle:
    """One way to write calls; several may be read as the same `CallForm`.

    Attributes:
        form: by which they are read; None: messages with channels. open, close: around all calls. before, between,
            after: around a call's name and its arguments. apart: between two calls.
        value: before an argument's name, between name and value, and after the value, where arguments are no JSON.
    """

    form: CallForm | None
    open: str
    before: str
    between: str
    after: str
    apart: str
    close: str
    value: tuple[str, str, str] | None = None

    @property
    def repeats(self) -> bool:
        """Whether each call has marks of its own, and another may follow anywhere."""
        return not self.open

    @property
    def trigger(self) -> str:
        """The mark with which calls begin."""
        return self.form.open if self.form is not None else self.before

    def write(self, calls: Sequence[Named], safe: Callable[[str], str] = str) -> str:
        """The text of these calls; `safe` is applied to everything but the marks.

        Raises:
            ValueError: arguments that are no JSON object.
        """
        written = (
            self.before + safe(name) + self.between + self._arguments(text, safe) + self.after for name, text in calls
        )
        return self.open + self.apart.join(written) + self.close

    def _arguments(self, text: str, safe: Callable[[str], str]) -> str:
        if self.value is None:
            return safe(text)
        first, then, last = self.value
        found: Any = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("Its arguments are no JSON object.")
        return "".join(f"{first}{safe(name)}{then}{safe(_plain(value))}{last}" for name, value in found.items())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_TAGS, _LIST, _BARS_LIST, _BARS = FORMS
_NAME, _ARGUMENTS = '{"name": "', '", "arguments": '

HERMES = CallStyle(_TAGS, "", f"<tool_call>\n{_NAME}", _ARGUMENTS, "}\n</tool_call>", "\n", "")
"""What Hermes and Qwen write, and every model whose own way is not known."""
STYLES = (
    HERMES,
    CallStyle(
        *(_TAGS, "", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", ""),
        value=("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    CallStyle(
        *(_TAGS, "", "<tool_call>", "\n", "</tool_call>", "\n", ""),
        value=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    CallStyle(_LIST, "[TOOL_CALLS] [", _NAME, _ARGUMENTS, "}", ", ", "]"),
    CallStyle(_LIST, "", "[TOOL_CALLS]", "[ARGS]", "", "", ""),
    CallStyle(_BARS_LIST, "<|tool_call|>[", _NAME, _ARGUMENTS, "}", ", ", "]"),
    CallStyle(
        *(_BARS, _BARS.open, f"{_BEGIN}function{_SEP}", "\n```json\n", f"\n```{_END}", "\n", _BARS.close),
    ),
    CallStyle(_BARS, _BARS.open, _BEGIN, _SEP, _END, "", _BARS.close),
)
CHANNELS = CallStyle(
    None, "", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", "<|call|>"
)


def style_in(text: str, name: str, forms: Sequence[CallForm]) -> CallStyle | None:
    """The style of one of `forms` in which a text calls the function `name`; None: in none that is known."""
    tight = "".join(text.split())
    for style in STYLES:
        if style.form in forms and "".join((style.before + name + style.between).split()) in tight:
            return style
    return None
