"""Staged or in place, in chunks of how many rows: what decides, what is kept, what is said. No clock decides here."""

from __future__ import annotations

import contextlib
import json
import stat
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from floe_chat.engine.loader import load
from floe_chat.engine.machine.hardware import Hardware
from floe_chat.engine.offload.links import pinning, tuned_link
from floe_chat.engine.offload.links.link import Link, throttled_link
from floe_chat.engine.offload.links.pinning import PinError, Pinned
from floe_chat.engine.offload.links.transfer import Kind, Transfer, TransferMode
from floe_chat.engine.offload.links.tuned_link import CHUNKS, LinkEnds, Tuned, choose, measure, open_link
from floe_chat.engine.offload.offload import Parts
from floe_chat.kernels import operations as kernels
from floe_chat.models.errors import UsageError
from torch import Tensor

from ..helpers import run_cli
from .driver import answer, silent
from .fake_cuda import FakeCuda
from .moving import FAST, NBYTES, SLOTS, Sender, compute_with
from .offloading import needs_of

CPU = torch.device("cpu")
SLOW: dict[int, float] = {50: 1e9, 400: 2e9}
QUICK: dict[int, float] = {50: 2e9, 400: 4e9}
BOTH: tuple[Kind, ...] = ("staged", "in place")
TUNED = Tuned("cuda:0", 4608, SLOW, QUICK)


class Measuring:
    """Says what it is told to, and notes what it was asked."""

    def __init__(self, staged: dict[int, float] | Exception, in_place: dict[int, float] | Exception) -> None:
        self.asked: list[tuple[Kind, ...]] = []
        self._found: dict[Kind, dict[int, float] | Exception] = {"staged": staged, "in place": in_place}

    def __call__(self, kinds: Sequence[Kind]) -> dict[Kind, dict[int, float]]:
        self.asked.append(tuple(kinds))
        found: dict[Kind, dict[int, float]] = {}
        for kind in kinds:
            rates = self._found[kind]
            if isinstance(rates, Exception):
                raise rates
            found[kind] = rates
        return found


def no_measuring(_kinds: Sequence[Kind]) -> dict[Kind, dict[int, float]]:
    raise AssertionError("all of it was known")


NEW, BUSY = Tuned("cuda:0", 64), PinError("the driver refuses\nand more")


def test_a_larger_chunk_has_to_be_clearly_faster() -> None:
    assert replace(TUNED, staged={25: 1e9, 50: 1.98e9, 100: 2e9}).chunk("staged") == 50
    assert replace(TUNED, staged={25: 1e9, 50: 1.98e9, 100: 2.2e9}).rate("staged") == 2.2e9


@pytest.mark.parametrize(
    ("wanted", "known", "obstacle", "in_place", "kind", "asked", "why_not"),
    [
        ("auto", NEW, "", QUICK, "in place", [BOTH], ""),  # both at the same time
        ("auto", NEW, "", {50: 2.1e9}, "staged", [BOTH], ""),  # hardly faster
        ("auto", NEW, "no kernels", QUICK, "staged", [("staged",)], "no kernels"),
        ("auto", NEW, "", BUSY, "staged", [BOTH, ("staged",)], "the driver refuses"),
        ("auto", TUNED, "", QUICK, "in place", [], ""),
        ("auto", TUNED, "the moon is full", QUICK, "staged", [], "the moon is full"),
        ("auto", replace(TUNED, why_not="the moon is full"), "", QUICK, "in place", [], ""),  # it is no longer
        ("auto", replace(NEW, staged=SLOW), "", QUICK, "in place", [BOTH], ""),  # again: it may have been busier then
        ("staged", NEW, "", QUICK, "staged", [("staged",)], ""),
        ("staged", TUNED, "", QUICK, "staged", [], ""),
        ("in place", Tuned("cuda:0", 64, QUICK, SLOW), "", QUICK, "in place", [], ""),
    ],
)
def test_the_faster_kind_that_can_be_is_chosen(
    wanted: TransferMode,
    known: Tuned,
    obstacle: str,
    in_place: dict[int, float] | Exception,
    kind: Kind,
    asked: list[tuple[Kind, ...]],
    why_not: str,
) -> None:
    measuring = Measuring(SLOW, in_place)
    chosen, tuned = choose(wanted, known, obstacle, measuring)
    assert (chosen, measuring.asked, tuned.why_not) == (kind, asked, why_not)
    assert tuned.of(kind) == (known.of(kind) or (SLOW if kind == "staged" else in_place))
    assert not why_not or tuned.beside(kind) == f"not read in place, because {why_not}"
    assert why_not or choose(wanted, tuned, "", no_measuring) == (kind, tuned)


