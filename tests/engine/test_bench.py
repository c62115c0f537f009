"""Benchmarks of kernels and of copies, and what is kept of runs: on tiny shapes, and clocks that are made up."""

from __future__ import annotations

import dataclasses
import json
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from floe_chat.engine.bench import history, transfer
from floe_chat.engine.bench.kernels import cpu, cpu_figures, gpu
from floe_chat.engine.bench.measure import Figure, ResultTable, Row, measure
from floe_chat.engine.machine import random_weights, read_floor
from floe_chat.engine.machine.hardware import machine_id
from floe_chat.engine.machine.load import Others
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.planning import rates
from floe_chat.kernels import backend, operations
from floe_chat.kernels.backend import Backend
from floe_chat.kernels.types import Calls
from floe_chat.kernels.weights import SignalWeights
from floe_chat.models.errors import FloeError

from .fake_cuda import FakeCuda

GB = 10**9


class Clock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float, nbytes: int = 0) -> Callable[[int], int]:
        """Work whose calls take these times in turn, the last one from then on."""
        times: Iterator[float] = iter(seconds)
        last = seconds[-1]

        def work(_turn: int) -> int:
            self.now += next(times, last)
            return nbytes

        return work


def named(rows: tuple[Row, ...], name: str) -> Row:
    return next(row for row in rows if row.name == name)


def test_medians_spread_and_rates_are_of_the_runs_after_the_warm_up() -> None:
    clock = Clock()
    work = clock.taking(50, 1, 2, 3, 4, 100, nbytes=6 * GB)
    (found,) = measure([Figure("a", work, inner=1)], warm=1, runs=5, clock=clock)
    assert (found.ms, found.runs, found.gb_s) == (3000, 5, 2)
    assert found.spread == pytest.approx((4 - 2) / 3) and found.noisy


def test_shares_and_ratios_are_taken_within_a_round() -> None:
    clock = Clock()
    # Each round is slower than the one before, for both alike.
    floor = Figure("floor", clock.taking(1, 2, 4, nbytes=GB), inner=1)
    slow = Figure("slow", clock.taking(2, 4, 8, nbytes=GB), floor="floor", peer="floor", inner=1)
    found = named(measure([floor, slow], warm=0, runs=3, clock=clock), "slow")
    assert (found.floor, found.of_floor, found.peer, found.speedup) == ("floor", 0.5, "floor", 0.5)


def test_a_run_is_the_mean_of_its_calls_and_every_call_gets_a_new_number() -> None:
    clock, turns = Clock(), list[int]()

    def work(turn: int) -> int:
        turns.append(turn)
        clock.now += 1 + turn % 2
        return 3 * GB

    (found,) = measure([Figure("a", work, tokens=6)], warm=1, runs=2, clock=clock)
    assert turns == list(range(12))
    assert (found.ms, found.gb_s, found.tokens_s, found.spread) == (1500, 2, 4, 0)


def test_what_is_slow_runs_once_and_is_compared_with_the_median() -> None:
    clock = Clock()
    slow = Figure("slow", clock.taking(10), once=True)
    fast = Figure("fast", clock.taking(99, 2, 5, 5), peer="slow", inner=1)
    rows = measure([slow, fast], warm=1, runs=3, clock=clock)
    assert (named(rows, "slow").runs, named(rows, "slow").spread, named(rows, "slow").noisy) == (1, None, False)
    assert named(rows, "fast").speedup == 2 and named(rows, "fast").gb_s is None


def test_caches_are_added_up_once_each(tmp_path: Path) -> None:
    for core, shared in enumerate(("0-1", "0-1", "2")):
        for index, (level, size) in enumerate([("1", "32K"), ("3", "1024K")]):
            folder = tmp_path / f"cpu{core}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, content in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(content + "\n")
    assert random_weights.last_level_cache(tmp_path) == 2 << 20
    assert random_weights.last_level_cache(tmp_path / "nothing") == random_weights.UNKNOWN_CACHE


@pytest.mark.parametrize(
    ("machine", "own", "cores"), [(8.0, 4.0, 1.0), (4.0, 4.0, 0.0), (3.9, 4.0, 0.0), (12.0, 0.0, 3.0)]
)
def test_what_other_programs_use_is_the_machines_time_without_our_own(machine: float, own: float, cores: float) -> None:
    now = {"machine": 100.0, "own": 10.0, "clock": 50.0}
    others = Others(lambda: now["machine"], lambda: now["own"], lambda: now["clock"])
    assert others.cores() == 0.0
    now = {"machine": 100.0 + machine, "own": 10.0 + own, "clock": 54.0}
    assert others.cores() == cores


@pytest.mark.parametrize(
    ("line", "huge"), [("FileHugePages:   2048 kB", True), ("FileHugePages: 0 kB", False), ("", False)]
)
def test_huge_pages_of_files_are_seen(tmp_path: Path, line: str, huge: bool) -> None:
    (tmp_path / "meminfo").write_text(f"MemTotal: 24 kB\n{line}\n")
    assert random_weights.files_in_hugepages(tmp_path / "meminfo") is huge
    assert not random_weights.files_in_hugepages(tmp_path / "nothing")


