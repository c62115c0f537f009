"""Every screen and page of the program in a state that is always the same: for snapshots, contrasts and pictures.

A scene is a function that brings a screen up; `showing` runs it. The engine is the scripted one, machine, models and
setups are made up, and nothing on the screens depends on the clock or on folders of this machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
from floe_chat.app.client.interface import TextDelta, ThoughtDelta
from floe_chat.app.history import History
from floe_chat.app.screens.chat.chat import ChatScreen
from floe_chat.app.screens.models import ModelsScreen
from floe_chat.app.screens.wizard.wizard import WizardScreen
from floe_chat.app.setup.setups import Setups
from floe_chat.app.setup.wish import Wish
from floe_chat.app.tui import FloeChatApp
from floe_chat.app.widgets.setup import models
from floe_chat.engine.events import Failed, Finished, Loading, PrefillProgress
from floe_chat.models import catalog
from textual.pilot import Pilot

from .made_up import ENTRIES, FOUND, HARDWARE, MODELS, TREES, WISH, ask_for_terms, progress, running, survey
from .scripted import LOADED, ROWS, ScriptedClient, app_for, composer, finish, holds, order, stats, status, until, write
from .wizardry import shown

ANSWER = """An **expert** is one of several small networks in each layer. For every token the router picks two of them:

```python
def expert(x, gate, up, down):
    return down @ (silu(gate @ x) * (up @ x))
```

- Only the *active* neurons are computed.
- The rest is skipped, which is what makes this fast.
"""


THOUGHT = """They ask what an expert is. In a Mixture-of-Experts model a router chooses some experts for each token.

I should say that only a few of them run, and show the formula.
"""


@dataclasses.dataclass(slots=True)
class Stage:
    """What a scene has to play with; `played` are the steps that led to what the screen shows."""

    pilot: Pilot[int]
    client: ScriptedClient
    setups: Setups
    played: tuple[Step, ...] = ()

    @property
    def app(self) -> FloeChatApp:
        return cast(FloeChatApp, self.pilot.app)

    @property
    def chat(self) -> ChatScreen:
        """What lies under all pages."""
        return cast(ChatScreen, self.app.screen_stack[0])

    async def see(self, *words: str) -> None:
        """Wait until the screen shows all of these."""
        await until(self.pilot, lambda: all(word in shown(self.pilot) for word in words))

    async def ask(self) -> int:
        """Send a question; returns its request's number."""
        composer(self.pilot).put("What is an expert?")
        await self.press("enter")
        await until(self.pilot, lambda: bool(self.client.asked))
        return len(self.client.asked)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def show(self, name: str) -> None:
        """Play a scene: its own steps alone where it begins like the one before, whose pages are left."""
        steps = SCENES[name]
        common = 0
        while steps[: common + 1] == self.played[: common + 1] and common < len(steps):
            common += 1
        while common < len(self.played) and len(self.app.screen_stack) > 1:
            await self.press("escape")
        for step in steps[common:]:
            await step(self)
        self.played = steps
        await still(self.pilot)


Step = Callable[[Stage], Awaitable[None]]


# The chat


async def _empty(stage: Stage) -> None:
    await stage.see("Try: What is sea ice?")


async def _loading(stage: Stage) -> None:
    stage.client.say(Loading("reading the experts of layer 12 of 32", 0.4))
    await stage.see("reading the experts")


async def _reading(stage: Stage) -> None:
    request = await stage.ask()
    stage.client.say(PrefillProgress(request, 512, 2048))
    await stage.see("reading prompt 512/2048", "What is an expert?")
    stage.client.say(stats(request, measured=False, rows=ROWS))
    await stage.see("62 %")


async def _streaming(stage: Stage, **figures: Any) -> None:
    request = await stage.ask()
    stage.client.say(stats(request, **figures), TextDelta(request, ANSWER[: ANSWER.index("down @")]))
    await stage.see("writing", "return")
    await until(stage.pilot, lambda: any(rate in shown(stage.pilot) for rate in ("58.9 tokens/s", "prefill 512")))


