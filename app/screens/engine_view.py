"""The chat's view of the engine: its model, its quality, and its state."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from textual import on

from ...engine.events import Loaded
from ...models import catalog
from ...models.errors import FloeError
from .. import model_choice
from ..bridge import EngineBridge, ModelLoading, ModelReady, PresetInForce
from ..history import History, Setup
from ..widgets.units import share
from .chat_view import ChatView
from .dialogue import Dialogue

_CUSTOM = "Custom"  # the engine's name for a quality that is no preset


class Phase(Enum):
    """What the engine does for this screen."""

    LOADING = auto()
    READY = auto()
    ANSWERING = auto()
    STOPPING = auto()
    BROKEN = auto()


class EngineView(ChatView):
    """One conversation, and the model that it is answered with."""

    def __init__(self, bridge: EngineBridge, history: History, setup: Setup) -> None:
        self._dialogue = Dialogue(history, setup)
        super().__init__(self._dialogue.messages, bridge.count)
        self._bridge = bridge
        self._history = history
        self._phase = Phase.LOADING
        self._presets: tuple[str, ...] = ()
        self._wanted_preset = ""
        self._model = ""
        self._window = 0
        self._pack: Path | None = None
        self._next_pack: Path | None = None
        self._picked: Path | None = None  # by the person, for the chat on the screen

    @property
    def model(self) -> str:
        """The name of the model that answers, or "" before one is loaded."""
        return self._model

    @property
    def pack(self) -> Path | None:
        """The folder of the loaded model; None before one is loaded."""
        return self._pack

    @property
    def presets(self) -> tuple[str, ...]:
        """The loaded model's presets, best first; none while it loads."""
        return self._presets

    @property
    def answering(self) -> bool:
        """Whether an answer is being written."""
        return self._phase is Phase.ANSWERING

    def on_mount(self) -> None:
        super().on_mount()
        self._say("loading", "$warning")
        self._welcome()

    def _welcome(self) -> None:
        self._transcript.welcome(demo=catalog.reference(self._bridge.pack) == catalog.DEMO)

    # What the person does

    async def action_stop(self) -> None:
        """Stop the answer, if there is one."""
        if self._phase is Phase.ANSWERING:
            self._bridge.cancel()
            self._phase = Phase.STOPPING
            self._say("stopping", "$warning")

    def next_preset(self) -> None:
        """Ask for the next quality preset."""
        if not self._presets:
            self._status.remark("The presets are known when the model is loaded")
        elif len(self._presets) == 1:
            self._status.remark(f"This model has one preset only: {self._presets[0]}")
        else:
            now = self._presets.index(self._wanted_preset) if self._wanted_preset in self._presets else -1
            self.choose_preset(self._presets[(now + 1) % len(self._presets)])

    def choose_preset(self, preset: str) -> None:
        """Ask for `preset` from the next token on; the conversation remembers it."""
        self._wanted_preset = preset
        self._bridge.set_preset(preset)
        self._dialogue.set_up(replace(self._dialogue.setup, preset=preset, quality=None))

    async def switch_model(self, pack: Path) -> None:
        """Let another model answer this chat from now on; a running answer is stopped first."""
        if pack == self._expected and self._phase is not Phase.BROKEN:
            self._belong_to(pack)
        else:
            self._picked = pack
            await self._change_to(pack)

    async def _change_to(self, pack: Path) -> None:
        """Load `pack` now, or when the running answer has stopped."""
        if self._phase in (Phase.ANSWERING, Phase.STOPPING):
            self._next_pack = None if pack == self._bridge.pack else pack
            await self.action_stop()
        else:
            self._open(pack)

    async def _change_to_its_own(self) -> str:
        """Let this chat's own model answer. Returns a remark where it cannot, else ""."""
        self._picked = None
        model, expected = self._dialogue.setup.model, catalog.reference(self._expected)
        if not model or model == expected:
            return ""
        try:
            pack = catalog.find(model, saved=True)
        except FloeError as error:
            return model_choice.missing(model, error, "" if self._phase is Phase.BROKEN else expected)
        if pack != self._expected:
            await self._change_to(pack)
        return ""

    @property
    def _expected(self) -> Path:
        """The pack that answers the next question: another one may have to wait for the running answer's end."""
        return self._next_pack or self._bridge.pack

    def _open(self, pack: Path) -> None:
        self._next_pack = None
        self._presets = ()
        self._phase = Phase.LOADING
        self._say("loading", "$warning")
        self._show_context(None)
        self._bridge.open(pack)
        self._welcome()

    # What the engine does

    @on(ModelLoading)
    def _show_loading(self, event: ModelLoading) -> None:
        self._say(f"loading {share(event.fraction)}, {event.step}", "$warning")

    @on(ModelReady)
    async def _begin(self, event: ModelReady) -> None:
        self._take(event.loaded)
        self._show_loaded(event.loaded)
        self._ask_for_its_quality()
        await self._become_ready("ready")

    def _take(self, loaded: Loaded) -> None:
        self._presets, self._wanted_preset = loaded.presets, loaded.preset
        self._model, self._window, self._pack = loaded.model, loaded.context_window, Path(loaded.folder)
        if self._pack == self._picked:
            self._belong_to(self._pack)
        self._picked = None

    def _belong_to(self, pack: Path) -> None:
        """Save `pack` as the model of the chat on the screen."""
        model = catalog.reference(pack)
        if self._dialogue.setup.model != model:
            self._dialogue.set_up(replace(self._dialogue.setup, model=model))

    @on(PresetInForce)
    def _show_preset(self, event: PresetInForce) -> None:
        self._status.preset = event.preset
        if event.preset == _CUSTOM:
            self._wanted_preset = _CUSTOM
            self._dialogue.set_up(replace(self._dialogue.setup, quality=self._bridge.by_hand))

    async def _become_ready(self, words: str) -> None:
        """The engine can answer, or answer again: a model that was asked for meanwhile comes first."""
        if self._next_pack is not None:
            self._open(self._next_pack)
            return
        self._phase = Phase.READY
        self._say(words, "$success")

    def _ask_for_its_quality(self) -> None:
        """Let what this conversation was answered with be in force."""
        setup = self._dialogue.setup
        if setup.quality is not None and self._presets:
            if self._wanted_preset != _CUSTOM or setup.quality != self._bridge.by_hand:
                self._wanted_preset = _CUSTOM
                self._bridge.set_quality(setup.quality)
        elif setup.preset in self._presets and setup.preset != self._wanted_preset:
            self._wanted_preset = setup.preset
            self._bridge.set_preset(setup.preset)

    def _setup_of_new(self, setup: Setup) -> Setup:
        """`setup` for a new conversation, with the model and the quality that are in force."""
        quality = self._bridge.by_hand if self._wanted_preset == _CUSTOM else None
        return replace(setup, model=catalog.reference(self._expected), quality=quality)
