"""Every screen can be read in every theme: the contrast of each piece of text as it is drawn, by WCAG 2.2.

1.4.3 asks for 4.5:1, 1.4.6 for 7:1 (the high-contrast theme), 1.4.11 for 3:1 of bars and marks that say something.
NO_COLOR is what Textual makes of the colours then: their greys.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from floe_chat.app.widgets.themes import FLOE_CONTRAST, THEMES
from rich.color import Color as Drawn
from rich.style import Style
from textual.color import Color
from textual.filter import Monochrome
from textual.pilot import Pilot
from textual.strip import Strip

from .scenes import SCENES, showing
from .scripted import until
from .wizardry import shown

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


def pieces(pilot: Pilot[int], *, grey: bool = False) -> Iterator[tuple[str, Color, Color]]:
    """What is on the screen: text, its colour, and the one under it. What a page lies over is dark and left out."""
    screen = pilot.app.screen
    places = [child.region for child in screen.children] if screen.is_modal else [screen.region]
    for y, strip in enumerate(screen._compositor.render_strips()):  # pyright: ignore[reportPrivateUsage]
        for place in places:
            if place.y <= y < place.bottom:
                seen = strip.crop(place.x, place.right)
                yield from _pieces(seen.apply_filter(Monochrome(), screen.background_colors[1]) if grey else seen)


def _pieces(strip: Strip) -> Iterator[tuple[str, Color, Color]]:
    for text, style, control in strip:
        if not control and style is not None and text.strip():
            yield text, *_colors(style)


def _colors(style: Style) -> tuple[Color, Color]:
    colors = [_color(style.color), _color(style.bgcolor)]
    return (colors[1], colors[0]) if style.reverse else (colors[0], colors[1])


def _color(drawn: Drawn | None) -> Color:
    assert drawn is not None and drawn.triplet is not None, "a colour of the terminal's own choice"
    return Color(*drawn.triplet)


def too_faint(pilot: Pilot[int]) -> set[str]:
    """What cannot be read well enough, in colours and without them."""
    theme, faint = pilot.app.theme, set[str]()
    least = _MOST if theme == FLOE_CONTRAST.name else _TEXT
    for grey in (False, True):
        for text, front, back in pieces(pilot, grey=grey):
            said = any(character.isalnum() for character in text)
            wanted = least if said else _MARKS if any(mark in text for mark in _SAYING) else 0.0
            if (found := ratio(front, back)) < wanted:
                faint.add(f"{theme}{', grey' if grey else ''}: {found:.1f} {text.strip()!r} {front.hex} on {back.hex}")
    return faint


@pytest.mark.parametrize("name", [name for name in SCENES if name != "palette"])
async def test_all_that_is_written_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faint: set[str] = set()
    async with showing(name, (120, 36), monkeypatch) as pilot:
        for theme in THEMES:
            pilot.app.theme = theme.name
            await pilot.pause(0.1)
            faint |= too_faint(pilot)
    assert not faint, "\n".join(sorted(faint))


async def test_the_palette_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its colours when it is opened."""
    faint: set[str] = set()
    async with showing("chat-empty", (120, 36), monkeypatch) as pilot:
        for theme in THEMES:
            pilot.app.theme = theme.name
            await pilot.press("ctrl+p")
            await until(pilot, lambda: "Answer again" in shown(pilot))
            faint |= too_faint(pilot)
            await pilot.press("escape")
    assert not faint, "\n".join(sorted(faint))


async def test_without_colours_the_screen_is_grey(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with showing("panel-full", (120, 36), monkeypatch) as pilot:
        for _text, front, back in pieces(pilot):
            assert len({*front.rgb}) == len({*back.rgb}) == 1
