"""The pictures of the README: the program itself with the built-in demo model, driven by keys, written as SVG.

    .venv/bin/python tests/bench/screenshots.py            # into assets/screenshots

Answers, speeds and memory are what this machine gives at that moment. One picture is of a machine that is not here:
panel.svg plays a card (its times are counted: the panel says "virtual time"). Nothing of the user's is read or shown:
home and models folder are empty ones.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

_HOME = tempfile.mkdtemp()
os.environ.update(HOME=_HOME, TERM="xterm-256color", COLORTERM="truecolor")
for _name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "NO_COLOR"):
    os.environ.pop(_name, None)

from floe_chat.app.client.chat_client import ChatClient  # noqa: E402
from floe_chat.app.tui import FloeChatApp  # noqa: E402
from floe_chat.app.widgets.chat.answer import AnswerTurn  # noqa: E402
from floe_chat.app.widgets.chat.composer import Composer  # noqa: E402
from floe_chat.app.widgets.panel.status_line import StatusLine  # noqa: E402
from floe_chat.engine.events import Advanced, Sampling  # noqa: E402
from floe_chat.models import catalog  # noqa: E402
from textual.pilot import Pilot  # noqa: E402

_FOLDER = Path(__file__).parents[2] / "assets" / "screenshots"
_SIM, _SIM_VRAM = "sim:rtx3060-12gb", 10 << 20
_SIM_ADVANCED = Advanced(predictor="learned", placement="pool")
_MODELS = Path(tempfile.gettempdir()) / "models"  # is shown, and not made
_QUESTIONS = ("What is an expert?", "And a neuron?")
_REMOTE_FONT = re.compile(r"@font-face\s*\{.*?\}", re.DOTALL)
_NEIGHBOURS = re.compile(
    r'<rect fill="([^"]*)" x="([^"]*)" y="([^"]*)" width="([^"]*)" [^>]*>\s*'
    r'<rect fill="\1" x="([^"]*)" y="\3" width="([^"]*)" '
)
_SECONDS = 120
_LARGEST = 150_000  # bytes of a picture


async def main() -> None:
    """Make all pictures."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    catalog.use_models_folder(_MODELS)
    async with _chatting(ChatClient(catalog.find(catalog.DEMO)), (120, 36)) as pilot:
        for question in _QUESTIONS:
            await _ask(pilot, question)
        _save(pilot, folder / "chat.svg")
    playing = ChatClient(catalog.find(catalog.DEMO), device=_SIM, vram=_SIM_VRAM, advanced=_SIM_ADVANCED)
    async with _chatting(playing, (110, 52)) as pilot:
        for question in _QUESTIONS:
            await _ask(pilot, question)
        _save(pilot, folder / "panel.svg")


@asynccontextmanager
async def _chatting(client: ChatClient, size: tuple[int, int]) -> AsyncGenerator[Pilot[int]]:
    app = FloeChatApp(client, sampling=Sampling(temperature=0), max_new_tokens=200)
    try:
        async with app.run_test(size=size) as pilot:
            await _until(pilot, lambda: _state(pilot) == "ready")
            yield pilot
    finally:
        client.close()


async def _ask(pilot: Pilot[int], question: str) -> None:
    before = len(pilot.app.screen.query(AnswerTurn))
    pilot.app.screen.query_one(Composer).put(question)
    await pilot.press("enter")
    await _until(pilot, lambda: len(pilot.app.screen.query(AnswerTurn)) > before and _state(pilot) == "ready")
    await pilot.pause(1)


def _state(pilot: Pilot[int]) -> str:
    return pilot.app.screen_stack[0].query_one(StatusLine).state


async def _until(pilot: Pilot[int], condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + _SECONDS
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            sys.exit("the screen never showed what was waited for")
        await pilot.pause(0.05)


def _joined(pair: re.Match[str]) -> str:
    """Two rectangles of one colour as one, where the second is right of the first."""
    fill, x, y, wide, next_x, next_wide = pair.groups()
    if abs(float(x) + float(wide) - float(next_x)) > 0.05:
        return pair[0]
    return f'<rect fill="{fill}" x="{x}" y="{y}" width="{float(wide) + float(next_wide):g}" '


def _save(pilot: Pilot[int], file: Path) -> None:
    """Write what the screen shows, without the font that a browser would fetch from elsewhere."""
    drawn = _REMOTE_FONT.sub("", pilot.app.export_screenshot(title="floe-chat"))
    drawn = drawn.replace("Fira Code", "ui-monospace, Menlo, Consolas, DejaVu Sans Mono")
    drawn = re.sub(r"terminal-\d+-", "t-", drawn)  # in each piece of text
    drawn = re.sub(r"<text[^>]*>\n</text>", "", drawn)  # line breaks, drawn by nobody
    while (joined := _NEIGHBOURS.sub(_joined, drawn)) != drawn:
        drawn = joined
    drawn = "\n".join(line.strip() for line in drawn.splitlines() if line.strip()) + "\n"
    file.write_text(drawn, encoding="utf-8")
    size = file.stat().st_size
    print(f"{file.name}: {size / 1000:.0f} kB")
    if size > _LARGEST:
        sys.exit(f"{file} is too large for a picture")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(main())
