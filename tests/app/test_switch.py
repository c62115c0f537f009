"""Another model in mid-chat, and the first run: with the real engine and tiny models."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.engines import Engines
from floe_chat.app.client.interface import Client
from floe_chat.app.history import ChatSetup, History
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.screens.models import AddServerScreen, ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.settings.file import change, read
from floe_chat.app.settings.servers import SavedServer, forget, keep, servers, servers_file
from floe_chat.app.tui import FloeChatApp
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.panel.status_line import StatusLine
from floe_chat.engine.events import Sampling
from floe_chat.models import catalog
from floe_chat.models.packing.pack import PackSpec
from textual.pilot import Pilot

from ..helpers import make_checkpoint, make_pack
from .model_server import ANSWER, ModelServer, Reply, models, recorded, refusing, said, serving, unused_port
from .scripted import composer, order, screen_text, status, until, write
from .wizardry import paste, see, shown


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second model, called other, in the models folder."""
    folder = catalog.models_folder() / "other"
    folder.parent.mkdir(parents=True)
    make_pack(make_checkpoint(tmp_path / "source", layers=1, window=300), folder, PackSpec(), "other")
    return folder


async def test_where_experts_are_is_chosen_in_the_chat(tiny_pack: Path) -> None:
    client = Engines(ChatClient(tiny_pack, device="sim:rtx3060-12gb"), ChatClient)
    app = FloeChatApp(client, sampling=Sampling(temperature=0, seed=1), max_new_tokens=300)
    async with app.run_test(size=(100, 30)) as pilot:

        async def placed(placement: str, words: str) -> None:
            await until(pilot, lambda: client.placement == placement and words in screen_text(pilot))
            await until(pilot, lambda: status(pilot).state == "ready")

        await until(pilot, lambda: status(pilot).state == "ready")
        await pilot.press("f4", "up")
        await until(pilot, lambda: "Now 2 layers all on the GPU. Enter loads" in screen_text(pilot))
        await pilot.press("right")
        await until(pilot, lambda: "◂ pool of rows, as fits ▸" in screen_text(pilot))
        await pilot.press("enter")
        await placed("pool", "2 layers with a pool of")
        await order(pilot, "one")
        await until(pilot, lambda: status(pilot).state.startswith("writing"))
        await order(pilot, "/mix static")
        await until(pilot, lambda: "Stop the answer first" in screen_text(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: status(pilot).state == "stopped")
        # A pool that cannot be is refused, and the model answers as before.
        await order(pilot, "/mix pool:0.00001mb")
        await until(pilot, lambda: "does not suit this model" in screen_text(pilot))
        await placed("pool", "tiny answers again")
        await order(pilot, "/mix heap")
        await until(pilot, lambda: "There is no placement 'heap'" in screen_text(pilot))
        await order(pilot, "/mix")
        await until(pilot, lambda: "pool (now)" in screen_text(pilot))
        await order(pilot, "/mix cpu")
        await placed("cpu", "Its experts: 2 layers by the CPU")
    client.close()


@pytest.mark.thorough
async def test_the_chat_goes_on_with_another_model(tiny_pack: Path, other: Path) -> None:
    history, client = History(None), ChatClient(tiny_pack)
    app = FloeChatApp(client, sampling=Sampling(temperature=0, seed=1), max_new_tokens=6, history=history)
    async with app.run_test(size=(100, 30)) as pilot:
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        await until(pilot, lambda: chat.controller.model.name == "tiny")
        await order(pilot, "one")
        await until(pilot, lambda: len(chat.query(AnswerTurn)) == 1 and "ready" in chat.query_one(StatusLine).state)
        # While the next answer runs: it is stopped, then the other model answers what was asked meanwhile.
        await order(pilot, "two")
        chat.controller.model.switch(other)
        await order(pilot, "what is next?")
        await until(
            pilot,
            lambda: chat.controller.model.name == "other" and not chat.query_one(StatusLine).state.startswith("load"),
        )

        def answered() -> list[str]:
            assert history.settle()
            (kept,) = history.conversations(10)
            branch = history.branch(history.conversation(kept.id).head)
            return [message.model for message in history.messages(branch) if message.role == "assistant"]

        # An answer that was stopped before its first word is none.
        await until(pilot, lambda: answered()[-1] == "other" and "ready" in chat.query_one(StatusLine).state)
        assert chat.query_one(StatusLine).context_window == 300
        assert answered()[0] == "tiny"
        (kept,) = history.conversations(10)
        assert history.conversation(kept.id).setup.model == "other"
        # A pack outside the models folder is noted by its path.
        chat.controller.model.switch(tiny_pack)
        await until(pilot, lambda: chat.controller.model.name == "tiny" and "ready" in chat.query_one(StatusLine).state)
        assert history.settle()
        assert history.conversation(kept.id).setup.model == str(tiny_pack)
    history.close()
    client.close()


def runs(app: FloeChatApp, model: str) -> bool:
    chat = app.screen_stack[0]
    assert isinstance(chat, ChatScreen)
    return chat.controller.model.name == model and chat.query_one(StatusLine).state == "ready"


async def test_the_last_model_chosen_is_the_one_to_start_with(tiny_pack: Path, other: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    change(settings, {})
    client = ChatClient(tiny_pack)
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=6, settings=settings)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: runs(app, "tiny"))
        assert read(settings).settings.model == catalog.DEMO  # --model alone changes nothing
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen) and app.screen.highlighted is not None)
        await pilot.press("down", "enter")
        await until(pilot, lambda: runs(app, "other"))
        assert read(settings).settings.model == "other"
        # One that cannot be loaded is explained; the one before answers again, and is the one to start with.
        (catalog.models_folder() / "broken").mkdir()
        for file in other.iterdir():
            shutil.copy(file, catalog.models_folder() / "broken")
        (catalog.models_folder() / "broken" / "config.json").write_text("{}")
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen) and app.screen.highlighted is not None)
        await pilot.press("down", "enter")
        await see(pilot, "other answers again")
        await until(pilot, lambda: runs(app, "other"))
        assert read(settings).settings.model == "other"
    client.close()


