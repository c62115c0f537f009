"""What goes on with models while the program runs: one setup or one check at a time, whatever screen is in front.

Screens come and go; they hold the program's one `Setups`, start things on it and look at it. Quitting closes it.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from ..models import catalog
from ..models.errors import FloeError, TryAgainError
from .packing import time_left
from .setup_flow import Setup, SetupProgress
from .setup_wish import Wish, forget

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine.hardware import Hardware
    from ..engine.machine import Machine
    from ..models.fetch_loop import Tuning
    from ..models.published import Entry
    from ..models.verify import Damage

_LEAVING_S = 2.0  # that quitting waits; what is being computed then is computed again
_ENDED = ("done", "failed", "cancelled")
_log = logging.getLogger("floe_chat.app")


def first_run(settings: Path) -> bool:
    """Whether nobody has set anything up here yet: no settings, and nothing in the models folder."""
    folder = catalog.models_folder()
    try:
        return not settings.exists() and not (folder.is_dir() and any(folder.iterdir()))
    except OSError:
        return False  # somebody has: they lie where they may not be read


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found of this machine, and what plans are made with. rates: as measured, by their names."""

    hardware: Hardware
    machine: Machine
    rates: dict[str, float]


class Surveyor(Protocol):
    """Looks at the machine: tells the hardware first, then the name of each rate that is being measured.

    `again`: measure although rates of an earlier time are kept.
    """

    def __call__(self, told: Callable[[Hardware | str], None], *, again: bool) -> Survey: ...


def survey(told: Callable[[Hardware | str], None], *, again: bool) -> Survey:
    """This machine; its rates are measured once, which takes a few seconds."""
    from ..engine import hardware, machine, rates

    folder = catalog.models_folder()
    found = hardware.probe(folder)
    told(found)
    kept = None if again else rates.Measured.load(rates.kept_file())
    measured = kept or rates.measure(folder, told)
    return Survey(found, machine.here(found, measured), dict(measured.rates))


def look_up(wanted: Wish, token: str | None = None) -> Entry:
    """What `wanted` is, with as little as can be asked of the hub; that also shows whether the hub lets us in.

    Raises:
        AccessError: it wants a token, or another one. FloeError: it is nothing that can be set up, or out of reach.
    """
    if wanted.local is not None:
        return replace(catalog.described(wanted.local), name=wanted.name)
    from ..models.hub import resolve

    repo = resolve(wanted.model, wanted.commit or "main", token)
    try:
        fields = json.loads(repo.read("config.json") or b"{}")
    except (ValueError, RecursionError) as error:
        raise FloeError(f"config.json of {wanted.model} cannot be read", f"{error}.", "Ask its publisher.") from error
    known = catalog.published(wanted.model) or catalog.described({**fields, "_name_or_path": wanted.model})
    return replace(known, name=wanted.name, repo=wanted.model, gated=repo.gated)


def remove(name: str) -> None:
    """Delete the packed model `name` of the models folder and what is known of its use; of a link only the link.

    Raises:
        FloeError: it is the demo, there is no such model, or something cannot be deleted.
    """
    from ..models import heat

    folder = catalog.models_folder() / name
    known = {model.name for model in catalog.installed()} - {catalog.DEMO}
    if name not in known:
        raise FloeError(f"{name} cannot be removed", "It is not a model of the models folder.")
    try:
        if folder.is_symlink():
            folder.unlink()
        else:
            (folder / "manifest.json").unlink(missing_ok=True)  # first: half a model is none
            heat.forget(folder)
            shutil.rmtree(folder)
    except OSError as error:
        raise FloeError(f"{name} cannot be deleted", f"{error.strerror or error}.", "Delete it by hand.") from error


