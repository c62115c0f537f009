"""Keys: those that a person gave to actions are named on every page, and help, palette and hints know all."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from floe_chat.app.actions import ACTIONS, COMMANDS, NAMED, OWN, Scope
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.screens.experts import ExpertsScreen
from floe_chat.app.screens.help import HelpScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.quality import QualityScreen
from floe_chat.app.screens.setup import SetupScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.settings.file import read
from floe_chat.app.setup.setups import Setups
from floe_chat.app.widgets.common.hints import hint
from floe_chat.app.widgets.common.keys import key_name
from textual.pilot import Pilot

from .made_up import survey
from .scripted import ScriptedClient, app_for, ask, chatting, composer, finish, ready, status, until, write
from .wizardry import see, shown

_WRITTEN = """
    quit=ctrl+x help=f12,f11 palette=ctrl+k stop=f10 new_chat=alt+n toggle_panel=alt+p next_preset=alt+t
    quality=alt+q setup=alt+c models=alt+m experts=alt+e history=alt+h regenerate=alt+r copy=alt+o
    newline=alt+l editor=alt+v redraw=alt+d pause_panel=alt+f select_message=alt+s focus_panel=alt+g
    previous_message=w next_message=s first_message=1 leave_messages=0 copy_message=x copy_code=v
    show_thinking=T edit_message=E answer_again=alt+a continue_answer=plus fork_chat=backspace delete_message=z
    older_version=a newer_version=d