async def test_a_chat_is_reopened_with_its_own_model(tiny_pack: Path, other: Path) -> None:
    history, client = History(None), ChatClient(tiny_pack)
    history.ask(history.begin(ChatSetup("other")), None, "of the other")
    history.ask(history.begin(ChatSetup(str(tiny_pack))), None, "of tiny")
    history.settle()
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=6, history=history)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: runs(app, "tiny"))
        for keys, words, model in ((("down", "enter"), "of the other", "other"), (("enter",), "of tiny", "tiny")):
            await pilot.press("ctrl+r")
            await see(pilot, "Enter opens", "of tiny", "of the other")
            await pilot.press(*keys)
            await until(pilot, lambda words=words, model=model: words in shown(pilot) and runs(app, model))
        shutil.rmtree(other)
        await pilot.press("ctrl+r")
        await see(pilot, "of the other")
        await pilot.press("down", "enter")
        await see(pilot, "This chat was answered by other, which is not installed", "tiny answers instead.")
        assert runs(app, "tiny")
        # Asked there, the chat still belongs to its model: installed again, that answers.
        await order(pilot, "one")
        await until(pilot, lambda: len(app.screen.query(AnswerTurn)) == 1 and runs(app, "tiny"))
        assert history.settle()
        assert [one.model for one in history.conversations()] == ["other", str(tiny_pack)]
    history.close()
    client.close()


@pytest.mark.parametrize("start", ["first", pytest.param("named", marks=pytest.mark.thorough)])
async def test_the_first_run_offers_the_wizard_once(start: str, tiny_pack: Path, tmp_path: Path) -> None:
    """And not to who named a model."""
    settings = tmp_path / "config" / "settings.toml"
    client = ChatClient(tiny_pack)
    app = FloeChatApp(client, sampling=Sampling(), max_new_tokens=6, settings=settings, named=start == "named")
    async with app.run_test(size=(100, 30)) as pilot:
        if start == "first":
            await until(pilot, lambda: isinstance(app.screen, WizardScreen))
            await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await until(pilot, lambda: "ready" in app.screen.query_one(StatusLine).state)
    client.close()
    app.setups.close()
    assert settings.exists() == (start != "named")


async def test_an_empty_chat_with_the_demo_leads_to_a_real_model(other: Path) -> None:
    client = ChatClient(catalog.find(catalog.DEMO))
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=6)
    async with app.run_test(size=(80, 24)) as pilot:
        await see(pilot, "F6 sets up a real model", "What is an expert?", "How do I get a larger model?")
        await until(pilot, lambda: runs(app, "demo"))
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        chat.controller.model.switch(other)
        await until(pilot, lambda: runs(app, "other") and "sets up a real model" not in shown(pilot))
        await pilot.press("ctrl+n")
        await see(pilot, "Try:")
        assert "sets up a real model" not in shown(pilot)
    client.close()


# From the local model to a saved server and back, within one chat: with the real engine and a real server


@asynccontextmanager
async def chatting(
    first: Client, *, history: History | None = None, settings: Path | None = None
) -> AsyncGenerator[Pilot[int]]:
    """The screen, able to switch."""
    engines = Engines(first, lambda pack: ChatClient(pack))
    app = FloeChatApp(
        engines, sampling=Sampling(temperature=0), max_new_tokens=6, history=history, settings=settings, named=True
    )
    try:
        async with app.run_test(size=(120, 36), notifications=True) as pilot:
            await until(pilot, lambda: status(pilot).state == "ready")
            yield pilot
    finally:
        engines.close()


