"""A client that says exactly what a test tells it to, and ways to read the screen."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from floe_chat.app.client.chat_client import ChatClient
from floe_chat.app.client.interface import (
    Choice,
    Client,
    Cost,
    Costs,
    PromptTurn,
    Question,
    Refused,
    Submitted,
    TextDelta,
    Update,
)
from floe_chat.app.history import History
from floe_chat.app.tui import FloeChatApp
from floe_chat.app.widgets.chat.composer import Composer
from floe_chat.app.widgets.panel.status_line import StatusLine
from floe_chat.engine.events import Finished, LayerRows, Loaded, Rows, Rule, Sampling, Stats
from floe_chat.engine.quality_presets import PRESETS
from floe_chat.models.errors import FloeError
from floe_chat.models.pack.dial_loss import DialLoss
from textual._compositor import Compositor
from textual._context import visible_screen_stack
from textual.geometry import Region
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widget import Widget

_Seen = TypeVar("_Seen")
LOADED = Loaded(
    model="scripted",
    folder="/models/scripted",
    source="a test",
    context_window=1000,
    vocabulary=500,
    presets=("Exact", "Balanced", "Fast"),
    preset="Balanced",
    widths="up 2, gate and down 4, attention 8 bits",
    device="cpu",
    backend="reference",
    reason="there is nothing else in a test",
    seconds=0.1,
    memory_bytes=23_400_000,
    placed="8 layers with a pool of rows on the GPU",
    pools=(100_000_000, 4_000_000_000),
)


ROWS = Rows(
    ready=0.62,
    coming=0.2,
    copied=0.12,
    on_cpu=0.04,
    left_out=0.02,
    expert_hits=0.45,
    recall=0.81,
    precision=0.57,
    recalls=(None, 0.74, 0.83, 0.86),
    precisions=(None, 0.5, 0.58, 0.61),
    substituted=0.0,
    dropped=0.03,
    moved_per_token=143_000.0,
    waited_per_token=0.00042,
    link_bytes_s=2.79e9,
    link_peak=12.1e9,
    link_busy=0.31,
    link_hidden=0.42,
    pool=4_000_000_000,
    pool_used=3_200_000_000,
    up=2_300_000_000,
    dense=1_200_000_000,
    virtual=False,
    expert_recall=0.92,
    expert_precision=0.88,
    expert_recalls=(None, 0.9, 0.91, 0.95),
    expert_precisions=(None, 0.86, 0.88, 0.9),
    hits=0.62,
    layers=(
        LayerRows(None, None, None, None, None),
        LayerRows(None, 1.0, 0.0, 0.0, 0.0),
        LayerRows(0.31, 0.62, 0.2, 0.12, 0.06),
        LayerRows(0.4, 0.7, 0.1, 0.1, 0.1),
    ),
)

UNCOUNTED = dataclasses.replace(
    ROWS,
    **{
        field.name: () if isinstance(value, tuple) else None
        for field in dataclasses.fields(ROWS)
        if isinstance(value := getattr(ROWS, field.name), tuple | float) and field.name != "link_peak"
    },
)


def stats(
    request: int = 1,
    *,
    measured: bool = True,
    layers: int = 4,
    experts: int = 8,
    reused_tokens: int = 0,
    rows: Rows | None = None,
) -> Stats:
    """Figures of an answer: all of them, or (not `measured`) those that exist before the first token."""
    use = tuple(tuple(1 / experts for _ in range(experts)) for _ in range(layers))
    return Stats(
        request=request,
        prompt_tokens=20,
        new_tokens=42 if measured else 0,
        decode_tps=61.3 if measured else None,
        decode_tps_mean=58.9 if measured else None,
        prefill_tps=512.0 if measured else None,
        first_token_s=0.12 if measured else None,
        active_neurons=0.38 if measured else None,
        bytes_per_token=3.2e6 if measured else None,
        layer_activity=(0.3,) * layers if measured else (),
        expert_use=use if measured else (),
        ram_bytes=1_310_000_000,
        vram_bytes=None,
        kv_bytes=450_000,
        context_used=62,
        context_window=1000,
        reused_tokens=reused_tokens,
        rows=rows,
        vram_budget=None if rows is None else 8_000_000_000,
    )


class ScriptedClient(ChatClient):
    """Reports what `say` was given; keeps what it was asked. `refuse` makes the next submission fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[PromptTurn, ...]] = []
        self.samplings: list[Sampling] = []
        self.begun: list[str] = []
        self.began = 0
        self.wanted: list[str] = []
        self.dialled: list[Rule] = []
        self.conversations: list[int] = []
        self.cancelled = 0
        self.let_go: list[int | None] = []
        self.opened: list[Path] = []
        self.placed = "auto"
        self.started = False
        self.dropped = 0
        self.think = True
        self.dials: DialLoss | None = None
        self.demo: DialLoss | None = None
        self.kind = "never"
        self.thoughts: list[str] = []
        self.refuse: FloeError | None = None
        self._said = 0  # requests of which it was said that they have a prompt
        self._pack = Path(LOADED.folder)
        self._updates: list[Update] = []
        self._heard = lambda: None

    def say(self, *updates: Update) -> None:
        """Report these at the next look."""
        self._updates += updates
        self._heard()

    def start(self) -> None:
        self.started = True

    @property
    def placement(self) -> str:
        return self.placed

    def open(self, chosen: Choice, placement: str | None = None) -> None:
        assert isinstance(chosen, Path)
        self._pack = chosen
        self.placed = self.placed if placement is None else placement
        self.opened.append(chosen)

    def listen(self, heard: Callable[[], None]) -> None:
        self._heard = heard

    def poll(self, timeout: float = 0.0) -> list[Update]:
        updates, self._updates = self._updates, []
        return updates

    def prepare(self, question: Question, count: int = 1) -> list[int]:
        for _ in range(count):
            self.asked.append(tuple(question.messages))
            self.samplings.append(question.sampling)
            self.begun.append(question.answer)
            self.thoughts.append(question.thought)
            self.conversations.append(question.conversation)
        return [*range(len(self.asked) + 1 - count, len(self.asked) + 1)]

    def submit(self, question: Question) -> Submitted:
        if self.refuse is not None:
            error, self.refuse = self.refuse, None
            raise error
        (request,) = self.prepare(question)
        self._said = request
        return Submitted(request, 20, self.dropped)

    @property
    def thinking(self) -> str:
        return self.kind

    def begin(self) -> None:
        self.began += 1
        first, self._said = self._said + 1, len(self.asked)
        error, self.refuse = self.refuse, None
        requests = range(first, len(self.asked) + 1)
        if error is None:
            self.say(*(Submitted(request, 20, self.dropped) for request in requests))
        else:
            self.say(*(Refused(request, error) for request in requests))

    def cancel(self, request: int | None = None) -> None:
        self.cancelled += 1
        self.let_go.append(request)

    def set_preset(self, preset: str) -> None:
        self.wanted.append(preset)

    def set_quality(self, rule: Rule) -> None:
        self.dialled.append(rule)

    def count(self, text: str) -> int | None:
        return len(text.split())

    def context_of(self, messages: Sequence[PromptTurn], max_new_tokens: int) -> tuple[int, int] | None:
        return sum(len(message.text.split()) for message in messages), self.dropped

    def costs(self) -> Costs:
        exact, _high, balanced, fast = PRESETS
        measured = Cost(balanced, 0.0121, 1.36e6, "heldout.md", 2048)
        return Costs((Cost(exact, None, 6.5e6), measured, Cost(fast, None, None)), self.dials, self.demo)

    def close(self) -> None:
        pass


