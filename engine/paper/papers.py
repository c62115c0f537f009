"""The tables and figures of the five papers, as printed (assets/papers.json), and what one made here consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ...models.catalog import asset
from ...models.errors import UsageError
from ...models.typed_names import did_you_mean

Cells = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Figures in rows, of one unit or with it in the columns' names; None where there is none."""

    title: str
    columns: tuple[str, ...]
    rows: Mapping[str, Cells]

    def __post_init__(self) -> None:
        if wrong := [name for name, row in self.rows.items() if len(row) != len(self.columns)]:
            raise ValueError(f"{self.title}: row {wrong[0]} does not have {len(self.columns)} figures")


@dataclass(frozen=True, slots=True)
class Entry:
    """A table or figure of a paper.

    Attributes:
        id: such as "floe-t8". paper: its short name. shows: in words. setup: what it was measured on.
        says: what the text says of figures that are only drawn. printed: figures that are printed.
        text: of assets/, which is read where a person gives none; "": as for eval.
        tasks: of lm-evaluation-harness that it is about, with commas between them; "" where it is about none.
        why_not: why floe-chat cannot make it; "" if it can.
    """

    id: str
    paper: str
    shows: str
    setup: str = ""
    says: str = ""
    printed: tuple[Grid, ...] = ()
    text: str = ""
    tasks: str = ""
    why_not: str = ""

    @property
    def called(self) -> str:
        """Such as "FloE table 8"."""
        number = self.id.rpartition("-")[2]
        return f"{self.paper} {'table' if number[0] == 't' else 'figure'} {number[1:]}"


@dataclass(frozen=True, slots=True)
class Made:
    """One made here.

    Attributes:
        here: what it was measured on, and how that differs from the paper's way, in words.
        grids: its figures. plot: series of points (x, y); empty: the first grid is plotted. axes: names of x and y.
        heat: a map, rows of shares from 0 to 1. notes: what else to know.
    """

    here: str
    grids: tuple[Grid, ...]
    plot: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict[str, Sequence[tuple[float, float]]])
    axes: tuple[str, str] = ("", "")
    heat: Mapping[str, Sequence[float]] = field(default_factory=dict[str, Sequence[float]])
    notes: tuple[str, ...] = ()


@cache
def entries() -> dict[str, Entry]:
    """All of them by id, in the papers' order."""
    told: Any = json.loads(asset("papers.json").read_text(encoding="utf-8"))
    called = {name: paper["called"] for name, paper in told["papers"].items()}
    return {fields["id"]: _entry(called, fields) for fields in told["tables"]}


def _entry(called: Mapping[str, str], fields: Mapping[str, Any]) -> Entry:
    printed = tuple(
        Grid(grid["title"], tuple(grid["columns"]), {name: tuple(row) for name, row in grid["rows"].items()})
        for grid in fields.get("printed", ())
    )
    words = {name: str(value) for name, value in fields.items() if name != "printed"}
    return Entry(**words, paper=called[words["id"].partition("-")[0]], printed=printed)


def entry(name: str) -> Entry:
    """The one of this id.

    Raises:
        UsageError: there is none, or it cannot be made here; says why.
    """
    found = entries().get(name.lower())
    if found is None:
        hint = did_you_mean(name.lower(), list(entries())) or "`floe-chat paper` lists them."
        raise UsageError(f"There is no table or figure {name!r}", "", hint)
    if found.why_not:
        raise UsageError(f"{found.called} cannot be made here", found.why_not, "`floe-chat paper` lists all others.")
    return found
