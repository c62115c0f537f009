"""Every screen as text, compared with what is kept in `snapshots/`, and how well it can be read in every theme.

After a change that is meant, look at the difference and renew the files:
`FLOE_RENEW=1 .venv/bin/pytest tests/app/test_snapshots.py -n0`, then `git diff tests/app/snapshots`.

Nothing on these screens varies but what the planner reckons (in its scenes each digit is written as 0) and when Textual
shows a scroll bar after a resize (their ends are left out).
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from floe_chat.app.widgets.common.themes import THEMES
from textual.pilot import Pilot

from .contrast import too_faint
from .scenes import SCENES, showing, still
from .wizardry import lines

_FILES = Path(__file__).parent / "snapshots"
_RECKONED = ("wizard-choice", "wizard-folder")
_SCROLL_BAR = re.compile(r"(?<=\s)[▁-▇](?=\s*(│.*)?$)")
_RENEW = "FLOE_RENEW"
_SIZES = ((120, 36), (80, 24))


@pytest.mark.parametrize("name", SCENES)
async def test_each_screen_looks_as_it_did_and_can_be_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    faint = set[str]()
    async with showing(name, _SIZES[0], monkeypatch) as pilot:
        for width, height in _SIZES:
            if name == "too-small" and (width, height) != _SIZES[0]:
                break
            if name != "too-small":
                await pilot.resize_terminal(width, height)
                await still(pilot)
            text = "\n".join(_SCROLL_BAR.sub(" ", line).rstrip() for line in lines(pilot)) + "\n"
            seen[f"{name}-{width}x{height}"] = re.sub(r"\d", "0", text) if name in _RECKONED else text
            if (width, height) == _SIZES[0] and name != "palette":  # which takes its colours when it is opened
                faint = await too_faint_anywhere(pilot)
    for key, text in seen.items():
        file = _FILES / f"{key}.txt"
        if _RENEW in os.environ:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{file} is missing; see this file's docstring"
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
    assert not faint, "\n".join(sorted(faint))


async def too_faint_anywhere(pilot: Pilot[int]) -> set[str]:
    """What cannot be read well enough, in any theme of ours."""
    faint, before = set[str](), pilot.app.theme
    for theme in THEMES:
        pilot.app.theme = theme.name
        await pilot.pause()
        faint |= too_faint(pilot)
    pilot.app.theme = before
    return faint
