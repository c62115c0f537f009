"""Stages that are tests of the suite, run by the Python at hand and in several processes.

Only pytest itself is needed: its plugins, which the project's configuration names, may not be there. A test that has
passed is not run again when the stage continues.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .driver import ROOT
from .stages import Context

_PROCESSES = 8
_FAILURES = 20  # that are told in full


class Part:
    """Runs every n-th test that has not passed yet, until the time is over, and notes how each ended.

    Every fourth test comes first: where the time does not suffice, all kernels have been seen at some sizes.
    """

    def __init__(self, results: Path, until: float, number: int, of: int) -> None:
        self._results, self._until, self._number, self._of = results, until, number, of

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Choose this process's share of what was selected."""
        passed = {line["test"] for line in read(self._results.parent) if line["outcome"] == "passed"}
        left = [item for item in items if item.nodeid not in passed]
        ordered = [item for first in range(4) for item in left[first::4]]
        mine = ordered[self._number :: self._of]
        self._note("", "collected", str(len(mine)))
        items[:] = mine

    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Leave the rest for another time once this one is over."""
        if time.time() > self._until:
            self._note(item.nodeid, "left", "")
            return True
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome."""
        if report.when == "call" or report.outcome != "passed":
            self._note(report.nodeid, report.outcome, "" if report.outcome == "passed" else str(report.longrepr))

    def _note(self, test: str, outcome: str, text: str) -> None:
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "text": text[-2000:]}) + "\n")


def kernels(context: Context) -> None:
    """The Triton kernels' own tests: on a GPU the default sample, elsewhere a few under the interpreter."""
    folder = ROOT / "tests" / "kernels"
    if not context.real:
        _run(context, "kernels", [str(folder / "test_select.py"), "-k", "triton"], {"TRITON_INTERPRET": "1"})
        return
    names = "operations", "attend", "latent_one", "state_one", "select", "listed"
    shared = [str(folder / f"test_{name}.py") for name in names]
    _run(context, "kernels", [str(folder / "triton"), *shared, "-k", "triton"], {})


def engine(context: Context) -> None:
    """All tests that are marked as needing a GPU; elsewhere those of the link, whose card is made up."""
    folder = ROOT / "tests" / "engine"
    marked = [str(path) for path in sorted(folder.rglob("test_*.py")) if "mark.gpu" in path.read_text(encoding="utf-8")]
    _run(context, "gpu-tests", [*marked, "-m", "gpu"] if context.real else [str(folder / "test_cuda_link.py")], {})


def _run(context: Context, name: str, chosen: Sequence[str], environment: dict[str, str]) -> None:
    folder = context.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    before = {line["test"] for line in read(folder) if line["outcome"] == "passed"}
    count = min(_PROCESSES, os.cpu_count() or 1) if context.real else 1
    until = time.time() + context.left() - 5
    began = time.time()
    running: list[subprocess.Popen[bytes]] = []
    for number in range(count):
        code = "import sys; from tests.card import suite_parts; sys.exit(suite_parts.part())"
        given = json.dumps([str(folder / f"{int(began)}-{number}.jsonl"), until, number, count, list(chosen)])
        running.append(_process(code, given, environment))
    noted = 0
    while any(process.poll() is None for process in running):
        time.sleep(0.2)
        if len(read(folder)) > noted:
            noted = len(read(folder))
            _tell(context, folder, before, [])
    _tell(context, folder, before, [process.returncode for process in running])


def _process(code: str, given: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Python with `tests` as a package."""
    start = f"import sys, types; t = types.ModuleType('tests'); t.__path__ = [{str(ROOT / 'tests')!r}]; "
    command = [sys.executable, "-P", "-c", start + "sys.modules['tests'] = t; " + code, given]
    # What plugins are there differs from machine to machine.
    own = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    return subprocess.Popen(command, env=own, stdout=sys.stderr)


def part() -> int:
    """What a process of `_run` runs: pytest with `Part`."""
    results, until, number, of, chosen = json.loads(sys.argv[1])
    options = ["-c", str(ROOT / "tests" / "card" / "card.ini"), "--rootdir", str(ROOT), "-q", "--no-header"]
    options += ["--import-mode=importlib", "-p", "no:cacheprovider"]
    code = pytest.main([*options, *chosen], plugins=[Part(Path(results), until, number, of)])
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else int(code)


def read(folder: Path) -> list[dict[str, Any]]:
    """All that was noted in a folder of results."""
    lines = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def _tell(context: Context, folder: Path, before: set[str], codes: Sequence[int]) -> None:
    last = {line["test"]: line for line in read(folder) if line["test"]}
    counts = Counter(line["outcome"] for line in last.values())
    failed = [line for line in last.values() if line["outcome"] == "failed"]
    crashed = [code for code in codes if code not in (0, 1)]
    context.rows.clear()
    context.notes = [f"pytest ended with {code}" for code in crashed]
    for line in failed[:_FAILURES]:
        context.notes += [f"failed: {line['test']}", "```", *line["text"].splitlines()[-8:], "```"]
    context.showed = f"{counts['passed']} tests passed, {counts['failed']} failed, {counts['skipped']} were skipped"
    context.row(
        tests=len(last),
        passed=counts["passed"],
        failed=counts["failed"],
        skipped=counts["skipped"],
        left=counts["left"],
        passed_before=len(before),
        ok=not failed and not crashed and (counts["passed"] > 0 or not codes),
    )
    if counts["left"]:
        context.unfinished = f"{counts['left']} tests are left for another run"