class Check:
    """One packed model being read from end to end, on a thread of its own.

    Attributes:
        damaged: what was found when it is "done". error: why it could not be checked.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.damaged: list[Damage] = []
        self.error: FloeError | None = None
        self.state: Literal["checking", "done", "failed", "cancelled"] = "checking"
        self.step, self.share = "Looking at the pack", 0.0
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="floe-check", daemon=True)

    def start(self) -> Check:
        """Begin; returns at once."""
        self._thread.start()
        return self

    def cancel(self) -> None:
        """End it after the file in hand."""
        if self.state == "checking":
            self.state = "cancelled"
        self._cancelled.set()

    def _run(self) -> None:
        try:
            from ..models.manifest import Manifest
            from ..models.verify import damages

            folder = catalog.find(self.name)
            self.damaged = damages(folder, Manifest.read(folder), self._told)
            self._reach("done")
        except _CancelledError:
            pass
        except FloeError as error:
            self.error = error
            self._reach("failed")
        # The thread's border: whatever goes wrong below must reach the person.
        except Exception as error:  # noqa: BLE001
            _log.exception("the check failed")
            hint = "This is a fault of floe-chat; the log has the details."
            self.error = FloeError(f"{self.name} could not be checked", f"{type(error).__name__}: {error}", hint)
            self._reach("failed")

    def _reach(self, state: Literal["done", "failed"]) -> None:
        if not self._cancelled.is_set():
            self.share, self.state = 1.0, state

    def _told(self, step: str, share: float) -> None:
        if self._cancelled.is_set():
            raise _CancelledError
        self.step, self.share = step, share


class _CancelledError(Exception):
    pass


class Setups:
    """The one setup and the one check of a program.

    Attributes:
        setup, check: what was started last, until it is dismissed; it may have ended.
    """

    def __init__(self, tuning: Tuning | None = None) -> None:
        """`tuning`: of downloads' patience."""
        self.setup: Setup | None = None
        self.check: Check | None = None
        self._stopped: Setup | None = None
        self._tuning = tuning

    @property
    def busy(self) -> bool:
        """Whether a setup is under way, be it paused."""
        return self.setup is not None and self.setup.progress().state not in _ENDED

    def start(self, wanted: Wish, token: str | None = None) -> Setup:
        """Set up `wanted`, or go on with it.

        Raises:
            TryAgainError: another one is under way.
        """
        if self.setup is not None and self.busy:
            raise TryAgainError(
                f"{self.setup.wish.name} is being set up",
                "Two at once would only slow each other down.",
                "Wait for it, or stop it first; what is done is kept.",
            )
        self.stop()
        self.setup = Setup(wanted, token, tuning=self._tuning, after=self._stopped).start()
        self._stopped = None
        return self.setup

    def stop(self) -> None:
        """End the setup; all of it is kept for later. Does not wait for what is being computed."""
        if self.setup is not None:
            self.setup.cancel()
            self.setup, self._stopped = None, self.setup

    def give_up(self, begun: Wish) -> None:
        """Delete what was done of `begun`, once what works on it has ended; that may take a moment.

        Raises:
            FloeError: something cannot be deleted.
        """
        if self.setup is not None and self.setup.wish.folder == begun.folder:
            self.stop()
        if self._stopped is not None:
            self._stopped.close()
        forget(begun)

    def start_check(self, name: str) -> Check:
        """Check the packed model `name`, instead of one that is being checked."""
        self.stop_check()
        self.check = Check(name).start()
        return self.check

    def stop_check(self) -> None:
        """End the check, or forget what it found."""
        if self.check is not None:
            self.check.cancel()
            self.check = None

    def words(self) -> str:
        """What goes on, in a few words for a line of the chat; "" where nothing does."""
        return "" if self.setup is None else words(self.setup.wish.name, self.setup.progress())

    def close(self) -> None:
        """End what still runs, and wait a moment for it. Nothing is lost by not waiting longer."""
        self.stop()
        self.stop_check()
        if self._stopped is not None:
            self._stopped.wait(_LEAVING_S)


def words(name: str, now: SetupProgress) -> str:
    """How far the setup of `name` is."""
    match now.state:
        case "done":
            return f"{name} is ready"
        case "failed":
            return f"{name}: the setup failed"
        case "paused":
            return f"{name}: paused at {now.share:.0%}"
        case "cancelled":
            return ""
        case _:
            left = "" if now.left is None else f", {time_left(now.left)}"
            return f"{name}: {now.share:.0%}{left}"
