"""What the panel knows, and its lines of text. Every figure is the engine's; a missing one says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from textual.content import Content

from ...engine.events import Loaded, Stats
from . import units
from .heat import bars, condense, stretch
from .themes import MUTED

SAMPLES = 60


@dataclass(slots=True)
class Figures:
    """The latest figures. `speeds` are the last decode speeds, oldest first; `running`: an answer is made."""

    loaded: Loaded | None = None
    stats: Stats | None = None
    running: bool = False
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    def take(self, stats: Stats, *, running: bool) -> None:
        """Newer figures came."""
        self.stats = stats
        self.running = running
        if running and stats.decode_tps is not None:
            self.speeds.append(stats.decode_tps)


Draw = Callable[[Figures, int], Content]
"""Makes a piece of the panel from the figures, for a width in cells."""


def speed_heading(figures: Figures, width: int) -> Content:
    """The section's name, and which answer the figures belong to."""
    stats = figures.stats
    if stats is None or (stats.first_token_s is None and not figures.running):
        return heading("Speed", width, "not measured yet")
    return heading("Speed", width, "this answer" if figures.running else "last answer")


def speed_beside(figures: Figures, width: int) -> Content:
    """What stands beside the big figure, which is the decode speed of the last second."""
    stats = figures.stats
    return Content("\n").join(
        [
            _muted("tokens/s decode"),
            _row(figures, "mean", units.rate(stats and stats.decode_tps_mean), width),
            _row(figures, "prefill", units.rate(stats and stats.prefill_tps), width),
        ]
    )


def speed_lines(figures: Figures, width: int) -> Content:
    """The same three speeds in lines, where there is no room for a big figure."""
    stats = figures.stats
    return Content("\n").join(
        [
            _row(figures, "decode, last second", units.rate_of(_decode(figures)), width),
            _row(figures, "decode, mean", units.rate_of(stats and stats.decode_tps_mean), width),
            _row(figures, "prefill", units.rate_of(stats and stats.prefill_tps), width),
        ]
    )


def speed_course(figures: Figures, width: int) -> Content:
    """The sparkline of decode speeds, and the time to first token."""
    stats = figures.stats
    lines = [Content.styled(line, "$primary") for line in sparkline(figures, width, rows=2)]
    lines.append(_row(figures, "time to first token", units.seconds(stats and stats.first_token_s), width))
    return Content("\n").join(lines)


def sparkline(figures: Figures, width: int, *, rows: int) -> list[str]:
    """The last decode speeds, newest at the right; dots where nothing was measured."""
    values = condense(figures.speeds, width)
    drawn = bars(values, rows=rows)
    blank = width - len(values)
    return [("·" if row == rows - 1 else " ") * blank + line for row, line in enumerate(drawn)]


def neurons(figures: Figures, width: int) -> Content:
    """How many neurons took part, over all and by layer, and what that read."""
    stats = figures.stats
    active = stats.active_neurons if stats else None
    lines = [heading("Neurons", width)]
    if active is None:
        lines.append(_row(figures, "active share", units.NOT_MEASURED, width))
    else:
        label, value = "active share ", f" {units.share(active):>5}"
        room = max(0, width - len(label) - len(value))
        filled = round(active * room)
        bar = [("━" * filled, "$primary"), ("─" * (room - filled), "$primary 35%")]
        lines.append(Content.assemble((label, MUTED), *bar, value))
    lines += [
        _row(figures, "bytes read per token", units.size(stats and stats.bytes_per_token), width),
    ]
    layers = condense(stats.layer_activity, width) if stats else []
    if layers:
        spread = f"{units.share(min(layers))} to {units.share(max(layers))}"
        lines.append(_row(figures, "active by layer", spread, width))
        lines.append(Content.styled(stretch(bars(layers)[0], width), "$primary"))
    else:
        lines.append(_row(figures, "active by layer", units.NOT_MEASURED, width))
        lines.append(Content(""))
    return Content("\n").join(lines)


def memory(figures: Figures, width: int) -> Content:
    """What lies where."""
    stats, loaded = figures.stats, figures.loaded
    if stats is None:
        gpu = units.NOT_MEASURED
    else:
        gpu = "no GPU" if stats.vram_bytes is None else units.size(stats.vram_bytes)
    return Content("\n").join(
        [
            heading("Memory", width),
            _row(figures, "RAM, this process", units.size(stats and stats.ram_bytes), width),
            _row(figures, "VRAM", gpu, width),
            _row(figures, "KV cache", units.size(stats and stats.kv_bytes), width),
            _row(figures, "model, resident part", units.size(loaded and loaded.memory_bytes), width),
        ]
    )


def backend(figures: Figures, width: int) -> Content:
    """Where the model computes, with which kernels, and why."""
    loaded = figures.loaded
    if loaded is None:
        return Content("\n").join([heading("Backend", width), _muted("known when the model is loaded")])
    return Content("\n").join(
        [
            heading("Backend", width),
            Content(f"{loaded.device} · {loaded.backend}"),
            Content(loaded.widths),
            _muted(f"Why: {loaded.reason}"),
        ]
    )


def strip(figures: Figures, width: int) -> Content:
    """The panel in two lines, for a terminal without room for a column; what does not fit is left out."""
    stats, loaded = figures.stats, figures.loaded
    if stats is None:
        speeds = [_muted("speed, neurons and memory: not measured yet")]
        places: list[Content] = []
    else:
        spark = sparkline(figures, 12 if width >= 74 else 5, rows=1)[0]
        speeds = [
            Content.assemble((spark, "$primary"), " ", (units.rate_of(_decode(figures)), "bold")),
            Content(f"first token {units.seconds(stats.first_token_s)}"),
            Content(f"neurons {units.share(stats.active_neurons)}"),
            Content(f"prefill {units.rate_of(stats.prefill_tps)}"),
        ]
        vram = "no GPU" if stats.vram_bytes is None else f"VRAM {units.size(stats.vram_bytes)}"
        places = [Content(f"RAM {units.size(stats.ram_bytes)}"), Content(vram)]
    if loaded is None:
        places.append(_muted("backend known when the model is loaded"))
    else:
        places.append(_muted(f"{loaded.device} · {loaded.backend}: {loaded.reason}"))
    while len(speeds) > 1 and Content.assemble(*between(speeds)).cell_length > width:
        speeds.pop()
    lines = [Content.assemble(*between(parts)).truncate(width, ellipsis=True) for parts in (speeds, places)]
    return Content("\n").join(lines)


def between(parts: Sequence[Content]) -> list[Content]:
    """`parts` with a dot between each two."""
    joined: list[Content] = []
    for part in parts:
        joined += [_muted(" · "), part] if joined else [part]
    return joined


def _decode(figures: Figures) -> float | None:
    return figures.stats.decode_tps if figures.stats else None


def heading(name: str, width: int, remark: str = "") -> Content:
    """A section's name, and a remark at the right end of the line."""
    gap = max(1, width - len(name) - len(remark))
    return Content.assemble((name, "bold $primary"), " " * gap, (remark, f"italic {MUTED}"))


def _row(figures: Figures, label: str, value: str, width: int) -> Content:
    if value == units.NOT_MEASURED and figures.stats is not None:
        value = f"{value} not yet"
    gap = max(1, width - len(label) - len(value))
    return Content.assemble((label, MUTED), " " * gap, value)


def _muted(text: str) -> Content:
    return Content.styled(text, MUTED)
