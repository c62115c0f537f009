"""Every screen as text, compared with what is kept in `snapshots/`, and how well it can be read in every theme.

After a change that is meant, look at the difference and renew the files:
`FLOE_RENEW=1 .venv/bin/pytest tests/app/test_snapshots.py -n0`, then `git diff tests/app/snapshots`.

Nothing on these screens varies but what the planner reckons (in its scenes each digit is written as 0) and when Textual
shows a scroll bar after a resize (their ends are left out).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from floe_chat.app.widgets.common.themes import FLOE_CONTRAST, THEMES
from rich.color import Color as Drawn
from rich.color import ColorSystem
from textual.color import Color
from textual.pilot import Pilot
from textual.strip import Strip

from .scenes import SCENES, showing, still
from .scripted import drawn_lines, until
from .wizardry import lines, shown

_FILES = Path(__file__).parent / "snapshots"
_RECKONED = ("wizard-choice", "wizard-folder")
_SCROLL_BAR = re.compile(r"(?<=\s)[▁-▇](?=\s*(│.*)?$)")
_RENEW = "FLOE_RENEW"
_SIZES = ((120, 36), (80, 24))


_ROWS = ("panel-full", "help", "palette", "this-chat", "quality", "experts", "panel-explained", "panel-compact")
_PAGES = ("chat-empty", "settings", "history", "history-search", "models-remove", "models-server", "models")
# Scenes that one program shows in this order, the last of which leave something behind
_TOGETHER = (
    *(_ROWS, (*_PAGES, "chat-commands", "too-small"), ("chat-answered", "chat-selected", "others")),
    *(("wizard-machine", "wizard-choice", "wizard-folder", "wizard-token"),),
    ("wizard-working", "wizard-done", "wizard-failed"),
)
_ALONE = ("chat-loading", "chat-reading", "chat-error")
_SHOWN_ELSEWHERE = ("chat-streaming", "chat-thought", "wizard-resume")


@pytest.mark.parametrize(
    "names",
    [
        *(*_TOGETHER, *((name,) for name in _ALONE)),
        *(pytest.param((name,), marks=pytest.mark.thorough) for name in _SHOWN_ELSEWHERE),
    ],
    ids=lambda names: names[0],
)
async def test_each_screen_looks_as_it_did_and_can_be_read(
    names: tuple[str, ...], every_case: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first theme and one size, a scene in the large one and the next in the small one; or in all of them."""
    seen: dict[str, str] = {}
    faint = set[str]()
    async with showing(names[0], _SIZES[0], monkeypatch) as stage:
        pilot = stage.pilot
        for at, name in enumerate(names):
            sizes = _SIZES[:1] if name == "too-small" else _SIZES if every_case else (_SIZES[at % 2],)
            if at:
                await pilot.resize_terminal(*_SIZES[0])
                await stage.show(name)
            for size in sizes:
                if size != _SIZES[0]:
                    await pilot.resize_terminal(*size)
                    await still(pilot)
                seen[f"{name}-{size[0]}x{size[1]}"] = kept(pilot, name)
                faint |= too_faint(pilot)
                for theme in THEMES if every_case and name != "palette" else ():
                    pilot.app.theme = theme.name
                    await pilot.pause()
                    faint |= too_faint(pilot)
    assert {name for group in _TOGETHER for name in group} | {*_ALONE, *_SHOWN_ELSEWHERE} == SCENES.keys()
    for key, text in seen.items():
        file = _FILES / f"{key}.txt"
        if _RENEW in os.environ:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{file} is missing; see this file's docstring"
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines(), key
    assert not faint, "\n".join(sorted(faint))


def kept(pilot: Pilot[int], name: str) -> str:
    """What is compared of the screen."""
    text = "\n".join(_SCROLL_BAR.sub(" ", line).rstrip() for line in lines(pilot)) + "\n"
    return re.sub(r"\d", "0", text) if name in _RECKONED else text


# The palette, and terminals of few colours or none, can be read too


async def test_without_colours_none_is_sent_and_what_is_chosen_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with showing("chat-commands", (120, 36), monkeypatch) as stage:
        pilot = stage.pilot
        for key, chosen in (("", "/preset"), ("ctrl+p", "Attach")):
            if key:
                await pilot.press(key)
                await stage.see("Search for commands")
            await pilot.press("down")
            await pilot.pause()
            said = list(drawn(pilot))
            assert said and all(front.is_default and back.is_default for _text, front, back in said)
            styled = [
                (text, style) for strip in drawn_lines(pilot) for text, style, _control in strip if style is not None
            ]
            assert chosen in " ".join(
                text for text, style in styled if style.reverse or (style.underline and style.bold)
            )