def app_for(
    client: Client,
    max_new_tokens: int = 400,
    system_prompt: str | None = None,
    history: History | None = None,
    settings: Path | None = None,
) -> FloeChatApp:
    """The application as the command line makes it, always drawing the likeliest token."""
    return FloeChatApp(
        client,
        sampling=Sampling(temperature=0),
        max_new_tokens=max_new_tokens,
        system_prompt=system_prompt,
        history=history,
        settings=settings,
    )


class Drawn:
    """What was drawn of a screen and has not been painted since: conditions that are waited for look again and again.

    Attributes:
        strips: by screen; None where nobody notes what is painted. waiting: whether a condition is looked at. Only then
            what is kept will do: what changed is painted, and seen at the next look.
    """

    def __init__(self) -> None:
        self.strips: WeakKeyDictionary[Compositor, list[Strip]] | None = None
        self.waiting = False


drawn = Drawn()


def holds(condition: Callable[[], _Seen]) -> _Seen:
    """Whether it does, or what it sees, by what was drawn last."""
    drawn.waiting = True
    try:
        return condition()
    finally:
        drawn.waiting = False


async def until(pilot: Pilot[int], condition: Callable[[], bool], seconds: float = 60) -> None:
    """Let the application run until `condition` holds; fails with what the screen shows if it never does."""
    deadline, pause = asyncio.get_running_loop().time() + seconds, 0.02
    while not holds(condition):
        assert asyncio.get_running_loop().time() < deadline, f"never came:\n{screen_text(pilot)}"
        await pilot.pause(pause)
        pause = min(1.3 * pause, 0.1)  # most conditions draw the whole screen