async def _answered(stage: Stage) -> None:
    request = await stage.ask()
    stage.client.say(TextDelta(request, ANSWER), stats(request))
    await finish(stage.pilot, stage.client, request)
    await stage.see("end of turn", "which is what makes this fast")


async def _thought(stage: Stage) -> None:
    request = await stage.ask()
    stage.client.say(ThoughtDelta(request, THOUGHT, 1234), TextDelta(request, ANSWER), stats(request))
    await finish(stage.pilot, stage.client, request)
    await order(stage.pilot, "/thinking")
    await stage.see("Thought for 1,234 tokens ▾", "show the formula", "end of turn")


async def _error(stage: Stage) -> None:
    request = await stage.ask()
    stage.client.say(TextDelta(request, "An expert is"))
    stage.client.say(
        Failed("The device ran out of memory", "4.10 GB were asked for.", "Take less with --vram.", request)
    )
    await stage.see("The device ran out of memory", "What to do")


async def _selected(stage: Stage) -> None:
    await stage.press("ctrl+up")
    await until(stage.pilot, lambda: bool(stage.app.query(".-selected")))


async def _others(stage: Stage) -> None:
    await stage.chat.do("others")
    stage.client.say(TextDelta(2, ANSWER[:200]), stats(2), ThoughtDelta(3, THOUGHT, 31), TextDelta(3, ANSWER))
    await stage.see("▸1 ● writing · 42 tokens", "2 ● writing", "3 ● waiting")
    stage.client.say(Finished(3, "stop", stats(3)), PrefillProgress(4, 512, 2048))
    await stage.see("2 ● ended", "3 ● reading", "512 of 2048")


async def _commands(stage: Stage) -> None:
    await write(stage.pilot, "/p")
    await stage.see("/preset", "/panel")


# The panel


async def _rows(stage: Stage) -> None:
    await _streaming(stage, rows=ROWS, layers=32, reused_tokens=15)


async def _panel_of_two_lines(stage: Stage) -> None:
    stage.chat.dashboard.show_panel("compact")
    await stage.see("hits 62 %")


async def _explained(stage: Stage) -> None:
    await stage.press("tab", "down")


# Pages over the chat


def _page(key: str, *words: str) -> Step:
    async def open_it(stage: Stage) -> None:
        await stage.press(key)
        await stage.see(*words)

    return open_it


async def _settings(stage: Stage) -> None:
    await order(stage.pilot, "/settings")
    await stage.see("Settings", "top p")


async def _history(stage: Stage) -> None:
    await stage.press("ctrl+r")
    await stage.see("Chats", "Sea ice", "12 Nov 2026")


async def _search(stage: Stage) -> None:
    await write(stage.pilot, "drift")
    await stage.see("Floes drift with the wind")
    await until(stage.pilot, lambda: "2 messages" not in shown(stage.pilot))


# Models


async def _models(stage: Stage) -> None:
    stage.setups.setup = running(progress("working"))
    stage.app.push_screen(_models_screen(stage))
    await stage.see("Installed", "Disk: ", "Packing layer 7", "V checks it")


async def _remove(stage: Stage) -> None:
    stage.app.push_screen(_models_screen(stage))
    await stage.see("Installed")
    await stage.press("down", "x")
    await stage.see("Y deletes")


async def _server(stage: Stage) -> None:
    stage.app.push_screen(_models_screen(stage))
    await stage.see("Installed", "A server that answers")
    await stage.press(*["down"] * 5, "enter")
    await stage.see("Address", "Enter saves")
    await write(stage.pilot, "home")
    await stage.press("tab")
    await write(stage.pilot, "192.168.1.20:8000")
    await stage.press("tab", "tab")
    await write(stage.pilot, "secret")
    await stage.press("enter")
    await stage.see("is not the address of a server")


def _models_screen(stage: Stage) -> ModelsScreen:
    return ModelsScreen(stage.setups, current=catalog.DEMO, surveyor=survey)


# The wizard


async def _machine(stage: Stage) -> None:
    stage.app.push_screen(WizardScreen(stage.setups, entries=ENTRIES, surveyor=survey))
    await stage.see("Ryzen 5 5600", "Enter continues")


