"""The panel's figures, and its lines of text. Every figure comes from the engine; missing ones are marked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from textual.content import Content

from ....engine.events import Loaded, Rows, Stats
from ...text import units
from ..common.themes import MUTED
from .heat import bars, condense, stretch

SAMPLES = 60
VIRTUAL = "bold $warning"
NO_GPU = "no GPU"


@dataclass(slots=True)
class PanelFigures:
    """The latest figures. `speeds` are the last decode speeds, oldest first; `running`: an answer is being written.

    `context_used` tokens of the chat on the screen are in the window; None: not known. `dense`: the panel's sections
    are drawn in short form, for a terminal without room for all of them.

    `remote`: the host of the server that answers, "" for none.

    While `paused`, newer figures are put aside until `resume`. `watchers` are called when newer ones are to be shown,
    so pages above the chat need no timer.
    """

    loaded: Loaded | None = None
    stats: Stats | None = None
    running: bool = False
    paused: bool = False
    dense: bool = False
    context_used: int | None = None
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    watchers: list[Callable[[], object]] = field(default_factory=list["Callable[[], object]"])
    remote: str = ""
    _aside: tuple[Stats, bool] | None = None

    @property
    def rows(self) -> Rows | None:
        """Where rows came from; None if all rows are in the computing device's memory, or nothing is known yet."""
        return self.stats.rows if self.stats else None

    def turn_to(self, remote: str) -> None:
        """Another engine answers: its figures are to come."""
        self.remote, self.loaded, self.stats, self._aside = remote, None, None, None
        self.running, self.context_used = False, None
        self.speeds.clear()

    def resume(self) -> None:
        """Show what came while paused."""
        self.paused = False
        if self._aside is not None:
            stats, running = self._aside
            self._aside = None
            self.take(stats, running=running)

    def take(self, stats: Stats, *, running: bool) -> None:
        """Newer figures came."""
        if self.paused:
            self._aside = (stats, running)
            return
        self.stats = stats
        self.running = running
        if running and stats.decode_tps is not None:
            self.speeds.append(stats.decode_tps)


Draw = Callable[[PanelFigures, int], Content]
"""Draws a piece of the panel from the figures, for a width in cells."""


def speed_heading(figures: PanelFigures, width: int) -> Content:
    """The section's name, which answer the figures belong to, and whether times are virtual."""
    stats = figures.stats
    if figures.paused:
        return heading("Speed", width, "paused", virtual=is_virtual(figures))
    if stats is None or (stats.first_token_s is None and not figures.running):
        return heading("Speed", width, "not measured yet")
    which = "last answer"
    if figures.running:
        which = "this answer" if stats.together == 1 else f"one of {stats.together} at once"
    return heading("Speed", width, which, virtual=is_virtual(figures))


def speed(figures: PanelFigures) -> float | None:
    """The answer's tokens per second: the mean from its first token to its last. Panel,
    footer, history and `ask` all show this one."""
    return figures.stats.decode_tps_mean if figures.stats else None


def speed_beside(figures: PanelFigures, width: int) -> Content:
    """The lines beside the big figure, which is `speed`."""
    stats = figures.stats
    value = units.seconds(stats and stats.first_token_s)
    first = _shorter("first token", value, width)
    prefill = stats.prefill_tps if stats else None
    lines = [muted("tokens/s"), row(figures, first, value, width)]
    if not figures.remote:
        lines.insert(1, row(figures, "prefill", f"{units.rate(prefill)}{'' if prefill is None else '/s'}", width))
    return Content("\n").join(lines)


def speed_course(figures: PanelFigures, width: int) -> Content:
    """The last minute's speeds, second by second; how much of the prompt was in the KV cache; what became of drafts."""
    stats = figures.stats
    drawn = sparkline(figures, width, rows=1 if figures.dense else 2)
    lines = [Content.styled(line, "$primary") for line in drawn]
    if stats and stats.reused_tokens and not figures.dense:
        lines.append(row(figures, "prompt reused", f"{stats.reused_tokens} of {stats.prompt_tokens}", width))
    if stats and stats.drafted and not figures.dense:
        gained = "" if stats.draft_speedup is None else f", {stats.draft_speedup:.1f}x"
        became = f"{stats.accepted} of {stats.drafted}{gained}"
        lines.append(row(figures, _shorter("drafts accepted", became, width), became, width))
    return Content("\n").join(lines)


