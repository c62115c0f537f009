"""A hub with a tiny model, and what sets it up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from floe_chat.app.history import History
from floe_chat.app.setup.setups import Setups
from floe_chat.app.widgets.panel import dashboard
from floe_chat.engine.planning import rates
from floe_chat.engine.planning.rates import Measured
from floe_chat.models import catalog
from floe_chat.models.packing.pack import EXACT
from textual import _callback
from textual._compositor import Compositor
from textual._context import visible_screen_stack
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.message import Message
from textual.message_pump import MessagePump
from textual.screen import Screen
from textual.strip import Strip

from ..helpers import edit_json, make_checkpoint, make_pack
from ..models.fakehub import FakeHub
from .scripted import drawn
from .settling import use_settling
from .wizardry import IMPATIENT, RATES, REPO


@pytest.fixture(scope="session", autouse=True)
def settling() -> Iterator[None]:
    """Keys are waited for by what they do, and figures of a running answer for no second."""
    with pytest.MonkeyPatch.context() as patch:
        use_settling(patch)
        patch.setattr(dashboard, "_PANEL_PERIOD", 0.02)
        yield


@pytest.fixture(scope="session", autouse=True)
def looked_up_once() -> Iterator[None]:
    """What Textual finds out for each application, widget or call, and what is the same each time, is found out once.

    Every application has the same style sheets: each is parsed once for each theme. The hash of a rule, which is asked
    for hundreds of times per widget, is the one of any object. A function has the parameters of its code. A class that
    has no method for a kind of message, as most have none for most, never has one.
    """
    parse, parsed = Stylesheet._parse_rules, dict[object, Any]()  # pyright: ignore[reportPrivateUsage]
    count, counted = _callback._count_parameters, dict[object, int]()  # pyright: ignore[reportPrivateUsage]

    find, handling = MessagePump._get_dispatch_methods, dict[object, bool]()  # pyright: ignore[reportPrivateUsage]

    def parse_once(self: Stylesheet, css: str, read_from: tuple[str, str], *given: Any, **named: Any) -> Any:
        variables = frozenset(self._variables.items())  # pyright: ignore[reportPrivateUsage]
        key = css, read_from, given, *named.items(), variables
        if key not in parsed:
            parsed[key] = parse(self, css, read_from, *given, **named)
        return parsed[key]

    def count_once(function: Any) -> int:
        code = getattr(function, "__code__", None)
        if code is None:
            return count(function)
        if code not in counted:
            counted[code] = count(function)
        return counted[code]

    def find_once(self: MessagePump, name: str, message: Message) -> Iterable[Any]:
        key = type(self), type(message), name
        if key not in handling:
            own = [vars(kind) for kind in type(self).__mro__]
            handling[key] = any(
                name in one or f"_{name}" in one or not one.get("_decorated_handlers", {}).keys().isdisjoint(kinds)
                for kinds in [type(message).__mro__]
                for one in own
            )
        return find(self, name, message) if handling[key] else ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        patch.setattr(MessagePump, "_get_dispatch_methods", find_once)
        patch.setattr(RuleSet, "__hash__", object.__hash__)
        patch.setattr(_callback, "_count_parameters", count_once)
        yield


_paint = Compositor.render_update


@pytest.fixture(scope="session", autouse=True)
def drawn_when_read() -> Iterator[None]:
    """Nobody sees the frames of a screen without a terminal: it is drawn when a test reads it."""

    def unseen(self: Compositor, full: bool = False, screen_stack: list[Screen[Any]] | None = None) -> None:
        visible_screen_stack.set(screen_stack or [])
        self._dirty_regions.clear()  # pyright: ignore[reportPrivateUsage]
        strips.pop(self, None)

    strips = WeakKeyDictionary[Compositor, list[Strip]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compositor, "render_update", unseen)
        patch.setattr(drawn, "strips", strips)
        yield


@pytest.fixture
def painted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frame is drawn, for tests of what is painted."""
    monkeypatch.setattr(drawn, "strips", None)
    monkeypatch.setattr(Compositor, "render_update", _paint)


@pytest.fixture(autouse=True)
def closed_histories(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every history that a test opens is closed after it: its thread keeps the whole screen in memory."""
    opened: list[History] = []
    make = History.__init__

    def kept(self: History, file: Path | None) -> None:
        opened.append(self)
        make(self, file)

    monkeypatch.setattr(History, "__init__", kept)
    yield
    for history in opened:
        history.close(timeout=0)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers in several shards."""
    return make_checkpoint(tmp_path_factory.mktemp("published") / "tiny", hidden=32, intermediate=64)


@pytest.fixture(scope="session")
def long_winded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack whose answers go on for thousands of tokens: it knows no token that ends one."""
    folder = tmp_path_factory.mktemp("long")
    source = make_checkpoint(folder / "source", window=1 << 15, layers=1)
    edit_json(source / "generation_config.json", lambda fields: fields.clear())
    edit_json(source / "config.json", lambda fields: fields.update(eos_token_id=None))
    edit_json(source / "tokenizer_config.json", lambda fields: fields.update(eos_token=None))
    make_pack(source, folder / "packed", EXACT)
    return folder / "packed"


@pytest.fixture(autouse=True)
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring this machine would go on for seconds, behind the tests after the one that opened the wizard."""

    def measure(_folder: Path, _report: Callable[[str], None]) -> Measured:
        return Measured(RATES, {}, "2026-11-21")

    monkeypatch.setattr(rates, "measure", measure)


@pytest.fixture
def hub(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with it as REPO, which our code finds in HF_ENDPOINT."""
    with FakeHub({REPO: published}) as hub:
        hub.used_by(monkeypatch, tmp_path / "hub home")
        yield hub


@pytest.fixture
def setups() -> Iterator[Setups]:
    """A program's setups, with downloads that lose patience soon."""
    setups = Setups(IMPATIENT)
    yield setups
    setups.close()
    catalog.use_models_folder(None)
