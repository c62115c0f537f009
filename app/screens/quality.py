"""The quality page: presets with their measured quality loss, and every share by hand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Static

from ...engine.events import LATE, Loaded, Rule
from ...engine.planning.measured_figures import figures
from ...engine.quality_presets import DEFAULT, PUBLISHED
from ...models.errors import FloeError
from ...models.pack.dial_loss import BROKEN, NOTICEABLE
from ...models.quantities import digits, divergence, memory
from ..chat.model import ChatModel
from ..client.interface import Cost, Costs
from ..text.plain_text import printable
from ..text.units import NOT_MEASURED, rate_of, seconds, share, size
from ..widgets.common.clipboard import copy
from ..widgets.common.dial import Dial
from ..widgets.common.hints import Page, hints
from ..widgets.common.keys import closing
from ..widgets.panel.figures import PanelFigures, speed
from ..widgets.panel.meanings import KL

_WIDE, _NARROW = (10, 9, 9, 9, 9, 11, 11), (8, 8, 7, 6, 7, 10, 8)  # cells of a preset's name and of its figures
_HEADS = ("", "neurons", "halves", "skip <", "halve <", "KL, nats", "per token")
_SHORT_HEADS = ("", "neurons", "halves", "skip<", "halve<", "KL, nats", "a token")
_OFFLOADED_ONLY = 'No effect here: there is no pool of rows. The line "experts are placed" makes one.'
_SHARES = (0.25, 0.5, 0.75)  # of the largest pool, which are offered

_DIALS = (
    ("sparsity", "skip neurons", "Skip neurons with the weakest signal: up to this share of them."),
    ("product", "skip down halves", "Skip the down projection of this share of the neurons."),
    ("drop", "skip experts below", "Skip experts whose router score is below this share of the mean."),
    (
        "major",
        "halve experts below",
        "Run only the more important half of experts whose score is below this share of the mean.",
    ),
    ("alpha", "substitute within", "Replace an expert outside GPU memory with one inside whose score is this close."),
    (
        "late",
        "weak rows not in VRAM",
        "Wait for every row, or leave out the weakest quarter of those not in GPU memory: faster, less exact. It cost "
        f"Balanced at most {divergence(figures().lenient_kl)} nats (KL) on the demo model.",
    ),
)

_PUBLISHED = "A rule of a paper instead of a preset."
_NAMES = tuple(rule.name for rule in PUBLISHED)


class PresetHead(Widget):
    """The names of the presets' figures."""

    def render(self) -> Content:
        return Content(f"  {_in_columns(self, _HEADS if _has_room(self) else _SHORT_HEADS)}")


