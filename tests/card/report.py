"""The results of stages: what they ran on, their files, and all of them as Markdown."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .driver import NEEDED

PARTS = ("kernels", "engine", "models", "tests")


def missing() -> str:
    """What no stage can run without, and how to get it; "" where all is there."""
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return ""
    names = " ".join(lacking)
    get = f"python3 -m pip download --no-deps --dest build/wheels {names}"
    return f"This Python lacks {', '.join(lacking)}. Install them, or bring their wheels in build/wheels: {get}"


def facts(place: str, root: Path) -> dict[str, str]:
    """What the stages run on. `missing` says that there is no card, "" where there is."""
    import torch
    import triton

    found = {"missing": "", "python": platform.python_version(), "torch": torch.__version__}
    found |= {"triton": triton.__version__, "source": _source(root), "place": place}
    if place == "virtual":
        return found | {"gpu": "none: tiny sizes on what stands in for a card, so no figure says anything about one"}
    if not torch.cuda.is_available():
        why = "torch sees no CUDA device"
        return {"missing": f"There is no GPU here: {why}. --place virtual tries the stages without one."}
    device = torch.cuda.get_device_properties(0)
    return found | {
        "gpu": f"{device.name}, {device.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(device.multi_processor_count),
        "clock": _asked("clocks.max.sm"),
        "capability": f"{device.major}.{device.minor}",
        "cuda": str(torch.version.cuda),
        "driver": _asked("driver_version"),
        "cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
    }


def file_of(out: Path, stage: str) -> Path:
    """The file with a stage's result."""
    return out / f"{stage}.json"


def read(out: Path, stage: str) -> dict[str, Any] | None:
    """A stage's last result."""
    try:
        return json.loads(file_of(out, stage).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write(out: Path, stage: str, values: Mapping[str, Any]) -> None:
    """Put these values into a stage's result, which is there as a whole at any moment."""
    _replace(file_of(out, stage), json.dumps((read(out, stage) or {}) | dict(values), indent=1) + "\n")


def write_all(out: Path, results: Path, facts: Mapping[str, str]) -> None:
    """All results in two files of the folder `results`: card.json, and card.md for people."""
    whole = {"facts": dict(facts), "stages": _results(out, facts)}
    _replace(results / "card.json", json.dumps(whole, indent=1) + "\n")
    _replace(results / "card.md", markdown(whole) + "\n")


def markdown(whole: Mapping[str, Any]) -> str:
    """The results of a machine with one source: what each stage showed, then their tables as in BENCHMARKS.md."""
    stages = whole["stages"]
    lines = [", ".join(f"{name} {value}" for name, value in whole["facts"].items() if name != "missing"), ""]
    lines += [*(f"- {line(found)}" for found in stages), ""]
    for found in stages:
        lines += [f"### {found['stage']}: {found['state']}", ""]
        lines += [*_table(found["rows"]), *found["notes"], ""]
    return "\n".join(lines)


def line(found: Mapping[str, Any]) -> str:
    """What a stage showed and what follows, in one line."""
    parts = [found.get("showed", ""), found["reason"], found.get("next", "")]
    said = ". ".join(part.strip().partition("\n")[0].removesuffix(".") for part in parts if part)
    return f"{found['stage']}: {found['state']} in {found.get('seconds', 0):.0f} s. {said}".strip()


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _results(out: Path, facts: Mapping[str, str]) -> list[dict[str, Any]]:
    found = [read(out, path.stem) for path in out.glob("*.json")]
    mine = [each for each in found if each and "began" in each and each.get("facts") == facts]
    return sorted(mine, key=lambda each: each["began"])


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return [*lines, *(f"| {' | '.join(_cell(row.get(name)) for name in columns)} |" for row in rows), ""]


def _cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "**no**"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        case _:
            return str(value)


def _source(root: Path) -> str:
    """Which source this is: changes with any file of it."""
    import hashlib

    digest = hashlib.sha256()
    for part in PARTS:
        for path in sorted((root / part).rglob("*")):
            if path.suffix in (".py", ".cpp", ".h", ".inl", ".json") and "__pycache__" not in path.parts:
                digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _asked(what: str) -> str:
    """What the driver says of the first card."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ran.stdout.splitlines()[0].strip()
