"""Every screen as text, compared with what is kept in `snapshots/`.

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

from .scenes import SCENES, showing, still
from .wizardry import lines

_FILES = Path(__file__).parent / "snapshots"
_RECKONED = ("wizard-choice", "wizard-folder")
_SCROLL_BAR = re.compile(r"(?<=\s)[▁-▇](?=\s*(│.*)?$)")
_RENEW = "FLOE_RENEW"
_SIZES = ((120, 36), (80, 24))


@pytest.mark.parametrize("name", SCENES)
async def test_each_screen_looks_as_it_did(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    async with showing(name, _SIZES[0], monkeypatch) as pilot:
        for width, height in _SIZES:
            if name == "too-small" and (width, height) != _SIZES[0]:
                break
            if name != "too-small":
                await pilot.resize_terminal(width, height)
                await still(pilot)
            text = "\n".join(_SCROLL_BAR.sub(" ", line).rstrip() for line in lines(pilot)) + "\n"
            seen[f"{name}-{width}x{height}"] = re.sub(r"\d", "0", text) if name in _RECKONED else text
    for key, text in seen.items():
        file = _FILES / f"{key}.txt"
        if _RENEW in os.environ:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{file} is missing; see this file's docstring"
        assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