def chat_of(pilot: Pilot[int]) -> ChatScreen:
    chat = pilot.app.screen_stack[0]
    assert isinstance(chat, ChatScreen)
    return chat


async def to(pilot: Pilot[int], name: str) -> None:
    """Highlight a line of the models screen."""
    page = pilot.app.screen
    assert isinstance(page, ModelsScreen)
    await pilot.press("home")
    while page.highlighted is None or page.highlighted.name != name:
        await pilot.press("down")


async def choose(pilot: Pilot[int], name: str) -> None:
    """Choose a line of the models screen."""
    await pilot.press("f6")
    await see(pilot, "Installed", name)
    await to(pilot, name)
    await pilot.press("enter")
    await until(pilot, lambda: len(pilot.app.screen_stack) == 1)


def is_ready(pilot: Pilot[int], model: str) -> bool:
    return chat_of(pilot).controller.model.name == model and status(pilot).state in ("ready", "stopped")


def texts(history: History) -> list[tuple[str, str]]:
    """Of the newest chat: the messages and who wrote them."""
    assert history.settle()
    chat = history.newest()
    assert chat is not None
    return [(message.model, message.text) for message in history.messages(history.branch(chat.head))]


@pytest.fixture
def here(tiny_pack: Path) -> ChatClient:
    """An engine for the tiny model, which is also in the models folder as `mine`."""
    catalog.models_folder().mkdir(parents=True)
    (catalog.models_folder() / "mine").symlink_to(tiny_pack)
    return ChatClient(catalog.models_folder() / "mine")


@pytest.mark.thorough
async def test_there_and_back_in_one_chat(here: ChatClient, tmp_path: Path) -> None:
    settings, history = tmp_path / "settings.toml", History(None)
    change(settings, {})
    with serving(recorded("vllm")) as server:
        host = server.url.removeprefix("http://")
        keep(SavedServer("lab", f"{server.url}/v1", key="sk-saved"))
        async with chatting(here, history=history, settings=settings) as pilot:
            assert "Nothing you write leaves it" in shown(pilot) and "remote" not in shown(pilot)
            await order(pilot, "one")
            await until(pilot, lambda: len(server.asked) == 0 and is_ready(pilot, "mine") and bool(texts(history)))
            await until(pilot, lambda: texts(history)[-1][0] == "mine")
            await write(pilot, "a draft")
            await choose(pilot, "lab")
            await until(pilot, lambda: is_ready(pilot, "Qwen/Qwen3-30B-A3B"))
            await see(pilot, "answers from now on. Your questions, the chat before")
            assert f"remote {host}" in screen_text(pilot).splitlines()[-1]
            assert composer(pilot).text == "a draft" and here.count("one") is None  # its memory is given back
            assert read(settings).settings.model == catalog.DEMO  # the next start is local all the same
            for local in ("Neurons", "KV cache", "prefill"):
                assert local not in shown(pilot)
            await pilot.press("enter")
            await until(pilot, lambda: ANSWER in shown(pilot) and is_ready(pilot, "Qwen/Qwen3-30B-A3B"))
            sent = server.questions[0]
            assert sent.headers["authorization"] == "Bearer sk-saved" and "sk-saved" not in shown(pilot)
            assert [turn["content"] for turn in sent.body["messages"]][::2] == ["one", "a draft"]
            await pilot.press("f6")
            await see(pilot, f"Models · remote {host}", "● lab")
            await pilot.press("escape")

            await choose(pilot, "mine")
            await until(pilot, lambda: is_ready(pilot, "mine"))
            await see(pilot, "mine answers from now on. Nothing you write leaves")
            assert "remote" not in screen_text(pilot).splitlines()[-1]
            await order(pilot, "three")
            await until(pilot, lambda: texts(history)[-1][0] == "mine" and len(texts(history)) == 6)
            assert len(server.questions) == 1 and read(settings).settings.model == "mine"
            await pilot.press("f6")
            await see(pilot, "Models", "Installed")
            assert "remote 127" not in shown(pilot)
    history.close()


