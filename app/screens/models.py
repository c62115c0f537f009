"""All models: installed, unfinished and available; running setups and checks, and the actions on each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Input, OptionList, Static

from ...models.catalog_entry import CatalogEntry
from ...models.errors import FloeError
from ...models.published import PUBLISHED
from ...models.quantities import size
from ...models.supported import CALLED
from ..background import in_background
from ..settings.servers import SavedServer
from ..setup.setups import Setups, Surveyor, survey
from ..setup.wish import Wish, wish
from ..text.plain_text import printable
from ..widgets.common.hints import Hints
from ..widgets.setup import models
from ..widgets.setup.bar import Bar
from ..widgets.setup.models import KnownModels, Model, ModelList
from ..widgets.setup.step import Trouble
from .models_remove import LINKED, RemoveScreen
from .models_server import AddServerScreen
from .models_words import again, delete, going, keys, may_be_tried_again, places, refusal
from .wizard.wizard import WizardScreen

_PERIOD = 0.25

_KEYS: list[BindingType] = [
    Binding("escape", "leave", "Back to the chat; a setup continues", show=False),
    Binding("enter", "choose", "Chat with the model, continue its setup, or set it up", show=False),
    Binding("space", "pause", "Pause or continue the setup", show=False),
    Binding("s", "stop", "Stop the setup, or the check", show=False),
    Binding("v", "verify", "Check every byte of the model", show=False),
    Binding("x,delete", "remove", "Delete the model", show=False),
]


class ModelsScreen(Screen["str | SavedServer | None"]):
    """Its result is the name of the model, or the server, to chat with from now on, or None.

    Args:
        setups: the program's; a setup continues when this page is left. current: the model that answers the chat, or
            the server.
        entries, surveyor, settings: for the wizard.
    """

    CSS_PATH = "../setup.tcss"
    TITLE = "Models"
    BINDINGS: ClassVar[list[BindingType]] = _KEYS

    def __init__(
        self,
        setups: Setups,
        *,
        current: SavedServer | str | None = None,
        entries: Sequence[CatalogEntry] = PUBLISHED,
        surveyor: Surveyor = survey,
        settings: Path | None = None,
    ) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-low"), (24, "-short"), (30, "-tall")]
        self._setups, self._current = setups, current
        self._entries, self._surveyor, self._settings = entries, surveyor, settings
        self._list = ModelList()
        self._details = Static("", markup=False, id="details")
        self._other = Input(placeholder="owner/name, https://huggingface.co/owner/name, or a folder", id="other")
        self._trouble = Trouble()
        self._going = Static("", markup=False, id="going")
        self._bar = Bar()
        self._disk = Static("", markup=False, id="disk")
        self._keys = Hints()
        self._seen: tuple[object, ...] = (None, None, None)
        self._explained: str | None = None
        self._to: str | None = None  # highlight this one

    def compose(self) -> ComposeResult:
        yield Static(" · ".join(filter(None, ("Models", self.app.sub_title))), id="title", markup=False)
        with Vertical(id="body"):
            yield self._list
            yield self._other
            yield self._trouble
            yield self._details
            yield self._going
            yield self._bar
            yield self._disk
        yield self._keys

    def on_mount(self) -> None:
        self._list.focus()
        self._bar.display = self._other.display = False
        self.set_interval(_PERIOD, self._watch)
        self.refresh_list()

    def refresh_list(self) -> None:
        """Read the list of models again."""
        in_background(self, lambda: models.look(self._entries), self._show)

    def _show(self, found: KnownModels) -> None:
        self._list.show(found, self._current, self._to)
        self._to = None
        free = "" if found.free is None else f", {size(found.free)} free"
        disk = found.trouble or f"Disk: {size(found.taken)} used{free}. Folder: {found.folder}"
        self._disk.update(printable(disk))

    @property
    def highlighted(self) -> Model | None:
        """The model that keys act on; None on another line."""
        return self._list.model

    @on(OptionList.OptionHighlighted)
    def _explain(self) -> None:
        model = self.highlighted
        name = None if model is None else model.name
        if name != self._explained:
            self._explained = name
            self._trouble.show(None)
        other = f"{CALLED} models work: from the hub, or a checkpoint folder on this machine."
        if self._list.on_server_line:
            other = "Any server that speaks OpenAI's protocol. What you ask is then sent to it."
        self._details.update(printable(model.details) if model else other)
        self._show_keys()

    def _show_keys(self) -> None:
        if self._other.display:
            self._keys.show(["Enter looks it up", "Esc back to the list"])
            return
        self._keys.show([*keys(self.highlighted, self._setups, on_server_line=self._list.on_server_line), "Esc back"])

    # What runs

    def _watch(self) -> None:
        setup, check = self._setups.setup, self._setups.check
        now = None if setup is None else setup.progress()
        lines = going(self._setups)
        self._going.update(printable("\n".join(lines)))
        self._going.display = bool(lines)
        share = check.share if check and check.state == "checking" else now.share if now else 0.0
        running = (check is not None and check.state == "checking") or self._setups.busy
        self._bar.share, self._bar.display = share, running
        self._bar.held = now is not None and now.state == "paused"
        seen = (setup, now and now.state, check and check.state)
        if seen != self._seen:
            self._seen = seen
            self.refresh_list()
            if now is not None and now.state == "failed" and setup is not None:
                self._trouble.show(setup.error)
        self._show_keys()

    # Keys

    @on(OptionList.OptionSelected)
    def _act(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        model = self._list.models[event.option_index]
        if event.option.id == models.SERVER:
            self.app.push_screen(AddServerScreen(), self._added)
        elif model is None:
            self._other.display = True
            self._other.focus()
            self._show_keys()
        elif model.server is not None:
            self.dismiss(model.server)
        elif model.kind == "available":
            self._open_wizard(model.name)
        elif model.kind == "left":
            self._trouble.show(FloeError(model.trouble, model.details, "Press X to delete it, then set it up again."))
        elif model.kind == "installed":
            if model.trouble:
                hint = "Press V to see which files, or X to delete it."
                self._trouble.show(FloeError(model.trouble, model.details, hint))
            else:
                self.dismiss(model.name)
        elif model.wish is not None:
            setup = self._setups.setup
            if setup is not None and setup.wish.folder == model.wish.folder and not may_be_tried_again(setup):
                self._open_wizard(None)  # shows the setup that runs, or why it failed
                return
            try:
                self._setups.start(model.wish)
            except FloeError as error:
                self._trouble.show(error)

    def _added(self, server: SavedServer | None) -> None:
        """A server was saved: Enter chats with it."""
        if server is not None:
            self._to = server.name
            self.refresh_list()

    @on(Input.Submitted)
    def _look_up(self, event: Input.Submitted) -> None:
        event.stop()
        if not (name := event.value.strip()):
            return
        try:
            asked = wish(name)
        except FloeError as error:
            self._trouble.show(error)
        else:
            self._close_other()
            self._open_wizard("", asked)

    @on(Input.Changed)
    def _forget_trouble(self) -> None:
        self._trouble.show(None)

    def _close_other(self) -> None:
        """Back from the field for another model to the list."""
        self._other.display = False
        self._other.value = ""
        self._trouble.show(None)
        self._list.focus()
        self._show_keys()

    def _open_wizard(self, wanted: str | None, asked: Wish | None = None) -> None:
        """For the entry of that name, "" for the model that was `asked` for, None for the setup that there is."""
        if wanted is not None and not self._setups.busy:
            self._setups.stop()
        wizard = WizardScreen(
            self._setups,
            entries=[entry for entry in self._entries if entry.chat is not None or entry.name == wanted],
            surveyor=self._surveyor,
            settings=self._settings,
            wanted=wanted,
            asked=asked,
        )
        self.app.push_screen(wizard, self._after_wizard)

    def _after_wizard(self, chosen: str | None) -> None:
        if chosen is not None:
            self.dismiss(chosen)
        else:
            self.refresh_list()

    def action_leave(self) -> None:
        """Back to the list from the field, else to the chat."""
        if self._other.display:
            self._close_other()
            return
        setup, check = self._setups.setup, self._setups.check
        if setup is not None and not self._setups.busy:
            self._setups.stop()
        if check is not None and check.state != "checking":
            self._setups.stop_check()
        self.dismiss(None)

    def action_choose(self) -> None:
        """Do what Enter does in the list."""
        self._list.action_select()

    def action_pause(self) -> None:
        """Pause or continue the setup."""
        setup = self._setups.setup
        if setup is None or not self._setups.busy:
            return
        if setup.progress().state == "paused":
            setup.resume()
        else:
            setup.pause()
        self._watch()

    def action_stop(self) -> None:
        """End the check, else the setup; what is done is saved."""
        if self._setups.check is not None:
            self._setups.stop_check()
        else:
            self._setups.stop()
        self._watch()

    def action_verify(self) -> None:
        """Check the highlighted model."""
        model = self.highlighted
        if model is not None and model.kind == "installed":
            self._setups.start_check(model.name)
            self._watch()

    def action_remove(self) -> None:
        """Ask, and delete the highlighted model."""
        model = self.highlighted
        if model is None or model.kind == "available":
            return
        if (refused := refusal(model, self._current)) is not None:
            self._trouble.show(refused)
            return

        def answered(yes: bool | str | None) -> None:
            if yes:
                in_background(self, lambda: delete(model, self._setups, linked=yes == LINKED), self._deleted)

        folder = model.folder
        linked = folder.readlink() if folder is not None and folder.is_symlink() and folder.exists() else None
        name = model.name if model.server else f"{model.name}, {size(model.bytes)}"
        self.app.push_screen(RemoveScreen(name, places(model), again=again(model), linked=linked), answered)

    def _deleted(self, error: FloeError | None) -> None:
        self.refresh_list()
        if error is not None:
            self._trouble.show(error)
