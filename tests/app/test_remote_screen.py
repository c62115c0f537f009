"""The chat screen in front of a server: questions, stop, failures, and "remote" wherever the person looks."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from floe_chat.app.client.remote.address import Address, Key
from floe_chat.app.client.remote.client import Patience, RemoteClient
from floe_chat.app.history import History
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups
from floe_chat.app.widgets.chat.blocks import Welcome
from textual.pilot import Pilot

from .model_server import ANSWER, ModelServer, recorded, serving
from .scripted import app_for, order, screen_text, status, text_of, until
from .wizardry import surveyor

HELLO = {"content": "Hello"}


@asynccontextmanager
async def connected(
    server: ModelServer, size: tuple[int, int] = (120, 40), *, wait: str = "ready", history: History | None = None
) -> AsyncGenerator[Pilot[int]]:
    """The screen, connected to `server`."""
    client = RemoteClient(Address.parse(server.url), Key(), patience=Patience(30, 0.01))
    app = app_for(client, history=history)
    try:
        async with app.run_test(size=size, notifications=True) as pilot:
            await until(pilot, lambda: status(pilot).state == wait)
            yield pilot
    finally:
        client.close()


async def answered(pilot: Pilot[int], text: str = ANSWER) -> None:
    await until(pilot, lambda: text in screen_text(pilot) and status(pilot).state in ("ready", "stopped"))


async def test_the_panel_shows_what_can_be_known() -> None:
    with serving(recorded("vllm")) as server:
        async with connected(server) as pilot:
            shown = screen_text(pilot)
            assert "prefill" not in shown and "window 40960" in shown and "context 0" not in shown
            await order(pilot, "What is an expert?")
            await answered(pilot)
            await until(pilot, lambda: "context 25/40960" in screen_text(pilot) and "11 tokens" in screen_text(pilot))
            shown = screen_text(pilot)
            assert "vLLM at 127.0.0.1" in shown and "prompt tokens" in shown and "40,960 tokens" in shown
            for local in ("Neurons", "Experts", "KV cache", "prefill", "resident weights"):
                assert local not in shown
            assert "11 tokens" in shown and "first token" in shown


async def test_every_page_says_remote(setups: Setups) -> None:
    with serving(recorded("vllm")) as server:
        async with connected(server) as pilot:
            host = server.url.removeprefix("http://")
            welcome = text_of(pilot.app.screen.query_one(Welcome))
            assert f"remote. Your questions, the chat before them and attached files are sent to {host}" in welcome
            assert "Nothing you write leaves it" not in screen_text(pilot)
            for page in ("/history", "/models"):
                await order(pilot, page)
                await until(pilot, lambda: len(pilot.app.screen_stack) == 2)
                await until(pilot, lambda: f"remote {host}" in screen_text(pilot))
                await pilot.press("escape")
                await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
            pilot.app.push_screen(WizardScreen(setups, entries=(), surveyor=surveyor()))
            await until(pilot, lambda: f"remote {host}" in screen_text(pilot) and "machine" in screen_text(pilot))
            await pilot.press("escape")
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
            await pilot.resize_terminal(59, 19)
            await until(pilot, lambda: f"remote {host}" in screen_text(pilot) and "at least" in screen_text(pilot))
            await pilot.resize_terminal(120, 40)
            await until(pilot, lambda: len(pilot.app.screen_stack) == 1)
            await order(pilot, "/quality")
            await until(pilot, lambda: f"{host} decides about quality" in screen_text(pilot))


async def test_a_local_chat_says_that_it_is_sent_away(tmp_path: Path) -> None:
    from floe_chat.app.history import ChatSetup

    history = History(tmp_path / "history.db")
    chat = history.begin(ChatSetup("demo"))
    history.answering(history.ask(chat, None, "secret", ()), "demo", "").finish(None)
    history.settle()
    with serving(recorded("vllm")) as server:
        async with connected(server, history=history) as pilot:
            await order(pilot, "/last")
            said_so = "demo answered this chat. Your next question sends all of it"
            await until(pilot, lambda: said_so in screen_text(pilot))
            assert not server.questions
