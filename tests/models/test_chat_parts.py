"""An answer's parts and calls are the same whichever pieces it comes in, and nothing the model wrote is lost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence

import pytest
from floe_chat.models.tokenizer.calls import FORMS
from floe_chat.models.tokenizer.parts import ChannelParser, Mark, Parser, Part, TagParser

TAGS = ("<think>", "</think>")
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
Told = list[tuple[str, str]]


def tagged(*, opened: bool = False) -> Parser:
    return TagParser(TAGS, FORMS, opened=opened)


def parts_of(parser: Parser, pieces: Sequence[str]) -> list[Part]:
    found = [part for piece in pieces for part in parser.feed([piece])]
    return found + parser.finish()


def told(parts: Sequence[Part]) -> Told:
    """Kinds and texts, neighbours of a kind joined."""
    found: Told = []
    for part in parts:
        if found and found[-1][0] == part.kind != "call":
            found[-1] = part.kind, found[-1][1] + part.text
        else:
            found.append((part.kind, part.text))
    return found


TEXTS: dict[str, tuple[str, Told]] = {
    "thinking first": ("<think>\na\n\nb \n</think>\n\nYes.\n", [("thinking", "a\n\nb"), ("answer", "Yes.\n")]),
    "blanks before it": ("\n \n<think>a</think>b", [("thinking", "a"), ("answer", "b")]),
    "none": ("Yes < no.", [("answer", "Yes < no.")]),
    "empty": ("<think>\n\n</think>\n\nYes", [("answer", "Yes")]),
    "only later": ("Say <think>a</think>.", [("answer", "Say <think>a</think>.")]),
    "in a code block": ("```\n<think>\n</think>\n```\n", [("answer", "```\n<think>\n</think>\n```\n")]),
    "twice": ("<think>a</think>b<think>c</think>", [("thinking", "a"), ("answer", "b<think>c</think>")]),
    "cut inside": ("<think>\nso it is  \n", [("thinking", "so it is")]),
    "cut in its end": ("<think>a < b </thi", [("thinking", "a < b </thi")]),
    "cut in its beginning": ("<thi", [("answer", "<thi")]),
    "nothing": ("", []),
    "nothing after it": ("<think>a</think>\n\n", [("thinking", "a")]),
    "code first": ("    x = 1\n", [("answer", "    x = 1\n")]),
    "a call": (f"<think>a</think>\n{HERMES}", [("thinking", "a"), ("call", HERMES)]),
    "two calls": (
        f"Now:\n{HERMES}\n{HERMES}",
        [("answer", "Now:\n"), ("call", HERMES), ("answer", "\n"), ("call", HERMES)],
    ),
    "a call in a code block": (f"```xml\n{HERMES}\n```\nend", [("answer", f"```xml\n{HERMES}\n```\nend")]),
    "after a code block": (f"~~~\n```\n~~~\n{HERMES}", [("answer", "~~~\n```\n~~~\n"), ("call", HERMES)]),
    "words about calls": (
        "Write <tool_call> first, `<tool_call>` too.",
        [("answer", "Write <tool_call> first, `<tool_call>` too.")],
    ),
    "a call in its thinking": (f"<think>{HERMES}</think>b", [("thinking", HERMES), ("answer", "b")]),
    "not JSON": ("<tool_call>{oops}</tool_call> b", [("answer", "<tool_call>{oops}</tool_call> b")]),
    "no name": ('<tool_call>{"a": 1}</tool_call>', [("answer", '<tool_call>{"a": 1}</tool_call>')]),
    "a cut call": ('<tool_call>{"name": "a', [("answer", '<tool_call>{"name": "a')]),
    "deep JSON": (
        "<tool_call>" + "[" * 99_999 + "</tool_call>",
        [("answer", "<tool_call>" + "[" * 99_999 + "</tool_call>")],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_tags_are_found_in_any_pieces(name: str) -> None:
    text, expected = TEXTS[name]
    drawn = random.Random(name)
    assert told(parts_of(tagged(), [text])) == expected
    for most in (1, 3, 20):
        pieces, left = list[str](), text[:5000] if len(text) > 5000 else text
        if left != text:
            return
        while left:
            size = drawn.randint(1, most)
            pieces.append(left[:size])
            left = left[size:]
        assert told(parts_of(tagged(), pieces)) == expected


def test_a_prompt_may_have_opened_the_thinking() -> None:
    assert told(parts_of(tagged(opened=True), ["\nhm", " \n</thi", "nk>\n\n", "Yes"])) == [
        ("thinking", "hm"),
        ("answer", "Yes"),
    ]
    assert told(parts_of(tagged(opened=True), ["cut"])) == [("thinking", "cut")]


def test_text_comes_as_soon_as_it_is_certain() -> None:
    parser = tagged()
    assert parser.feed(["<th"]) == [] and not parser.thinking
    assert parser.feed(["ink>Let"]) == [Part("thinking", "Let")] and parser.thinking
    assert parser.feed([" <"]) == [] and parser.feed(["b"]) == [Part("thinking", " <b")]
    assert parser.feed(["</think>"]) == [] and not parser.thinking
    assert parser.feed(["\n\nYes <"]) == [Part("answer", "Yes ")]
    assert parser.feed(["b>"]) == [Part("answer", "<b>")]
    plain = TagParser(None)
    assert plain.feed(["a <"]) == [Part("answer", "a <")]


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("<tool_call>{oops}</tool_call>", "Expecting property name"),
        ('<tool_call>{"a": 1}</tool_call>', "names no function"),
        ('<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "no JSON object"),
        ('<tool_call>{"name": "a"', "ends inside"),
        ("<tool_call> is a tag", "does not begin as a call"),
        ("[TOOL_CALLS][]", "names no function"),
        ("[TOOL_CALLS][3]", "names no function"),
        ("<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>", "names no function"),
    ],
)
def test_what_is_no_call_says_why(text: str, trouble: str) -> None:
    parts = parts_of(tagged(), [text])
    assert told(parts) == [("answer", text)]
    assert any(trouble in part.trouble for part in parts)


CALLS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "arguments as text": ('<tool_call>{"name": "a", "arguments": "{\\"b\\": 2}"}</tool_call>', [("a", '{"b": 2}')]),
    "no arguments": ('<tool_call>{"name": "a"}</tool_call>', [("a", "{}")]),
    "GLM without any": ("<tool_call>a.b</tool_call>", [("a.b", "{}")]),
    "GLM": (
        "<tool_call>a\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n<arg_key>t</arg_key><arg_value>é {</arg_value>"
        "</tool_call>",
        [("a", '{"n": 3, "t": "é {"}')],
    ),
    "Qwen3-Coder": (
        "<tool_call>\n<function=a>\n<parameter=p>\nx y\n</parameter>\n</function>\n</tool_call>",
        [("a", '{"p": "x y"}')],
    ),
    "Mistral, several": (
        '[TOOL_CALLS] [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"c": 1}}]',
        [("a", "{}"), ("b", '{"c": 1}')],
    ),
    "Mistral, newer": ('[TOOL_CALLS]a[CALL_ID]x9[ARGS]{"b": 1}[TOOL_CALLS]c[ARGS]{}', [("a", '{"b": 1}'), ("c", "{}")]),
    "Granite": ('<|tool_call|>[{"name": "a", "arguments": {}}]', [("a", "{}")]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_have_names_and_arguments(name: str) -> None:
    text, expected = CALLS[name]
    for pieces in ([text], list(text)):
        parts = parts_of(tagged(), pieces)
        assert [(part.name, part.arguments) for part in parts if part.kind == "call"] == expected
        assert "".join(part.text for part in parts) == text


C, M, E, S = map(Mark, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>"))
CHANNELS: dict[str, tuple[list[str], Told]] = {
    "both": (
        [C, "analysis", M, "hm", E, S, "assistant", C, "final", M, "Yes."],
        [("thinking", "hm"), ("answer", "Yes.")],
    ),
    "only an answer": ([C, "final", M, "Yes."], [("answer", "Yes.")]),
    "spelled marks": (
        [C, "final", M, "Say <|channel|>analysis<|message|>."],
        [("answer", "Say <|channel|>analysis<|message|>.")],
    ),
    "cut inside the thinking": ([C, "analysis", M, "so"], [("thinking", "so")]),
    "cut in a header": ([C, "analysis", M, "so", E, S, "assistant", C, "fi"], [("thinking", "so")]),
    "a preamble": (
        [C, "commentary", M, "I look.", E, S, "assistant", C, "final", M, "Yes."],
        [("answer", "I look.\n\nYes.")],
    ),
    "thinks twice": ([C, "analysis", M, "a", E, S, "assistant", C, "analysis", M, "b"], [("thinking", "a\n\nb")]),
    "no header": (["Yes", " it is."], [("answer", "Yes it is.")]),
    "no end of the header": ([C, *["final and on "] * 40], [("answer", "<|channel|>" + "final and on " * 40)]),
    "a call": (
        [C, "commentary to=functions.add ", Mark("<|constrain|>"), "json", M, '{"a":', " 1}", Mark("<|call|>")],
        [("call", '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}')],
    ),
    "a call by role": (
        [" to=functions.add", C, "commentary", M, "{}"],
        [("call", "<|channel|>commentary<|message|>{}")],
    ),
    "a bad call": (
        [C, "commentary to=functions.add", M, "{"],
        [("answer", "<|channel|>commentary to=functions.add<|message|>{")],
    ),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_channels_are_told_apart(name: str) -> None:
    pieces, expected = CHANNELS[name]
    parts = parts_of(ChannelParser(), pieces)
    assert told(parts) == expected
    assert [part.name for part in parts if part.kind == "call"] in ([], ["add"])
    assert all(part.trouble for part in parts) or name != "a bad call"


@pytest.mark.parametrize("made", [tagged, lambda: tagged(opened=True), ChannelParser, lambda: TagParser(None, FORMS)])
def test_no_text_breaks_it_or_is_lost(made: Callable[[], Parser], every_case: bool) -> None:
    drawn = random.Random(0)
    words = [
        *TAGS,
        *(form.open for form in FORMS),
        *(form.close for form in FORMS),
        "```",
        "\n",
        "{",
        "}",
        "[",
        '"name"',
    ]
    marks = [
        *map(Mark, ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>")),
        "analysis",
        " to=a ",
        "final",
    ]
    for _ in range(2000 if every_case else 400):
        pieces = drawn.choices([*words, *marks, "a", " ", "<", "é"], k=drawn.randint(0, 30))
        parts = parts_of(made(), pieces)
        assert all(part.kind in ("thinking", "answer", "call") for part in parts)
        if made is not ChannelParser:
            left = "".join("".join(part.text for part in parts).split())
            wrote = "".join("".join(pieces).split())
            assert len(wrote) - len(left) in (0, len(TAGS[0]), len(TAGS[1]), len(TAGS[0] + TAGS[1]))


BEGIN, END, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
LiveTold = list[tuple[str, str, str]]
"""Kinds, names and texts or arguments, neighbours of a kind joined; a broken call's kind is "broken"."""

