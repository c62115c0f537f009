"""A server's answers through the client interface: recorded exchanges, and everything that can go wrong."""

from __future__ import annotations

import json
import logging
import random
import shutil
import ssl
import subprocess
import threading
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from floe_chat.app.client.interface import PromptTurn, Question, Submitted, TextDelta, ThoughtDelta, Update
from floe_chat.app.client.remote import stream as remote_stream
from floe_chat.app.client.remote.address import KEY_VARIABLE, Address, Key, read_key
from floe_chat.app.client.remote.answer import proxy_for
from floe_chat.app.client.remote.client import Patience, RemoteClient
from floe_chat.app.client.remote.models import offered
from floe_chat.app.client.remote.stream import MOST_LINE, NotAnAnswerError, Piece, SafeText, events, piece_of
from floe_chat.app.history import history_file, open_history
from floe_chat.app.settings.servers import SavedServer, keep, servers_file
from floe_chat.engine.events import Failed, Finished, Loaded, Notice, Sampling, Stats
from floe_chat.models.errors import FloeError, UsageError

from ..helpers import run_cli
from .model_server import ANSWER, RECORDED, ModelServer, Reply, models, recorded, refusing, said, serving, unused_port
from .scripted import app_for, screen_text, until

KEY = "sk-very-secret-1234"
ASKED = [PromptTurn("system", "Be brief."), PromptTurn("user", "What is an expert?")]
HELLO = {"content": "Hello"}


@contextmanager
def connected(url: str, key: str = "", model: str | None = None, silence: float = 30.0) -> Generator[RemoteClient]:
    client = RemoteClient(Address.parse(url), Key(key), model, patience=Patience(silence, None))
    client.start()
    try:
        yield client
    finally:
        client.close()


def heard(client: RemoteClient, *ends: type[Update]) -> list[Update]:
    """All updates up to the first of one of these kinds."""
    updates: list[Update] = []
    while not any(isinstance(update, ends) for update in updates):
        more = client.poll(timeout=60)
        assert more, f"nothing came after {updates}"
        updates += more
    return updates


@contextmanager
def talking(
    *answers: Reply, listed: Reply | None = None, key: str = "", model: str | None = None, silence: float = 30.0
) -> Generator[tuple[ModelServer, RemoteClient]]:
    """A server with these answers, and a client whose model is ready."""
    with (
        serving(ModelServer(listed or models("tiny"), *answers)) as server,
        connected(server.url, key, model, silence) as client,
    ):
        assert isinstance(heard(client, Loaded, Failed)[-1], Loaded)
        yield server, client


def exchange(*answers: Reply, key: str = "", silence: float = 30.0) -> tuple[list[Update], ModelServer]:
    """One question to a server with these answers."""
    with talking(*answers, key=key, silence=silence) as (server, client):
        return asked(client), server


def asked(client: RemoteClient, sampling: Sampling | None = None, **given: Any) -> list[Update]:
    client.submit(Question(ASKED, sampling or Sampling(temperature=0, min_p=0), 64, **given))
    return heard(client, Finished, Failed)


def text(updates: list[Update]) -> str:
    return "".join(update.text for update in updates if isinstance(update, TextDelta))


def thought(updates: list[Update]) -> str:
    return "".join(update.text for update in updates if isinstance(update, ThoughtDelta))


def failure(updates: list[Update]) -> Failed:
    failed = [update for update in updates if isinstance(update, Failed)]
    assert len(failed) == 1, updates
    return failed[0]


