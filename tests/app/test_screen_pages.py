"""The pages over the chat: the quality dial, what a chat is answered with, the settings; and the keys of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from floe_chat.app.client.interface import PromptTurn, TextDelta
from floe_chat.app.screens.too_small import SMALLEST
from floe_chat.engine.events import PresetChanged, Rule
from textual.widgets import Input, Select, TextArea

from .scripted import ScriptedClient, ask, composer, finish, ready, screen_text, stats, status, until
from .wizardry import see, shown


async def test_the_dial_is_turned_while_an_answer_runs() -> None:
    client = ScriptedClient()
    async with ready(client, size=(80, 24)) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), stats(request))
        await pilot.press("f4")
        await until(pilot, lambda: "0.0121" in screen_text(pilot) and "58.9 tokens/s" in screen_text(pilot))
        assert "not tuned" in screen_text(pilot) and "1.36 MB" in screen_text(pilot)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: client.wanted == ["Fast"])
        await pilot.press("down", "right", "shift+left")
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
        await until(pilot, lambda: client.wanted == ["Fast", "Exact"])


async def test_what_a_chat_is_answered_with(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[personas.Tutor]\nsystem_prompt = "In small steps."\ntemperature = 0.5\n')
    client = ScriptedClient()
    async with ready(client, settings=file) as pilot:
        for order in ("/persona Tutor", "/set top_k 40", "/set seed seven", "/set nothing 1", "/persona Nobody"):
            composer(pilot).put(order)
            await pilot.press("enter")
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
    client = ScriptedClient()
    async with ready(client, size=(80, 24)) as pilot:

        def quality() -> Select[str]:
            return cast("Select[str]", pilot.app.screen.query_one("#quality", Select))

        async def open_page() -> None:
            await pilot.press("f5")
            await until(pilot, lambda: bool(pilot.app.screen.query("#quality")))

        request = await ask(pilot, client)
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
        await finish(pilot, client, request, "cancelled")
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
        await open_page()
        quality().value = "Exact"
        await pilot.press("ctrl+s")
        await until(pilot, lambda: client.wanted == ["Fast", "Exact"])


async def test_pages_can_be_used_on_the_smallest_screen() -> None:
    client = ScriptedClient()
    async with ready(client, size=(SMALLEST.width, SMALLEST.height)) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "text"), stats(request))
        await pilot.press("f5")
        await see(pilot, "Esc cancels", "F4 compares them", "System prompt", "Sampling", "temperature")
        await pilot.press(*["tab"] * 7)
        await see(pilot, "repetition penalty", "The same number gives", "Save")
        assert "System prompt" not in shown(pilot)
        await pilot.press("escape", "f4")
        await see(pilot, "KL, nats a token", "0.0121 1.36 MB │", "40 % │", "Now 58.9 tokens/s", "Esc closes")
        await pilot.press("escape", "f1")
        await see(pilot, "Esc closes", "Function keys")
        await pilot.press("pagedown")
        await until(pilot, lambda: "Function keys" not in shown(pilot))


async def test_a_name_is_no_markup() -> None:
    client = ScriptedClient()
    async with ready(client) as pilot:
        composer(pilot).put("[/foo] \x1b[31m what is x[0]?")
        await pilot.press("enter")
        await until(pilot, lambda: bool(client.asked))
        await until(pilot, lambda: "╭─ [/foo] �[31m what is x[0]?" in screen_text(pilot))