def test_who_insists_is_told() -> None:
    for known, obstacle, found in ((TUNED, "no kernels", QUICK), (NEW, "", PinError("no kernels"))):
        with pytest.raises(UsageError) as refused:
            choose("in place", known, obstacle, Measuring(SLOW, found))
        assert refused.value.cause == "No kernels." and "auto" in refused.value.hint
    with pytest.raises(ValueError, match="all is lost"):
        choose("auto", NEW, "", Measuring(ValueError("all is lost"), QUICK))


def test_it_is_kept_for_the_next_start(own_folders: Path) -> None:
    own = tuned_link.file_of("cuda:0", 4608)
    assert own.is_relative_to(own_folders) and own != tuned_link.file_of("cuda:1", 4608)
    assert Tuned.load(own) is None
    TUNED.save(own)
    assert Tuned.load(own) == TUNED and stat.S_IMODE(own.stat().st_mode) == 0o600
    own.write_text(own.read_text().replace('"400"', '"0"'))
    assert Tuned.load(own) is None
    TUNED.save(own)
    replace(TUNED, row_bytes=64).save(tuned_link.file_of("cuda:0", 64))
    assert {tuned.row_bytes for tuned in tuned_link.all_kept()} == {4608, 64}
    tuned_link.forget()
    assert list(tuned_link.all_kept()) == []


def test_every_kind_and_chunk_is_measured_and_closed(source: Tensor, target: Tensor) -> None:
    made: list[tuple[Kind, Link]] = []

    def make(kind: Kind, chunk: int) -> Link:
        made.append((kind, throttled_link(NBYTES, rate=1e9, latency=0.001, chunk=chunk)))
        return made[-1][1]

    found = measure(make, BOTH, source, target, sizes=(40, 400))
    assert {kind: sorted(rates) for kind, rates in found.items()} == {kind: [40, 400] for kind in BOTH}
    for rates in found.values():
        assert all(0 < rate <= SLOTS * NBYTES / (0.001 * SLOTS / chunk) for chunk, rate in rates.items())
    for _, link in made:
        with pytest.raises(RuntimeError, match="closed"):
            link.submit(Sender(source, target).make(1))


class Careless(Link):
    """It says that rows have landed, and leaves out the first."""

    def submit(self, transfer: Transfer) -> None:
        super().submit(replace(transfer, index=transfer.index[1:], slots=transfer.slots[1:]))
        transfer.target[transfer.slots[0]] = 0