@pytest.mark.parametrize(
    ("kind", "model", "window", "counts", "reason"),
    [
        ("vllm", "Qwen/Qwen3-30B-A3B", 40960, (14, 11, 8), "stop"),
        ("sglang", "deepseek-ai/DeepSeek-V2-Lite-Chat", 163840, (14, 7, 5), "stop"),
        ("llama-server", "mixtral.gguf", 8192, (14, 7, 0), "length"),
        ("ollama", "qwen3:30b", 0, (14, 9, 0), "stop"),
    ],
)
def test_recorded_exchanges(kind: str, model: str, window: int, counts: tuple[int, int, int], reason: str) -> None:
    with serving(recorded(kind)) as server, connected(server.url) as client:
        ready = heard(client, Loaded, Failed)[-1]
        assert isinstance(ready, Loaded)
        assert (ready.model, ready.context_window) == (model, window)
        assert ready.remote == client.remote == server.url.removeprefix("http://") and ready.presets == ()
        updates = asked(client)
    assert text(updates) == ANSWER
    assert thought(updates) == {"vllm": "The user asks.", "ollama": "Short."}.get(kind, "")
    ended = updates[-1]
    assert isinstance(ended, Finished) and ended.reason == reason
    stats = ended.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.reused_tokens) == counts
    assert stats.context_used == counts[0] + counts[1] and stats.context_window == window
    assert stats.first_token_s is not None and stats.first_token_s >= 0
    assert (stats.prefill_tps, stats.active_neurons, stats.kv_bytes, stats.rows) == (None, None, None, None)
    body = server.questions[0].body
    assert body["model"] == model and body["stream"] is True and body["stream_options"]["include_usage"] is True
    assert body["messages"] == [{"role": turn.role, "content": turn.text} for turn in ASKED]
    assert [asked.path for asked in server.asked] == ["/v1/models", "/v1/chat/completions"]
    assert any(isinstance(update, Stats) for update in updates)  # figures come while it runs
    assert sum(update.tokens for update in updates if isinstance(update, ThoughtDelta)) == 4 * (kind == "vllm")


def test_thinking_is_counted_where_the_server_counts() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 6}}
    updates, _server = exchange(Reply(parts=said({"reasoning": "Hm."}, HELLO, usage=usage)))
    assert sum(update.tokens for update in updates if isinstance(update, ThoughtDelta)) == 6


def test_without_usage_pieces_are_counted_and_it_says_so() -> None:
    updates, _server = exchange(Reply(parts=said(HELLO, {"content": " you"})))
    ended = updates[-1]
    assert isinstance(ended, Finished) and ended.stats.new_tokens == 2
    assert (ended.stats.prompt_tokens, ended.stats.context_used, ended.stats.decode_tps_mean) == (None, None, None)
    assert any(isinstance(update, Notice) and "does not say" in update.title for update in updates)


