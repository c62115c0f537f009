"""The model that answers the chat: loading it, changing to another one, and its quality."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from pathlib import Path

from ...engine.events import Loaded, Rule
from ...engine.quality_presets import PUBLISHED
from ...engine.ranges import PLACEMENTS, Wanted
from ...models import catalog
from ...models.errors import FloeError, UsageError
from ..client.interface import Choice, Client
from ..history import ChatSetup
from ..settings.servers import SavedServer
from ..text.units import share
from . import model_choice
from .dialogue import Dialogue
from .view import View

CUSTOM = "Custom"  # the engine's name for a quality set by hand


class Phase(Enum):
    """What the engine is doing for the chat."""

    LOADING = auto()
    READY = auto()
    ANSWERING = auto()
    STOPPING = auto()
    BROKEN = auto()


class ChatModel:
    """The model behind one chat.

    Attributes:
        name: "" before one is loaded. window: tokens of context, 0 before, and where a server does not say.
        presets: ours, best first; none while it loads. preset: the one in force, or `CUSTOM`. wanted: the one
            requested last. by_hand: the last quality set by hand. loaded: what answers; None while it loads.
    """

    def __init__(self, client: Client, dialogue: Dialogue, view: View) -> None:
        self._client = client
        self._dialogue = dialogue
        self._view = view
        self._next: Choice | None = None
        self._picked: Choice | None = None  # by the person, for the chat on the screen
        self._before: Choice | None = None  # what answers again if the next one cannot
        self.phase = Phase.LOADING
        self.name = self.preset = self.wanted = ""
        self.window = 0
        self.presets: tuple[str, ...] = ()
        self.by_hand: Rule | None = None
        self.loaded: Loaded | None = None
        self._placed: str | None = None  # how experts were placed, until they are as asked

    @property
    def known(self) -> tuple[str, ...]:
        """The presets and, after them, the published rules; none while it loads."""
        return (*self.presets, *(rule.name for rule in PUBLISHED)) if self.presets else ()

    @property
    def answering(self) -> bool:
        """Whether an answer is being written."""
        return self.phase is Phase.ANSWERING

    @property
    def client(self) -> Client:
        """The engine behind it."""
        return self._client

    def begin(self) -> None:
        """Show that the first model loads."""
        self._view.gauges.show_remote(self._client.remote)
        self._view.gauges.say("loading", "$warning")
        self._welcome()

    # Quality

    def next_preset(self) -> None:
        """Ask for the next quality preset."""
        if not self.presets:
            self._view.gauges.remark(self.no_presets)
        elif len(self.presets) == 1:
            self._view.gauges.remark(f"This model has only one preset: {self.presets[0]}")
        else:
            now = self.presets.index(self.wanted) if self.wanted in self.presets else -1
            self.choose_preset(self.presets[(now + 1) % len(self.presets)])

    @property
    def no_presets(self) -> str:
        """Why there are no presets, where there are none."""
        remote = self._client.remote
        return f"{remote} decides about quality" if remote else "The presets are known once the model is loaded"

    def choose_preset(self, preset: str) -> None:
        """Ask for `preset` from the next token on; the conversation remembers it."""
        self._ask_for(preset)
        self._dialogue.set_up(replace(self._dialogue.setup, preset=preset, quality=None))

    async def take_preset(self, name: str) -> None:
        """Use a preset, by its name in any case, or list all presets."""
        if not name:
            listed = [f"{preset} (now)" if preset == self.preset else preset for preset in self.known]
            ours, published = (", ".join(part) for part in (listed[: len(self.presets)], listed[len(self.presets) :]))
            self._view.gauges.remark(f"Presets: {ours}; as published: {published}" if listed else self.no_presets)
            return
        preset = next((preset for preset in self.presets if preset.lower() == name.lower()), None)
        if preset is None and not self.presets:
            raise UsageError(f"This model has no preset {name!r}", f"{self.no_presets}.", "")
        if preset is None:
            from ...engine import quality_presets as quality
            from ...models.pack.manifest import Manifest

            assert isinstance(self._client.chosen, Path)
            preset = quality.get(name, Manifest.read(self._client.chosen)).name  # which says why it has none
        self.choose_preset(preset)
        if note := self.note_of(preset):
            await self._view.messages.note(note)

    def note_of(self, preset: str) -> str:
        """How this pack runs a published rule; "" for other presets."""
        chosen = self._client.chosen
        if not isinstance(chosen, Path):
            return ""
        from ..client.costs import published_note  # torch, which a server's answer does not need

        return published_note(preset, chosen)

    def set_quality(self, rule: Rule) -> None:
        """Set the quality by hand; once the engine confirms it, the conversation remembers it."""
        self.by_hand = rule
        self._client.set_quality(rule)

    # Where its experts are

    @property
    def unplaced(self) -> str:
        """Why nobody can choose where experts are; "" if that can be chosen."""
        if remote := self._client.remote:
            return f"{remote} decides where experts are"
        if self.loaded is None:
            return "Where experts may be is known once the model is loaded"
        if self.loaded.pools is None:
            return f"All experts are in one place ({self.loaded.device}): no card shares them with RAM"
        return ""

    async def take_placement(self, text: str) -> None:
        """Load the model again with its experts placed so, see `Wanted`; or say how they are.

        Raises:
            UsageError: there is no such placement, or no card.
        """
        if not text:
            listed = ", ".join(f"{kind} (now)" if kind == self._client.placement else kind for kind in PLACEMENTS)
            self._view.gauges.remark(self.unplaced or f"Placements: {listed}, or a pool's size, as pool:4gb")
            return
        Wanted.of(text)
        if self.unplaced:
            raise UsageError(f"Experts cannot be placed as {text!r}", f"{self.unplaced}.")
        if self.phase is not Phase.READY:
            raise UsageError("The model is loaded again for another placement", "", "Stop the answer first.")
        self._placed = self._client.placement
        self._open(self._client.chosen, text)

    def ask_for_its_quality(self) -> None:
        """Request the quality that this conversation was answered with."""
        setup = self._dialogue.setup
        if setup.quality is not None and self.presets:
            if self.wanted != CUSTOM or setup.quality != self.by_hand:
                self.wanted = CUSTOM
                self.set_quality(setup.quality)
        elif setup.preset in self.known and setup.preset != self.wanted:
            self._ask_for(setup.preset)

    def setup_of_new(self, setup: ChatSetup) -> ChatSetup:
        """`setup` for a new conversation, with the model and quality in force."""
        quality = self.by_hand if self.wanted == CUSTOM else None
        return replace(setup, model=self._expected_reference, quality=quality)

    def _ask_for(self, preset: str) -> None:
        self.wanted = preset
        self._client.set_preset(preset)

    # Which model

    def stop(self) -> None:
        """Stop the answer, if there is one."""
        if self.phase is Phase.ANSWERING:
            self._client.cancel()
            self.phase = Phase.STOPPING
            self._view.gauges.say("stopping", "$warning")

    def switch(self, chosen: Choice) -> None:
        """Let another model answer this chat from now on; a running answer is stopped first.

        Raises:
            UsageError: that is no address of a server.
        """
        if chosen != self._expected or self.phase is Phase.BROKEN:
            self._picked = chosen
            self._change_to(chosen)
        elif self._next is not None or self.phase is Phase.LOADING:
            self._picked = chosen
        else:
            self._belong_to(self._client.reference)

    def change_to_its_own(self) -> str:
        """Switch to this chat's own model. Returns a remark if that is impossible, else ""."""
        self._picked = None
        model, expected = self._dialogue.setup.model, self._expected_reference
        if not model or model == expected:
            return ""
        if self._next is None and self._client.remote:
            return model_choice.sent_away(model, self._client.remote)
        try:
            pack = catalog.find(model, saved=True)
        except FloeError as error:
            return model_choice.missing(model, error, "" if self.phase is Phase.BROKEN else expected)
        if pack != self._expected:
            self._change_to(pack)
        return ""

    def fall_back(self) -> bool:
        """The model could not be loaded: the previous one answers again. False if there was none."""
        before, placed = self._before, self._placed
        self._placed = None
        if before is None or (before == self._client.chosen and placed is None):
            self.phase = Phase.BROKEN
            self._view.gauges.say("no model", "$error")
            return False
        self._picked = None
        self._open(before, placed)
        if not self._dialogue.ids:
            self._belong_to(self._client.reference)
        return True

    def _change_to(self, chosen: Choice) -> None:
        """Load it now, or when the running answer has stopped."""
        if self.phase in (Phase.ANSWERING, Phase.STOPPING):
            self._next = None if chosen == self._client.chosen else chosen
            self.stop()
        else:
            self._open(chosen)

    @property
    def _expected(self) -> Choice:
        """What will answer the next question: a switch may have to wait for the running answer to end."""
        return self._next or self._client.chosen

    @property
    def _expected_reference(self) -> str:
        return model_choice.reference(self._next) if self._next else self._client.reference

    def _open(self, chosen: Choice, placement: str | None = None) -> None:
        if self._before is None and self.phase is Phase.LOADING:
            self._before = self._client.chosen
        self._client.open(chosen, placement)
        self._next = self.by_hand = self.loaded = None
        self.presets = ()
        self.phase = Phase.LOADING
        gauges = self._view.gauges
        gauges.show_remote(self._client.remote)
        gauges.say("connecting" if self._client.remote else "loading", "$warning")
        gauges.show_context(None)
        self._welcome()

    def _welcome(self) -> None:
        self._view.messages.welcome(demo=self._client.reference == catalog.DEMO, sent=self._client.privacy)

    def _belong_to(self, model: str) -> None:
        """Save `model` as that of the chat on the screen."""
        if self._dialogue.setup.model != model:
            self._dialogue.set_up(replace(self._dialogue.setup, model=model))

    # What the engine does

    def show_loading(self, step: str, fraction: float) -> None:
        """One step of loading began."""
        self._view.gauges.say(f"loading {share(fraction)}, {step}", "$warning")

    def take(self, loaded: Loaded) -> str:
        """The model answers from now on. Returns a remark if questions go another way than before, else ""."""
        self.loaded, self.presets, self.preset = loaded, loaded.presets, loaded.preset
        self.wanted = loaded.preset
        self.name, self.window = loaded.model, loaded.context_window
        answers = self._client.chosen if loaded.remote else Path(loaded.folder)
        was_remote, self._before = isinstance(self._before, SavedServer), answers
        picked = answers == self._picked
        if picked or (loaded.remote and not self._dialogue.ids):  # only now a server's model is known by name
            self._belong_to(model_choice.reference(answers) if isinstance(answers, Path) else self._client.reference)
        self._picked = None
        self._view.gauges.show_loaded(loaded)
        self._view.field.measure_again()
        self.ask_for_its_quality()
        if self._placed is not None:
            self._placed = None
            again = ". It reads this chat again" if self._dialogue.ids else ""
            return f"{self.name} answers again. Its experts: {loaded.placed}{again}"
        if not picked or not self._dialogue.ids or not (loaded.remote or was_remote):
            return ""
        return f"{self.name} answers from now on. {self._client.privacy or 'Nothing you write leaves this machine.'}"

    def take_preset_in_force(self, preset: str) -> None:
        """The engine changed the quality."""
        self.preset = preset
        self._view.gauges.show_preset(preset)
        if preset == CUSTOM:
            self.wanted = CUSTOM
            self._dialogue.set_up(replace(self._dialogue.setup, quality=self.by_hand))

    def become_ready(self, words: str) -> None:
        """The engine can answer (again): a model that was requested meanwhile is loaded first."""
        if self._next is not None:
            self._open(self._next)
            return
        self.phase = Phase.READY
        self._view.gauges.say(words, "$success")
