"""A model's tokenizer and template are a stranger's programs: what they do ends in an error, and the chat lives on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from floe_chat.models.errors import FloeError, PackError, TryAgainError, UsageError
from floe_chat.models.tokenizer import chat_process
from floe_chat.models.tokenizer.chat_format import ChatFormat
from floe_chat.models.tokenizer.chat_process import ChatProcess, Fitted, Pushed, TooLong, encode, send
from floe_chat.models.tokenizer.parts import Part

from ..helpers import TEMPLATE, edit_json, write_tokenizer

HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": role, "content": f"{number} and so on"} for number in range(40) for role in ("user", "assistant")]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started as the program does, not forked."""
    monkeypatch.setattr(chat_process, "subprocess", subprocess)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """What computes without end may do so for a fifth of a second."""
    monkeypatch.setattr(chat_process, "_REQUEST_S", 0.2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def chat(folder: Path) -> Iterator[ChatProcess]:
    opened = ChatProcess(folder)
    yield opened
    opened.close()


def template(folder: Path, source: str) -> None:
    edit_json(folder / "tokenizer_config.json", lambda fields: fields.update(chat_template=source))


def refused(folder: Path, messages: list[dict[str, str]] = HI) -> FloeError:
    """The error that a chat with this folder ends in; the process behind it is gone or works."""
    try:
        opened = ChatProcess(folder)
    except FloeError as error:
        return error
    try:
        with pytest.raises(FloeError) as caught:
            opened.fit(messages, 200)
        return caught.value
    finally:
        opened.close()


@pytest.mark.usefixtures("started")
def test_it_says_what_the_format_itself_would(folder: Path, chat: ChatProcess) -> None:
    own = ChatFormat(folder)
    assert chat.stop_ids == own.stop_ids == (2,) and chat.largest == own.tokens.largest
    for limit in (60, 200, 10_000):
        prompt = own.fit([*LONG, *HI], limit, "well")
        assert chat.fit([*LONG, *HI], limit, "well") == Fitted(prompt.ids, prompt.dropped)
        assert len(prompt.ids) <= limit
    assert chat.fit([*LONG, *HI], 10_000) == Fitted(own.encode([*LONG, *HI]), 0)
    assert chat.count("hello") == 5 == len(encode(folder, "hello"))
    assert chat.fit(HI, 100, "well", begin=0) == Fitted([*own.encode(HI), *own.encode_text("well")], 0)
    assert chat.push(own.encode_text("🎉\x1b[1m")) == Pushed((Part("answer", "🎉␛[1m"),), 0)
    with pytest.raises(UsageError, match="refuses"):
        chat.fit([{"role": "narrator", "content": ""}], 100)


def test_what_cannot_fit_is_not_tokenized(chat: ChatProcess) -> None:
    found = TooLong(1 + 300 + len("[INST]  [/INST]"), system=False)
    assert chat.fit([{"role": "user", "content": "x" * 300}], 100) == found
    assert chat.fit([{"role": "user", "content": "x" * 3_000_000}], 100) == TooLong(None, system=False)
    assert chat.fit([{"role": "system", "content": "x" * 3_000_000}, *HI], 100) == TooLong(None, system=True)


# What computes without end, or takes all memory piece by piece, takes its time; "loops" does so in tests of its own.
QUICK = (
    *("panics when it is read", "has no unknown token"),
    *("writes", "writes much more", "recurses", "writes nothing"),
)
TOKENIZERS: dict[str, dict[str, Any]] = {
    "panics when it is read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "panics at a merge": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["a a"]}, "added_tokens": []},
    "has no unknown token": {
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"},
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": [],
    },
    "takes all memory": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "."}, "content": "🎉" * (1 << 16)},
        "pre_tokenizer": None,
    },
    "has no tokens": {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
}


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in TOKENIZERS],
)
def test_a_tokenizer_that_fails_is_named(folder: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    edit_json(folder / "tokenizer.json", lambda fields: fields.update(TOKENIZERS[name]))
    error = refused(folder, [{"role": "user", "content": "x" * 10_000}])
    assert isinstance(error, PackError) and "tokenizer" in error.title and error.cause and "verify" in error.hint
    with pytest.raises(PackError, match="tokenizer"):
        encode(folder, "x" * 10_000)
    assert capfd.readouterr() == ("", ""), "a panic is not written to the terminal"


TEMPLATES = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "writes": "{{ 'a' * 300000 }}",
    "writes much more": "{{ 'a' * 3000000000 }}",
    "writes without end": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "fills up": "{{ 'x' | center(1000000000) }}",
    "formats": "{{ '%1000000000d' | format(1) }}",
    "replaces": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "doubles": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "nests": "{% set n = namespace(x=[]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "batches": "{{ ([1] | batch(1000000000, 0) | list)[0] | length }}",
    "recurses": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "computes": "{% set n = namespace(x=7) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "writes nothing": "{% if false %}anything{% endif %}",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in TEMPLATES]
)
def test_a_template_that_fails_is_named(folder: Path, name: str) -> None:
    template(folder, TEMPLATES[name])
    error = refused(folder)
    assert isinstance(error, PackError) and "verify" in error.hint
    assert "chat template" in error.title + error.cause


