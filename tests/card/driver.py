"""Everything that has to be seen on a real GPU, stage by stage, each in a process of its own that may hang or crash.

It needs no network and no model: weights are random, or the demo's. A stage takes three minutes or less and is not
run again once it has passed on this GPU with this source, so a run that ends early continues where it was. Python,
torch and Triton are those that run this file; what else is missing is named, and the C++ library is compiled if it is
not there.

    make card                                     all stages
    python3 tests/card/driver.py tokens link      two of them
    python3 tests/card/driver.py --list
    python3 tests/card/driver.py --place virtual  tiny sizes on what stands in for a GPU, to try the stages

Prints the results as Markdown, and writes them with all figures to OUT/card.json. Exit codes: 0 all is well, 1 a stage
failed, 2 usage, 3 a stage has more to do (run it again), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
LIMIT_S = 180
GRACE_S = 30
EXITS = {"passed": 0, "skipped": 0, "unfinished": 3}


def main() -> int:
    """Run the stages that were asked for."""
    given = _arguments()
    _make_importable(given.out)
    stages: Any = _module("stages")
    if given.one:
        return stages.run_one(given.one, given.place, given.out, given.seconds)
    if given.list:
        for stage in stages.STAGES:
            print(f"{stage.name:<12} {stage.about}")
        return 0
    if unknown := [name for name in given.stage if name not in {stage.name for stage in stages.STAGES}]:
        print(f"There is no stage {unknown[0]!r}; --list names them.", file=sys.stderr)
        return 2
    return _run([stage.name for stage in stages.STAGES if not given.stage or stage.name in given.stage], given)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", help="all, if none is given")
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("--place", choices=["cuda", "virtual"], default="cuda")
    parser.add_argument("--seconds", type=int, default=LIMIT_S, help=f"limit of one stage, default {LIMIT_S}")
    parser.add_argument("--grace", type=int, default=GRACE_S, help=f"seconds beyond that limit, default {GRACE_S}")
    parser.add_argument("--again", action="store_true", help="also the stages that have passed")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "card", help="folder for results and test packs")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a stage's own process is called with
    given = parser.parse_args()
    given.out = given.out.resolve()
    if given.seconds < 1:
        parser.error("--seconds has to be at least 1")
    return given


def _run(names: list[str], given: argparse.Namespace) -> int:
    """Run these stages and print the report of all stages that have ever been run here."""
    report: Any = _module("report")
    facts = report.facts(given.place, ROOT)
    if facts["missing"]:
        print(facts["missing"], file=sys.stderr)
        return 1
    if built := _build_library():
        print(built, file=sys.stderr)
    states: list[str] = []
    for name in names:
        found = report.read(given.out, name)
        if found and found["state"] in ("passed", "skipped") and found["facts"] == facts and not given.again:
            print(f"{name}: {found['state']} before, {found['at']}", file=sys.stderr)
        else:
            print(f"{name} ...", file=sys.stderr, flush=True)
            found = _stage(name, given, facts, report)
            print(f"{name}: {found['state']} in {found['seconds']:.0f} s {found['reason']}".rstrip(), file=sys.stderr)
        states.append(found["state"])
    print(report.markdown(given.out, facts))
    report.write_all(given.out, facts)
    return 1 if "failed" in states else max(EXITS[state] for state in states)


def _stage(name: str, given: argparse.Namespace, facts: dict[str, Any], report: Any) -> dict[str, Any]:
    """Run a stage in a process of its own; returns its result, which is in its file too."""
    began = time.monotonic()
    command = [sys.executable, "-P", __file__, "--one", name, "--place", given.place, "--out", str(given.out)]
    path = report.file_of(given.out, name)
    path.unlink(missing_ok=True)
    process = subprocess.Popen([*command, "--seconds", str(given.seconds)], start_new_session=True, stdout=sys.stderr)
    reason = ""
    try:
        code = process.wait(given.seconds + given.grace)
        if code and not path.exists():
            reason = f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
    except subprocess.TimeoutExpired:
        reason = f"it did not end within {given.seconds + given.grace} s"
    finally:
        _end(process)
    found = report.read(given.out, name) or {"state": "failed", "reason": reason, "rows": [], "notes": []}
    found |= {"stage": name, "facts": facts, "seconds": time.monotonic() - began, "at": time.strftime("%Y-%m-%d %H:%M")}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started."""
    with contextlib.suppress(ProcessLookupError):  # all of them ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _make_importable(out: Path) -> None:
    """`floe_chat` from these folders, for this process and its children, where it is not installed; and `tests`.

    Without the project's root on the path: there the folder `kernels` would shadow Hugging Face's package.
    """
    if importlib.util.find_spec("floe_chat") is None:
        package = out / "package" / "floe_chat"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__path__ = [{str(ROOT)!r}]\n", encoding="utf-8")
        sys.path.insert(0, str(package.parent))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")]))
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"tests.card.{name}")


def _build_library() -> str:
    """Compile the C++ library where it is missing or older than its sources; why not, where that fails."""
    folder = ROOT / "kernels" / "cpu"
    target = folder / "_floe.so"
    sources = [path for kind in ("cpp", "h", "inl") for path in folder.rglob(f"*.{kind}")]
    if target.exists() and target.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
        return ""
    print("Compiling the C++ library ...", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-P", str(folder / "build.py"), str(target)], capture_output=True, text=True)
    return f"The C++ library could not be compiled: {done.stderr.strip()[-400:]}" if done.returncode else ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