class PresetLine(Widget, can_focus=True):
    """One preset: what it skips, its quality loss (KL), and the bytes that a token reads."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space,right", "take", "use this preset", show=False)]

    class Taken(Message):
        """The person chose this preset."""

        def __init__(self, cost: Cost) -> None:
            super().__init__()
            self.cost = cost

    def __init__(self, cost: Cost) -> None:
        super().__init__(classes="preset")
        self.cost = cost
        self._in_force = False

    def show(self, *, in_force: bool) -> None:
        """Draw it, with a mark while it is in use."""
        self._in_force = in_force
        self.refresh()

    def render(self) -> Content:
        preset = self.cost.preset
        kl = "not tuned" if self.cost.kl is None else f"{self.cost.kl:.4f}"
        moved = NOT_MEASURED if self.cost.bytes_per_token is None else size(self.cost.bytes_per_token)
        if preset.exact:
            kl = "0"
        skipped = (preset.rule.sparsity, preset.rule.product, preset.rule.drop, preset.rule.major)
        line = _in_columns(self, (preset.name, *(share(value) for value in skipped), kl, moved))
        mark = Content.styled("● " if self._in_force else "  ", "$primary")
        return Content.assemble(mark, Content(line).stylize("bold", 0, len(preset.name)))

    def action_take(self) -> None:
        """Use this preset."""
        self.post_message(self.Taken(self.cost))

    def on_click(self, event: events.Click) -> None:
        self.action_take()


class QualityScreen(ModalScreen[None]):
    """A page over the chat; every change applies from the next token."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", show=False),
        closing("quality"),
        Binding("up,k", "app.focus_previous", "the line above", show=False),
        Binding("down,j", "app.focus_next", "the line below", show=False),
        Binding("enter", "place", "load the model with experts placed so", show=False),
        Binding("c", "copy", "copy the command that measures this quality", show=False),
    ]

    def __init__(self, model: ChatModel, figures: PanelFigures) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (80, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (27, "-tall")]
        self._model = model
        self._figures = figures
        self._preset = model.preset
        self._now = Static("", classes="now")
        self._loss = Static("Custom", classes="heading")
        self._meaning = Static("", markup=False, classes="meaning")
        self._published = Dial("published", "  as published", _PUBLISHED, ("none", *_NAMES))
        self._placements = placements(None if model.unplaced else model.loaded, model.client.placement)
        self._placement = Dial("placement", "experts are placed", self._why(), tuple(self._placements.values()))
        self._placement.place = [*self._placements].index(model.client.placement)
        try:
            self._costs, self._trouble = model.client.costs(), ""
        except FloeError as error:
            self._costs, self._trouble = Costs(), f"{error.title}. {error.cause}"

    def compose(self) -> ComposeResult:
        with Page(classes="page") as page:
            page.border_title = "Quality"
            page.border_subtitle = hints("◂ ▸ change", "Enter uses a preset", "Esc closes")
            yield Static(self._trouble, markup=False, classes="trouble") if self._trouble else PresetHead()
            yield from (PresetLine(cost) for cost in self._costs.presets)
            yield self._published
            yield self._loss
            for name, label, meaning in _DIALS:
                yield Dial(name, label, meaning, ("wait for", "leave out") if name == "late" else None)
            yield self._placement
            yield self._meaning
            yield self._now

    def on_mount(self) -> None:
        self._mark(self._preset)
        known = next((cost for cost in self._costs.presets if cost.preset.name == self._preset), None)
        if known is not None:
            self._turn_to(known.preset.rule)
        elif (by_hand := self._model.by_hand) is not None:
            self._turn_to(by_hand)
        self._figures.watchers.append(self._show_now)

    def on_unmount(self) -> None:
        self._figures.watchers.remove(self._show_now)

    @property
    def _unpooled(self) -> bool:
        stats = self._figures.stats
        return stats is not None and (stats.rows is None or stats.rows.static)

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Explain the line that has the focus."""
        if isinstance(event.widget, Dial):
            useless = event.widget.id in ("alpha", "late") and self._unpooled
            also = _unskipped(self._costs) if event.widget.id in ("sparsity", "product", "major") else ""
            self._meaning.update(f"{event.widget.meaning} {_OFFLOADED_ONLY if useless else ''}{also}")
        else:
            self._meaning.update(f"KL: {KL}. {_measured_on(self._costs.presets)}{_unskipped(self._costs)}")

    @on(PresetLine.Taken)
    def _take(self, event: PresetLine.Taken) -> None:
        self._turn_to(event.cost.preset.rule)
        self._model.choose_preset(event.cost.preset.name)
        self._mark(event.cost.preset.name)

    @on(Dial.Turned)
    def _turn(self, event: Dial.Turned) -> None:
        if event.dial is self._placement:
            return
        if event.dial is self._published:
            place = self._published.place
            name = _NAMES[place - 1] if place else DEFAULT
            self._model.choose_preset(name)
            self._mark(name)
            self._meaning.update(self._model.note_of(name) or _PUBLISHED)
            return
        values: dict[str, Any] = {dial.id or "": dial.value for dial in self._dials()}
        self._model.set_quality(Rule(**values | {"late": LATE * values["late"]}))
        self._mark("")

    def action_copy(self) -> None:
        """Copy the command that measures a quality set by hand, and show it."""
        if not self._preset and (rule := self._model.by_hand) is not None:
            command = measuring(self._model.name, rule)
            copy(self.app, command)
            self._meaning.update(f"Copied: {command}")

    async def action_place(self) -> None:
        """Load the model again with its experts where the line says, and close the page."""
        if self.focused is not self._placement:
            return
        wanted = [*self._placements][self._placement.place]
        try:
            if wanted != self._model.client.placement or self._model.unplaced:
                await self._model.take_placement(wanted)
        except FloeError as error:
            self._meaning.update(" ".join(filter(None, (f"{error.title}.", error.cause, error.hint))))
        else:
            self.dismiss()

    def _why(self) -> str:
        """What the placement costs, and where experts are now; or why there is nothing to choose."""
        loaded, why = self._model.loaded, self._model.unplaced
        if why or loaded is None:
            return f"No effect here: {why}."
        return (
            f"Now {loaded.placed}. Enter loads the model again ({seconds(loaded.seconds)} last time); the next answer "
            "reads this chat again. Until floe-chat ends; /mix takes any size, advanced.placement stays."
        )

    def _dials(self) -> list[Dial]:
        return [dial for dial in self.query(Dial) if dial not in (self._published, self._placement)]

    def _turn_to(self, rule: Rule) -> None:
        for dial in self._dials():
            dial.value = float(rule.late > 0) if dial.id == "late" else getattr(rule, dial.id or "")

    def _mark(self, preset: str) -> None:
        self._preset = preset
        self._published.place = _NAMES.index(preset) + 1 if preset in _NAMES else 0
        for line in self.query(PresetLine):
            line.show(in_force=line.cost.preset.name == preset)
        self._show_now()

    def _show_now(self) -> None:
        """Show the running answer's figures, and what a quality set by hand is likely to lose."""
        stats = self._figures.stats
        words = (
            rate_of(speed(self._figures)),
            f"{size(stats.bytes_per_token if stats else None)} per token",
            f"{share(stats.active_neurons if stats else None)} of neurons active",
        )
        self._now.update(Content.assemble(("Now  ", "bold $primary"), " · ".join(words)))
        by_hand = None if self._preset else self._model.by_hand
        loss = "" if by_hand is None else Content.assemble(" " * 4, _estimated(self._costs, by_hand))
        self._loss.update(Content.assemble("Custom", loss))


