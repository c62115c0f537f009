"""What the screen costs and how fast it is, with the installed program in a real (pseudo) terminal of 120x36.

- **speed**: tokens/s of the same answer with the screen on and from `floe-chat ask`; goal 97 % and more.
- **echo**: from a key to its letter on the terminal while an answer streams, and beside it without one; goal p95 50 ms.
- **start**: from the process's start to the first character, to the chat's own screen, and to the echo of a key; goal
  0.5 s for the first. The floor is what Python needs to start and to import this program's command line.
- **idle**: what the screen takes when nothing happens, before a first question and after an answer: share of a core,
  wakeups per second of all its threads, and memory (`private`: what would be free if it ended). Goal 0.3 % of a core.
- **long**: a conversation of 10,000 messages: from Enter after /last to its last message, goal 1 s; a page up,
  until something of it is painted and until all that is loaded ahead is there; a key's echo; the memory that all this
  takes.

Run: .venv/bin/python tests/bench/screen.py [speed|echo|start|idle|long ...] [--model NAME|PACK ...] [--runs 5]. The
last line is one JSON object; times in seconds. Needs an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from floe_chat.app.history import AnswerStats, ChatSetup, history_file, new_id, open_history
from floe_chat.app.settings.file import settings_file
from window import FLOE_CHAT, Window

PROMPT = "List all commands of floe-chat."
MESSAGES = 10_000
PAGES = 30  # some 60 messages, most of which have to be loaded
KEYS = "äöüßéèñçøåÄÖÜÉÈÑÇØÅþð"  # letters that no answer has
COLUMNS, ROWS = 120, 36
_SETTLES = 15  # seconds until what an answer or the start leaves to do is done


def speed(model: str, runs: int, longest: int) -> dict[str, Any]:
    """tokens/s of both, in turns, since the machine's own speed drifts; the ratio is the median of the pairs'."""
    arguments = ["--model", model, "--temperature", "0", "--max-tokens", str(longest)]
    asked: list[float] = []
    shown: list[float] = []
    tokens: set[int] = set()
    with own_home(), Window(arguments, columns=COLUMNS, rows=ROWS) as window:
        window.until("● ready")
        for number in range(runs):
            done = subprocess.run(
                [FLOE_CHAT, "ask", "--json", *arguments, PROMPT], capture_output=True, text=True, check=True
            )
            fields = json.loads(done.stdout)
            asked.append(fields["decode_tokens_per_s"])
            tokens.add(fields["new_tokens"])
            # Another chat, and at once: `ask` has just computed when it answers, and a processor that idled is slower.
            window.type("\x0e")
            window.until("Nothing you write leaves it")
            window.type(PROMPT + "\r")
            found = kept(2 * (number + 1))  # `ask` keeps a chat too
            shown.append(found.tokens_per_s or 0.0)
            tokens.add(found.tokens)
            window.until("● ready")
    ratio = statistics.median(there / alone for there, alone in zip(shown, asked, strict=True))
    return {"model": model, "tokens": sorted(tokens), "ask": asked, "screen": shown, "ratio": ratio}


def echo(model: str, runs: int) -> dict[str, Any]:
    """Seconds from key to letter, idle and while answers stream."""
    arguments = ["--model", model, "--temperature", "0.9", "--max-tokens", "4000"]
    found: dict[str, list[float]] = {"idle": [], "streaming": []}
    with own_home(), Window(arguments, columns=COLUMNS, rows=ROWS) as window:
        window.until("● ready")
        for _ in range(runs):
            found["idle"] += pressed(window, lambda: True)
            window.type(PROMPT + "\r")
            window.until(lambda text: "● ready" not in text)
            found["streaming"] += pressed(window, lambda: "● ready" not in window.text)
            window.until("● ready", 300)
            window.type("\x0e")  # another chat: asked again in the same one, the demo answers briefly
            time.sleep(0.5)
    return {"model": model, **{name: spread(values) for name, values in found.items()}}


def pressed(window: Window, go_on: Callable[[], bool]) -> list[float]:
    """Type letters one by one, for as long as `go_on` says so, and take them away."""
    times: list[float] = []
    for letter in KEYS:
        if not go_on():
            break
        times.append(window.seconds_until(letter, letter))
        time.sleep(0.07)
    window.type("\x7f" * len(times))
    time.sleep(0.5)
    return times


def start(_model: str, runs: int) -> dict[str, Any]:
    """Seconds from the start of the process."""
    found: dict[str, list[float]] = {"floor": [], "first character": [], "screen": [], "echo of a key": []}
    for _ in range(runs):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import floe_chat.app.cli.main"], check=True)
        found["floor"].append(time.monotonic() - began)
        with own_home(), Window(columns=COLUMNS, rows=ROWS) as window:
            window.until("starting")
            window.seconds_until("Ask something", "")
            found["screen"].append(time.monotonic() - window.began)
            window.seconds_until("ß", "ß")
            found["echo of a key"].append(time.monotonic() - window.began)
            assert window.first_paint is not None
            found["first character"].append(window.first_paint)
    return {name: spread(values) for name, values in found.items()}


def idle(model: str, seconds: float) -> dict[str, Any]:
    """What it takes to do nothing for so many seconds."""
    with own_home(), Window(["--model", model, "--temperature", "0"], columns=COLUMNS, rows=ROWS) as window:
        window.until("● ready")
        found = {"fresh": _rest(window, seconds)}
        window.type(PROMPT + "\r")
        kept(1)
        window.until("● ready")
        found["answered"] = _rest(window, seconds)
    return {"model": model, "seconds": seconds, **found}


def _rest(window: Window, seconds: float) -> dict[str, float]:
    time.sleep(_SETTLES)
    program = psutil.Process(window.process.pid)
    processes = [program, *program.children(recursive=True)]
    cpu, woken, painted = _cpu_seconds(processes), _wakeups(processes), window.arrived
    began = time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    memory = [process.memory_full_info() for process in processes]
    return {
        "percent of a core": round(100 * (_cpu_seconds(processes) - cpu) / passed, 3),
        "wakeups per second": round((_wakeups(processes) - woken) / passed, 1),
        "bytes painted": window.arrived - painted,
        "rss of the program": memory[0].rss,
        "private": sum(one.uss for one in memory),
        "processes": len(processes),
    }


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _wakeups(processes: Sequence[psutil.Process]) -> int:
    """How often any of their threads began to wait."""
    tasks = [task for process in processes for task in Path(f"/proc/{process.pid}/task").glob("*/status")]
    lines = [line for task in tasks for line in task.read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


def long(model: str, runs: int) -> dict[str, Any]:
    """A conversation of `MESSAGES`: seconds, and bytes of memory."""
    found: dict[str, list[float]] = {"open": [], "page up, painted": [], "page up, loaded": [], "echo": []}
    memory: list[int] = []
    with own_home():
        fill()
        for _ in range(runs):
            with Window(["--model", model], columns=COLUMNS, rows=ROWS) as window:
                window.until("● ready")
                process = psutil.Process(window.process.pid)
                before = process.memory_info().rss
                window.type("/last")
                window.until("/last")
                time.sleep(0.3)
                found["open"].append(window.seconds_until(f"answer {MESSAGES // 2 - 1}", "\r"))
                time.sleep(1)
                for _ in range(PAGES):
                    painted, loaded = window.seconds_until_painted("\x1b[5~")
                    found["page up, painted"].append(painted)
                    found["page up, loaded"].append(loaded)
                found["echo"] += pressed(window, lambda: True)
                memory.append(process.memory_info().rss - before)
    return {**{name: spread(values) for name, values in found.items()}, "memory": memory}


def fill() -> None:
    """One conversation of `MESSAGES`, half of them Markdown of some length."""
    store = open_history(history_file()).store
    with store.transaction():
        store.add_conversation(chat := new_id(), ChatSetup("demo"), "a long one")
        parent = None
        for place in range(MESSAGES):
            message, number = new_id(parent or 0), place // 2
            text = f"question {number}" if place % 2 == 0 else _ANSWER.format(number)
            store.insert(message, chat, parent, "assistant" if place % 2 else "user", text)
            parent = message
        store.switch(chat, parent)
    store.close()


_ANSWER = """\
A sentence with **strong** words and `code` in it, long enough that it takes more than one line of the terminal.

