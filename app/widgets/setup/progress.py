"""How far a setup is: download, packing with calibration, check; disk use; errors."""

from __future__ import annotations

from pathlib import Path

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from ....models.errors import AccessError, FloeError
from ....models.hub.fetch_progress import DownloadProgress
from ....models.quantities import size
from ...background import in_background, later
from ...setup.flow import Setup, SetupProgress
from ...setup.packing_progress import time_left
from ...text.plain_text import printable
from .bar import Bar
from .step import Trouble, WizardStep

_PERIOD, _DISK_PERIOD = 0.2, 2.0
_HELD = ("paused", "failed", "cancelled")  # paused or waiting: no speed, no forecast
_NOTICES = 2  # the last ones are shown
_HINTS = {
    "paused": "Space continues · S stops for now",
    "done": "Enter chats with it",
    "failed": "R tries again · C chooses again · X deletes it",
    "cancelled": "Enter continues · C chooses again · X deletes it",
}
_RUNNING = "Space pauses · S stops for now"


class ProgressStep(WizardStep):
    """Shows a running setup; it only reads its progress."""

    DEFAULT_CSS = """
    ProgressStep {
        & .work { height: 1; }
        & .work > .what { width: 12; color: $primary; }
        & .work > Bar { width: 1fr; }
        & .said { padding-left: 12; color: $foreground 70%; }
        & #summary { height: auto; margin-bottom: 1; }
        & #disk { height: auto; margin-top: 1; }
        & #disk > .what { width: 12; color: $primary; }
        & #disk > .figures { width: 1fr; height: auto; }
        & #notices { height: auto; color: $foreground 70%; }
    }
    """
    title = "Setup"
    hints = _RUNNING

    def __init__(self, running: Setup) -> None:
        super().__init__()
        self._work = running
        self._summary = Static("", markup=False, id="summary")
        self._fetching, self._packing, self._checking = Bar(), Bar(), Bar()
        self._fetched, self._packed = (Static("", markup=False, classes="said") for _ in range(2))
        self._pack_row = Horizontal(Static("Pack", classes="what"), self._packing, classes="work")
        self._disk = Static("", markup=False, classes="figures")
        self._notices = Static("", markup=False, id="notices")
        self._trouble = Trouble()
        self._taken: tuple[int, int] | None = None
        self.state = ""

    @property
    def setup(self) -> Setup:
        """What is shown."""
        return self._work

    def compose(self) -> ComposeResult:
        yield self._summary
        yield self._trouble
        yield Horizontal(Static("Download", classes="what"), self._fetching, classes="work")
        yield self._fetched
        yield self._pack_row
        yield self._packed
        yield Horizontal(Static("Check", classes="what"), self._checking, classes="work")
        yield Horizontal(Static("Disk", classes="what"), self._disk, id="disk")
        yield self._notices

    def on_mount(self) -> None:
        self.set_interval(_PERIOD, self._look)
        self._look()
        self._measure_disk()

    def follow(self, running: Setup) -> None:
        """Show another setup: the same model, started again."""
        self._work, self.state = running, ""
        self._trouble.show(None)
        self._look()

    def toggle_pause(self) -> None:
        """Pause it or continue it."""
        if self.state == "paused":
            self._work.resume()
        elif self.state in ("looking", "working", "checking"):
            self._work.pause()
        self._look()

    def tell(self, error: FloeError) -> None:
        """Show why what the person asked for cannot be done."""
        self._trouble.show(error)

    def _look(self) -> None:
        now = self._work.progress()
        name, held = self._work.wish.name, now.state in _HELD
        self.state = now.state
        self.say_keys(self._keys(now))
        self._summary.update(Content(printable("\n".join([_summary(name, now), *self._work.claims]))))
        for bar in (self._fetching, self._packing, self._checking):
            bar.held = held
            bar.beat += 0 if held else 1
        self._show_download(now)
        self._packing.share = now.share
        self._pack_row.display = not now.ready
        left = "" if now.left is None or held else time_left(now.left)
        self._packed.update(printable(" · ".join(part for part in (_step(now), left) if part)))
        self._checking.share = 1.0 if now.state == "done" else None if now.state == "checking" else 0.0
        self._notices.update(printable("\n".join(now.notices[-_NOTICES:])))
        if now.state == "failed" and self._work.error is not self._trouble.error:
            self._trouble.show(self._work.error)
        self._show_disk(now.peak)

    def _keys(self, now: SetupProgress) -> str:
        if now.state != "failed":
            return _HINTS.get(now.state, _RUNNING)
        token = " · T enters a token" if isinstance(self._work.error, AccessError) else ""
        return _HINTS["failed"] + token

    def _show_download(self, now: SetupProgress) -> None:
        download = now.download
        if download is None:
            local = self._work.wish.local is not None
            if local and now.ready:
                self._fetching.share = 1.0 if now.state in ("done", "checking") else now.share
                self._fetched.update("Copied." if now.state in ("done", "checking") else "The pack is on this machine.")
                return
            over = now.state in ("done", "checking")
            self._fetching.share = 1.0 if local or over else None if now.state == "looking" else 0.0
            self._fetched.update("The checkpoint is on this machine." if local else "Downloaded." if over else "")
            return
        self._fetching.share = download.done / download.total if download.total else None
        self._fetched.update(printable(_download_words(download, held=now.state in _HELD)))

    def _measure_disk(self) -> None:
        wish = self._work.wish

        def work() -> tuple[int, int]:
            from ....models.hub.download import room

            try:
                return wish.taken, room(wish.folder)
            except OSError:  # files appear and disappear meanwhile
                return 0, 0

        def show(found: tuple[int, int]) -> None:
            self._taken = found if any(found) else self._taken
            later(self, _DISK_PERIOD, self._measure_disk)

        in_background(self, work, show)

    def _show_disk(self, peak: int | None) -> None:
        folder = _short(self._work.wish.folder)
        parts = ["" if peak is None else f"{size(max(peak, self._taken[0] if self._taken else 0))} at the peak"]
        if self._taken is not None:
            parts = [f"{size(self._taken[0])} now", *parts, f"{size(self._taken[1])} free"]
        self._disk.update(printable(" · ".join([part for part in (*parts, folder) if part])))


def _summary(name: str, now: SetupProgress) -> str:
    match now.state:
        case "done":
            return f"{name} is ready and checked. Press Enter to chat with it."
        case "failed":
            return f"{name} could not be set up. Everything done so far is saved."
        case "paused":
            return f"{name} is paused."
        case "cancelled":
            return f"{name} is stopped. Everything done so far is saved: continue now, or at a later start."
        case _:
            return f"Setting up {name}. You can leave this page, or chat with the demo model: the setup continues."


def _step(now: SetupProgress) -> str:
    """What is being packed, which includes calibration."""
    if now.state == "done":
        return "" if now.ready else "All layers are packed and calibrated."
    return now.step.replace("Packing layer", "Packing and calibrating layer", 1)


def _download_words(download: DownloadProgress, *, held: bool) -> str:
    if download.note and not held:
        return download.note
    parts = [f"{size(download.done)} of {size(download.total)}"]
    if download.state == "checking":
        parts.append("checking the download")
    if download.rate and not held and download.state != "done":
        parts.append(f"{size(download.rate)}/s")
        if download.left is not None:
            parts.append(time_left(download.left))
    elif download.state == "waiting":
        parts.append("waiting for packing")
    return " · ".join(parts)


def _short(folder: Path) -> str:
    """A path with ~ for the home."""
    try:
        return f"~/{folder.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(folder)