def placements(loaded: Loaded | None, now: str) -> dict[str, str]:
    """Where experts may be, and in words; `now` is among them."""
    if loaded is None or loaded.pools is None:
        return {now: "all in one place"}
    least, most = loaded.pools
    sizes = [memory(most * part) for part in _SHARES if most * part >= least]
    words = {"auto": "planner's choice", "pool": "pool of rows, as fits"}
    words |= {f"pool:{of.replace(' ', '').lower()}": f"pool of {of}" for of in sizes}
    words |= {"static": "whole layers on the card", "cpu": "all by the CPU"}
    return words if now in words else {**words, now: now}


def _estimated(costs: Costs, rule: Rule) -> Content:
    """What a quality set by hand is likely to lose, or what the demo loses with it."""
    dials = costs.dials or costs.demo
    found = None if dials is None else dials.estimate(rule)
    if found is None:
        return Content.styled("KL not measured (c: command)", "not bold")
    least, most = found
    if costs.dials is None:
        demo = f"KL not measured (c: command); demo {digits(least, 2)} to {digits(most, 2)}"
        if most < BROKEN:
            return Content.styled(demo, "not bold")
        return Content.styled(f"{demo}: falls apart", "$error")
    substituted = rule.alpha > 0 or rule.late > 0  # which nothing measured
    spread = f"at least {digits(least, 2)}" if substituted else f"{digits(least, 2)} to {digits(most, 2)}"
    if most < BROKEN:
        return Content.styled(f"KL {spread}, estimated", "$warning" if most >= NOTICEABLE else "not bold")
    falls = "answers fall apart" if least >= BROKEN else "answers may fall apart"
    return Content.styled(f"KL {spread}, estimated: {falls}", "$error")


def measuring(model: str, rule: Rule) -> str:
    """The command that measures the quality loss of a rule."""
    shares = {name: getattr(rule, name) for name, _, _ in _DIALS if name != "late"}
    given = "".join(f" --{name} {100 * value:g}%" for name, value in shares.items() if value)
    return f"floe-chat eval {shlex.quote(model)}{given or ' --sparsity 0'}{' --lenient' if rule.late else ''}"


def _measured_on(costs: Sequence[Cost]) -> str:
    """The text that the KL was measured on."""
    known = next((cost for cost in costs if cost.kl is not None), None)
    if known is None:
        return "To measure it for this model, run: floe-chat tune MODEL"
    if not known.text:
        return "Measured by floe-chat tune."
    beside = "" if known.rounded else ", without what rounding loses"
    return f"Measured on {printable(known.text)}, {known.tokens:,} tokens{beside}."


def _unskipped(costs: Costs) -> str:
    """That some layers skip nothing."""
    return f" Whatever is set, {costs.unskipped}." if costs.unskipped else ""


def _has_room(line: Widget) -> bool:
    return line.content_size.width >= 2 + sum(_WIDE)


def _in_columns(line: Widget, cells: Sequence[str]) -> str:
    name, *widths = _WIDE if _has_room(line) else _NARROW
    figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells[1:], widths, strict=True))
    return f"{cells[0]:<{name}}{figures}"
