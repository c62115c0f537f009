"""The text field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import TextArea
from textual.widgets.text_area import Edit, EditResult

from ...actions import OWN, Scope, command, unknown
from ...history import Attachment
from ...text.plain_text import printable
from ..common.keys import bindings
from .chips import Chips
from .completion import Completion

_LONG_LINES = 12
_LONG_CHARACTERS = 1_500
_REMEMBERED = 200
_HELD_SECONDS = 0.3  # longer than the interval between repeats of a held key
_COMPLETION_KEYS = ("up", "down", "tab", "enter", "escape")


class Composer(TextArea):
    """A text field that grows with its text. Enter sends, Ctrl+J and Shift+Enter begin a new line.

    Sending clears it; the screen puts the text back if it cannot be sent. A long pasted text becomes a chip.
    """

    BINDINGS: ClassVar[list[BindingType]] = bindings(Scope.FIELD)

    class Sent(Message):
        """The person pressed Enter over `text`, with `files`; not both are blank."""

        def __init__(self, text: str, files: tuple[Attachment, ...]) -> None:
            super().__init__()
            self.text = text
            self.files = files

    class Ordered(Message):
        """The person pressed Enter over the command `/name argument`."""

        def __init__(self, name: str, argument: str) -> None:
            super().__init__()
            self.name = name
            self.argument = argument

    class Refused(Message):
        """Why Enter did nothing."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    def __init__(
        self, chips: Chips, completion: Completion, look: Callable[[], None], take: Callable[[bool], bool]
    ) -> None:
        """`look` updates the completion; `take` inserts its choice, by Enter or another key, and returns whether it is
        sent at once.
        """
        super().__init__(placeholder="Ask something", highlight_cursor_line=False, tab_behavior="focus")
        self._chips = chips
        self._completion = completion
        self._look = look
        self._take = take
        self._sent: list[str] = []
        self._recalled: int | None = None  # which one is in the field
        self._pasted = 0
        self._erased = 0.0  # when Backspace was pressed last
        self._newline_keys = frozenset[str]()
        self._bound_keys = frozenset[str]()
        self.take_keys({name: action.keys for name, action in OWN.items()})

    @property
    def before_cursor(self) -> str:
        """The line up to the cursor."""
        row, column = self.cursor_location
        return self.document.get_line(row)[:column]

    def take_keys(self, keys: Mapping[str, str]) -> None:
        """Use these keys for the actions from now on."""
        own = {name: keys[name].split(",") for name, action in OWN.items() if action.place is Scope.FIELD}
        self._newline_keys = frozenset((*own.pop("newline"), "shift+enter"))
        self._bound_keys = frozenset(key for its in own.values() for key in its)

    def take_back(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Put `text` before what was written meanwhile."""
        if text:
            self.insert(f"{text}\n" if self.text else text, (0, 0))
        self.move_cursor(self.document.end)
        self._chips.give_back(files)

    def put(self, text: str) -> None:
        """Replace what is written."""
        self._recalled = None
        self.load_text(printable(text))
        self.move_cursor(self.document.end)

    def remember(self, texts: Sequence[str]) -> None:
        """These are the questions that Up brings back, the newest last."""
        self._sent = list(texts)[-_REMEMBERED:]
        self._recalled = None

    def replace_before_cursor(self, count: int, text: str) -> None:
        """Put `text` in the place of the last `count` characters before the cursor."""
        row, column = self.cursor_location
        self.replace(text, (row, column - count), (row, column))

    def edit(self, edit: Edit) -> EditResult:
        """Edit; a recalled question becomes a new text."""
        self._recalled = None
        return super().edit(edit)

    def action_newline(self) -> None:
        """Begin a new line."""
        self.insert("\n")

    def action_send(self) -> None:
        """Send the text."""
        text = printable(self.text).strip("\n")
        name, _space, argument = text[1:].partition(" ") if text.startswith("/") else ("", "", "")
        if (name.isalpha() or name == "?") and "\n" not in text:
            name = name.lower()
            if command(name) is None:
                self.post_message(self.Refused(unknown(name)))
                self.select_all()  # what is typed next replaces it
                return
            self.clear()
            self.post_message(self.Ordered(name, argument.strip()))
        elif trouble := "A file is still being read" if self._chips.reading else self._chips.trouble:
            self.post_message(self.Refused(trouble))
        elif text.strip() or self._chips.files:
            self.clear()
            if text.strip() and self._sent[-1:] != [text]:
                self._sent.append(text)
            self.post_message(self.Sent(text if text.strip() else "", self._chips.take_all()))

    def action_undo(self) -> None:
        """Restore the file that was removed last; if there is none, the earlier text."""
        if not self._chips.bring_back():
            super().action_undo()

    def action_cursor_up(self, select: bool = False) -> None:
        """Move up; in the first line, bring an earlier question back."""
        own = self._recalled is None and bool(self.text)
        if select or own or self.cursor_location[0] > 0 or not self._sent:
            super().action_cursor_up(select)
            return
        if self._recalled is None:
            self._recalled = len(self._sent)
        if self._recalled > 0:
            self._recall(self._recalled - 1)

    def action_cursor_down(self, select: bool = False) -> None:
        """Move down; in the last line, bring a later question back."""
        if select or self._recalled is None or self.cursor_location[0] < self.document.line_count - 1:
            super().action_cursor_down(select)
            return
        self._recall(self._recalled + 1)

    def _recall(self, at: int) -> None:
        if at >= len(self._sent):
            self.put("")
        else:
            self.put(self._sent[at])
            self._recalled = at
            if at:
                self.move_cursor((0, len(self.document.get_line(0))))

    def on_key(self, event: events.Key) -> None:
        # Not as bindings: those run only after the key has bubbled up to the screen, and letters typed right after it
        # would overtake it.
        if event.key in _COMPLETION_KEYS:
            self._look()  # Textual reports the last letters after keys that are already queued
        if self._completion.is_open and event.key in _COMPLETION_KEYS:
            self._complete(event.key)
        elif event.key == "enter":
            self.action_send()
        elif event.key in self._newline_keys:
            self.action_newline()
        elif event.key in self._bound_keys:
            event.prevent_default()  # Alt and a letter would type the letter
            return
        elif event.key == "backspace":
            held = event.time - self._erased < _HELD_SECONDS
            self._erased = event.time
            if self.text:
                return
            if not held:  # that was meant only for the text
                self._chips.remove_last()
        else:
            return
        event.stop()
        event.prevent_default()

    def _complete(self, key: str) -> None:
        if key == "escape":
            self._completion.close()
        elif key in ("up", "down"):
            self._completion.move(1 if key == "down" else -1)
        elif self._take(key == "enter"):
            self.action_send()

    def on_paste(self, event: events.Paste) -> None:
        event.prevent_default()
        event.stop()
        text = printable(event.text)
        if text.count("\n") >= _LONG_LINES or len(text) > _LONG_CHARACTERS:
            self._pasted += 1
            self._chips.attach(Attachment(f"pasted {self._pasted}", text))
        else:
            self.insert(text, maintain_selection_offset=False)
