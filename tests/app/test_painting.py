"""Repaints take the lines of what they touch, and paint what Textual's own would."""

from __future__ import annotations

from importlib.util import find_spec, module_from_spec

import pytest
from floe_chat.app.chat_client import TextDelta
from floe_chat.app.painting import _touched  # pyright: ignore[reportPrivateUsage]
from floe_chat.app.widgets.composer import Composer
from floe_chat.app.widgets.status_line import StatusLine
from rich.cells import cell_len
from textual._compositor import Compositor, LayoutUpdate
from textual.geometry import Region
from textual.widget import Widget

from .scripted import ScriptedClient, ask, finish, ready, screen_text, until
from .wizardry import lines


async def test_what_is_painted_is_what_textual_would_paint() -> None:
    spec = find_spec("textual._compositor")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(unchanged := module_from_spec(spec))
    assert Compositor._get_renders is _touched  # pyright: ignore[reportPrivateUsage]
    client = ScriptedClient()
    async with ready(client, size=(120, 24)) as pilot:
        for number in range(3):
            request = await ask(pilot, client, f"question {number}")
            client.say(TextDelta(request, "- a list\n- of two\n\n" * 4))
            await finish(pilot, client, request)
        compositor = pilot.app.screen._compositor  # pyright: ignore[reportPrivateUsage]
        whole = compositor.size.region
        for crop in (None, whole, Region(0, 23, 120, 1), Region(2, 3, 40, 2), Region(90, 5, 3, 9), Region(5, 5, 0, 0)):
            found = list(_touched(compositor, crop))
            theirs = list(unchanged.Compositor._get_renders(compositor, crop))
            where = whole if crop is None else crop
            seen = [part[0].intersection(part[1]) for part in theirs]
            assert found == [part for part, at in zip(theirs, seen, strict=True) if at and where.overlaps(at)]
            assert len(found) < len(theirs) or where == whole or not where


async def test_text_of_an_answer_leaves_the_other_widgets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    client, rendered = ScriptedClient(), list[str]()
    async with ready(client) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, "one"))
        await until(pilot, lambda: "one" in screen_text(pilot))
        render_lines = Widget.render_lines

        def noted(self: Widget, crop: Region) -> object:
            rendered.append(type(self).__name__)
            return render_lines(self, crop)

        await pilot.pause(1.2)  # figures are painted once a second
        monkeypatch.setattr(Widget, "render_lines", noted)
        client.say(TextDelta(request, " two"))
        await until(pilot, lambda: "Paragraph" in rendered)
        monkeypatch.undo()
    assert StatusLine.__name__ not in rendered and "Composer" not in rendered, rendered


async def test_the_text_field_is_as_high_as_its_text() -> None:
    async with ready(ScriptedClient()) as pilot:
        composer = pilot.app.screen.query_one(Composer)
        least, heights = composer.size.height, list[int]()
        for _ in range(6):
            await pilot.press("a", "ctrl+j")
            await pilot.pause()
            heights.append(composer.size.height)
        assert heights == list(range(least + 1, least + 7))
        for _ in range(12):
            await pilot.press("backspace")
        await pilot.pause()
        assert composer.size.height == least and not composer.text


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("a \u2764\ufe0f b", "a \u2764  b"),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467!", "\U0001f468!"),
        ("\U0001f44d\U0001f3fd 1\ufe0f\u20e3", "\U0001f44d 1 "),
        ("\U0001f3fd", ""),
        ("\u0915\u094d\u200d\u0937 日本 \U0001f600", "\u0915\u094d\u200d\u0937 日本 \U0001f600"),
    ],
    ids=ascii,
)
async def test_emoji_are_drawn_as_all_terminals_count_them(text: str, drawn: str) -> None:
    assert cell_len(drawn) == cell_len(text)
    client = ScriptedClient()
    async with ready(client) as pilot:
        request = await ask(pilot, client)
        client.say(TextDelta(request, f"[[{text}]] end"))
        await until(pilot, lambda: "]] end" in screen_text(pilot))
        assert any(f"[[{drawn}]] end" in line for line in lines(pilot))
        await finish(pilot, client, request)
        await pilot.press("ctrl+o")
        await until(pilot, lambda: pilot.app.clipboard == f"[[{text}]] end")


async def test_the_whole_screen_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ready(ScriptedClient()) as pilot:
        written: list[str] = []
        driver = pilot.app._driver  # pyright: ignore[reportPrivateUsage]
        assert driver is not None
        monkeypatch.setattr(driver, "write", written.append)
        painted: list[Compositor] = []
        original = Compositor.render_full_update

        def noted(self: Compositor, simplify: bool = False) -> LayoutUpdate:
            painted.append(self)
            return original(self, simplify)

        monkeypatch.setattr(Compositor, "render_full_update", noted)
        await pilot.press("ctrl+l")
        await until(pilot, lambda: bool(painted))
        assert written == ["\x1b[2J"]