- one thing
- another thing, with a [link](https://example.org)

```python
def expert(x):
    return down(silu(gate(x)) * up(x))
```

This is answer {}"""


def kept(chats: int) -> AnswerStats:
    """Wait for the end of the answer in the chat number `chats`; nothing is drawn meanwhile, which would take time."""
    while True:
        store = open_history(history_file()).store
        newest = store.newest()
        last = store.messages(store.branch(newest.head))[-1:] if newest and newest.number == chats else []
        store.close()
        if last and last[0].stats is not None:
            return last[0].stats
        time.sleep(0.3)


@contextmanager
def own_home() -> Generator[None]:
    """An empty home that has seen its first run."""
    before = os.environ["HOME"]
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        settings_file().parent.mkdir(parents=True)
        settings_file().touch()
        try:
            yield
        finally:
            os.environ["HOME"] = before


def spread(values: Sequence[float]) -> dict[str, float]:
    """The middle and the slow end."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))
    named = {"p50": statistics.median(ordered), "p95": ordered[at], "max": ordered[-1]}
    return {name: round(value, 4) for name, value in named.items()} | {"n": len(ordered)}


def main() -> None:
    """Measure what was asked for, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", help="speed, echo, start, idle, long; without any, all of them")
    parser.add_argument("--model", action="append", help="a pack; may be given several times")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=400, help="of an answer whose speed is measured, at most")
    parser.add_argument("--seconds", type=float, default=60, help="of looking on while nothing happens")
    given = parser.parse_args()
    known: dict[str, Callable[[str, int], dict[str, Any]]] = {
        "speed": lambda model, runs: speed(model, runs, given.tokens),
        "echo": echo,
        "start": start,
        "idle": lambda model, _runs: idle(model, given.seconds),
        "long": long,
    }
    results: dict[str, Any] = {}
    for name in given.measures or known:
        models: list[str] = (given.model or ["demo"]) if name in ("speed", "echo", "idle") else ["demo"]
        for model in models:
            result = known[name](model, given.runs)
            print(name, json.dumps(result), flush=True)
            results.setdefault(name, []).append(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
