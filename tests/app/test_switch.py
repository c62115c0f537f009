"""Another model in mid-chat, and the first run: with the real engine and tiny models."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.history import ChatSetup, History
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.settings.file import change, read
from floe_chat.app.tui import FloeChatApp
from floe_chat.app.widgets.chat.answer import AnswerTurn
from floe_chat.app.widgets.panel.status_line import StatusLine
from floe_chat.engine.events import Sampling
from floe_chat.models import catalog
from floe_chat.models.packing.pack import PackSpec

from ..helpers import make_checkpoint, make_pack
from .scripted import order, until
from .wizardry import see, shown


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A second model, called other, in the models folder."""
    folder = catalog.models_folder() / "other"
    folder.parent.mkdir(parents=True)
    make_pack(make_checkpoint(tmp_path / "source", layers=1, window=300), folder, PackSpec(), "other")
    return folder


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


def is_ready(app: FloeChatApp, model: str) -> bool:
    chat = app.screen_stack[0]
    assert isinstance(chat, ChatScreen)
    return chat.controller.model.name == model and chat.query_one(StatusLine).state == "ready"


async def test_the_last_model_chosen_is_the_one_to_start_with(tiny_pack: Path, other: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    change(settings, {})
    client = ChatClient(tiny_pack)
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=6, settings=settings)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: is_ready(app, "tiny"))
        assert read(settings).settings.model == catalog.DEMO  # --model alone changes nothing
        await pilot.press("f6")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen) and app.screen.highlighted is not None)
        await pilot.press("down", "enter")
        await until(pilot, lambda: is_ready(app, "other"))
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
        await until(pilot, lambda: is_ready(app, "other"))
        assert read(settings).settings.model == "other"
    client.close()


async def test_a_chat_is_reopened_with_its_own_model(tiny_pack: Path, other: Path) -> None:
    history, client = History(None), ChatClient(tiny_pack)
    history.ask(history.begin(ChatSetup("other")), None, "of the other")
    history.ask(history.begin(ChatSetup(str(tiny_pack))), None, "of tiny")
    history.settle()
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=6, history=history)
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: is_ready(app, "tiny"))
        for keys, words, model in ((("down", "enter"), "of the other", "other"), (("enter",), "of tiny", "tiny")):
            await pilot.press("ctrl+r")
            await see(pilot, "Enter opens", "of tiny", "of the other")
            await pilot.press(*keys)
            await until(pilot, lambda words=words, model=model: words in shown(pilot) and is_ready(app, model))
        shutil.rmtree(other)
        await pilot.press("ctrl+r")
        await see(pilot, "of the other")
        await pilot.press("down", "enter")
        await see(pilot, "This chat was answered by other, which is not installed", "tiny answers instead.")
        assert is_ready(app, "tiny")
        # Asked there, the chat still belongs to its model: installed again, that answers.
        await order(pilot, "one")
        await until(pilot, lambda: len(app.screen.query(AnswerTurn)) == 1 and is_ready(app, "tiny"))
        assert history.settle()
        assert [one.model for one in history.conversations()] == ["other", str(tiny_pack)]
    history.close()
    client.close()


@pytest.mark.parametrize("start", ["first", "second", "named"])
async def test_the_first_run_offers_the_wizard_once(start: str, tiny_pack: Path, tmp_path: Path) -> None:
    """And not to who named a model."""
    settings = tmp_path / "config" / "settings.toml"
    if start == "second":
        change(settings, {})
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
        await until(pilot, lambda: is_ready(app, "demo"))
        chat = app.screen
        assert isinstance(chat, ChatScreen)
        chat.controller.model.switch(other)
        await until(pilot, lambda: is_ready(app, "other") and "sets up a real model" not in shown(pilot))
        await pilot.press("ctrl+n")
        await see(pilot, "Try:")
        assert "sets up a real model" not in shown(pilot)
    client.close()
