"""How models write that they call a tool, and reading it: names and arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Named = tuple[str, str]  # a function's name, and its arguments as a JSON object


@dataclass(frozen=True, slots=True)
class CallForm:
    """A way to write calls.

    Attributes:
        open, close: the marks around them; without `close` they end with the answer.
        marks: others between them. may_be: matches what can become calls. read: raises ValueError where it is none.
        head: finds the beginning of a call up to its arguments, where those are a JSON object; its groups are the name.
    """

    open: str
    close: str
    marks: tuple[str, ...]
    may_be: re.Pattern[str]
    read: Callable[[str], list[Named]]
    head: re.Pattern[str]


def arguments_of(text: str) -> str:
    """A call's arguments. Raises ValueError: they are no JSON object."""
    return _arguments(json.loads(text))


def _arguments(found: Any) -> str:
    if isinstance(found, str):  # JSON in JSON, as OpenAI writes it
        found = json.loads(found)
    if not isinstance(found, dict):
        raise ValueError("Its arguments are no JSON object.")
    return json.dumps(found, ensure_ascii=False)


def _named(found: Any) -> Named:
    name = found.get("name") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        raise ValueError("It names no function.")
    return name, _arguments(found.get("arguments", found.get("parameters", {})))


def _in_tags(body: str) -> list[Named]:
    """Hermes and Qwen: an object; Qwen3-Coder: <function=…>; GLM: a name, then keys and values."""
    body = body.strip()
    if body.startswith("{"):
        return [_named(json.loads(body))]
    if (function := re.fullmatch(r"<function=([^>]+)>(.*?)(?:</function>)?", body, re.DOTALL)) is not None:
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
        return [(function[1], _arguments({key: _value(value) for key, value in pairs}))]
    name, _tag, _rest = body.partition("<arg_key>")
    if not re.fullmatch(r"[\w.-]+", name := name.strip()):
        raise ValueError("It names no function.")
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    return [(name, _arguments({key.strip(): _value(value) for key, value in pairs}))]


def _value(text: str) -> Any:
    """A value: JSON, or else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _in_list(body: str) -> list[Named]:
    """Mistral: a list of objects, or NAME[ARGS]{…} once or several times."""
    found: list[Named] = []
    for each in filter(None, map(str.strip, body.split("[TOOL_CALLS]"))):
        if each.startswith("["):
            listed = json.loads(each)
            found += [_named(item) for item in listed]
        else:
            name, _mark, arguments = each.replace("[CALL_ID]", "[ARGS]", 1).partition("[ARGS]")
            found.append((name.strip(), arguments_of(arguments.rpartition("[ARGS]")[2])))
    if not all(name for name, _ in found) or not found:
        raise ValueError("It names no function.")
    return found


def _in_bars(body: str) -> list[Named]:
    """DeepSeek: a type, a name and fenced JSON; or a name and JSON."""
    found: list[Named] = []
    for each in re.findall(f"{_BEGIN}(.*?){_END}", body, re.DOTALL):
        name, _mark, arguments = each.partition(_SEP)
        if (fenced := re.fullmatch(r"\s*(\S+)\s*```(?:json)?\s*(.*?)\s*```\s*", arguments, re.DOTALL)) is not None:
            name, arguments = fenced[1], fenced[2]
        found.append((name.strip(), arguments_of(arguments)))
    if not all(name for name, _ in found) or not found:
        raise ValueError("It names no function.")
    return found


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_HEAD = r'\{\s*"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
_LIST_HEAD = re.compile(_HEAD + r"|(?<![\w.-])([\w.-]{1,256})(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
_BARS_HEAD = re.compile(
    rf"{_BEGIN}(?:[^<\s]*{_SEP}\s*([^\s<{{]{{1,256}})\s*```(?:json)?\s*(?=\{{)|([^\s<{{]{{1,256}})\s*{_SEP}\s*(?=\{{))"
)
_LISTED = re.compile(r"\s*(\[.*|[\w.-]*(\[.*)?)", re.DOTALL)

FORMS = (
    CallForm(
        "<tool_call>",
        "</tool_call>",
        ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        re.compile(r"\s*([{<].*|[\w.-]*\s*(<.*)?)", re.DOTALL),
        _in_tags,
        re.compile(_HEAD),
    ),
    CallForm("[TOOL_CALLS]", "", ("[ARGS]", "[CALL_ID]"), _LISTED, _in_list, _LIST_HEAD),
    CallForm("<|tool_call|>", "", (), _LISTED, _in_list, _LIST_HEAD),
    CallForm(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", (_BEGIN, _SEP, _END), re.compile(".*", re.DOTALL)),
        _in_bars,
        _BARS_HEAD,
    ),
)
