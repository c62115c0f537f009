"""A server to be saved: its name, its address, the model there, and its key."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Static

from ...models.errors import FloeError, UsageError
from ..settings.servers import SavedServer, keep, servers
from ..widgets.common.hints import ScrollingPage, hints
from ..widgets.setup.step import Trouble

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