def test_sampling_values_that_are_off_are_not_sent() -> None:
    with talking(Reply(parts=said(HELLO)), listed=models("tiny", owned_by="llamacpp")) as (server, client):
        asked(client, Sampling(0.5, 40, 0.9, 0.05, 1.1, 7))
        asked(client, Sampling(0, 0, 1.0, 0.0, 1.0, None))
    first, second = (one.body for one in server.questions)
    chosen = {"temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "repeat_penalty": 1.1, "seed": 7}
    assert chosen.items() <= first.items() and first["max_tokens"] == 64
    assert second["temperature"] == 0 and not {*chosen} - {"temperature"} & set(second)


def test_fields_that_a_server_does_not_know_are_left_out() -> None:
    refusals = [
        refusing(400, "Unrecognized request argument supplied: min_p"),
        refusing(400, "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."),
    ]
    with talking(*refusals, Reply(parts=said(HELLO))) as (server, client):
        updates = asked(client, Sampling(min_p=0.1))
        assert text(updates) == text(asked(client, Sampling(min_p=0.1))) == "Hello"
    bodies = [one.body for one in server.questions]
    assert [("min_p" in body, "max_tokens" in body) for body in bodies] == [
        *((True, True), (False, True), (False, False), (False, False)),
    ]
    assert bodies[-1]["max_completion_tokens"] == 64
    assert next(update.title for update in updates if isinstance(update, Notice)).endswith("does not know min_p")


def test_refusals_in_other_words() -> None:
    extra = [{"loc": ["body", name], "msg": "Extra inputs are not permitted"} for name in ("min_p", "seed")]
    unexpected = "Unexpected fields in the request: {'min_p', 'seed'}."
    for body in ({"detail": unexpected}, {"detail": extra}, {"error": "unknown fields min_p and seed"}):
        refusal = Reply(422, (json.dumps(body).encode(),), "application/json")
        with talking(refusal, Reply(parts=said(HELLO))) as (server, client):
            assert text(asked(client, Sampling(min_p=0.1, seed=1))) == "Hello"
        assert not {"min_p", "seed"} & set(server.questions[1].body)


def test_an_answer_is_continued() -> None:
    with talking(Reply(parts=said(HELLO)), listed=models("tiny", owned_by="vllm")) as (server, client):
        asked(client, answer="An exp")
        with pytest.raises(FloeError, match="cannot continue thinking"):
            client.prepare(Question(ASKED, Sampling(), 64, thought="Hm"))
    body = server.questions[0].body
    assert body["messages"][-1] == {"role": "assistant", "content": "An exp"}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_control_characters_and_halves_of_characters() -> None:
    parts = (
        b'data: {"choices":[{"delta":{"content":"a\\u001b[2Jb\\r\\n\\u202e\\ud83d"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\ude00c\\ud800"}}]}\n\n',
        *said(),
    )
    updates, _server = exchange(Reply(parts=parts))
    assert text(updates) == "a\u241b[2Jb\n\ufffd\U0001f600c\ufffd"


def test_a_server_that_does_not_stream() -> None:
    whole = {"choices": [{"message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}]}
    updates, _server = exchange(Reply(parts=(json.dumps(whole).encode(),), kind="application/json"))
    assert text(updates) == "Hello" and isinstance(updates[-1], Finished)


@pytest.mark.parametrize("moment", ["prepared", "asked", "first text", "one of three", "ended"])
def test_stopping_is_final_at_every_moment(moment: str) -> None:
    """The connection closes, nothing but the end comes, and the next question is answered."""
    parts = () if moment == "asked" else said(HELLO, reason=None)
    reply = Reply(parts=said(HELLO)) if moment == "ended" else Reply(parts=parts, end="hang")
    with talking(reply) as (server, client):
        requests = client.prepare(Question(ASKED, Sampling(), 64), 3 if moment == "one of three" else 1)
        if moment != "prepared":
            client.begin()
        came = [] if moment == "prepared" else heard(client, Finished if moment == "ended" else Submitted)
        while moment in ("first text", "one of three") and {
            update.request for update in came if isinstance(update, TextDelta)
        } != {*requests}:
            came += heard(client, TextDelta)
        while moment == "asked" and not server.questions:
            assert not server.left.wait(0.01)
        client.cancel(requests[0])
        client.begin()
        if moment != "ended":
            ended = heard(client, Finished, Failed)
            ends = [update for update in ended if isinstance(update, (Finished, Failed))]
            assert [(end.request, getattr(end, "reason", end)) for end in ends] == [(1, "cancelled")]
            assert not [update for update in ended if isinstance(update, TextDelta) and update.request == 1]
        assert (
            server.left.wait(60)
            if moment not in ("prepared", "ended")
            else len(server.questions) == (moment == "ended")
        )
        client.cancel()
        others = list[Update]()
        while {update.request for update in others if isinstance(update, Finished)} != {*requests[1:]}:
            others += heard(client, Finished)
        server.answers = [Reply(parts=said(HELLO))]
        assert text(asked(client)) == "Hello"


@pytest.mark.parametrize(
    ("reply", "title", "words", "code"),
    [
        (refusing(401, f"Incorrect API key provided: {KEY}"), "refuses the key", "provided: (the key)", 1),
        (refusing(403, "no access"), "refuses the key", "no access", 1),
        (refusing(404, "The model `tiny` does not exist."), "does not know", "does not exist", 2),
        (refusing(429, "Rate limit", retry_after="7"), "too many requests", "7 seconds", 3),
        (refusing(500, "CUDA error"), "has a problem", "CUDA error", 3),
        (refusing(503), "has a problem", "status 503", 3),
        (refusing(400, "This model's maximum context length is 4096 tokens."), "too long for", "4096", 2),
        (refusing(422, "temperature is not for you"), "refuses the request", "not for you", 2),
        (Reply(302, (), headers={"location": "http://evil.example/v1"}), "does not answer itself", "evil.example", 2),
        (Reply(parts=(b"<html>",), kind="text/html"), "does not answer as a model server", "text/html", 1),
        (Reply(parts=(b"data: {nope\n\n",)), "does not answer as a model server", "not JSON", 1),
        (Reply(parts=(b'data: ["a"]\n\n',)), "does not answer as a model server", "not an answer", 1),
        (Reply(parts=(b"data: " + b"[" * 100_000 + b"\n\n",)), "does not answer as a model server", "not JSON", 1),
        (Reply(parts=(b"x" * (MOST_LINE + 1),)), "does not answer as a model server", "more than any answer", 1),
        (Reply(parts=(b"",), headers={"content-encoding": "gzip"}), "does not answer", "compressed", 1),
        (Reply(parts=(b'data: {"error":{"message":"out of memory","code":500}}\n\n',)), "gave up", "of memory", 1),
        (Reply(parts=(b'error: {"code":500,"message":"slot lost","type":"server_error"}\n\n',)), "gave up", "slot", 1),
        (Reply(parts=said(reason="abort")), "gave up", "does not say why", 1),
        (Reply(), "broke off", "ended before", 1),
        (Reply(end="hang"), "is silent", "Nothing came", 3),
    ],
)
def test_failures(reply: Reply, title: str, words: str, code: int) -> None:
    updates, server = exchange(reply, key=KEY, silence=1.0 if reply.end == "hang" else 30.0)
    failed = failure(updates)
    said_of_it = f"{failed.title} {failed.cause} {failed.hint}"
    assert title in failed.title and words in said_of_it and failed.exit_code == code
    assert failed.request == 1 and KEY not in said_of_it
    assert len(server.questions) == 1 and server.questions[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("end", ["die", "close"])
def test_what_came_before_the_server_died_is_kept(end: str) -> None:
    with talking(Reply(parts=said(HELLO, reason=None), end=end)) as (server, client):
        updates = asked(client)
        assert text(updates) == "Hello" and "What came so far is kept" in failure(updates).cause
        server.answers = [Reply(parts=said(HELLO))]  # and the next question is answered
        assert isinstance(asked(client)[-1], Finished)


def test_a_death_after_the_end_of_the_answer_is_none() -> None:
    updates, _server = exchange(Reply(parts=said(HELLO)[:-1], end="die"))
    assert isinstance(updates[-1], Finished) and text(updates) == "Hello"


def test_too_much_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("floe_chat.app.client.remote.answer.MOST_TEXT", 100)
    updates, _server = exchange(Reply(parts=said(*({"content": "x" * 30} for _ in range(9)))))
    assert len(text(updates)) <= 100 and "more text" in failure(updates).cause


@pytest.mark.parametrize(
    ("listed", "title", "code"),
    [
        (models(), "offers no model", 2),
        (models("one", "two"), "offers 2 models", 2),
        (refusing(401), "wants a key", 1),
        (refusing(404), "does not know", 2),
        (refusing(500), "has a problem", 3),
        (Reply(parts=(b"<html>",), kind="text/html"), "does not answer as a model server", 1),
        (Reply(parts=(b'{"data": 3}',), kind="application/json"), "does not answer as a model server", 1),
        (Reply(parts=(b" " * (1 << 20),) * 9, kind="application/json"), "does not answer as a model server", 1),
    ],
)
def test_no_model_can_be_chosen(listed: Reply, title: str, code: int) -> None:
    with serving(ModelServer(listed)) as server, connected(server.url) as client:
        failed = failure(heard(client, Loaded, Failed))
    assert title in failed.title and failed.exit_code == code and failed.request is None


def test_models_are_named() -> None:
    both, wanted = models("org/one", "org/two"), {"two": "org/two", "ORG/ONE": "org/one"}
    for name, found in wanted.items():
        with talking(listed=both, model=name) as (server, client):
            assert client.reference == f"{server.url}/v1/models/{found}"
    for listed in (refusing(404), models()):
        with talking(listed=listed, model="tiny") as (server, client):
            assert client.reference == f"{server.url}/v1/models/tiny"
    with serving(ModelServer(models("a\x1b[2J\nb" + "c" * 900))) as server, connected(server.url) as client:
        ready = heard(client, Loaded, Failed)[-1]
        assert isinstance(ready, Loaded) and ready.model.isprintable() and len(ready.model) < 300


def test_what_no_longer_fits_is_left_out() -> None:
    """Where the server says how long its context is."""
    answer = Reply(parts=said(HELLO, usage={"prompt_tokens": 10, "completion_tokens": 2}))
    old = [PromptTurn("user", "o" * 300), PromptTurn("assistant", "p" * 300)]
    with talking(answer) as (server, client):
        assert client.submit(Question([ASKED[0], *old * 99, ASKED[1]], Sampling(), 64)).dropped == 0
        heard(client, Finished, Failed)
        assert len(server.questions[0].body["messages"]) == 200
    with talking(answer, listed=models("tiny", max_model_len=200)) as (server, client):
        submitted = client.submit(Question([ASKED[0], *old, ASKED[1]], Sampling(), 64))
        heard(client, Finished, Failed)
        assert submitted.dropped == 2 and submitted.prompt_tokens is None
        long = [ASKED[0], PromptTurn("user", "q" * 5000)]  # the server decides about that
        assert client.submit(Question(long, Sampling(), 64)).dropped == 0
        heard(client, Finished, Failed)
    assert [len(one.body["messages"]) for one in server.questions] == [2, 2]


def test_one_question_at_a_time() -> None:
    with serving(ModelServer(models("tiny"), Reply(parts=said(HELLO)))) as server:
        client = RemoteClient(Address.parse(server.url), Key())
        with pytest.raises(FloeError, match="not connected yet"):
            client.prepare(Question(ASKED, Sampling(), 64))
        client.start()
        heard(client, Loaded)
        client.prepare(Question(ASKED, Sampling(), 64))
        with pytest.raises(FloeError, match="still answering"):
            client.prepare(Question(ASKED, Sampling(), 64))
        client.close()


def test_the_key_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        exchange(Reply(parts=said(HELLO)), key=KEY)
    assert KEY not in caplog.text and KEY not in repr(Key(KEY))


def test_the_thread_ends() -> None:
    hanging = Reply(parts=said(HELLO, reason=None), end="hang")
    with talking(hanging) as (server, client):
        client.submit(Question(ASKED, Sampling(), 64))
        heard(client, TextDelta)
        client.close()
        assert server.left.wait(60)
        assert not any(thread.name == "floe-remote" and thread.is_alive() for thread in threading.enumerate())


# A server's stream: any cut into parts gives the same events, and nothing that it sends ends in a traceback


KINDS = ("vllm", "sglang", "llama-server", "ollama")


async def cut(stream: bytes, size: int) -> AsyncGenerator[bytes]:
    for at in range(0, len(stream), size):
        yield stream[at : at + size]


async def read(stream: bytes, size: int = 1 << 20) -> list[str]:
    return [event async for event in events(cut(stream, size))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7])
async def test_any_cut_gives_the_same_events(kind: str, size: int) -> None:
    stream = (RECORDED / f"{kind}-answer.sse").read_bytes()
    whole = [line.removeprefix("data: ") for line in stream.decode().splitlines() if line][:-1]
    assert await read(stream, size) == await read(stream.replace(b"\n", b"\r\n"), size) == whole


async def test_events() -> None:
    streams = {b": ping\n\ndata: a\n\n": ["a"], b"data:a\ndata: b\nid: 3\nevent: x\n\n": ["a\nb"], b"data: a": ["a"]}
    streams |= {b"data: [DONE]\n\ndata: b\n\n": [], b"\n\n\n": [], b"data: \xff\n\n": ["\ufffd"]}
    for stream, found in streams.items():
        assert await read(stream) == found, stream


async def test_every_part_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_stream, "MOST_LINE", 50)
    monkeypatch.setattr(remote_stream, "MOST_STREAM", 500)
    for stream in (b"data: " + b"x" * 99, b"data: x\n" * 30, b": ping\n\n" * 99):
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
    for _ in range(200):
        try:
            piece = piece_of(json.dumps(changed(chance.choice(chunks), chance)))
        except NotAnAnswerError as error:
            assert str(error).endswith(".")
            continue
        assert isinstance(piece, Piece) and isinstance(piece.text + piece.thought + piece.reason + piece.error, str)
        counts = () if piece.usage is None else (piece.usage.prompt, piece.usage.new, piece.usage.reused)
        assert all(count is None or (type(count) is int and count >= 0) for count in counts)
        SafeText().take(piece.text, last=True).encode()
    for _ in range(200):
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


# A server that does not say how long its context is: that is shown, and its refusal becomes a clear sentence


# As the servers word it.
REFUSALS = {
    "vLLM": (400, "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens."),
    "SGLang": (400, "The input (5000 tokens) is longer than the model's context length (4096 tokens)."),
    "llama-server": (400, "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it"),
    "older llama-server": (500, "Input prompt is too big compared to KV size. Please try increasing KV size."),
    "llama-server without shift": (500, "context shift is disabled"),
    "Ollama": (400, "prompt too long; exceeded max context length by 904 tokens"),
    "LM Studio": (400, "The number of tokens to keep from the initial prompt is greater than the context length"),
    "TGI": (422, "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000"),
    "a proxy": (413, ""),
}


def test_a_refusal_of_a_long_chat() -> None:
    for code, words in REFUSALS.values():
        failed = failure(exchange(refusing(code, words))[0])
        assert "The chat is too long for 127.0.0.1" in failed.title and failed.exit_code == 2
        assert words.rstrip(".") in failed.cause and "Start a new chat" in failed.hint
    for words in ("the worker took too long", "out of memory", "size of the context is fine"):
        assert "has a problem" in failure(exchange(refusing(500, words))[0]).title
    error = {"code": 400, "message": REFUSALS["llama-server"][1], "type": "exceed_context_size_error"}
    for form, sent in ((b"data: %s\n\n", {"error": error}), (b"error: %s\n\n", error)):  # within the stream
        updates, _server = exchange(Reply(parts=(form % json.dumps(sent).encode(),)))
        assert "too long for" in failure(updates).title


async def test_the_screen_says_that_it_is_not_known() -> None:
    with serving(ModelServer(models("tiny"))) as server:
        client = RemoteClient(Address.parse(server.url), Key(), patience=Patience(30, 0.01))
        async with app_for(client).run_test(size=(120, 40)) as pilot:
            await until(pilot, lambda: "context window" in screen_text(pilot) and "not known" in screen_text(pilot))
            bottom = screen_text(pilot).splitlines()[-1]
            assert "context" not in bottom and "window" not in bottom  # rather than a number that nobody knows
        client.close()


# A server's certificate: who cannot prove to be the named host gets neither key nor chat


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing makes a certificate")


def certificate(folder: Path, names: str) -> tuple[Path, ssl.SSLContext]:
    """A certificate of one's own for these names, signed by itself, and what serves with it."""
    key, made = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=a test", "-addext", f"subjectAltName={names}"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    return made, context


def server(tls: ssl.SSLContext) -> ModelServer:
    return ModelServer(models("tiny"), Reply(parts=said({"content": ANSWER})), tls=tls)


@needs_openssl
@pytest.mark.parametrize(
    ("names", "trusted", "why"),
    [("IP:127.0.0.1", False, "self-signed"), ("DNS:example.org,IP:127.0.0.2", True, "IP address mismatch")],
)
def test_a_wrong_certificate(
    names: str, trusted: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, tls = certificate(tmp_path, names)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(made))
    with serving(server(tls)) as asked:
        client = RemoteClient(Address.parse(asked.url), Key(KEY), patience=Patience(30, 0.01))
        client.start()
        failed = heard(client, Failed, Loaded)[-1]
        client.close()
        assert isinstance(failed, Failed) and "cannot prove that it is 127.0.0.1" in failed.title
        assert why in failed.cause and "SSL_CERT_FILE" in failed.hint and failed.exit_code == 1
        assert not asked.asked  # neither the key nor anything else


@needs_openssl
def test_a_certificate_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, tls = certificate(tmp_path, "IP:127.0.0.1")
    monkeypatch.setenv("SSL_CERT_FILE", str(made))
    with serving(server(tls)) as asked:
        client = RemoteClient(Address.parse(asked.url), Key(KEY))
        client.start()
        assert isinstance(heard(client, Loaded, Failed)[-1], Loaded) and "encrypted on the way" in client.privacy
        client.submit(Question([PromptTurn("user", "Hi")], Sampling(), 8))
        assert text(heard(client, Finished, Failed)) == ANSWER
        client.close()
    assert {one.headers["authorization"] for one in asked.asked} == {f"Bearer {KEY}"}


# `--connect` for `ask` and the line by line chat, and saved servers


def test_ask(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1")
    (tmp_path / "key").chmod(0o600)
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "--key-file", str(tmp_path / "key"), "What is an expert?")
        assert (ran.code, ran.out, ran.err) == (0, f"{ANSWER}\n", "")
        assert {one.headers["authorization"] for one in server.asked} == {"Bearer sk-1"}
        ran = run_cli("ask", "--connect", server.url, "hi", "--no-save", "--thinking", "off")
    assert ran.out == f"{ANSWER}\n" and "may think all the same" in ran.err
    assert server.questions[1].body["chat_template_kwargs"] == {"enable_thinking": False}
    saved = open_history(history_file()).store.newest()
    assert saved is not None and saved.setup.model == f"{server.url}/v1/models/Qwen/Qwen3-30B-A3B"
    kept = [path for path in history_file().parent.rglob("*") if path.is_file() and b"sk-1" in path.read_bytes()]
    assert kept == []


def test_ask_gives_the_figures_that_can_be_known() -> None:
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "hi", "--json", "--no-save", "--max-tokens", "9", "--seed", "3")
    fields = json.loads(ran.out)
    assert fields["remote"] == server.url.removeprefix("http://") and fields["model"] == "Qwen/Qwen3-30B-A3B"
    assert (fields["prompt_tokens"], fields["new_tokens"], fields["thinking_tokens"]) == (14, 11, 4)
    assert fields["thinking"] == "The user asks." and fields["first_token_s"] >= 0
    assert (fields["preset"], fields["active_neurons"], fields["rows"]) == ("", None, None)
    body = server.questions[0].body
    assert (body["max_tokens"], body["seed"], body["messages"][-1]["content"]) == (9, 3, "hi")


def test_a_local_chat_is_sent_away_with_a_word(tiny_pack: Path) -> None:
    assert run_cli("ask", "-m", str(tiny_pack), "first", "--max-tokens", "3").code == 0
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "--continue", "second")
    assert ran.code == 0 and f"sends all of it to {server.url.removeprefix('http://')}" in ran.err


def test_a_servers_chat_comes_home_with_a_word() -> None:
    with serving(recorded("vllm")) as server:
        assert run_cli("ask", "--connect", server.url, "first").code == 0
    ran = run_cli("ask", "--continue", "second", "--max-tokens", "3")
    assert ran.code == 0 and f"floe-chat --connect {server.url}/v1 continues it there. demo answers instead." in ran.err
    assert len(server.questions) == 1


def test_what_came_is_printed_and_saved_when_the_server_dies() -> None:
    dying = Reply(parts=said({"content": "Half an"}, reason=None), end="die")
    with serving(ModelServer(models("tiny"), dying)) as server:
        ran = run_cli("ask", "--connect", server.url, "hi")
    assert ran.code == 3 and ran.out == "Half an" and "What came so far is kept" in ran.err
    history = open_history(history_file()).store
    chat = history.newest()
    assert chat is not None
    answer = history.messages(history.branch(chat.head))[-1]
    assert (answer.text, answer.state) == ("Half an", "failed")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--connect", "example.org:80"), 2, "does not say whether to encrypt"),
        (("--connect", "ftp://example.org"), 2, "neither with http:// nor with https://"),
        (("--connect", "https://me:secret@example.org"), 2, "must not hold a password"),
        (("--connect", "http://127.0.0.1:99999"), 2, "is not the address of a server"),
        (("--connect", "http://127.0.0.1:8000/v1?key=x"), 2, "is not the address of a server"),
        (("--connect", "http://127.0.0.1:8000", "--vram", "8gb"), 2, "--vram is for models of this machine"),
        (("--key-file", "somewhere"), 2, "Give --connect URL too"),
        (("--connect", "http://127.0.0.1:8000", "--key-file", "nowhere"), 2, "nowhere cannot be read"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], code: int, words: str) -> None:
    ran = run_cli("ask", "hi", *arguments)
    assert ran.code == code and words in ran.err and "secret" not in ran.err and "Traceback" not in ran.err


