"""Measuring this machine: what is kept of it, and that a probe which fails is a reason. No figure is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import msgspec
import pytest
import torch
from floe_chat.engine.machine import disk, load, random_weights
from floe_chat.engine.machine.random_weights import Shapes
from floe_chat.engine.offload.lane_rates import Rates
from floe_chat.engine.planning import rates
from floe_chat.engine.planning.device_choice import GUESS
from floe_chat.engine.planning.rates import Measured
from floe_chat.kernels.layouts import RowLayout, VectorLayout

TINY = Shapes(256, 96, cache=0)
SOME = Measured({"memory read": 3e10, "rows 4 bit": 1.5e10}, {"disk read": "read-only"}, "2026-11-21T10:00:00", 0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a few kilobytes are enough to see that measuring works."""
    monkeypatch.setattr(random_weights, "last_level_cache", lambda: 0)
    monkeypatch.setattr(rates, "_LEAST", 1 << 16)


def test_disturbed_rates_are_not_relied_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rates, "kept_file", lambda: tmp_path / "rates.json")
    assert rates.reliable() is None
    SOME.save(rates.kept_file())
    assert rates.reliable() == SOME
    replace(SOME, busy=1.4).save(rates.kept_file())
    assert rates.reliable() is None and Measured.load(rates.kept_file()) is not None


def test_a_probe_that_fails_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails() -> dict[str, float]:
        raise RuntimeError("the driver is gone\nand more")

    def silent() -> dict[str, float]:
        raise MemoryError

    def probes(_folder: Path) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
        yield "one", lambda: {"one": 5.0}
        yield "two", fails
        yield "three", silent

    monkeypatch.setattr(rates, "_probes", probes)
    monkeypatch.setattr(load, "BUSY", 1e9)
    told: list[str] = []
    found = rates.measure(tmp_path, told.append)
    assert found.rates == {"one": 5.0} and found.reasons == {"two": "the driver is gone", "three": "MemoryError"}
    assert told == ["one", "two", "three"] and Measured.load(rates.kept_file()) == found


@pytest.mark.parametrize(
    ("busy", "last"), [([0.1, 1.4, 0.0, 0.0], 0.0), ([1.1, 0.3, 0.9, 1.2, 0.9, 0.1, 0.4, 0.0, 0.8], 0.8)]
)
def test_what_was_disturbed_is_measured_again(
    busy: list[float], last: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first probe of the first case is quiet, and so is the moment after them; in the second case it is disturbed
    to the end, and a quiet moment is waited for twice and comes once.
    """
    monkeypatch.setattr(rates, "_PATIENCE", 2)
    monkeypatch.setattr(rates, "_LISTENING", 0)
    found, left = iter((3.0, 7.0, 9.0, 8.0, 5.0)), iter(busy)
    monkeypatch.setattr(load.Others, "cores", lambda _others: next(left))  # pyright: ignore[reportUnknownLambdaType]
    each = [(name, lambda name=name: {name: next(found)}) for name in ("one", "two")]
    monkeypatch.setattr(rates, "_probes", lambda _folder: iter(each))  # pyright: ignore[reportUnknownLambdaType]
    told: list[str] = []
    measured = rates.measure(tmp_path, told.append)
    again = [line.partition(",")[0] for line in told[2:] if not line.startswith(rates.WAITING)]
    waited = [line.partition(": ")[2] for line in told if line.startswith(rates.WAITING)]
    assert waited == [f"other programs keep {cores} cores busy" for cores in ("0.9", "1.2", "0.4") if last]
    assert next(left, None) is None
    if last:
        assert again == ["one", "two", "one"] and measured.rates == {"one": 9.0, "two": 8.0}
    else:
        assert again == ["two"] and measured.rates == {"one": 3.0, "two": 9.0}
    assert measured.busy == last and measured.disturbed == bool(last)


def test_every_probe_of_this_machine_yields_its_rate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rates, "MIXTRAL", TINY)
    monkeypatch.setattr(load, "BUSY", 1e9)
    monkeypatch.setattr(rates, "_BATCH_NEURONS", 96)
    monkeypatch.setattr(rates, "read_rate", lambda folder: disk.read_rate(folder, most=1 << 24, seconds=0.05))  # pyright: ignore
    found = rates.measure(tmp_path, lambda _name: None)
    assert not found.reasons
    wanted = {"memory read", "disk read", "states", "prompt 4 bit", "dense 4 bit", "dense 8 bit"}
    assert wanted | {f"{what} {bits} bit" for what in ("up", "rows") for bits in (2, 3, 4)} <= set(found.rates)
    assert all(rate > 0 for rate in found.rates.values())
    read = (found.rates[name] for name in found.rates if name.startswith(("up", "rows", "dense")))
    assert found.rates["memory read"] >= max(read)  # since that much was read


@pytest.mark.parametrize(("gate", "down"), [(4, 4), (3, 4), (2, 8), (16, 16), (4, 16)])
def test_rates_to_begin_with_are_those_of_the_layout(gate: int, down: int) -> None:
    layout = RowLayout(VectorLayout(256, gate, 64), VectorLayout(256, down, 64), torch.bfloat16)
    found = rates.measured_rates(layout, 96, GUESS)
    assert msgspec.convert(asdict(found), Rates) == found
    changed = replace(GUESS, cpu_bytes_s=found.cpu_bytes_s, cpu_batch_bytes_s=found.cpu_batch_bytes_s)
    assert found == changed and found.cpu_bytes_s != GUESS.cpu_bytes_s


def test_rams_rate_is_the_saved_one_unless_other_programs_disturbed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_read", lambda: 1e9)
    file = rates.kept_file()
    for saved, want in ((None, 1e9), (SOME, 3e10), (replace(SOME, busy=9.0), 1e9), (Measured({"gpu": 2e11}), 1e9)):
        if saved is not None:
            saved.save(file)
        assert rates.memory_rate() == want
    file.unlink()


def test_copies_are_timed_without_a_gpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands for the device: what is tested is that the work is done, not its speed."""
    monkeypatch.setattr(rates, "_COPIED", 1 << 16)
    monkeypatch.setattr(rates, "_SQUARE", 16)
    for rate in (rates.link_rate("cpu", pinned=True), rates.link_rate("cpu", pinned=False), rates.gpu_rate("cpu")):
        assert rate > 0
    assert rates.gpu_flops("cpu") > 0
    assert rates.launch_rate("cpu", graph=False) > 0 < rates.launch_rate("cpu", graph=True)


class TestDisk:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        assert disk.read_rate(tmp_path / "not" / "there", most=1 << 25, seconds=0.05) > 0
        assert list(tmp_path.iterdir()) == []

    def test_a_disk_with_little_room_is_not_filled(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Usage:
            free = 1 << 26

        monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)  # pyright: ignore[reportUnknownLambdaType]
        with pytest.raises(OSError, match="too little free space"):
            disk.read_rate(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_where_the_cache_cannot_be_passed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr("os.O_DIRECT", raising=False)
        assert disk.read_rate(tmp_path, most=1 << 24, seconds=0.05) > 0

    def test_a_full_disk_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(_file: int, _room: int, _seconds: float) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(disk, "_write", full)
        with pytest.raises(OSError, match="No space"):
            disk.read_rate(tmp_path)
        assert list(tmp_path.iterdir()) == []