async def _choice(stage: Stage) -> None:
    await stage.press("enter")
    await stage.see("● ", "Speed: ")


async def _folder(stage: Stage) -> None:
    await stage.press("f")
    await stage.see("Models folder", "are free")


async def _token(stage: Stage) -> None:
    await stage.press("enter")
    await stage.see("needs a token", "hf_")


async def _resume(stage: Stage) -> None:
    stage.app.push_screen(WizardScreen(stage.setups, entries=ENTRIES, surveyor=survey))
    await stage.see("Unfinished setups", "Set up another model")


def _setup(state: str, *words: str) -> Step:
    async def show(stage: Stage) -> None:
        stage.setups.setup = running(progress(state))
        stage.app.push_screen(WizardScreen(stage.setups))
        await stage.see(*words, "412 GB free")

    return show


async def _too_small(stage: Stage) -> None:
    await stage.pilot.resize_terminal(59, 19)
    await stage.see("enlarge it")


SCENES: dict[str, tuple[Step, ...]] = {
    "chat-empty": (_empty,),
    "settings": (_settings,),
    "history": (_history,),
    "history-search": (_history, _search),
    "models-remove": (_remove,),
    "models-server": (_server,),
    "models": (_models,),
    "chat-commands": (_commands,),
    "too-small": (_too_small,),
    "chat-loading": (_loading,),
    "chat-reading": (_reading,),
    "chat-streaming": (_streaming,),
    "chat-answered": (_answered,),
    "chat-selected": (_answered, _selected),
    "others": (_answered, _others),
    "chat-thought": (_thought,),
    "chat-error": (_error,),
    "panel-full": (_rows,),
    "help": (_rows, _page("f1", "Function keys")),
    "palette": (_rows, _page("ctrl+p", "Search for commands")),
    "this-chat": (_rows, _page("f5", "System prompt", "temperature")),
    "quality": (_rows, _page("f4", "Custom", "58.9 tokens/s")),
    "experts": (_rows, _page("f9", "recall", "precision")),
    "panel-explained": (_rows, _explained),
    "panel-compact": (_rows, _panel_of_two_lines),
    "wizard-machine": (_machine,),
    "wizard-choice": (_machine, _choice),
    "wizard-folder": (_machine, _choice, _folder),
    "wizard-token": (_machine, _choice, _folder, _token),
    "wizard-resume": (_resume,),
    "wizard-working": (_setup("working", "Setting up"),),
    "wizard-done": (_setup("done", "is ready"),),
    "wizard-failed": (_setup("failed", "R tries again"),),
}


@asynccontextmanager
async def showing(name: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Stage]:
    """The program with a scene on its screen."""
    monkeypatch.setattr(models, "look", lambda _entries: FOUND)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("floe_chat.models.hub.download.room", lambda _folder: HARDWARE.disk_free)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr("floe_chat.app.screens.wizard.wizard.look_up", ask_for_terms)
    monkeypatch.setattr("floe_chat.app.setup.elsewhere.folders", list)  # none of other programs
    begun = [WISH] if name == "wizard-resume" else []
    monkeypatch.setattr("floe_chat.app.screens.wizard.wizard.unfinished", lambda: begun)
    monkeypatch.setattr(Wish, "taken", property(lambda _wish: 12_300_000_000))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    client, setups, history = ScriptedClient(), Setups(), History(None)
    catalog.use_models_folder(MODELS)
    try:
        for tree in TREES:
            history.add(tree)
        history.settle()
        app = app_for(client, history=history)
        async with app.run_test(size=size, notifications=True) as pilot:
            if name != "chat-loading":
                client.say(LOADED)
                await until(pilot, lambda: status(pilot).state == "ready")
            stage = Stage(pilot, client, setups)
            await stage.show(name)
            yield stage
    finally:
        history.close()
        catalog.use_models_folder(None)
        monkeypatch.undo()
        time.tzset()


async def still(pilot: Pilot[int]) -> None:
    """Wait until the screen has stayed as it is for a moment."""
    before, same = "", 0
    while same < 2:
        await pilot.pause(0.04)
        now = holds(lambda: shown(pilot))
        before, same = now, same + 1 if now == before else 0
