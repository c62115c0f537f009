"""The wizard's second step: which model, at how many bits per weight; its size, speed and quality loss.

Models are in the order of `floe-chat plan`, each with the bits recommended for this machine; a key shows all its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual import events, on
from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option as Row

from ....models import catalog
from ....models.errors import FloeError
from ....models.quantities import digits, fetching, forecast, size, trimmed
from ....models.supported import CALLED
from ...background import in_background
from ...setup.ready_words import claims, takes
from ...text.plain_text import printable
from ..common.themes import MUTED
from . import plan_words
from .step import Trouble, WizardStep

if TYPE_CHECKING:
    from ....engine.planning.machine import Machine
    from ....engine.planning.options import Option
    from ....engine.planning.plan import Plan
    from ....models.catalog_entry import CatalogEntry

WIDE = 74  # columns from which all figures stand in the table
_WORDS = 0.75  # words per token, in English text


def quality(bits: str, kl: str) -> str:
    """The first two columns."""
    return f"{bits:<8}{kl:>11} "


def columns(bits: str, kl: str, speed: str, fetched: str, pack: str, peak: str, *, wide: bool) -> str:
    """A line of the table, or its head."""
    if wide:
        return f"{quality(bits, kl)}{speed:>15}{fetched:>9}{pack:>9}{peak:>12}"
    return f"{quality(bits, kl)}{speed:>10}{peak:>15}"


def disk(one: Option) -> tuple[int, int]:
    """Bytes of the pack, and at the peak."""
    return one.disk["pack"], one.disk["peak"]


def ready_details(plan: Plan, one: Option, *, also: bool) -> Content:
    """All about a ready pack, in sentences; `also`: it can be packed here instead."""
    ready, free = plan.entry.only_pack, plan.machine.disk_free
    assert ready is not None
    lines: list[Content | str] = []
    if lacks := plan_words.missing(one):
        lines.append(Content.styled(f"It {lacks}." if one.missing else f"It is {lacks}.", "$text-warning"))
    else:
        lines.append(f"Speed: {plan_words.rate(one.decode)} tokens/s, {plan_words.place(one)}.")
    lines += map(printable, claims(ready))
    left = "" if free is None else f" {size(free)} are free."
    lines.append(f"{takes(ready)}{left} {_place()}")
    if also:
        lines.append("The next line downloads the original weights instead and packs them here.")
    return Content("\n").join([line if isinstance(line, Content) else Content(line) for line in lines])


def details(plan: Plan, one: Option, *, first: bool, figures: bool) -> Content:
    """All about one choice, in sentences; `first`: it is the first of all; figures: with the KL."""
    from ....engine.planning.reasons import rounded_before, smaller

    pack, peak = map(size, disk(one))
    free = "" if plan.machine.disk_free is None else f"; {size(plan.machine.disk_free)} free"
    words = digits(one.decode.mid * _WORDS * 60, 2)
    lines: list[Content | str] = []
    if lacks := plan_words.missing(one):
        lines.append(Content.styled(f"It {lacks}." if one.missing else f"It is {lacks}.", "$text-warning"))
    else:
        lines.append(
            f"Speed: {plan_words.rate(one.decode)} tokens/s, about {words} words a minute, {plan_words.place(one)}."
        )
    lines.append(f"{plan_words.loss(one.kl, figures=figures)}: {plan_words.named(one.spec)}.")
    if twice := rounded_before(plan.entry, plan_words.widths(one.spec)):
        lines.append(twice)
    if plan.entry.gated:
        lines.append("Its publisher asks you to accept terms on the hub first; that needs an account.")
    packing = f"Packing takes {forecast(plan.pack_s)}." if plan.pack_s is not None and one is plan.chosen else ""
    if plan.entry.folder is None:
        fetched = f"{size(plan.entry.checkpoint_bytes)}, {fetching(plan.entry.checkpoint_bytes)}"
        there = f" of {plan.entry.gguf}" if plan.entry.file_bytes and plan.entry.gguf else ""
        lines.append(f"Download{there}: {fetched}. {packing}".strip())
        lines.append(f"Disk: pack {pack}, at most {peak} at once{free}. {_place()}")
        if plan.entry.others and plan.entry.repo:
            listed = ", ".join(f"{name} ({size(nbytes)})" for name, nbytes in plan.entry.others)
            name = plan.entry.repo.rpartition(":")[0]
            lines.append(printable(f"Its repository has other files, too: {listed}. Type {name}:NAME for one."))
        lines += [shorter] if (shorter := smaller(plan.entry)) else []
    else:
        lines.append(f"Disk: pack {pack}{free}. {_place()}")
        lines += [packing] if packing else []
    if first and plan_words.at_reading_speed(plan):
        lines.append("First at reading speed, by size and age; answers are not measured.")
    return Content("\n").join([line if isinstance(line, Content) else Content(line) for line in lines])


def _place() -> str:
    return f"Files in {printable(str(catalog.models_folder()))}."


_LEAD = f"{plan_words.BITS} Best first; ● marks recommended bits."
_OTHER = "Another model: type a hub id, an address, a folder or a GGUF file …"
_KEYS = "Enter sets it up · F other folder · B all bits · K figures of quality"


@dataclass(frozen=True, slots=True)
class Chosen:
    """A model at some widths. plan: of the model on this machine."""

    plan: Plan
    option: Option

    @property
    def entry(self) -> CatalogEntry:
        return self.plan.entry


@dataclass(frozen=True, slots=True)
class _Line:
    """One line of the list: a model's name (no option), one of its widths, or (neither) another model, a heading or
    what is wrong with a model.
    """

    plan: Plan | None = None
    option: Option | None = None
    trouble: str = ""
    heading: str = ""

    @property
    def ready(self) -> bool:
        """Whether it is a ready pack."""
        return self.plan is not None and self.option is not None and self.plan.entry.only_pack is not None

    @property
    def chosen(self) -> bool:
        """Whether these are the recommended bits."""
        return self.plan is not None and self.option is not None and self.option is self.plan.chosen


class ChoiceStep(WizardStep):
    """Plans every model in the background and shows them side by side; `Taken` and `Asked` are posted.

    Where there is a ready pack of a model, it is the model's first line. Where its weights can be had in two forms, the
    one that is worth its download comes first.
    """

    DEFAULT_CSS = """
    ChoiceStep {
        & .lead { padding: 0 1; }
        & #head { height: 1; padding: 0 1; color: $foreground 70%; }
        & #choices {
            height: 1fr;
            min-height: 4;
            padding: 0;
            border: none;
            background: transparent;
            scrollbar-size-vertical: 1;

            & > .option-list--option { padding: 0 1; }
            & > .option-list--option-disabled { color: $foreground; }
            & > .option-list--option-highlighted { color: $foreground; background: $panel; text-style: bold; }
        }
        & #details { height: auto; margin-top: 1; padding: 0 1; }
        & #other { display: none; }
    }
    """
    title = "Model and bits per weight"
    hints = _KEYS

    class Taken(Message):
        """The person chose. folder: and wants to see the folder, which is otherwise asked for where it has to be."""

        def __init__(self, step: ChoiceStep, chosen: Chosen, *, folder: bool = False) -> None:
            super().__init__()
            self.step = step
            self.chosen = chosen
            self.folder = folder

    class Asked(Message):
        """The user named another model."""

        def __init__(self, step: ChoiceStep, model: str) -> None:
            super().__init__()
            self.step = step
            self.model = model

    def __init__(
        self, machine: Machine, entries: Sequence[CatalogEntry], wanted: str | None = None, programs: str = ""
    ) -> None:
        """`wanted`: the name of the entry that the user asked for. programs: whose folders a key looks through."""
        super().__init__()
        self._more = f" · L looks in the folders of {programs}" if programs else ""
        self._machine = machine
        self._entries = list(entries)
        self._wanted = wanted
        self._plans: list[Plan | tuple[CatalogEntry, FloeError]] = []
        self._ready: dict[str, Plan] = {}  # by the model's name, where its checkpoint can be packed here as well
        self._others: dict[str, Plan] = {}  # the same from the other form of its weights
        self._opened = {wanted} if wanted else set[str]()  # models of which all bits are shown
        self._lines: list[_Line] = []
        self._figures = False  # whether quality is given as KL, too
        self._lead = Static(_LEAD, classes="lead")
        self._head = Static("", markup=False, id="head")
        self._list = OptionList(id="choices", markup=False)
        self._details = Static("Estimating …", markup=False, id="details")
        self._trouble = Trouble()
        known = "owner/name, https://huggingface.co/owner/name, a folder or a GGUF file"
        self._other = Input(placeholder=known, id="other")

    def compose(self) -> ComposeResult:
        yield self._lead
        yield self._head
        yield self._list
        yield self._other
        yield self._trouble
        yield self._details

    def on_mount(self) -> None:
        self._list.focus()
        self.reckon()

    def tell(self, error: FloeError | None) -> None:
        """Say why the model that was chosen or typed cannot be set up."""
        self._trouble.show(error)
        self._details.display = error is None

    def close_other(self) -> bool:
        """Leave the field for another model; whether it was open."""
        if not self._other.display:
            return False
        self._close_other()
        return True

    def reckon(self) -> None:
        """Plan every model, and put them in order."""

        def work() -> list[Plan | tuple[CatalogEntry, FloeError]]:
            from ....engine.planning.plan import make, ranked, two_plans

            packs = [one.as_pack for one in self._entries if one.as_pack and not one.only_pack]
            self._ready = {one.name: make(self._machine, one) for one in packs}

            plans: list[Plan | tuple[CatalogEntry, FloeError]] = []
            for entry in self._entries:
                try:
                    lead, other = two_plans(self._machine, entry)
                    plans.append(lead)
                    self._others |= {entry.name: other} if other else {}
                except FloeError as error:
                    plans.append((entry, error))
            planned = ranked(one for one in plans if not isinstance(one, tuple))
            return [*planned, *(one for one in plans if isinstance(one, tuple))]

        in_background(self, work, self._show)

    def _show(self, plans: list[Plan | tuple[CatalogEntry, FloeError]]) -> None:
        self._plans = plans
        if len(plans) == 1:
            self._opened |= {one.entry.name for one in plans if not isinstance(one, tuple)}
        self._list_models()
        self._fill(self._first())

    def _list_models(self) -> None:
        from ....engine.planning.plan import standing

        self._lines, before = [], "reading"
        for plan in self._plans:
            if isinstance(plan, tuple):
                self._lines.append(_Line(trouble=f"{plan[0].name}: {plan[1].title}"))
                continue
            stands = standing(plan.entry, plan.chosen)
            if stands != before:
                self._lines.append(_Line(heading=plan_words.STANDINGS[stands]))
                before = stands
            self._lines.append(_Line(plan))
            if (ready := self._ready.get(plan.entry.name)) is not None:
                self._lines.append(_Line(ready, ready.options[0]))
            for one in filter(None, (plan, self._others.get(plan.entry.name))):
                shown = one.options if plan.entry.name in self._opened else (one.chosen or one.options[-1],)
                self._lines += [_Line(one, option) for option in shown]
        self._lines.append(_Line())

    def toggle_bits(self) -> None:
        """Show all bits of the highlighted model, or the recommended ones only."""
        at = self._list.highlighted
        plan = self._lines[at].plan if at is not None and at < len(self._lines) else None
        if plan is None:
            return
        self._opened ^= {plan.entry.name}
        self._list_models()
        own = [at for at, line in enumerate(self._lines) if line.option and line.plan is plan]
        self._fill(next((at for at in own if self._lines[at].chosen), own[0]))

    def toggle_figures(self) -> None:
        """Give quality as KL, or in words."""
        self._figures = not self._figures
        self._lead.update(f"{_LEAD} {plan_words.KL}" if self._figures else _LEAD)
        self._fill(self._list.highlighted or 0)

    def _first(self) -> int:
        """The line to start on: the recommended one of the wanted model, or of the first model that fits."""
        chosen = [at for at, line in enumerate(self._lines) if line.chosen]
        for at, line in enumerate(self._lines):
            if line.plan and line.option and line.plan.entry.name == self._wanted:
                return next((one for one in chosen if self._lines[one].plan is line.plan), at)
        return chosen[0] if chosen else next((at for at, line in enumerate(self._lines) if line.option), 0)

    def _fill(self, highlighted: int) -> None:
        wide = self.size.width >= WIDE
        answers = "KL, nats" if self._figures else "answers"
        self._head.update(columns("bits", answers, "tokens/s", "download", "packed", "peak disk", wide=wide))
        self._list.clear_options()
        for line in self._lines:
            heading = line.option is None and (line.plan is not None or bool(line.trouble or line.heading))
            self._list.add_option(Row(self._row(line, wide=wide), disabled=heading))
        self._list.highlighted = highlighted
        self._list.scroll_to_highlight()

    def _row(self, line: _Line, *, wide: bool) -> Content:
        if line.trouble:
            return Content.styled(printable(line.trouble), "$text-error")
        if line.heading:
            return Content.styled(line.heading, MUTED)
        if line.plan is None:
            return Content.styled(_OTHER, "italic")
        if line.option is None:
            entry = line.plan.entry
            return Content.assemble((printable(entry.name), "bold $primary"), (f"  {plan_words.about(entry)}", MUTED))
        one = line.option
        mark = "●" if line.chosen and line.plan is not self._others.get(line.plan.entry.name) else " "
        kl = trimmed(one.kl, 2) if self._figures else plan_words.closeness(one.kl)
        first = f"{mark} {plan_words.widths(one.spec)}", kl
        if lacks := plan_words.missing(one):
            return Content.styled(f"{quality(*first)}  {lacks}", MUTED)
        speed = plan_words.rate(one.decode) if wide else digits(one.decode.mid, 2)
        if (ready := line.plan.entry.only_pack) is not None:
            told = f"ready pack, {size(ready.bytes)}" if wide else f"ready, {size(ready.bytes)}"
            return Content(f"{quality(*first)}{speed:>{15 if wide else 10}}   {told}")
        fetched = size(line.plan.entry.download_bytes) if line.plan.entry.folder is None else "none"
        row = columns(*first, speed, fetched, *map(size, disk(one)), wide=wide)
        return Content.assemble(row, (f" {line.plan.entry.rounding}" if line.plan.entry.file_bytes else "", MUTED))

    @on(OptionList.OptionHighlighted)
    def _explain(self, event: OptionList.OptionHighlighted) -> None:
        line = self._lines[event.option_index] if event.option_index < len(self._lines) else _Line()
        self.tell(None)
        if not self._other.display:
            self.say_keys(_KEYS + self._more)
        if line.plan is None or line.option is None:
            self._details.update(f"{CALLED} models work: from the hub, a downloaded checkpoint folder, or a GGUF file.")
            return
        if line.ready:
            self._details.update(ready_details(line.plan, line.option, also=line.plan.entry.name in self._ready))
            return
        first = line.plan is self._plans[0] and line.chosen
        self._details.update(details(line.plan, line.option, first=first, figures=self._figures))

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._take(self._lines[event.option_index])

    def take_elsewhere(self) -> None:
        """Choose the highlighted line, and be asked for the folder."""
        if (at := self._list.highlighted) is not None and self._lines[at].option is not None:
            self._take(self._lines[at], folder=True)

    def _take(self, line: _Line, *, folder: bool = False) -> None:
        if line.plan is None:
            self._other.display = True
            self._other.focus()
            self.say_keys("Enter looks it up · Esc back to the list")
        elif line.option is not None:
            one = line.option
            if one.works or plan_words.only_disk_lacks(one):
                self.post_message(self.Taken(self, Chosen(line.plan, one), folder=folder))
            else:
                why = f"It {plan_words.missing(one)}." if one.missing else f"It is {plan_words.missing(one)}."
                self.tell(FloeError("This does not fit this machine", why, self._instead(line.plan)))

    def _instead(self, plan: Plan) -> str:
        if plan.chosen is not None:
            return f"Choose the line of {plan.entry.name} that is marked ●."
        other = next((one for one in self._plans if not isinstance(one, tuple) and one.chosen), None)
        if other is not None:
            return f"Choose {other.entry.name}, which fits."
        return "Press Ctrl+D for the demo model, which always runs."

    @on(Input.Submitted)
    def _ask(self, event: Input.Submitted) -> None:
        event.stop()
        if name := event.value.strip():
            self.post_message(self.Asked(self, name))

    def _close_other(self) -> None:
        self._other.display = False
        self._other.value = ""
        self.tell(None)
        self._list.focus()
        self.say_keys(_KEYS + self._more)

    def on_resize(self, _event: events.Resize) -> None:
        """Columns follow the terminal."""
        if self._lines:
            self._fill(self._list.highlighted or 0)
