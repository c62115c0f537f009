"""Markdown without its marks, in whatever pieces it comes."""

from __future__ import annotations

import random

import pytest
from floe_chat.app.plain.plain_markdown import PlainMarkdown, plain_text

CASES = [
    ("plain words", "plain words"),
    ("**bold** and *slanted*, __bold__ and _slanted_.", "bold and slanted, bold and slanted."),
    ("***both***", "both"),
    ("_snake_case_ is a *word*", "snake_case is a word"),
    ("**a *b* c**", "a b c"),
    ("## A heading\ntext", "A heading\ntext"),
    ("* one\n* **two**\n  + three", "- one\n- two\n  - three"),
    ("- one\n1. two", "- one\n1. two"),
    ("use `floe-chat **x**` now", "use floe-chat **x** now"),
    ("a [link](https://a.b) and [https://a.b](https://a.b)", "a link (https://a.b) and https://a.b"),
    ("2 * 3 * 4 = 24", "2 * 3 * 4 = 24"),
    ("snake_case_name and a_b", "snake_case_name and a_b"),
    ("an unclosed **star", "an unclosed **star"),
    ("an unclosed `code\nnext *line*", "an unclosed `code\nnext line"),
    ("~~gone~~", "gone"),
    (
        "```python\nx = **y**\n# no heading\n```\n**after**",
        "[code, python]\nx = **y**\n# no heading\n[end of code]\nafter",
    ),
    ("````\n```\nstill code\n````\n*out*", "[code]\n```\nstill code\n[end of code]\nout"),
    ("~~~\n*code*\n~~~", "[code]\n*code*\n[end of code]"),
    ("| a | b |\n|---|---|\n| **c** | d |", "| a | b |\n|---|---|\n| c | d |"),
    ("> a *quote*", "> a quote"),
    ("---", "---"),
    ("\n\n", "\n\n"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "plain"), CASES)
def test_pieces_give_what_the_whole_gives(text: str, plain: str) -> None:
    assert plain_text(text) == plain
    rng = random.Random(text)
    for _ in range(20):
        stream, given, at = PlainMarkdown(), "", 0
        while at < len(text):
            size = rng.randint(1, 5)
            given += stream.feed(text[at : at + size])
            at += size
        assert given + stream.end() == plain


def test_words_are_given_as_they_come() -> None:
    stream = PlainMarkdown()
    assert [stream.feed(piece) for piece in ("The ", "answer", " is **4", "2**", ".")] == [
        "The ",
        "answer",
        " is ",
        "",
        "42.",
    ]


def test_lines_of_marks_alone_come_through() -> None:
    for mark in ("*", "_", "`", "[", "**a", "](", "~~", "*a "):
        stream = PlainMarkdown()
        given = "".join(stream.feed(mark) for _ in range(300)) + stream.end()
        assert given
