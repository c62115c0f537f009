"""All models: installed, unfinished and available; running setups and checks, and the actions on each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen, Screen
from textual.widgets import Button, Input, OptionList, Static

from ...models import catalog
from ...models.catalog_entry import CatalogEntry
from ...models.errors import AccessError, FloeError, UsageError
from ...models.published import PUBLISHED
from ...models.quantities import size
from ...models.supported import CALLED
from ..background import in_background
from ..settings.servers import SavedServer, forget, keep, servers
from ..setup.flow import Setup
from ..setup.leftovers import clear
from ..setup.setups import PackCheck, Setups, Surveyor, remove, survey
from ..setup.wish import Wish, wish
from ..text.plain_text import printable
from ..widgets.common.hints import Hints, ScrollingPage, hints
from ..widgets.setup import models
from ..widgets.setup.bar import Bar
from ..widgets.setup.models import KnownModels, Model, ModelList
from ..widgets.setup.step import Trouble
from .models_remove import LINKED, RemoveScreen
from .wizard.wizard import WizardScreen

_ENTER = {
    "installed": "Enter chats with it",
    "unfinished": "Enter continues",
    "left": "Enter says why",
    "server": "Enter chats with it",
    "available": "Enter sets it up",
}


def going(setups: Setups) -> list[str]:
    """Describes the running setup or check."""
    now, lines = None if setups.setup is None else setups.setup.progress(), list[str]()
    if now is not None:
        more = ": choose it and press Enter to chat with it" if now.state == "done" else ""
        more = f" · {now.step}" if now.state in ("looking", "working", "checking") else more
        lines.append(f"{setups.words()}{more}")
    if setups.check is not None:
        lines.append(told(setups.check))
    return lines


def keys(model: Model | None, setups: Setups, *, on_server_line: bool = False) -> list[str]:
    """The key hints while `model` is highlighted; None: a line that leads to another one, or to a server."""
    typed = "Enter types its address" if on_server_line else "Enter types its name"
    hints = [typed if model is None else _ENTER[model.kind]]
    if model is not None and model.kind == "installed":
        hints += ["V checks it"]
    if model is not None and model.kind != "available" and model.name != catalog.DEMO:
        hints += ["X deletes it"]
    if setups.busy:
        paused = setups.setup is not None and setups.setup.progress().state == "paused"
        hints += ["Space continues" if paused else "Space pauses", "S stops"]
    return hints


def refusal(model: Model, current: SavedServer | str | None) -> FloeError | None:
    """Why a model is not deleted while `current` answers the chat."""
    if model.name == catalog.DEMO:
        return FloeError("The demo model cannot be deleted", "It is part of floe-chat.")
    if (model.server or model.name) == current:
        return FloeError(f"{model.name} answers this chat", "", "Choose another model first (Enter), then delete it.")
    return None


def places(model: Model) -> list[str]:
    """What goes with it: folders, or a server's address."""
    if model.server is not None:
        return [model.server.url]
    unfinished = model.wish
    folders = [unfinished.place, unfinished.fetched] if unfinished else [model.folder] if model.folder else []
    return [str(folder) for folder in (model.left.paths if model.left is not None else folders)]


def again(model: Model) -> str:
    """What its deletion means, in sentences."""
    if model.server is not None:
        return "Its address and its key will be deleted here. Chats that it answered stay."
    return "This will be deleted, with everything in it. To use it again, it has to be set up again."


def delete(model: Model, setups: Setups, *, linked: bool = False) -> FloeError | None:
    """Delete it, or return why that is impossible. linked: see `remove`."""
    try:
        if model.server is not None:
            forget(model.server.name)
        elif model.wish is not None:
            setups.give_up(model.wish)
        elif model.left is not None:
            clear(model.left)
        else:
            if setups.check is not None and setups.check.name == model.name:
                setups.stop_check()
            remove(model.name, linked=linked)
    except FloeError as error:
        return error
    return None


def told(check: PackCheck) -> str:
    """A check's progress, or its result."""
    if check.state == "checking":
        return f"{check.name}: {check.step}"
    if check.error is not None:
        return f"{check.name} could not be checked: {check.error.title}. {check.error.cause}"
    if not check.damaged:
        return f"{check.name}: all files are intact."
    first = check.damaged[0]
    more = f", and {len(check.damaged) - 1} more" if len(check.damaged) > 1 else ""
    return (
        f"{check.name} is damaged: {first.file} ({first.cause}){more}. "
        f"Repair it with `floe-chat verify {check.name} --repair`, or delete it and set it up again."
    )


def may_be_tried_again(setup: Setup) -> bool:
    """Whether it failed for a temporary reason."""
    return setup.progress().state == "failed" and not isinstance(setup.error, AccessError)


_ROWS = (
    ("name", "Name", "lab", False),
    ("url", "Address", "http://127.0.0.1:8000", False),
    ("model", "Model", "the only one, if empty", False),
    ("key", "Key", "none, if empty", True),
)


class AddServerScreen(ModalScreen["SavedServer | None"]):
    """Enter saves the server, Esc does not. Nothing is sent yet; the key's field shows dots."""

    CSS_PATH = "../setup.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "do not save it", show=False),
        Binding("ctrl+s", "save", "save it", show=False, priority=True),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._fields = {
            name: Input(placeholder=empty, password=hidden, id=name, compact=True) for name, _, empty, hidden in _ROWS
        }
        self._trouble = Trouble()

    def compose(self) -> ComposeResult:
        with ScrollingPage(classes="page", can_focus=False) as page:
            page.border_title = "A server"
            page.border_subtitle = hints("Enter saves", "Esc cancels")
            for name, label, _empty, _hidden in _ROWS:
                yield Horizontal(Static(label, classes="name"), self._fields[name], classes="row")
            yield self._trouble
            yield Static(
                "Any server that speaks OpenAI's protocol: vLLM, SGLang, llama-server, Ollama, floe-chat serve. "
                "Nothing is sent now. Once you chat with it, your questions, the chat before them and attached files "
                "are. The key is saved in a file that only you can read.",
                classes="lead",
            )
            with Horizontal(classes="buttons"):
                yield Button("Save", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._fields["name"].focus(scroll_visible=False)

    @on(Input.Changed)
    def _forget_trouble(self) -> None:
        self._trouble.show(None)

    @on(Input.Submitted)
    @on(Button.Pressed)
    def action_save(self) -> None:
        """Save the server, if it can be one."""
        try:
            server = self._server()
            keep(server)
        except FloeError as error:
            self._trouble.show(error)
        else:
            self.dismiss(server)

    def _server(self) -> SavedServer:
        from ..client.remote.address import Address, Key, need_key

        given = {name: field.value.strip() for name, field in self._fields.items()}
        for name, label, example, _hidden in _ROWS[:2]:
            if not given[name]:
                raise UsageError(f"The {label.lower()} is missing", "", f"Type one, such as {example}")
        address = Address.parse(given["url"])
        if given["name"] in (one.name for one in servers()):
            hint = "Give another name, or delete that one first."
            raise UsageError(f"There is a server {given['name']} already", "", hint)
        key = need_key(given["key"], "What you typed") if given["key"] else Key()
        return SavedServer(given["name"], address.base, given["model"], key.value)


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
