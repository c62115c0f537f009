"""The palette, and terminals of few colours or none, can be read too (contrast.py); test_snapshots.py has the rest."""

from __future__ import annotations

import pytest
from floe_chat.app.widgets.common.themes import THEMES
from rich.color import ColorSystem

from .contrast import alike, drawn, too_faint
from .scenes import showing
from .scripted import until
from .wizardry import shown


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


@pytest.mark.parametrize(
    ("scene", "chosen"), [("chat-commands", "/preset"), ("quality", "Balanced"), ("palette", "Attach")]
)
async def test_without_colours_none_is_sent_and_what_is_chosen_is_seen(
    scene: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with showing(scene, (120, 36), monkeypatch) as pilot:
        await pilot.press("down")
        await pilot.pause()
        said = list(drawn(pilot))
        assert said and all(front.is_default and back.is_default for _text, front, back in said)
        strips = pilot.app.screen._compositor.render_strips()  # pyright: ignore[reportPrivateUsage]
        pieces = [(text, style) for strip in strips for text, style, _control in strip if style is not None]
        assert chosen in " ".join(text for text, style in pieces if style.reverse or (style.underline and style.bold))


# Without the colours of a theme's own: what the terminal makes of them is not known, but never two alike.


async def test_every_theme_can_be_read_with_16_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: set[str] = set()
    async with showing("panel-full", (120, 36), monkeypatch) as pilot:
        for theme in pilot.app.available_themes:
            pilot.app.theme = theme
            await pilot.pause()
            assert "What is an expert?" in shown(pilot) and "Ctrl+Q quit" in shown(pilot)
            lost |= alike(pilot, ColorSystem.STANDARD)
    assert not lost, "\n".join(sorted(lost))


@pytest.mark.parametrize("theme", ["ansi-dark", "ansi-light"])
async def test_the_terminals_own_colours_stay_on_its_own_ground(theme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A colour of ours under the terminal's own text could be any: whoever has dark letters could not read them."""
    async with showing("chat-streaming", (120, 36), monkeypatch) as pilot:
        pilot.app.theme = theme
        await pilot.pause()
        said = [(text, front, back) for text, front, back in drawn(pilot) if any(map(str.isalnum, text))]
        assert any("def expert" in text for text, _front, _back in said)
        mixed = {text.strip() for text, front, back in said if front.is_default and back.triplet is not None}
        assert not mixed, mixed
