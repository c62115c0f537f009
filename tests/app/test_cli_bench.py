"""`floe-chat bench`: a table and a JSON line on stdout, progress on stderr, and what it refuses."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.app.cli.bench.table import text
from floe_chat.engine.bench import synthetic
from floe_chat.engine.bench.measure import ResultTable, Row, Section
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.models.errors import UsageError

from ..helpers import explained, run_cli

QUICK = ("bench", "kernels", "--device", "cpu", "--quick", "--runs", "2", "--threads", "1")
ROW_FIELDS = {
    "name": str,
    "ms": float,
    "runs": int,
    "spread": float | None,
    "noisy": bool,
    "gb_s": float | None,
    "floor": str | None,
    "of_floor": float | None,
    "peer": str | None,
    "speedup": float | None,
    "tokens_s": float | None,
    "note": str,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that take no time, for every model."""

    def tiny(_name: str) -> Shapes:
        return Shapes(128, 256, experts=2, tokens=2, cache=0)

    monkeypatch.setattr(synthetic, "shapes_of", tiny)


def check_fields(fields: dict[str, Any]) -> None:
    assert set(fields) == {"version", "bench", "device", "facts", "sections", "notes", "history"}
    assert set(fields["history"]) == {"compared_with", "regressions"}
    assert (fields["bench"], fields["device"]) == ("kernels", "cpu")
    assert {"kernels", "reason", "cpu", "threads", "pages", "runs"} <= set(fields["facts"])
    assert fields["facts"]["threads"] == 1 and fields["facts"]["runs"] == 2
    rows = [row for section in fields["sections"] for row in section["rows"]]
    assert rows and all(set(section) == {"title", "rows", "other_cores"} for section in fields["sections"])
    for row in rows:
        assert set(row) == set(ROW_FIELDS)
        assert all(isinstance(row[name], kind) for name, kind in ROW_FIELDS.items()), row


def test_the_table_comes_first_and_json_is_the_last_line() -> None:
    ran = run_cli(*QUICK)
    assert (ran.code, ran.err) == (0, "")
    *lines, last = ran.out.splitlines()
    fields = json.loads(last)
    check_fields(fields)
    table = "\n".join(lines)
    assert table.index(fields["facts"]["reason"].split()[0]) < table.index("spread")
    for section in fields["sections"]:
        assert section["title"] in table and all(row["name"] in table for row in section["rows"])


def test_progress_goes_to_a_terminals_stderr_and_is_wiped() -> None:
    ran = run_cli(*QUICK, "--json", terminal=True)
    assert "round 5 of 5" in ran.err and ran.err.endswith(" \r") and "\n" not in ran.err
    check_fields(json.loads(ran.out))


@pytest.mark.parametrize(
    "options",
    [["--threads", "0"], ["--threads", "9999"], ["--runs", "0"], ["--runs", "x"], ["--device", "tpu"], ["--nonesuch"]],
    ids=" ".join,
)
def test_bad_options_are_usage_errors(options: list[str]) -> None:
    explained(run_cli("bench", "kernels", "--device", "cpu", *options), 2)


COMMANDS = ("kernels", "transfer", "decode", "prefill", "offload")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command: str) -> None:
    ran = run_cli("bench", command, "--help")
    assert ran.code == 0 and f"Example: floe-chat bench {command}" in ran.out
    assert command in run_cli("bench", "--help").out


def test_a_gpu_that_is_not_there_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = explained(run_cli("bench", "kernels", "--device", "cuda"), 2)
    assert "CUDA" in told and "--device cpu" in told


def test_an_answer_is_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []

    def run(_pack: Path, _name: str, text: str, _cards: object, **_options: object) -> None:
        seen.append(text)
        raise UsageError("The text has 3 tokens", "12 are needed.", "Give fewer with --tokens.")

    monkeypatch.setattr("floe_chat.engine.bench.cards.offload.run", run)
    answer = tmp_path / "answer.md"
    answer.write_text("An answer", encoding="utf-8")
    assert "12 are needed" in explained(run_cli("bench", "offload", "--trace", str(answer)), 2)
    assert seen == ["An answer"]
    assert "cannot be read" in explained(run_cli("bench", "offload", "--trace", str(tmp_path / "none")), 2)


