"""Everything that has to be seen on a real GPU, stage by stage, each in a process of its own that may hang or crash.

It needs no network and no model: weights are random, or the demo's. The stages of a run take 12 minutes; what decides
whether the others are worth anything comes first, and each ends with a line: what it showed, and what to do next. A
stage that has passed on this GPU with this source is not run again, so a run that ends early continues where it was.
Python, torch and Triton are the ones that run this file; what else is missing is taken from wheels or named, and the
C++ library is compiled if it is not there.

    make card                                     all stages that have a part of the 12 minutes
    make card MINUTES=8 RESULTS=FOLDER            as many as fit; card.json and card.md there
    make card REPORT=FOLDER/card.json             what goes into BENCHMARKS.md and assets/figures.json
    python3 tests/card/driver.py tokens link      two of them
    python3 tests/card/driver.py --list
    python3 tests/card/driver.py --place virtual  tiny sizes on what stands in for a GPU, to try the stages

Prints the results as Markdown; card.json and card.md are written again after every test, so a run may be stopped at any
moment. Exit codes: 0 all is well, 1 a stage failed, 2 usage, 3 a stage has more to do (run it again), 130 and 143
stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NEEDED = (
    *("torch", "triton", "numpy", "safetensors", "psutil", "platformdirs", "msgspec"),
    *("transformers", "tokenizers", "jinja2", "pytest"),
)
LIMIT_S = 180
GRACE_S = 10
LEAST_S = 15
EXITS = {"passed": 0, "skipped": 0, "unfinished": 3}


def main() -> int:
    """Run the stages that were asked for."""
    given = _arguments()
    if not given.one:
        _take_wheels(given.wheels, given.out / "site")
    _make_importable(given.out)
    if given.report:
        reading: Any = _module("reading")
        return reading.run(given.report)
    missing: str = _module("report").missing()
    if missing:
        print(missing, file=sys.stderr)
        return 1
    stages: Any = _module("stages")
    if given.one:
        return stages.run_one(given.one, given.place, given.out, given.seconds)
    if given.list:
        for stage in stages.STAGES:
            print(f"{stage.name:<12} {f'{stage.seconds} s' if stage.seconds else '':<6} {stage.about}")
        return 0
    if unknown := [name for name in given.stage if name not in {stage.name for stage in stages.STAGES}]:
        print(f"There is no stage {unknown[0]!r}; --list names them.", file=sys.stderr)
        return 2
    wanted = [stage for stage in stages.STAGES if stage.name in given.stage or (not given.stage and stage.seconds)]
    signal.signal(signal.SIGTERM, _terminated)
    return _Run(given).run(wanted)


def _terminated(_signal: int, _frame: Any) -> None:
    sys.exit(143)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", nargs="*", help="those of a run of 12 minutes, if none is given")
    parser.add_argument("--list", action="store_true", help="name the stages")
    parser.add_argument("--place", choices=["cuda", "virtual"], default="cuda")
    parser.add_argument("--minutes", type=float, default=12, help="limit of the whole run, default 12")
    parser.add_argument("--seconds", type=int, help=f"limit of one stage, else its own, or {LIMIT_S}")
    parser.add_argument("--grace", type=int, default=GRACE_S, help=f"seconds beyond that limit, default {GRACE_S}")
    parser.add_argument("--again", action="store_true", help="also the stages that have passed")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "card", help="folder for stages and test packs")
    parser.add_argument("--results", type=Path, help="folder for card.json and card.md, else that of --out")
    parser.add_argument("--wheels", type=Path, default=ROOT / "build" / "wheels", help="folder of wheels of what lacks")
    parser.add_argument("--report", type=Path, help="read this card.json instead of running anything")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # what a stage's own process is called with
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.results = (given.results or given.out).resolve()
    if given.minutes <= 0 or (given.seconds is not None and given.seconds < 1):
        parser.error("--minutes and --seconds have to be at least 1")
    return given


@dataclass(slots=True)
class _Started:
    """A stage's process."""

    stage: Any
    process: subprocess.Popen[bytes]
    began: float
    limit: float


