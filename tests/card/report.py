"""The results of stages: what they ran on, their files, and all of them as Markdown."""

from __future__ import annotations

import importlib.util
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEEDED = (
    *("torch", "triton", "numpy", "safetensors", "psutil", "platformdirs", "msgspec"),
    *("transformers", "tokenizers", "jinja2", "pytest"),
)
PARTS = ("kernels", "engine", "models", "tests")


def facts(place: str, root: Path) -> dict[str, str]:
    """What the stages run on. `missing` says what they cannot run without, "" where all is there.

    Raises nothing: a machine without torch is told so by `missing`.
    """
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        names = " ".join(lacking)
        return {"missing": f"This Python lacks {', '.join(lacking)}. Install them: python3 -m pip install {names}"}
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
        "capability": f"{device.major}.{device.minor}",
        "cuda": str(torch.version.cuda),
        "driver": _driver(),
        "cpu": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
    }


def file_of(out: Path, stage: str) -> Path:
    """The file with a stage's result."""
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{stage}.json"


def read(out: Path, stage: str) -> dict[str, Any] | None:
    """A stage's last result."""
    try:
        return json.loads(file_of(out, stage).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_all(out: Path, facts: Mapping[str, str]) -> None:
    """All results in one file, card.json."""
    whole = {"facts": dict(facts), "stages": _results(out, facts)}
    (out / "card.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def markdown(out: Path, facts: Mapping[str, str]) -> str:
    """The results on this machine with this source, as BENCHMARKS.md has tables."""
    lines = ["", ", ".join(f"{name} {value}" for name, value in facts.items() if name != "missing"), ""]
    for found in _results(out, facts):
        lines += [f"### {found['stage']}: {found['state']}", ""]
        lines += [found["reason"], ""] if found["reason"] else []
        lines += [*_table(found["rows"]), *found["notes"], ""]
    return "\n".join(lines)


def _results(out: Path, facts: Mapping[str, str]) -> list[dict[str, Any]]:
    found = [read(out, path.stem) for path in sorted(out.glob("*.json"), key=lambda path: path.stat().st_mtime)]
    return [each for each in found if each and "stage" in each and each.get("facts") == facts]


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


def _driver() -> str:
    try:
        ran = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return ran.stdout.splitlines()[0].strip()
