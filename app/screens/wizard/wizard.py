"""From a new machine to the first chat: machine, model, folder, access, progress.

The screen holds no work of its own: setups run on the program's `Setups`, so it can be left and opened again at any
time, and the demo model is one key away on every page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from ....models import catalog
from ....models.catalog_entry import CatalogEntry
from ....models.errors import AccessError, FloeError
from ....models.published import PUBLISHED
from ....models.quantities import size
from ...background import in_background
from ...settings.file import change_soon
from ...setup import elsewhere
from ...setup.setups import Setups, Survey, Surveyor, look_up, survey
from ...setup.wish import Wish, of_ready, unfinished, wish
from ...widgets.common.hints import Hints
from ...widgets.common.keys import key_of
from ...widgets.common.themes import MUTED
from ...widgets.setup.choice import ChoiceStep, Chosen
from ...widgets.setup.folder import FolderStep
from ...widgets.setup.machine import MachineStep
from ...widgets.setup.progress import ProgressStep
from ...widgets.setup.resume import ResumeStep
from ...widgets.setup.step import WizardStep
from ...widgets.setup.token import AskingStep, TokenStep
from ..models_remove import RemoveScreen


class Intent:
    """The user's choice, before the setup starts.

    Attributes:
        chosen: a model and its bits. wish: what will be started. earlier: an unfinished setup of that name, which is
            deleted when this one starts. left: the setup that the user left to choose again.
    """

    def __init__(self, settings: Path | None) -> None:
        """`settings`: the file in which the models folder is saved, None: it applies to this run only."""
        self._settings = settings
        self._folder_before: Path | None = None  # the models folder, until a setup starts in another one
        self.chosen: Chosen | None = None
        self.wish: Wish | None = None
        self.earlier: Wish | None = None
        self.left: Wish | None = None

    def choose(self, chosen: Chosen) -> None:
        """Set this up, in the current models folder; an unfinished setup with the same settings is continued.

        Raises:
            UsageError: there is a model of that name.
        """
        self.chosen = chosen
        entry, spec = chosen.entry, chosen.option.spec
        bits = {"up": spec.up, "gate": spec.gate, "down": spec.down, "dense": spec.dense}
        if (ready := entry.only_pack) is not None:
            made = of_ready(wish(ready.place, entry.name), ready)
        else:
            made = wish(entry.repo or str(entry.folder), entry.name, bits)
        begun = [*([self.left] if self.left else []), *unfinished()]
        earlier = next((one for one in begun if one.name == made.name), None)
        if earlier is not None and _alike(earlier) == _alike(made):
            made, earlier = earlier, None
        self.wish, self.earlier = made, earlier

    def use_folder(self, folder: Path) -> None:
        """Set it up in another models folder. Raises FloeError: that cannot be; the folder is as it was."""
        before = catalog.models_folder()
        if folder == before or self.chosen is None:
            return
        catalog.use_models_folder(folder)
        try:
            self.choose(self.chosen)
        except FloeError:
            catalog.use_models_folder(before)
            raise
        self._folder_before = self._folder_before or before

    def save_folder(self) -> None:
        """Save the folder in the settings. Raises FloeError: they cannot be written."""
        if self._folder_before is not None and self._settings is not None:
            change_soon(self._settings, {"folders.models": str(catalog.models_folder())}, lambda _error: None)
        self._folder_before = None

    def put_folder_back(self) -> None:
        """Nothing was started: restore the models folder."""
        if self._folder_before is not None:
            catalog.use_models_folder(self._folder_before)


def _alike(one: Wish) -> Wish:
    """A setup without what becomes known, or is chosen, once it begins."""
    return dataclasses.replace(one, commit="", pack="", to="")


Back = Callable[[], Awaitable[None]]
_PLACES = ("machine", "model", "folder", "setup")  # the line of steps
_PLACE: dict[type[WizardStep], int] = {
    ResumeStep: 0,
    MachineStep: 0,
    ChoiceStep: 1,
    FolderStep: 2,
    AskingStep: 2,
    TokenStep: 2,
    ProgressStep: 3,
}


CAN_CHAT = tuple(entry for entry in PUBLISHED if entry.chat is not None)

_KEYS: list[BindingType] = [
    Binding("escape", "back", "Previous step; on the first one, leave", show=False),
    Binding("ctrl+d", "demo", "Chat with the built-in demo model; a setup continues", show=False, priority=True),
    Binding("enter", "go_on", "Continue", show=False),
    Binding("f", "folder", "Choose another models folder before it is set up", show=False),
    Binding("b", "bits", "Show all bits of the model, or the recommended ones only", show=False),
    Binding("k", "figures", "Give quality in figures (KL), or in words", show=False),
    Binding("l", "look", "Look for models in the folders of LM Studio, Ollama and llama.cpp", show=False),
    Binding("m", "measure", "Measure the machine again", show=False),
    Binding("space", "pause", "Pause or continue the setup", show=False),
    Binding("s", "stop", "Stop the setup for now", show=False),
    Binding("r", "retry", "Try again", show=False),
    Binding("t", "token", "Enter a token", show=False),
    Binding("x,delete", "remove", "Delete a setup that failed or was stopped", show=False),
    Binding("c", "choose", "Choose model, bits and folder again", show=False),
]


class WizardScreen(Screen["str | None"]):
    """Sets a model up. Its result is the name of the model to chat with, or None: stay with what is there.

    Args:
        setups: the program's. entries: models to choose from. surveyor: looks at the machine.
        settings: the file in which the models folder is saved, None: it applies to this run only.
        wanted: the name of an entry to begin with, "" for none; then unfinished setups are not offered.
        asked: a model that the user typed, to be looked up once the machine is known.
    """

    TITLE = "Set up a model"
    CSS_PATH = "../../setup.tcss"
    BINDINGS: ClassVar[list[BindingType]] = _KEYS

    def __init__(
        self,
        setups: Setups,
        *,
        entries: Sequence[CatalogEntry] = CAN_CHAT,
        surveyor: Surveyor = survey,
        settings: Path | None = None,
        wanted: str | None = None,
        asked: Wish | None = None,
    ) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (24, "-short"), (30, "-tall")]
        self._step: WizardStep | None = None
        self._place = Static("", markup=False, id="steps")
        self._title = Static("", markup=False, id="title")
        self._body = Vertical(id="body")
        self._keys = Hints()
        self._token: str | None = None
        self._back: Back | None = None  # from asking the hub
        self._ask_again: Back | None = None
        self._setups, self._entries, self._surveyor = setups, list(entries), surveyor
        self._wanted, self._asked = wanted, asked
        self._survey: Survey | None = None
        self._looked = False  # in other programs' folders
        self._intent = Intent(settings)

    def compose(self) -> ComposeResult:
        yield self._place
        yield self._title
        yield self._body
        yield self._keys

    async def _turn_to(self, step: WizardStep) -> None:
        self._step = step
        async with self.batch():
            await self._body.remove_children()
            await self._body.mount(step)
        here = _PLACE[type(step)]
        parts: list[Content | tuple[str, str]] = []
        for at, name in enumerate(_PLACES):
            parts += [(" › ", MUTED)] if at else []
            parts.append((name, "bold $primary" if at == here else MUTED))
        self._place.update(Content.assemble(("floe-chat  ", "bold"), *parts, f"  {self.app.sub_title}"))
        self._title.update(step.title)
        self._show_keys()

    @on(WizardStep.Hints)
    def _show_keys(self) -> None:
        step = self._step
        if step is None:
            return
        first = isinstance(step, (ResumeStep, MachineStep))
        back = "Esc leaves" if first or isinstance(step, ProgressStep) else "Esc back"
        hints = step.hints.split(" · ")
        self._keys.show(
            [*hints, "" if "Esc" in step.hints else back, "Ctrl+D demo model", f"{key_of(self, 'quit')} quit"]
        )

    async def on_mount(self) -> None:
        if self._setups.setup is not None:
            await self._turn_to(ProgressStep(self._setups.setup))
        elif self._wanted is not None:
            await self._turn_to(MachineStep(self._surveyor))
        else:
            in_background(self, lambda: [(begun, begun.taken) for begun in unfinished()], self._begin)

    async def _begin(self, begun: list[tuple[Wish, int]]) -> None:
        if self._step is None:
            await self._turn_to(ResumeStep(begun) if begun else MachineStep(self._surveyor))

    # From step to step

    @on(ResumeStep.Continue)
    async def _continue(self, event: ResumeStep.Continue) -> None:
        await self._start(event.begun)

    @on(ResumeStep.Another)
    async def _look_at_machine(self) -> None:
        await self._turn_to(MachineStep(self._surveyor, self._survey))

    @on(MachineStep.Found)
    async def _take_machine(self, event: MachineStep.Found) -> None:
        self._survey = event.survey
        await self._show_choice()

    async def _show_choice(self) -> None:
        if self._survey is None:
            await self._look_at_machine()
        elif self._asked is not None:
            asked, self._asked = self._asked, None
            await self._look_up_wish(asked)
        else:
            # Named, and no more: what is in them is read when the user asks for it.
            programs = "" if self._looked else elsewhere.programs()
            await self._turn_to(ChoiceStep(self._survey.machine, self._entries, self._wanted, programs))

    @on(ChoiceStep.Asked)
    async def _look_up(self, event: ChoiceStep.Asked) -> None:
        try:
            asked = wish(event.model)
        except FloeError as error:
            event.step.tell(error)
        else:
            await self._look_up_wish(asked)

    async def _look_up_wish(self, asked: Wish) -> None:
        """Add a model that the user typed to the list."""

        async def add(entry: CatalogEntry) -> None:
            self._entries = [*(one for one in self._entries if one.name != entry.name), entry]
            self._wanted = entry.name
            await self._show_choice()

        await self._ask_hub(asked, add, self._show_choice)

    @on(ChoiceStep.Taken)
    async def _choose(self, event: ChoiceStep.Taken) -> None:
        self._wanted = event.chosen.entry.name
        try:
            self._intent.choose(event.chosen)
        except FloeError as error:
            event.step.tell(error)
            return
        chosen = event.chosen
        if chosen.option.works and not event.folder and self._intent.earlier is None:
            await self._begin_setup(self._show_choice)  # there is nothing to decide any more
        else:
            await self._show_folder()

    async def _show_folder(self) -> None:
        chosen = self._intent.chosen
        assert chosen is not None
        disk, name = chosen.option.disk, chosen.entry.name
        lost = f"The unfinished setup of {name} with other settings will be deleted." if self._intent.earlier else ""
        await self._turn_to(FolderStep(catalog.models_folder(), disk["peak"], disk["pack"], lost))

    @on(FolderStep.Taken)
    async def _take_folder(self, event: FolderStep.Taken) -> None:
        try:
            self._intent.use_folder(event.look.folder)
        except FloeError as error:
            event.step.tell(error)
            return
        assert self._survey is not None
        machine = dataclasses.replace(self._survey.machine, disk_free=event.look.free)
        self._survey = dataclasses.replace(self._survey, machine=machine)
        await self._begin_setup(self._show_folder)

    async def _begin_setup(self, back: Back) -> None:
        """Ask the hub about what was chosen, and start. back: where Esc leads."""
        wanted, chosen = self._intent.wish, self._intent.chosen
        assert wanted is not None and chosen is not None

        async def start(entry: CatalogEntry) -> None:
            if chosen.entry.only_pack is None or wanted.pack:
                await self._start(wanted)
            elif entry.ready is not None:  # as it is now; a list says what it was
                await self._start(of_ready(wanted, entry.ready))
            elif isinstance(self._step, AskingStep):
                hint = "Go back, and choose the line below to pack the model here."
                self._step.tell(FloeError(f"{wanted.model} is no pack", "It holds a checkpoint.", hint))

        await self._ask_hub(wanted, start, back)

    # The hub

    async def _ask_hub(self, wanted: Wish, then: Callable[[CatalogEntry], Awaitable[None]], back: Back) -> None:
        """Look at the model, with a token if one is needed, then call `then`."""
        asking = AskingStep()
        self._ask_again, self._back = (lambda: self._ask_hub(wanted, then, back)), back
        await self._turn_to(asking)

        def look() -> CatalogEntry | FloeError:
            try:
                return look_up(wanted, self._token)
            except FloeError as error:
                return error

        async def answered(found: CatalogEntry | FloeError) -> None:
            if self._step is not asking:
                return  # the user left this step
            if isinstance(found, AccessError):
                await self._turn_to(TokenStep(found))
            elif isinstance(found, FloeError):
                asking.tell(found)
            else:
                await then(found)

        in_background(self, look, answered)

    @on(TokenStep.Given)
    async def _take_token(self, event: TokenStep.Given) -> None:
        self._token = event.token
        if self._ask_again is not None:
            await self._ask_again()

    @on(AskingStep.Again)
    async def _once_more(self) -> None:
        if self._ask_again is not None:
            await self._ask_again()

    async def _turn_back(self) -> None:
        """Back to the step before the hub was asked."""
        if self._back is not None:
            await self._back()

    # The setup

    async def _start(self, wanted: Wish) -> None:
        """Start, once an earlier setup of that name is deleted."""
        earlier, self._intent.earlier = self._intent.earlier, None
        if earlier is None:
            await self._run(wanted)
            return
        clearing = AskingStep()
        clearing.title = "Deleting the earlier setup"
        await self._turn_to(clearing)

        async def cleared(error: FloeError | None) -> None:
            if error is not None:
                clearing.tell(error)
            else:
                await self._run(wanted)

        in_background(self, lambda: _given_up(self._setups, earlier), cleared)

    async def _run(self, wanted: Wish) -> None:
        try:
            self._intent.save_folder()
        except FloeError as error:  # do not start a setup that the next start would not find
            if isinstance(self._step, AskingStep):
                self._step.tell(error)
            return
        try:
            running = self._setups.start(wanted, self._token)
        except FloeError as error:  # another one is under way: that is shown
            self.app.notify(f"{error.cause} {error.hint}", title=error.title, severity="warning", markup=False)
            running = self._setups.setup
        if isinstance(self._step, ProgressStep) and running is not None:
            self._step.follow(running)
        elif running is not None:
            await self._turn_to(ProgressStep(running))

    # Keys

    def _progress(self, *states: str) -> ProgressStep | None:
        """The view of the setup, if it is in front and in one of these states."""
        step = self._step
        return step if isinstance(step, ProgressStep) and step.state in states else None

    async def action_go_on(self) -> None:
        """Continue: from the machine, after trouble with the hub, or into the chat."""
        if (shown := self._progress("done")) is not None:
            self._setups.stop()
            self.dismiss(shown.setup.wish.name)
        elif (shown := self._progress("cancelled")) is not None:
            await self._run(shown.setup.wish)
        elif self._step is not None:
            self._step.go_on()

    async def action_back(self) -> None:
        """Previous step; leave from the first one and from a setup, which continues."""
        match self._step:
            case ChoiceStep() as step:
                if not step.close_other():
                    await self._look_at_machine()
            case FolderStep():
                await self._show_choice()
            case AskingStep() | TokenStep():
                await self._turn_back()
            case _:
                self._leave(None)

    def action_demo(self) -> None:
        """Chat with the demo model."""
        self._leave(catalog.DEMO)

    def action_measure(self) -> None:
        """Measure the machine again."""
        if isinstance(self._step, MachineStep):
            self._step.measure()

    def action_bits(self) -> None:
        """Show all bits of the highlighted model."""
        if isinstance(self._step, ChoiceStep):
            self._step.toggle_bits()

    def action_folder(self) -> None:
        """Choose the highlighted model, and be asked for the folder."""
        if isinstance(self._step, ChoiceStep):
            self._step.take_elsewhere()

    def action_figures(self) -> None:
        """Give quality in figures, or in words."""
        if isinstance(self._step, ChoiceStep):
            self._step.toggle_figures()

    def action_look(self) -> None:
        """Look for models in other programs' folders, and add them to the list."""
        if not isinstance(self._step, ChoiceStep) or self._looked or not elsewhere.programs():
            return
        step, self._looked = self._step, True
        step.say_keys("Looking …")

        async def add(copies: list[elsewhere.Copy]) -> None:
            known = {one.entry.name for one in copies}
            self._entries = [*(one for one in self._entries if one.name not in known), *(one.entry for one in copies)]
            if copies:
                self._wanted = copies[0].entry.name
            else:
                self.app.notify(f"No model that floe-chat can pack is in the folders of {elsewhere.programs()}.")
            if self._step is step:
                await self._show_choice()

        in_background(self, elsewhere.copies, add)

    def action_pause(self) -> None:
        """Pause or continue the setup."""
        if isinstance(self._step, ProgressStep):
            self._step.toggle_pause()

    def action_stop(self) -> None:
        """End the setup for now."""
        if self._progress("looking", "working", "paused", "checking"):
            self._setups.stop()

    async def action_retry(self) -> None:
        """Start the failed setup again, where it stopped."""
        if (shown := self._progress("failed")) is not None:
            await self._run(shown.setup.wish)

    async def action_token(self) -> None:
        """Ask for a token for a setup that lacks one."""
        shown = self._progress("failed")
        if shown is None or not isinstance(shown.setup.error, AccessError):
            return
        running = shown.setup

        async def back() -> None:
            await self._turn_to(ProgressStep(running))

        await self._ask_hub(running.wish, lambda _entry: self._run(running.wish), back)

    async def action_choose(self) -> None:
        """Choose again after a setup failed or was stopped."""
        if (shown := self._progress("failed", "cancelled")) is not None:
            self._intent.left, self._wanted = shown.setup.wish, shown.setup.wish.name
            self._setups.stop()
            await self._show_choice()

    def action_remove(self) -> None:
        """Ask, and delete a setup that failed or was stopped."""
        if (shown := self._progress("failed", "cancelled")) is None:
            return
        wanted = shown.setup.wish

        def deleted(error: FloeError | None) -> None:
            if error is not None:
                shown.tell(error)
            else:
                self._leave(None)

        def answered(yes: bool | str | None) -> None:
            if yes:
                in_background(self, lambda: _given_up(self._setups, wanted), deleted)

        again = (
            "This will be deleted, with everything in it. To use the model, it has to be downloaded and packed again."
        )
        where = [str(wanted.place), str(wanted.fetched)]
        self.app.push_screen(RemoveScreen(f"{wanted.name}, {size(wanted.taken)}", where, again=again), answered)

    def _leave(self, result: str | None) -> None:
        if self._progress("done", "failed"):
            self._setups.stop()
        self._intent.put_folder_back()
        self.dismiss(result)


def _given_up(setups: Setups, wanted: Wish) -> FloeError | None:
    """Delete a setup, or return why that cannot be."""
    try:
        setups.give_up(wanted)
    except FloeError as error:
        return error
    return None
