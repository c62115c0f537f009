"""The settings page: lists and toggles where a setting has few values, checks where it is typed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from floe_chat.app.actions import OWN
from floe_chat.app.screens.settings import SettingsScreen, useless
from floe_chat.app.settings.file import read
from floe_chat.app.settings.settings import KEYS, Settings
from floe_chat.app.widgets.common.setting_fields import ChoiceField, Field, Prose, Toggle, Written
from floe_chat.app.widgets.panel.panel import PerformancePanel
from floe_chat.engine.events import Finished, LayerRows
from floe_chat.models import catalog
from textual.pilot import Pilot
from textual.widgets import Static

from .scripted import (
    ROWS,
    ScriptedClient,
    ask,
    chatting,
    composer,
    finish,
    order,
    ready,
    screen_text,
    stats,
    status,
    until,
    write,
)
from .wizardry import see


def shown_fields(pilot: Pilot[Any]) -> dict[str, Field]:
    screen = pilot.app.screen
    kinds = (Written, Prose, ChoiceField, Toggle)
    return {field.setting: field for kind in kinds for field in screen.query(kind)}


async def opened(pilot: Pilot[Any]) -> dict[str, Field]:
    await order(pilot, "/settings")
    await until(pilot, lambda: isinstance(pilot.app.screen, SettingsScreen))
    return shown_fields(pilot)


async def test_settings_are_saved_and_comments_stay(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('# mine\n[keys]\ntoggle_panel = "f12"\n[sampling]\ntop_p = 7\n')
    async with chatting(settings=file) as (client, pilot):
        await until(pilot, lambda: "line 5" in " ".join(screen_text(pilot).split()))
        await pilot.press("f12")
        await until(pilot, lambda: not pilot.app.screen.query_one(PerformancePanel).display)
        fields = await opened(pilot)
        fields["sampling.top_k"].focus()
        await write(pilot, "40")
        await pilot.press("enter")
        await until(pilot, lambda: "top_k = 40" in file.read_text())
        fields["screen.theme"].focus()
        await pilot.press("enter", "down", "enter")  # the list opens at the theme that is used
        await until(pilot, lambda: pilot.app.theme == "floe-light" and "floe-light" in file.read_text())
        fields["sampling.min_p"].focus()
        await write(pilot, "much")
        await pilot.press("enter")
        await until(
            pilot, lambda: "sampling.min_p cannot be 'much'. It must be a number from 0 to 1." in screen_text(pilot)
        )
        fields["keys.stop"].focus()
        field = fields["keys.stop"]
        assert isinstance(field, Written)
        field.value = "f10"
        await pilot.press("enter")
        await until(pilot, lambda: 'stop = "f10"' in file.read_text())
        assert file.read_text().startswith("# mine\n") and "min_p" not in file.read_text()
        fields["sampling.min_p"].focus()
        await pilot.press("escape")
        request = await ask(pilot, client)
        await pilot.press("escape")
        assert client.cancelled == 0
        await pilot.press("f10")
        await until(pilot, lambda: client.cancelled == 1)
        await finish(pilot, client, request, "cancelled")


async def test_many_mistakes_in_the_settings_leave_the_text_field_in_view(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[keys]\n" + "".join(f'{action} = "?"\n' for action in OWN))
    async with ready(ScriptedClient(), size=(80, 24), settings=file) as pilot:
        assert status(pilot).keys == Settings().keys
        await see(
            pilot,
            f"{len(OWN)} settings cannot be used",
            f"line 2: keys.{next(iter(OWN))} cannot be",
            f"{len(OWN) - 2} more",
        )
        (toast,) = pilot.app.screen.query("Toast")
        assert not toast.region.overlaps(composer(pilot).region)
        await order(pilot, "/settings")
        await see(pilot, f"line 2: keys.{next(iter(OWN))} cannot be '?'", "model")
        await pilot.press("shift+tab", "end")
        await see(pilot, f"line {len(OWN) + 1}: keys.{list(OWN)[-1]}")


async def test_what_has_few_values_is_chosen_and_not_typed(tmp_path: Path, tiny_pack: Path) -> None:
    catalog.models_folder().mkdir(parents=True)
    (catalog.models_folder() / "tiny").symlink_to(tiny_pack)
    file = tmp_path / "settings.toml"
    file.write_text("[personas.Tutor]\ntop_k = 5\n")
    async with ready(ScriptedClient(), settings=file) as pilot:
        fields = await opened(pilot)
        assert {name for name, field in fields.items() if isinstance(field, ChoiceField)} >= {
            *(f"chat.{name}" for name in ("model", "preset", "device", "persona")),
            *("screen.theme", "screen.panel"),
        }
        assert all(isinstance(fields[key.name], Toggle) for key in KEYS if key.among is None)
        model = fields["chat.model"]
        assert isinstance(model, ChoiceField) and pilot.app.focused is model
        await until(pilot, lambda: ("tiny", "tiny") in model._options)  # pyright: ignore[reportPrivateUsage]
        assert file.read_text() == "[personas.Tutor]\ntop_k = 5\n"  # to look up what there is changes nothing
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.model == "tiny")
        fields["chat.persona"].focus()
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.persona == "Tutor")
        fields["history.save"].focus()
        await pilot.press("space")
        await until(pilot, lambda: not read(file).settings.save_history)
        assert read(file).problems == ()


async def test_a_setting_without_effect_says_so() -> None:
    split = dataclasses.replace(ROWS, layers=(LayerRows(None, 1.0, 0.0, 0.0, 0.0), LayerRows(None, 0.0, 0.0, 0.0, 1.0)))
    assert useless(None) == useless(stats(rows=ROWS)) == () != useless(stats(rows=split))
    assert {"advanced.predictor", "advanced.transfer"} < {*useless(stats())}
    async with chatting(size=(100, 30)) as (client, pilot):
        request = await ask(pilot, client)
        client.say(Finished(request, "stop", stats(request, rows=split)))
        await until(pilot, lambda: status(pilot).state == "ready")
        fields = await opened(pilot)
        for name in ("predictor", "transfer", "kv_bits"):
            fields[f"advanced.{name}"].focus()
            said = next(key.description for key in KEYS if key.name == f"advanced.{name}")
            meaning = pilot.app.screen.query_one(".explained", Static)
            await until(pilot, lambda said=said, shown=meaning: said in str(shown.render()))
            assert ("No effect where" in str(meaning.render())) == (name == "predictor"), name


WRONG = (
    ("sampling.temperature", "hot", "sampling.temperature cannot be 'hot'. It must be a number from 0 to 5."),
    ("folders.models", "/nowhere/at/all", "There is no folder /nowhere/at/all."),
    ("keys.quit", "f1", "keys.quit cannot be f1: help has that key already"),
)


async def test_fields_are_gone_through_and_wrong_values_explained_and_not_saved(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text := '[chat]\nsystem_prompt = """\nBe brief.\nBe kind.\n"""\n')
    async with ready(ScriptedClient(), settings=file, size=(120, 36)) as pilot:
        fields = await opened(pilot)
        for setting, typed, said in WRONG:
            field = fields[setting]
            assert isinstance(field, Written)
            field.focus()
            before, field.value = field.value, typed
            await pilot.press("enter")
            await see(pilot, said)
            field.value = before
        assert file.read_text() == text
        fields["chat.model"].focus()
        await pilot.pause()
        seen = [pilot.app.focused]
        for _ in range(4):
            await pilot.press("down")
            seen.append(pilot.app.focused)
        assert seen == [fields[f"chat.{name}"] for name in ("model", "preset", "device", "vram", "max_tokens")]
        await pilot.press("up")
        assert pilot.app.focused is seen[-2]
        prompt = fields["chat.system_prompt"]  # of several lines, which stay
        assert isinstance(prompt, Prose)
        prompt.focus()
        prompt.move_cursor(prompt.document.end)
        await write(pilot, "Be right.")
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(pilot.app.screen, SettingsScreen))
    assert read(file).settings.system_prompt == "Be brief.\nBe kind.\nBe right."


async def test_a_theme_is_chosen_where_the_file_has_no_table_for_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("screen = 5\n")
    async with ready(ScriptedClient(), settings=file) as pilot:
        await see(pilot, "line 1: screen must be a table")
        pilot.app.theme = "floe-light"
        await see(pilot, "was not changed")
        assert pilot.app.theme == "floe-light"
    assert file.read_text() == "screen = 5\n"


async def test_a_model_or_theme_that_is_gone_is_named_and_another_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[chat]\nmodel = 'hot'\n\n[screen]\ntheme = 'loud'\n")
    async with ready(ScriptedClient(), settings=file, size=(120, 36)) as pilot:
        await see(pilot, "line 2: chat.model 'hot' is not", "line 5: screen.theme 'loud' is not")
        assert pilot.app.theme == "floe"
        fields = await opened(pilot)
        assert isinstance(field := fields["chat.model"], ChoiceField) and field.meant() is None
        await pilot.press("enter", "down", "enter")
        await until(pilot, lambda: read(file).settings.model == "demo")
        assert "loud" in file.read_text()
