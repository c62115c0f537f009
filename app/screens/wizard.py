"""The way from a bare machine to the first chat: machine, model, folder, access, progress.

The screen holds no work of its own: setups run on the program's `Setups`, so it can be left and opened again at any
time, and the demo model is one key away on every page.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.binding import Binding, BindingType

from ...models import catalog
from ...models.errors import AccessError, FloeError
from ...models.published import PUBLISHED, Entry
from ..settings_file import change
from ..setup_wish import Wish, unfinished, wish
from ..setups import Setups, Survey, Surveyor, survey
from ..widgets.background import in_background
from ..widgets.setup_choice import ChoiceStep, Chosen
from ..widgets.setup_folder import FolderStep
from ..widgets.setup_machine import MachineStep
from ..widgets.setup_progress import ProgressStep
from ..widgets.setup_resume import ResumeStep
from ..widgets.setup_token import AskingStep, TokenStep
from .wizard_access import WizardAccess

CAN_CHAT = tuple(entry for entry in PUBLISHED if entry.chat is not None)


class WizardScreen(WizardAccess):
    """Sets a model up. Its result is the name of the model to chat with, or None: stay with what is there.

    Args:
        setups: the program's. entries: models to choose from. surveyor: looks at the machine. settings: the file that
            keeps the models folder, None: it holds for this run.
        wanted: the name of an entry to begin with, "" for none; then what is unfinished is not offered.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "the step before; from the first one, out", show=False),
        Binding("ctrl+d", "demo", "chat with the built-in demo model; a setup goes on", show=False, priority=True),
        Binding("enter", "go_on", "go on", show=False),
        Binding("m", "measure", "measure the machine again", show=False),
        Binding("space", "pause", "pause the setup, or let it go on", show=False),
        Binding("s", "stop", "stop the setup for now", show=False),
        Binding("r", "retry", "try again", show=False),
        Binding("t", "token", "give a token", show=False),
        Binding("c", "choose", "choose model, rounding and folder anew", show=False),
    ]

    def __init__(
        self,
        setups: Setups,
        *,
        entries: Sequence[Entry] = CAN_CHAT,
        surveyor: Surveyor = survey,
        settings: Path | None = None,
        wanted: str | None = None,
    ) -> None:
        super().__init__()
        self._setups, self._entries, self._surveyor, self._settings = setups, list(entries), surveyor, settings
        self._wanted = wanted
        self._survey: Survey | None = None
        self._chosen: Chosen | None = None
        self._wish: Wish | None = None  # what will be started
        self._earlier: Wish | None = None  # of the same name, begun and given up when another is started
        self._left: Wish | None = None  # what the person turned away from to choose anew
        self._folder_before: Path | None = None  # the models folder that is kept until a setup begins in another one

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

    @on(ResumeStep.Anew)
    async def _look_at_machine(self) -> None:
        await self._turn_to(MachineStep(self._surveyor, self._survey))

    @on(MachineStep.Found)
    async def _take_machine(self, event: MachineStep.Found) -> None:
        self._survey = event.survey
        await self._show_choice()

    async def _show_choice(self) -> None:
        if self._survey is None:
            await self._look_at_machine()
        else:
            await self._turn_to(ChoiceStep(self._survey.machine, self._entries, self._wanted))

    @on(ChoiceStep.Asked)
    async def _look_up(self, event: ChoiceStep.Asked) -> None:
        try:
            asked = wish(event.model)
        except FloeError as error:
            event.step.tell(error)
            return

        async def add(entry: Entry) -> None:
            self._entries = [*(one for one in self._entries if one.name != entry.name), entry]
            self._wanted = entry.name
            await self._show_choice()

        await self._ask_hub(asked, add, self._show_choice)

    @on(ChoiceStep.Taken)
    async def _choose(self, event: ChoiceStep.Taken) -> None:
        self._chosen, self._wanted = event.chosen, event.chosen.entry.name
        try:
            self._make_wish()
        except FloeError as error:
            event.step.tell(error)
            return
        await self._show_folder()

    async def _show_folder(self) -> None:
        assert self._chosen is not None
        disk = self._chosen.option.disk
        lost = f"What was begun of {self._chosen.entry.name} with other choices is deleted." if self._earlier else ""
        await self._turn_to(FolderStep(catalog.models_folder(), disk["peak"], disk["pack"], lost))

    def _make_wish(self) -> None:
        """Of what was chosen, for the models folder of now; what was begun of that very kind is gone on with.

        Raises:
            UsageError: there is a model of that name.
        """
        assert self._chosen is not None
        entry, spec = self._chosen.entry, self._chosen.option.spec
        bits = {"up": spec.up, "gate": spec.gate, "down": spec.down, "dense": spec.dense}
        made = wish(entry.repo or str(entry.folder), entry.name, bits)
        begun = [*([self._left] if self._left else []), *unfinished()]
        earlier = next((one for one in begun if one.name == made.name), None)
        if earlier is not None and dataclasses.replace(earlier, commit="") == made:
            made, earlier = earlier, None
        self._wish, self._earlier = made, earlier

    @on(FolderStep.Taken)
    async def _take_folder(self, event: FolderStep.Taken) -> None:
        before, folder = catalog.models_folder(), event.look.folder
        try:
            if folder != before:
                catalog.use_models_folder(folder)
                self._make_wish()
                self._folder_before = self._folder_before or before
        except FloeError as error:
            catalog.use_models_folder(before)
            event.step.tell(error)
            return
        assert self._wish is not None and self._survey is not None
        machine = dataclasses.replace(self._survey.machine, disk_free=event.look.free)
        self._survey = dataclasses.replace(self._survey, machine=machine)
        wanted = self._wish
        await self._ask_hub(wanted, lambda _entry: self._start(wanted), self._show_folder)

    # The setup

    async def _start(self, wanted: Wish) -> None:
        """Begin, once what was begun otherwise is gone."""
        earlier, self._earlier = self._earlier, None
        if earlier is None:
            await self._run(wanted)
            return
        clearing = AskingStep()
        clearing.title = "Making room"
        await self._turn_to(clearing)

        def clear() -> FloeError | None:
            try:
                self._setups.give_up(earlier)
            except FloeError as error:
                return error
            return None

        async def cleared(error: FloeError | None) -> None:
            if error is not None:
                clearing.tell(error)
            else:
                await self._run(wanted)

        in_background(self, clear, cleared)

    def _keep_folder(self) -> None:
        """Let the settings have the folder that was chosen. Raises FloeError: they cannot be written."""
        if self._folder_before is not None and self._settings is not None:
            change(self._settings, {"folders.models": str(catalog.models_folder())})
        self._folder_before = None

    async def _run(self, wanted: Wish) -> None:
        try:
            self._keep_folder()
        except FloeError as error:  # a setup that the next start would not find is not begun
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
        """Go on: from the machine, after trouble with the hub, or into the chat."""
        if (shown := self._progress("done")) is not None:
            self._setups.stop()
            self.dismiss(shown.setup.wish.name)
        elif (shown := self._progress("cancelled")) is not None:
            await self._run(shown.setup.wish)
        elif self._step is not None:
            self._step.go_on()

    async def action_back(self) -> None:
        """The step before; from the first one and from a setup, out: a setup goes on."""
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

    def action_pause(self) -> None:
        """Hold the setup, or let it go on."""
        if isinstance(self._step, ProgressStep):
            self._step.toggle_pause()

    def action_stop(self) -> None:
        """End the setup for now."""
        if self._progress("looking", "working", "paused", "checking"):
            self._setups.stop()

    async def action_retry(self) -> None:
        """Begin the failed setup again, where it was."""
        if (shown := self._progress("failed")) is not None:
            await self._run(shown.setup.wish)

    async def action_token(self) -> None:
        """Give a token to a setup that lacks one."""
        shown = self._progress("failed")
        if shown is None or not isinstance(shown.setup.error, AccessError):
            return
        running = shown.setup

        async def back() -> None:
            await self._turn_to(ProgressStep(running))

        await self._ask_hub(running.wish, lambda _entry: self._run(running.wish), back)

    async def action_choose(self) -> None:
        """Choose anew after a setup failed or was stopped."""
        if (shown := self._progress("failed", "cancelled")) is not None:
            self._left, self._wanted = shown.setup.wish, shown.setup.wish.name
            self._setups.stop()
            await self._show_choice()

    def _leave(self, result: str | None) -> None:
        if self._progress("done", "failed"):
            self._setups.stop()
        if self._folder_before is not None:
            catalog.use_models_folder(self._folder_before)
        self.dismiss(result)
