"""A server's stream: any cut into parts gives the same events, and nothing that it sends ends in a traceback."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from floe_chat.app.client.remote import stream as remote_stream
from floe_chat.app.client.remote.models import offered
from floe_chat.app.client.remote.stream import NotAnAnswerError, Piece, SafeText, events, piece_of

from .model_server import RECORDED

KINDS = ("vllm", "sglang", "llama-server", "ollama")


async def cut(stream: bytes, size: int) -> AsyncGenerator[bytes]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]


async def read(stream: bytes, size: int = 1 << 20) -> list[str]:
    return [event async for event in events(cut(stream, size))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 7, 64])
async def test_any_cut_gives_the_same_events(kind: str, size: int) -> None:
    stream = (RECORDED / f"{kind}-answer.sse").read_bytes()
    whole = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line][:-1]
    assert await read(stream, size) == await read(stream.replace(b"\n", b"\r\n"), size) == whole


@pytest.mark.parametrize(
    ("stream", "found"),
    [
        (b": ping\n\ndata: a\n\n", ["a"]),
        (b"data:a\ndata: b\nid: 3\nevent: x\n\n", ["a\nb"]),
        (b"data: a", ["a"]),
        (b"data: [DONE]\n\ndata: b\n\n", []),
        (b"\n\n\n", []),
        (b"data: \xff\n\n", ["\ufffd"]),
    ],
)
async def test_events(stream: bytes, found: list[str]) -> None:
    assert await read(stream) == found


@pytest.mark.parametrize("stream", [b"data: " + b"x" * 99, b"data: x\n" * 30, b": ping\n\n" * 99])
async def test_every_part_is_bounded(stream: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stream, "MOST_LINE", 50)
    monkeypatch.setattr(remote_stream, "MOST_STREAM", 500)
    with pytest.raises(NotAnAnswerError):
        await read(stream, 3)


def test_calls_that_nobody_asked_for_are_shown() -> None:
    def said(**delta: Any) -> str:
        return piece_of(json.dumps({"choices": [{"delta": delta}]})).text

    calls = [{"index": 0, "id": "1", "function": {"name": "find", "arguments": ""}}]
    more = [{"index": 0, "function": {"arguments": '{"at":'}}]
    assert said(content=None, tool_calls=calls) + said(tool_calls=more) == '\nfind {"at":'
    for odd in ([], None, [3], [{"function": 3}], {"a": 1}):
        assert said(content="Well.", tool_calls=odd) == "Well."


VALUES = (None, True, -1, 3, 1e400, "", "x", "\ud800", [], [[]], {}, {"content": 3}, [{"delta": 3}], 1 << 70)


def changed(value: Any, chance: random.Random) -> Any:
    """`value` with some of what is in it replaced by something else."""
    if chance.random() < 0.15:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        return {key: changed(inner, chance) for key, inner in value.items() if chance.random() > 0.05}
    return [changed(inner, chance) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
async def test_other_forms_are_refused_in_words(kind: str) -> None:
    chance = random.Random(kind)
    chunks = [json.loads(event) for event in await read((RECORDED / f"{kind}-answer.sse").read_bytes())]
    listed = json.loads((RECORDED / f"{kind}-models.json").read_bytes())
    for _ in range(400):
        try:
            piece = piece_of(json.dumps(changed(chance.choice(chunks), chance)))
        except NotAnAnswerError as error:
            assert str(error).endswith(".")
            continue
        assert isinstance(piece, Piece) and isinstance(piece.text + piece.thought + piece.reason + piece.error, str)
        counts = () if piece.usage is None else (piece.usage.prompt, piece.usage.new, piece.usage.reused)
        assert all(count is None or (type(count) is int and count >= 0) for count in counts)
        SafeText().take(piece.text, last=True).encode()
    for _ in range(400):
        try:
            models = offered(json.dumps(changed(listed, chance)).encode())
        except ValueError:
            continue
        assert all(model.name and type(model.window) is int and model.window >= 0 for model in models)


def test_text_is_the_same_in_any_cut() -> None:
    text = "a\U0001f600\x1b[2J\u202eb\r\nc\ud800d\ud83d"
    split = text.encode("utf-16-le", "surrogatepass")
    halves = [split[at : at + 2].decode("utf-16-le", "surrogatepass") for at in range(0, len(split), 2)]
    whole, pieces = SafeText(), SafeText()
    assert "".join(map(pieces.take, halves)) + pieces.take("", last=True) == whole.take(text, last=True)
    assert whole.take("\ud83d") == "" and whole.take("\ude00") == "\U0001f600"
