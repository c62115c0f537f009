"""The wizard's frame: the line of steps, a title, one step at a time, and its keys."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from ...widgets.common.hints import Hints
from ...widgets.common.keys import key_of
from ...widgets.common.themes import MUTED
from ...widgets.setup.choice import ChoiceStep
from ...widgets.setup.folder import FolderStep
from ...widgets.setup.machine import MachineStep
from ...widgets.setup.progress import ProgressStep
from ...widgets.setup.resume import ResumeStep
from ...widgets.setup.step import WizardStep
from ...widgets.setup.token import AskingStep, TokenStep

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


class WizardView(Screen["str | None"]):
    """Shows one step of the wizard at a time."""

    CSS_PATH = "../../setup.tcss"

    def __init__(self) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (24, "-short"), (30, "-tall")]
        self._step: WizardStep | None = None
        self._place = Static("", markup=False, id="steps")
        self._title = Static("", markup=False, id="title")
        self._body = Vertical(id="body")
        self._keys = Hints()

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