LIVE: dict[str, tuple[str, LiveTold]] = {
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


def live_told(parts: list[Part]) -> LiveTold:
    found: LiveTold = []
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


@pytest.mark.some(8)
@pytest.mark.parametrize("name", LIVE)
def test_calls_are_found_in_any_pieces(name: str) -> None:
    text, expected = LIVE[name]
    drawn = random.Random(name)
    for most in (len(text), 40, 3, 1):
        pieces, left = list[str](), text
        while left:
            size = drawn.randint(min(most, len(left)) if most == len(text) else 1, most)
            pieces.append(left[:size])
            left = left[size:]
        parts = parts_of(TagParser(None, FORMS, live=True), pieces)
        assert live_told(parts) == expected
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
        assert live_told(parts) == [(kind, "f", "".join(pieces))]
        assert [part.arguments for part in parts] == ["", *pieces, ""]


def test_no_call_in_pieces_breaks_it_or_is_lost(every_case: bool) -> None:
    drawn = random.Random(0)
    words = [
        *(form.open for form in FORMS),
        *(form.close for form in FORMS),
        *'{}[]",:',
        "\n",
        '"name": "f", "arguments": ',
    ]
    words += ['{"name": "f", "arguments": {', BEGIN, SEP, END, "[ARGS]", "```json", "\\", "a", " "]
    for _ in range(1500 if every_case else 400):
        pieces = drawn.choices(words, k=drawn.randint(0, 30))
        parts = parts_of(TagParser(None, FORMS, live=True), pieces)
        assert "".join(part.text for part in parts) == "".join(pieces)
        for kind, name, said in live_told(parts):
            assert kind != "call" or (name and isinstance(json.loads(said), dict))
