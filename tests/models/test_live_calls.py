"""Calls in pieces are the same in whichever pieces the text comes, and none of it is lost."""

from __future__ import annotations

import json
import random

import pytest
from floe_chat.models.tokenizer.calls import FORMS
from floe_chat.models.tokenizer.parts import ChannelParser, Mark, Part, TagParser

from .test_chat_parts import parts_of

BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
Told = list[tuple[str, str, str]]
"""Kinds, names and texts or arguments, neighbours of a kind joined; a broken call's kind is "broken"."""

TEXTS: dict[str, tuple[str, Told]] = {
    "two": (
        'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": "é\\"}"}}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call> end',
        [
            ("answer", "", "Well.\n"),
            ("call", "f", '{"a": "é\\"}"}'),
            ("answer", "", "\n"),
            ("call", "g", "{}"),
            ("answer", "", " end"),
        ],
    ),
    "a mark in its text": (
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>{", "b": [1, {"c": {}}]}}</tool_call>b',
        [("call", "f", '{"a": "</tool_call>{", "b": [1, {"c": {}}]}'), ("answer", "", "b")],
    ),
    "a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "x"}, {"name": "g", "arguments": {"c": 1}}]',
        [("call", "f", "{}"), ("call", "g", '{"c": 1}')],
    ),
    "a newer list": (
        '[TOOL_CALLS]f[CALL_ID]x9[ARGS]{"b": 1}[TOOL_CALLS]g[ARGS]{}',
        [("call", "f", '{"b": 1}'), ("call", "g", "{}")],
    ),
    "fenced": (
        f"<｜tool▁calls▁begin｜>{BEGIN}function{SEP}f\n```json\n{{}}\n```{END}\n"
        f'{BEGIN}function{SEP}g\n```json\n{{"a": 1}}\n```{END}<｜tool▁calls▁end｜>',
        [("call", "f", "{}"), ("call", "g", '{"a": 1}')],
    ),
    "bars": (
        f'<｜tool▁calls▁begin｜>{BEGIN}f{SEP}{{"a": 1}}{END}{BEGIN}g{SEP}{{}}{END}<｜tool▁calls▁end｜>',
        [("call", "f", '{"a": 1}'), ("call", "g", "{}")],
    ),
    "the name last": ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("call", "f", '{"a": 1}')]),
    "no JSON": (
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value></tool_call>",
        [("call", "f", '{"a": 1}')],
    ),
    "cut": ('<tool_call>{"name": "f", "arguments": {"a": "b', [("broken", "f", '{"a": "b')]),
    "cut before": ('<tool_call>{"name": "f", "argu', [("answer", "", '<tool_call>{"name": "f", "argu')]),
    "broken": (
        '<tool_call>{"name": "f", "arguments": {"a": b}}</tool_call> so',
        [("broken", "f", '{"a": b}'), ("answer", "", " so")],
    ),
    "one bracket short": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call> so',
        [("call", "f", '{"a": 1}'), ("answer", "", " so")],
    ),
    "two brackets short": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> so',
        [("broken", "f", '{"a": 1'), ("answer", "", " so")],
    ),
    "no call": ("<tool_call>{oops}</tool_call> b", [("answer", "", "<tool_call>{oops}</tool_call> b")]),
    "words after a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}] and words',
        [("call", "f", "{}"), ("answer", "", "and words")],
    ),
    "too deep": (
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5000 + "}</tool_call>",
        [("broken", "f", '{"a":' * 5000 + "1" + "}" * 5000)],
    ),
}


def told(parts: list[Part]) -> Told:
    found: Told = []
    more = False
    for part in parts:
        kind = "broken" if part.kind == "call" and part.trouble else part.kind
        said = part.arguments if part.kind == "call" else part.text
        if found and (more or (part.kind != "call" and found[-1][0] == part.kind)):
            found[-1] = kind, part.name, found[-1][2] + said
        else:
            found.append((kind, part.name, said))
        more = part.more
    assert not more
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found_in_any_pieces(name: str) -> None:
    text, expected = TEXTS[name]
    drawn = random.Random(name)
    for most in (len(text), 40, 3, 1):
        pieces, left = list[str](), text
        while left:
            size = drawn.randint(min(most, len(left)) if most == len(text) else 1, most)
            pieces.append(left[:size])
            left = left[size:]
        parts = parts_of(TagParser(None, FORMS, live=True), pieces)
        assert told(parts) == expected
        assert "".join(part.text for part in parts) == text


def test_arguments_come_as_they_are_written() -> None:
    parser = TagParser(None, FORMS, live=True)
    assert parser.feed(['<tool_call>{"name": "f", "arg']) == []
    begun = parser.feed(['uments": {"a": "b'])
    assert [(part.name, part.arguments, part.more) for part in begun] == [("f", "", True), ("f", '{"a": "b', True)]
    assert [part.arguments for part in parser.feed(["c"])] == ["c"]
    assert [part.arguments for part in parser.feed(['"}', "}"])] == ['"}']
    assert [(part.arguments, part.more) for part in parser.feed(["</tool_call>"])] == [("", False)]


def test_channels_come_in_pieces_too() -> None:
    head = [Mark("<|channel|>"), "commentary to=functions.f ", Mark("<|constrain|>"), "json", Mark("<|message|>")]
    for pieces, kind in ((['{"a":', " 1}"], "call"), (['{"a":'], "broken")):
        parts = parts_of(ChannelParser(live=True), [*head, *pieces])
        assert told(parts) == [(kind, "f", "".join(pieces))]
        assert [part.arguments for part in parts] == ["", *pieces, ""]


def test_no_text_breaks_it_or_is_lost() -> None:
    drawn = random.Random(0)
    words = [
        *(form.open for form in FORMS),
        *(form.close for form in FORMS),
        *'{}[]",:',
        "\n",
        '"name": "f", "arguments": ',
    ]
    words += ['{"name": "f", "arguments": {', BEGIN, SEP, END, "[ARGS]", "```json", "\\", "a", " "]
    for _ in range(1500):
        pieces = drawn.choices(words, k=drawn.randint(0, 30))
        parts = parts_of(TagParser(None, FORMS, live=True), pieces)
        assert "".join(part.text for part in parts) == "".join(pieces)
        for kind, name, said in told(parts):
            assert kind != "call" or (name and isinstance(json.loads(said), dict))