def test_failures_end_in_a_sentence() -> None:
    ran = run_cli("ask", "--connect", f"127.0.0.1:{unused_port()}", "hi")
    assert ran.code == 3 and "cannot be reached" in ran.err and "No server listens there" in ran.err
    with serving(ModelServer(models("one", "two"))) as server:
        ran = run_cli("ask", "--connect", server.url, "hi")
        assert ran.code == 2 and "It offers one, two." in ran.err and "--model NAME" in ran.err


def test_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="Other users can read"):
        read_key(file)
    file.chmod(0o600)
    assert read_key(file) == Key("sk-1")
    monkeypatch.setenv(KEY_VARIABLE, "sk-2")
    assert read_key(None) == Key("sk-2") and read_key(None) == Key()  # no program started from here gets it
    for bad in ("", "sk\u00e9", "two words"):
        file.write_text(bad)
        with pytest.raises(UsageError) as raised:
            read_key(file)
        assert not bad or bad not in str(raised.value)


def test_addresses() -> None:
    for given, base, host in (
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "127.0.0.1:8000"),
        ("http://[::1]:8080/", "http://[::1]:8080/v1", "[::1]:8080"),
        ("https://Example.org/api/v1/", "https://example.org/api/v1", "example.org"),
        ("https://example.org/v1/chat/completions", "https://example.org/v1", "example.org"),
    ):
        address = Address.parse(given)
        assert (address.base, address.host) == (base, host)
        assert address.loopback == (host != "example.org") and address.encrypted == given.startswith("https")