async def click(pilot: Pilot[int], target: Widget, offset: tuple[int, int] = (0, 0)) -> None:
    """Click where `target` is once it has come to rest: what is written last moves an answer's lines."""
    places: list[Region] = []

    def rests() -> bool:
        places.append(target.region)
        return len(places) > 3 and len(set(places[-4:])) == 1

    await until(pilot, rests)
    assert await pilot.click(target, offset=offset)


async def write(pilot: Pilot[int], text: str) -> None:
    """Type `text` key by key."""
    await pilot.press(*("space" if character == " " else character for character in text))


def drawn_lines(pilot: Pilot[int]) -> list[Strip]:
    """The screen's rows, as a terminal shows them."""
    compositor = pilot.app.screen._compositor  # pyright: ignore[reportPrivateUsage]
    if drawn.waiting and drawn.strips is not None and compositor in drawn.strips:
        return drawn.strips[compositor]
    visible_screen_stack.set(pilot.app._background_screens)  # pyright: ignore[reportPrivateUsage]
    strips = compositor.render_strips()
    if drawn.strips is not None:
        drawn.strips[compositor] = strips
    return strips


def screen_text(pilot: Pilot[int]) -> str:
    """What the terminal shows, without colours."""
    return "\n".join(strip.text.rstrip() for strip in drawn_lines(pilot))


def text_of(widget: Widget) -> str:
    """A widget's own text."""
    return str(widget.render())


@asynccontextmanager
async def ready(
    client: ScriptedClient,
    size: tuple[int, int] = (120, 40),
    system_prompt: str | None = None,
    history: History | None = None,
    settings: Path | None = None,
) -> AsyncGenerator[Pilot[int]]:
    """The screen with a loaded model."""
    app = app_for(client, system_prompt=system_prompt, history=history, settings=settings)
    async with app.run_test(size=size, notifications=True) as pilot:
        client.say(LOADED)
        await until(pilot, lambda: status(pilot).state == "ready")
        yield pilot


@asynccontextmanager
async def chatting(
    size: tuple[int, int] = (120, 40), **given: Any
) -> AsyncGenerator[tuple[ScriptedClient, Pilot[int]]]:
    """That screen, and the client behind it."""
    client = ScriptedClient()
    async with ready(client, size, **given) as pilot:
        yield client, pilot


def status(pilot: Pilot[int]) -> StatusLine:
    """The bottom row."""
    return pilot.app.screen_stack[0].query_one(StatusLine)


def composer(pilot: Pilot[int]) -> Composer:
    """The text field."""
    return pilot.app.screen_stack[0].query_one(Composer)


async def ask(pilot: Pilot[int], client: ScriptedClient, text: str = "hi") -> int:
    """Send a question; returns its request's number."""
    before = len(client.asked)
    await order(pilot, text)
    await until(pilot, lambda: len(client.asked) > before and status(pilot).state.startswith("reading"))
    return len(client.asked)


async def order(pilot: Pilot[int], text: str) -> None:
    """Write a command or a question as a fast typist does, and press Enter."""
    composer(pilot).put(text)
    await pilot.press("enter")


async def finish(
    pilot: Pilot[int], client: ScriptedClient, request: int, reason: str = "stop", *, waiting: bool = False
) -> None:
    """End an answer, and wait until the screen knows, if no question is `waiting` that is asked at once."""
    client.say(Finished(request, reason, stats(request)))
    if not waiting:
        await until(pilot, lambda: status(pilot).state in ("ready", "stopped"))


async def exchange(pilot: Pilot[int], client: ScriptedClient, question: str, answer: str, reason: str = "stop") -> None:
    """A question and its whole answer."""
    request = await ask(pilot, client, question)
    client.say(TextDelta(request, answer))
    await finish(pilot, client, request, reason)