@pytest.mark.parametrize("options", [["--threads", "1"], ["--runs", "3"]], ids=" ".join)
def test_a_gpu_has_no_threads(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "--device cpu" in explained(run_cli("bench", "kernels", *options), 2)


def test_a_gpu_is_measured_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def measured(*, quick: bool, **_rest: object) -> ResultTable:
        asked.append(quick)
        return ResultTable("kernels", "cuda", {"gpu": "Some Card"}, (), ())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("floe_chat.engine.bench.kernels.gpu.run", measured)
    ran = run_cli("bench", "kernels", "--quick")
    assert (ran.code, asked) == (0, [True]) and "Some Card" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["device"] == "cuda"


def test_the_table_fits_and_marks_what_is_noisy() -> None:
    plain = Row("read (floor)", 0.0123, 5, 0.02, False, 33.333, None, None, None, None, None)
    noisy = Row("60 % sparse, bfloat16 x", 1234.5, 5, 0.23, True, 0.0004, "a", 0.5, "dense int4", 1.8, None)
    once = Row("plain torch", 12.0, 1, None, False, None, None, None, None, None, 1234.0, "goal: less")
    reason = "plain torch, because " + "one thing after another " * 10
    shown = text(ResultTable("kernels", "cpu", {"reason": reason}, (Section("All", (plain, noisy, once)),), (reason,)))
    lines = shown.splitlines()
    assert max(map(len, lines)) <= 100
    assert any("23 % !" in line and "1.80x dense int4" in line and "1.23 s" in line for line in lines)
    assert any("0.0123 ms" in line and "33.3 GB/s" in line and "!" not in line for line in lines)
    assert any("one run" in line and "1,230 tok/s" in line and line.endswith("goal: less") for line in lines)


@pytest.mark.parametrize(("cores", "warned"), [(None, False), (0.1, False), (0.94, True)])
def test_a_section_that_others_disturbed_says_so(cores: float | None, warned: bool) -> None:
    quiet = Row("read (floor)", 1.0, 5, 0.0, False, 30.0, None, None, None, None, None)
    shown = text(ResultTable("kernels", "cpu", {}, (Section("All", (quiet,), cores),), ()))
    assert ("kept 0.9 cores busy" in shown) is warned


def test_a_second_run_is_compared_with_another_release(own_folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_cli(*QUICK)
    assert "nothing to compare with" in first.out
    (kept,) = own_folders.rglob("*-kernels.jsonl")
    entry: dict[str, Any] = json.loads(kept.read_text().strip())
    assert entry["time"] and entry.pop("version") == version("floe-chat")

    def faster(fields: dict[str, Any]) -> dict[str, Any]:
        rows = [row | {"ms": row["ms"] / 1e3, "of_floor": row["of_floor"] and 1e3} for row in fields["rows"]]
        return fields | {"rows": rows}

    old = entry | {"version": "0.0.9", "sections": [faster(section) for section in entry["sections"]]}
    with kept.open("a") as file:
        file.write(json.dumps(old) + "\n" + '{"version": "0.0')
    second = run_cli(*QUICK)
    assert any(line.startswith("regression: ") and "in 0.0.9" in line for line in second.out.splitlines())
    history = json.loads(second.out.splitlines()[-1])["history"]
    assert history["compared_with"] == "0.0.9" and history["regressions"]
    assert [json.loads(line)["version"] for line in kept.read_text().splitlines() if line.endswith("}")][-1] != "0.0.9"


def test_a_history_that_cannot_be_kept_is_no_failure(own_folders: Path) -> None:
    for parent in (own_folders / ".local" / "state", own_folders / "Library"):
        parent.parent.mkdir(parents=True, exist_ok=True)
        parent.write_text("a file where a folder should be")
    ran = run_cli(*QUICK, "--json")
    assert ran.code == 0 and "not saved" in ran.err and json.loads(ran.out)
