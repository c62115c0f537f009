"""The panel's memory sections: where the rows of active neurons came from, the link, and what is stored where.

Parts of a whole are told apart by their glyphs; colours only help.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content

from ....engine.events import CardRows, Rows
from ...text import units
from ..common.themes import MUTED
from .figures import NO_GPU, PanelFigures, by_layer, gauge, heading, is_virtual, muted, row, vram_bytes, vram_words
from .heat import stack

_TONES = ("$success", "$primary", "$warning", "$accent")
_NARROWEST_PAIR = 32
_GAP = 2
LESS_EXACT = "answers vary"  # the meaning of left-out rows
A_POOL = "F4 or /mix pool makes a pool"


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a bar: its look, its size, and its words in the legend."""

    glyph: str
    style: str
    amount: float | None
    name: str
    value: str


def origins(figures: PanelFigures, width: int) -> Content:
    """Where the rows of decode's active neurons came from, and how well they were predicted; blank without a pool."""
    rows = figures.rows
    if rows is None:
        return Content("")
    if rows.static:
        return _split(figures, rows, width)
    shares = (rows.ready, rows.coming, rows.copied, rows.on_cpu)
    remark = "not measured yet" if rows.ready is None else f"hit rate {units.share(rows.hits)}"
    named = zip("█▓▒░", _TONES, shares, ("ready", "coming", "copied", "on CPU"), strict=True)
    parts = [_Part(glyph, tone, share, name, units.share(share)) for glyph, tone, share, name in named]
    predicted = rows.ready is None or rows.recall is not None
    if not predicted and not rows.coming:
        del parts[1]  # nothing is fetched ahead, so nothing comes
    if rows.in_place:
        parts.append(_Part("▞", _TONES[0], rows.in_place, "whole layers", units.share(rows.in_place)))
    if rows.left_out:
        parts.append(_Part("·", MUTED, rows.left_out, "left out", units.share(rows.left_out)))
        parts.append(_Part("!", "$warning", 0.0, LESS_EXACT, ""))
    lines = [
        heading("Rows", width, remark),
        _bar(parts, width),
        *_legend(parts, width),
        gauge(figures, "expert hit rate ", rows.expert_hits, width),
    ]
    if not predicted:
        lines.append(row(figures, "predictor", "not used", width))
    else:
        lines += [
            gauge(figures, "predictor recall", rows.recall, width),
            gauge(figures, "its precision   ", rows.precision, width),
        ]
        if not figures.dense:
            lines += by_layer(figures, "recall by layer", rows.recalls, width, top=1.0)
    for label, share in (("experts substituted", rows.substituted), ("experts halved", rows.dropped)):
        if share and not figures.dense:
            lines.append(row(figures, label, units.share(share), width))
    return Content("\n").join(lines)


def _split(figures: PanelFigures, rows: Rows, width: int) -> Content:
    """Where active neurons were computed if no layer shares a pool, and how to get one."""
    on_cpu = sum(layer.on_cpu is not None and layer.on_cpu > 0 for layer in rows.layers)
    known = rows.in_place is not None
    remark = f"{len(rows.layers) - on_cpu} of {len(rows.layers)} layers on GPU" if known else "not measured yet"
    parts = [
        _Part(glyph, tone, share, name, units.share(share))
        for glyph, tone, share, name in (
            ("█", _TONES[0], rows.in_place, "on GPU"),
            ("░", _TONES[3], rows.on_cpu, "on CPU"),
        )
    ]
    lines = [heading("Split", width, remark), _bar(parts, width), *_legend(parts, width)]
    if figures.loaded is not None and figures.loaded.pools is not None:
        lines.append(muted(A_POOL))
    return Content("\n").join(lines)


def link(figures: PanelFigures, width: int) -> Content:
    """The link in decode: bytes moved, speed, and time waited; blank without a pool."""
    rows = figures.rows
    if rows is None:
        return Content("")
    if rows.static:
        return Content("\n").join([heading("Link", width), muted("a split moves no rows")])
    rate, peak = rows.link_bytes_s, rows.link_peak
    lines = [
        heading("Link", width, virtual=is_virtual(figures)),
        row(figures, "moved per token", units.size(rows.moved_per_token), width),
        *_links(figures, rows.cards, width),
        row(figures, "wait per token", units.milliseconds(rows.waited_per_token), width),
        row(figures, "rate", f"{units.size_of(rate, peak)}/s", width),
    ]
    if not figures.dense:
        lines += [
            gauge(figures, "of its peak", None if rate is None or peak <= 0 else rate / peak, width),
            gauge(figures, "time in use", rows.link_busy, width),
            gauge(figures, "hidden     ", rows.link_hidden, width),
        ]
    return Content("\n").join(lines)