async def test_a_server_that_does_not_answer_changes_nothing_and_one_that_does_stops_an_answer(
    here: ChatClient,
) -> None:
    """As before another local model; what was asked meanwhile goes to the server."""
    history = History(None)
    with serving(ModelServer(refusing(401, "bad key"))) as closed, serving(recorded("ollama")) as server:
        keep(SavedServer("lab", f"{closed.url}/v1"))
        async with chatting(here, history=history) as pilot:
            await write(pilot, "a draft")
            loaded = here.context_of([], 6)
            await choose(pilot, "lab")
            await see(pilot, "wants a key", "mine answers again")
            await until(pilot, lambda: is_ready(pilot, "mine"))
            assert here.context_of([], 6) == loaded  # it was never unloaded
            assert "remote" not in screen_text(pilot).splitlines()[-1] and composer(pilot).text == "a draft"
            await see(pilot, "RAM, this process", "resident weights")  # the figures from before are there again
            assert "— not yet" not in shown(pilot).partition("RAM, this process")[2].partition("Backend")[0]
            await pilot.press("enter")
            await until(pilot, lambda: chat_of(pilot).controller.dialogue.ids != () and is_ready(pilot, "mine"))
            assert not closed.questions
            keep(SavedServer("lab", f"{server.url}/v1"))
            await order(pilot, "one")
            chat_of(pilot).controller.model.switch(servers()[0])
            await order(pilot, "what is next?")
            await until(pilot, lambda: ANSWER in shown(pilot) and status(pilot).state == "ready")
            assert server.questions[0].body["messages"][-1]["content"] == "what is next?"
            # And in the middle of the server's answer back to the local model: the connection is closed.
            server.answers = [Reply(parts=said({"content": "Hello"}, reason=None), end="hang")]
            await order(pilot, "and now?")
            await until(pilot, lambda: status(pilot).state == "writing")
            await choose(pilot, "mine")
            await until(pilot, lambda: is_ready(pilot, "mine"))
            assert server.left.wait(60)
            assert texts(history)[-1][1] == "Hello"  # what came is kept
    history.close()


async def test_a_server_is_chosen_while_the_first_model_still_loads(here: ChatClient) -> None:
    keep(SavedServer("lab", f"http://127.0.0.1:{unused_port()}/v1"))
    engines = Engines(here, ChatClient)
    app = FloeChatApp(engines, sampling=Sampling(temperature=0), max_new_tokens=6)
    async with app.run_test(size=(120, 36)) as pilot:
        chat_of(pilot).controller.model.switch(servers()[0])
        await see(pilot, "cannot be reached")
        await until(pilot, lambda: is_ready(pilot, "mine"))
    engines.close()


async def test_a_server_is_added_and_removed_on_the_screen(here: ChatClient) -> None:
    with serving(ModelServer(models("far", "near"), Reply(parts=said({"content": "Hello"})))) as server:
        async with chatting(here) as pilot:
            await pilot.press("f6")
            await see(pilot, "A server that answers instead of this machine")
            await pilot.press("down", "down", "enter")
            await until(pilot, lambda: isinstance(pilot.app.screen, AddServerScreen))
            await pilot.press("enter")
            await see(pilot, "The name is missing")
            await write(pilot, "lab")
            await pilot.press("enter")
            await see(pilot, "The address is missing")
            await pilot.press("tab")
            paste(pilot, server.url)
            await pilot.press("tab", *"far", "tab", *"sk-1")
            assert "sk-1" not in shown(pilot)
            await pilot.press("enter")
            await see(pilot, "lab remote http://127.0.0.1", "Its model far answers. A key is saved.")
            assert servers() == [SavedServer("lab", f"{server.url}/v1", "far", "sk-1")]
            if os.name == "posix":
                assert stat.S_IMODE(servers_file().stat().st_mode) == 0o600
            assert not server.asked  # nothing is sent before it is chosen
            await pilot.press("enter")
            await until(pilot, lambda: is_ready(pilot, "far"))
            await pilot.press("f6")
            await see(pilot, "● lab")
            await to(pilot, "lab")
            await pilot.press("x")
            await see(pilot, "lab answers this chat")
            await pilot.press("escape")
            await choose(pilot, "mine")
            await until(pilot, lambda: is_ready(pilot, "mine"))
            pilot.app.push_screen(AddServerScreen())
            await see(pilot, "Address")
            await pilot.press(*"lab", "tab", *"localhost:9", "enter")
            await see(pilot, "There is a server lab already")
            assert servers()[0].key == "sk-1"
            await pilot.press("escape", "f6")
            await see(pilot, "lab remote")
            await to(pilot, "lab")
            await pilot.press("x")
            await see(pilot, "Its address and its key will be deleted here")
            await pilot.press("y")
            await until(pilot, lambda: servers() == [] and "lab remote" not in shown(pilot))


def test_of_two_names_of_one_server_one_is_forgotten() -> None:
    for name in ("lab", "home"):
        keep(SavedServer(name, "http://127.0.0.1:1/v1"))
    forget("lab")
    assert [one.name for one in servers()] == ["home"]
