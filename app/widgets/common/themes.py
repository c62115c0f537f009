"""floe's own colours: ice on deep water, and the same by day."""

from __future__ import annotations

from textual.theme import Theme

MUTED = "$foreground 70%"
"""The style of less important text. Textual's own $text-muted loses its alpha inside a styled text."""

FLOE = Theme(
    name="floe",
    primary="#7cc4e4",
    secondary="#5a86a6",
    accent="#b4e3f2",
    foreground="#d3dee6",
    background="#0e151b",
    surface="#131d25",
    panel="#1b2832",
    success="#8ed1b2",
    warning="#e3c58a",
    error="#e58b93",
    dark=True,
    variables={"border": "#35566a", "border-blurred": "#22323d", "footer-key-foreground": "#7cc4e4"},
)

FLOE_LIGHT = Theme(
    name="floe-light",
    primary="#1a6489",
    secondary="#4f86a3",
    accent="#0b6c7d",
    foreground="#1c2b35",
    background="#f6fafc",
    surface="#ebf2f6",
    panel="#dde8ee",
    success="#23694b",
    warning="#79560f",
    error="#a93342",
    dark=False,
    variables={"border": "#9fc0d0", "border-blurred": "#c6d7e0", "footer-key-foreground": "#1a6489"},
)

FLOE_CONTRAST = Theme(
    name="floe-contrast",
    primary="#7fe0ff",
    secondary="#9ad0ff",
    accent="#ffffff",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#2a2a2a",
    success="#6dff9e",
    warning="#ffd75f",
    error="#ffa0a0",
    dark=True,
    variables={"border": "#ffffff", "border-blurred": "#9a9a9a", "footer-key-foreground": "#7fe0ff"},
)

THEMES = (FLOE, FLOE_LIGHT, FLOE_CONTRAST)
