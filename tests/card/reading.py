"""What a run on a card says for the project: lines for BENCHMARKS.md, and its name among the measured cards."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .driver import ROOT
from .report import markdown

FIGURES = "bandwidth", "experts", "link", "decode"  # the stages whose rows are figures, or how their names begin


def run(path: Path) -> int:
    """Print the lines, and add the card to assets/figures.json; the exit code."""
    try:
        whole: Any = json.loads(path.read_text(encoding="utf-8"))
        facts, stages = whole["facts"], whole["stages"]
        card, place = facts["gpu"], facts["place"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{path} is no card.json of `make card`: {error}", file=sys.stderr)
        return 2
    if place == "virtual":
        print(f"{path} is of a run without a card, so there is nothing to report.", file=sys.stderr)
        return 2
    measured = [stage for stage in stages if stage["state"] == "passed" and stage["stage"].startswith(FIGURES)]
    date = max((stage["began"] for stage in stages), default=0.0)
    day = datetime.fromtimestamp(date, UTC).date().isoformat()
    print(f"## On a card\n\n{card}, {day}, `make card`.\n")
    print(markdown({"facts": facts, "stages": measured}))
    if not any(stage["stage"] == "bandwidth" for stage in measured):
        print("Bandwidth was not measured, so plans go on saying that no card was.", file=sys.stderr)
        return 1
    file = ROOT / "assets" / "figures.json"
    figures: Any = json.loads(file.read_text(encoding="utf-8"))
    entry = figures["cards"]
    entry |= {"values": sorted({*entry["values"], card}), "date": day, "machine": card}
    file.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0
