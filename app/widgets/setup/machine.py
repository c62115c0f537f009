"""The wizard's first step: the machine's hardware and its measured speeds."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from ....models.errors import FloeError
from ....models.quantities import memory, rate, size
from ...background import in_background
from ...text.plain_text import printable
from .bar import Bar
from .step import Trouble, WizardStep

if TYPE_CHECKING:
    from ....engine.machine.hardware import Hardware
    from ...setup.setups import Survey, Surveyor

_PERIOD = 0.15
_log = logging.getLogger("floe_chat.app")

# What is being measured, by how the names of engine/planning/rates.py begin.
_MEASURING = {
    "memory": "how fast memory is read",
    "states": "how fast the CPU computes recurrent layers",
    "up": "how fast the CPU computes with quantized weights",
    "rows": "how fast the CPU computes with quantized weights",
    "dense": "how fast the CPU computes with quantized weights",
    "prompt": "how fast the CPU computes with quantized weights",
    "link": "how fast weights reach the GPU",
    "gpu": "how fast the GPU is",
    "disk": "how fast the disk is read",
}


class MachineStep(WizardStep):
    """Looks at the machine in the background; `Found` is posted when the person continues."""

    DEFAULT_CSS = """
    MachineStep {
        & .fact { height: auto; }
        & .fact > .what { width: 12; color: $primary; }
        & .fact > .found { width: 1fr; height: auto; }
        & #measuring { height: auto; margin-top: 1; }
        & #remarks { height: auto; margin-top: 1; color: $foreground 70%; }
    }
    """
    title = "This machine"
    hints = ""

    class Found(Message):
        """The machine is known, and the person continues."""

        def __init__(self, survey: Survey) -> None:
            super().__init__()
            self.survey = survey

    def __init__(self, surveyor: Surveyor, known: Survey | None = None) -> None:
        super().__init__()
        self._surveyor = surveyor
        self._survey = known
        self._hardware: Hardware | None = known.hardware if known else None
        self._looking = False
        self._facts = {
            name: Static("…", markup=False, classes="found") for name in ("Processor", "Memory", "Graphics", "Disk")
        }
        self._measuring = Static("", markup=False, id="measuring")
        self._bar = Bar()
        self._remarks = Static("", markup=False, id="remarks")
        self._trouble = Trouble()

    def compose(self) -> ComposeResult:
        yield Static("This decides how large a model can be and how fast it answers.", classes="lead")
        for name, fact in self._facts.items():
            yield Horizontal(Static(name, classes="what"), fact, classes="fact")
        yield self._measuring
        yield self._bar
        yield self._remarks
        yield self._trouble

    def on_mount(self) -> None:
        self.set_interval(_PERIOD, self._beat)
        self._bar.display = False
        if self._survey is None:
            self.look(again=False)
        else:
            self._show(self._survey)

    def look(self, *, again: bool) -> None:
        """Look at the machine, and measure it if that was never done or `again` is set."""
        if self._looking:
            return
        self._looking, self._survey = True, None
        self._bar.share, self._bar.display = None, True
        self._measuring.update("Looking at this machine …")
        self._measuring.display = True
        self._trouble.show(None)
        self.say_keys("")

        def told(what: Hardware | str) -> None:
            self.call_later(self._heard, what)

        def work() -> Survey | FloeError:
            try:
                return self._surveyor(told, again=again)
            except FloeError as error:
                return error
            # A driver can raise anything; without hardware figures nothing can be planned.
            except Exception as error:  # noqa: BLE001
                _log.warning("the hardware could not be examined", exc_info=True)
                return FloeError("The hardware of this machine could not be read", f"{type(error).__name__}: {error}")

        in_background(self, work, self._show)

    def measure(self) -> None:
        """Measure again."""
        if self._survey is not None or self._trouble.error is not None:
            self.look(again=True)

    def go_on(self) -> None:
        if self._survey is not None:
            self.post_message(self.Found(self._survey))

    def _beat(self) -> None:
        if self._looking:
            self._bar.beat += 1

    def _heard(self, what: Hardware | str) -> None:
        if not isinstance(what, str):
            self._hardware = what
            self._show_facts({})
            return
        name, _, why = what.partition(", again: ")
        measuring = f"Measuring {_MEASURING.get(name.split()[0], name)}"
        if why:
            said = f"{measuring} again: {why}."
        elif name.startswith("waiting"):
            said = f"{name.capitalize()}."
        else:
            said = f"{measuring}. This takes a few seconds and is done once."
        self._measuring.update(said)

    def _show(self, found: Survey | FloeError) -> None:
        self._looking = False
        self._bar.display = self._measuring.display = False
        if isinstance(found, FloeError):
            self._trouble.show(found)
            self.say_keys("M tries again")
            return
        self._survey, self._hardware = found, found.hardware
        self._show_facts(found.rates)
        remarks = [said for what, said in found.machine.told.items() if what != "gpu" or found.machine.vram]
        self._remarks.update(printable("\n".join(remarks)))
        self.say_keys("Enter continues · M measures again")

    def _show_facts(self, rates: dict[str, float]) -> None:
        hardware = self._hardware
        if hardware is None:
            return

        def at(name: str, what: str) -> str:
            return f", {what} {rate(rates[name])}" if name in rates else ""

        cores = hardware.cores_physical or hardware.cores_usable
        free, total = memory(hardware.ram_available), memory(hardware.ram_total)
        self._tell("Processor", f"{hardware.cpu}, {cores} core{'' if cores == 1 else 's'}")
        self._tell("Memory", f"{free} free of {total}{at('memory read', 'read at')}")
        gpus = [gpu for gpu in hardware.gpus if gpu.index is not None]
        if gpus:
            room = memory(gpus[0].vram_total)
            if gpus[0].vram_free is not None:
                room = f"{memory(gpus[0].vram_free)} free of {room}"
            self._tell("Graphics", f"{gpus[0].name}, {room}{at('link pinned', 'copies at')}")
        else:
            name = f"{hardware.gpus[0].name}, not usable" if hardware.gpus else "no GPU"
            self._tell("Graphics", f"{name} ({hardware.gpu_reason}); models run on the CPU")
        disk = "unknown" if hardware.disk_free is None else f"{size(hardware.disk_free)} free"
        self._tell("Disk", f"{disk}{at('disk read', 'read at')}, for {hardware.disk_folder}")

    def _tell(self, name: str, fact: str) -> None:
        self._facts[name].update(Content(printable(fact)))
