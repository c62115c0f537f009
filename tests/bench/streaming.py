"""What the screen's thread computes while an answer grows, a person types and pages: milliseconds of CPU time.

No engine runs: a script says the answer, in pieces of 12 characters, on a screen of 120x36 without a terminal. CPU
time of the thread changes less on a busy machine than time by the clock. Beside the chat's screen (`chat`) the same
pieces go to a bare column with an answer in it (`answer`), and with Textual's own Markdown and its MarkdownStream
(`stream`).

    python tests/bench/streaming.py [chat|answer|stream ...] [--runs 5] [--beside PYTHON]

`--beside`: the Python of another version's environment, measured in turns with this one. Ratios are this version's time
over the other's, medians of the pairs. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from floe_chat.app.client.interface import TextDelta
from floe_chat.app.widgets.chat import answer
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Markdown

from tests.app.scripted import ScriptedClient, ask, finish, ready

PIECE = 12  # characters
SIZE = 120, 36
SETTLES = 0.12  # seconds in which a piece is painted, by itself
LETTERS = "abcdefghijklmnopqrst"
PAGES = 4
TEXT = """\
# Sea ice

Sea ice is **frozen** sea water that floats on the ocean. It forms, grows and melts in the ocean; icebergs, glaciers \
and ice shelves float on the ocean too but begin on land. It covers `seven` percent of the surface of the Earth.

- frazil ice: needles of some millimetres near the surface, which make it look like grease on a calm day
- pancake ice
- floes: flat pieces of any width, from that of a table to that of a city of one million people
  1. small ones
  2. large ones

## How it grows

| name | thickness | what it is |
|---|--:|---|
| nilas | 10 cm | a thin crust that bends with the waves |
| young ice | 30 cm | what comes between nilas and first-year ice |
| first-year ice | 2 m | no more than the growth of one winter |

```python
def thickness(days: int) -> float:
    return sum(growth(day) for day in range(days))
```

Sea ice forms in winter and melts in summer, some of it; what stays becomes thicker, until more of it melts than \
grows, and a floe of ten years is a rare thing to see today.

"""


async def chat() -> dict[str, float]:
    """The chat's screen, with two answers above the one that grows."""
    client = ScriptedClient()
    async with ready(client, size=SIZE) as pilot:
        for _ in range(2):
            request = await ask(pilot, client, "question")
            client.say(TextDelta(request, TEXT))
            await finish(pilot, client, request)
        request = await ask(pilot, client, "question")
        await pilot.pause(1)

        async def say(text: str) -> None:
            client.say(TextDelta(request, text))

        async def say_and_press(letter: str) -> None:
            await say("word ")
            await pilot.press(letter)

        found = _pieces(await _each(say, _cut()))
        found["letter"] = statistics.median(await _each(pilot.press, LETTERS))
        found["letter and piece"] = statistics.median(await _each(say_and_press, LETTERS))
        found["end of the answer"] = (await _each(lambda _: finish(pilot, client, request), [""]))[0]
        found["page"] = statistics.mean(await _each(pilot.press, ["pageup"] * PAGES + ["pagedown"] * PAGES))
    return found


class _Bare(App[None]):
    def __init__(self, shown: Callable[[], Widget]) -> None:
        super().__init__()
        self._shown = shown

    def compose(self) -> ComposeResult:
        with VerticalScroll() as column:
            column.anchor()
            yield self._shown()


async def alone() -> dict[str, float]:
    """An answer in a column."""
    from floe_chat.app.widgets.answer_markdown import AnswerMarkdown

    app = _Bare(lambda: AnswerMarkdown(""))
    async with app.run_test(size=SIZE):
        shown = app.query_one(AnswerMarkdown)
        return _pieces(await _each(lambda piece: shown.grow(piece, going_on=True), _cut()))


async def stream() -> dict[str, float]:
    """Textual's own in a column."""
    app = _Bare(Markdown)
    async with app.run_test(size=SIZE):
        stream = Markdown.get_stream(app.query_one(Markdown))
        found = _pieces(await _each(stream.write, _cut()))
        await stream.stop()
    return found


async def _each(act: Callable[[str], Awaitable[Any]], given: Sequence[str]) -> list[float]:
    """Milliseconds that the thread computed for each."""
    gc.collect()
    gc.freeze()
    found: list[float] = []
    for one in given:
        began = time.thread_time()
        await act(one)
        await asyncio.sleep(SETTLES)
        found.append(1000 * (time.thread_time() - began))
    return found


def _cut() -> list[str]:
    return [TEXT[at : at + PIECE] for at in range(0, len(TEXT), PIECE)]


def _pieces(found: Sequence[float]) -> dict[str, float]:
    ordered = sorted(found)
    return {
        "piece": statistics.mean(ordered),
        "piece, median": statistics.median(ordered),
        "piece, 95 %": ordered[round(0.95 * (len(ordered) - 1))],
    }


MEASURES = {"chat": chat, "answer": alone, "stream": stream}


def measured(python: str, name: str) -> dict[str, float]:
    """One measure in a process of its own."""
    done = subprocess.run([python, __file__, name, "--here"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Measure what was asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", default=list(MEASURES), choices=[*MEASURES])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beside", metavar="PYTHON")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        # Each piece is shown at once, not when its share of a core allows it: the same work in each run.
        answer._PERIOD, answer._LARGEST_DUTY = 0.005, 1e9  # pyright: ignore[reportPrivateUsage]
        print(json.dumps(asyncio.run(MEASURES[given.measures[0]]())))
        return
    pythons = [python for python in (sys.executable, given.beside) if python]
    results: dict[str, Any] = {}
    for name in given.measures:
        runs = [[measured(python, name) for python in pythons] for _ in range(given.runs)]
        results[name] = {field: _summary([[one[field] for one in run] for run in runs]) for field in runs[0][0]}
        print(name, json.dumps(results[name]), flush=True)
    print(json.dumps(results))


def _summary(runs: Sequence[Sequence[float]]) -> dict[str, float]:
    """The medians in milliseconds, and that of the pairs' ratios."""
    here, *beside = ([run[at] for run in runs] for at in range(len(runs[0])))
    found = {"here": statistics.median(here)}
    for other in beside:
        found["beside"] = statistics.median(other)
        found["ratio"] = statistics.median(one / two for one, two in zip(here, other, strict=True))
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    main()
