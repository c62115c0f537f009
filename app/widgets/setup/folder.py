"""The wizard's third step: the models folder."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static

from ....models.errors import FloeError
from ....models.paths import expanded
from ....models.quantities import size
from ...background import in_background, later
from ...text.plain_text import printable
from .step import Trouble, WizardStep

_SPARE = 1 << 30  # bytes that stay free
_PAUSE = 0.15  # seconds without a key before a look at the disk


@dataclass(frozen=True, slots=True)
class Look:
    """A folder. free: bytes of its disk. trouble: why it cannot be used, or "". left_behind: models in the current
    folder, if that is another one.
    """

    folder: Path
    free: int
    trouble: str
    left_behind: int = 0


def look_at(folder: Path, now: Path) -> Look:
    """Whether models can be stored in `folder`, which need not exist, and how much fits; `now`: the current one."""
    from ....models.hub.download import room

    near = folder
    try:
        while not near.exists() and near != near.parent:
            near = near.parent
        free, whole = room(near), shutil.disk_usage(near).total
        left = 0 if folder == now or not now.is_dir() else len(list(now.glob("*/manifest.json")))
    except OSError as error:
        return Look(folder, 0, f"It cannot be used: {error.strerror or error}.")
    if not near.is_dir():
        return Look(folder, free, f"{near} is a file.")
    if whole == 0:  # such as /proc
        return Look(folder, free, f"{near} is not on a disk: nothing can be saved there.")
    if not os.access(near, os.W_OK | os.X_OK):
        return Look(folder, free, f"You have no permission to write to {near}.")
    return Look(folder, free, "", left)


class FolderStep(WizardStep):
    """Asks for the folder of all models; `Taken` is posted when there is room.

    Args:
        needed: bytes at the peak, of which `pack` stay. lost: what starting deletes, in a sentence, or "".
    """

    DEFAULT_CSS = """
    FolderStep {
        & #room { height: auto; padding: 0 1; }
        & #moved { height: auto; padding: 0 1; margin-top: 1; color: $foreground 70%; }
    }
    """
    title = "Models folder"
    hints = "Enter continues"

    class Taken(Message):
        """The person chose a folder with enough room."""

        def __init__(self, step: FolderStep, look: Look) -> None:
            super().__init__()
            self.step = step
            self.look = look

    def __init__(self, folder: Path, needed: int, pack: int, lost: str = "") -> None:
        super().__init__()
        self._first = folder
        self._needed, self._pack, self._lost = needed, pack, lost
        self._field = Input(printable(str(folder)), id="folder")
        self._room = Static("", markup=False, id="room")
        self._moved = Static("", markup=False, id="moved")
        self._trouble = Trouble()
        self._asked = 0

    def compose(self) -> ComposeResult:
        yield Static("Packed models are stored in this folder. Choose one on a disk with enough room.", classes="lead")
        yield self._field
        yield self._room
        yield self._moved
        yield self._trouble

    def on_mount(self) -> None:
        self._field.focus()
        self._look()

    def tell(self, error: FloeError | None) -> None:
        """Say why the folder cannot be taken."""
        self._trouble.show(error)

    def _folder(self) -> Path:
        return expanded(self._field.value.strip()).absolute()

    @on(Input.Changed)
    def _later(self) -> None:
        self.tell(None)
        self._asked += 1
        asked = self._asked
        later(self, _PAUSE, lambda: self._look() if asked == self._asked else None)

    def _look(self) -> None:
        folder = self._folder()
        in_background(self, lambda: look_at(folder, self._first), self._show)

    def _show(self, look: Look) -> None:
        if look.folder != self._folder():
            return
        short = self._needed + _SPARE - look.free
        if look.trouble:
            self._room.update(Content.styled(printable(look.trouble), "$text-error"))
        else:
            fits = f"{size(look.free)} are free." if short <= 0 else f"{size(look.free)} are free: "
            lacks = "" if short <= 0 else f"{size(short)} too little."
            self._room.update(
                Content.assemble(
                    f"Needs up to {size(self._needed)} during setup and {size(self._pack)} afterwards; {fits}",
                    (lacks, "bold $text-error"),
                )
            )
        told: list[str] = []
        if look.left_behind:
            one = look.left_behind == 1
            many, they = ("1 model stays", "It is") if one else (f"{look.left_behind} models stay", "They are")
            told.append(f"{many} in {printable(str(self._first))}. {they} not listed while you use another folder.")
        if self._lost:
            told.append(self._lost)
        self._moved.update("\n".join(told))

    @on(Input.Submitted)
    def _take(self, event: Input.Submitted) -> None:
        event.stop()
        folder = self._folder()
        in_background(self, lambda: look_at(folder, self._first), self._taken)

    def _taken(self, look: Look) -> None:
        self._show(look)
        short = self._needed + _SPARE - look.free
        if look.trouble:
            self.tell(FloeError("This folder cannot be used", look.trouble, "Choose another folder."))
        elif short > 0:
            cause = f"Setup needs up to {size(self._needed)}, and {size(look.free)} are free."
            hint = f"Free {size(short)}, choose a folder on another disk, or go back (Esc) and choose fewer bits."
            self.tell(FloeError("The disk is too small", cause, hint))
        else:
            self.post_message(self.Taken(self, look))