def sparkline(figures: PanelFigures, width: int, *, rows: int) -> list[str]:
    """The last decode speeds, newest on the right; a dot means not measured."""
    values = condense(figures.speeds, width)
    drawn = bars(values, rows=rows)
    blank = width - len(values)
    return [("·" if row == rows - 1 else " ") * blank + line for row, line in enumerate(drawn)]


def neurons(figures: PanelFigures, width: int) -> Content:
    """The share of neurons that were active, over all and by layer, and the bytes read for them."""
    stats = figures.stats
    lines = [
        heading("Neurons", width),
        gauge(figures, "active share", stats and stats.active_neurons, width),
        row(figures, "bytes read per token", units.size(stats and stats.bytes_per_token), width),
    ]
    if figures.dense:
        return Content("\n").join(lines)
    return Content("\n").join(
        [*lines, *by_layer(figures, "active by layer", stats.layer_activity if stats else (), width)]
    )


def by_layer(
    figures: PanelFigures, label: str, values: Sequence[float | None], width: int, top: float | None = None
) -> list[Content]:
    """Shares by layer, in two lines: their range, and a bar for each, `top` at full height.

    A dot is a layer without a measurement; if there are more layers than columns, neighbours are averaged.
    """
    known = [value for value in values if value is not None]
    if not known:
        return [row(figures, label, units.NOT_MEASURED, width), Content("")]
    drawn = bars(condense([value or 0.0 for value in values], width), top=top)[0]
    if len(drawn) == len(values):
        drawn = "".join("·" if value is None else bar for value, bar in zip(values, drawn, strict=True))
    spread = f"{units.share(min(known))} to {units.share(max(known))}"
    return [row(figures, label, spread, width), Content.styled(stretch(drawn, width), "$primary")]


def backend(figures: PanelFigures, width: int) -> Content:
    """Where the model computes, with which kernels, and why."""
    loaded = figures.loaded
    if figures.remote:
        return _remote(figures, width)
    if loaded is None:
        return Content("\n").join([heading("Backend", width), muted("known once the model is loaded")])
    where = f"{loaded.device} · {loaded.backend}"
    fits = len("Backend ") + Content(where).cell_length <= width
    return Content("\n").join(
        [
            heading("Backend", width, where if fits else ""),
            *([] if fits else [Content(where)]),
            Content(loaded.widths),
            *([Content.styled(loaded.remedy, "$warning")] if loaded.remedy else []),
            *([Content.styled(f"Advanced: {', '.join(loaded.advanced)}", "$warning")] if loaded.advanced else []),
            muted(f"Why: {loaded.reason}"),
        ]
    )


def _remote(figures: PanelFigures, width: int) -> Content:
    """Which server answers, and what it counted."""
    stats, loaded = figures.stats, figures.loaded
    lines = [
        heading("Remote", width, "" if loaded else "connecting"),
        Content(loaded.backend if loaded else figures.remote),
    ]
    if stats is not None:
        counted = ((stats.prompt_tokens, "prompt tokens"), (stats.new_tokens, "answer tokens"))
        lines += [row(figures, label, "—" if count is None else f"{count:,}", width) for count, label in counted]
    if loaded is not None:
        window = f"{loaded.context_window:,} tokens" if loaded.context_window else "not known"
        lines.append(row(figures, "context window", window, width))
    lines.append(muted(f"Times are as seen from here. Your questions go to {figures.remote}."))
    return Content("\n").join(lines)


