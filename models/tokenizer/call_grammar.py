"""Forms that answers are held to, in the grammar language of the llguidance library: Lark's, with JSON schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .call_styles import CallStyle
from .parts import CHANNEL, END, MESSAGE, START

MOST_CALLS = 16  # in an answer that has to call
_BLANK = r"[ \n]{0,16}"  # between JSON's parts: a weak model would write nothing else
_SPACE = r" ?"  # in calls, which templates write in one line
_AHEAD = r'("\n" | "\n\n")?'  # what models write after their thinking
_MIXES = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "unevaluatedProperties", "if"})
_TEXT = r"/(.|\n)*/"
_Kind = tuple[str, list[str]]  # a kind of answer, and the rules that it needs


class Grammars:
    """Writes forms for one tokenizer.

    Args:
        added: ids of its added tokens: a mark that is one is written by that token alone.
        channels: whether an answer is messages with channels. thinks: whether there may be thinking before it.
    """

    def __init__(self, added: Mapping[str, int], *, channels: bool, thinks: bool) -> None:
        self._added, self._channels, self._ahead = added, channels, _AHEAD if thinks else ""
        self._marks = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or "(?!)")

    def form(self, style: CallStyle, tools: Mapping[str, Any], schema: str) -> str:
        """What an answer is held to from its beginning, or from the end of its thinking; "" for nothing.

        Args:
            tools: see `ChatProcess.whole`. schema: of JSON, "" for any text.
        """
        listed, choice = [tool["function"] for tool in tools["listed"]], tools["choice"]
        kinds = list[_Kind]()
        if choice == "named":
            listed = [function for function in listed if function["name"] == tools["named"]]
        if schema and choice == "auto":
            kinds.append(self._json(json.loads(schema)))
        if listed and (kinds or choice != "auto"):
            several = tools["parallel"] and choice != "named" and not style.repeats  # else see `CallsFirst`
            kinds.append(self._calls(style, listed, several=several))
        return self._answer(kinds) if kinds else ""

    def begun(self, style: CallStyle, tools: Mapping[str, Any]) -> str:
        """What calls are held to after their first mark, where some of the functions are strict; "" for nothing."""
        if not tools["strict"]:
            return ""
        functions = (tool["function"] for tool in tools["listed"])
        listed = [each if each["name"] in tools["strict"] else {"name": each["name"]} for each in functions]
        mark, more = style.trigger, {"open": style.open, "before": style.before}
        name = "open" if style.open else "before"
        rest = replace(style, **{**more, name: more[name].removeprefix(mark)})
        what, rules = self._calls(rest, listed, several=tools["parallel"] and not style.repeats)
        return "\n".join((f"start: {what}", *rules))

    def _json(self, schema: Mapping[str, Any]) -> _Kind:
        final = self._text(f"{CHANNEL}final{MESSAGE}") if self._channels else ""
        return f"{final} json", [f"json: {_json(schema)}"]

    def _calls(self, style: CallStyle, functions: Sequence[Mapping[str, Any]], *, several: bool) -> _Kind:
        """Calls one of these functions, or with `several` more of them."""
        rules = [f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}"]
        for number, function in enumerate(functions):
            arguments, more = self._arguments(f"args_{number}", style, function.get("parameters") or {})
            before, after = self._text(style.before + function["name"] + style.between), self._text(style.after)
            rules += [f"call_{number}: {before} {arguments} {after}", *more]
        others = f"({self._text(style.apart)} call){{0,{MOST_CALLS - 1}}}" if several else ""
        close = "" if style.form is None else self._text(style.close)
        return f"{self._text(style.open)} call {others} {close}", rules

    def _answer(self, kinds: Sequence[_Kind]) -> str:
        what = " | ".join(f"({what})" for what, _ in kinds)
        rules = [rule for _, rules in kinds for rule in rules]
        if not self._channels:
            return "\n".join((f"start: {self._ahead} ({what})", *rules))
        thinks, ends = self._text(f"{CHANNEL}analysis{MESSAGE}"), self._text(f"{END}{START}assistant")
        analysis = f"analysis: {thinks} THOUGHT {ends}", f"THOUGHT: {_TEXT}"
        return "\n".join((f"start: analysis? ({what})", *analysis, *rules))

    def _arguments(self, rule: str, style: CallStyle, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
        """What stands for the arguments, and rules that it needs."""
        if style.value is None:
            return rule, [f"{rule}: {_json(closed({'type': 'object', **schema}), _SPACE)}"]
        first, then, last = style.value
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        order, rules = list[str](), list[str]()
        for number, (name, value) in enumerate((schema.get("properties") or {}).items()):
            each = f"{rule}_{number}"
            order.append(each if name in (schema.get("required") or ()) else f"{each}?")
            content, more = self._value(f"{each}_value", value, shared, last)
            rules += [f"{each}: {self._text(first + name + then)} {content}", *more]
        return " ".join(order), rules

    def _value(self, rule: str, schema: Any, shared: Mapping[str, Any], last: str) -> tuple[str, list[str]]:
        """A value that is no JSON if it is text, up to `last`."""
        given: dict[str, Any] = schema if isinstance(schema, dict) else {}
        if isinstance(choices := given.get("enum"), list) and all(isinstance(each, str) for each in choices):
            return f"({' | '.join(map(_quoted, choices))}) {self._text(last)}", []
        if given.get("type") != "string":
            return f"{rule} {self._text(last)}", [f"{rule}: {_json({**shared, **closed(given)}, _SPACE)}"]
        if self._marks.match(last):
            return f"{rule.upper()} {self._text(last)}", [f"{rule.upper()}: {_TEXT}"]
        return rule, [f"{rule}[lazy]: /(.|\\n)*{_pattern(last)}/"]

    def _text(self, text: str) -> str:
        """A text and the marks in it."""
        found, at = list[str](), 0
        for mark in self._marks.finditer(text):
            found += [_quoted(text[at : mark.start()]), f"<[{self._added[mark[0]]}]>"]
            at = mark.end()
        return " ".join(filter(None, (*found, _quoted(text[at:]))))


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it names, and others only where it says so."""
    found = dict(schema)
    if isinstance(properties := found.get("properties"), dict) and not _MIXES & found.keys():
        found["properties"] = {
            name: closed(each) if isinstance(each, dict) else each for name, each in properties.items()
        }
        if all(name in properties for name in found.get("required") or ()):
            found.setdefault("additionalProperties", False)
    if isinstance(items := found.get("items"), dict):
        found["items"] = closed(items)
    return found


def check(schema: Mapping[str, Any]) -> str:
    """A form of nothing but JSON by a schema, to see whether it can be followed."""
    return f"start: {_json(schema)}"


def _json(schema: Mapping[str, Any], blank: str = _BLANK) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": blank}})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    return re.escape(text).replace("\\\n", "\\n").replace("/", "\\/")