# Without the colours of a theme's own: what the terminal makes of them is not known, but never two alike.


async def test_every_theme_can_be_read_also_with_16_colours_or_the_terminals_own(
    every_case: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, lost = [one.name for one in THEMES], set[str]()
    async with showing("panel-full", (120, 36), monkeypatch) as stage:
        pilot = stage.pilot
        for theme in pilot.app.available_themes if every_case else ours:
            pilot.app.theme = theme
            await pilot.pause()
            assert "What is an expert?" in shown(pilot) and "Ctrl+Q quit" in shown(pilot)
            lost |= alike(pilot, ColorSystem.STANDARD)
            if theme in ours:
                lost |= too_faint(pilot)
                await pilot.press("ctrl+p")  # the palette takes its colours when it is opened
                await until(pilot, lambda: "Answer again" in shown(pilot))
                lost |= too_faint(pilot)
                await pilot.press("escape")
        for theme in ("ansi-dark", "ansi-light"):
            pilot.app.theme = theme
            await pilot.pause()
            said = [(text, front, back) for text, front, back in drawn(pilot) if any(map(str.isalnum, text))]
            assert any("def expert" in text for text, _front, _back in said)
            # On a colour of ours the terminal's own text could be any: dark letters could not be read.
            mixed = {text.strip() for text, front, back in said if front.is_default and back.triplet is not None}
            assert not mixed, (theme, mixed)
    assert not lost, "\n".join(sorted(lost))


# How well what is on the screen can be read: the contrast of each piece of text as it is drawn, by WCAG 2.2


_TEXT, _MOST, _MARKS = 4.5, 7.0, 3.0
_SAYING = "●▌█▓▒░━◂▸"


def ratio(first: Color, second: Color) -> float:
    """The contrast ratio of two colours, 1..21 (WCAG 2.2, "contrast ratio")."""
    lighter, darker = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: Color) -> float:
    parts = [part / 255 for part in color.rgb]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def pieces(pilot: Pilot[int]) -> Iterator[tuple[str, Color, Color]]:
    """What is on the screen: text, its colour, and the one under it. What a page lies over is dark and left out."""
    screen = pilot.app.screen
    places = [child.region for child in screen.children] if screen.is_modal else [screen.region]
    for y, strip in enumerate(drawn_lines(pilot)):
        for place in places:
            if place.y <= y < place.bottom:
                yield from _pieces(strip.crop(place.x, place.right))


def _pieces(strip: Strip) -> Iterator[tuple[str, Color, Color]]:
    for text, front, back in _drawn(strip):
        yield text, _color(front), _color(back)


def drawn(pilot: Pilot[int]) -> Iterator[tuple[str, Drawn, Drawn]]:
    """Likewise, with colours as they are sent; some can be the terminal's own."""
    for strip in drawn_lines(pilot):
        yield from _drawn(strip)


def _drawn(strip: Strip) -> Iterator[tuple[str, Drawn, Drawn]]:
    for text, style, control in strip:
        if not control and style is not None and text.strip():
            front, back = style.color or Drawn.default(), style.bgcolor or Drawn.default()
            yield text, *((back, front) if style.reverse else (front, back))


def _color(drawn: Drawn) -> Color:
    assert drawn.triplet is not None, "a colour of the terminal's own choice"
    return Color(*drawn.triplet)


def too_faint(pilot: Pilot[int]) -> set[str]:
    """What cannot be read well enough."""
    theme, faint = pilot.app.theme, set[str]()
    least = _MOST if theme == FLOE_CONTRAST.name else _TEXT
    for text, front, back in pieces(pilot):
        said = any(character.isalnum() for character in text)
        wanted = least if said else _MARKS if any(mark in text for mark in _SAYING) else 0.0
        if (found := ratio(front, back)) < wanted:
            faint.add(f"{theme}: {found:.1f} {text.strip()!r} {front.hex} on {back.hex}")
    return faint


def alike(pilot: Pilot[int], system: ColorSystem) -> set[str]:
    """Words on a ground of their own colour, in a terminal with no more colours than `system`'s."""
    found: set[str] = set()
    for text, front, back in drawn(pilot):
        if any(character.isalnum() for character in text) and _seen(front, system) == _seen(back, system) != "default":
            found.add(f"{pilot.app.theme}: {text.strip()!r} {front.name} on {back.name}")
    return found


def _seen(color: Drawn, system: ColorSystem) -> str:
    # Default on default is the terminal's own text on its own ground.
    return color.downgrade(system).name if not color.is_default else "default"