def strip(figures: PanelFigures, width: int) -> Content:
    """The panel in two lines, for a terminal without room for a column; figures that do not fit are left out."""
    stats, loaded = figures.stats, figures.loaded
    if stats is None:
        speeds = [muted("speed, neurons and memory: not measured yet")]
        places: list[Content] = []
    else:
        rows = stats.rows
        virtual: list[tuple[str, str]] = [("virtual ", VIRTUAL)] if is_virtual(figures) else []
        now = [*virtual, (units.rate_of(speed(figures)), "bold")]
        spark = sparkline(figures, 12 if width >= 74 else 5, rows=1)[0]
        speeds = [
            Content.assemble((spark, "$primary"), " ", *now),
            Content(f"first token {units.seconds(stats.first_token_s)}"),
            *([] if rows is None else [_held(rows)]),
            *([] if figures.remote else [Content(f"neurons {units.share(stats.active_neurons)}")]),
            *([left_out(rows)] if rows is not None and rows.left_out else []),
            *([] if figures.remote else [Content(f"prefill {units.rate_of(stats.prefill_tps)}")]),
        ]
        if stats.first_token_s is None and not figures.running:
            speeds = [muted("speed and neurons: not measured yet")]
        vram = vram_words(stats)
        places = [Content(f"RAM {units.size(stats.ram_bytes)}"), Content(vram if vram == NO_GPU else f"VRAM {vram}")]
    if figures.remote:
        places = [Content.styled(f"remote {loaded.backend if loaded else figures.remote}", "$text-warning")]
    elif loaded is None:
        places.append(muted("backend known once the model is loaded"))
    else:
        places.append(muted(f"{loaded.device} · {loaded.backend}: {loaded.remedy or loaded.reason}"))
    if figures.paused:
        speeds.insert(0, Content.styled("paused", f"italic {MUTED}"))
    while len(speeds) > 1 and Content.assemble(*between(speeds)).cell_length > width:
        speeds.pop()
    lines = [Content.assemble(*between(parts)).truncate(width, ellipsis=True) for parts in (speeds, places)]
    return Content("\n").join(lines)


def between(parts: Sequence[Content]) -> list[Content]:
    """`parts` with a dot between each two."""
    joined: list[Content] = []
    for part in parts:
        joined += [muted(" · "), part] if joined else [part]
    return joined


def _held(rows: Rows) -> Content:
    """How much of what was needed was on the device."""
    if rows.static:
        return Content(f"on GPU {units.share(rows.in_place)}")
    return Content(f"hits {units.share(rows.hits)}")


def left_out(rows: Rows) -> Content:
    """The share of rows that a lenient preset skipped, marked because answers then vary."""
    return Content.styled(f"left out {units.share(rows.left_out)}", "$warning")


def is_virtual(figures: PanelFigures) -> bool:
    """Whether times are those of a simulated device."""
    return figures.rows is not None and figures.rows.virtual


def vram_bytes(stats: Stats) -> int | None:
    """Device memory in use, real or simulated; None without either."""
    rows = stats.rows
    if stats.vram_bytes is None and rows is not None:
        return rows.dense + rows.up + rows.whole + rows.pool + (stats.kv_bytes or 0)
    return stats.vram_bytes


def vram_words(stats: Stats) -> str:
    """Device memory in use, of the budget if that is known: "5.10 of 7.40 GB"."""
    held, budget = vram_bytes(stats), stats.vram_budget
    if held is None:
        return NO_GPU
    return units.size(held) if budget is None else units.size_of(held, budget)


def heading(name: str, width: int, remark: str = "", *, virtual: bool = False) -> Content:
    """A section's name, and at the right "virtual" if times are `virtual` and, given room, a remark."""
    remarks: list[Content] = [Content.styled("virtual time", VIRTUAL)] if virtual else []
    if remark:
        remarks.append(Content.styled(remark, f"italic {MUTED}"))
    right = Content.assemble(*between(remarks))
    if virtual and len(name) + 1 + right.cell_length > width:
        right = remarks[0]
    gap = max(1, width - len(name) - right.cell_length)
    return Content.assemble((name, "bold $primary"), " " * gap, right)


def row(figures: PanelFigures, label: str, value: str, width: int) -> Content:
    """A figure's name, and the figure at the right end of the line."""
    if value == units.NOT_MEASURED and figures.stats is not None:
        value = f"{value} not known" if figures.remote else f"{value} not yet"
    gap = max(1, width - len(label) - len(value))
    return Content.assemble((label, MUTED), " " * gap, value)


def _shorter(label: str, value: str, width: int) -> str:
    """A figure's name, or its first word if both would not fit."""
    return label if len(f"{label} {value}") <= width else label.split()[0]


def gauge(figures: PanelFigures, label: str, value: float | None, width: int) -> Content:
    """A share of 0..1 as a bar between its name and its percentage."""
    if value is None:
        return row(figures, label, units.NOT_MEASURED, width)
    after = f" {units.share(value):>5}"
    room = max(0, width - len(label) - 1 - len(after))
    filled = round(min(1.0, value) * room)
    bar = [("━" * filled, "$primary"), ("─" * (room - filled), "$primary 35%")]
    return Content.assemble((f"{label} ", MUTED), *bar, after)


def muted(text: str) -> Content:
    """Less important text."""
    return Content.styled(text, MUTED)