def test_after_a_request_that_ended_the_process_the_next_one_is_answered(folder: Path) -> None:
    template(folder, "{% if messages | length > 1 %}" + TEMPLATES["loops"] + "{% endif %}" + TEMPLATE)
    opened = ChatProcess(folder)
    good = opened.fit(HI, 100)
    with pytest.raises(PackError, match="chat template") as caught:
        opened.fit([HI[0], {"role": "assistant", "content": ""}, *HI], 100)
    assert "stopped" in caught.value.cause
    assert opened.fit(HI, 100) == good
    opened.close()


def test_reading_a_text_is_limited_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "_OPENING_S", 0.05)
    monkeypatch.setattr(chat_process, "_CHARACTERS_PER_S", 1e12)
    with pytest.raises(PackError, match="tokenizer") as caught:
        encode(folder, "x" * 1_000_000)
    assert "stopped" in caught.value.cause


def test_a_process_that_gets_no_computing_time_is_waited_for(
    chat: ChatProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    computed = chat_process._Child._computed  # pyright: ignore[reportPrivateUsage]
    number, good = number_of(chat), chat.count("hello")

    def look(child: Any) -> float:
        looks.append(computed(child))
        if len(looks) == 5:
            os.kill(number, signal.SIGCONT)
        return looks[-1]

    monkeypatch.setattr(chat_process._Child, "_computed", look)  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(chat_process, "_LOOK_S", 0.001)
    os.kill(number, signal.SIGSTOP)
    assert chat.count("hello") == good and len(looks) >= 5
    assert number_of(chat) == number


def test_a_reply_that_is_not_waited_for_is_not_taken_for_the_next(chat: ChatProcess) -> None:
    os.kill(number_of(chat), signal.SIGSTOP)
    with pytest.raises(TryAgainError, match="was stopped"):
        chat.continued("hello and more", 100, stopped=lambda: True)
    os.kill(number_of(chat), signal.SIGCONT)
    assert chat.count("hello") == 5


def test_where_the_kernel_cannot_limit_computing_time_it_is_looked_at(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = chat_process.send

    def unlimited(pipe: Any, asked: dict[str, Any]) -> None:
        send(pipe, {**asked, "seconds": 0})

    monkeypatch.setattr(chat_process, "send", unlimited)
    monkeypatch.setattr(chat_process, "_LOOK_S", 0.1)
    template(folder, TEMPLATES["loops"])
    error = refused(folder)
    assert isinstance(error, PackError) and "chat template" in error.title and "stopped" in error.cause


def test_what_is_asked_beside_an_answer_does_not_wait_for_it(chat: ChatProcess) -> None:
    beside = chat.beside()
    os.kill(number_of(chat), signal.SIGSTOP)
    assert beside.count("hello") == 5 and number_of(beside) != number_of(chat)
    os.kill(number_of(chat), signal.SIGCONT)
    os.kill(number_of(beside), signal.SIGSTOP)
    assert chat.count("hello") == 5
    beside.close()
    assert chat.count("hello") == 5


@pytest.mark.usefixtures("started")
def test_a_process_that_was_ended_is_explained(chat: ChatProcess) -> None:
    os.kill(number_of(chat), signal.SIGABRT)
    with pytest.raises(PackError) as caught:
        chat.fit(HI, 100)
    assert "SIGABRT" in caught.value.cause
    assert isinstance(chat.fit(HI, 100), Fitted)


@pytest.mark.parametrize("asks", [False, True], ids=["before it is asked", "while it is asked"])
def test_closing_ends_a_request(folder: Path, asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    template(folder, "{% if messages | length > 1 %}" + TEMPLATES["loops"] + "{% endif %}" + TEMPLATE)
    opened = ChatProcess(folder)
    monkeypatch.setattr(chat_process, "_REQUEST_S", 60.0)
    child = number_of(opened)
    errors: list[FloeError] = []
    sending, closed = threading.Event(), threading.Event()

    def held(pipe: Any, message: Any) -> None:
        sending.set()
        assert closed.wait(60)
        send(pipe, message)

    def told(pipe: Any, message: Any) -> None:
        send(pipe, message)
        sending.set()

    monkeypatch.setattr("floe_chat.models.tokenizer.chat_process.send", told if asks else held)

    def ask() -> None:
        try:
            opened.fit([*HI, *HI], 100)
        except FloeError as error:
            errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert sending.wait(60)
    opened.close()
    closed.set()
    asking.join(60)
    assert [error.title for error in errors] == [f"The model at {folder} is closed"]
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    with pytest.raises(PackError, match="closed"):
        opened.fit(HI, 100)


def test_a_decoder_that_makes_a_book_of_a_token_is_refused(folder: Path) -> None:
    book = {"type": "Replace", "pattern": {"String": "a"}, "content": "x" * 100_000}
    edit_json(
        folder / "tokenizer.json",
        lambda fields: fields.update(decoder={"type": "Sequence", "decoders": [fields["decoder"], book]}),
    )
    opened = ChatProcess(folder)
    ids = encode(folder, "ba")
    assert opened.push(ids[:1]).parts == (Part("answer", "b"),)
    with pytest.raises(PackError, match="tokenizer") as caught:
        opened.push(ids[1:])
    assert "characters" in caught.value.cause
    opened.close()


def test_a_pipe_in_a_files_place_is_not_waited_for(folder: Path) -> None:
    os.mkfifo(folder / "chat_template.jinja")
    ChatProcess(folder).close()  # the other file has a template too
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(PackError) as caught:
            ChatProcess(folder)
        assert caught.value.cause


@pytest.mark.usefixtures("started")
def test_what_lies_in_the_current_folder_is_not_imported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tokenizers", "jinja2", "json", "floe_chat"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    opened = ChatProcess(folder)
    assert isinstance(opened.fit(HI, 100), Fitted)
    opened.close()


def test_half_a_reply_is_none(tmp_path: Path) -> None:
    for content in (b"", b"\x04", b"\x04\0\0\0\0\0\0\0{", b"\x02\0\0\0\0\0\0\0{]"):
        (tmp_path / "reply").write_bytes(content)
        with (tmp_path / "reply").open("rb") as file:
            assert chat_process.receive(file) is None
    with (tmp_path / "reply").open("wb") as file:
        chat_process.send(file, {"text": "\ud800 and more"})
    with (tmp_path / "reply").open("rb") as file:
        assert chat_process.receive(file) == {"text": "\ud800 and more"}
    assert json.loads((tmp_path / "reply").read_bytes()[8:])


def number_of(chat: ChatProcess) -> int:
    """The process's number."""
    child = chat._child  # pyright: ignore[reportPrivateUsage]
    assert child is not None
    return child.number