def test_a_link_that_loses_bytes_is_not_used(source: Tensor, target: Tensor) -> None:
    with pytest.raises(RuntimeError, match="rows that were in place did not arrive"):
        measure(
            lambda _kind, chunk: Careless("throttled", "", NBYTES, rate=FAST, chunk=chunk), ["in place"], source, target
        )


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def rows() -> list[Tensor]:
    """Of three layers, E = 2 and F = 300, each in pages of its own."""
    size, page = 2 * 300 * NBYTES, pinning.mmap.PAGESIZE
    apart = -(-size // page) * page + 2 * page
    held = torch.randint(0, 256, (3 * apart,), dtype=torch.uint8)
    return [held[start : start + size].view(2, 300, NBYTES) for start in range(0, 3 * apart, apart)]


class Moving(Link):
    """RAM to RAM, named and closed as the link to a GPU is."""

    def __init__(self, kind: Kind, chunk: int, pinned: Pinned | None) -> None:
        self.zero_copy, self._pinned = kind == "in place", pinned
        super().__init__(
            "throttled", "cuda, read in place" if self.zero_copy else "cuda", NBYTES, chunk=chunk, rate=1e12
        )

    def close(self) -> None:
        super().close()
        if self._pinned is not None:
            self._pinned.release()


make = Moving


def moves(link: Link, rows: Sequence[Tensor], target: Tensor) -> bool:
    """Whether it moves the last layer's rows."""
    sender = Sender(rows[-1].view(-1, NBYTES), target)
    transfer = sender.make(90)
    link.submit(transfer)
    link.wait(transfer)
    link.drain()
    return sender.there(transfer)


@pytest.mark.parametrize("kind", BOTH)
def test_the_link_is_opened_as_it_was_kept(kind: Kind, cuda: FakeCuda, rows: list[Tensor], target: Tensor) -> None:
    known = Tuned("fake", NBYTES, SLOW, QUICK) if kind == "in place" else Tuned("fake", NBYTES, QUICK, SLOW)
    known.save(tuned_link.file_of("fake", NBYTES))
    link, opened, reached, how = open_link(LinkEnds("fake", "cpu", make, ""), "auto", rows)
    assert isinstance(link, Moving) and link.zero_copy == (kind == "in place") and link.chunk == 400
    assert opened == kind and reached == known.rate(kind)
    assert how == f"rows are {known.describe(kind)} ({known.beside(kind)})"
    assert all(part.is_pinned() for part in rows) == (kind == "in place")
    assert moves(link, rows, target)
    link.close()
    assert not cuda.registered and not any(part.is_pinned() for part in rows)


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("wanted", BOTH)
def test_the_link_is_measured_once(wanted: TransferMode, rows: list[Tensor], target: Tensor) -> None:
    ends = LinkEnds("fake", "cpu", make, "")
    link, opened, reached, how = open_link(ends, wanted, rows)
    kept = Tuned.load(tuned_link.file_of("fake", NBYTES))
    assert kept is not None and sorted(kept.staged) == list(CHUNKS) and reached == kept.rate(link_kind(link))
    assert sorted(kept.in_place) == (list(CHUNKS) if wanted == "in place" else [])
    assert link_kind(link) == opened == wanted and how.endswith("(asked for)")
    link.close()
    again, _, _, _ = open_link(ends, wanted, rows)
    assert again.chunk == link.chunk and moves(again, rows, target)
    again.close()


def link_kind(link: Link) -> Kind:
    return "in place" if link.name == "cuda, read in place" else "staged"


@pytest.mark.parametrize("after", [0, 1])
def test_a_driver_that_refuses_leaves_rows_staged(
    after: int, cuda: FakeCuda, rows: list[Tensor], target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda.refused, cuda.refused_after = "out of memory", after
    Tuned("fake", NBYTES, SLOW, QUICK).save(tuned_link.file_of("fake", NBYTES))
    link, opened, reached, how = open_link(LinkEnds("fake", "cpu", make, ""), "auto", rows)
    assert link_kind(link) == opened == "staged" and reached == 2e9 and not cuda.registered
    assert "not read in place, because" in how and how.endswith("cannot be pinned: out of memory)")
    assert moves(link, rows, target)
    link.close()
    with pytest.raises(UsageError) as refused:
        open_link(LinkEnds("fake", "cpu", make, ""), "in place", rows)
    assert "out of memory" in refused.value.cause and not cuda.registered
    monkeypatch.setattr(pinning.hardware, "lends_half", lambda: True)
    with pytest.raises(UsageError) as refused:
        open_link(LinkEnds("fake", "cpu", make, ""), "in place", rows)
    assert refused.value.cause.endswith("out of memory; Windows lends about half of the memory to GPUs.")


def test_nothing_stays_pinned_where_no_link_can_be(cuda: FakeCuda, rows: list[Tensor]) -> None:
    def none(_kind: Kind, _chunk: int, _pinned: Pinned | None) -> Link:
        raise RuntimeError("no memory")

    Tuned("fake", NBYTES, SLOW, QUICK).save(tuned_link.file_of("fake", NBYTES))
    with pytest.raises(RuntimeError, match="no memory"):
        open_link(LinkEnds("fake", "cpu", none, ""), "auto", rows)
    assert not cuda.registered


def test_pages_are_pinned_once(cuda: FakeCuda) -> None:
    size = pinning.mmap.PAGESIZE
    one = torch.zeros(8 * size, dtype=torch.uint8)
    start = -one.data_ptr() % size
    first, second, third = one[start + 64 : start + size], one[start + size : start + size + 64], one[-size:]
    third = one[start + 4 * size + 1 : start + 5 * size + 1]
    base = one.data_ptr() + start
    assert pinning.pages([third, second, first]) == [
        (base, base + size),
        (base + size, base + 2 * size),
        (base + 4 * size, base + 6 * size),
    ]
    assert pinning.pages([first, one[start : start + size + 1], first[:0]]) == [(base, base + 2 * size)]
    said: list[str] = []
    held = Pinned([first, second, third], CPU, said.append)
    assert sum(cuda.registered.values()) == 4 * size and cuda.flags == [9, 9, 9]
    assert len(said) == 3 and all(step.startswith("Pinning rows") for step in said)
    held.release()
    held.release()
    assert not cuda.registered
    # For reading alone, or the driver copies each page of a mapped file; where it cannot, as before.
    cuda.read_only, cuda.flags = False, []
    held = Pinned([first, second, third], CPU)
    assert len(cuda.registered) == 3 and cuda.flags == [9, 1, 1, 1]
    held.release()


@pytest.mark.gpu
def test_a_gpu_reads_pages_of_a_file_that_are_pinned(tmp_path: Path) -> None:
    """A private mapping, as packs are opened."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    whole = torch.randint(0, 256, (1 << 14, 256), dtype=torch.uint8)
    (tmp_path / "rows").write_bytes(whole.numpy().tobytes())
    rows = torch.from_file(str(tmp_path / "rows"), shared=False, size=whole.numel(), dtype=torch.uint8).view(-1, 256)
    held = Pinned([rows], torch.device("cuda:0"))
    try:
        assert rows.is_pinned()
        pool, slots = torch.zeros(whole.shape, dtype=torch.uint8, device="cuda"), torch.randperm(len(whole))
        kernels.pool_scatter(pool, slots.cuda(), rows)
        assert torch.equal(pool.cpu()[slots], whole)
    finally:
        held.release()
    assert not rows.is_pinned()


def test_what_speaks_against_reading_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pinning.why_not("cpu", 1) == ""
    assert "1048576.0 GB of rows would have to be pinned" in pinning.why_not("cpu", 1 << 50)
    probed = pinning.hardware.probe(Path())

    def probe(_folder: Path) -> Hardware:
        return replace(probed, ram_available=100, pinnable=50)

    monkeypatch.setattr(pinning.hardware, "probe", probe)
    assert pinning.why_not("cpu", 50) == "" and pinning.why_not("cpu", 51).endswith("may be")
    monkeypatch.setattr(pinning.hardware, "lends_half", lambda: True)
    assert pinning.why_not("cpu", 51).endswith("may be: Windows lends about half of the memory to GPUs")
    compute_with(replace(kernels.choose("cpu"), name="reference", reason="an old card"), monkeypatch)
    assert pinning.why_not("cpu", 1) == "only the Triton kernels read RAM: an old card"


@pytest.fixture
def opened(tiny_pack: Path) -> Callable[..., Any]:
    needs = needs_of(tiny_pack)

    def opening(device: str, transfer: TransferMode) -> Any:
        return load(tiny_pack, None, device, silent, vram=needs.least(), parts=Parts(transfer=transfer))

    return opening


def test_a_test_device_says_why_rows_are_staged(opened: Callable[..., Any]) -> None:
    loaded, told = opened("throttled:1gb", "auto")
    loaded.close()
    assert "rows are staged by the CPU" in told.reason
    assert "not read in place, because a test device has no GPU that could" in told.reason
    loaded, told = opened("throttled:1gb", "staged")
    loaded.close()
    assert told.reason.endswith("(asked for)")
    with pytest.raises(UsageError, match="in place") as refused:
        opened("throttled:1gb", "in place")
    assert refused.value.cause == "A test device has no GPU that could."


def test_a_virtual_card_counts_either_kind(opened: Callable[..., Any]) -> None:
    found: list[tuple[list[int], float]] = []
    for transfer in BOTH:
        loaded, told = opened("sim:rtx3060-12gb", transfer)
        assert f"rows are counted as {'staged' if transfer == 'staged' else 'read in place'}" in told.reason
        assert loaded.offload is not None
        peak = loaded.offload.link_peak()
        found.append((answer(loaded, [1, 40, 41], max_new_tokens=8).tokens, peak))
        loaded.close()
    assert found[0][0] == found[1][0] and found[0][1] < found[1][1]  # nothing is packed


def test_doctor_says_how_rows_come_to_the_gpu() -> None:
    assert "there is no GPU" in transfer_line(run_cli("doctor").out) or torch.cuda.is_available()
    TUNED.save(tuned_link.file_of("cuda:0", 4608))
    line = transfer_line(run_cli("doctor").out)
    assert "cuda:0, rows of 4,608 bytes" in line and "read in place by the GPU, 400 in a chunk: 4 GB/s" in line
    replace(TUNED, why_not="the RAM is full").save(tuned_link.file_of("cuda:0", 4608))
    assert "not read in place, because the RAM is full" in transfer_line(run_cli("doctor").out)
    assert json.loads(run_cli("doctor", "--json").out)["links"][0]["why_not"] == "the RAM is full"


def transfer_line(text: str) -> str:
    with contextlib.suppress(StopIteration):
        return next(line for line in text.splitlines() if line.startswith("  transfer"))
    return ""
