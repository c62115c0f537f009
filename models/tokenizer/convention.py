"""How a model marks its thinking and its calls, found out from its chat template and its tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .calls import FORMS, CallForm
from .chat_template import ChatTemplate
from .parts import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START, ChannelParser, Mark, Parser, TagParser

_ROLE = "thought"  # what Gemma 4 writes after its first tag, as text
_GEMMA = f"<|channel>{_ROLE}", "<channel|>"
_TAGS = ("<think>", "</think>"), ("[THINK]", "[/THINK]"), _GEMMA
_CHANNELS = (CHANNEL, MESSAGE, START, CONSTRAIN, END, RETURN, CALL)
_FIELDS = "reasoning_content", "reasoning", "thinking"  # of a message: names that published templates read
_OFF: Mapping[str, Any] = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
_ON: Mapping[str, Any] = {"enable_thinking": True}  # Gemma 4 thinks only if it is asked to; others do without it


@dataclass(frozen=True, slots=True)
class Convention:
    """One model's way.

    Attributes:
        channels: messages with channels, as in harmony. tags: around thinking; None: it has none, or channels.
        forms: of calls. field: where the template looks for an earlier answer's thinking; "": nowhere.
        off: the template's variables that ask for no thinking, or for less. on: those that ask for it.
    """

    channels: bool
    tags: tuple[str, str] | None
    forms: tuple[CallForm, ...]
    field: str
    off: Mapping[str, Any]
    on: Mapping[str, Any]

    @classmethod
    def of(cls, source: str, template: ChatTemplate, tokens: Collection[str]) -> Convention:
        """Found in a template, its `source`, and the added tokens of the tokenizer."""
        channels = CHANNEL in source and {CHANNEL, MESSAGE} <= set(tokens)
        tags = next((tags for tags in _TAGS if any(tag in source or tag in tokens for tag in tags)), None)
        forms = tuple(form for form in FORMS if form.open in source or form.open in tokens)
        # Harmony drops the thinking of finished answers, and some of its templates take such an answer for thinking.
        field = "" if channels else next((name for name in _FIELDS if name in template.fields), "")
        thinks = channels or tags is not None
        names = template.names if thinks else ()
        off, on = ({name: value for name, value in each.items() if name in names} for each in (_OFF, _ON))
        return cls(channels, None if channels else tags, () if channels else forms, field, off, on)

    @property
    def marks(self) -> frozenset[str]:
        """Tokens that are kept where special tokens are dropped."""
        if self.channels:
            return frozenset(_CHANNELS)
        tags = (tag.removesuffix(_ROLE) for tag in self.tags or ())
        return frozenset((*tags, *(m for form in self.forms for m in (form.open, form.close, *form.marks))))

    def opened(self, prompt: str) -> bool:
        """Whether a prompt ends inside the thinking."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags[0])

    def closed(self, prompt: str) -> bool:
        """Whether a prompt ends after the thinking."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags[1])

    def parser(self, *, opened: bool, calls: CallForm | None = None) -> Parser:
        """For an answer to a prompt that has `opened` its thinking, or not. `calls`: tools may be called, also in this
        form, and calls come in pieces.
        """
        if self.channels:
            return ChannelParser(live=calls is not None)
        forms = self.forms if calls is None or calls in self.forms else (*self.forms, calls)
        return TagParser(self.tags, forms, opened=opened, live=calls is not None)

    def begun(self, thought: str, answer: str, *, opened: bool) -> list[str]:
        """The beginning of an answer as the model would have written it: after its thinking, if there is an answer."""
        if self.channels:
            thinking = [Mark(CHANNEL), "analysis", Mark(MESSAGE), thought]
            final = [Mark(CHANNEL), "final", Mark(MESSAGE), answer]
            between = [Mark(END), Mark(START), "assistant"] if thought and answer else []
            return [*(thinking if thought else ()), *between, *(final if answer else ())]
        if self.tags is None or not (thought or (opened and answer)):
            return [answer] if answer else []
        first, last = map(Mark, self.tags)
        thinking = [*(() if opened else (first, "\n")), thought]
        apart = "" if self.tags == _GEMMA else "\n\n"
        return [*thinking, *(("\n", last, apart, answer) if answer else ())]
