"""The wizard's fourth step, if a publisher requires its terms to be accepted: a token for the hub, which is never
saved.
"""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from ....models.errors import FloeError
from .bar import Bar
from .step import Trouble, WizardStep

_PERIOD = 0.15


class AskingStep(WizardStep):
    """Shows that the hub is being asked, and its answer if it refused."""

    title = "Asking the hub"
    hints = ""

    class Again(Message):
        """The user wants to ask again."""

    def __init__(self) -> None:
        super().__init__()
        self._bar = Bar()
        self._trouble = Trouble()

    def compose(self) -> ComposeResult:
        yield Static("Checking that the model exists and may be downloaded.", classes="lead")
        yield self._bar
        yield self._trouble

    def on_mount(self) -> None:
        self._bar.share = None
        self.set_interval(_PERIOD, self._beat)

    def tell(self, error: FloeError) -> None:
        """Show why it failed."""
        self._bar.display = False
        self._trouble.show(error)
        self.say_keys("Enter tries again")

    def go_on(self) -> None:
        if self._trouble.error is not None:
            self.post_message(self.Again())

    def _beat(self) -> None:
        self._bar.beat += 1


class TokenStep(WizardStep):
    """Asks for a token; `Given` is posted. The field shows dots, and the token is not written anywhere."""

    title = "The hub needs a token"
    hints = "Enter tries it"

    class Given(Message):
        """A token to try."""

        def __init__(self, token: str) -> None:
            super().__init__()
            self.token = token

    def __init__(self, error: FloeError) -> None:
        super().__init__()
        self._error = error
        self._field = Input(password=True, placeholder="hf_…", id="token")
        self._trouble = Trouble()

    def compose(self) -> ComposeResult:
        yield self._trouble
        yield self._field
        yield Static(
            Content(
                "The token is sent to the hub and nowhere else, and is forgotten when floe-chat ends. To skip "
                "this step in future, set HF_TOKEN or log in with the hub's own tool: hf auth login"
            ),
            classes="lead",
        )

    def on_mount(self) -> None:
        self._trouble.show(self._error)
        self._field.focus()

    @on(Input.Submitted)
    def _give(self, event: Input.Submitted) -> None:
        event.stop()
        if token := event.value.strip():
            self.post_message(self.Given(token))