def test_proxies_see_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", "inside.example")
    asked = ("https://example.org", "http://example.org", "https://127.0.0.1", "https://inside.example")
    assert [proxy_for(Address.parse(url)) for url in asked] == ["http://proxy.example:3128", None, None, None]
    with serving(recorded("vllm")) as server:
        assert run_cli("ask", "--connect", server.url, "hi").code == 0


def test_ask_says_when_others_can_read_it() -> None:
    ran = run_cli("ask", "--connect", "http://nothing.invalid:80", "hi", "--no-save")
    assert ran.code == 3 and "sent to nothing.invalid:80, not encrypted: others on the network" in ran.err
    assert "There is no host nothing.invalid" in ran.err


def test_line_by_line() -> None:
    lines = (
        b"What is an expert?\n/preset\n/stats\n/models demo\n/preset\n/models lab\n/models gone\n/models\nhi\n/quit\n"
    )
    keep(SavedServer("gone", f"http://127.0.0.1:{unused_port()}/v1"))
    with serving(recorded("vllm")) as server:
        keep(SavedServer("lab", f"{server.url}/v1"))
        ran = run_cli("--plain", "--connect", server.url, stdin=lines)
    host = server.url.removeprefix("http://")
    assert f"Qwen/Qwen3-30B-A3B: {ANSWER}" in ran.out
    assert f"answers, remote at {host}. Your questions, the chat before them" in ran.err
    assert f"{host} decides about quality." in ran.err and "11 tokens" in ran.err
    assert "demo answers at preset" in ran.err and "Presets, best quality first: " in ran.err
    assert "cannot be reached" in ran.err and f"lab: remote, {server.url}/v1 (answers now)" in ran.err
    assert len(server.questions) == 2 and ran.code == 1  # a line could not be carried out


