"""The kernel benchmarks on tiny shapes: which figures there are, and what is refused. No test waits for a clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import torch
from floe_chat.engine.bench.kernels import cpu, cpu_figures, gpu
from floe_chat.engine.bench.measure import ResultTable
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.planning import rates
from floe_chat.kernels import backend, operations
from floe_chat.kernels.backend import Backend
from floe_chat.kernels.cpu import native
from floe_chat.kernels.types import Calls
from floe_chat.kernels.weights import SignalWeights
from floe_chat.models.errors import FloeError

TINY = Shapes(128, 256, experts=4, tokens=3, cache=0)
GB = 10**9


@pytest.fixture
def compiled() -> None:
    try:
        native.isa()
    except native.NativeUnavailableError as error:
        pytest.skip(str(error))  # no library, or none for this CPU


@pytest.mark.usefixtures("compiled")
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


@pytest.fixture
def with_worthless_weights(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each timed up projection runs once more with weights of NaN: all its neurons are active, unless none was read."""
    checked: list[str] = []

    def wrap(name: str, neurons: Callable[[object], int]) -> None:
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

    wrap("signal_gemv", lambda found: found.neurons.numel())  # type: ignore[attr-defined]
    wrap("moe_step", lambda found: int(found[1][:, 0].sum()))  # type: ignore[index]
    return checked


@pytest.mark.usefixtures("compiled")
def test_what_is_timed_reads_every_row(with_worthless_weights: list[str]) -> None:
    cpu.run(threads=1, runs=1, shapes=TINY)
    assert {"signal_gemv", "moe_step"} <= set(with_worthless_weights)
    with_worthless_weights.clear()
    rates.up_rate(TINY, 2)
    assert with_worthless_weights


@pytest.mark.usefixtures("compiled")
def test_a_step_counts_the_bytes_that_it_reads() -> None:
    """Two experts' up projections, and the rows of the neurons that its name says are active."""
    names = {figure.name: figure for figure in cpu_figures.step(TINY, 4, compiled=True)}
    for sparsity in (0.6, 0.8):
        active = 2 * round((1 - sparsity) * TINY.neurons)
        counted = names[f"{sparsity * 100:.0f} % sparse, float32 x"].work(0)
        assert abs(counted - 2 * TINY.up_bytes(2) - active * TINY.row_layout(4).nbytes) <= 4 * TINY.row_layout(4).nbytes


def without_kernels(monkeypatch: pytest.MonkeyPatch, name: str = "reference") -> Backend:
    """Let plain torch compute, whatever it is called."""
    plain = backend._reference("cpu", "plain torch, for a test")  # pyright: ignore[reportPrivateUsage]
    plain = dataclasses.replace(plain, name=name)

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


def with_memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=available, available=available))


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory(monkeypatch, GB // 10)
    with pytest.raises(FloeError, match="GB of free memory") as caught:
        cpu.run(threads=1, runs=1)
    assert "0.1 GB are available" in caught.value.cause and caught.value.hint


def test_short_memory_means_fewer_experts_but_never_so_few_that_a_cache_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_kernels(monkeypatch)
    with_memory(monkeypatch, (300 << 20) + (4 << 20))
    many = Shapes(128, 256, experts=100, tokens=1, cache=0)
    assert any("fewer experts" in note for note in cpu.run(threads=1, runs=1, shapes=many).notes)
    with pytest.raises(FloeError, match="GB of free memory"):
        cpu.run(threads=1, runs=1, shapes=Shapes(128, 256, experts=100, tokens=1, cache=10 << 20))


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
