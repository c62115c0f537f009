"""`--connect` for `ask`, the line by line chat and the screen, against a real server on this machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from floe_chat.app.client.remote.address import KEY_VARIABLE, Address, Key, read_key
from floe_chat.app.client.remote.http import proxy_for
from floe_chat.app.history import history_file, open_history
from floe_chat.app.settings.servers import SavedServer, keep, servers_file
from floe_chat.models.errors import UsageError

from ..helpers import run_cli
from .model_server import ANSWER, ModelServer, Reply, models, recorded, said, serving, unused_port


def test_ask() -> None:
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "What is an expert?")
    assert (ran.code, ran.out, ran.err) == (0, f"{ANSWER}\n", "")
    saved = open_history(history_file()).store.newest()
    assert saved is not None and saved.setup.model == f"{server.url}/v1/models/Qwen/Qwen3-30B-A3B"


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


def test_answers_without_thinking_are_asked_for() -> None:
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "hi", "--no-save", "--thinking", "off")
    assert ran.out == f"{ANSWER}\n" and "may think all the same" in ran.err
    assert server.questions[0].body["chat_template_kwargs"] == {"enable_thinking": False}


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


def test_the_key_goes_to_the_server_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk-1")
    file.chmod(0o600)
    with serving(recorded("vllm")) as server:
        ran = run_cli("ask", "--connect", server.url, "--key-file", str(file), "hi")
    assert ran.code == 0 and {one.headers["authorization"] for one in server.asked} == {"Bearer sk-1"}
    kept = [path for path in history_file().parent.rglob("*") if path.is_file() and b"sk-1" in path.read_bytes()]
    assert kept == []


@pytest.mark.parametrize(
    ("given", "base", "host"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1", "127.0.0.1:8000"),
        ("localhost", "http://localhost/v1", "localhost"),
        ("http://[::1]:8080/", "http://[::1]:8080/v1", "[::1]:8080"),
        ("https://Example.org/api/v1/", "https://example.org/api/v1", "example.org"),
        ("https://example.org/v1/chat/completions", "https://example.org/v1", "example.org"),
    ],
)
def test_addresses(given: str, base: str, host: str) -> None:
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


@pytest.mark.parametrize("name", ["localhost", "a.b", "../x", "", "x" * 41])
def test_a_name_is_no_address(name: str) -> None:
    ran = run_cli("models", "add-server", name, "http://127.0.0.1:8000")
    assert ran.code == 2 and "cannot be the name of a server" in ran.err and not servers_file().exists()


def test_a_damaged_file_of_servers() -> None:
    servers_file().parent.mkdir(parents=True, exist_ok=True)
    for content in ("{", '{"a": 1}', '[{"name": "x", "url": "u", "more": 1}]', "[3]"):
        servers_file().write_text(content)
        ran = run_cli("ask", "--connect", "lab", "hi")
        assert ran.code == 1 and "servers.json cannot be read" in ran.err
    assert run_cli("ask", "--connect", "lab", "hi", "--no-save").code == 1