TINY = Shapes(128, 256, experts=4, tokens=3, cache=0)


def test_the_cpu_table_holds_what_was_asked_for() -> None:
    told: list[str] = []
    before = torch.get_num_threads()
    table = cpu.run(threads=1, runs=2, shapes=TINY, report=lambda what, _done, _total: told.append(what))
    assert torch.get_num_threads() == before
    assert (table.device, table.facts["threads"], table.facts["runs"], table.notes) == ("cpu", 1, 2, ())
    titles = [section.title for section in table.sections]
    assert len(set(titles)) == len(titles) and set(titles) <= set(told)
    ups = [found.name for found in table.sections[0].rows]
    assert all(f"{bits} bit, {kind} x" in ups for bits in (2, 3, 4, 8) for kind in ("float32", "bfloat16"))
    check_rows(table)


def test_what_is_timed_reads_every_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each timed up projection runs once more with weights of NaN: all its neurons are active, unless none was read."""
    checked: list[str] = []

    def wrap(name: str, neurons: Callable[[Any], int]) -> None:
        real = getattr(operations, name)

        def wrapped(x: torch.Tensor, up: SignalWeights, *given: object, **more: object) -> object:
            wide = dataclasses.replace(up.layout, vector=dataclasses.replace(up.layout.vector, short=False))
            bad = SignalWeights(wide, up.q, *torch.full((2, *up.scale.shape), torch.nan).half())
            calls = next(one for one in given if isinstance(one, Calls))
            if up.scale.numel():  # 16-bit weights have none
                assert neurons(real(x, bad, *given, **more)) == calls.experts.numel() * up.q.shape[1], name
                checked.append(name)
            return real(x, up, *given, **more)

        monkeypatch.setattr(operations, name, wrapped)

    wrap("signal_gemv", lambda found: found.neurons.numel())
    wrap("moe_step", lambda found: int(found[1][:, 0].sum()))
    cpu.run(threads=1, runs=1, shapes=Shapes(128, 128, experts=2, tokens=1, cache=0))
    assert {"signal_gemv", "moe_step"} <= set(checked)
    checked.clear()
    rates.up_rate(TINY, 2)
    assert checked


def test_a_step_counts_the_bytes_that_it_reads() -> None:
    """Two experts' up projections, and the rows of the neurons that its name says are active."""
    names = {figure.name: figure for figure in cpu_figures.step(TINY, 4, compiled=True)}
    for sparsity in (0.6, 0.8):
        active = 2 * round((1 - sparsity) * TINY.neurons)
        counted = names[f"{sparsity * 100:.0f} % sparse, float32 x"].work(0)
        assert abs(counted - 2 * TINY.up_bytes(2) - active * TINY.row_layout(4).nbytes) <= 4 * TINY.row_layout(4).nbytes


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Let plain torch compute."""
    plain = backend._reference("cpu", "plain torch, for a test")  # pyright: ignore[reportPrivateUsage]
    plain = dataclasses.replace(plain, name="reference")

    def choose(_device: str) -> Backend:
        return plain

    monkeypatch.setattr("floe_chat.kernels.operations.choose", choose)
    return plain


def test_without_compiled_kernels_there_are_fewer_figures_and_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = without_kernels(monkeypatch)
    table = cpu.run(threads=1, runs=2, shapes=TINY)
    assert table.facts["kernels"] == "reference" and table.facts["reason"] == plain.reason
    assert len(table.notes) == 1 and len(table.sections) == 3
    check_rows(table)


def check_rows(table: ResultTable) -> None:
    for section in table.sections:
        assert section.other_cores is not None and section.other_cores >= 0
        names = [found.name for found in section.rows]
        assert len(set(names)) == len(names), section.title
        for found in section.rows:
            assert found.ms > 0 and found.runs in (1, 2), found
            assert (found.floor is None) == (found.of_floor is None) and (found.peer is None) == (found.speedup is None)


def test_too_little_memory_is_refused_or_means_fewer_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """But never so few that a cache holds them."""

    def with_memory(available: int) -> None:
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=available, available=available))

    with_memory(GB // 10)
    with pytest.raises(FloeError, match="GB of free memory") as caught:
        cpu.run(threads=1, runs=1)
    assert "0.1 GB are available" in caught.value.cause and caught.value.hint
    without_kernels(monkeypatch)
    with_memory((300 << 20) + (4 << 20))
    many = Shapes(128, 256, experts=100, tokens=1, cache=0)
    assert any("fewer experts" in note for note in cpu.run(threads=1, runs=1, shapes=many).notes)
    with pytest.raises(FloeError, match="GB of free memory"):
        cpu.run(threads=1, runs=1, shapes=dataclasses.replace(many, cache=10 << 20))


class CountingWatch:
    """Calls the work a few times and makes up the seconds."""

    def seconds(self, work: Callable[[int], object], runs: int = 1, warm_up: int = 0) -> list[float]:
        for turn in range(2):
            work(turn)
        return [0.001] * runs


@pytest.mark.parametrize("quick", [False, True])
def test_the_gpu_table_on_another_device(quick: bool) -> None:
    shapes = Shapes(64, 32, experts=2)
    table = gpu.run(shapes=shapes, quick=quick, device="cpu", watch=CountingWatch())
    assert table.device == "cuda" and "H100" in "".join(table.notes)
    titles = [section.title for section in table.sections]
    assert [("up 16 bit" in title, "up 2 bit" in title) for title in titles[1:]] == (
        [(False, True)] if quick else [(True, False), (False, True)]
    )
    names = [found.name for found in table.sections[-1].rows]
    assert [name for name in names if "eager" in name] == [f"{s} % sparse, eager" for s in (0, 50, 60, 70, 80, 90)]
    assert all(found.of_floor is not None and found.peer for section in table.sections[1:] for found in section.rows)


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(x: torch.Tensor, *_arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(x), torch.zeros(1)

    monkeypatch.setattr("floe_chat.kernels.operations.moe_step", zeros)
    with pytest.raises(FloeError, match="wrong"):
        gpu.run(shapes=Shapes(64, 32, experts=2), quick=True, device="cpu", watch=CountingWatch())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpu_table_on_a_gpu() -> None:
    table = gpu.run(shapes=Shapes(256, 512, experts=2), quick=True)
    assert table.facts["gpu"] and any("graph" in found.name for section in table.sections for found in section.rows)


ROWS = Shapes(128, 400, cache=0)


@pytest.fixture
def small_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_floor, "LEAST", 1 << 16)
    monkeypatch.setattr("floe_chat.engine.machine.random_weights.last_level_cache", lambda: 1 << 10)


@pytest.mark.usefixtures("small_floor")
@pytest.mark.parametrize("quick", [False, True])
def test_packing_is_measured_by_chunk_and_copies_are_named_as_missing(quick: bool) -> None:
    table = transfer.run(threads=1, runs=1, quick=quick, shapes=ROWS, gpu=None, no_gpu="there is no card")
    titles = [section.title for section in table.sections]
    assert ["16-bit" in title for title in titles] == ([False] if quick else [False, True])
    for section in table.sections:
        names = [row.name for row in section.rows if row.name != read_floor.READ]
        chunks = ["5 neurons", "50 neurons"] if quick else ["1 neuron", *(f"{n} neurons" for n in (5, 10, 25, 50))]
        assert names == ["memcpy", "torch index_select", *chunks, "all at once"]
        assert all(row.peer == "torch index_select" for row in section.rows if "neuron" in row.name)
    assert table.device == "cpu" and table.facts["gpu"] == "none: there is no card"
    assert "not measured: there is no card" in table.notes[0] and "figure 7" in table.notes[1]


def test_the_figures_of_copies_work_on_another_device() -> None:
    rows = transfer.rows_of(ROWS, 4, 2)
    figures = transfer.copying(rows, [30, 80], "cpu") + transfer.in_place(rows, [30, 80], "cpu")
    names = [figure.name for figure in figures]
    assert names[:2] == [transfer.LINK, "torch index_select, copied"]
    assert names[2:5] == [f"30 neurons, {streams}" for streams in ("1 stream", "2 streams", "4 streams")]
    assert names[-2:] == ["30 neurons, in place", "all at once, in place"]
    assert all((figure.floor, figure.peer) == (transfer.LINK, transfer.NAIVE) for figure in figures[2:])
    assert {figure.work(1) for figure in figures[1:]} == {80 * rows.layout.nbytes}


def test_rows_are_pinned_while_they_are_read_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, rows = FakeCuda(monkeypatch), transfer.rows_of(ROWS, 4, 2).data
    with transfer.pinned(rows, "cpu") as obstacle:
        assert obstacle == "" and rows.is_pinned()
    assert not rows.is_pinned()
    cuda.refused = "operation not supported"
    with transfer.pinned(rows, "cpu") as obstacle:
        assert obstacle.endswith("operation not supported") and not rows.is_pinned()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_on_a_gpu() -> None:
    table = transfer.run(runs=1, quick=True, shapes=ROWS, gpu="cuda")
    names = [row.name for row in table.sections[1].rows]
    assert table.device == "cuda" and any("stream" in name for name in names)
    assert any("in place" in name for name in names) or "was not measured" in table.notes[0]


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
    now = entry("0.2.0", row("Balanced", 3.1))
    assert "than in 0.1.0" in history.compare(now, before).told()[0]
    old = entry("0.1.0", row("Balanced", 1.0))
    for other in (
        {**old, "version": "0.2.0"},
        *({**old, "facts": old["facts"] | facts} for facts in ({"threads": 1}, {"model": "demo"})),
        *(old | kind for kind in ({"device": "cuda"}, {"bench": "prefill"})),
    ):
        assert "nothing to compare" in history.compare(now, [other]).told()[0]


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
