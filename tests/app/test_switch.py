"""Another model in mid-chat, and the first run: with the real engine and tiny models."""

from __future__ import annotations

from pathlib import Path

import pytest
from floe_chat.app.chat_client import ChatClient
from floe_chat.app.history import History
from floe_chat.app.screens.chat import ChatScreen
from floe_chat.app.screens.wizard import WizardScreen
from floe_chat.app.settings_file import change
from floe_chat.app.tui import FloeChatApp
from floe_chat.app.widgets.answer import AnswerTurn
from floe_chat.app.widgets.status_line import StatusLine
from floe_chat.engine.events import Sampling
from floe_chat.models import catalog
from floe_chat.models.pack import PackSpec

from ..helpers import make_checkpoint, make_pack
from .scripted import until, write


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
        await until(pilot, lambda: chat.model == "tiny")
        await write(pilot, "one")
        await pilot.press("enter")
        await until(pilot, lambda: len(chat.query(AnswerTurn)) == 1 and "ready" in chat.query_one(StatusLine).state)
        # While the next answer runs: it is stopped, then the other model answers what was asked meanwhile.
        await write(pilot, "two")
        await pilot.press("enter")
        await chat.switch_model(other)
        await write(pilot, "three")
        await pilot.press("enter")
        await until(pilot, lambda: chat.model == "other" and not chat.query_one(StatusLine).state.startswith("load"))
        await until(pilot, lambda: len(chat.query(AnswerTurn)) == 3 and "ready" in chat.query_one(StatusLine).state)
        assert chat.query_one(StatusLine).context_window == 300
        assert history.settle()
        (kept,) = history.conversations(10)
        branch = history.branch(history.conversation(kept.id).head)
        answered = [message.model for message in history.messages(branch) if message.role == "assistant"]
        assert answered[0] == "tiny" and answered[-1] == "other"
        # A model that cannot be loaded is explained, and the first one can be had again.
        (other / "config.json").write_text("{}")
        await chat.switch_model(other)
        await until(pilot, lambda: "no model" in chat.query_one(StatusLine).state)
        await chat.switch_model(tiny_pack)
        await until(pilot, lambda: chat.model == "tiny" and "ready" in chat.query_one(StatusLine).state)
    history.close()
    client.close()


@pytest.mark.parametrize("start", ["first", "second"])
async def test_the_first_run_offers_the_wizard_once(start: str, tiny_pack: Path, tmp_path: Path) -> None:
    settings = tmp_path / "config" / "settings.toml"
    if start == "second":
        change(settings, {})
    client = ChatClient(tiny_pack)
    app = FloeChatApp(client, sampling=Sampling(), max_new_tokens=6, settings=settings)
    async with app.run_test(size=(100, 30)) as pilot:
        if start == "first":
            await until(pilot, lambda: isinstance(app.screen, WizardScreen))
            await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.screen, ChatScreen))
        await until(pilot, lambda: "ready" in app.screen.query_one(StatusLine).state)
    client.close()
    app.setups.close()
    assert settings.exists()