def test_a_saved_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(ModelServer(models("one", "two"), Reply(parts=said({"content": "Hi"})))) as server:
        added = run_cli("models", "add-server", "lab", server.url, "--model", "two", "--key", stdin=b"sk-typed\n")
        assert added.code == 0 and "sk-typed" not in added.out + added.err
        assert servers_file().stat().st_mode & 0o777 == 0o600
        listed = run_cli("models")
        assert f"lab                             {server.url}/v1 two" in listed.out and "sk-typed" not in listed.out
        assert "sk-typed" not in run_cli("models", "--json").out
        monkeypatch.setenv(KEY_VARIABLE, "sk-other")
        assert run_cli("ask", "--connect", "lab", "hi", "--no-save").out == "Hi\n"
    assert server.questions[0].body["model"] == "two"
    assert {one.headers["authorization"] for one in server.asked} == {"Bearer sk-typed"}
    assert run_cli("models", "remove-server", "lab").code == 0
    assert "sk-typed" not in servers_file().read_text()
    ran = run_cli("ask", "--connect", "lab", "hi")
    assert ran.code == 2 and "There is no saved server lab" in ran.err


def test_a_name_is_no_address() -> None:
    for name in ("localhost", "a.b", "../x", "", "x" * 41):
        ran = run_cli("models", "add-server", name, "http://127.0.0.1:8000")
        assert ran.code == 2 and "cannot be the name of a server" in ran.err and not servers_file().exists()


def test_a_damaged_file_of_servers() -> None:
    servers_file().parent.mkdir(parents=True, exist_ok=True)
    for content in ("{", '{"a": 1}', '[{"name": "x", "url": "u", "more": 1}]', "[3]"):
        servers_file().write_text(content)
        ran = run_cli("ask", "--connect", "lab", "hi")
        assert ran.code == 1 and "servers.json cannot be read" in ran.err
    assert run_cli("ask", "--connect", "lab", "hi", "--no-save").code == 1
