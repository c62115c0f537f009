"""The pages over the chat, and the commands of the text field."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from floe_chat.app.actions import ACTIONS, ALIASES, COMMANDS, command, unknown
from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import PromptTurn, TextDelta
from floe_chat.app.screens.help import HelpEntry, HelpScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.too_small import SMALLEST
from floe_chat.app.widgets.chat.completion import Completion
from floe_chat.app.widgets.common.dial import Dial
from floe_chat.app.widgets.panel.meanings import TERMS
from floe_chat.engine.events import PresetChanged, Rule
from floe_chat.models.pack.dial_loss import DialLoss
from textual.widgets import Input, Select, TextArea

from .scripted import (
    ScriptedClient,
    app_for,
    ask,
    chatting,
    composer,
    exchange,
    finish,
    order,
    ready,
    screen_text,
    stats,
    status,
    until,
    write,
)
from .wizardry import see, shown


async def test_the_dial_is_turned_while_an_answer_runs() -> None:
    async with chatting(size=(80, 24)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), stats(request))
        await pilot.press("f4")
        await until(pilot, lambda: "0.0121" in screen_text(pilot) and "58.9 tokens/s" in screen_text(pilot))
        assert "not tuned" in screen_text(pilot) and "1.36 MB" in screen_text(pilot)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: client.wanted == ["Fast"])
        await pilot.press("down", "right")
        await until(pilot, lambda: client.wanted == ["Fast", "FloE 80 %"] and "◂ FloE 80 % ▸" in screen_text(pilot))
        await pilot.press("left")
        await until(pilot, lambda: client.wanted == ["Fast", "FloE 80 %", "Balanced"])
        await pilot.press("up", "enter")
        await until(pilot, lambda: client.wanted[3:] == ["Fast"] and "◂ none ▸" in screen_text(pilot))
        await pilot.press("down", "down", "right", "shift+left")
        await until(pilot, lambda: "weakest signal" in screen_text(pilot))
        assert client.dialled[-1] == Rule(sparsity=0.74, product=0.85, drop=0.4, major=0.4)
        await pilot.press(*["down"] * 5, "right")
        await until(pilot, lambda: client.dialled[-1].late > 0 and "KL not measured" in screen_text(pilot))
        await pilot.press("c")
        await until(pilot, lambda: "--sparsity 74%" in screen_text(pilot))
        client.say(PresetChanged("Custom"))
        await pilot.press("escape")
        await until(pilot, lambda: status(pilot).preset == "Custom")
        await pilot.press("f4")
        await until(pilot, lambda: "74 %" in screen_text(pilot))
        await pilot.press("escape", "f3")
        await until(pilot, lambda: client.wanted[3:] == ["Fast", "Exact"])


async def test_what_a_quality_set_by_hand_is_likely_to_lose() -> None:
    async with chatting(size=(100, 30)) as (client, pilot):
        client.dials = DialLoss(
            "heldout.md", 512, ((0.5, 0.02), (0.9, 0.04), (1.0, 8.0)), ((0.5, 0.01),), ((1.0, 2.0),), ()
        )

        async def turned(rule: Rule) -> None:
            await until(pilot, lambda: bool(pilot.app.screen.query(Dial)))
            dials = [dial for dial in pilot.app.screen.query(Dial) if hasattr(rule, dial.id or "")]
            for dial in dials:
                dial.value = float(getattr(rule, dial.id or ""))
            dials[0].post_message(Dial.Turned(dials[0]))

        await pilot.press("f4")
        for rule, said in (
            (Rule(0.5), "KL 0.016 to 0.025, estimated"),
            (Rule(0.5, alpha=0.2), "KL at least 0.016, estimated"),
            (Rule(0.9, 0.5), "KL 0.032 to 0.062, estimated"),
            (Rule(1.0), "KL 6.4 to 10, estimated: answers fall apart"),
            (Rule(drop=0.7), "KL 0.78 to 1.2, estimated: answers may fall apart"),
            (Rule(major=0.5), "KL not measured"),
        ):
            await turned(rule)
            await until(pilot, lambda said=said: said in screen_text(pilot))
        client.dials, client.demo = None, client.dials  # as of a pack that was never tuned
        await pilot.press("escape", "f4")
        for rule, said in (
            (Rule(0.5), "KL not measured (c: command); demo 0.016 to 0.025"),
            (Rule(1.0), "demo 6.4 to 10: falls apart"),
        ):
            await turned(rule)
            await until(pilot, lambda said=said: said in screen_text(pilot))


async def test_what_a_chat_is_answered_with(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[personas.Tutor]\nsystem_prompt = "In small steps."\ntemperature = 0.5\n')
    async with chatting(settings=file) as (client, pilot):
        for command_line in ("/persona Tutor", "/set top_k 40", "/set seed seven", "/set nothing 1", "/persona Nobody"):
            await order(pilot, command_line)
            await until(pilot, lambda: composer(pilot).text == "")
        await until(pilot, lambda: "There is no persona 'Nobody'" in screen_text(pilot))
        assert "seed cannot be 'seven'" in screen_text(pilot) and "There is no sampling value" in screen_text(pilot)
        request = await ask(pilot, client)
        assert client.asked[0][0] == PromptTurn("system", "In small steps.")
        assert (client.samplings[0].temperature, client.samplings[0].top_k) == (0.5, 40)
        client.say(TextDelta(request, "yes"))
        await finish(pilot, client, request)
        await pilot.press("f5")
        page = pilot.app.screen
        await until(pilot, lambda: bool(pilot.app.screen.query("#temperature")))
        page = pilot.app.screen
        page.query_one("#temperature", Input).value = "9"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: "temperature cannot be '9'" in screen_text(pilot))
        page.query_one("#temperature", Input).value = "1.5"
        page.query_one(TextArea).load_text("In French.")
        page.query_one("#title", Input).value = "Lessons"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: composer(pilot).border_title == "Lessons")
        await ask(pilot, client, "again")
        assert client.asked[1][0] == PromptTurn("system", "In French.") and client.samplings[1].temperature == 1.5
        await pilot.press("ctrl+n")
        await finish(pilot, client, 2, "cancelled")
        await ask(pilot, client, "new")
        assert client.asked[2] == (PromptTurn("user", "new"),) and client.samplings[2].temperature == 0


async def test_the_quality_of_a_chat_is_chosen_on_its_page() -> None:
    async with chatting(size=(80, 24)) as (client, pilot):

        def quality() -> Select[str]:
            return cast("Select[str]", pilot.app.screen.query_one("#quality", Select))

        async def open_page() -> None:
            await pilot.press("f5")
            await until(pilot, lambda: bool(pilot.app.screen.query("#quality")))

        await ask(pilot, client)
        await open_page()
        assert quality().value == "Balanced"
        await pilot.press("ctrl+s")  # nothing was changed: nothing is asked for
        await until(pilot, lambda: status(pilot).screen is pilot.app.screen)
        await open_page()
        quality().focus()
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: quality().value == "Fast")
        await pilot.press("ctrl+s")
        await until(pilot, lambda: client.wanted == ["Fast"])  # also while an answer is written
        client.say(PresetChanged("Fast"))
        await until(pilot, lambda: status(pilot).preset == "Fast")
        await pilot.press("f4", "down", "down", "down", "down", "right")
        await until(pilot, lambda: bool(client.dialled))
        client.say(PresetChanged("Custom"))
        await pilot.press("escape")
        await until(pilot, lambda: status(pilot).preset == "Custom")
        await open_page()
        assert quality().value is Select.NULL and "Custom" in screen_text(pilot)
        await pilot.press("ctrl+s")
        await until(pilot, lambda: status(pilot).screen is pilot.app.screen)
        assert client.wanted == ["Fast"] and len(client.dialled) == 1


@pytest.mark.thorough
async def test_pages_can_be_used_on_the_smallest_screen() -> None:
    async with chatting(size=(SMALLEST.width, SMALLEST.height)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), stats(request))
        await pilot.press("f5")
        await see(pilot, "Esc cancels", "F4 compares them", "System prompt", "Sampling", "temperature")
        await pilot.press(*["tab"] * 7)
        await see(pilot, "repetition penalty", "The same number gives", "Save")
        assert "System prompt" not in shown(pilot)
        await pilot.press("escape", "f4")
        await see(pilot, "KL, nats a token", "0.0121 1.36 MB │", "40 % │", "Now 58.9 tokens/s", "Esc closes")


# Commands of the text field: other programs' names, mistyped names, and those that show what they could change


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


async def test_a_complete_answer_is_not_continued_and_other_programs_commands_do_the_same() -> None:
    async with chatting() as (client, pilot):
        await exchange(pilot, client, "one", "first")
        await order(pilot, "/more")
        await until(pilot, lambda: "This answer is complete" in shown(pilot))
        await order(pilot, "/last")
        await until(pilot, lambda: "This is the last chat" in shown(pilot))
        assert len(client.asked) == 1
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


async def test_a_preset_that_a_model_lacks_says_why_and_without_a_card_nothing_can_be_placed(tiny_pack: Path) -> None:
    client = ChatClient(tiny_pack, device="cpu")
    async with app_for(client).run_test(size=(120, 36)) as pilot:
        await until(pilot, lambda: status(pilot).state == "ready", seconds=60)
        await order(pilot, "/preset exact")
        await until(pilot, lambda: "own 16-bit weights" in shown(pilot))
        await order(pilot, "/preset floe80")
        await until(pilot, lambda: "FloE 80 %: the rule of FloE" in shown(pilot))
        await until(pilot, lambda: status(pilot).preset == "FloE 80 %")
        await pilot.press("f3")
        await until(pilot, lambda: status(pilot).preset == "High")
        await pilot.press("f4", "up", "enter")
        await until(pilot, lambda: "no card shares them" in screen_text(pilot))
        assert "◂ all in one place ▸" in screen_text(pilot) and client.placement == "auto"


async def test_commands_without_an_argument_show_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        '[personas.Tutor]\nsystem_prompt = "In small steps.\\nAsk me."\n[personas.Poet]\ntemperature = 1.2\n'
    )
    async with ready(ScriptedClient(), settings=file) as pilot:
        await order(pilot, "/persona Tutor")
        await order(pilot, "/persona")
        await until(pilot, lambda: "● Tutor: In small steps." in shown(pilot))
        assert "Poet: no system prompt" in shown(pilot)
        await order(pilot, "/set")
        await until(pilot, lambda: "Sampling: temperature 0, top_k 0" in shown(pilot) and "seed random" in shown(pilot))
        await order(pilot, "/system")
        await until(pilot, lambda: "System prompt: In small steps." in shown(pilot))
        await order(pilot, "/preset")
        await until(pilot, lambda: "Presets: Exact, Balanced (now), Fast; as published" in shown(pilot))
    async with ready(ScriptedClient()) as pilot:
        await order(pilot, "/persona")
        await until(pilot, lambda: "There are no personas yet" in shown(pilot) and "[personas.Tutor]" in shown(pilot))


async def test_help_is_searched_and_scrolled_by_keys() -> None:
    async with ready(ScriptedClient(), size=(80, 24)) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: "Function keys" in shown(pilot))
        keys = [line.split()[0] for line in shown(pilot).split("F1 Keys, commands")[1].split(" F")[1:7]]
        assert keys == sorted(keys)
        page = " ".join(entry.words for entry in pilot.app.screen.query(HelpEntry))
        for words in (*(action.does for action in ACTIONS if action.does), *(action.usage for action in COMMANDS)):
            assert words.lower() in page
        assert all(key in page for key in ("ctrl+q", "ctrl+j", *(name.lower() for name, _meaning in TERMS)))
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
    async with chatting() as (client, pilot):
        await ask(pilot, client)
        await pilot.press("ctrl+c")
        await until(pilot, lambda: client.cancelled == 1)
        await until(pilot, lambda: "The answer is stopped. Press Ctrl+C again within 2" in shown(pilot))
        assert status(pilot).state == "stopping"
