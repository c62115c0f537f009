"""Export, import and attachments: nothing lost, nothing obeyed, bad files refused with the place and the reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.history import (
    AnswerStats,
    Attachment,
    ChatSetup,
    MessageState,
    Tree,
    as_json,
    as_markdown,
    file_name,
    new_id,
    open_history,
    parse,
    read_attachment,
)
from floe_chat.app.history.attachments import LARGEST
from floe_chat.app.history.database.store import HistoryStore
from floe_chat.engine.events import Sampling
from floe_chat.models.errors import UsageError

NASTY = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b31m\u202etxt.exe\u2066 \r\n\0 </details> ```\n# no heading\t\u2028é漢"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[HistoryStore]:
    opened = open_history(tmp_path / "history.db").store
    yield opened
    opened.close()


@pytest.fixture
def tree(store: HistoryStore) -> Tree:
    """Two branches, two attachments, every kind of value."""
    setup = ChatSetup("demo", None, Sampling(0.1, 3, 0.9, 0.2, 1.1, 2**62), f"Be brief. {NASTY}", "Tutor")
    chat, first, one, two, last = (new_id() for _ in range(5))
    with store.transaction():
        store.add_conversation(chat, setup, f"Title {NASTY}")
        store.add_question(
            first, chat, None, f"first {NASTY}", [Attachment(f"a{NASTY}.txt", NASTY), Attachment("b", "")]
        )
        states: tuple[MessageState, MessageState] = ("complete", "failed")
        for answer, state in zip((one, two), states, strict=True):
            store.begin_answer(answer, first, "demo", "High", "")
            stats = AnswerStats(7, None, 0.25, "length", True, 5)
            store.end_answer(answer, f"{state} answer", state, stats, f"thought {NASTY}")
        store.begin_answer(last, store.tree(chat).messages[-1].id, "", "", "")
        store.end_answer(last, "", "stopped", None)
        store.switch(chat, one)
    return store.tree(chat)


def edited(text: str, change: Callable[[Any], object]) -> str:
    document = json.loads(text)
    change(document)
    return json.dumps(document)


def test_json_loses_nothing_and_is_the_same_after_a_round_trip(store: HistoryStore, tree: Tree) -> None:
    text = as_json([tree, tree])
    once, twice = parse(text, "x", print)
    assert as_json([once]) == as_json([twice]) == as_json([tree])
    with store.transaction():
        store.add_tree(copy := new_id(), once)
    again = store.tree(copy)
    assert as_json([again]) == as_json([tree])
    assert again.conversation.number == 2 and not {m.id for m in again.messages} & {m.id for m in tree.messages}
    assert again.conversation.head == again.messages[1].id
    assert again.messages[0].text == tree.messages[0].text == f"first {NASTY}"
    assert {hit.conversation for hit in store.search('"complete answer"')} == {tree.conversation.id, copy}


def test_exports_of_earlier_versions_have_no_thinking(tree: Tree) -> None:
    def change(document: Any) -> None:
        for message in document["conversations"][0]["messages"]:
            del message["thought"]
            if message["stats"] is not None:
                del message["stats"]["thought_tokens"]

    (read,) = parse(edited(as_json([tree]), change), "x", print)
    assert {message.thought for message in read.messages} == {""}
    assert [message.stats and message.stats.thought_tokens for message in read.messages] == [None, 0, 0, None]


def test_nothing_that_a_terminal_obeys_leaves_as_it_is(tree: Tree) -> None:
    for text in (as_json([tree]), as_markdown(tree)):
        left = {char for char in text if char != "\n" and char != "\t" and (ord(char) < 32 or 0x7F <= ord(char) < 0xA0)}
        assert not left and "\u202e" not in text and "\u2066" not in text
    assert "\ufffd]52;c;" in as_markdown(tree)


def test_markdown_reads_as_the_branch_that_is_shown(store: HistoryStore) -> None:
    with store.transaction():
        store.add_conversation(chat := new_id(), ChatSetup("demo", "Fast", system_prompt="Be brief."), created=0)
        store.add_question(q := new_id(), chat, None, "What is an expert?", [Attachment("a.md", "text with ``` in it")])
        store.begin_answer(a := new_id(), q, "demo", "Fast", "")
        store.end_answer(a, "A small network.\n", "complete", AnswerStats(4, 12.5, 0.25, "stop"))
        store.begin_answer(b := new_id(), q, "", "", "")
        store.end_answer(b, "Cut", "stopped", None)
        store.begin_answer(c := new_id(), q, "demo", "Fast", "")
        store.end_answer(c, "Small.", "complete", AnswerStats(4, None, None, "stop", False, 1234), "They ask.\n\nSo:")
        store.switch(chat, a)
    assert as_markdown(store.tree(chat)) == (
        "# What is an expert?\n\ndemo · Fast · 1970-01-01 00:00 UTC\n\n## System prompt\n\nBe brief.\n\n"
        "## You\n\nWhat is an expert?\n\n### Attached: a.md\n\n````\ntext with ``` in it\n````\n\n"
        "## demo · Fast\n\nA small network.\n\n*4 tokens · 12.5 tokens/s · first token 250 ms · end of turn*\n"
    )
    with store.transaction():
        store.switch(chat, b)
    assert as_markdown(store.tree(chat)).endswith("## Answer\n\nCut\n\n*cut off*\n")
    with store.transaction():
        store.switch(chat, c)
    assert as_markdown(store.tree(chat)).endswith(
        "## demo · Fast\n\n> *Thought for 1,234 tokens*\n>\n> They ask.\n>\n> So:\n\nSmall.\n\n"
        "*4 tokens · end of turn*\n"
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("What is an expert?", "12-what-is-an-expert.md"),
        ("../../etc/passwd", "12-etc-passwd.md"),
        ("Ünïcode 漢字", "12-ünïcode-漢字.md"),
        ("\x1b[31m\0 nul ... ", "12-31m-nul.md"),
        ("", "12.md"),
        ("/", "12.md"),
        ("漢" * 100, f"12-{'漢' * 20}.md"),
    ],
)
def test_names_of_files_are_safe(name: str, expected: str) -> None:
    assert file_name(12, name, ".md") == expected


BAD: list[tuple[Callable[[Any], object], str]] = [
    (lambda d: d.update(format="other"), "format"),
    (lambda d: d.update(version=2), "version 2"),
    (lambda d: d.update(version=True), "version True"),
    (lambda d: d.pop("conversations"), "conversations is missing"),
    (lambda d: d.update(conversations=[1]), "conversations[0] is not an object"),
    (lambda d: d["conversations"][0].pop("title"), "conversations[0].title is missing"),
    (lambda d: d["conversations"][0].update(head=99), "conversations[0].head is message 99"),
    (lambda d: d["conversations"][0].update(created="2026-01-01T00:00:00"), "conversations[0].created is not a time"),
    (lambda d: d["conversations"][0].update(updated="1066-01-01T00:00:00Z"), "conversations[0].updated is not a time"),
    (
        lambda d: d["conversations"][0]["sampling"].update(top_p="much"),
        "conversations[0].sampling.top_p is not a number",
    ),
    (lambda d: d["conversations"][0]["sampling"].update(top_k=1.5), "conversations[0].sampling.top_k is not a whole"),
    (lambda d: d["conversations"][0].update(quality={"sparsity": 10**400}), "quality.sparsity is not a number from 0"),
    (lambda d: d["conversations"][0]["messages"][1]["stats"].update(tokens=10**600), "tokens is not a number from 0"),
    (lambda d: d["conversations"][0]["messages"][1]["stats"].update(first_token_s=1e300), "_s is not a number from 0"),
    (lambda d: d["conversations"][0]["messages"][1].update(role="system"), "messages[1].role is not one of user, "),
    (lambda d: d["conversations"][0]["messages"][1].update(text=5), "conversations[0].messages[1].text is not text"),
    (lambda d: d["conversations"][0]["messages"][1].update(parent=2), "messages[1].parent is message 2"),
    (lambda d: d["conversations"][0]["messages"][1].update(parent=3), "messages[1].parent is message 3"),
    (lambda d: d["conversations"][0]["messages"][1].update(id=1), "messages[1].id 1 appears twice"),
    (lambda d: d["conversations"][0]["messages"][1].update(state="done"), "messages[1].state is not one of complete"),
    (lambda d: d["conversations"][0]["messages"][0]["attachments"][0].pop("name"), "attachments[0].name is missing"),
]


@pytest.mark.parametrize(("change", "reason"), BAD, ids=[reason for _change, reason in BAD])
def test_a_bad_file_is_refused_with_the_place_and_the_reason(
    tree: Tree, change: Callable[[Any], object], reason: str
) -> None:
    with pytest.raises(UsageError, match="cannot be imported") as refused:
        parse(edited(as_json([tree]), change), "backup.json", print)
    assert reason in refused.value.cause


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, 1e308, 1e999, float("nan"), 10**400)),
        *(("top_k", 10**30), ("seed", -1), ("seed", 10**30), ("repetition_penalty", 1e999)),
    ],
    ids=lambda given: str(given)[:20],
)
def test_sampling_values_that_no_model_takes_are_left_out_and_told(tree: Tree, name: str, value: float) -> None:
    told: list[str] = []
    (read,) = parse(
        edited(as_json([tree]), lambda d: d["conversations"][0]["sampling"].update({name: value})), "x", told.append
    )
    assert read.conversation.setup.sampling == replace(
        tree.conversation.setup.sampling, **{name: getattr(Sampling(), name)}
    )
    assert len(told) == 1 and f"conversations[0].sampling.{name} cannot be" in told[0] and len(told[0]) < 120


def test_a_blank_title_is_none(tree: Tree) -> None:
    (read,) = parse(edited(as_json([tree]), lambda d: d["conversations"][0].update(title=" \t\n")), "x", print)
    assert read.conversation.title == "" and read.name.startswith("first")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Line 1, column 1"),
        ('{\n "a": \n}', "Line 3, column 1"),
        ("[]", "format"),
        ("[" * 100_000, ""),
        (f'{{"a": {"9" * 5000}}}', ""),
        ("null", "format"),
    ],
    ids=["empty", "syntax", "list", "deep", "digits", "null"],
)
def test_what_is_no_json_of_ours_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match="cannot be imported") as refused:
        parse(text, "x", print)
    assert reason in refused.value.cause and refused.value.cause


def test_a_text_file_is_attached_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_bytes(b"\xef\xbb\xbfline\r\n\x1b[31mred \xc3\xa9")
    assert read_attachment(file) == Attachment("notes.txt", "line\r\n\x1b[31mred é")
    file.write_bytes(b"x" * LARGEST)
    assert len(read_attachment(file).text) == LARGEST


def test_what_is_no_text_is_not_attached(tmp_path: Path) -> None:
    contents = {
        "binary": (b"\x7fELF\0\0", "zero bytes"),
        "latin": ("café".encode("latin-1"), "not UTF-8"),
        "utf16": ("text".encode("utf-16"), "not UTF-8|zero bytes"),
        "huge": (b"x" * (LARGEST + 1), f"at most {LARGEST:,} can be"),
    }
    for name, (content, reason) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="cannot be attached") as refused:
            read_attachment(tmp_path / name)
        assert any(part in refused.value.cause for part in reason.split("|"))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(UsageError, match="cannot be attached"):
            read_attachment(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "missing", Path("a\0b"), tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match="cannot be attached"):
            read_attachment(path)