def memory(figures: PanelFigures, width: int) -> Content:
    """Memory in use; with a pool of rows, what the device's memory is used for, up to its budget."""
    stats, loaded, rows = figures.stats, figures.loaded, figures.rows
    held = None if stats is None else vram_bytes(stats)
    lines = [
        heading("Memory", width, NO_GPU if stats and held is None else ""),
        row(figures, "RAM, this process", units.size(stats and stats.ram_bytes), width),
        *([row(figures, "KV cache", units.size(stats and stats.kv_bytes), width)] if rows is None else []),
        gauge(figures, "context", _context(figures), width),
        *([] if stats is None or held is None else [row(figures, "VRAM", vram_words(stats), width)]),
    ]
    if rows is None or stats is None:
        if stats and stats.vram_budget and held is not None:
            lines.append(gauge(figures, "of its budget", held / stats.vram_budget, width))
        lines.append(row(figures, "resident weights", units.size(loaded and loaded.memory_bytes), width))
        return Content("\n").join(lines)
    dense = _Part("█", _TONES[0], rows.dense, "dense", units.size(rows.dense))
    up = _Part("▓", _TONES[1], rows.up, "up", units.size(rows.up))
    whole = _Part("▞", _TONES[0], rows.whole, "whole layers", units.size(rows.whole))
    kept = _Part("▚", _TONES[3], stats.kv_bytes or 0, "KV cache", units.size(stats.kv_bytes))
    used = _Part("▒", _TONES[2], rows.pool_used, "pool", "")
    free = _Part("░", MUTED, rows.pool - rows.pool_used, "", "")
    named = rows.dense + rows.up + rows.whole + (stats.kv_bytes or 0) + rows.pool
    left = max(0, (stats.vram_budget or named) - named)
    rest = _Part("·", MUTED, left, "rest of the budget", units.size(left))
    pool = Content.assemble((used.glyph, used.style), (free.glyph, free.style), (" pool, used", MUTED))
    value = units.size_of(rows.pool_used, rows.pool)
    gap = max(1, width - pool.cell_length - len(value))
    lines += [_bar([dense, up, whole, kept, used, free, rest], width), *_legend([dense, up], width)]
    lines += [_entry(part, width) for part in (whole, kept) if part is kept or rows.whole]
    if not rows.static:
        lines.append(Content.assemble(pool, " " * gap, value))
    lines += [_card(figures, number, card, width) for number, card in enumerate(rows.cards, 1)]
    if left:
        lines.append(_entry(rest, width))
    return Content("\n").join(lines)


def _links(figures: PanelFigures, cards: Sequence[CardRows], width: int) -> list[Content]:
    """What the link of each of several cards moved."""
    if figures.dense:
        return []
    return [row(figures, f"by card {n}", units.size(card.moved_per_token), width) for n, card in enumerate(cards, 1)]


def _card(figures: PanelFigures, number: int, card: CardRows, width: int) -> Content:
    """What one of several cards holds, without keys and values."""
    held = units.size(card.dense + card.up + card.whole + card.pool)
    return row(figures, f"card {number}, weights", held, width)


def _context(figures: PanelFigures) -> float | None:
    """The share of the window that the chat on the screen takes, as the bottom row shows it too."""
    if figures.stats is None or not figures.stats.context_window:
        return None
    return (figures.context_used or 0) / figures.stats.context_window


def _bar(parts: Sequence[_Part], width: int) -> Content:
    cells = stack([part.amount or 0.0 for part in parts], width)
    if not any(cells):
        return muted("┄" * width)
    return Content.assemble(*((part.glyph * count, part.style) for part, count in zip(parts, cells, strict=True)))


def _legend(parts: Sequence[_Part], width: int) -> list[Content]:
    """Two parts to a line where there is room."""
    if width < _NARROWEST_PAIR:
        return [_entry(part, width) for part in parts]
    half = (width - _GAP) // 2
    lines: list[Content] = []
    for index in range(0, len(parts), 2):
        pair = [_entry(part, half) for part in parts[index : index + 2]]
        lines.append(Content(" " * _GAP).join(pair))
    return lines


def _entry(part: _Part, width: int) -> Content:
    gap = max(1, width - 2 - len(part.name) - len(part.value)) if part.value else 0
    return Content.assemble((f"{part.glyph} ", part.style), (part.name, MUTED), " " * gap, part.value)
