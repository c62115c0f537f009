"""Every action is declared once: its keys, command, palette entry, hint and help come from there."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from floe_chat.app.actions import ACTIONS, COMMANDS, NAMED, OWN, Place
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.screens.help import HelpScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups
from floe_chat.app.widgets.panel.meanings import TERMS
from textual.screen import Screen
from textual.widgets import Static

from .made_up import survey
from .scripted import ScriptedClient, app_for, ready, text_of, until, write
from .wizardry import see, shown


def test_names_commands_and_keys_are_unique() -> None:
    for names in (
        [action.name for action in ACTIONS if action.name],
        [action.command for action in COMMANDS],
        *(
            [key for action in ACTIONS if action.place is place for key in action.keys.split(",") if key]
            for place in Place
        ),
    ):
        assert max(Counter(names).values()) == 1, names
    assert all(action.does and action.title for action in COMMANDS) and set(OWN) < set(NAMED)


def test_all_that_keys_and_commands_ask_of_the_chat_is_done() -> None:
    chat = app_for(ScriptedClient()).get_default_screen()
    assert isinstance(chat, ChatScreen)
    asked = {action.name for action in ACTIONS if action.command or (action.place is Place.CHAT and action.keys)}
    asked |= {found[1] for action in ACTIONS if (found := re.search(r"screen\.do\('(\w+)'\)", action.run))}
    assert set(chat.does) == asked


@pytest.mark.parametrize(
    ("page", "own"),
    [(WizardScreen, "Measure the machine again"), (ModelsScreen, "Check every byte of the model")],
)
async def test_help_lists_the_keys_of_the_page_that_is_open(
    page: type[WizardScreen | ModelsScreen], own: str, setups: Setups
) -> None:
    async with ready(ScriptedClient()) as pilot:
        opened: Screen[Any] = page(setups, entries=(), surveyor=survey)
        await pilot.app.push_screen(opened)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        await see(pilot, own, "Quit floe-chat; the answer so far is saved")
        assert "Answer the last question again" not in shown(pilot)
        await write(pilot, "leave")
        await until(pilot, lambda: "Every command by name" not in shown(pilot))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: pilot.app.screen is opened)


async def test_help_of_the_chat_has_all_of_its_keys_and_commands() -> None:
    async with ready(ScriptedClient()) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        page = " ".join(text_of(line) for line in pilot.app.screen.query(Static))
        for words in (*(action.does for action in ACTIONS if action.does), *(action.usage for action in COMMANDS)):
            assert words in page
        assert all(key in page for key in ("Ctrl+Q", "Ctrl+J")) and all(name in page for name, _meaning in TERMS)
