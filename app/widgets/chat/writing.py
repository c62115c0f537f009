"""The input area: the text field, attached files, and the completion of commands and file names."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from textual import on
from textual.app import App, ComposeResult, SuspendNotSupported
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import OptionList

from ....models.paths import expanded
from ...actions import ALIASES, COMMANDS
from ...background import in_background
from ...history import Attachment
from ...text.plain_text import printable
from ...text_files import is_outside, listing, matching, meant, outside
from .chips import Chips, Count
from .completion import Completable, Completion, wanted
from .composer import Composer

_LOOK_SECONDS = 0.3
_COMMANDS = {action.command: action for action in COMMANDS}


class Writing(Vertical):
    """The text field with its files and its completion."""

    def __init__(self, tokens_of: Count, room: Callable[[], int | None]) -> None:
        super().__init__()
        self.chips = Chips(tokens_of, room)
        self.completion = Completion()
        self.composer = Composer(self.chips, self.completion, self._look, self._take)
        self._found: Completable | None = None  # at the last look
        self._listing: list[str] | None = None

    def compose(self) -> ComposeResult:
        yield from (self.completion, self.chips, self.composer)

    @property
    def text(self) -> str:
        """What is written."""
        return self.composer.text

    @property
    def files(self) -> tuple[Attachment, ...]:
        """What is attached."""
        return self.chips.files

    def put(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Replace both."""
        self.composer.put(text) if text else self.composer.clear()
        self.chips.take_all()
        self.chips.give_back(files)

    def take_back(self, text: str, files: tuple[Attachment, ...] = ()) -> None:
        """Put `text` before what was written meanwhile, and `files` beside the others."""
        self.composer.take_back(text, files)

    def remember(self, texts: Sequence[str]) -> None:
        """These are the questions that Up brings back, the newest last."""
        self.composer.remember(texts)

    def measure_again(self) -> None:
        """The model has changed: count tokens again."""
        self.chips.measure_again()

    def take_focus(self) -> None:
        """Let the person write here."""
        self.composer.focus()

    def attach(self, path: str) -> None:
        """Attach a file to the next question."""
        self.chips.attach(meant(path))

    def title(self, name: str, remark: str = "") -> None:
        """Show the chat's name on the frame, and what Enter does if that is unusual."""
        # Not as strings, which would be parsed as markup: a title is the user's own text.
        self.composer.border_title = Content(printable(name))
        self.composer.border_subtitle = Content(printable(remark))

    @on(Composer.Changed)
    @on(Composer.SelectionChanged)
    def _look(self) -> None:
        first = self.composer.cursor_location[0] == 0
        found = wanted(self.composer.before_cursor, first_line=first) if self.composer.has_focus else None
        if found == self._found:
            return
        self._found = found
        if found is None:
            self._listing = None
            self.completion.close()
        else:
            self._offer(found)

    def _offer(self, found: Completable) -> None:
        if found.kind == "command":
            remarks = {f"/{name}": _COMMANDS[name].does for name in _meant(found.query)}
            self.completion.offer(found, list(remarks), remarks)
        elif is_outside(found.query):
            self.completion.offer(found, outside(found.query))
        elif self._listing is None:
            self.completion.offer(found, ())
            self._listing = []
            in_background(self, lambda: listing(Path.cwd()), self._listed)
        else:
            self.completion.offer(found, matching(found.query, self._listing))

    def _listed(self, paths: list[str]) -> None:
        self._listing = paths
        if (found := self.completion.wanted) is not None and found.kind == "file":
            self._offer(found)  # by now it may name a place that is not listed

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._take(enter=False)
        self.composer.focus()

    def _take(self, enter: bool) -> bool:
        """Replace the first letters with the highlighted completion; returns whether it is a command to run now."""
        found, chosen = self.completion.wanted, self.completion.chosen
        if found is None or chosen is None:
            return False
        self.completion.close()
        if found.kind == "command":
            name = chosen[1:]
            self.composer.replace_before_cursor(found.written, chosen + ("" if enter else " "))
            if enter and _COMMANDS[name].careful and name != found.query:
                self.post_message(Composer.Refused(f"Press Enter again: {_COMMANDS[name].does}"))
                return False
            return enter
        if chosen.endswith("/"):
            quote = '"' if found.quoted or " " in chosen else ""
            self.composer.replace_before_cursor(found.written, f"@{quote}{chosen}")
        else:
            self.composer.replace_before_cursor(found.written, "")
            # Below the working folder ~ is an ordinary letter.
            self.chips.attach(expanded(chosen) if is_outside(found.query) else Path(chosen))
        return False

    def edit_outside(self, meanwhile: Callable[[], None]) -> str:
        """Let the user write in $VISUAL or $EDITOR; returns why that was not possible, or "".

        `meanwhile` is called a few times per second: an answer continues, and its text is saved.
        """
        written = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            command = shlex.split(written)
        except ValueError as error:
            return f"{printable(written)} cannot be started ({error}): set VISUAL or EDITOR"
        if not command:
            return "No editor is set: VISUAL or EDITOR is blank"
        try:
            with tempfile.TemporaryDirectory(prefix="floe-chat-") as folder:  # mode 0700
                file = Path(folder) / "question.md"
                file.write_text(self.composer.text, encoding="utf-8")
                with _lent_terminal(self.app):
                    code = _run([*command, str(file)], meanwhile)
                if code == 0:
                    self.composer.put(file.read_text(encoding="utf-8", errors="replace").rstrip("\n"))
                    return ""
                return f"{printable(command[0])} ended with code {code}; your text is unchanged"
        except SuspendNotSupported:
            return "An editor cannot run in this terminal"
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            return printable(f"{command[0]} cannot be started ({reason}): set VISUAL or EDITOR")


def _meant(query: str) -> Sequence[str]:
    """The commands that begin with `query`: by their own names, then by other programs' names."""
    if query in ALIASES:
        return [ALIASES[query]]
    begin = [name for name in _COMMANDS if name.startswith(query)]
    others = [name for alias, name in ALIASES.items() if query and alias.startswith(query)]
    return list(dict.fromkeys((*begin, *others, *(name for name in _COMMANDS if query in name))))


@contextmanager
def _lent_terminal(app: App[object]) -> Generator[None]:
    """Lends the terminal to another program. Exceptions are raised only once the terminal is back: Textual would not
    take it again otherwise.
    """
    raised: BaseException | None = None
    with app.suspend():
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised below
            raised = error
    if raised is not None:
        raise raised


def _run(command: Sequence[str], meanwhile: Callable[[], None]) -> int:
    """Run it to its end; returns its exit code."""
    process = subprocess.Popen(command)
    while process.poll() is None:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
        meanwhile()
    return process.returncode