class _Run:
    """Runs stages, some of them at the same time, and keeps what they have found."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._report = given, _module("report")
        self._until = time.monotonic() + 60 * given.minutes
        self._facts: dict[str, str] = {}
        self._going: list[_Started] = []
        self._states: list[str] = []
        self._written = 0

    def run(self, wanted: list[Any]) -> int:
        """Run these stages and print the report of all stages that have ever been run here; the exit code."""
        self._facts = self._report.facts(self._given.place, ROOT)
        if self._facts["missing"]:
            print(self._facts["missing"], file=sys.stderr)
            return 1
        if built := _build_library():
            print(built, file=sys.stderr)
        try:
            for stage in sorted(wanted, key=lambda stage: not stage.meanwhile):  # the longest of all begins first
                self._start(stage)
            self._wait(lambda: not self._going)
        finally:
            for started in list(self._going):
                self._ended(started, "unfinished", "it was stopped")
            self._write()
        print((self._given.results / "card.md").read_text(encoding="utf-8"))
        return 1 if "failed" in self._states else max((EXITS[state] for state in self._states), default=0)

    def _start(self, stage: Any) -> None:
        found = self._report.read(self._given.out, stage.name)
        same = found and found.get("facts") == self._facts and not self._given.again
        if same and found["state"] in ("passed", "skipped"):
            print(f"{stage.name}: {found['state']} before, {found['at']}", file=sys.stderr)
            self._states.append(found["state"])
            return
        if stage.alone:
            self._wait(lambda: not self._going)
        limit = min(self._given.seconds or stage.seconds or LIMIT_S, self._until - time.monotonic() - self._given.grace)
        if limit < min(LEAST_S, self._given.seconds or LEAST_S):
            print(f"{stage.name}: no time was left. Run the same command again", file=sys.stderr)
            self._states.append("unfinished")
            return
        print(f"{stage.name} ...", file=sys.stderr, flush=True)
        self._report.file_of(self._given.out, stage.name).unlink(missing_ok=True)
        if not found or found.get("facts") != self._facts:  # of another card or source: its tests have passed nothing
            shutil.rmtree(self._given.out / stage.name, ignore_errors=True)
        command = [sys.executable, "-P", __file__, "--one", stage.name, "--place", self._given.place]
        command += ["--out", str(self._given.out), "--seconds", str(int(limit))]
        began = {"stage": stage.name, "facts": self._facts, "at": time.strftime("%Y-%m-%d %H:%M"), "began": time.time()}
        empty = {"state": "unfinished", "reason": "it was still starting", "rows": [], "notes": []}
        self._report.write(self._given.out, stage.name, {**began, **empty})
        process = subprocess.Popen(command, start_new_session=True, stdout=sys.stderr)
        started = _Started(stage, process, time.monotonic(), limit + self._given.grace)
        self._going.append(started)
        if not stage.meanwhile:
            self._wait(lambda: started not in self._going)

    def _wait(self, over: Callable[[], bool]) -> None:
        """Look after the stages that are running until `over`, and write what they find."""
        while not over():
            for started in list(self._going):
                code = started.process.poll()
                if code is not None:
                    how = f"signal {-code}" if code < 0 else f"exit code {code}"
                    self._ended(started, "failed", f"its process ended with {how}" if code else "")
                elif time.monotonic() - started.began > started.limit:
                    self._ended(started, "failed", f"it did not end within {started.limit:.0f} s")
            self._write()
            time.sleep(0.2)

    def _ended(self, started: _Started, state: str, reason: str) -> None:
        """End a stage and what it started. reason: why it is in this state; "" if it ended by itself."""
        self._going.remove(started)
        with contextlib.suppress(ProcessLookupError):  # all of them ended by themselves
            os.killpg(started.process.pid, signal.SIGKILL)
        started.process.wait()
        values: dict[str, Any] = {"seconds": time.monotonic() - started.began}
        if reason:
            values |= {"state": state, "reason": reason}
        found = (self._report.read(self._given.out, started.stage.name) or {}) | values
        follows = {"failed": started.stage.otherwise, "unfinished": "The same command continues it"}
        follows["passed"] = started.stage.then
        values["next"] = follows.get(found["state"], "")
        self._report.write(self._given.out, started.stage.name, values)
        self._states.append(found["state"])
        print(self._report.line(found | values), file=sys.stderr, flush=True)

    def _write(self) -> None:
        """Write all results where a stage has found something new."""
        files = [self._report.file_of(self._given.out, path.stem) for path in self._given.out.glob("*.json")]
        newest = max((path.stat().st_mtime_ns for path in files if path.stem != "card"), default=0)
        if newest != self._written:
            self._written = newest
            self._report.write_all(self._given.out, self._given.results, self._facts)


def _take_wheels(folder: Path, site: Path) -> None:
    """Put what this Python lacks on the path, of the wheels of a folder; without pip, which may not be there."""
    here = (f"cp{sys.version_info.major}{sys.version_info.minor}-", "py3-none", "abi3")
    for name in NEEDED:
        if importlib.util.find_spec(name) is not None:
            continue
        for wheel in sorted(folder.glob(f"{name}-*.whl")):
            if any(tag in wheel.name for tag in here):
                zipfile.ZipFile(wheel).extractall(site)
    if site.is_dir():
        _put_on_path(site)


def _put_on_path(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def _make_importable(out: Path) -> None:
    """`floe_chat` from these folders, for this process and its children, where it is not installed; and `tests`.

    Without the project's root on the path: there the folder `kernels` would shadow Hugging Face's package.
    """
    if importlib.util.find_spec("floe_chat") is None:
        package = out / "package" / "floe_chat"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"__path__ = [{str(ROOT)!r}]\n", encoding="utf-8")
        _put_on_path(package.parent)
    tests = types.ModuleType("tests")
    tests.__path__ = [str(ROOT / "tests")]
    sys.modules["tests"] = tests


def _module(name: str) -> types.ModuleType:
    return importlib.import_module(f"tests.card.{name}")


def _build_library() -> str:
    """Compile the C++ library where it is missing or not of these sources; why not, where that fails.

    Of which sources it is stands in a file next to it, since copied files may look newer than they are.
    """
    folder = ROOT / "kernels" / "cpu"
    target, of = folder / "_floe.so", folder / "_floe.sources"
    sources = sorted(path for kind in ("cpp", "h", "inl") for path in folder.rglob(f"*.{kind}"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    if target.exists():
        if of.exists() and of.read_text(encoding="utf-8") == digest:
            return ""
        if target.stat().st_mtime >= max(path.stat().st_mtime for path in sources):
            of.write_text(digest, encoding="utf-8")
            return ""
    print("Compiling the C++ library ...", file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, "-P", str(folder / "build.py"), str(target)], capture_output=True, text=True)
    if done.returncode:
        return f"The C++ library could not be compiled: {done.stderr.strip()[-400:]}"
    of.write_text(digest, encoding="utf-8")
    return ""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
