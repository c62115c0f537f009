"""Tools in a conversation: as a model's template writes them, or else in plain words and in Hermes' form.

What a template can write is found out by trying it: which functions there are, calls, and what a function returned.
Whatever it cannot is written into the texts of the conversation.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import FloeError, UsageError
from .call_styles import CHANNELS, HERMES, STYLES, CallStyle, style_in
from .chat_template import TooMuchError
from .convention import Convention

Message = Mapping[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message]], str]
Way = Literal["own", "general"]

_NAME, _WORD = "look_at_floe", "floe-chat looks"
_ID = re.compile(r"[A-Za-z0-9]{9}")
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": _WORD, "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "?"}


@dataclass(frozen=True, slots=True)
class ToolTalk:
    """How one model's conversations have tools.

    Attributes:
        style: in which calls are written. lists, answers: whether the template writes functions, and what they
            returned. calls: how it takes a message with calls: whether the arguments are JSON text, and what stands
            for no content; None: it writes no calls. system: whether it takes a system message. short: whether calls'
            ids have to have nine letters.
    """

    style: CallStyle
    lists: bool
    answers: bool
    calls: tuple[bool, str | None] | None
    system: bool
    short: bool

    @property
    def way(self) -> Way:
        """Whether functions and calls are written as the model learned it."""
        return "own" if self.lists and self.calls is not None and self.answers else "general"

    @classmethod
    def of(cls, render: Render, convention: Convention) -> ToolTalk:
        """Found out by rendering."""
        system = _WORD in _tried(render, [{"role": "system", "content": _WORD}, _ASKED])
        if not (convention.channels or convention.forms):  # whatever its template writes, its calls cannot be read
            return cls(HERMES, False, False, None, system, False)
        calls, written = _calls(render)
        style = CHANNELS if convention.channels else style_in(written, _NAME, convention.forms)
        style = style or next(style for style in STYLES if style.form in convention.forms)
        answered = [
            _ASKED,
            _calling(calls),
            {"role": "tool", "content": _WORD, "tool_call_id": "abcdefghi", "name": _NAME},
        ]
        lists = _NAME in _tried(render, [_ASKED], [_PROBE_TOOL])
        answers = calls is not None and _WORD in _tried(render, answered)
        short = any(form.open == "[TOOL_CALLS]" for form in convention.forms)
        return cls(style, lists, answers, calls, system, short)

    def written(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message],
        plain: Callable[[Message], dict[str, Any]],
        safe: Callable[[str], str],
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools for the template.

        Args:
            messages: {"role", "content"}, of an answer its "calls" ({"id", "name", "arguments"}), and of what a
                function returned the call's id, "answers". plain: makes a message without those for the template.
                safe: makes text safe that the model did not write.

        Raises:
            UsageError: a call's arguments are no JSON object.
        """
        names = {call["id"]: call["name"] for message in messages for call in message.get("calls") or ()}
        found = list[dict[str, Any]]()
        returned = False  # whether the last one is what a function returned, as the user's
        for message in messages:
            new = plain(message)
            if message["role"] == "tool" and not self.answers:
                new = {"role": "user", "content": f"<tool_response>\n{new['content']}\n</tool_response>"}
            elif message["role"] == "tool":
                name = names.get(message["answers"])
                new |= {"tool_call_id": self._id(message["answers"])} | ({"name": safe(name)} if name else {})
            elif message.get("calls"):
                new = self._calling(new, message["calls"], safe)
            if returned and new["role"] == "user":
                found[-1]["content"] += "\n" + new["content"]
            else:
                found.append(new)
            returned = new["role"] == "user" and (returned or message["role"] == "tool")
        safe_tools = [_deep(tool, safe) for tool in tools]
        return (found, safe_tools) if self.lists or not tools else (self._described(found, safe_tools), [])

    def _calling(self, new: dict[str, Any], calls: Sequence[Message], safe: Callable[[str], str]) -> dict[str, Any]:
        """A message with calls."""
        try:
            if self.calls is None:
                written = self.style.write([(call["name"], call["arguments"]) for call in calls], safe)
                return {**new, "content": "\n".join(filter(None, (new["content"], written)))}
            as_text, empty = self.calls
            made = [self._call(call, safe, as_text=as_text) for call in calls]
        except (ValueError, RecursionError) as error:
            raise UsageError("A call's arguments are no JSON object", str(error)[:300], "Send them as JSON.") from None
        return {**new, "content": new["content"] or empty, "tool_calls": made}

    def _call(self, call: Message, safe: Callable[[str], str], *, as_text: bool) -> dict[str, Any]:
        arguments: Any = json.loads(call["arguments"])
        if not isinstance(arguments, dict):
            raise ValueError("It is JSON of another kind.")
        given = safe(call["arguments"]) if as_text else _deep(arguments, safe)
        function = {"name": safe(call["name"]), "arguments": given}
        return {"id": self._id(call["id"]), "type": "function", "function": function}

    def _id(self, given: str) -> str:
        if not self.short or _ID.fullmatch(given):
            return re.sub(r"[^\w.:-]", "", given)
        return hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]

    def _described(self, messages: list[dict[str, Any]], tools: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages, with the functions in words in front."""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        example = self.style.write([("NAME", '{"ARGUMENT": "VALUE"}')])
        text = (
            "# Tools\n\nYou may call one or more functions to assist with the user query. You are provided with "
            f"function signatures within <tools></tools> XML tags:\n<tools>\n{listed}\n</tools>\n\n"
            f"For each function call, answer with its name and its arguments in this form:\n{example}"
        )
        if self.system:
            first = messages[:1] if messages and messages[0]["role"] == "system" else []
            content = "\n\n".join((*(message["content"] for message in first), text))
            return [{"role": "system", "content": content}, *messages[len(first) :]]
        at = next((at for at, message in enumerate(messages) if message["role"] == "user"), 0)
        asked = messages[at : at + 1]
        content = "\n\n".join((text, *(message["content"] for message in asked)))
        return [*messages[:at], {"role": "user", "content": content}, *messages[at + 1 :]]


def _calls(render: Render) -> tuple[tuple[bool, str | None] | None, str]:
    """What the template takes of a message with calls, and what it writes."""
    nones = _tried(render, [_ASKED]).count("None")
    for calls in ((False, None), (False, ""), (True, None), (True, "")):
        text = _tried(render, [_ASKED, _calling(calls)])
        wrong = text.count("None") > nones or "'floe_key'" in text or r"\"floe_key" in text
        if _NAME in text and "floe_value" in text and not wrong:
            return calls, text
    return None, ""


def _calling(calls: tuple[bool, str | None] | None) -> Message:
    as_text, content = calls or (False, "")
    arguments: Any = {"floe_key": "floe_value"}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if as_text else arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def _tried(render: Render, messages: Sequence[Message], tools: Sequence[Message] = ()) -> str:
    """What a template makes of it; "" where it refuses or fails."""
    try:
        return render(messages, tools)
    except (FloeError, TooMuchError):
        return ""


def _deep(value: Any, safe: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return safe(value)
    if isinstance(value, dict):
        return {safe(name): _deep(each, safe) for name, each in value.items()}
    return [_deep(each, safe) for each in value] if isinstance(value, list) else value