"""
GIVEN = {name: key for name, _, key in (pair.partition("=") for pair in _WRITTEN.split())}
# Esc leaves every page, Tab goes through it, and a letter is a key of a message alone.
USUAL = [
    key_name(action.keys)
    for name, action in OWN.items()
    if action.place is not Scope.MESSAGES and name not in ("stop", "focus_panel")
]


def settings_with(keys: dict[str, str], folder: Path) -> Path:
    file = folder / "settings.toml"
    file.write_text("[keys]\n" + "".join(f'{action} = "{key}"\n' for action, key in keys.items()))
    return file


def wrong(pilot: Pilot[int]) -> list[str]:
    """Keys that are named on the screen and have been given away."""
    words = shown(pilot).replace("(", " ").replace(")", " ").split()
    return [key for key in USUAL if key in words]


@pytest.mark.thorough
async def test_no_page_names_a_key_that_was_given_away(tmp_path: Path, setups: Setups) -> None:
    assert set(GIVEN) == set(OWN)
    async with ready(ScriptedClient(), size=(120, 40), settings=settings_with(GIVEN, tmp_path)) as pilot:
        await see(pilot, "Alt+L new line · F12 explains", "Ctrl+X quit", "Ctrl+K commands")
        assert not wrong(pilot)
        await pilot.press("alt+g", "down", "down")
        await see(pilot, "Which experts the router called")
        assert not wrong(pilot)
        await pilot.press("escape", "ctrl+k")
        await see(pilot, "Search for commands")
        for letter in "preset":
            await pilot.press(letter)
        await see(pilot, "Alt+T goes to the next one")
        assert not wrong(pilot)
        await pilot.press("escape")
        pages = {"help": HelpScreen, "quality": QualityScreen, "setup": SetupScreen, "experts": ExpertsScreen}
        for action, page in pages.items():  # the key that opens one closes it, too
            key = GIVEN[action].split(",")[0]
            await pilot.press(key)
            await until(pilot, lambda page=page: isinstance(pilot.app.screen, page))
            await pilot.pause()
            assert not wrong(pilot), action
            await pilot.press(key)
            await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
        pilot.app.push_screen(WizardScreen(setups, entries=(), surveyor=survey))
        await see(pilot, "Enter continues", "Ctrl+X quit")
        assert not wrong(pilot)
        await pilot.press("escape")
        await pilot.resize_terminal(50, 18)
        await see(pilot, "Ctrl+X quits")
        await pilot.press("ctrl+x")
        await until(pilot, lambda: not pilot.app.is_running)


async def test_messages_are_acted_on_by_keys_of_ones_own(tmp_path: Path) -> None:
    async with chatting(size=(120, 40), settings=settings_with(GIVEN, tmp_path)) as (client, pilot):
        await finish(pilot, client, await ask(pilot, client, "first"))
        await pilot.press("ctrl+up", "alt+f")
        await see(pilot, "Alt+F resumes them")
        assert composer(pilot).has_focus and status(pilot).keys["pause_panel"] == "alt+f"
        await pilot.press("alt+f", "alt+s", "w")
        await see(pilot, "copy x", "edit E", "again Alt+A", "fork Backspace", "delete z")
        await pilot.press("e", "c")
        assert composer(pilot).text == ""
        await pilot.press("E")
        await until(pilot, lambda: composer(pilot).text == "first")
        await see(pilot, "F10 cancels")
        await pilot.press("f10", "alt+s", "w", "0")
        await until(pilot, lambda: composer(pilot).has_focus)
        await pilot.press("alt+s", "w", "z")
        await see(pilot, "Deleted with all messages after it")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"copy_message": "x", "edit_message": "x"}, "cannot be x: edit_message has that key already"),
        ({"copy_message": "f3"}, "cannot be f3: next_preset has that key already"),
        ({"select_message": "x", "copy_message": "x"}, "cannot be x, which types a character"),
        ({"pause_panel": "f7", "focus_panel": "f7"}, "cannot be f7: focus_panel has that key already"),
    ],
)
def test_keys_that_meet_are_refused(tmp_path: Path, keys: dict[str, str], said: str) -> None:
    found = read(settings_with(keys, tmp_path))
    (problem,) = found.problems
    assert problem.name == f"keys.{next(iter(keys))}" and problem.reason.startswith(said)


def test_keys_of_text_field_and_messages_do_not_meet(tmp_path: Path) -> None:
    keys = {"newline": "alt+x", "copy_message": "alt+x", "delete_message": "delete", "leave_messages": "escape,q"}
    assert not read(settings_with(keys, tmp_path)).problems


async def test_keys_of_the_chat_come_before_those_of_the_text_field(tmp_path: Path) -> None:
    # To the field, F6 and Ctrl+A are keys that select text and move the cursor.
    async with ready(ScriptedClient(), settings=settings_with({"experts": "ctrl+a"}, tmp_path)) as pilot:
        composer(pilot).put("half a thought")
        for key, page in (("f6", ModelsScreen), ("ctrl+a", ExpertsScreen)):
            await pilot.press(key)
            await until(pilot, lambda page=page: isinstance(pilot.app.screen, page))
            await pilot.press("escape")
            await until(pilot, lambda: isinstance(pilot.app.screen, ChatScreen))
        assert composer(pilot).text == "half a thought" and not composer(pilot).selected_text


def test_hints_are_pressed_by_their_key() -> None:
    for words, key in (
        ("Ctrl+X quit", "ctrl+x"),
        ("Alt+Shift+Q quit", "alt+shift+q"),
        ("F12 help", "f12"),
        ("Esc back", "escape"),
        ("PageDown on", "pagedown"),
        ("N or Esc cancels", "n"),
    ):
        (span,) = hint(words).spans
        assert f"press('{key}')" in str(span.style), words
    assert not hint("Wait a little").spans and not hint("◂ ▸ turn").spans


# Every action is declared once: its keys, command, palette entry, hint and help come from there


def test_names_commands_and_keys_are_unique() -> None:
    for names in (
        [action.name for action in ACTIONS if action.name],
        [action.command for action in COMMANDS],
        *(
            [key for action in ACTIONS if action.place is place for key in action.keys.split(",") if key]
            for place in Scope
        ),
    ):
        assert max(Counter(names).values()) == 1, names
    assert all(action.does and action.title for action in COMMANDS) and set(OWN) < set(NAMED)


def test_all_that_keys_and_commands_ask_of_the_chat_is_done() -> None:
    chat = app_for(ScriptedClient()).get_default_screen()
    assert isinstance(chat, ChatScreen)
    asked = {action.name for action in ACTIONS if action.command or (action.place is Scope.CHAT and action.keys)}
    asked |= {found[1] for action in ACTIONS if (found := re.search(r"screen\.do\('(\w+)'\)", action.run))}
    assert set(chat.does) == asked


async def test_help_lists_the_keys_of_the_page_that_is_open(setups: Setups) -> None:
    async with ready(ScriptedClient()) as pilot:
        opened = WizardScreen(setups, entries=(), surveyor=survey)
        await pilot.app.push_screen(opened)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        await see(pilot, "Measure the machine again", "Quit floe-chat; the answer so far is saved")
        assert "Answer the last question again" not in shown(pilot)
        await write(pilot, "leave")
        await until(pilot, lambda: "Every command by name" not in shown(pilot))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: pilot.app.screen is opened)
