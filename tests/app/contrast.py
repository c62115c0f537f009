"""How well what is on the screen can be read: the contrast of each piece of text as it is drawn, by WCAG 2.2.

1.4.3 asks for 4.5:1, 1.4.6 for 7:1 (the high-contrast theme), 1.4.11 for 3:1 of bars and marks that say something.
"""

from __future__ import annotations

from collections.abc import Iterator

from floe_chat.app.widgets.common.themes import FLOE_CONTRAST
from rich.color import Color as Drawn
from rich.color import ColorSystem
from textual.color import Color
from textual.pilot import Pilot
from textual.strip import Strip

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
    for y, strip in enumerate(screen._compositor.render_strips()):  # pyright: ignore[reportPrivateUsage]
        for place in places:
            if place.y <= y < place.bottom:
                yield from _pieces(strip.crop(place.x, place.right))


def _pieces(strip: Strip) -> Iterator[tuple[str, Color, Color]]:
    for text, front, back in _drawn(strip):
        yield text, _color(front), _color(back)


def drawn(pilot: Pilot[int]) -> Iterator[tuple[str, Drawn, Drawn]]:
    """Likewise, with colours as they are sent; some can be the terminal's own."""
    for strip in pilot.app.screen._compositor.render_strips():  # pyright: ignore[reportPrivateUsage]
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
