"""Commands of the text field: other programs' names, mistyped names, and those that show what they could change."""

from __future__ import annotations

from pathlib import Path

import pytest
from floe_chat.app.actions import ALIASES, COMMANDS, command, unknown
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import TextDelta
from floe_chat.app.screens.help import HelpScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.widgets.chat.completion import Completion
from textual.pilot import Pilot
from textual.widgets import Input

from .scripted import ScriptedClient, app_for, ask, composer, finish, ready, status, until, write
from .wizardry import shown


async def order(pilot: Pilot[int], text: str) -> None:
    """Write a command as a fast typist does, and press Enter."""
    composer(pilot).put(text)
    await pilot.press("enter")


def test_every_alias_names_a_command_of_another_name() -> None:
    names = {action.command for action in COMMANDS}
    assert set(ALIASES.values()) <= names and not names & set(ALIASES)
    assert all(command(alias) for alias in ALIASES)


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("histroy", "Did you mean /history?"),
        ("setings", "Did you mean /settings"),
        ("regenrate", "Did you mean /again or"),
        ("qqqqq", "Start with a space to send it as text"),
        ("save", "Chats are saved as you write; /export writes this one to a file"),
        ("rm", "/models removes models, /delete deletes this chat"),
    ],
)
def test_what_is_said_of_names_that_are_none(written: str, said: str) -> None:
    assert command(written) is None and said in unknown(written)


async def test_other_programs_commands_do_the_same() -> None:
    client = ScriptedClient()
    async with ready(client) as pilot:
        await order(pilot, "/?")
        await until(pilot, lambda: isinstance(pilot.app.screen, HelpScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, HelpScreen))
        await finish(pilot, client, await ask(pilot, client, "one"))
        await order(pilot, "/retry")
        await until(pilot, lambda: len(client.asked) == 2)
        await finish(pilot, client, 2)
        await order(pilot, "/CLEAR")
        await until(pilot, lambda: "Nothing you write leaves it" in shown(pilot))
        await order(pilot, "/histroy")
        await until(pilot, lambda: "There is no command /histroy. Did you mean /history?" in shown(pilot))
        assert composer(pilot).text == "/histroy"
        await write(pilot, "/li")  # in its place
        await until(pilot, lambda: pilot.app.screen.query_one(Completion).chosen == "/models")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(pilot.app.screen, ModelsScreen))


async def test_a_complete_answer_is_not_continued() -> None:
    client = ScriptedClient()
    async with ready(client) as pilot:
        request = await ask(pilot, client, "one")
        client.say(TextDelta(request, "first"))
        await finish(pilot, client, request)
        await order(pilot, "/more")
        await until(pilot, lambda: "This answer is complete" in shown(pilot))
        await order(pilot, "/last")
        await until(pilot, lambda: "This is the last chat" in shown(pilot))
        assert len(client.asked) == 1


async def test_a_preset_that_a_model_lacks_says_why(tiny_pack: Path) -> None:
    client = ChatClient(tiny_pack, device="cpu")
    async with app_for(client).run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: status(pilot).state == "ready", seconds=60)
        await order(pilot, "/preset exact")
        await until(pilot, lambda: "own 16-bit weights" in shown(pilot))


async def test_commands_without_an_argument_show_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[personas.Tutor]\nsystem_prompt = "In small steps.\\nAsk me."\n[personas.Poet]\ntemperature = 1.2\n'
    )
    client = ScriptedClient()
    async with ready(client, settings=file) as pilot:
        await order(pilot, "/persona Tutor")
        await order(pilot, "/persona")
        await until(pilot, lambda: "● Tutor: In small steps." in shown(pilot))
        assert "Poet: no system prompt" in shown(pilot)
        await order(pilot, "/set")
        await until(pilot, lambda: "Sampling: temperature 0, top_k 0" in shown(pilot) and "seed random" in shown(pilot))
        await order(pilot, "/system")
        await until(pilot, lambda: "System prompt: In small steps." in shown(pilot))
        await order(pilot, "/preset")
        await until(pilot, lambda: "Presets: Exact, Balanced (now), Fast" in shown(pilot))
    async with ready(ScriptedClient()) as pilot:
        await order(pilot, "/persona")
        await until(pilot, lambda: "There are no personas yet" in shown(pilot) and "[personas.Tutor]" in shown(pilot))


async def test_help_is_searched_and_scrolled_by_keys() -> None:
    async with ready(ScriptedClient(), size=(80, 24)) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: "Function keys" in shown(pilot))
        keys = [line.split()[0] for line in shown(pilot).split("F1 Keys, commands")[1].split(" F")[1:7]]
        assert keys == sorted(keys)
        await pilot.press("end")
        await until(pilot, lambda: "not measured yet. kB, MB" in shown(pilot))
        await pilot.press("home", "pagedown")
        await until(pilot, lambda: "Function keys" not in shown(pilot) and "Write the question" in shown(pilot))
        await pilot.press("pageup")
        await until(pilot, lambda: "Function keys" in shown(pilot))
        await write(pilot, "recall")
        await until(pilot, lambda: "predictor recall" in shown(pilot) and "Function keys" not in shown(pilot))
        await write(pilot, "xyz")
        await until(pilot, lambda: "Nothing found for “recallxyz”" in shown(pilot))
        await pilot.press("escape")
        await until(pilot, lambda: "Function keys" in shown(pilot))
        assert pilot.app.screen.query_one(Input).value == ""
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, HelpScreen))


async def test_the_first_interrupt_says_what_the_second_does() -> None:
    client = ScriptedClient()
    async with ready(client) as pilot:
        await ask(pilot, client)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: client.cancelled == 1)
        await until(pilot, lambda: "The answer is stopped. Press Ctrl+C again within 2" in shown(pilot))
        assert status(pilot).state == "stopping"
