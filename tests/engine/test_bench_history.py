"""What is kept of benchmarks, and when something is called slower: made-up runs only."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from floe_chat.engine.bench import history
from floe_chat.engine.machine.hardware import machine_id


def row(name: str, ms: float, **more: Any) -> dict[str, Any]:
    nothing = {"spread": 0.02, "floor": None, "of_floor": None, "peer": None}
    return {"name": name, "ms": ms, **nothing, **more}


def entry(version: str, *rows: dict[str, Any], **facts: Any) -> dict[str, Any]:
    told = {"model": "mixtral", "threads": 2} | facts
    sections = [{"title": "One token", "rows": list(rows)}]
    return {"version": version, "bench": "decode", "device": "cpu", "facts": told, "sections": sections}


def test_what_got_slower_than_in_the_last_release_is_named() -> None:
    before = [entry("0.1.0", row("Balanced", 2.0)), entry("0.1.0", row("Balanced", 3.1), row("Fast", 2.0))]
    verdict = history.compare(entry("0.2.0", row("Balanced", 4.0), row("Fast", 2.1)), before)
    assert verdict.version == "0.1.0"
    assert verdict.told() == ("regression: One token: Balanced was 3.1 ms in 0.1.0, now 4 ms",)


def test_nothing_slower_and_nothing_to_compare_with_are_said() -> None:
    now = entry("0.2.0", row("Balanced", 3.1))
    assert "than in 0.1.0" in history.compare(now, [entry("0.1.0", row("Balanced", 3.0))]).told()[0]
    same = entry("0.2.0", row("Balanced", 1.0))
    assert "nothing to compare" in history.compare(now, [same]).told()[0]


@pytest.mark.parametrize(
    "other",
    [
        entry("0.1.0", row("Balanced", 1.0), threads=1),
        entry("0.1.0", row("Balanced", 1.0), model="demo"),
        {**entry("0.1.0", row("Balanced", 1.0)), "device": "cuda"},
        {**entry("0.1.0", row("Balanced", 1.0)), "bench": "prefill"},
    ],
    ids=["threads", "model", "device", "bench"],
)
def test_only_runs_of_the_same_kind_are_compared(other: dict[str, Any]) -> None:
    assert history.compare(entry("0.2.0", row("Balanced", 9.0)), [other]).version is None


@pytest.mark.parametrize(
    ("old", "new", "slower"),
    [
        (row("a", 10), row("a", 11.4), False),  # within 15 %
        (row("a", 10), row("a", 11.6), True),
        (row("a", 10, spread=0.5), row("a", 14), False),  # within the spread
        (row("a", 10, spread=0.5), row("a", 16), True),
        (row("a", 10, spread=None), row("a", 12), True),  # measured once
        # The machine was slower, the share of what it delivers was not.
        (row("a", 10, floor="f", of_floor=0.6), row("a", 20, floor="f", of_floor=0.6), False),
        (row("a", 10, floor="f", of_floor=0.6), row("a", 10, floor="f", of_floor=0.3), True),
    ],
)
def test_slower_is_more_than_the_spread_and_15_percent(old: dict[str, Any], new: dict[str, Any], slower: bool) -> None:
    assert bool(history.compare(entry("2", new), [entry("1", old)]).regressions) is slower


def test_yardsticks_are_not_ours_to_make_slower() -> None:
    old = [
        row("read (floor)", 1),
        row("llama.cpp", 1),
        row("ours", 1, floor="read (floor)", of_floor=1.0, peer="llama.cpp"),
        row("chain", 1, peer="ours"),
    ]
    new = [{**one, "ms": 9, "of_floor": one["of_floor"] and 0.1} for one in old]
    told = history.compare(entry("2", *new), [entry("1", *old)]).regressions
    assert [line.split()[2] for line in told] == ["ours", "chain"]


def test_runs_are_kept_for_the_users_eyes_only(own_folders: Path) -> None:
    file = history.file_of(machine_id(), "decode")
    assert own_folders in file.parents and machine_id() == machine_id()
    runs = [entry(str(number), row("a", 1.0)) for number in range(3)]
    for run in runs:
        history.append(file, run)
    assert history.read(file) == runs
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 or sys.platform == "win32"


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    whole = entry("1", row("a", 1.0))
    history.append(file, whole)
    with file.open("ab") as torn:
        torn.write(b'[1]\n{}\nnull\n{"version": 3}\n\xff\xfe\n' + json.dumps(entry("1", row("a", 0.0))).encode())
        torn.write(b'\n{"version": "2", "ben')
    assert history.read(file) == [whole]
    history.append(file, entry("3", row("a", 1.0)))
    assert [run["version"] for run in history.read(file)] == ["1", "3"]
    assert history.read(tmp_path / "nothing") == []


def test_two_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    file, each = tmp_path / "runs.jsonl", 40
    code = (
        "import sys; from pathlib import Path; from floe_chat.engine.bench import history\n"
        "rows = [{'name': 'x' * 40, 'ms': 1.0, 'spread': 0, 'floor': None, 'of_floor': None, 'peer': None}] * 200\n"
        f"for _ in range({each}): history.append(Path(sys.argv[1]), {{'version': sys.argv[2], 'bench': 'b', "
        "'device': 'cpu', 'facts': {}, 'sections': [{'title': 't', 'rows': rows}]})\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", code, str(file), version]) for version in ("1", "2")]
    assert [process.wait() for process in started] == [0, 0]
    assert sorted(run["version"] for run in history.read(file)) == ["1"] * each + ["2"] * each
