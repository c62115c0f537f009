"""Where the person writes."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.widgets import TextArea

from .plain import printable


class Composer(TextArea):
    """A text field that grows with its text. Enter sends, Ctrl+J and Shift+Enter begin a new line.

    Sending empties it; the screen gives the text back if it cannot take it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("pageup", "screen.scroll_transcript(-1)", "Scroll up", show=False),
        Binding("pagedown", "screen.scroll_transcript(1)", "Scroll down", show=False),
    ]

    class Sent(Message):
        """The person pressed Enter over `text`, which is not blank."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self) -> None:
        super().__init__(placeholder="Ask something", highlight_cursor_line=False, tab_behavior="focus")
        self.last_sent = ""

    def take_back(self, text: str) -> None:
        """Put `text` before whatever was written meanwhile."""
        self.text = f"{text}\n{self.text}" if self.text else text
        self.move_cursor(self.document.end)

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up, or bring the last prompt back into an empty field."""
        if self.text or select:
            super().action_cursor_up(select)
        elif self.last_sent:
            self.take_back(self.last_sent)

    async def _on_key(self, event: events.Key) -> None:
        # Not as bindings: those run only after the key went up to the screen, and the letters typed right
        # after it would overtake it.
        if event.key not in ("enter", "ctrl+j", "shift+enter"):
            return
        event.stop()
        event.prevent_default()
        if event.key != "enter":
            self.insert("\n")
        elif self.text.strip():
            self.last_sent = printable(self.text).strip("\n")
            self.clear()
            self.post_message(self.Sent(self.last_sent))

    async def _on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        self.insert(printable(event.text), maintain_selection_offset=False)
